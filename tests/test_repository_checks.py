"""ci/check.py and ci/sync_shared.py: the repository itself passes, each violation is found."""

import subprocess
from pathlib import Path

import pytest

from ci import check, sync_shared
from common.toy_kernel import commit_all, replace, write_toy

ROOT = Path(__file__).resolve().parents[1]
HEADERS = {
    "check.h": "#pragma once\n",
    "loop.h": '#pragma once\n#include "warpsmith/check.h"\n',
    "cpu/isa.h": "#pragma once\n",
    "unused.h": "#pragma once\n",
}


@pytest.fixture
def tree(tmp_path):
    """A clean repository whose kernel uses two of four shared headers, one through the other."""
    toy = write_toy(tmp_path)
    replace(
        toy / "cpu/add.cpp", '#include "step.h"', '#include "step.h"\n#include "warpsmith/loop.h"'
    )
    listed = '"include/step.h", "include/warpsmith/check.h", "include/warpsmith/loop.h"'
    replace(toy / "build.toml", '"include/step.h"', listed)
    for name, text in HEADERS.items():
        header = tmp_path / "shared/include/warpsmith" / name
        header.parent.mkdir(parents=True, exist_ok=True)
        header.write_text(text)
    (tmp_path / "flake.lock").write_text("{ }\n")
    assert sync_shared.sync(tmp_path, write=True) == []
    commit_all(tmp_path)
    return tmp_path


def problems_of(root):
    return [problem for found in check.CHECKS for problem in found(root)]


@pytest.mark.parametrize("rule", check.CHECKS, ids=lambda rule: rule.__name__)
def test_this_repository(rule):
    assert rule(ROOT) == []


def test_a_clean_tree_has_no_problems(tree):
    assert problems_of(tree) == []
    assert check.main(["--root", str(tree)]) == 0


def test_sync_copies_what_is_included_and_nothing_else(tree):
    copies = tree / "kernels/toy/include/warpsmith"
    assert {p.name for p in copies.rglob("*.h")} == {"check.h", "loop.h"}
    replace(tree / "kernels/toy/cpu/add.cpp", "warpsmith/loop.h", "warpsmith/cpu/isa.h")
    sync_shared.sync(tree, write=True)
    names = {p.relative_to(copies).as_posix() for p in copies.rglob("*.h")}
    assert names == {"cpu/isa.h"}


def change(path, old, new):
    return lambda root: replace(root / path, old, new)


def append(path, text):
    return lambda root: (root / path).write_text((root / path).read_text() + text)


def link_copy(root):
    copy = root / "kernels/toy/include/warpsmith/check.h"
    copy.unlink()
    copy.symlink_to(root / "shared/include/warpsmith/check.h")


def track_generated(root):
    for name in ("torch-ext/registration.h", "torch-ext/toy/_ops.py", "setup.py", "build/x/a.so"):
        path = root / "kernels/toy" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    commit_all(root)


def add_unlisted_header(root):
    (root / "kernels/toy/include/more.h").write_text("#pragma once\n")
    append("kernels/toy/include/step.h", '#include "more.h"\n')(root)
    commit_all(root)


def add_unlisted_source(root):
    (root / "kernels/toy/cpu/forgotten.cpp").write_text("int forgotten() { return 1; }\n")
    commit_all(root)


def untrack(root):
    subprocess.run(["git", "rm", "-q", "--cached", "kernels/toy/cpu/add.cpp"], cwd=root, check=True)


BINDING = "kernels/toy/torch-ext/torch_binding.cpp"
WRAPPER = "kernels/toy/torch-ext/toy/wrapper.py"
VIOLATIONS = {
    "stale_header": (
        append("shared/include/warpsmith/check.h", "// new\n"),
        "toy: include/warpsmith/check.h differs from its master",
    ),
    "edited_copy": (
        append("kernels/toy/include/warpsmith/loop.h", "// edited\n"),
        "toy: include/warpsmith/loop.h differs from its master",
    ),
    "symlinked_copy": (link_copy, "include/warpsmith/check.h differs from its master"),
    "missing_copy": (
        append("kernels/toy/cpu/add.cpp", '#include "warpsmith/cpu/isa.h"\n'),
        "toy: include/warpsmith/cpu/isa.h is missing",
    ),
    "unused_copy": (
        change("kernels/toy/cpu/add.cpp", '#include "warpsmith/loop.h"\n', ""),
        "toy: include/warpsmith/loop.h is not used",
    ),
    "unknown_header": (
        append("kernels/toy/cpu/add.cpp", '#include "warpsmith/none.h"\n'),
        "add.cpp includes 'warpsmith/none.h', which shared/include does not have",
    ),
    "unlisted_include": (
        add_unlisted_header,
        "'include/more.h' is included by include/step.h but not in src of a cpu section",
    ),
    "unlisted_source": (add_unlisted_source, "'cpu/forgotten.cpp' is in no src"),
    "contraction": (
        change("kernels/toy/build.toml", 'cxx-flags = ["-ffp-contract=off"]\n', ""),
        "[kernel.cpu] lacks -ffp-contract=off",
    ),
    "cuda_contraction": (
        change("kernels/toy/build.toml", '"--fmad=false", ', ""),
        "[kernel.cuda] lacks --fmad=false",
    ),
    "stable_abi": (
        change("kernels/toy/build.toml", 'cpu = "2.11"', 'cpu = "2.10"'),
        "[torch.stable-abi] cpu is 2.10, not 2.11",
    ),
    "untracked": (untrack, "'cpu/add.cpp' is not tracked by git"),
    "no_card": (lambda root: (root / "kernels/toy/CARD.md").unlink(), "CARD.md does not exist"),
    "pybind11": (append(BINDING, "#include <torch/extension.h>\n"), "pybind11 is not part"),
    "written_out_macro": (append(BINDING, "TORCH_LIBRARY(toy, m) {}\n"), "STABLE_TORCH_LIBRARY"),
    "fragment": (append(BINDING, "TORCH_LIBRARY_FRAGMENT(toy, m)"), "STABLE_TORCH_LIBRARY_EXPAND"),
    "written_out_namespace": (
        append(BINDING, "STABLE_TORCH_LIBRARY_IMPL_EXPAND(toy, CPU, m) {}\n"),
        "not TORCH_EXTENSION_NAME",
    ),
    "init_function": (append(BINDING, "void PyInit_toy();\n"), "use REGISTER_EXTENSION"),
    "fixed_namespace": (append(WRAPPER, "torch.ops.toy.add_step\n"), "ops are renamed"),
    "absolute_import": (append(WRAPPER, "from toy import add_step\n"), "import relatively"),
    "load_inline": (append(WRAPPER, "load_inline()\n"), "the extension is built from build.toml"),
    "generated": (track_generated, "kernels/toy/setup.py is generated but tracked by git"),
    "lock_files": (append("flake.lock", "\n"), "kernels/toy/flake.lock differs from flake.lock"),
}


@pytest.mark.parametrize("case", VIOLATIONS)
def test_found(tree, case):
    violate, message = VIOLATIONS[case]
    violate(tree)
    problems = problems_of(tree)
    assert any(message in problem for problem in problems), problems
    assert check.main(["--root", str(tree)]) == 1


def test_every_kind_of_generated_file_is_found(tree):
    track_generated(tree)
    assert len(check.generated_files(tree)) == 4
