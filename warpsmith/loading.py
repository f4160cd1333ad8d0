"""`load(name)`: finds one of this project's kernels and imports it through the kernels library.

The first source that applies is used, and a failure there is an error rather than a reason to
try the next one, so that a stale or foreign build is never loaded by accident:

1. LOCAL_KERNELS names the kernel's Hub repository: the path given there.
2. warpsmith is imported from a source checkout: kernels/<name>/build/ of that checkout.
3. The Hub repository at the pinned major version (the cache alone if HF_HUB_OFFLINE is set).
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from . import pins

LOCAL_KERNELS = "LOCAL_KERNELS"
CHECKOUT = "checkout"
HUB = "hub"

# The kernels library imports a variant again for each thread that asks at the same time.
_lock = threading.RLock()
_hub_modules: dict[tuple[pins.Pin, str | None], ModuleType] = {}


@dataclass(frozen=True)
class Source:
    kind: str  # LOCAL_KERNELS, CHECKOUT or HUB
    pin: pins.Pin
    path: Path | None = None  # where the variants are; None for the Hub
    root: Path | None = None  # the checkout, for CHECKOUT


@dataclass(frozen=True)
class VariantChoice:
    name: str
    path: Path
    chosen: bool
    reason: str  # why it is not loaded; empty for the chosen one


def load(
    name: str,
    *,
    backend: str | None = None,
    trust_remote_code: bool | list[str] = False,
) -> ModuleType:
    """Load the kernel called `name` and return its module; a second call returns the same object.

    Args:
        name: a kernel of this project, such as "img2gray".
        backend: "cpu" to take the CPU variant where torch is a CUDA build; None: torch's backend.
        trust_remote_code: for the Hub only. The kernels library runs code of publishers that the
            Hub does not list as trusted only when this is True or a list with the repository id.

    Raises:
        ValueError: unknown name, or a malformed LOCAL_KERNELS.
        FileNotFoundError: nothing built, or no variant fits this system (one reason per variant).
        ImportError: the kernels library is missing or broken.
        RuntimeError: the Hub cannot be reached, is not trusted, or lacks a fitting variant.

    Example:
        >>> img2gray = warpsmith.load("img2gray")
        >>> img2gray.img2gray(image, layout="HWC", weights="pil")
    """
    source = find_source(name)
    with _lock:
        if source.kind == HUB:
            return _load_from_hub(source.pin, backend, trust_remote_code)
        return load_from(source, backend)


def load_from(source: Source, backend: str | None = None) -> ModuleType:
    """Load the fitting variant under `source.path`."""
    kernels = import_kernels()
    choices = list_variants(source.path, backend)
    chosen = next((choice for choice in choices if choice.chosen), None)
    if chosen is None:
        raise FileNotFoundError(explain_no_variant(source, choices))
    module = _already_loaded(chosen.path)
    if module is not None:
        return module
    if source.kind == LOCAL_KERNELS:
        return kernels.get_kernel(source.pin.repo_id, version=source.pin.version, backend=backend)
    return kernels.get_local_kernel(source.path, backend=backend)


def import_kernels() -> ModuleType:
    try:
        import kernels

        # a directory called kernels/ on the path, as in a checkout, imports as an empty package
        if not hasattr(kernels, "get_kernel"):
            raise ImportError("not installed")
    except ImportError as error:
        raise ImportError(f"the kernels library (`pip install kernels`): {error}") from error
    return kernels


def find_source(name: str) -> Source:
    known = pins.known_kernels()
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"unknown kernel {name!r}; known kernels: {', '.join(sorted(known))}")
    pin = known[name]
    override = local_overrides().get(pin.repo_id)
    if override is not None:
        return Source(LOCAL_KERNELS, pin, override)
    root = pins.checkout_root()
    if root is not None:
        return Source(CHECKOUT, pin, root / "kernels" / name / "build", root)
    return Source(HUB, pin)


def local_overrides() -> dict[str, Path]:
    """The entries of LOCAL_KERNELS: repository id -> path."""
    text = os.environ.get(LOCAL_KERNELS)
    if text is None:
        return {}
    overrides = {}
    for entry in text.split(":"):
        repo_id, equals, path = entry.partition("=")
        if not equals:
            raise ValueError(
                f"LOCAL_KERNELS: {entry!r} is not <repo id>=<path> (entries are separated by ':')"
            )
        overrides[repo_id] = Path(path)
    return overrides


def list_variants(path: Path, backend: str | None = None) -> list[VariantChoice]:
    """The build variants under `path`, the one that would be loaded first.

    Searched as the kernels library does: `path`, then `path`/build, then `path` as a variant.
    """
    from kernels.variants import VariantRejected, get_variants_local, resolve_variant

    choices: list[VariantChoice] = []
    for base in (path, path / "build"):
        if (base / "build.toml").exists():
            continue  # kernel sources; torch-ext/ would read as a variant for a backend "ext"
        best, trace = resolve_variant(get_variants_local(base), backend)
        choices += unreadable_names(base, {decision.variant.variant_str for decision in trace})
        for decision in trace:
            name = decision.variant.variant_str
            chosen = best is not None and decision.variant == best
            if chosen:
                reason = ""
            elif isinstance(decision, VariantRejected):
                reason = decision.reason
            else:
                reason = f"fits, but {best.variant_str} is preferred"
            choices.append(VariantChoice(name, base / name, chosen, reason))
        if best is not None:
            return choices
    if (path / "metadata.json").exists():
        choices.insert(0, VariantChoice(path.name, path, True, ""))
    return choices


def unreadable_names(base: Path, known: set[str]) -> list[VariantChoice]:
    """Builds whose directory the loader skips without a word, since it cannot parse the name."""
    names = sorted(file.parent.name for file in base.glob("*/metadata.json"))
    reason = "not a variant name that the kernels library knows"
    return [VariantChoice(name, base / name, False, reason) for name in names if name not in known]


def explain_no_variant(source: Source, choices: list[VariantChoice]) -> str:
    name = source.pin.name
    if choices:
        lines = [f"no build of {name} in {source.path} fits this system:"]
        lines += [f"  {choice.name}: {choice.reason}" for choice in choices]
    else:
        lines = [f"{name} has no build in {source.path}"]
    if source.kind == CHECKOUT:
        lines.append(
            f"Build it in {source.root}: `make build-{name}`, or all kernels with `make build-all`."
        )
    elif source.kind == LOCAL_KERNELS:
        lines.append(f"LOCAL_KERNELS gives this path for {source.pin.repo_id}.")
    return "\n".join(lines)


def _already_loaded(variant: Path) -> ModuleType | None:
    """The module of this variant if the process has it, however its path was spelled.

    The kernels library compares unresolved paths and would import the package a second time,
    which registers its operators twice.
    """
    variant = variant.resolve()
    for loaded in import_kernels().get_loaded_kernels():
        if variant in Path(loaded.module.__file__).resolve().parents:
            return loaded.module
    return None


def _load_from_hub(
    pin: pins.Pin, backend: str | None, trust_remote_code: bool | list[str]
) -> ModuleType:
    # The library asks the Hub for the branch's commit at every call; once loaded, this need not.
    key = (pin, backend)
    if key not in _hub_modules:
        kernels = import_kernels()
        try:
            _hub_modules[key] = kernels.get_kernel(
                pin.repo_id,
                version=pin.version,
                backend=backend,
                trust_remote_code=trust_remote_code,
            )
        except Exception as error:  # the HTTP client's own errors share no base class with these
            raise RuntimeError(_explain_hub_failure(pin, error)) from error
    return _hub_modules[key]


def _explain_hub_failure(pin: pins.Pin, error: Exception) -> str:
    from huggingface_hub import constants

    lines = [
        f"cannot load {pin.name} from the Hub ({pin.repo_id}, version {pin.version}): "
        f"{type(error).__name__}: {error}"
    ]
    if "trust_remote_code" in str(error):
        lines.append(
            f"If you trust it: warpsmith.load({pin.name!r}, trust_remote_code=[{pin.repo_id!r}])."
        )
    if constants.HF_HUB_OFFLINE:
        lines.append("HF_HUB_OFFLINE is set, so only kernels in the local cache are found.")
    else:
        lines.append(
            "Without network, HF_HUB_OFFLINE=1 takes it from the cache; see docs/loading.md for how to "
            "fill that."
        )
    lines.append(f"A local build is used with LOCAL_KERNELS={pin.repo_id}=<directory>.")
    return "\n".join(lines)
