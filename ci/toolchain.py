"""Finds the CUDA compiler. Standard library only, because the bootstrap asks it what to install."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

OLDEST, NEWEST_MAJOR = (12, 6), 13


class ToolchainError(Exception):
    pass


@dataclass(frozen=True)
class Cuda:
    nvcc: Path
    version: tuple[int, int]
    include: Path
    cudart: Path  # the shared library
    archs: frozenset[str]  # "7.5", "8.0", ... that nvcc can generate code for

    @property
    def label(self) -> str:
        return f"cu{self.version[0]}{self.version[1]}"


def _run(*command: str | Path) -> str:
    try:
        result = subprocess.run([*map(str, command)], capture_output=True, text=True)
    except OSError as error:
        raise ToolchainError(f"{command[0]} does not run: {error}") from None
    return result.stdout + result.stderr


def inspect_nvcc(nvcc: Path) -> Cuda:
    """Describe one nvcc, or say what it lacks."""
    release = re.search(r"release (\d+)\.(\d+)", _run(nvcc, "--version"))
    if not release:
        raise ToolchainError(f"{nvcc} does not tell its version")
    version = (int(release[1]), int(release[2]))
    if version < OLDEST or version[0] > NEWEST_MAJOR:
        raise ToolchainError(
            f"{nvcc} is {version[0]}.{version[1]}, outside 12.6 to {NEWEST_MAJOR}.x"
        )
    # nvcc itself may be a wrapper or a link, so it is asked where its toolkit is.
    dryrun = _run(nvcc, "--dryrun", "-x", "cu", "-E", os.devnull)
    top = re.search(r"^#\$ TOP=(.+)$", dryrun, re.MULTILINE)
    root = Path(top[1].strip() if top else nvcc.parent.parent).resolve()
    machine = os.uname().machine
    target = root / "targets" / f"{'sbsa' if machine == 'aarch64' else machine}-linux"
    includes = [root / "include", target / "include"]
    include = next((i for i in includes if (i / "cuda_runtime.h").is_file()), None)
    if include is None:
        raise ToolchainError(f"{nvcc} has no cuda_runtime.h under {root}")
    libraries = [root / "lib64", root / "lib", target / "lib", root / f"lib/{machine}-linux-gnu"]
    names = [f"libcudart.so.{version[0]}", "libcudart.so"]
    candidates = [library / name for library in libraries for name in names]
    cudart = next((c for c in candidates if c.is_file()), None)
    if cudart is None:
        raise ToolchainError(f"{nvcc} has no shared libcudart under {root}")
    archs = re.findall(r"compute_(\d+)(\d)\b", _run(nvcc, "--list-gpu-arch"))
    return Cuda(nvcc, version, include, cudart, frozenset(f"{a}.{b}" for a, b in archs))


def find_cuda() -> Cuda:
    """CUDA_HOME, then PATH, then PyPI's packages in this Python environment."""
    site = Path(sysconfig.get_path("purelib"))
    candidates: list[Path] = []
    if os.environ.get("CUDA_HOME"):
        candidates.append(Path(os.environ["CUDA_HOME"]) / "bin/nvcc")
    on_path = shutil.which("nvcc")
    if on_path:
        candidates.append(Path(on_path))
    candidates += sorted(site.glob("nvidia/cu*/bin/nvcc"))
    reasons = []
    for nvcc in candidates:
        try:
            return inspect_nvcc(nvcc)
        except ToolchainError as error:
            reasons.append(str(error))
    raise ToolchainError(
        "; ".join(reasons) or "no nvcc in CUDA_HOME, PATH or this Python environment"
    )


if __name__ == "__main__":
    try:
        cuda = find_cuda()
    except ToolchainError as error:
        sys.exit(f"no usable CUDA compiler: {error}")
    print(f"nvcc {cuda.version[0]}.{cuda.version[1]}: {cuda.nvcc}")
