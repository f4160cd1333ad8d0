"""Where things are in a checkout, and what git knows about them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def kernel_dirs(root: Path) -> list[Path]:
    return sorted(path.parent for path in root.glob("kernels/*/build.toml"))


def git(directory: Path, *args: str) -> str | None:
    """Output of a git command, or None where it fails (no git, no repository, no commit)."""
    try:
        result = subprocess.run(
            ["git", "-C", str(directory), *args], capture_output=True, text=True
        )
    except FileNotFoundError:
        return None
    return result.stdout if result.returncode == 0 else None


def tracked_files(directory: Path) -> set[str] | None:
    """Paths under `directory`, relative to it, that are in git's index; None outside git."""
    listing = git(directory, "ls-files", "-z")
    return None if listing is None else set(listing.split("\0")) - {""}


def commit() -> tuple[str, bool] | None:
    """The commit of this checkout and whether anything but results differs from it; for a copy,
    WARPSMITH_COMMIT says both, as `make gpu-bundle` wrote them."""
    name, _, state = os.environ.get("WARPSMITH_COMMIT", "").strip().partition(" ")
    if name:
        return name, state != "clean"
    top = (git(ROOT, "rev-parse", "--show-toplevel") or "").strip()
    head = (git(ROOT, "rev-parse", "HEAD") or "").strip()
    if not head or Path(top).resolve() != ROOT:
        return None
    return head, bool(git(ROOT, "status", "--porcelain", "--", ".", ":!benchmarks/results"))


def kernel_revision(directory: Path) -> tuple[str, bool] | None:
    """The last commit that touched `directory`, and whether it differs from that commit now."""
    commit = (git(directory, "log", "-1", "--format=%H", "--", ".") or "").strip()
    if not commit:
        return None
    return commit, bool(git(directory, "status", "--porcelain", "--untracked-files=all", "--", "."))


def local_id(revision: tuple[str, bool] | None) -> str:
    if revision is None:
        return "local"
    commit, dirty = revision
    return commit[:7] + ("_dirty" if dirty else "")
