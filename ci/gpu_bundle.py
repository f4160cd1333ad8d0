"""Packs what a GPU machine without network needs into .gpu-bundle/: python -m ci.gpu_bundle --help

ci/gpu_unpack.sh installs the parts there. Each part stays below a size that is easy to send."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kernels._rust import Digest, DigestAlgorithm
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from rich import box
from rich.console import Console
from rich.table import Table

from ci import artifact, peers_bundle, repo
from ci.packing import BundleError, collect, extras, read_machine, strip
from ci.plan import GPU_CHECK_TARGETS

# Tied to the machine's torch, or large and good in any version: never packed.
AS_IT_IS = {
    "matplotlib",
    "numpy",
    "opencv-python-headless",
    "pillow",
    "scikit-image",
    "torch",
    "triton",
}
STAMP = "stamp.json"


@dataclass(frozen=True)
class Part:
    limit: float  # MiB
    make: Callable[[Path, Path], None]  # writes the part of the checkout into an empty directory
    inputs: Callable[[Path], dict] | None = None  # the part is kept while these stay the same


def test_roots(root: Path) -> list[Requirement]:
    """What tests and benchmarks import: the project's own requirements, [test], and rich."""
    wanted = extras(root, "", "test") + [r for r in extras(root, "build") if r.name == "rich"]
    # The plots of `kernels[benchmark]` are the machine's.
    return [r for r in wanted if canonicalize_name(r.name) not in AS_IT_IS]


def installed_versions() -> dict[str, str]:
    return {
        canonicalize_name(d.metadata["Name"]): d.version for d in importlib.metadata.distributions()
    }


def wheels_inputs(root: Path) -> dict:
    return {
        "roots": sorted(map(str, test_roots(root))),
        "versions": installed_versions(),
        "machine": read_machine(root / "ci/gpu_machine.txt"),
    }


def make_wheels(root: Path, out: Path) -> None:
    machine = read_machine(root / "ci/gpu_machine.txt")
    collect(test_roots(root), out, machine, installed_versions(), AS_IT_IS)


def strip_variant(variant: Path) -> None:
    """Strip the library of a variant and bring its digest up to date."""
    for library in variant.glob("*.so"):
        strip(library)
    metadata = json.loads((variant / "metadata.json").read_text())
    digest = Digest.hash_variant(DigestAlgorithm.SHA256, variant)
    metadata["digest"] = {"algorithm": "sha256", "files": digest.files}
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    if not artifact.is_intact(variant):
        raise BundleError(f"the digest of {variant} does not fit it")


def make_builds(root: Path, out: Path) -> None:
    command = [sys.executable, "-m", "ci.build", f"--root={root}", f"--out={out}"]
    command += [f"--target={target}" for target in GPU_CHECK_TARGETS]
    if subprocess.run(command, cwd=repo.ROOT).returncode:
        raise BundleError("ci.build failed, see above")
    for metadata in sorted(out.glob("*/*/*/metadata.json")):
        strip_variant(metadata.parent)
    if commit := repo.commit():
        (out / "commit").write_text(f"{commit[0]} {'dirty' if commit[1] else 'clean'}\n")


def files_of(directory: Path) -> dict[str, int]:
    """Sizes by relative path; the stamp is not counted."""
    return {
        str(path.relative_to(directory)): path.stat().st_size
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != STAMP
    }


def is_current(directory: Path, inputs: dict) -> bool:
    try:
        stamp = json.loads((directory / STAMP).read_text())
    except (OSError, ValueError):
        return False
    # As JSON: tuples become lists.
    return stamp == json.loads(json.dumps({"inputs": inputs, "files": files_of(directory)}))


def bring_up_to_date(part: Part, root: Path, directory: Path) -> str:
    """Make the part unless its stamp fits. One that failed half-way leaves the old one in place."""
    inputs = part.inputs(root) if part.inputs else None
    if inputs is not None and is_current(directory, inputs):
        return "kept"
    staging = directory.with_name(f".{directory.name}.{os.getpid()}")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        part.make(root, staging)
        if inputs is not None:
            stamp = {"inputs": inputs, "files": files_of(staging)}
            (staging / STAMP).write_text(json.dumps(stamp, indent=1) + "\n")
        shutil.rmtree(directory, ignore_errors=True)
        staging.rename(directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return "made"


def make_bundle(parts: dict[str, Part], root: Path, out: Path, console: Console) -> int:
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("part", "files", "MiB", "limit", ""):
        table.add_column(heading, justify="left" if heading in ("part", "") else "right")
    problems = []
    for name, part in parts.items():
        console.print(f"{name} ...", markup=False)
        try:
            result = bring_up_to_date(part, root, out / name)
        except (BundleError, OSError, subprocess.CalledProcessError) as error:
            problems.append(f"{name}: {error}")
            table.add_row(name, "-", "-", f"{part.limit:g}", "FAILED")
            continue
        sizes = files_of(out / name)
        size = sum(sizes.values()) / 2**20
        if size > part.limit:
            result = "TOO LARGE"
            problems.append(f"{name}: {size:.1f} MiB, over its limit of {part.limit:g}")
        table.add_row(name, str(len(sizes)), f"{size:.1f}", f"{part.limit:g}", result)
    console.print(table)
    for problem in problems:
        console.print(problem, style="red", markup=False, soft_wrap=True)
    return 1 if problems else 0


PARTS = {
    "wheels": Part(60, make_wheels, wheels_inputs),
    "builds": Part(60, make_builds),
    "peers-a": Part(62, peers_bundle.make_a, peers_bundle.inputs_a),
    "peers-b": Part(60, peers_bundle.make_b, peers_bundle.inputs_b),
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ci.gpu_bundle", description=__doc__)
    parser.add_argument("part", nargs="*", help=f"default: {' '.join(PARTS)}")
    parser.add_argument("--root", type=Path, default=repo.ROOT, help="the checkout")
    parser.add_argument("--out", type=Path, help="default: .gpu-bundle in the checkout")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.part) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    chosen = {name: p for name, p in PARTS.items() if name in (arguments.part or PARTS)}
    root = arguments.root.resolve()
    out = (arguments.out or root / ".gpu-bundle").resolve()
    return make_bundle(chosen, root, out, Console(highlight=False))


if __name__ == "__main__":
    sys.exit(main())
