"""Two reports of one kernel beside each other: regressions, drivers, machines, published numbers."""

from __future__ import annotations

import statistics

from . import markdown
from .report import CaseResult, Report


def compare(old: Report, new: Report, limit: float) -> str:
    """Times that both have, as Markdown; those further apart than `limit` (0.1: 10 %) are marked."""
    old_times = {
        (case.group, case.name, row.provider): row.timing.us
        for case in old.cases
        for row in case.timed()
    }
    rows, ratios = [], []
    for case in new.cases:
        for row in case.timed():
            before = old_times.get((case.group, case.name, row.provider))
            if before is not None:
                ratios.append(row.timing.us / before)
                rows.append(line(case, row.provider, before, row.timing.us, limit))
    if not rows:
        raise ValueError("the reports have no shape and provider in common")
    apart = sum(not within(ratio, limit) for ratio in ratios)
    header = ["group", "shape", "provider", "old us", "new us", "new / old", ""]
    summary = (
        f"{len(rows)} times in common, median ratio {statistics.median(ratios):.3f}; "
        f"{len(rows) - apart} within {100 * limit:.0f} %, {apart} further apart."
    )
    return "\n".join([summary, "", *markdown.table(header, rows)]) + "\n"


def line(case: CaseResult, provider: str, old: float, new: float, limit: float) -> list[str]:
    ratio = new / old
    mark = "" if within(ratio, limit) else ("slower" if ratio > 1 else "faster")
    return [case.group, case.name, provider, f"{old:.2f}", f"{new:.2f}", f"{ratio:.2f}", mark]


def within(ratio: float, limit: float) -> bool:
    return 1 / (1 + limit) <= ratio <= 1 + limit
