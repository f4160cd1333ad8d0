"""Checks that need a GPU: python -m ci.gpu_check, or ci/gpu_check.sh, which also installs what it needs."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import environment, markdown, suites
from benchmarks.readme import RESULTS
from ci import repo
from ci.plan import GPU_CHECK_TARGETS, PTX_TARGETS

LOGS = repo.ROOT / ".build" / "gpu-check"
STEPS_FILE, SUMMARY_FILE = "steps.json", "summary.md"
PASSED, FAILED, COULD_NOT_RUN, NOT_RUN = "passed", "failed", "could not run", "not run"
# Of pytest, framed or not.
CLOSING_LINE = r"^=*\s*((?:\d+ \w+|no tests ran)\b.* in [\d.]+s.*?)\s*=*$"
SANITIZER_SUMMARY = {
    "memcheck": r"ERROR SUMMARY: 0 errors",
    "racecheck": r"RACECHECK SUMMARY: 0 hazards displayed \(0 errors, 0 warnings\)",
    "initcheck": r"ERROR SUMMARY: 0 errors",
}


class CouldNotRunError(Exception):
    """Something that the step needs is missing."""


class StepFailedError(Exception):
    pass


@dataclass(frozen=True)
class Context:
    results: Path
    log: Path


def kernel_names() -> list[str]:
    return [directory.name for directory in repo.kernel_dirs(repo.ROOT)]


def ptx_build(target: str, kernel: str) -> Path:
    """Where the build of a PTX target is: in the bundle, or as made here."""
    bundled = repo.ROOT / ".gpu-bundle" / "builds" / target / kernel
    return bundled if bundled.is_dir() else repo.ROOT / "dist" / target / kernel


def need_gpu() -> None:
    if not torch.cuda.is_available():
        raise CouldNotRunError(f"torch {torch.__version__} sees no CUDA device")


def call(context: Context, command: list[str], **variables: str) -> tuple[int, str]:
    """Exit status and output, which also goes to the step's log."""
    with context.log.open("a") as log:
        log.write(f"$ {' '.join(command)}  {variables or ''}\n")
        log.flush()
        start = log.tell()
        status = subprocess.run(
            command, cwd=repo.ROOT, env=os.environ | variables, stdout=log, stderr=log
        ).returncode
    with context.log.open(errors="replace") as log:
        log.seek(start)
        return status, log.read()


def builds(context: Context) -> str:
    """The builds that the next steps load: brought up to date in a checkout, else those of the bundle."""
    if (repo.ROOT / ".venv").is_dir():
        targets = [f"--target={target}" for target in GPU_CHECK_TARGETS]
        status, _ = call(context, [sys.executable, "-m", "ci.build", *targets])
        if status != 0:
            raise StepFailedError("ci.build failed, see the log")
        return "up to date"
    missing = [
        f"{kernel} {target}"
        for kernel in kernel_names()
        for target in GPU_CHECK_TARGETS
        if not is_built(kernel, target)
    ]
    if missing:
        raise CouldNotRunError(f"not in the bundle: {', '.join(missing)}")
    return "from the bundle"


def is_built(kernel: str, target: str) -> bool:
    if target in PTX_TARGETS:
        return any(ptx_build(target, kernel).glob("*/metadata.json"))
    backend = "cpu" if target == "cpu" else "cu"
    return any((repo.ROOT / "kernels" / kernel / "build").glob(f"*-{backend}*/metadata.json"))


def pytest(
    context: Context, arguments: list[str], prefix: list[str] = (), **variables: str
) -> tuple[str, str]:
    """The closing line and all output; raises unless tests ran and none failed."""
    command = [*prefix, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    status, output = call(context, command, **variables)
    closing = re.findall(CLOSING_LINE, output, re.M)
    line = closing[-1] if closing else f"pytest exited with status {status} and no closing line"
    if status != 0:
        raise StepFailedError(line)
    if " passed" not in line:
        raise CouldNotRunError(line)
    return line, output


def test_directories() -> list[str]:
    return [f"kernels/{name}/tests" for name in kernel_names()]


def native_tests(context: Context) -> str:
    need_gpu()
    return pytest(context, [*test_directories(), "tests/test_benchmarks.py", "-m", "gpu"])[0]


def ptx_tests(target: str) -> Callable[[Context], str]:
    """The code of an older architecture, compiled by the driver for this GPU."""

    def step(context: Context) -> str:
        need_gpu()
        arch = target.removeprefix("ptx")
        variables = {"WARPSMITH_ARCH": arch}
        for name in kernel_names():
            if not is_built(name, target):
                raise CouldNotRunError(f"{name} is not built for {target}")
            variables[f"{name.upper()}_TEST_BUILD"] = str(ptx_build(target, name))
            variables[f"{name.upper()}_TEST_ARCH"] = arch
        return pytest(context, [*test_directories(), "-m", "gpu"], **variables)[0]

    return step


def sanitizer(tool: str) -> Callable[[Context], str]:
    def step(context: Context) -> str:
        need_gpu()
        program = shutil.which(
            "compute-sanitizer", path=f"{os.environ['PATH']}:/usr/local/cuda/bin"
        )
        if program is None:
            raise CouldNotRunError("compute-sanitizer is not on PATH")
        lines = []
        for name in kernel_names():
            prefix = [program, "--tool", tool, "--error-exitcode", "86", "--print-limit", "20"]
            prefix += ["--kernel-name", f"kns={name}"]
            tests = [f"kernels/{name}/tests", "-m", "sanitizer and gpu"]
            # Without torch's cache every tensor is an allocation whose bounds the tool knows.
            line, output = pytest(context, tests, prefix, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
            if not re.search(SANITIZER_SUMMARY[tool], output):
                raise StepFailedError(f"{name}: no summary without errors in the log; {line}")
            lines.append(f"{name}: no errors, {line}")
        return "; ".join(lines)

    return step


def bench(kernel: str) -> Callable[[Context], str]:
    def step(context: Context) -> str:
        need_gpu()
        command = [sys.executable, "-m", "benchmarks", "run", kernel]
        status, output = call(context, [*command, "--results", str(context.results)])
        last_line = (output.strip().splitlines() or [""])[-1]
        if status != 0:
            raise StepFailedError(last_line)
        return last_line

    return step


STEPS: dict[str, Callable[[Context], str]] = {
    "builds": builds,
    "tests": native_tests,
    **{f"tests-{target}": ptx_tests(target) for target in PTX_TARGETS},
    **{tool: sanitizer(tool) for tool in SANITIZER_SUMMARY},
    **{f"bench-{kernel}": bench(kernel) for kernel in suites.NAMES},
}


def run_step(name: str, results: Path) -> dict:
    log = LOGS / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("")
    start = time.monotonic()
    try:
        result, detail = PASSED, STEPS[name](Context(results, log))
    except CouldNotRunError as error:
        result, detail = COULD_NOT_RUN, str(error)
    except StepFailedError as error:
        result, detail = FAILED, str(error)
    return {"result": result, "seconds": round(time.monotonic() - start), "detail": detail}


HEADER = ["step", "result", "s", ""]


def table_rows(done: dict[str, dict]) -> list[list[str]]:
    not_run = {"result": NOT_RUN, "seconds": "", "detail": ""}
    steps = {name: done.get(name, not_run) for name in STEPS}
    return [[name, s["result"], str(s["seconds"]), s["detail"]] for name, s in steps.items()]


def summary(where: dict, device: str, rows: list[list[str]]) -> str:
    cells = [[cell.replace("|", "/") for cell in row] for row in rows]
    lines = [f"# GPU check on {where['device']}", "", markdown.environment_line(device, where), ""]
    return "\n".join([*lines, *markdown.table(HEADER, cells)]) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="ci/gpu_check.sh", description=__doc__)
    parser.add_argument(
        "steps", nargs="*", metavar="STEP", help=f"of: {', '.join(STEPS)}; default all"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="default benchmarks/results")
    arguments = parser.parse_args(argv)
    unknown = set(arguments.steps) - set(STEPS)
    if unknown:
        parser.error(f"STEP: must be of {', '.join(STEPS)}, got {', '.join(sorted(unknown))}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    where = environment.collect(device)
    folder = arguments.results.resolve() / environment.folder_name(where)
    folder.mkdir(parents=True, exist_ok=True)
    record = folder / STEPS_FILE
    # Steps run in several calls for one commit and day make one summary.
    known = record.is_file() and not where["commit"].endswith("-dirty")
    done = json.loads(record.read_text()) if known else {}
    console = Console()
    for name in arguments.steps or STEPS:
        console.print(f"{name} ...", highlight=False)
        done[name] = run_step(name, arguments.results.resolve())
        record.write_text(json.dumps(done, indent=1) + "\n")
        rows = table_rows(done)
        (folder / SUMMARY_FILE).write_text(summary(where, device, rows))
    table = Table(*HEADER, box=box.SIMPLE)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    print(f"results: {folder}\nlogs: {LOGS}")
    return 0 if all(result == PASSED for _, result, *_ in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
