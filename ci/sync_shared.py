"""Copies the headers of shared/include/warpsmith that a kernel uses into the kernel's directory.

Nix builds a kernel from its own directory alone, hence real copies; see docs/nix.md.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from ci import repo
from ci.buildtoml import CXX_SUFFIXES, HEADER_SUFFIXES, INCLUDE

SUFFIXES = CXX_SUFFIXES | HEADER_SUFFIXES | {".cu"}
FOLDER = "include/warpsmith"


def _includes(path: Path) -> list[str]:
    return [
        quoted or angled for quoted, angled in INCLUDE.findall(path.read_text(errors="replace"))
    ]


def needed_headers(kernel: Path, masters: Path) -> tuple[set[str], list[str]]:
    """Names relative to `masters`, and a problem for each include of a header that is not there."""
    skipped = (kernel / "build", kernel / FOLDER)
    sources = [
        p
        for p in kernel.rglob("*")
        if p.suffix in SUFFIXES and not any(p.is_relative_to(s) for s in skipped)
    ]
    needed: set[str] = set()
    problems = []
    queue = [
        (path, name)
        for path in sources
        for name in _includes(path)
        if name.startswith("warpsmith/")
    ]
    while queue:
        user, include = queue.pop()
        name = include.removeprefix("warpsmith/")
        if not (masters / name).is_file():
            problems.append(f"{user.name} includes {include!r}, which shared/include does not have")
        elif name not in needed:
            needed.add(name)
            header = masters / name
            for inner in _includes(header):
                beside = header.parent / inner
                if inner.startswith("warpsmith/"):
                    queue.append((header, inner))
                elif beside.is_file():
                    queue.append(
                        (header, f"warpsmith/{beside.resolve().relative_to(masters).as_posix()}")
                    )
    return needed, problems


def sync(root: Path, write: bool) -> list[str]:
    """Make every kernel's copies equal to what it needs, or only say where they are not."""
    masters = (root / "shared" / FOLDER).resolve()
    problems = []
    for kernel in repo.kernel_dirs(root):
        needed, missing = needed_headers(kernel, masters)
        problems += [f"{kernel.name}: {problem}" for problem in missing]
        folder = kernel / FOLDER
        present = {
            p.relative_to(folder).as_posix()
            for p in folder.rglob("*")
            if p.is_file() or p.is_symlink()
        }
        for name in sorted(present - needed):
            if write:
                (folder / name).unlink()
            else:
                problems.append(f"{kernel.name}: {FOLDER}/{name} is not used (make sync-shared)")
        for name in sorted(needed):
            copy, master = folder / name, masters / name
            if (
                name in present
                and not copy.is_symlink()
                and copy.read_bytes() == master.read_bytes()
            ):
                continue
            if write:
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.unlink(missing_ok=True)
                shutil.copyfile(master, copy)
                print(f"{kernel.name}: {FOLDER}/{name} written")
            else:
                state = "differs from its master" if name in present else "is missing"
                problems.append(f"{kernel.name}: {FOLDER}/{name} {state} (make sync-shared)")
    return problems


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ci.sync_shared", description=__doc__)
    parser.add_argument("--root", type=Path, default=repo.ROOT)
    parser.add_argument("--check", action="store_true", help="write nothing, report what differs")
    arguments = parser.parse_args(argv)
    problems = sync(arguments.root.resolve(), write=not arguments.check)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
