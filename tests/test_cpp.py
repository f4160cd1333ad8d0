"""Host programs that check shared headers and launch choices: compiled, run, no GPU needed."""

import subprocess
from pathlib import Path

import pytest
import torch

from ci.toolchain import find_cuda

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = sorted([*ROOT.glob("tests/cpp/*.c*"), *ROOT.glob("kernels/*/tests/cpp/*.c*")])


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.name)
def test_program(program, tmp_path):
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
    ran = subprocess.run([binary], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
