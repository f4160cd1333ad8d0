"""Every row of docs/failure-modes.md that applies has a test that carries its label."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
KERNELS = sorted(path.parent.name for path in ROOT.glob("kernels/*/build.toml"))


def rows():
    table = re.findall(
        r"^\| ([A-Z]+-\d\d) \| \S+ \| ([\w ]+) \| .+ \|$",
        (ROOT / "docs/failure-modes.md").read_text(),
        re.M,
    )
    assert len(table) == len(dict(table)), "a label stands twice"
    return table


def places(where):
    """The test directories that need a test of the row."""
    if where == "repository":
        return ["tests"]
    names = KERNELS if where == "every kernel" else [where]
    assert set(names) <= set(KERNELS), f"no such kernel: {where}"
    return [f"kernels/{name}/tests" for name in names]


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
    for place in places(where):
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
    assert kernel in dict(rows()).values(), f"no rows for {kernel}"
