"""Builds the kernels as kernel-builder does, without Nix: python -m ci.build --help"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import cmake
import ninja
from rich import box
from rich.console import Console
from rich.table import Table

from ci import artifact, repo, sync_shared
from ci.buildtoml import BuildTomlError, Kernel, find_problems, read, untracked
from ci.plan import (
    DEFAULT_TARGETS,
    TARGETS,
    Plan,
    PlanError,
    host_sources,
    host_to_cmake,
    make_plan,
    to_cmake,
)
from ci.toolchain import Cuda, ToolchainError, find_cuda

CMAKE_PROJECT = Path(__file__).resolve().parent / "cmake"
TORCH_DIR = Path(find_spec("torch").origin).parent
HEADINGS = (
    "kernel", "target", "variant", "seconds", "KiB", "registers", "spill B", "stack B",
    "abi3", "manylinux", "undefined", "loads", "result",
)  # fmt: skip


class UnitError(Exception):
    """A unit that cannot be built; the message is for the user."""


@dataclass
class Row:
    kernel: str
    target: str
    variant: str = "-"
    seconds: float = 0.0
    report: artifact.Report | None = None
    error: str = ""

    @property
    def ok(self) -> bool:
        return self.report is not None and not self.report.problems and not self.error


@dataclass(frozen=True)
class Job:
    """What is common to all units of one run."""

    root: Path
    out: Path | None
    build_id: str | None
    cuda: Cuda | None
    cuda_reason: str
    console: Console

    def output(self, kernel: Kernel, target: str) -> Path:
        if self.out:
            return self.out / target / kernel.name
        if target in ("cpu", "release"):
            return kernel.directory / "build"
        return self.root / "dist" / target / kernel.name


def run_tool(command: list[str | Path], live: bool) -> None:
    """Run cmake or ninja: live on a terminal, otherwise the output shows only on failure."""
    result = subprocess.run(
        [*map(str, command)],
        stdout=None if live else subprocess.PIPE,
        stderr=None if live else subprocess.STDOUT,
        text=True,
    )
    if result.returncode:
        raise UnitError(
            (result.stdout or "").strip() or f"{Path(command[0]).name} failed, see above"
        )


def write_if_changed(path: Path, text: str) -> None:
    if not path.is_file() or path.read_text() != text:
        path.write_text(text)


def drop_foreign_tree(tree: Path) -> None:
    """Remove what CMake made before the checkout was moved or copied here."""
    cache = tree / "CMakeCache.txt"
    if cache.is_file() and f"CMAKE_CACHEFILE_DIR:INTERNAL={tree}\n" not in cache.read_text():
        for path in tree.iterdir():
            if path.name != "lock":
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def run_cmake(tree: Path, values: str, live: bool) -> None:
    """Configure `tree` if need be and bring it up to date."""
    tree.mkdir(parents=True, exist_ok=True)
    drop_foreign_tree(tree)
    write_if_changed(tree / "plan.cmake", values)
    ninja_bin = Path(ninja.BIN_DIR) / "ninja"
    if not (tree / "build.ninja").is_file():
        cmake_bin = Path(cmake.CMAKE_BIN_DIR) / "cmake"
        options = [f"-DCMAKE_MAKE_PROGRAM={ninja_bin}", "-DCMAKE_BUILD_TYPE=Release"]
        run_tool([cmake_bin, "-S", CMAKE_PROJECT, "-B", tree, "-G", "Ninja", *options], live=False)
    # ninja configures again by itself when plan.cmake has changed.
    jobs = f"-j{len(os.sched_getaffinity(0))}"
    run_tool([ninja_bin, "-C", tree, jobs, "-k0", *([] if live else ["--quiet"])], live)


def compile_host_objects(plan: Plan, tree: Path, live: bool) -> list[str]:
    """Objects that all CUDA targets of a kernel link, compiled once."""
    if not host_sources(plan):
        return []
    tree.mkdir(parents=True, exist_ok=True)
    with (tree / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run_cmake(tree, host_to_cmake(plan, TORCH_DIR), live)
    return (tree / "objects.txt").read_text().split(";")


def compile_library(plan: Plan, tree: Path, live: bool) -> Path:
    objects = compile_host_objects(plan, tree.with_name("cuda-host"), live)
    run_cmake(tree, to_cmake(plan, TORCH_DIR, objects), live)
    library = tree / f"{plan.module}.abi3.so"
    for stale in tree.glob("_*.abi3.so"):
        if stale != library:
            stale.unlink()
    return library


def unit_key(plan: Plan, library: Path, revision, allowed: list[dict]) -> str:
    """Changes whenever the build directory or the checks on it would come out differently."""
    digest = hashlib.sha256()
    own = sorted(Path(__file__).parent.glob("*.py"))
    package = [plan.kernel.package / name for name in plan.kernel.package_files()]
    for path in (library, *own, *package, plan.kernel.directory / "build.toml"):
        digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    digest.update(repr((plan.module, plan.archs, revision, allowed, package)).encode())
    return digest.hexdigest()


def build_unit(job: Job, kernel: Kernel, target: str, row: Row) -> None:
    revision = repo.kernel_revision(kernel.directory)
    if target != "cpu" and job.cuda is None:
        raise UnitError(f"no usable CUDA compiler: {job.cuda_reason}")
    plan = make_plan(kernel, target, job.cuda, job.build_id or repo.local_id(revision))
    row.variant = plan.variant
    tree = job.root / ".build" / kernel.name / target
    tree.mkdir(parents=True, exist_ok=True)
    with (tree / "lock").open("w") as lock:  # `make -j` may ask for one unit twice
        fcntl.flock(lock, fcntl.LOCK_EX)
        row.report = finish_unit(job, plan, tree, revision)


def finish_unit(
    job: Job, plan: Plan, tree: Path, revision: tuple[str, bool] | None
) -> artifact.Report:
    out = job.output(plan.kernel, plan.target) / plan.variant
    library = compile_library(plan, tree, live=job.console.is_terminal)

    allowed = artifact.allowed_spills(job.root / "ci" / "allowed_spills.toml")
    stamp = tree / "unit.json"
    key = unit_key(plan, library, revision, allowed)
    known = json.loads(stamp.read_text()) if stamp.is_file() else {}
    if known.get("key") == [key, str(out)] and artifact.is_intact(out):
        return artifact.Report(**known["report"])
    logs = [tree / "cuda" / f"{source.path}.o.log" for source in plan.sources if source.is_cuda]
    stand_in = tree / "libtorch_cuda.so" if plan.cuda else None
    report = artifact.examine(plan, library, logs, stand_in, TORCH_DIR / "lib", allowed)
    if not report.problems:
        artifact.assemble(plan, library, revision, out)
        if plan.backend == "cpu":
            report.problems = artifact.load_problems(out, dirty=bool(revision and revision[1]))
            report.loads = "no" if report.problems else "yes"
    if not report.problems:
        stamp.write_text(json.dumps({"key": [key, str(out)], "report": report.as_dict()}))
    return report


def build_all(job: Job, directories: list[Path], targets: list[str], strict: bool) -> list[Row]:
    rows = []
    total, number = len(directories) * len(targets), 0
    for directory in directories:
        error, kernel = "", None
        try:
            kernel = read(directory)
            problems, loose = find_problems(kernel), untracked(kernel)
            problems += loose if strict else []
            error = "\n".join(problems)
            if loose and not strict:
                more = f" and {len(loose) - 1} more" if len(loose) > 1 else ""
                job.console.print(f"warning: {directory.name}: {loose[0]}{more}", markup=False)
        except BuildTomlError as invalid:
            error = "\n".join(invalid.problems)
        for target in targets:
            number += 1
            row = Row(directory.name, target, error=error)
            rows.append(row)
            job.console.print(f"[{number}/{total}] {directory.name} {target} ...", markup=False)
            start = time.monotonic()
            if not error:
                try:
                    build_unit(job, kernel, target, row)
                except (
                    UnitError,
                    PlanError,
                    OSError,
                    ValueError,
                    subprocess.CalledProcessError,
                ) as failure:
                    row.error = str(failure)
            row.seconds = time.monotonic() - start
            if not row.ok:
                show_failure(job.console, row)
    return rows


def show_failure(console: Console, row: Row) -> None:
    lines = [row.error] if row.error else row.report.problems
    console.print(f"{row.kernel} {row.target} failed:", style="red", markup=False)
    console.print("\n".join(lines), markup=False, soft_wrap=True)


def show_table(console: Console, rows: list[Row]) -> None:
    table = Table(
        title="local builds, not for publishing", box=box.SIMPLE_HEAD, title_justify="left"
    )
    for heading in HEADINGS:
        table.add_column(
            heading, no_wrap=True, justify="left" if heading in HEADINGS[:3] else "right"
        )
    for row in rows:
        report = row.report
        cells = ["-"] * 8
        if report:
            numbers = (report.registers, report.spill_bytes, report.stack_bytes)
            sizes = ["-" if number is None else str(number) for number in numbers]
            cells = [f"{report.size / 1024:.0f}", *sizes]
            cells += [report.python_abi, report.manylinux, str(report.undefined), report.loads]
        table.add_row(
            row.kernel,
            row.target,
            row.variant,
            f"{row.seconds:.1f}",
            *cells,
            "ok" if row.ok else "FAILED",
        )
    console.print(table)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m ci.build", description=__doc__)
    parser.add_argument(
        "--kernel", action="append", help="default: every directory of kernels/ with a build.toml"
    )
    parser.add_argument(
        "--target", action="append", choices=TARGETS, help=f"default: {', '.join(DEFAULT_TARGETS)}"
    )
    parser.add_argument(
        "--id", help="suffix of the module's name; default: the kernel's git revision"
    )
    parser.add_argument("--root", type=Path, default=repo.ROOT, help="the checkout")
    parser.add_argument(
        "--out", type=Path, help="put the variants under OUT/<target>/<kernel>/ instead"
    )
    parser.add_argument(
        "--strict", action="store_true", help="files that git does not track are an error"
    )
    arguments = parser.parse_args(argv)
    if arguments.id and not arguments.id.isidentifier():
        parser.error("--id must consist of letters, digits and underscores")
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    root = arguments.root.resolve()
    console = Console(highlight=False)
    console.width = max(console.width, 170)  # the table is of more use than its looks
    directories = repo.kernel_dirs(root)
    if arguments.kernel:
        unknown = set(arguments.kernel) - {directory.name for directory in directories}
        if unknown:
            print(f"no such kernel: {', '.join(sorted(unknown))}", file=sys.stderr)
            return 2
        directories = [directory for directory in directories if directory.name in arguments.kernel]
    targets = arguments.target or list(DEFAULT_TARGETS)
    cuda, reason = None, ""
    if set(targets) != {"cpu"}:
        try:
            cuda = find_cuda()
            console.print(f"nvcc {cuda.version[0]}.{cuda.version[1]}: {cuda.nvcc}")
        except ToolchainError as error:
            reason = str(error)
    out = arguments.out.resolve() if arguments.out else None
    job = Job(root, out, arguments.id, cuda, reason, console)
    for problem in sync_shared.sync(root, write=False):
        console.print(f"warning: {problem}", markup=False)
    rows = build_all(job, directories, targets, arguments.strict)
    show_table(console, rows)
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
