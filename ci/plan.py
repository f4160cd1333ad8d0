"""What to compile, with which flags: pure functions of build.toml, target and toolchain."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

from ci.buildtoml import Kernel, Section
from ci.toolchain import Cuda

# One capability in place of every list of build.toml; None keeps the lists.
CAPABILITY_OF = {
    "cpu": None,
    "release": None,
    "h100": "9.0a",
    "a100": "8.0",
    "t4": "7.5",
    "ptx75": "7.5+PTX",
    "ptx80": "8.0+PTX",
}
TARGETS = tuple(CAPABILITY_OF)
PTX_TARGETS = ("ptx75", "ptx80")
GPU_CHECK_TARGETS = ("cpu", "release", *PTX_TARGETS)
DEFAULT_TARGETS = ("cpu", "release", "h100", "a100", "t4")

# torch's COMMON_NVCC_FLAGS, and what kernel-builder adds for CUDA sources.
NVCC_FLAGS = (
    "-D__CUDA_NO_HALF_OPERATORS__",
    "-D__CUDA_NO_HALF_CONVERSIONS__",
    "-D__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "-D__CUDA_NO_HALF2_OPERATORS__",
    "--expt-relaxed-constexpr",
    "--expt-extended-lambda",
    "-DENABLE_FP8",
    "-std=c++20",
    "-O3",
    "-DNDEBUG",
    "-Xcompiler=-fPIC,-fno-gnu-unique",
    "-Xptxas=-v",
)


class PlanError(Exception):
    pass


@dataclass(frozen=True)
class Source:
    path: str  # relative to the kernel's directory
    include: tuple[str, ...]
    flags: tuple[str, ...]
    names_module: bool  # uses TORCH_EXTENSION_NAME, and so is compiled anew for each commit

    @property
    def is_cuda(self) -> bool:
        return self.path.endswith(".cu")


@dataclass(frozen=True)
class Plan:
    kernel: Kernel
    target: str
    backend: str
    module: str
    variant: str
    definitions: tuple[str, ...]
    sources: tuple[Source, ...]
    archs: tuple[str, ...]  # as metadata.json lists them; empty for cpu
    cuda: Cuda | None


def gencode(capability: str, ptx_only: bool) -> list[str]:
    base = capability.removesuffix("+PTX")
    number = base.replace(".", "")
    codes = [] if ptx_only else [f"sm_{number}"]
    if capability.endswith("+PTX"):
        codes.append(f"compute_{number}")
    return [f"-gencode=arch=compute_{number},code={code}" for code in codes]


def capabilities(section: Section, target: str, cuda: Cuda) -> tuple[str, ...]:
    """The section's list, or the target's one entry, as far as the compiler supports it."""
    single = CAPABILITY_OF[target]
    wanted = section.capabilities if single is None else (single,)
    usable = tuple(c for c in wanted if c.removesuffix("+PTX").rstrip("a") in cuda.archs)
    if not usable:
        raise PlanError(
            f"[{section.name}] no capability left: {', '.join(wanted)} intersected with what "
            f"nvcc {cuda.version[0]}.{cuda.version[1]} supports ({', '.join(sorted(cuda.archs))})"
        )
    return usable


def _target_version(stable_abi: str) -> str:
    major, minor = (int(part) for part in stable_abi.split(".")[:2])
    return f"0x{(major << 56) | (minor << 48):016x}"


def variant_name(stable_abi: str, cuda: Cuda | None) -> str:
    digits = "".join(stable_abi.split(".")[:2])
    compute = cuda.label if cuda else "cpu"
    return f"torch-stable-abi{digits}-{compute}-{platform.machine()}-linux"


def make_plan(kernel: Kernel, target: str, cuda: Cuda | None, build_id: str) -> Plan:
    backend = "cpu" if target == "cpu" else "cuda"
    if backend not in kernel.general["backends"]:
        raise PlanError(f"the kernel has no {backend} backend")
    if backend == "cuda" and cuda is None:
        raise PlanError("no CUDA compiler")
    cuda = cuda if backend == "cuda" else None
    module = f"_{kernel.python_name}_{backend}_{build_id}"
    stable_abi = kernel.stable_abi[backend]
    definitions = [
        f"TORCH_TARGET_VERSION={_target_version(stable_abi)}",
        "Py_LIMITED_API=0x03090000",
        *(["CUDA_KERNEL", "USE_CUDA=1"] if cuda else ["CPU_KERNEL"]),
    ]
    sources, archs = [], set()
    for section in kernel.sections_for(backend):
        if cuda and section.cuda_minver and cuda.version < section.cuda_minver:
            continue
        nvcc_flags: list[str] = []
        if section.capabilities is not None:
            usable = capabilities(section, target, cuda)
            archs.update(usable)
            codes = [flag for c in usable for flag in gencode(c, target in PTX_TARGETS)]
            nvcc_flags = [*NVCC_FLAGS, *codes, *section.cuda_flags]
        for path in section.sources():
            flags = nvcc_flags if path.endswith(".cu") else section.cxx_flags
            named = "TORCH_EXTENSION_NAME" in (kernel.directory / path).read_text()
            sources.append(Source(path, section.include, tuple(flags), named))
    return Plan(
        kernel=kernel,
        target=target,
        backend=backend,
        module=module,
        variant=variant_name(stable_abi, cuda),
        definitions=tuple(definitions),
        sources=tuple(sources),
        archs=tuple(sorted(archs)),
        cuda=cuda,
    )


def _words(items) -> str:
    return " ".join(f"[==[{item}]==]" for item in items)


def _common_lines(plan: Plan, torch_dir: Path) -> list[str]:
    directory = plan.kernel.directory
    torch_includes = [torch_dir / "include", torch_dir / "include/torch/csrc/api/include"]
    # Error messages name source files: relative to the kernel and to torch's headers.
    maps = [f"-ffile-prefix-map={path}/=" for path in (directory, torch_dir / "include")]
    lines = [
        f"set(KERNEL_DIR {_words([directory])})",
        f"set(TORCH_DIR {_words([torch_dir])})",
        f"set(SYSTEM_INCLUDES {_words(torch_includes)})",
        f"set(DEFINITIONS {_words(plan.definitions)})",
        f"set(PREFIX_MAPS {_words(maps)})",
    ]
    if plan.cuda:
        lines.append(f"set(NVCC {_words([plan.cuda.nvcc])})")
        lines.append(f"set(CUDART {_words([plan.cuda.cudart])})")
        lines.append(f"list(APPEND SYSTEM_INCLUDES {_words([plan.cuda.include])})")
    return lines


def _source_line(plan: Plan, source: Source) -> str:
    kind = "cuda_source" if source.is_cuda else "cxx_source"
    include = [plan.kernel.directory / path for path in source.include]
    flags = list(source.flags)
    if source.names_module:
        flags.append(f"-DTORCH_EXTENSION_NAME={plan.module}")
    return f"{kind}({_words([source.path])} INCLUDES {_words(include)} FLAGS {_words(flags)})"


def host_sources(plan: Plan) -> list[Source]:
    """C++ sources of a CUDA build whose objects are the same for every target and commit."""
    if not plan.cuda:
        return []
    return [source for source in plan.sources if not source.is_cuda and not source.names_module]


def host_to_cmake(plan: Plan, torch_dir: Path) -> str:
    """The values for a tree that only makes the objects of `host_sources`."""
    lines = [*_common_lines(plan, torch_dir), "set(HOST_OBJECTS ON)"]
    lines += [_source_line(plan, source) for source in host_sources(plan)]
    return "\n".join(lines) + "\n"


def to_cmake(plan: Plan, torch_dir: Path, host_objects: list[str]) -> str:
    """The values that ci/cmake/CMakeLists.txt works on."""
    shared = host_sources(plan)
    lines = [*_common_lines(plan, torch_dir), f"set(MODULE {plan.module})"]
    lines += [_source_line(plan, source) for source in plan.sources if source not in shared]
    if host_objects:
        lines.append(f"list(APPEND OBJECTS {_words(host_objects)})")
    return "\n".join(lines) + "\n"
