"""Host programs that check shared headers and launch choices: compiled, run, no GPU needed."""

import subprocess
from pathlib import Path

import pytest
import torch

from ci.toolchain import find_cuda

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = sorted([*ROOT.glob("tests/cpp/*.c*"), *ROOT.glob("kernels/*/tests/cpp/*.c*")])


def compile_program(program, tmp_path):
    kernel = program.parents[2]  # the repository's own root for the shared headers
    torch_dir = Path(torch.__file__).parent
    includes = [ROOT / "tests/cpp", ROOT / "shared/include", kernel, torch_dir / "include"]
    compiler = ["g++"]
    if program.suffix == ".cu":
        cuda = find_cuda()
        compiler = [
            cuda.nvcc,
            f"-L{cuda.cudart.parent}",
            "--expt-relaxed-constexpr",
            "--cudart=static",
            "-Wno-deprecated-gpu-targets",
        ]
    binary = tmp_path / program.stem
    command = [
        *compiler,
        "-std=c++17",
        *(f"-I{include}" for include in includes),
        program,
        "-o",
        binary,
    ]
    compiled = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stderr
    return binary


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.name)
def test_program(program, tmp_path):
    binary = compile_program(program, tmp_path)
    ran = subprocess.run([binary], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_each_file_asks_for_its_own_archs(tmp_path):
    """Files with other capability lists must not share the answer: nothing of it may be merged."""
    binary = compile_program(ROOT / "tests/cpp/device_info.cu", tmp_path)
    listing = subprocess.run(["nm", "-C", binary], capture_output=True, text=True, check=True)
    names = [
        line.split(maxsplit=2)[1:] for line in listing.stdout.splitlines() if "warpsmith::" in line
    ]
    assert any("newest_path_within" in name for _, name in names)
    assert all("(anonymous namespace)" in name for _, name in names), names
