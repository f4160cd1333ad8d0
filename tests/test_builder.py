"""The local builder, end to end: it compiles and loads toy kernels in a scratch tree."""

import importlib.util
import json
import logging
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernels import get_kernel, get_local_kernel
from kernels._rust import Digest, DigestAlgorithm, Metadata

from ci import artifact, build, repo
from ci.plan import make_plan
from ci.toolchain import find_cuda
from common.toy_kernel import SPILLING_CU, commit_all, replace, write_toy

ROOT = Path(__file__).resolve().parents[1]
REQUIRED_METADATA = ("name", "id", "version", "license", "python-depends", "backend")


def run_builder(root, *arguments):
    """Exit code and output of the command line."""
    command = [sys.executable, "-m", "ci.build", "--root", root, *arguments]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """Two kernels of which one does not compile, built for the CPU; the first is named later."""
    root = tmp_path_factory.mktemp("tree")
    broken = write_toy(root, "a-broken")
    replace(broken / "cpu/add.cpp", "namespace {", "namespace { int x = not_declared_anywhere;")
    write_toy(root, "toy")
    code, output = run_builder(root, "--target", "cpu", "--id", "one")
    return root, code, output


@pytest.fixture(scope="module")
def toy(tree):
    return tree[0] / "kernels/toy"


@pytest.fixture(scope="module")
def cpu_build(toy):
    (directory,) = (toy / "build").glob("*-cpu-*")
    return directory


@pytest.fixture(scope="module")
def release(tree):
    """The release build of the same kernel: (build tree, variant directory)."""
    root = tree[0]
    code, output = run_builder(root, "--kernel", "toy", "--target", "release", "--id", "one")
    assert code == 0, output
    (variant,) = (root / "kernels/toy/build").glob("*-cu*")
    return root / ".build/toy/release", variant


def test_a_failing_unit_shows_its_error_and_the_others_go_on(tree):
    _, code, output = tree
    assert code == 1
    assert "not_declared_anywhere" in output
    rows = [line.split() for line in output.splitlines() if "torch-stable-abi211-cpu" in line]
    assert [(row[0], row[-1]) for row in rows] == [("a-broken", "FAILED"), ("toy", "ok")]


def test_what_a_build_directory_holds(cpu_build):
    names = {p.relative_to(cpu_build).as_posix() for p in cpu_build.rglob("*") if p.is_file()}
    assert {name for name in names if "__pycache__" not in name} == {
        "__init__.py",
        "wrapper.py",
        "_ops.py",
        "_toy_cpu_one.abi3.so",
        "metadata.json",
        "toy/__init__.py",
    }


def test_nothing_is_generated_into_the_kernel_directory(toy, cpu_build):
    assert not list(toy.rglob("registration.h"))
    assert not list((toy / "torch-ext").rglob("_ops.py"))


def test_loads_through_get_local_kernel(toy, cpu_build, caplog):
    with caplog.at_level(logging.WARNING):
        kernel = get_local_kernel(toy, backend="cpu")
    x = torch.arange(5, dtype=torch.float32)
    assert torch.equal(kernel.add_step(x), x + 2)
    with pytest.raises(RuntimeError, match="x: expected 1 dimension, got 2"):
        kernel.add_step(x.reshape(1, 5))
    assert not caplog.records


def test_loads_through_local_kernels(toy, cpu_build, caplog, monkeypatch):
    monkeypatch.setenv("LOCAL_KERNELS", f"warpsmith/toy={toy}")
    with caplog.at_level(logging.WARNING):
        kernel = get_kernel("warpsmith/toy", version=1, backend="cpu")
    x = torch.ones(3)
    assert torch.equal(kernel.add_step(x), x + 2)
    assert not caplog.records


def test_loads_as_older_loaders_do(cpu_build):
    spec = importlib.util.spec_from_file_location("toy_of_old", cpu_build / "toy/__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["toy_of_old"] = module
    spec.loader.exec_module(module)
    assert torch.equal(module.add_step(torch.zeros(2)), torch.full((2,), 2.0))


def test_all_11_two_versions_load_side_by_side(tree, toy, cpu_build, tmp_path):
    first = get_local_kernel(toy, backend="cpu")
    replace(toy / "include/step.h", "2.0f", "5.0f")
    try:
        code, output = run_builder(
            tree[0], "--kernel", "toy", "--target", "cpu", "--id", "two", "--out", tmp_path
        )
    finally:
        replace(toy / "include/step.h", "5.0f", "2.0f")
    assert code == 0, output
    second = get_local_kernel(tmp_path / "cpu/toy", backend="cpu")
    x = torch.zeros(2)
    assert first.add_step(x).tolist() == [2.0, 2.0]
    assert second.add_step(x).tolist() == [5.0, 5.0]
    names = (first.wrapper.NAME, second.wrapper.NAME)
    assert names == ("_toy_cpu_one::add_step", "_toy_cpu_two::add_step")


def test_all_13_metadata_is_what_the_loader_reads(cpu_build, release):
    for variant, backend, archs in (
        (cpu_build, "cpu", None),
        (release[1], "cuda", ["7.5", "8.0", "9.0+PTX", "9.0a"]),
    ):
        metadata = Metadata.read_from_file(variant / "metadata.json")
        assert metadata.id == f"_toy_{backend}_one"
        assert (str(metadata.name), metadata.version, metadata.license) == ("toy", 1, "Apache-2.0")
        assert metadata.backend.archs == archs
        assert "not for publishing" in metadata.provenance.kernel_builder.version
        metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))


@pytest.mark.parametrize("key", REQUIRED_METADATA)
def test_all_13_a_missing_key_is_noticed(cpu_build, tmp_path, key):
    content = json.loads((cpu_build / "metadata.json").read_text())
    del content[key]
    (tmp_path / "metadata.json").write_text(json.dumps(content))
    assert not artifact.is_intact(tmp_path)


def test_all_14_no_private_torch_symbols(cpu_build, release, tmp_path):
    torch_lib = build.TORCH_DIR / "lib"
    providers = [torch_lib / "libtorch_cpu.so", release[0] / "libtorch_cuda.so"]
    for variant in (cpu_build, release[1]):
        (library,) = variant.glob("*.so")
        assert artifact.undefined_problems(library, providers) == []
    code = 'namespace at { void private_function(); }\nextern "C" void no_such_function();\n'
    code += 'extern "C" void f() { at::private_function(); no_such_function(); }\n'
    problems = artifact.undefined_problems(compile_shared(tmp_path, code), providers)
    assert [p.split()[-1] for p in problems] == ["_ZN2at16private_functionEv", "no_such_function"]


def test_all_14_the_cuda_variant_needs_torchs_libraries_and_no_path(release):
    (library,) = release[1].glob("*.so")
    done = subprocess.run(["readelf", "-dW", library], capture_output=True, text=True, check=True)
    needed = [
        line.split("[")[1].rstrip("]") for line in done.stdout.splitlines() if "NEEDED" in line
    ]
    assert {"libtorch.so", "libtorch_cpu.so", "libtorch_cuda.so"} <= set(needed)
    assert any(name.startswith("libcudart.so.1") for name in needed)
    assert "RUNPATH" not in done.stdout and "RPATH" not in done.stdout


def test_all_15_newer_symbols_are_refused(cpu_build, tmp_path):
    (library,) = cpu_build.glob("*.so")
    assert artifact.manylinux_problems(library) == []
    assert artifact.python_abi_problems(library) == []
    code = 'extern "C" unsigned arc4random();\nextern "C" unsigned f() { return arc4random(); }\n'
    (problem,) = artifact.manylinux_problems(compile_shared(tmp_path, code))
    assert "arc4random@GLIBC_2.36" in problem
    code = 'extern "C" int PyUnicode_AsUTF8AndSize();\n'
    code += 'extern "C" int f() { return PyUnicode_AsUTF8AndSize(); }\n'
    (problem,) = artifact.python_abi_problems(compile_shared(tmp_path, code))
    assert "PyUnicode_AsUTF8AndSize" in problem


def test_all_16_the_release_build_has_code_for_turing_and_ptx_for_newer(release):
    log = (release[0] / "cuda/cuda/add.cu.o.log").read_text()
    assert {f.arch for f in artifact.read_ptxas_log(log)} == {"sm_75", "sm_80", "sm_90"}
    log = (release[0] / "cuda/cuda/hopper.cu.o.log").read_text()
    assert {f.arch for f in artifact.read_ptxas_log(log)} == {"sm_90a"}
    (library,) = release[1].glob("*.so")
    images = {("sass", 75), ("sass", 80), ("sass", 90), ("ptx", 90)}
    assert device_images(library.read_bytes()) == images


def test_a_second_run_does_nothing(tree, cpu_build, release):
    arguments = ("--kernel", "toy", "--target", "release", "--target", "cpu", "--id", "one")
    run_builder(tree[0], *arguments)  # other tests build another id in this tree

    def times():
        files = [
            *cpu_build.iterdir(),
            *release[1].iterdir(),
            *(tree[0] / ".build/toy").rglob("*.o"),
        ]
        return {file: file.stat().st_mtime_ns for file in files}

    before = times()
    code, output = run_builder(tree[0], *arguments)
    assert code == 0, output
    assert times() == before


def test_a_copied_checkout_builds_in_its_own_place(tree, cpu_build, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(tree[0], copy, symlinks=True)
    code, output = run_builder(copy, "--kernel", "toy", "--target", "cpu", "--id", "one")
    assert code == 0, output
    cache = (copy / ".build/toy/cpu/CMakeCache.txt").read_text()
    assert f"{copy}/.build/toy/cpu" in cache and f"{tree[0]}/.build" not in cache


def test_a_changed_header_rebuilds_what_includes_it(tree, toy, release):
    cuda_objects = release[0] / "cuda/cuda"
    before = {p.name: p.stat().st_mtime_ns for p in cuda_objects.glob("*.o")}
    (toy / "include/step.h").touch()
    code, output = run_builder(tree[0], "--kernel", "toy", "--target", "release", "--id", "one")
    assert code == 0, output
    after = {p.name: p.stat().st_mtime_ns for p in cuda_objects.glob("*.o")}
    assert {name for name in before if before[name] != after[name]} == {"add.cu.o"}


def test_a_tampered_build_is_replaced(tree, cpu_build):
    (cpu_build / "stale.py").write_text("")
    replace(cpu_build / "__init__.py", "add_step", "other")
    assert not artifact.is_intact(cpu_build)
    code, output = run_builder(tree[0], "--kernel", "toy", "--target", "cpu", "--id", "one")
    assert code == 0, output
    assert artifact.is_intact(cpu_build)
    assert not (cpu_build / "stale.py").exists()


def test_an_older_local_variant_is_removed_and_a_foreign_one_stays(tmp_path):
    for name, builder in (
        ("cu126", artifact.BUILDER),
        ("cu128", "0.17.0"),
        ("cpu", artifact.BUILDER),
    ):
        variant = tmp_path / f"torch-stable-abi211-{name}-x86_64-linux"
        variant.mkdir()
        backend = "cpu" if name == "cpu" else "cuda"
        content = {
            "backend": {"type": backend},
            "provenance": {"kernel-builder": {"version": builder}},
        }
        (variant / "metadata.json").write_text(json.dumps(content))
    artifact.remove_local_builds(tmp_path / "torch-stable-abi211-cu130-x86_64-linux", "cuda")
    assert [p.name.split("-")[3] for p in sorted(tmp_path.iterdir())] == ["cpu", "cu128"]


def test_spills_fail_unless_listed_with_a_reason(tmp_path):
    toy = write_toy(tmp_path, "toy")
    (toy / "cuda/hopper.cu").write_text(SPILLING_CU)
    replace(
        toy / "build.toml",
        '["9.0a"]\ncuda-flags = [',
        '["7.5"]\ncuda-flags = ["-maxrregcount=16", ',
    )
    arguments = (tmp_path, "--target", "t4", "--id", "one")
    code, output = run_builder(*arguments)
    assert code == 1
    assert "spilling_kernel" in output and "bytes on sm_75" in output
    assert not (tmp_path / "dist").exists()
    (tmp_path / "ci").mkdir()
    entry = '[[allow]]\nkernel = "toy"\nfunction = "spilling_kernel"\n'
    (tmp_path / "ci/allowed_spills.toml").write_text(entry)
    code, output = run_builder(*arguments)
    assert code == 1 and "reason" in output
    (tmp_path / "ci/allowed_spills.toml").write_text(entry + 'reason = "this test"\n')
    code, output = run_builder(*arguments)
    assert code == 0, output
    (variant,) = (tmp_path / "dist/t4/toy").iterdir()
    assert Metadata.read_from_file(variant / "metadata.json").backend.archs == ["7.5"]


def test_id_and_provenance_follow_git(tmp_path):
    toy = write_toy(tmp_path, "toy")
    assert repo.local_id(repo.kernel_revision(toy)) == "local"
    commit_all(tmp_path)
    commit, dirty = repo.kernel_revision(toy)
    assert not dirty and repo.local_id((commit, dirty)) == commit[:7]
    (tmp_path / "unrelated.txt").write_text("")
    assert repo.kernel_revision(toy) == (commit, False)
    commit_all(tmp_path)
    assert repo.kernel_revision(toy) == (commit, False)
    (toy / "new.h").write_text("")
    assert repo.local_id(repo.kernel_revision(toy)) == f"{commit[:7]}_dirty"

    plan = make_plan(build.read(toy), "cpu", None, "x")
    for is_dirty in (False, True):
        content = artifact.metadata(plan, (commit, is_dirty), None)
        provenance = Metadata.from_bytes(json.dumps(content).encode()).provenance
        assert (provenance.kernel.commit, provenance.dirty) == (commit, is_dirty)


def test_strict_refuses_untracked_files(tmp_path):
    toy = write_toy(tmp_path, "toy")
    commit_all(tmp_path)
    subprocess.run(["git", "rm", "-q", "--cached", "include/step.h"], cwd=toy, check=True)
    code, output = run_builder(tmp_path, "--target", "cpu", "--strict")
    assert code == 1
    assert "'include/step.h' is not tracked by git" in output
    assert not (tmp_path / ".build").exists()


def test_without_a_cuda_compiler_the_gpu_targets_say_so(tmp_path, monkeypatch, capsys):
    write_toy(tmp_path, "toy")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(build, "find_cuda", lambda: find_cuda_nowhere(monkeypatch, tmp_path))
    assert build.main(["--root", str(tmp_path), "--target", "h100"]) == 1
    assert "no usable CUDA compiler" in capsys.readouterr().out


def find_cuda_nowhere(monkeypatch, empty):
    monkeypatch.setattr("sysconfig.get_path", lambda name: os.fspath(empty))
    monkeypatch.setenv("PATH", os.fspath(empty))
    return find_cuda()


def compile_shared(directory, code):
    source, library = directory / "case.cpp", directory / "case.so"
    source.write_text(code)
    subprocess.run(["g++", "-shared", "-fPIC", source, "-o", library], check=True)
    return library


def device_images(library):
    """("sass" or "ptx", arch) of each entry of the library's fat binaries."""
    found, at = set(), 0
    while (at := library.find(struct.pack("<I", 0xBA55ED50), at)) >= 0:
        _, header, size = struct.unpack_from("<HHQ", library, at + 4)
        entry, at = at + header, at + header + size
        while entry < at:
            kind, _, header, size = struct.unpack_from("<HHIQ", library, entry)
            (arch,) = struct.unpack_from("<I", library, entry + 28)
            found.add(("ptx" if kind == 1 else "sass", arch))
            entry += header + size
    return found
