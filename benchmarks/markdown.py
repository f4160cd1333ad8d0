"""The tables of a report."""

from __future__ import annotations

from . import timing
from .report import OK, CaseResult, Report, Row

METHOD = {
    "cuda": "GPU time per call from replayed CUDA graphs over rotating inputs, which exceed the L2 cache unless a shape "
    "says (L2); median of 3 interleaved repeats. [h n]: host time per eager call.",
    "cpu": "Time per call, calls interleaved, inputs rotating through 128 MiB, median of 3 repeats.",
}


def full(report: Report) -> str:
    """Every case and provider."""
    lines = [f"# {report.kernel} on {report.environment['device']}", "", METHOD[report.device]]
    lines += ["", environment_line(report.device, report.environment), "", ceilings_line(report)]
    for group, cases in report.groups().items():
        with_ours = any(case.ours for case in cases)
        ours = ["warpsmith us", "p20 to p80", "of ceiling", "ratio to fastest", "slower than"]
        header = ["shape", "ceiling us", *(ours if with_ours else []), "fastest other", "us"]
        header += ["of ceiling", "others us"]
        lines += [
            "",
            f"## {group}",
            "",
            *table(header, [full_row(report, c, with_ours) for c in cases]),
        ]
    return "\n".join(lines) + "\n"


def full_row(report: Report, case: CaseResult, with_ours: bool) -> list[str]:
    ceiling, other, ours = report.ceiling_us(case), case.fastest(), case.ours
    cells = [shape(report, case), f"{ceiling:.2f}"]
    if ours is not None:
        time = ours.timing
        cells += [f"{time.us:.2f}{host(ours)}", f"{time.p20:.2f} to {time.p80:.2f}"]
        cells += [percent(ceiling / time.us)]
        cells += [
            ratio_text(case, other),
            "; ".join(r.provider for r in case.slower_than()) or "none",
        ]
    elif with_ours:
        cells += ["not measured", "", "", "", ""]
    if other is None:
        cells += ["", "", ""]
    else:
        cells += [other.provider, f"{other.timing.us:.2f}{host(other)}"]
        cells += [percent(ceiling / other.timing.us)]
    rest = sorted(
        (row for row in case.timed() if row not in (ours, other)), key=lambda row: row.timing.us
    )
    texts = [f"{row.provider} {row.timing.us:.2f}{host(row)}" for row in rest]
    texts += [f"{row.provider}: {row.status}" for row in case.rows if row.status != OK]
    return [*cells, "; ".join(texts)]


def shape(report: Report, case: CaseResult) -> str:
    return case.name + (" (L2)" if report.is_in_cache(case) else "")


def ratio_text(case: CaseResult, other: Row | None) -> str:
    return "" if other is None else f"{timing.ratio(case.ours.timing, other.timing):.2f}"


def host(row: Row) -> str:
    return "" if row.host_us is None else f" [h {row.host_us:.1f}]"


def percent(fraction: float) -> str:
    return f"{100 * fraction:.0f} %"


def environment_line(device: str, values: dict) -> str:
    if device == "cuda":
        where = f"driver {values['driver']}, CUDA {values['cuda']}"
    else:
        where = f"{values['cores']} cores, {values['threads']} threads, {values['isa']}, L3 {values['l3']}"
    libraries = ", ".join(f"{name} {version}" for name, version in values["libraries"].items())
    return f"{values['date']}, commit {values['commit']}, {where}, Python {values['python']}, {libraries}."


def ceilings_line(report: Report) -> str:
    values = (f"{name} {value:.4g}" for name, value in report.ceilings.items())
    return "Ceilings in this run: " + ", ".join(values) + "."


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]
