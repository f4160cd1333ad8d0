"""README.md's section "Performance", from the results that results/published.txt lists."""

from __future__ import annotations

import re
from pathlib import Path

from ci.repo import ROOT

from . import markdown, report, timing
from .case import BUILTIN
from .report import CaseResult, Report

RESULTS = ROOT / "benchmarks" / "results"
BEGIN = "<!-- performance: written by `python -m benchmarks readme`, do not edit -->"
END = "<!-- end of performance -->"
INTRODUCTION = f"""\
Medians of three interleaved repeats; GPU times from replayed CUDA graphs over rotating inputs, which exceed the L2 cache
unless a shape says (L2). "Of copy" is relative to a copy of as many bytes in the same run. "Slower than" lists every other
implementation in the run that ours does not match: ratio above {timing.RATIO_LIMIT} and more than {timing.DIFFERENCE_LIMIT_US} us behind. Host times are of
one eager call: ours, then `relu` plus `empty_like`, then the built-in function. `make bench KERNEL=<kernel>`, with `CPU=1`
for the CPU, measures here; [docs/benchmarks.md](docs/benchmarks.md) has the method."""


def published() -> list[Path]:
    lines = (RESULTS / "published.txt").read_text().splitlines()
    return [RESULTS / line for line in lines if line and not line.startswith("#")]


def section(paths: list[Path]) -> str:
    parts = [BEGIN, INTRODUCTION]
    for path in paths:
        result = report.read(path)
        part = kernel_part if any(case.ours for case in result.cases) else others_part
        parts.append(part(result, path.relative_to(ROOT).with_suffix("")))
    return "\n\n".join([*parts, END])


def kernel_part(result: Report, stem: Path) -> str:
    header = ["shape", "us", "GB/s", "of copy", "torch.compile us", "fastest other", "us", "ratio"]
    header += ["slower than"]
    cases = [case for case in result.shown() if case.ours]
    references = host_references(cases)
    if references:
        header += ["host us", *references]
    rows = [kernel_row(result, case, references) for case in cases]
    lines = [
        f"### {result.kernel}, {result.environment['device']}",
        "",
        markdown.environment_line(result.device, result.environment),
        "",
    ]
    lines += [*markdown.table(header, rows), ""]
    count = ""
    if len(rows) < len(result.cases):
        count = f"{len(rows)} of {len(result.cases)} shapes, none with a loss left out. "
    lines += [f"{count}All providers: [{stem.name}.md]({stem}.md).", ""]
    lines += [f"![{result.kernel}]({stem}.png)"]
    return "\n".join(lines)


def host_references(cases: list[CaseResult]) -> list[str]:
    """What host times stand beside: torch's own function, where the kernel has one, too."""
    if not any(case.ours.host_us for case in cases):
        return []
    built_in = {
        row.provider: None
        for case in cases
        for row in case.rows
        if row.kind == BUILTIN and row.host_us
    }
    return ["relu + empty_like", *built_in]


def kernel_row(result: Report, case: CaseResult, references: list[str]) -> list[str]:
    ours, other, compiled = case.ours, case.fastest(), case.fastest_compiled
    us = ours.timing.us
    cells = [
        f"{case.group} {markdown.shape(result, case)}",
        f"{us:.2f}",
        f"{case.num_bytes / us / 1e3:.0f}",
    ]
    cells += [markdown.percent(case.copy.us / us)]
    cells += ["" if compiled is None else f"{compiled.timing.us:.2f}"]
    cells += ["", "", ""] if other is None else [other.provider, f"{other.timing.us:.2f}"]
    if other is not None:
        cells += [f"{timing.ratio(ours.timing, other.timing):.2f}"]
    cells += ["; ".join(row.provider for row in case.slower_than()) or "none"]
    if references:
        times = {row.provider: row.host_us for row in case.rows}
        times["relu + empty_like"] = case.host_reference_us
        host = [ours.host_us, *map(times.get, references)]
        cells += ["" if us is None else f"{us:.1f}" for us in host]
    return cells


def others_part(result: Report, stem: Path) -> str:
    return (
        f"### {result.kernel}, {result.environment['device']}: other implementations\n\n"
        f"{len(result.cases)} shapes, to be compared with: [{stem.name}.md]({stem}.md), "
        f"[plot]({stem}.png)."
    )


def replaced(text: str, paths: list[Path]) -> str:
    """README.md's text with the section as the results have it."""
    pattern = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise ValueError(f"README.md: needs the lines {BEGIN!r} and {END!r}, once each")
    return pattern.sub(lambda _: section(paths), text)
