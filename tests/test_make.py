"""The Makefile, the choice of the builder and the search for a CUDA compiler."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ci import toolchain
from common.toy_kernel import write_toy

ROOT = Path(__file__).resolve().parents[1]
TARGETS = {"build-all", "release", "test", "check", "check-nix", "sync-shared", "fmt"}
TARGETS |= {
    "sync-locks",
    "gpu-bundle",
    "devshell",
    "clean",
    "build-<kernel>",
    "build-<kernel>-<target>",
}


@pytest.fixture
def tree(tmp_path):
    """A scratch checkout with two kernels and the scripts, but nothing installed."""
    for name in ("toy", "other-toy"):
        write_toy(tmp_path, name)
    (tmp_path / "kernels/notes").mkdir()
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copy(ROOT / "flake.nix", tmp_path)
    shutil.copytree(ROOT / "ci", tmp_path / "ci")
    return tmp_path


def make(tree, *arguments):
    command = ["make", "--no-print-directory", *arguments]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_make_alone_lists_the_targets_a_line_each(tree):
    lines = make(tree).splitlines()
    assert all(line.startswith("make ") for line in lines)
    listed = [line.split()[1] for line in lines]
    assert set(listed) >= TARGETS
    assert len(listed) == len(set(listed))
    assert all(len(line.split()) > 2 for line in lines)


def test_kernels_are_the_directories_with_a_build_toml(tree):
    all_targets = "cpu release h100 a100 t4"
    assert make(tree, "-n", "build-all") == f'ci/build.sh "other-toy toy" "{all_targets}"\n'
    assert make(tree, "-n", "release") == 'ci/build.sh "other-toy toy" "cpu release"\n'
    assert make(tree, "-n", "build-other-toy") == f'ci/build.sh "other-toy" "{all_targets}"\n'
    assert make(tree, "-n", "build-toy-ptx75") == 'ci/build.sh "toy" "ptx75"\n'


def test_clean_removes_what_is_generated_and_nothing_else(tree):
    sources = {p for p in tree.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    generated = [".build/x", "dist/t4/x", "result/x", "ci/__pycache__/x", ".pytest_cache/x"]
    left_by_create_pyproject = (
        "setup.py pyproject.toml CMakeLists.txt cmake/utils.cmake metadata-cpu.json "
        "metadata-cuda.json torch-ext/registration.h torch-ext/toy/_ops.py _cmake_build/x build/v/x"
    )
    generated += [f"kernels/toy/{name}" for name in left_by_create_pyproject.split()]
    for name in generated:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).touch()
    (tree / ".venv").mkdir()
    make(tree, "clean")
    assert {p for p in tree.rglob("*") if p.is_file()} == sources
    assert (tree / ".venv").is_dir()
    shutil.copy(ROOT / ".gitignore", tree)
    subprocess.run(["git", "init", "-q"], cwd=tree, check=True)
    ignored = subprocess.run(["git", "check-ignore", *generated], cwd=tree, capture_output=True)
    assert ignored.stdout.decode().split() == generated


def executable(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def path_without_nix(tmp_path):
    """A PATH with everything that the scripts call, and no nix."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "sh", "grep", "head", "sort", "timeout", "dirname", "sed", "env"):
        (tools / name).symlink_to(shutil.which(name))
    (tools / "python3").symlink_to(sys.executable)
    return tools


NIX_NEW, NIX_OLD = "echo nix \\(Nix\\) 2.26.3", "echo nix \\(Nix\\) 2.8.0"
DEAD = "http://127.0.0.1:9"
CHOICES = {
    "no_nix": (None, {}, "local", "no nix"),
    "old_nix": (NIX_OLD, {}, "local", "nix 2.8 is older than 2.18"),
    "dead_cache": (NIX_NEW, {"NIX_CACHE_URL": DEAD}, "local", "does not answer within 10 s"),
    "nix": (NIX_NEW, {}, "nix", "nix 2.26 and file://"),
    "forced_nix": (None, {"BUILDER": "nix"}, "nix", "BUILDER=nix"),
    "forced_local": (NIX_NEW, {"BUILDER": "local"}, "local", "BUILDER=local"),
}


@pytest.mark.parametrize("case", CHOICES)
def test_choice_of_the_builder(path_without_nix, tmp_path, case):
    nix, env, choice, reason = CHOICES[case]
    if nix:
        executable(path_without_nix / "nix", nix)
    (tmp_path / "nix-cache-info").touch()
    env = {"PATH": str(path_without_nix), "NIX_CACHE_URL": f"file://{tmp_path}", **env}
    command = [str(ROOT / "ci/choose_builder.sh")]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{choice}\n")
    assert reason in done.stderr


def test_an_unknown_builder_is_refused():
    env = {**os.environ, "BUILDER": "bazel"}
    done = subprocess.run([ROOT / "ci/choose_builder.sh"], env=env, capture_output=True, text=True)
    assert done.returncode == 2 and "bazel" in done.stderr


def test_nix_builds_each_target_into_a_directory_of_its_own(tree, path_without_nix):
    for name in ("mkdir", "rm"):
        (path_without_nix / name).symlink_to(shutil.which(name))
    executable(path_without_nix / "nix", 'echo "$@" >>nix.log; case "$*" in *-a100*) exit 1;; esac')
    env = {"PATH": str(path_without_nix), "BUILDER": "nix"}
    command = ["ci/build.sh", "toy other-toy", "cpu release a100 t4"]
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
    assert done.returncode == 1  # a100 failed, the rest went on
    calls = [line.split("build ")[1] for line in (tree / "nix.log").read_text().splitlines()]
    assert calls == [
        f".#{kernel}{suffix} -o dist/{target}/{kernel}"
        for kernel in ("toy", "other-toy")
        for suffix, target in (("", "release"), ("-a100", "a100"), ("-t4", "t4"))
    ]


def test_ptx_is_built_locally_even_with_nix(tree, path_without_nix):
    executable(path_without_nix / "nix", "exit 1")
    executable(tree / ".venv/bin/python", 'echo "$@" >>python.log')
    executable(tree / "ci/bootstrap.sh", "")
    env = {"PATH": str(path_without_nix), "BUILDER": "nix"}
    command = ["ci/build.sh", "toy other-toy", "ptx75"]
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    arguments = "--kernel=toy --kernel=other-toy --target=ptx75"
    assert (tree / "python.log").read_text() == f"-m ci.build {arguments}\n"


FAKE_NVCC = """
case "$1" in
  --version) echo "Cuda compilation tools, release {version}, V{version}.1" ;;
  --list-gpu-arch) printf 'compute_75\\ncompute_90\\ncompute_103\\n' ;;
  *) echo "#\\$ TOP={root}/bin/.." >&2 ;;
esac"""


def fake_toolkit(root, version, headers=True, cudart="lib/libcudart.so.13"):
    if headers:
        (root / "include").mkdir(parents=True)
        (root / "include/cuda_runtime.h").touch()
    if cudart:
        (root / cudart).parent.mkdir(parents=True)
        (root / cudart).touch()
    return executable(root / "bin/nvcc", FAKE_NVCC.format(version=version, root=root))


def test_a_complete_toolkit_is_described(tmp_path):
    cuda = toolchain.inspect_nvcc(fake_toolkit(tmp_path, "13.0"))
    assert (cuda.version, cuda.label) == ((13, 0), "cu130")
    assert cuda.cudart == tmp_path / "lib/libcudart.so.13"
    assert cuda.archs == {"7.5", "9.0", "10.3"}


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"version": "12.5"}, "outside 12.6 to 13.x"),
        ({"version": "14.0"}, "outside 12.6 to 13.x"),
        ({"version": "13.0", "headers": False}, "no cuda_runtime.h"),
        ({"version": "13.0", "cudart": None}, "no shared libcudart"),
        ({"version": "12.9"}, "no shared libcudart"),
    ],
)
def test_an_unusable_toolkit_is_refused(tmp_path, arguments, message):
    nvcc = fake_toolkit(tmp_path, **arguments)
    with pytest.raises(toolchain.ToolchainError, match=message):
        toolchain.inspect_nvcc(nvcc)


def test_cuda_home_then_path_then_the_python_environment(tmp_path, monkeypatch):
    home, path, site = tmp_path / "home", tmp_path / "path", tmp_path / "site"
    for root in (home, path, site / "nvidia/cu13"):
        fake_toolkit(root, "13.0")
    monkeypatch.setattr(toolchain.sysconfig, "get_path", lambda name: str(site))
    monkeypatch.setenv("CUDA_HOME", str(home))
    monkeypatch.setenv("PATH", f"{path}/bin:/usr/bin:/bin")
    assert toolchain.find_cuda().nvcc == home / "bin/nvcc"
    (home / "include/cuda_runtime.h").unlink()
    assert toolchain.find_cuda().nvcc == path / "bin/nvcc"
    (path / "lib/libcudart.so.13").unlink()
    assert toolchain.find_cuda().nvcc == site / "nvidia/cu13/bin/nvcc"
    shutil.rmtree(site)
    with pytest.raises(
        toolchain.ToolchainError, match="no cuda_runtime.h .*; .*no shared libcudart"
    ):
        toolchain.find_cuda()
