"""What a build directory holds besides the compiled module, and the checks on the result."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from kernel_abi_check import ObjectFile
from kernels._rust import Digest, DigestAlgorithm, Metadata
from kernels.compat import tomllib

from ci.plan import Plan

# Recorded as the builder's version, which the loader carries along and prints.
BUILDER = "warpsmith local build, not for publishing"

OPS_PY = '''\
import torch

from . import {module}

ops = torch.ops.{module}


def add_op_namespace_prefix(op_name: str) -> str:
    """The name under which this build of the kernel registered the op."""
    return f"{module}::{{op_name}}"
'''

# Loaders before kernels 0.10 import <variant>/<name>/__init__.py.
OLD_LOADER_PY = """\
import importlib.util
import sys
from pathlib import Path

_path = Path(__file__).resolve().parent.parent / "__init__.py"
_name = __name__ + "_top"
if _name not in sys.modules:
    _spec = importlib.util.spec_from_file_location(_name, _path)
    sys.modules[_name] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_name])
globals().update({k: v for k, v in vars(sys.modules[_name]).items() if not k.startswith("__")})
"""

PYTHON_ABI = "3.9"
MANYLINUX = "manylinux_2_28"
# Debian 12's g++ makes this of torch's own headers; a Nix build does not have it.
ALLOWED_NEWER_SYMBOLS = {("__libc_single_threaded", "GLIBC", "2.32")}
# Version tags of glibc, libstdc++, libgcc and cudart; Python's names are left to kernel_abi_check.
SYSTEM_VERSIONS = ("GLIBC_", "GLIBCXX_", "CXXABI_", "GCC_", "libcudart.so")
MANYLINUX_LEVELS = ("manylinux_2_28", "manylinux_2_31", "manylinux_2_34", "manylinux_2_35")


def metadata(plan: Plan, revision: tuple[str, bool] | None, digest: Digest | None) -> dict:
    general = plan.kernel.general
    backend = {"type": plan.backend}
    if plan.archs:
        backend["archs"] = list(plan.archs)
    depends = general.get("python-depends", []) + general.get(plan.backend, {}).get(
        "python-depends", []
    )
    provenance: dict = {"kernel-builder": {"version": BUILDER}}
    if revision:
        provenance["kernel"] = {"commit": revision[0], "dirty": revision[1]}
    return {
        "name": general["name"],
        "id": plan.module,
        "version": general["version"],
        "license": general["license"],
        **{key: general[key] for key in ("upstream", "source") if key in general},
        "python-depends": depends,
        "kernel-depends": [],
        "backend": backend,
        **({"digest": {"algorithm": "sha256", "files": digest.files}} if digest else {}),
        "provenance": provenance,
    }


def assemble(plan: Plan, library: Path, revision: tuple[str, bool] | None, out: Path) -> None:
    """Write the build directory aside, then put it in the place of what was there before."""
    if out.parent.is_symlink():  # a result of `nix build`
        out.parent.unlink()
    staging = out.with_name(f".{out.name}.{os.getpid()}")
    shutil.rmtree(staging, ignore_errors=True)
    (staging / plan.kernel.python_name).mkdir(parents=True)
    for name in plan.kernel.package_files():
        (staging / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(plan.kernel.package / name, staging / name)
    (staging / "_ops.py").write_text(OPS_PY.format(module=plan.module))
    (staging / plan.kernel.python_name / "__init__.py").write_text(OLD_LOADER_PY)
    shutil.copyfile(library, staging / library.name)
    digest = Digest.hash_variant(DigestAlgorithm.SHA256, staging)
    text = json.dumps(metadata(plan, revision, digest), indent=2) + "\n"
    (staging / "metadata.json").write_text(text)
    remove_local_builds(out, plan.backend)
    staging.rename(out)


def remove_local_builds(out: Path, backend: str) -> None:
    """Remove `out` and this builder's other variants of the backend beside it, for instance of
    another CUDA version; the loader could prefer a stale one."""
    shutil.rmtree(out, ignore_errors=True)
    for path in out.parent.glob("torch-*/metadata.json"):
        found = json.loads(path.read_text())
        builder = found.get("provenance", {}).get("kernel-builder", {}).get("version")
        if builder == BUILDER and found["backend"]["type"] == backend:
            shutil.rmtree(path.parent)


def is_intact(out: Path) -> bool:
    try:
        recorded = Metadata.read_from_file(out / "metadata.json").digest
        recorded.validate(Digest.hash_variant(DigestAlgorithm.SHA256, out))
    except Exception:
        return False
    return True


@dataclass(frozen=True)
class Function:
    """One kernel or device function as ptxas compiled it for one architecture."""

    name: str
    arch: str
    registers: int
    spill_bytes: int
    stack_bytes: int


def read_ptxas_log(text: str) -> list[Function]:
    functions = []
    name = arch = ""
    stack = spill = 0
    for line in text.splitlines():
        if found := re.search(r"Compiling entry function '(\S+)' for '(\w+)'", line):
            name, arch, stack, spill = found[1], found[2], 0, 0
        elif found := re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line
        ):
            stack, spill = max(stack, int(found[1])), spill + int(found[2]) + int(found[3])
        elif found := re.search(r"Used (\d+) registers", line):
            functions.append(Function(name, arch, int(found[1]), spill, stack))
    return functions


def allowed_spills(path: Path) -> list[dict]:
    """`[[allow]]` tables: kernel, function (part of its name), optionally arch, and the reason."""
    if not path.is_file():
        return []
    entries = tomllib.loads(path.read_text()).get("allow", [])
    for entry in entries:
        if not all(str(entry.get(key, "")).strip() for key in ("kernel", "function", "reason")):
            raise ValueError(f"{path}: each entry needs kernel, function and reason: {entry}")
    return entries


def spill_problems(kernel: str, functions: list[Function], allowed: list[dict]) -> list[str]:
    def is_allowed(function: Function) -> bool:
        return any(
            a["kernel"] == kernel
            and a["function"] in function.name
            and a.get("arch", function.arch) == function.arch
            for a in allowed
        )

    return [
        f"{f.name} spills {f.spill_bytes} bytes on {f.arch}"
        for f in functions
        if f.spill_bytes and not is_allowed(f)
    ]


def _dynamic_symbols(library: Path, which: str) -> list[tuple[str, str]]:
    """(type letter, name) of the dynamic symbols; names keep their @VERSION."""
    result = subprocess.run(
        ["nm", "-D", which, str(library)], capture_output=True, text=True, check=True
    )
    return [(fields[-2], fields[-1]) for fields in map(str.split, result.stdout.splitlines())]


def undefined_problems(library: Path, providers: list[Path]) -> list[str]:
    """Undefined symbols that neither Python, a system library, cudart nor torch's C functions
    provide. C++ names of torch count as missing: they differ between torch versions."""
    wanted = [name for kind, name in _dynamic_symbols(library, "--undefined-only") if kind == "U"]
    exported = {
        name for provider in providers for _, name in _dynamic_symbols(provider, "--defined-only")
    }

    def is_provided(name: str) -> bool:
        plain, _, version = name.partition("@")
        if version:
            return version.startswith(SYSTEM_VERSIONS)
        return plain.startswith("Py") or (plain in exported and not plain.startswith("_Z"))

    return [f"undefined symbol {name}" for name in wanted if not is_provided(name)]


def python_abi_problems(library: Path) -> list[str]:
    found = ObjectFile(library).check_python_abi(PYTHON_ABI)
    return [f"not in the Python {PYTHON_ABI} ABI: {symbol.name}" for symbol in found]


def manylinux_problems(library: Path) -> list[str]:
    return [
        f"newer than {MANYLINUX}: {symbol.name}@{symbol.dep}_{symbol.version}"
        for symbol in ObjectFile(library).check_manylinux(MANYLINUX)
        if (symbol.name, symbol.dep, symbol.version) not in ALLOWED_NEWER_SYMBOLS
    ]


def manylinux_level(library: Path) -> str:
    checked = ObjectFile(library)
    levels = (level for level in MANYLINUX_LEVELS if not checked.check_manylinux(level))
    return next(levels, "newer").removeprefix("manylinux_")


LOAD_CODE = """
import logging, pathlib, sys
logging.basicConfig(level=logging.WARNING, format="WARNING %(message)s")
import kernels
kernels.get_local_kernel(pathlib.Path(sys.argv[1]), backend="cpu")
"""


def load_problems(out: Path, dirty: bool) -> list[str]:
    """Load a CPU variant in a process of its own; a loader warning is a problem unless it is the
    one that a tree with uncommitted changes deserves."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", LOAD_CODE, str(out.parent)]  # the loader chooses
    result = subprocess.run(command, capture_output=True, text=True, env=env)
    if result.returncode:
        return ["does not load:\n" + result.stderr.strip()]
    warnings = [line for line in result.stderr.splitlines() if line.startswith("WARNING")]
    return [f"loads with: {w}" for w in warnings if not (dirty and "dirty git tree" in w)]


@dataclass
class Report:
    """The row of the table for one unit."""

    size: int
    registers: int | None  # of the kernel with most; None without SASS
    spill_bytes: int | None
    stack_bytes: int | None
    python_abi: str
    manylinux: str
    undefined: int
    loads: str
    problems: list[str]

    as_dict = asdict


def examine(
    plan: Plan,
    library: Path,
    logs: list[Path],
    stand_in: Path | None,
    torch_lib: Path,
    allowed: list[dict],
) -> Report:
    """Everything that can be said of the library before it is installed."""
    functions = [f for log in logs for f in read_ptxas_log(log.read_text())]
    providers = [torch_lib / "libtorch.so", torch_lib / "libtorch_cpu.so"]
    providers += [stand_in] if stand_in else []
    python_abi = python_abi_problems(library)
    undefined = undefined_problems(library, providers)

    def most(field: str) -> int | None:
        return max((getattr(f, field) for f in functions), default=None)

    return Report(
        size=library.stat().st_size,
        registers=most("registers"),
        spill_bytes=most("spill_bytes"),
        stack_bytes=most("stack_bytes"),
        python_abi="no" if python_abi else PYTHON_ABI,
        manylinux=manylinux_level(library),
        undefined=len(undefined),
        loads="on GPU only" if plan.cuda else "-",
        problems=python_abi
        + manylinux_problems(library)
        + undefined
        + spill_problems(plan.kernel.name, functions, allowed),
    )
