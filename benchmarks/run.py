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
from warpsmith import pins

from . import ceilings, environment, markdown, plot, timing
from .case import Case, Provider
from .report import FAILED, MISSING, OK, WRONG, CaseResult, Report, Row

CPU_SLICES = 15


class DeviceLostError(RuntimeError):
    """A provider left the process in a state in which nothing more can be measured."""


def run(kernel: str, device: str, results: Path, only: str | None = None) -> Report:
    """Writes <results>/<device name>/<date>-<commit>/<kernel>.{json,md,png}, the JSON after every case;
    <kernel>-partial where `only` leaves cases out."""
    suite = importlib.import_module(f".suites.{kernel}", __package__)
    cases = [
        case for case in suite.cases(device) if only is None or only in f"{case.group} {case.name}"
    ]
    if not cases:
        raise ValueError(f"--only: no case of {kernel} contains {only!r}")
    report = Report(kernel, device, environment.collect(device), build=build_of(kernel))
    name = kernel if only is None else f"{kernel}-partial"
    path = results / environment.folder_name(report.environment) / f"{name}.json"
    report.save(path)
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
            if device == "cuda":
                gc.collect()
                torch.cuda.empty_cache()
            report.save(path)
            summarise(progress.console.print, report.cases[-1])
    path.with_suffix(".md").write_text(markdown.full(report))
    plot.fractions(report, path.with_suffix(".png"))
    return report


def build_of(kernel: str) -> str | None:
    """The operator namespace of our kernel, which names the commit it was built from."""
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
    # The providers of another shape compile nothing that would serve here.
    torch._dynamo.reset()
    span = timing.gpu_span() if device == "cuda" else timing.CPU_SPAN
    count = timing.count_sets(case.num_bytes, span, *case.sets)
    input_sets = [case.make_inputs() for _ in range(count)]
    reference = case.reference(*input_sets[0])
    rows, timers, hosts = [], dict(ceilings.copy_timers(case.num_bytes, count, device)), {}
    copies = list(timers)
    for index, provider in enumerate(case.providers):
        step(provider.name)
        row = Row(provider.name, provider.kind, OK)
        rows.append(row)
        try:
            function = provider.load()
            own_sets = check(case, provider, function, input_sets, reference, row)
            if row.status == OK:
                start = index * count // len(case.providers)
                timer = make_timer(function, own_sets, device, start)
                check_replay(case, provider, timer, input_sets[0], reference, row)
            if row.status == OK:
                timers[provider.name] = timer
                hosts[provider.name] = (function, own_sets[0])
        except ImportError as error:
            row.status, row.note = MISSING, describe(error)
        except Exception as error:
            row.status, row.note = FAILED, describe(error)
            ensure_usable(device)
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
        in_readme=case.in_readme,
    )
    for row in rows:
        row.timing = times.get(row.provider)
    if case.host_time:
        x = torch.zeros(16, device=device)
        hosts |= {"relu": (torch.relu, (x,)), "empty_like": (torch.empty_like, (x,))}
        host_us = timing.host_times(hosts)
        result.host_reference_us = host_us["relu"] + host_us["empty_like"]
        for row in rows:
            row.host_us = host_us.get(row.provider)
    return result


def check(
    case: Case,
    provider: Provider,
    function: Callable,
    input_sets: list[tuple],
    reference: torch.Tensor | tuple,
    row: Row,
) -> list[tuple]:
    """Fills in the row, and returns the input sets that the function is to be timed with: copies where
    it writes to its inputs."""
    own = provider.prepare(clone(input_sets[0]))
    before = clone(own)
    compare(case, provider, function(*own), input_sets[0], reference, row)
    row.writes_inputs = not all(map(same, own, before))
    if row.writes_inputs:
        return [provider.prepare(clone(inputs)) for inputs in input_sets]
    return [provider.prepare(inputs) for inputs in input_sets]


def check_replay(
    case: Case,
    provider: Provider,
    timer: timing.GraphTimer | timing.CpuTimer,
    inputs: tuple,
    reference: torch.Tensor | tuple,
    row: Row,
) -> None:
    """That a graph computes what the call did: launches on a stream of its own would not be in it."""
    if timer.how != "graph":
        return
    output = timer.outputs[0]
    for tensor in as_tuple(output):
        tensor.view(torch.uint8).fill_(0xFF)  # NaN, or white
    if row.writes_inputs:  # calls before have changed them, and outputs may be the same tensors
        for own, fresh in zip(timer.input_sets[0], provider.prepare(clone(inputs))):
            own.copy_(fresh)
    timer.graph.replay()
    compare(case, provider, output, inputs, reference, row)


def compare(
    case: Case,
    provider: Provider,
    output: object,
    inputs: tuple,
    reference: torch.Tensor | tuple,
    row: Row,
) -> None:
    output = provider.result(output)
    dtype = inputs[0].dtype
    for tensor in as_tuple(output):
        if tensor.dtype != dtype:
            row.status, row.note = WRONG, f"gives {tensor.dtype} for {dtype}"
            return
    outputs, references = as_tuple(case.select(output)), as_tuple(reference)
    shapes, expected = shapes_of(outputs), shapes_of(references)
    if shapes != expected:
        row.status, row.note = WRONG, f"gives shape {shapes}, not {expected}"
        return
    differences = list(map(case.difference, outputs, references))
    row.difference = max(differences)
    if not all(difference <= case.tolerance for difference in differences):
        row.status = WRONG
        row.note = f"differs from float64 by {row.difference:.2g}, allowed {case.tolerance:.2g}"


def as_tuple(output: object) -> tuple:
    return output if isinstance(output, tuple) else (output,)


def shapes_of(tensors: tuple) -> str:
    return " and ".join(str(tuple(tensor.shape)) for tensor in tensors)


def clone(inputs: tuple) -> tuple:
    """Of tensors (strides kept) and arrays."""
    return tuple(x.clone() if isinstance(x, torch.Tensor) else x.copy() for x in inputs)


def same(a: object, b: object) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool((a == b).all())


def make_timer(
    function: Callable, input_sets: list[tuple], device: str, start: int
) -> timing.GraphTimer | timing.CpuTimer:
    if device == "cpu":
        return timing.CpuTimer(function, input_sets, start)
    return timing.GraphTimer(function, input_sets)


def ensure_usable(device: str) -> None:
    """After an error: kernels that failed make every later call fail, and a capture that failed can
    leave torch's allocator in the middle of it."""
    if device == "cuda":
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except Exception as error:
            raise DeviceLostError(describe(error)) from error


def describe(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]
