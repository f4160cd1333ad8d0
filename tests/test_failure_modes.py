"""Every row of docs/failure-modes.md that applies has a test that carries its label."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
KERNELS = sorted(path.parent.name for path in ROOT.glob("kernels/*/build.toml"))
PREFIXES = {
    "GRAY": "img2gray",
    "RMS": "rmsnorm",
    "ROPE": "rope",
    "ADA": "adaln",
    "GLU": "geglu",
    "ATT": "attention",
}


def rows():
    table = re.findall(
        r"^\| ([A-Z]+-\d\d) \| \S+ \| (\w+) \| .+ \|$",
        (ROOT / "docs/failure-modes.md").read_text(),
        re.M,
    )
    assert len(table) == len(dict(table)), "a label stands twice"
    return table


def places(label, where):
    """The test directories that need a test of the label."""
    assert where in ("kernel", "repository"), f"{label}: where is {where!r}"
    if where == "repository":
        return ["tests"]
    prefix = label.split("-")[0]
    names = KERNELS if prefix == "ALL" else [PREFIXES[prefix]]
    return [f"kernels/{name}/tests" for name in names if name in KERNELS]


def labels_in_test_names(directory):
    names = [
        node.name
        for path in directory.glob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    return {
        f"{prefix.upper()}-{number}"
        for name in names
        for prefix, number in re.findall(r"_([a-z]+)_(\d\d)(?=_)", name)
    }


@pytest.mark.parametrize("label, where", rows())
def test_row_has_a_test(label, where):
    for place in places(label, where):
        assert label in labels_in_test_names(ROOT / place), (
            f"{place} has no test named after {label}"
        )


def test_labels_in_test_names_stand_in_the_table():
    known = dict(rows())
    for directory in [ROOT / "tests", *ROOT.glob("kernels/*/tests")]:
        unknown = labels_in_test_names(directory) - set(known)
        assert not unknown, f"{directory}: {unknown} not in docs/failure-modes.md"


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel_has_rows_of_its_own(kernel):
    prefixes = [prefix for prefix, name in PREFIXES.items() if name == kernel]
    assert any(label.split("-")[0] in prefixes for label, _ in rows()), f"no rows for {kernel}"
