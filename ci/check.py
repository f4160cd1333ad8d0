"""Repository rules that need no compiler: python -m ci.check"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from ci import repo, sync_shared
from ci.buildtoml import (
    CXX_SUFFIXES,
    GENERATED_HEADER,
    HEADER_SUFFIXES,
    BuildTomlError,
    Kernel,
    find_problems,
    read,
    untracked,
)

REQUIRED_FILES = (
    "CARD.md",
    "CHANGELOG.md",
    "benchmarks/benchmark.py",
    "example.py",
    "flake.lock",
    "flake.nix",
)

# One build serves this version of torch and newer ones.
STABLE_ABI = "2.11"
# Results must not depend on whether a compiler fuses a * b + c.
NO_CONTRACTION = {".cu": "--fmad=false", ".cpp": "-ffp-contract=off"}

# What must not stand in a kernel's torch-ext/.
FORBIDDEN = {
    r"pybind11|PYBIND11|torch/extension\.h|\bpy::": "pybind11 is not part of the stable ABI",
    r"(^|[^_\w])TORCH_LIBRARY\(|TORCH_LIBRARY_FRAGMENT": "use STABLE_TORCH_LIBRARY_EXPAND",
    r"PyInit": "use REGISTER_EXTENSION",
    r"TORCH_LIBRARY(_IMPL)?(_EXPAND)?\(\s*(?!TORCH_EXTENSION_NAME\b)\w": "not TORCH_EXTENSION_NAME",
    r"cpp_extension|load_inline": "the extension is built from build.toml",
}
# For the package called {name}.
FORBIDDEN_NAMES = {
    r"torch\.ops\.{name}\b": "ops are renamed for each build: from ._ops import ops",
    r"^\s*(from|import) {name}\b": "the package is renamed when it is loaded: import relatively",
}

# Made by builds or by `kernel-builder create-pyproject`.
GENERATED = re.compile(
    r"(^|/)(setup\.py|registration\.h|_ops\.py|_cmake_build/.*|metadata(-\w+)?\.json|.*\.(so|o|pyc))$"
    r"|^kernels/[^/]+/(CMakeLists\.txt|pyproject\.toml|cmake/.*|build/.*|result.*)$"
    r"|^(dist|\.build|\.venv)/"
)


def build_tomls(root: Path) -> list[str]:
    problems = []
    for directory in repo.kernel_dirs(root):
        try:
            kernel = read(directory)
            found = find_problems(kernel) + untracked(kernel) + policy(kernel)
        except BuildTomlError as error:
            found = error.problems
        found += [
            f"{name} does not exist" for name in REQUIRED_FILES if not (directory / name).is_file()
        ]
        problems += [f"{directory.name}: {problem}" for problem in found]
    return problems


def policy(kernel: Kernel) -> list[str]:
    """What this project asks of a build.toml beyond what makes it valid."""
    problems = [
        f"[torch.stable-abi] {backend} is {version}, not {STABLE_ABI}"
        for backend, version in kernel.stable_abi.items()
        if version != STABLE_ABI
    ]
    for section in kernel.sections:
        if section.backend is None:
            continue
        flags = (*section.cxx_flags, *section.cuda_flags)
        for suffix in {Path(path).suffix for path in section.sources()}:
            if NO_CONTRACTION.get(suffix, "") not in ("", *flags):
                problems.append(f"[{section.name}] lacks {NO_CONTRACTION[suffix]}")
    listed = {path for section in kernel.sections for path in section.src}
    for path in sorted(repo.tracked_files(kernel.directory) or ()):
        code = Path(path).suffix in CXX_SUFFIXES | HEADER_SUFFIXES | {".cu"}
        if code and path not in listed and not path.startswith("tests/"):
            problems.append(f"{path!r} is in no src, so builds do not have it")
    return problems


def shared_headers(root: Path) -> list[str]:
    return sync_shared.sync(root, write=False)


def forbidden_patterns(root: Path) -> list[str]:
    problems = []
    for directory in repo.kernel_dirs(root):
        name = directory.name.replace("-", "_")
        rules = FORBIDDEN | {k.format(name=name): why for k, why in FORBIDDEN_NAMES.items()}
        for path in sorted((directory / "torch-ext").rglob("*")):
            generated = path.name in ("_ops.py", GENERATED_HEADER)
            if generated or path.suffix not in {".py", ".cu"} | CXX_SUFFIXES | HEADER_SUFFIXES:
                continue
            for number, line in enumerate(path.read_text().splitlines(), 1):
                where = f"{path.relative_to(root)}:{number}"
                problems += [
                    f"{where}: {why}: {line.strip()}"
                    for pattern, why in rules.items()
                    if re.search(pattern, line)
                ]
    return problems


def generated_files(root: Path) -> list[str]:
    tracked = repo.tracked_files(root)
    if tracked is None:
        return [f"{root} is not a git repository"]
    return [
        f"{path} is generated but tracked by git"
        for path in sorted(tracked)
        if GENERATED.search(path)
    ]


def lock_files(root: Path) -> list[str]:
    master = root / "flake.lock"
    if not master.is_file():
        return ["flake.lock does not exist"]
    copies = [directory / "flake.lock" for directory in repo.kernel_dirs(root)]
    return [
        f"{copy.relative_to(root)} differs from flake.lock"
        for copy in copies
        if copy.is_file() and copy.read_bytes() != master.read_bytes()
    ]


CHECKS = (build_tomls, shared_headers, forbidden_patterns, generated_files, lock_files)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ci.check", description=__doc__)
    parser.add_argument("--root", type=Path, default=repo.ROOT)
    root = parser.parse_args(argv).root.resolve()
    failed = False
    for check in CHECKS:
        problems = check(root)
        print(check.__name__.replace("_", " ") + ":", len(problems) or "no", "problems")
        for problem in problems:
            print(f"  {problem}")
        failed |= bool(problems)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
