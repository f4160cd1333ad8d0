"""`accelerate(model)`: puts this project's kernels into models of transformers and diffusers.

Three steps: find the modules that a row of swaps.py names and what speaks against each, choose the
layer that computes what the module computes, and let `kernels.kernelize` bind its forward.

kernelize is run on one module at a time. On a whole model it has one layer for each hook, where
classes behind a hook differ, and it resets every hook that the mapping leaves out, among them
functions that all models of the process share. transformers' set_use_kernels does that too, and maps
hooks to kernels from the Hub.
"""

from __future__ import annotations

import functools
import inspect
import os
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MethodType
from typing import NamedTuple
from weakref import WeakSet

import torch
from torch import nn

from .loading import import_kernels, load
from .swaps import SWAPS, ForwardSwap

hf_kernels = import_kernels()

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Finding:
    """A module that a row names: the layer that it runs now, or the reason why it was left alone."""

    path: str  # as in named_modules; in a pipeline after the component's name
    original: str  # the module's class
    kernel: str
    layer: str | None
    reason: str | None


@dataclass(frozen=True, repr=False)
class Report:
    """What `accelerate` did. Its length is the number of modules that run a kernel now."""

    findings: tuple[Finding, ...]

    @property
    def swapped(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.layer)

    @property
    def left(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.reason)

    def __len__(self) -> int:
        return len(self.swapped)

    def __repr__(self) -> str:
        lines = [f"swapped: {len(self.swapped)} modules"]
        lines += _grouped(self.swapped, lambda f: f"{f.original} -> {f.kernel} {f.layer}")
        lines += [f"left alone: {len(self.left)} modules"]
        lines += _grouped(self.left, lambda f: f"{f.original}: {f.reason}")
        return "\n".join(lines)


def _grouped(findings, describe) -> list[str]:
    counts = Counter(map(describe, findings))
    examples = {describe(finding): finding.path or "itself" for finding in reversed(findings)}
    return [f"  {count} x {text} (first: {examples[text]})" for text, count in counts.items()]


def accelerate(
    model, *, kernels: list[str] | None = None, mode=None, strict: bool = False
) -> Report:
    """Run this project's kernels in a model, or in every model of a diffusers pipeline.

    Parameters, state dict and results (up to rounding) stay; `restore` undoes it. What `.to`,
    `.train()`, `.eval()` and `copy.deepcopy` give keeps the kernels. Apply it before torch.compile.

    Args:
        model: an nn.Module, or a pipeline of diffusers.
        kernels: names of kernels to use; None: all that fit.
        mode: a `kernels.Mode`. Training or inference is taken from `model.training` unless the mode
            says it.
        strict: raise, with nothing changed, if a module that a kernel is meant for cannot run it,
            or if there is no such module.

    Raises:
        TypeError: `model` or `mode` is something else.
        ValueError: a name in `kernels` is unknown, or the mode is not one to run in.
        RuntimeError: with strict.
        What `warpsmith.load` raises, if the model has a use for a kernel that does not load.

    Example:
        >>> print(warpsmith.accelerate(model))
        swapped: 33 modules
          33 x transformers.models.llama.modeling_llama.LlamaRMSNorm -> rmsnorm LlamaRMSNorm (...)
        left alone: 0 modules
    """
    swaps = _rows_of(kernels)
    roots = _roots(model)
    modes = {name: _mode_for(root, mode) for name, root in roots.items()}
    plans = {name: list(_examine(name, root, swaps)) for name, root in roots.items()}
    report = Report(tuple(step.finding for plan in plans.values() for step in plan))
    if strict and (report.left or not report.swapped):
        raise RuntimeError(f"accelerate(strict=True) changed nothing:\n{report}")
    for name, plan in plans.items():
        for step in plan:
            if step.layer is not None and _our_layer(step.module) is None:
                _bind(step.module, step.layer, modes[name], step.device)
    return report


def restore(model) -> None:
    """Give back their own forward to all modules that `accelerate` changed."""
    for root in _roots(model).values():
        for module in root.modules():
            if _our_layer(module) is None:
                continue
            if "_old_forward" in vars(module):  # a hook of the accelerate library came on top
                module._old_forward = MethodType(type(module).forward, module)
            else:
                del module.forward
            _stop_guarding(module)


# --- what to swap --------------------------------------------------------------------------------


def _rows_of(kernels: list[str] | None) -> list[ForwardSwap]:
    known = {swap.kernel for swap in SWAPS}
    wanted = known if kernels is None else set(kernels)
    if isinstance(kernels, str) or not wanted <= known:
        raise ValueError(
            f"kernels: must be a list of names among {', '.join(sorted(known))}, got {kernels!r}"
        )
    return [swap for swap in SWAPS if swap.kernel in wanted]


def _roots(model) -> dict[str, nn.Module]:
    if isinstance(model, nn.Module):
        return {"": model}
    # as both kinds of pipelines in diffusers have it
    components = getattr(model, "components", None)
    if not isinstance(components, dict):
        raise TypeError(
            f"model: must be a torch.nn.Module or a pipeline of diffusers, got {type(model).__name__}"
        )
    return {name: part for name, part in components.items() if isinstance(part, nn.Module)}


def _mode_for(root: nn.Module, mode):
    Mode = hf_kernels.Mode
    if mode is not None and not isinstance(mode, Mode):
        raise TypeError(f"mode: must be a kernels.Mode or None, got {mode!r}")
    training = Mode.TRAINING if root.training else Mode.INFERENCE
    if mode is None:
        return training
    if Mode.FALLBACK in mode:
        raise ValueError(f"mode: must be made of TRAINING, INFERENCE and TORCH_COMPILE, got {mode}")
    return mode if Mode.TRAINING in mode or Mode.INFERENCE in mode else mode | training


class _Step(NamedTuple):
    finding: Finding
    module: nn.Module
    layer: type | None
    device: torch.device


def _examine(name: str, root: nn.Module, swaps: list[ForwardSwap]) -> Iterator[_Step]:
    @functools.cache
    def rows_of(cls):
        class_name = f"{cls.__module__}.{cls.__qualname__}"
        return [swap for swap in swaps if any(fnmatchcase(class_name, c) for c in swap.classes)]

    chosen = {}
    compiled: set[nn.Module] = set()
    # for modules without parameters
    default = next(filter(torch.is_floating_point, root.parameters()), torch.empty(0))
    for path, module in root.named_modules(prefix=name):
        if _is_compiled(module):
            compiled.update(module.modules())
        named = next((base for base in type(module).__mro__ if rows_of(base)), None)
        if named is None:
            continue
        rows = rows_of(named)
        tensors = list(module.parameters(recurse=False)) or [default]
        device = tensors[0].device
        layer = _our_layer(module)
        reason = None
        if layer is None:
            reason = _objection(module, named, tensors, module in compiled)
        if layer is None and reason is None:
            key = (_configuration(module), device)
            if key not in chosen:
                chosen[key] = _choose(module, rows, device)
            layer = chosen[key]
            reason = None if layer else rows[0].mismatch
        original = f"{type(module).__module__}.{type(module).__qualname__}"
        finding = Finding(path, original, rows[0].kernel, layer and layer.__name__, reason)
        yield _Step(finding, module, layer, device)


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def _objection(module, named: type, tensors: list[torch.Tensor], compiled: bool) -> str | None:
    """What speaks against a swap, whatever the module computes."""
    attributes = vars(module)
    own = attributes.get("forward")
    if os.environ.get("DISABLE_KERNEL_MAPPING", "0") != "0":
        return "DISABLE_KERNEL_MAPPING is set"
    if type(module) is not named:
        return f"is a subclass of {named.__qualname__}"
    if compiled:
        return "is compiled already; accelerate first"
    if "_hf_hook" in attributes:
        return "its forward is wrapped by a hook of the accelerate library"
    # kernelize leaves the class's own forward bound where it has no kernel
    if own is not None and getattr(own, "__func__", None) is not type(module).forward:
        return "its forward was replaced on the module"
    for tensor in tensors:
        if type(tensor) not in (torch.Tensor, nn.Parameter):
            return f"its parameters are of type {type(tensor).__name__}"
        if tensor.device.type not in DEVICES:
            return f"is on device {tensor.device.type}"
        if tensor.dtype not in DTYPES:
            return f"its dtype is {tensor.dtype}"
    return None


# --- which layer ---------------------------------------------------------------------------------


def _configuration(module: nn.Module) -> tuple:
    """Equal for modules that compute the same from parameters of the same shapes."""
    attributes = {k: repr(v) for k, v in vars(module).items() if k[0] != "_"}
    parameters = tuple((name, p.shape) for name, p in module.named_parameters(recurse=False))
    return type(module), parameters, tuple(attributes.items())


def _choose(module: nn.Module, rows: list[ForwardSwap], device: torch.device) -> type | None:
    """The first layer that gives what the module's class gives on all samples."""
    for row in rows:
        layer = getattr(load(row.kernel).layers, row.layer)
        # callers may pass arguments by name
        if list(inspect.signature(layer.forward).parameters) != list(
            inspect.signature(type(module).forward).parameters
        ):
            continue
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if all(
                _same(type(module), layer, _twin(module, parameters), x)
                for parameters, x in row.samples(module, device)
            ):
                return layer
    return None


def _twin(module: nn.Module, parameters: dict[str, torch.Tensor]) -> nn.Module:
    """A module like this one, with other parameters."""
    twin = object.__new__(type(module))
    absent = {name: None for name, value in module._parameters.items() if value is None}
    twin.__dict__ = {**vars(module), "_parameters": {**absent, **parameters}}
    return twin


def _same(original: type, layer: type, twin: nn.Module, x: torch.Tensor) -> bool:
    """Whether both forwards agree.

    Sums in another order move few elements to the other side of a rounding; to round elsewhere in
    the formula moves about a quarter of them.
    """
    try:
        got, wanted = layer.forward(twin, x), original.forward(twin, x)
    except Exception:  # an attribute that the class lacks, a shape that the kernel refuses
        return False
    if (got.dtype, got.shape) != (wanted.dtype, wanted.shape):
        return False
    close = torch.isclose(got.float(), wanted.float(), rtol=1e-5, atol=1e-7)
    return close.float().mean().item() > 0.98


# --- binding -------------------------------------------------------------------------------------

HOOK = ("kernel_layer_name", "kernel_condition")
_layers: dict = {}  # by their forward, those that were bound
_guarded: dict[type, tuple[dict, WeakSet]] = {}


@dataclass(frozen=True)
class _LoadedLayer:
    """A repository, as mappings of the kernels library have them, for a layer that is loaded."""

    layer: type

    def load(self) -> type:
        return self.layer


def _our_layer(module: nn.Module) -> type | None:
    """The layer that the module runs, if that is one of ours."""
    attributes = vars(module)
    # hooks of the accelerate library move what they wrap there
    forward = attributes.get("_old_forward", attributes.get("forward"))
    return _layers.get(getattr(forward, "__func__", None))


def _bind(module: nn.Module, layer: type, mode, device: torch.device) -> None:
    _layers[layer.forward] = layer
    mapping = {layer.__name__: {device.type: _LoadedLayer(layer)}}
    with (
        _hook(type(module), layer.__name__),
        hf_kernels.use_kernel_mapping(mapping, inherit_mapping=False),
    ):
        hf_kernels.kernelize(module, mode=mode, device=device, use_fallback=False)
    if _our_layer(module) is not layer:
        raise RuntimeError(f"kernels.kernelize did not bind {layer.__name__}")
    _guard(module)


@contextmanager
def _hook(cls: type, name: str):
    """Within it the class has this hook and no condition, whatever hook it has or lacks otherwise."""
    before = _own_hook(cls)
    hf_kernels.replace_kernel_forward_from_hub(cls, name)
    try:
        yield
    finally:
        _set_hook(cls, before)


def _own_hook(cls: type) -> dict:
    return {name: vars(cls)[name] for name in HOOK if name in vars(cls)}


def _set_hook(cls: type, attributes: dict) -> None:
    for name in HOOK:
        if name in vars(cls):
            delattr(cls, name)
    for name, value in attributes.items():
        setattr(cls, name, value)


def _guard(module: nn.Module) -> None:
    """Make later runs of kernelize, as in .train() of transformers, pass by this module.

    That takes a condition on the class, which says yes for all modules but ours.
    """
    cls = type(module)
    if not hasattr(cls, HOOK[0]):
        return
    if cls not in _guarded:
        _guarded[cls] = (_own_hook(cls), WeakSet())
        before = getattr(cls, "kernel_condition", None) or (lambda module: True)
        hf_kernels.replace_kernel_forward_from_hub(
            cls, cls.kernel_layer_name, lambda module: _our_layer(module) is None and before(module)
        )
    _guarded[cls][1].add(module)


def _stop_guarding(module: nn.Module) -> None:
    before, modules = _guarded.get(type(module), ({}, WeakSet()))
    modules.discard(module)
    if type(module) in _guarded and not modules:
        _set_hook(type(module), before)
        del _guarded[type(module)]
