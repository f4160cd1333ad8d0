"""Results of one kernel on one device: the JSON form, and what tables and plots read off it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from . import timing
from .case import COMPILE, OURS
from .timing import Timing

OK, WRONG, MISSING, FAILED = "ok", "wrong", "not installed", "failed"


@dataclass
class Row:
    provider: str
    kind: str
    status: str
    note: str = ""  # why, where the status is not ok
    difference: float | None = None  # from float64
    timing: Timing | None = None
    host_us: float | None = None
    writes_inputs: bool = False  # then it was timed with copies of its own


@dataclass
class CaseResult:
    group: str
    name: str
    num_bytes: int
    flops: float | None
    copy: Timing  # of as many bytes
    rows: list[Row]
    # Host microseconds of torch.relu and torch.empty_like, one call each, in the same bursts.
    host_reference_us: float | None = None
    in_readme: bool = True

    def timed(self) -> Iterator[Row]:
        return (row for row in self.rows if row.timing is not None)

    @property
    def ours(self) -> Row | None:
        return next((row for row in self.timed() if row.kind == OURS), None)

    def fastest(self, kind: str | None = None) -> Row | None:
        """Of the others, or of those of one kind."""
        rows = [row for row in self.timed() if row.kind != OURS and kind in (None, row.kind)]
        return min(rows, key=lambda row: row.timing.us, default=None)

    @property
    def fastest_compiled(self) -> Row | None:
        return self.fastest(COMPILE)

    def slower_than(self) -> list[Row]:
        """The others that ours is slower than."""
        ours = self.ours
        return [
            row
            for row in self.timed()
            if row.kind != OURS and not timing.not_slower(ours.timing, row.timing)
        ]


@dataclass
class Report:
    kernel: str
    device: str  # "cuda" or "cpu"
    environment: dict
    build: str | None = None  # the operator namespace of our kernel
    ceilings: dict[str, float] = field(default_factory=dict)
    cases: list[CaseResult] = field(default_factory=list)

    def ceiling_us(self, case: CaseResult) -> float:
        """The matrix rate where flops are given, else a copy of as many bytes."""
        if case.flops is None or "bf16 matrix TFLOP/s" not in self.ceilings:
            return case.copy.us
        return case.flops / self.ceilings["bf16 matrix TFLOP/s"] / 1e6

    def is_in_cache(self, case: CaseResult) -> bool:
        """Whether what the calls rotate over fits the L2 cache: small shapes, whose launches count."""
        return case.copy.sets * case.num_bytes < self.environment.get("l2_bytes", 0)

    def shown(self) -> list[CaseResult]:
        """What README.md shows: the shapes that its suite chose, and every other loss."""
        return [case for case in self.cases if case.in_readme or (case.ours and case.slower_than())]

    def groups(self) -> dict[str, list[CaseResult]]:
        result: dict[str, list[CaseResult]] = {}
        for case in self.cases:
            result.setdefault(case.group, []).append(case)
        return result

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".tmp")
        unfinished.write_text(json.dumps(asdict(self), indent=1) + "\n")
        os.replace(unfinished, path)


def read(path: Path) -> Report:
    try:
        data = json.loads(path.read_text())
        data["cases"] = [_case(case) for case in data["cases"]]
        return Report(**data)
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: no results of this program ({error!r})") from error


def _case(data: dict) -> CaseResult:
    rows = [Row(**{**row, "timing": _timing(row["timing"])}) for row in data["rows"]]
    return CaseResult(**{**data, "copy": _timing(data["copy"]), "rows": rows})


def _timing(data: dict | None) -> Timing | None:
    return None if data is None else Timing(**{**data, "repeats": tuple(data["repeats"])})
