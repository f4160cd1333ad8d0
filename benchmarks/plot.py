"""Fraction of the ceiling per shape, ours and the others, with losses marked."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib import pyplot

from .case import BUILTIN, COMPILE, EAGER, OURS, PEER
from .report import Report

matplotlib.use("Agg")

MARKERS = {OURS: "D", COMPILE: "o", PEER: "s", BUILTIN: "^", EAGER: "x"}
OTHERS = (COMPILE, PEER, BUILTIN, EAGER)


def fractions(report: Report, path: Path) -> None:
    cases = report.shown()
    labels = [f"{case.group}, {case.name}" for case in cases]
    figure, axes = pyplot.subplots(figsize=(9, 1.6 + 0.28 * len(labels)), layout="constrained")
    for kind in OTHERS:
        points = [
            (100 * report.ceiling_us(case) / row.timing.us, height)
            for height, case in enumerate(cases)
            for row in case.timed()
            if row.kind == kind
        ]
        if points:
            axes.scatter(*zip(*points), marker=MARKERS[kind], s=26, alpha=0.7, label=kind)
    ours = [(height, case) for height, case in enumerate(cases) if case.ours]
    for lost, colour, label in (
        (False, "black", "warpsmith"),
        (True, "red", "warpsmith, slower than another"),
    ):
        points = [
            (100 * report.ceiling_us(case) / case.ours.timing.us, height)
            for height, case in ours
            if bool(case.slower_than()) == lost
        ]
        if points:
            axes.scatter(*zip(*points), marker=MARKERS[OURS], s=46, color=colour, label=label)
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.axvline(100, color="grey", linewidth=0.8)
    axes.set_xlim(left=0)
    ceiling = "a copy of the same bytes"
    if any(case.flops and report.ceiling_us(case) != case.copy.us for case in cases):
        ceiling += ", or of the bf16 matrix rate"
    axes.set_xlabel(f"% of {ceiling}")
    axes.set_title(f"{report.kernel} on {report.environment['device']}", fontsize=10)
    axes.grid(axis="x", linewidth=0.3)
    figure.legend(loc="outside lower center", ncols=6, fontsize=8)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)
