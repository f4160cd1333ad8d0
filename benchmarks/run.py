"""Measures the cases of a kernel: every provider is checked against float64 first, then all are timed
in turn."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import warpsmith

from . import ceilings, environment, markdown, plot, timing
from .case import Case, Provider
from .report import FAILED, MISSING, OK, WRONG, CaseResult, Report, Row

CPU_SLICES = 15
CPU_SPAN = timing.CPU_SPAN


class DeviceLost(RuntimeError):
    """A provider left the GPU in a state in which nothing more can be measured."""


def run(kernel: str, device: str, results: Path, only: str | None = None) -> Report:
    """Writes <results>/<device name>/<date>-<commit>/<kernel>.{json,md,png}; the JSON after every case."""
    suite = importlib.import_module(f".suites.{kernel}", __package__)
    cases = [
        case for case in suite.cases(device) if only is None or only in f"{case.group} {case.name}"
    ]
    if not cases:
        raise ValueError(f"--only: no case of {kernel} contains {only!r}")
    report = Report(kernel, device, environment.collect(device), build=build_of(kernel))
    folder = results / environment.folder_name(report.environment)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with torch.no_grad(), Progress(*columns) as progress:
        task = progress.add_task("ceilings", total=sum(len(case.providers) + 1 for case in cases))
        report.ceilings = ceilings.measure(device)
        for case in cases:

            def step(what: str, case: Case = case) -> None:
                progress.update(task, description=f"{kernel}: {case.group}, {case.name}: {what}")
                progress.advance(task)

            report.cases.append(measure(case, device, step))
            report.save(folder / f"{kernel}.json")
            summarise(progress.console.print, report.cases[-1])
    (folder / f"{kernel}.md").write_text(markdown.full(report))
    plot.fractions(report, folder / f"{kernel}.png")
    return report


def build_of(kernel: str) -> str | None:
    """The operator namespace of our kernel, which names the commit it was built from."""
    from warpsmith import pins

    if kernel not in pins.known_kernels():
        return None
    return warpsmith.load(kernel)._ops.ops.name


def summarise(print_line: Callable, case: CaseResult) -> None:
    times = ", ".join(f"{row.provider} {row.timing.us:.2f}" for row in case.timed())
    troubles = "".join(
        f"\n  {row.provider}: {row.status} {row.note}" for row in case.rows if row.status != OK
    )
    print_line(
        f"{case.group}, {case.name}: copy {case.copy.us:.2f}, {times} us{troubles}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def measure(case: Case, device: str, step: Callable[[str], None]) -> CaseResult:
    span = timing.gpu_span() if device == "cuda" else CPU_SPAN
    count = timing.count_sets(case.num_bytes, span, *case.sets)
    input_sets = [case.make_inputs() for _ in range(count)]
    reference = case.reference(*input_sets[0])
    rows, timers, hosts = [], dict(ceilings.copy_timers(case.num_bytes, device)), {}
    copies = list(timers)
    for provider in case.providers:
        step(provider.name)
        row, function, own_sets = check(case, provider, input_sets, reference, device)
        rows.append(row)
        if row.status != OK:
            continue
        try:
            timers[provider.name] = make_timer(function, own_sets, device)
        except Exception as error:
            row.status, row.note = FAILED, describe(error)
            ensure_device(device)
            continue
        hosts[provider.name] = (function, own_sets[0])
    step("timing")
    slices = 1 if device == "cuda" else CPU_SLICES
    times = timing.interleave(timers, budget_ms=case.budget_ms, slices=slices)
    result = CaseResult(
        group=case.group,
        name=case.name,
        num_bytes=case.num_bytes,
        flops=case.flops,
        copy=min((times[name] for name in copies), key=lambda time: time.us),
        rows=rows,
    )
    del timers
    for row in rows:
        row.timing = times.get(row.provider)
    if case.host_time:
        x = torch.zeros(16, device=device)
        hosts |= {"relu": (torch.relu, (x,)), "empty_like": (torch.empty_like, (x,))}
        host_us = timing.host_times(hosts)
        result.host_reference_us = host_us["relu"] + host_us["empty_like"]
        for row in rows:
            row.host_us = host_us.get(row.provider)
    del hosts, input_sets, reference
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return result


def check(
    case: Case, provider: Provider, input_sets: list[tuple], reference: torch.Tensor, device: str
) -> tuple[Row, Callable | None, list[tuple]]:
    """The row without times, the function, and the input sets it is to be timed with: copies where it
    writes to its inputs."""
    row = Row(provider.name, provider.kind, OK)
    try:
        function = provider.load()
    except ImportError as error:
        row.status, row.note = MISSING, describe(error)
        return row, None, []
    try:
        first = clone(input_sets[0])
        own = first if provider.prepare is None else provider.prepare(first)
        before = clone(own)
        output = case.select(provider.result(function(*own)))
        row.difference = case.difference(output, reference)
        writes_inputs = not all(map(same, own, before))
        if provider.prepare is not None:
            own_sets = [provider.prepare(inputs) for inputs in input_sets]
        else:
            own_sets = [clone(inputs) for inputs in input_sets] if writes_inputs else input_sets
    except Exception as error:
        row.status, row.note = FAILED, describe(error)
        ensure_device(device)
        return row, None, []
    if not row.difference <= case.tolerance:
        row.status = WRONG
        row.note = f"differs from float64 by {row.difference:.2g}, allowed {case.tolerance:.2g}"
    return row, function, own_sets


def clone(inputs: tuple) -> tuple:
    """Of tensors (strides kept) and arrays."""
    return tuple(x.clone() if isinstance(x, torch.Tensor) else x.copy() for x in inputs)


def same(a: object, b: object) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool((a == b).all())


def make_timer(
    function: Callable, input_sets: list[tuple], device: str
) -> timing.GraphTimer | timing.CpuTimer:
    if device == "cpu":
        return timing.CpuTimer(function, input_sets)
    try:
        return timing.GraphTimer(function, input_sets)
    except Exception:
        ensure_device(device)
        return timing.EventTimer(function, input_sets)


def ensure_device(device: str) -> None:
    """After an error: kernels that failed on the GPU fail every later call too."""
    if device == "cuda":
        try:
            torch.cuda.synchronize()
        except Exception as error:
            raise DeviceLost(describe(error)) from error


def describe(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]
