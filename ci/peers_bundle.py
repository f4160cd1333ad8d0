"""The parts of the GPU bundle that hold public implementations to compare with: the [peers] extra.

peers-a: wheels; shared objects of the CUTLASS DSL as tar.xz, a third of their size in the wheel.
peers-b: flashinfer with CUDA modules compiled here, which it would otherwise do at first use.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from zipfile import ZipFile

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from ci import repo
from ci.packing import (
    BundleError,
    collect,
    exact_version,
    extras,
    pack,
    pip_download,
    read_machine,
    strip,
    tree,
)
from ci.toolchain import ToolchainError, find_cuda

FLASHINFER = "flashinfer-python"
STAMP = "installed.txt"
REPACKED = {"nvidia-cutlass-dsl-libs-cu13"}
# Asked for by the peers and left out.
WITHOUT = {
    "nvidia-cutlass-dsl-libs-cu12",  # the cu13 ones are packed
    "cuda-python",  # a name for cuda-bindings and others
    # Back ends of flashinfer that are imported at use; 200 MB, and no benchmark calls them.
    "cuda-tile",
    "nccl-extensions",
    "nccl4py",
    "nvidia-cudnn-frontend",
}

CUDA_ARCH = "9.0a"
# What `module_specs` makes, all in bf16.
MODULES = (
    ("act_and_mul", "gelu"),
    ("act_and_mul", "gelu_tanh"),
    ("norm",),  # without the CUTLASS DSL or with FLASHINFER_USE_CUDA_NORM=1
    ("rope",),
    ("batch_decode", 128),
    ("single_prefill_fa3", 64),
    ("single_prefill_fa3", 128),
    ("single_prefill_fa3", 256),
)
# To import flashinfer here, and headers that nvcc comes without.
BUILD_NEEDS = ("nvidia-ml-py==13.615.71",)
HEADERS = ("nvidia-cublas==13.0.2.14", "nvidia-curand==10.4.0.35")


def peers(root: Path) -> tuple[list[Requirement], list[Requirement]]:
    """The extra, by part."""
    found = extras(root, "peers")
    is_b = [canonicalize_name(r.name) == FLASHINFER for r in found]
    return [r for r, b in zip(found, is_b) if not b], [r for r, b in zip(found, is_b) if b]


def inputs_a(root: Path) -> dict:
    return {"requirements": sorted(map(str, peers(root)[0])), "without": sorted(WITHOUT)}


def inputs_b(root: Path) -> dict:
    a, b = peers(root)
    return {"requirements": sorted(map(str, a + b)), "modules": MODULES, "arch": CUDA_ARCH}


def repack(wheel: Path) -> None:
    """Put a tar.xz in the place of a wheel."""
    name = parse_wheel_filename(wheel.name)[0]
    with tempfile.TemporaryDirectory(dir=wheel.parent.parent) as scratch:
        ZipFile(wheel).extractall(scratch)
        pack(tree(Path(scratch)), wheel.with_name(f"{name}.tar.xz"))
    wheel.unlink()


def make_a(root: Path, out: Path) -> None:
    collect(peers(root)[0], out, read_machine(root / "ci/gpu_machine.txt"), {}, WITHOUT)
    for wheel in sorted(out.glob("*.whl")):
        if parse_wheel_filename(wheel.name)[0] in REPACKED:
            repack(wheel)


def is_used(name: str) -> bool:
    """Whether a file of flashinfer is of use beside compiled modules. Most of the rest is device code
    of other architectures; what the modules above are generated from stays."""
    if name.startswith("flashinfer/data/csrc/"):
        return name.count("/") == 3
    if name.startswith("flashinfer/data/"):
        return True
    return not name.endswith((".cu", ".md"))


def fill_once(directory: Path, pins: list[str], fill: Callable[[Path, list[str]], None]) -> Path:
    """The directory with these pins in it, filled anew unless they are what is there."""
    wanted, stamp = "\n".join(pins), directory / STAMP
    if not stamp.is_file() or stamp.read_text() != wanted:
        shutil.rmtree(directory, ignore_errors=True)
        fill(directory, pins)
        stamp.write_text(wanted)
    return directory


def pip_install(site: Path, pins: list[str]) -> None:
    command = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    command += ["--no-deps", "--no-compile", "--target", str(site), *pins]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise BundleError(f"pip install {' '.join(pins)}: {done.stderr.strip()}")


def extract_headers(directory: Path, pins: list[str]) -> None:
    """Without the libraries beside them, which are hundreds of MB."""
    with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
        pip_download(Path(scratch), pins)
        for wheel in Path(scratch).glob("*.whl"):
            with ZipFile(wheel) as archive:
                names = [name for name in archive.namelist() if "/include/" in name]
                archive.extractall(directory, names)


def make_toolkit(work: Path) -> dict[str, str]:
    """A CUDA_HOME whose lib64 has what flashinfer links with, libcuda without a driver included."""
    try:
        cuda = find_cuda()
    except ToolchainError as error:
        raise BundleError(f"no usable CUDA compiler: {error}") from None
    home, lib = work / "cuda", work / "cuda/lib64"
    shutil.rmtree(home, ignore_errors=True)
    lib.mkdir(parents=True)
    (home / "bin").mkdir()
    # Not a link: nvcc looks for its toolkit beside the path that it was called by.
    (home / "bin/nvcc").write_text(f'#!/bin/sh\nexec "{cuda.nvcc}" "$@"\n')
    (home / "bin/nvcc").chmod(0o755)
    (home / "include").symlink_to(cuda.include)
    for name in ("libcudart.so", cuda.cudart.name):
        (lib / name).symlink_to(cuda.cudart)
    stub = ["g++", "-shared", "-x", "c", os.devnull, "-Wl,-soname,libcuda.so.1"]
    subprocess.run([*stub, "-o", lib / "libcuda.so.1"], check=True)
    (lib / "libcuda.so").symlink_to("libcuda.so.1")
    headers = fill_once(work / "headers", list(HEADERS), extract_headers) / "nvidia/cu13/include"
    return {
        "CUDA_HOME": str(home),
        "FLASHINFER_EXTRA_CUDAFLAGS": f"-isystem {headers}",
        # Ubuntu's linker drops libraries that nothing seems to use, such as the stub.
        "FLASHINFER_EXTRA_LDFLAGS": "-Wl,--no-as-needed -lcuda",
        "LD_LIBRARY_PATH": str(lib),
    }


def run_here(action: str, path: list[Path], env: dict[str, str]) -> dict[str, str]:
    """Run `action` of this module where flashinfer can be imported."""
    python_path = os.pathsep.join(map(str, [repo.ROOT, *path]))
    env = {**os.environ, **env, "PYTHONPATH": python_path, "FLASHINFER_CUDA_ARCH_LIST": CUDA_ARCH}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # ninja
    command = [sys.executable, "-m", "ci.peers_bundle", action]
    done = subprocess.run(command, cwd=repo.ROOT, env=env, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise BundleError(f"flashinfer's modules: {action} failed, see above")
    return json.loads(done.stdout.splitlines()[-1])


def make_b(root: Path, out: Path) -> None:
    a, b = peers(root)
    work = root / ".build/gpu-bundle"
    has = read_machine(root / "ci/gpu_machine.txt")
    has |= {canonicalize_name(r.name): exact_version(r) for r in a}
    collect(b, out, has, {}, WITHOUT)
    for wheel in out.glob("*.whl"):
        if parse_wheel_filename(wheel.name)[0] == FLASHINFER:
            wheel.unlink()  # packed below
    flashinfer = fill_once(work / "flashinfer", [str(r) for r in b], pip_install)
    tvm_ffi = [str(r) for r in a if canonicalize_name(r.name) == "apache-tvm-ffi"]
    needs = fill_once(work / "needs", [*tvm_ffi, *BUILD_NEEDS], pip_install)
    env = {**make_toolkit(work), "FLASHINFER_WORKSPACE_BASE": str(work)}
    env["MAX_JOBS"] = str(len(os.sched_getaffinity(0)))
    built = run_here("compile", [flashinfer, needs], env)

    files = [(p, n) for p, n in tree(flashinfer) if is_used(n) and n != STAMP]
    with tempfile.TemporaryDirectory(dir=work) as scratch:
        for name, library in built.items():
            copy = Path(scratch) / f"{name}.so"
            shutil.copy(library, copy)
            strip(copy)
            files.append((copy, f"flashinfer/data/aot/{name}/{name}.so"))
        pack(files, out / "flashinfer.tar.xz")
        # As on the GPU machine, where nothing may be left to compile.
        unpacked = Path(scratch) / "site"
        with tarfile.open(out / "flashinfer.tar.xz") as archive:
            archive.extractall(unpacked, filter="data")
        env |= {"FLASHINFER_DISABLE_JIT": "1", "FLASHINFER_WORKSPACE_BASE": scratch}
        found = run_here("load", [unpacked, needs], env)
    if set(found) != set(built):
        raise BundleError(f"packed, but not found: {', '.join(sorted(set(built) - set(found)))}")


def module_specs() -> list:
    import torch
    from flashinfer.jit import activation, norm, rope
    from flashinfer.jit.attention import modules

    bf16 = [torch.bfloat16] * 3  # q, kv, output
    plain = (0, False, False)  # no position encoding, sliding window or cap of the logits
    makers = {
        "act_and_mul": activation.gen_act_and_mul_module,
        "norm": norm.gen_norm_module,
        "rope": rope.gen_rope_module,
        "batch_decode": lambda d: modules.gen_batch_decode_module(*bf16, torch.int32, d, d, *plain),
        "single_prefill_fa3": lambda d: modules.gen_single_prefill_module(
            "fa3", *bf16, d, d, *plain, False
        ),
    }
    return [makers[kind](*arguments) for kind, *arguments in MODULES]


def main(action: str) -> None:
    """Prints {module: library}: `compile` all modules, or `load` those compiled before."""
    from flashinfer.jit.core import build_jit_specs

    specs = module_specs()
    if action == "compile":
        build_jit_specs(specs)
        print(json.dumps({spec.name: str(spec.jit_library_path) for spec in specs}))
    else:
        for spec in specs:
            spec.build_and_load()
        print(json.dumps({spec.name: str(spec.get_library_path()) for spec in specs}))


if __name__ == "__main__":
    main(sys.argv[1])
