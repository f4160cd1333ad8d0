"""What the builder refuses, and the flags it computes; nothing is compiled here."""

from pathlib import Path

import pytest

from ci import build, repo
from ci.buildtoml import BuildTomlError, find_problems, load, read
from ci.plan import TARGETS, PlanError, host_sources, make_plan
from ci.toolchain import Cuda
from common.toy_kernel import replace, write_toy

ROOT = Path(__file__).resolve().parents[1]
CUDA_13 = Cuda(
    nvcc=Path("/cuda/bin/nvcc"),
    version=(13, 0),
    include=Path("/cuda/include"),
    cudart=Path("/cuda/lib/libcudart.so.13"),
    archs=frozenset({"7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0"}),
)


@pytest.fixture
def toy(tmp_path):
    return write_toy(tmp_path)


def edit(old, new, file="build.toml"):
    return lambda toy: replace(toy / file, old, new)


def link_source(toy):
    (toy / "cpu/add.cpp").rename(toy / "elsewhere.cpp")
    (toy / "cpu/add.cpp").symlink_to(toy / "elsewhere.cpp")


def link_directory(toy):
    (toy / "include").rename(toy / "real")
    (toy / "include").symlink_to("real")


def rename_package(toy):
    (toy / "torch-ext/toy").rename(toy / "torch-ext/other")


REFUSED = {
    "upstream": (edit("edition = 5", "edition = 5\nnonsense = 1"), "nonsense"),
    "license": (edit('license = "Apache-2.0"', ""), "license"),
    "banana": (edit('"8.0"', '"banana"'), "unknown capability 'banana'"),
    "capability_that_no_compiler_has": (edit('"8.0"', '"8.1"'), "unknown capability '8.1'"),
    "capability_without_dot": (edit('"8.0"', '"80"'), "unknown capability '80'"),
    "no_capabilities": (edit('cuda-capabilities = ["9.0a"]', ""), "needs cuda-capabilities"),
    "capability_lines": (edit('["7.5",', '["7.5",\n'), "must stand on one line"),
    "parent": (edit('"cpu/add.cpp",', '"../x.cu", "cpu/add.cpp",'), "'../x.cu' points outside"),
    "parent_include": (edit('["include"]', '["../../shared"]'), "'../../shared' points outside"),
    "absolute": (edit('"cpu/add.cpp",', '"/etc/hosts", "cpu/add.cpp",'), "points outside"),
    "symlink": (link_source, "'cpu/add.cpp' is or goes through a symlink"),
    "symlinked_directory": (link_directory, "'include/step.h' is or goes through a symlink"),
    "missing": (lambda toy: (toy / "cuda/add.cu").unlink(), "'cuda/add.cu' does not exist"),
    "missing_include": (edit('["include"]', '["incl"]'), "'incl' does not exist"),
    "source_kind": (edit('"include/step.h"', '"CARD.md"'), "neither a C++ or CUDA source"),
    "cuda_source_for_cpu": (
        edit('src = ["cpu/add.cpp", "include', 'src = ["cpu/add.cpp", "cuda/add.cu", "include'),
        "CUDA source in a section of another backend",
    ),
    "unlisted_include": (
        edit('"cuda/add.cu", "include/step.h"', '"cuda/add.cu"'),
        "'include/step.h' is included by cpu/add.cpp but not in src of a cuda section",
    ),
    "compiled_twice": (edit('["cuda/hopper.cu"]', '["cuda/hopper.cu", "cuda/add.cu"]'), "twice"),
    "cpu_missing_from_cuda": (
        edit('src = ["cpu/add.cpp", "cuda/add.cu"', 'src = ["cuda/add.cu"'),
        "a GPU machine would have no CPU kernel",
    ),
    "name": (edit('name = "toy"', 'name = "toys"'), "name is 'toys' but the directory is 'toy'"),
    "package": (rename_package, "torch-ext/toy/__init__.py does not exist"),
    "stable_abi": (edit('cpu = "2.11"\n', ""), "[torch.stable-abi] has no version for cpu"),
}


def test_the_toy_itself_is_accepted(toy):
    assert load(toy).name == "toy"


@pytest.mark.parametrize("case", REFUSED)
def test_refused(toy, case):
    change, message = REFUSED[case]
    change(toy)
    with pytest.raises(BuildTomlError) as refusal:
        load(toy)
    assert message in str(refusal.value)


def test_the_command_line_shows_the_reason_and_builds_nothing(toy, tmp_path, capsys):
    replace(toy / "build.toml", '"8.0"', '"banana"')
    assert build.main(["--root", str(tmp_path), "--target", "cpu"]) == 1
    assert "unknown capability 'banana'" in capsys.readouterr().out
    assert not (tmp_path / ".build").exists()


def test_an_include_is_followed_through_headers_and_angle_brackets(toy):
    (toy / "include/deep.h").write_text("#pragma once\n")
    replace(toy / "include/step.h", "#pragma once", "#pragma once\n#  include <deep.h>")
    problems = find_problems(read(toy))
    assert [p.split(" but ")[1] for p in problems] == [
        "not in src of a cpu section",
        "not in src of a cuda section",
    ]
    assert all("'include/deep.h' is included by include/step.h" in p for p in problems)


GENCODE = {
    "release": {
        "cuda/add.cu": [
            "arch=compute_75,code=sm_75",
            "arch=compute_80,code=sm_80",
            "arch=compute_90,code=sm_90",
            "arch=compute_90,code=compute_90",
        ],
        "cuda/hopper.cu": ["arch=compute_90a,code=sm_90a"],
    },
    "h100": ["arch=compute_90a,code=sm_90a"],
    "a100": ["arch=compute_80,code=sm_80"],
    "t4": ["arch=compute_75,code=sm_75"],
    "ptx75": ["arch=compute_75,code=compute_75"],
    "ptx80": ["arch=compute_80,code=compute_80"],
}


@pytest.mark.parametrize("target", GENCODE)
def test_gencode_flags_per_source(toy, target):
    plan = make_plan(load(toy), target, CUDA_13, "x")
    expected = GENCODE[target]
    for source in plan.sources:
        codes = [f.removeprefix("-gencode=") for f in source.flags if "gencode" in f]
        if source.is_cuda:
            assert codes == (expected if isinstance(expected, list) else expected[source.path])
        else:
            assert codes == []
    archs = {"release": ("7.5", "8.0", "9.0+PTX", "9.0a"), "h100": ("9.0a",), "ptx75": ("7.5+PTX",)}
    assert plan.archs == archs.get(target, plan.archs)


def test_flags_reach_the_sources_of_their_section(toy):
    plan = make_plan(load(toy), "release", CUDA_13, "abc")
    flags = {source.path: source.flags for source in plan.sources}
    assert flags["cpu/add.cpp"] == ("-ffp-contract=off",)
    assert (
        "--fmad=false" in flags["cuda/add.cu"] and "-ffp-contract=off" not in flags["cuda/add.cu"]
    )
    assert "-lineinfo" in flags["cuda/add.cu"] and "-lineinfo" not in flags["cuda/hopper.cu"]
    assert flags["torch-ext/torch_binding.cpp"] == ()
    # Only what names the module is compiled anew when the name changes with a commit.
    named = {source.path for source in plan.sources if source.names_module}
    assert named == {"cpu/add.cpp", "torch-ext/torch_binding.cpp"}
    assert plan.module == "_toy_cuda_abc"
    assert plan.variant.startswith("torch-stable-abi211-cu130-")
    expected = {"TORCH_TARGET_VERSION=0x020b000000000000", "CUDA_KERNEL", "USE_CUDA=1"}
    assert expected <= set(plan.definitions)


def test_cuda_targets_share_the_cpu_objects_that_do_not_name_the_module(toy):
    replace(toy / "cpu/add.cpp", "TORCH_EXTENSION_NAME, CPU", "SOMETHING_ELSE, CPU")
    replace(toy / "cpu/add.cpp", "TORCH_EXTENSION_NAME, CUDA", "SOMETHING_ELSE, CUDA")
    plans = [make_plan(load(toy), target, CUDA_13, "abc") for target in ("release", "h100", "t4")]
    shared = [host_sources(plan) for plan in plans]
    assert [source.path for source in shared[0]] == ["cpu/add.cpp"]
    assert shared[0] == shared[1] == shared[2]
    assert len({plan.definitions for plan in plans}) == 1
    assert host_sources(make_plan(load(toy), "cpu", CUDA_13, "abc")) == []


def test_the_cpu_build_takes_the_cpu_sections(toy):
    plan = make_plan(load(toy), "cpu", CUDA_13, "abc")
    assert {s.path for s in plan.sources} == {"torch-ext/torch_binding.cpp", "cpu/add.cpp"}
    assert "CPU_KERNEL" in plan.definitions and "USE_CUDA=1" not in plan.definitions
    assert plan.archs == () and plan.variant.startswith("torch-stable-abi211-cpu-")


def test_what_the_compiler_lacks_is_left_out_and_nothing_left_is_an_error(toy):
    replace(toy / "build.toml", '"7.5", ', '"7.0", "7.5", ')
    assert make_plan(load(toy), "release", CUDA_13, "x").archs[0] == "7.5"
    replace(toy / "build.toml", '["9.0a"]', '["7.0"]')
    with pytest.raises(PlanError, match=r"\[kernel.hopper\] no capability left: 7.0 intersected"):
        make_plan(load(toy), "release", CUDA_13, "x")


def test_a_section_for_a_newer_cuda_is_left_out(toy):
    replace(toy / "build.toml", '["9.0a"]', '["9.0a"]\ncuda-minver = "13.1"')
    plan = make_plan(load(toy), "release", CUDA_13, "x")
    assert "cuda/hopper.cu" not in {source.path for source in plan.sources}


@pytest.mark.parametrize("kernel", repo.kernel_dirs(ROOT), ids=lambda path: path.name)
def test_all_16_turing_is_listed_and_the_newest_arch_has_ptx(kernel):
    """So that a T4 finds code, and a GPU newer than this build something to compile."""
    config = load(kernel)
    lists = [s.capabilities for s in config.sections if s.capabilities]
    general = [c for c in lists if not all(entry.endswith("a") for entry in c)]
    assert general
    for capabilities in general:
        assert "7.5" in capabilities
        assert max(capabilities, key=lambda c: float(c.removesuffix("+PTX"))).endswith("+PTX")
    for target in TARGETS:
        make_plan(config, target, CUDA_13, "x")
