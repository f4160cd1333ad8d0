"""Reads a kernel's build.toml and refuses what upstream's parser lets through."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from kernels._rust import Build
from kernels.compat import tomllib

from ci import repo

CAPABILITY = re.compile(r"(\d+\.\d+)a?(\+PTX)?")
# What some CUDA from 12.6 on compiles; kernel-builder drops any other silently.
KNOWN_CAPABILITIES = frozenset(
    ["7.0", "7.2", "7.5", "8.0", "8.6", "8.7", "8.9", "9.0", "10.0", "10.1", "11.0", "12.0", "12.1"]
)
CAPABILITY_LINE = re.compile(r"^cuda-capabilities = \[.*\]$", re.MULTILINE)
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"\n]+)"|<([^>\n]+)>)', re.MULTILINE)
CXX_SUFFIXES = {".cpp", ".cc", ".cxx"}
HEADER_SUFFIXES = {".h", ".hpp", ".cuh", ".inc"}
BACKENDS = ("cpu", "cuda")
GENERATED_HEADER = "registration.h"


class BuildTomlError(Exception):
    def __init__(self, kernel: Path, problems: list[str]):
        super().__init__("\n".join(f"{kernel.name}: {problem}" for problem in problems))
        self.problems = problems


@dataclass(frozen=True)
class Section:
    """[torch], whose backend is None, or one [kernel.*] section."""

    name: str
    backend: str | None
    src: tuple[str, ...]
    include: tuple[str, ...]
    cxx_flags: tuple[str, ...]
    cuda_flags: tuple[str, ...] = ()
    capabilities: tuple[str, ...] | None = None
    cuda_minver: tuple[int, int] | None = None

    def sources(self) -> list[str]:
        return [path for path in self.src if Path(path).suffix in CXX_SUFFIXES | {".cu"}]


@dataclass(frozen=True)
class Kernel:
    directory: Path
    general: dict
    stable_abi: dict[str, str]
    extensions: tuple[str, ...]
    sections: tuple[Section, ...]  # [torch] first

    @property
    def name(self) -> str:
        return self.general["name"]

    @property
    def python_name(self) -> str:
        return self.name.replace("-", "_")

    @property
    def package(self) -> Path:
        return self.directory / "torch-ext" / self.python_name

    def sections_for(self, backend: str) -> list[Section]:
        return [s for s in self.sections if s.backend in (None, backend)]

    def package_files(self) -> list[str]:
        """Python and data files of the package, relative to it; `_ops.py` is generated."""
        files = (f for ext in self.extensions for f in self.package.rglob(f"*.{ext}"))
        names = {f.relative_to(self.package).as_posix() for f in files}
        return sorted(n for n in names if n != "_ops.py" and "__pycache__" not in n)


def _section(name: str, table: dict, backend: str | None) -> Section:
    def strings(key: str) -> tuple[str, ...]:
        return tuple(table.get(key, ()))

    minver = table.get("cuda-minver")
    return Section(
        name=name,
        backend=backend,
        src=strings("src"),
        include=strings("include"),
        cxx_flags=strings("cxx-flags"),
        cuda_flags=strings("cuda-flags"),
        capabilities=strings("cuda-capabilities") if "cuda-capabilities" in table else None,
        cuda_minver=tuple(int(part) for part in minver.split(".")[:2]) if minver else None,
    )


def read(directory: Path) -> Kernel:
    """Parse without our own checks; raises BuildTomlError where upstream's parser refuses."""
    try:
        Build.open(directory)
    except ValueError as error:
        raise BuildTomlError(directory, [str(error)]) from None
    table = tomllib.loads((directory / "build.toml").read_text())
    torch = table.get("torch", {})
    sections = [_section("torch", torch, None)]
    for name, section in table.get("kernel", {}).items():
        sections.append(_section(f"kernel.{name}", section, section["backend"]))
    return Kernel(
        directory=directory.resolve(),
        general=table["general"],
        stable_abi=torch.get("stable-abi", {}),
        extensions=("py", *(e for e in torch.get("pyext", ["pyi"]) if e != "py")),
        sections=tuple(sections),
    )


def load(directory: Path) -> Kernel:
    """Parse and check; raises BuildTomlError with every problem found."""
    kernel = read(directory)
    problems = find_problems(kernel)
    if problems:
        raise BuildTomlError(directory, problems)
    return kernel


def find_problems(kernel: Kernel) -> list[str]:
    problems = _general_problems(kernel)
    for section in kernel.sections:
        found = _section_problems(kernel, section)
        problems += [f"[{section.name}] {problem}" for problem in found]
    if not problems:
        problems = _duplicate_sources(kernel) + _cpu_sources_missing_from_cuda(kernel)
        problems += [m for b in kernel.general["backends"] for m in unlisted_includes(kernel, b)]
    return problems


def _general_problems(kernel: Kernel) -> list[str]:
    problems = []
    if kernel.name != kernel.directory.name:
        problems.append(f"name is {kernel.name!r} but the directory is {kernel.directory.name!r}")
    if not kernel.general["backends"]:
        problems.append("backends is empty")
    for backend in kernel.general["backends"]:
        if backend not in BACKENDS:
            problems.append(f"backend {backend!r} is not one of {', '.join(BACKENDS)}")
        elif backend not in kernel.stable_abi:
            problems.append(f"[torch.stable-abi] has no version for {backend}")
        elif not any(section.backend == backend for section in kernel.sections):
            problems.append(f"no [kernel.*] section for backend {backend}")
    if not (kernel.package / "__init__.py").is_file():
        problems.append(f"torch-ext/{kernel.python_name}/__init__.py does not exist")
    if (kernel.package / kernel.python_name).exists():
        problems.append(
            f"torch-ext/{kernel.python_name}/{kernel.python_name} clashes with a generated file"
        )
    if "kernel-depends" in kernel.general:
        problems.append("kernel-depends is not supported by this builder")
    lines = len(CAPABILITY_LINE.findall((kernel.directory / "build.toml").read_text()))
    if lines != sum(section.capabilities is not None for section in kernel.sections):
        problems.append("each cuda-capabilities list must stand on one line of its own, unindented")
    return problems


def _section_problems(kernel: Kernel, section: Section) -> list[str]:
    problems = []
    for capability in section.capabilities or ():
        match = CAPABILITY.fullmatch(capability)
        if not match or match[1] not in KNOWN_CAPABILITIES:
            problems.append(f"unknown capability {capability!r}")
    if section.capabilities is not None and not section.capabilities:
        problems.append("cuda-capabilities is empty")
    for path in (*section.src, *section.include):
        problem = _path_problem(kernel.directory, path)
        if problem:
            problems.append(f"{path!r} {problem}")
        elif path in section.include and not (kernel.directory / path).is_dir():
            problems.append(f"include {path!r} is not a directory")
        elif path in section.src and not (kernel.directory / path).is_file():
            problems.append(f"{path!r} is not a file")
    for path in section.src:
        suffix = Path(path).suffix
        if suffix not in CXX_SUFFIXES | HEADER_SUFFIXES | {".cu"}:
            problems.append(f"{path!r} is neither a C++ or CUDA source nor a header")
        elif suffix == ".cu" and section.backend != "cuda":
            problems.append(f"{path!r} is a CUDA source in a section of another backend")
        elif suffix == ".cu" and section.capabilities is None:
            problems.append(f"{path!r} needs cuda-capabilities in its section")
    return problems


def _path_problem(directory: Path, path: str) -> str | None:
    """Nix builds from a filtered copy of the kernel's directory, so nothing may point out of it."""
    if Path(path).is_absolute() or ".." in PurePosixPath(path).parts:
        return "points outside the kernel's directory"
    for part in (directory / path, *(directory / path).parents):
        if part == directory:
            break
        if part.is_symlink():
            return "is or goes through a symlink"
    return None if (directory / path).exists() else "does not exist"


def _duplicate_sources(kernel: Kernel) -> list[str]:
    problems = []
    for backend in kernel.general["backends"]:
        sources = [path for s in kernel.sections_for(backend) for path in s.sources()]
        for path in sorted({path for path in sources if sources.count(path) > 1}):
            problems.append(f"{path!r} is compiled twice for {backend}")
    return problems


def _cpu_sources_missing_from_cuda(kernel: Kernel) -> list[str]:
    """The loader picks one variant, so the CUDA variant has to serve CPU tensors as well."""
    if not {"cpu", "cuda"} <= set(kernel.general["backends"]):
        return []
    listed = {path for s in kernel.sections_for("cuda") for path in s.src}
    sources = [path for s in kernel.sections if s.backend == "cpu" for path in s.sources()]
    return [
        f"{p!r} is in no cuda section: a GPU machine would have no CPU kernel"
        for p in sources
        if p not in listed
    ]


def local_includes(kernel: Kernel, source: str, include: tuple[str, ...]) -> dict[str, str]:
    """Files of the kernel that `source` includes, directly or not: {path: who includes it}."""
    found: dict[str, str] = {}
    queue = [source]
    while queue:
        current = queue.pop()
        text = (kernel.directory / current).read_text(errors="replace")
        for quoted, angled in INCLUDE.findall(text):
            bases = [*([Path(current).parent] if quoted else []), *map(Path, include)]
            for base in bases:
                path = (base / (quoted or angled)).as_posix()
                if (kernel.directory / path).is_file():
                    path = (
                        (kernel.directory / path).resolve().relative_to(kernel.directory).as_posix()
                    )
                    if path not in found and Path(path).name != GENERATED_HEADER:
                        found[path] = current
                        queue.append(path)
                    break
    return found


def unlisted_includes(kernel: Kernel, backend: str) -> list[str]:
    """Headers that a local build finds and a Nix build does not have."""
    sections = kernel.sections_for(backend)
    listed = {path for section in sections for path in section.src}
    problems = {}
    for section in sections:
        for source in section.sources():
            for header, user in local_includes(kernel, source, section.include).items():
                if header not in listed:
                    where = f"not in src of a {backend} section"
                    problems.setdefault(header, f"{header!r} is included by {user} but {where}")
    return list(problems.values())


def untracked(kernel: Kernel) -> list[str]:
    tracked = repo.tracked_files(kernel.directory)
    if tracked is None:
        return [f"{kernel.directory} is not in a git repository"]
    package = kernel.package.relative_to(kernel.directory).as_posix()
    wanted = {"build.toml", *(path for section in kernel.sections for path in section.src)}
    wanted |= {f"{package}/{name}" for name in kernel.package_files()}
    return [f"{path!r} is not tracked by git" for path in sorted(wanted - tracked)]
