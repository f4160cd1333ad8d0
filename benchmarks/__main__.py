"""Command line: python -m benchmarks run|render|readme|diff|environment"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from . import diff, environment, markdown, readme, report, suites
from .case import OURS


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    measure = commands.add_parser("run", help="measure a kernel and write its results")
    measure.set_defaults(handler=run_kernel)
    measure.add_argument("kernel", choices=suites.NAMES)
    measure.add_argument("--cpu", action="store_true", help="on the CPU, GPU or not")
    measure.add_argument("--only", metavar="TEXT", help="shapes whose group and name contain it")
    measure.add_argument("--results", type=Path, default=readme.RESULTS)
    again = commands.add_parser("render", help="write the Markdown and the plot of results again")
    again.set_defaults(handler=render)
    again.add_argument("file", type=Path, nargs="+")
    write = commands.add_parser("readme", help="write README.md's section from published results")
    write.set_defaults(handler=write_readme)
    write.add_argument("--check", action="store_true", help="fail if it would change")
    compare = commands.add_parser("diff", help="compare two results of one kernel")
    compare.set_defaults(handler=print_difference)
    compare.add_argument("old", type=Path)
    compare.add_argument("new", type=Path)
    compare.add_argument("--limit", type=float, default=0.1, help="mark times further apart")
    where = commands.add_parser("environment", help="print what results record of this machine")
    where.set_defaults(handler=print_environment)
    where.add_argument("--cpu", action="store_true")
    arguments = parser.parse_args(argv)
    try:
        return arguments.handler(arguments)
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1


def device_of(arguments: argparse.Namespace) -> str:
    if arguments.cpu:
        return "cpu"
    if not torch.cuda.is_available():
        raise RuntimeError("no CUDA device; the CPU is measured with --cpu (make bench CPU=1)")
    return "cuda"


def run_kernel(arguments: argparse.Namespace) -> int:
    from .run import run

    result = run(arguments.kernel, device_of(arguments), arguments.results, arguments.only)
    print(f"results: {arguments.results / environment.folder_name(result.environment)}")
    not_timed = [
        (row, f"{case.group}, {case.name}: {row.provider} {row.status}")
        for case in result.cases
        for row in case.rows
        if row.timing is None
    ]
    names = sorted({f"{row.provider} ({row.status})" for row, _ in not_timed})
    print(f"{len(result.cases)} shapes; not everywhere timed: {', '.join(names) or 'none'}")
    ours = [f"{what} {row.note}" for row, what in not_timed if row.kind == OURS]
    print("\n".join(ours), file=sys.stderr, end="\n" if ours else "")
    return 1 if ours else 0


def render(arguments: argparse.Namespace) -> int:
    from . import plot

    for path in arguments.file:
        result = report.read(path)
        path.with_suffix(".md").write_text(markdown.full(result))
        plot.fractions(result, path.with_suffix(".png"))
    return 0


def write_readme(arguments: argparse.Namespace) -> int:
    path = readme.ROOT / "README.md"
    text = path.read_text()
    new = readme.replaced(text, readme.published())
    if arguments.check and new != text:
        print("README.md differs from its results: python -m benchmarks readme", file=sys.stderr)
        return 1
    if new != text:
        path.write_text(new)
    return 0


def print_difference(arguments: argparse.Namespace) -> int:
    print(diff.compare(report.read(arguments.old), report.read(arguments.new), arguments.limit))
    return 0


def print_environment(arguments: argparse.Namespace) -> int:
    print(json.dumps(environment.collect(device_of(arguments)), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
