"""What the parts of the GPU bundle share: wheels for another machine, archives, stripped libraries."""

from __future__ import annotations

import lzma
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterable
from email.parser import HeaderParser
from pathlib import Path
from zipfile import ZipFile

from kernels.compat import tomllib
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

PYTHON = "3.12"
ENVIRONMENT = {
    "python_version": PYTHON,
    "python_full_version": f"{PYTHON}.0",
    "platform_machine": "x86_64",
}
DICTIONARY = 384 << 20  # the largest pair of libraries fits, and they have much in common


class BundleError(Exception):
    """A part that cannot be made; the message is for the user."""


def extras(root: Path, *names: str) -> list[Requirement]:
    """Requirements of pyproject.toml: the project's own for "", else those of an extra."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    lists = {"": project["dependencies"], **project["optional-dependencies"]}
    return [Requirement(text) for name in names for text in lists[name]]


def read_machine(path: Path) -> dict[str, str | None]:
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    pairs = (line.partition("==") for line in lines if line)
    return {canonicalize_name(name): version or None for name, _, version in pairs}


def is_met(requirement: Requirement, has: dict[str, str | None]) -> bool:
    """Whether one of `has` is good enough. An unknown version is, unless an exact one is asked for."""
    name = canonicalize_name(requirement.name)
    if name not in has:
        return False
    if has[name] is None:
        return not any(specifier.operator in ("==", "===") for specifier in requirement.specifier)
    return requirement.specifier.contains(has[name], prereleases=True)


def exact_version(requirement: Requirement) -> str | None:
    exact = [s.version for s in requirement.specifier if s.operator == "=="]
    return exact[0] if len(exact) == 1 and "*" not in exact[0] else None


def wheel_requirements(wheel: Path, extras: set[str] = frozenset()) -> list[Requirement]:
    with ZipFile(wheel) as archive:
        (name,) = (
            n for n in archive.namelist() if n.count("/") == 1 and n.endswith(".dist-info/METADATA")
        )
        headers = HeaderParser().parsestr(archive.read(name).decode())
    requirements = map(Requirement, headers.get_all("Requires-Dist", []))
    return [
        r
        for r in requirements
        if r.marker is None
        or any(r.marker.evaluate({**ENVIRONMENT, "extra": e}) for e in ({""} | set(extras)))
    ]


def wheel_versions(directory: Path) -> dict[str, str]:
    parsed = (parse_wheel_filename(path.name) for path in directory.glob("*.whl"))
    return {name: str(version) for name, version, *_ in parsed}


def unmet(directory: Path, has: dict[str, str | None], without: set[str] = frozenset()) -> list:
    """What the wheels of `directory` ask for and neither they nor `has` provide."""
    provided = {**has, **wheel_versions(directory)}
    return [
        f"{wheel.name.split('-')[0]} needs {requirement}"
        for wheel in sorted(directory.glob("*.whl"))
        for requirement in wheel_requirements(wheel)
        if canonicalize_name(requirement.name) not in without and not is_met(requirement, provided)
    ]


def pip_download(directory: Path, pins: list[str]) -> None:
    """Wheels for the GPU machine; pip matches each platform tag exactly."""
    directory.mkdir(parents=True, exist_ok=True)
    tags = [f"--platform=manylinux_2_{glibc}_x86_64" for glibc in range(39, 4, -1)]
    tags += ["--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64"]
    command = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--implementation=cp"]
    command += [f"--python-version={PYTHON}", *tags, "-d", str(directory), *pins]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise BundleError(f"pip download {' '.join(pins)}: {done.stderr.strip()}")


def collect(
    roots: list[Requirement],
    directory: Path,
    has: dict[str, str | None],
    versions: dict[str, str],
    without: set[str] = frozenset(),
    download: Callable[[Path, list[str]], None] = pip_download,
) -> None:
    """Wheels of `roots` and of all they need that the machine lacks, in the versions of `versions`
    where a requirement leaves the choice."""
    pending, seen = list(roots), set()
    while pending:
        pins, asking = {}, {}
        for requirement in pending:
            name = canonicalize_name(requirement.name)
            if name in seen or name in without or is_met(requirement, has):
                continue
            version = exact_version(requirement) or versions.get(name)
            if version is None:
                raise BundleError(f"no version is given for {requirement}")
            pins[name] = f"{name}=={version}"
            asking.setdefault(name, set()).update(requirement.extras)
        if pins:
            download(directory, sorted(pins.values()))
        seen |= set(pins)
        wheels = {parse_wheel_filename(p.name)[0]: p for p in directory.glob("*.whl")}
        pending = [r for name in pins for r in wheel_requirements(wheels[name], asking[name])]
    if problems := unmet(directory, has, without):
        raise BundleError("; ".join(problems))


def dynamic_symbols(library: Path) -> str:
    return subprocess.run(["nm", "-D", library], capture_output=True, text=True, check=True).stdout


def strip(library: Path) -> None:
    """Drop symbol table and debug sections; what the dynamic linker sees stays as it was."""
    before = dynamic_symbols(library)
    subprocess.run(["strip", "--strip-all", library], check=True)
    if dynamic_symbols(library) != before:
        raise BundleError(f"strip changed the dynamic symbols of {library.name}")


def pack(files: Iterable[tuple[Path, str]], out: Path) -> None:
    """A tar.xz of (file, name in the archive), the same bytes for the same content."""
    files = sorted(files, key=lambda pair: (pair[0].suffix, pair[1]))
    size = sum(path.stat().st_size for path, _ in files)
    filters = [
        {"id": lzma.FILTER_X86},
        {
            "id": lzma.FILTER_LZMA2,
            "preset": 9 | lzma.PRESET_EXTREME,
            "dict_size": min(DICTIONARY, max(size, 1 << 20)),
        },
    ]

    def anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = info.mtime = 0
        info.uname = info.gname = ""
        return info

    with (
        lzma.open(out, "wb", filters=filters) as stream,
        tarfile.open(fileobj=stream, mode="w") as tar,
    ):
        for path, name in files:
            tar.add(path, name, filter=anonymous)


def tree(directory: Path) -> list[tuple[Path, str]]:
    return [
        (path, path.relative_to(directory).as_posix())
        for path in directory.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
