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
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import MethodType
from typing import NamedTuple

import torch
from torch import nn

from . import pins
from .loading import import_kernels, load
from .swaps import SWAPS, ForwardSwap

hf_kernels = import_kernels()

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
DEVICES = ("cpu", "cuda")

# The classes' hooks and torch's random state, which change for moments, are the process's.
_lock = threading.RLock()


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
        lines = [f"swapped: {_modules(self.swapped)}"]
        lines += _grouped(self.swapped, lambda f: f"{f.original} -> {f.kernel} {f.layer}")
        lines += [f"left alone: {_modules(self.left)}"]
        lines += _grouped(self.left, lambda f: f"{f.original}: {f.reason}")
        return "\n".join(lines)


def _modules(findings) -> str:
    return f"{len(findings)} module{'' if len(findings) == 1 else 's'}"


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
        TypeError: `model`, `kernels` or `mode` is something else.
        ValueError: a name in `kernels` is unknown or of a kernel without layers for models, or the
            mode is not one to run in.
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
    seen: set[nn.Module] = set()  # components of a pipeline may share some
    with _lock:
        plans = {name: list(_examine(name, root, swaps, seen)) for name, root in roots.items()}
        report = Report(tuple(step.finding for plan in plans.values() for step in plan))
        if strict and (report.left or not report.swapped):
            raise RuntimeError(f"accelerate(strict=True) changed nothing:\n{report}")
        _bind_all([(step, modes[name]) for name, plan in plans.items() for step in plan])
    return report


def restore(model) -> None:
    """Give back their own forward to all modules that `accelerate` changed.

    Raises:
        RuntimeError: other code has wrapped the forward of some, which still run the kernel; all
            others are restored.
    """
    wrapped = []
    with _lock:
        for name, root in _roots(model).items():
            for path, module in root.named_modules(prefix=name):
                holder, slot = _slot(module)
                if _our_layer(module) is None:
                    if _wraps_ours(vars(holder).get(slot)):
                        wrapped.append(path or "itself")
                elif slot == "forward" and holder is module:
                    del module.forward
                else:
                    setattr(holder, slot, MethodType(type(module).forward, module))
    if wrapped:
        raise RuntimeError(
            "restore: the forward of these modules was wrapped after accelerate and still runs the "
            f"kernel; undo that first: {', '.join(wrapped)}"
        )


# --- what to swap --------------------------------------------------------------------------------


def _rows_of(kernels: list[str] | None) -> list[ForwardSwap]:
    if kernels is None:
        return list(SWAPS)
    if not isinstance(kernels, (list, tuple, set)) or not all(isinstance(k, str) for k in kernels):
        raise TypeError(f"kernels: must be a list of names or None, got {kernels!r}")
    usable = {swap.kernel for swap in SWAPS}
    for name in kernels:
        if name not in usable:
            known = name in pins.known_kernels()
            problem = "is a kernel without layers for models" if known else "is no kernel"
            raise ValueError(
                f"kernels: must be names among {', '.join(sorted(usable))}; {name!r} {problem}"
            )
    return [swap for swap in SWAPS if swap.kernel in kernels]


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


def _examine(
    name: str, root: nn.Module, swaps: list[ForwardSwap], seen: set[nn.Module]
) -> Iterator[_Step]:
    @functools.cache
    def rows_of(cls):
        return [swap for swap in swaps if swap.names(f"{cls.__module__}.{cls.__qualname__}")]

    chosen = {}
    compiled = {part for m in root.modules() if _is_compiled(m) for part in m.modules()}
    # for modules without parameters
    default = next(
        filter(torch.is_floating_point, root.parameters()),
        torch.empty(0, device="cpu", dtype=torch.float32),
    )
    for path, module in root.named_modules(seen, name):
        named = next((base for base in type(module).__mro__ if rows_of(base)), None)
        if named is None:
            continue
        rows = rows_of(named)
        tensors = list(_own_tensors(module).values())
        device = (tensors or [default])[0].device
        layer = _our_layer(module)
        reason = None
        if layer is None:
            reason = _objection(module, named, module in compiled) or (
                _tensor_objection(tensors, "its")
                if tensors
                else _tensor_objection([default], "its model's")
            )
        if layer is None and reason is None:
            key = (_configuration(module), device)
            if key not in chosen:
                chosen[key] = _choose(module, rows, device)
            layer = chosen[key]
            reason = None if layer else rows[0].mismatch
        original = f"{type(module).__module__}.{type(module).__qualname__}"
        finding = Finding(path, original, rows[0].kernel, layer and layer.__name__, reason)
        yield _Step(finding, module, layer, device)


def _own_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {
        **dict(module.named_parameters(recurse=False)),
        **dict(module.named_buffers(recurse=False)),
    }


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def _objection(module: nn.Module, named: type, compiled: bool) -> str | None:
    """What speaks against a swap, whatever the module computes."""
    attributes = vars(module)
    own = attributes.get("forward")
    if hf_kernels.layer.globals._DISABLE_KERNEL_MAPPING:
        return "DISABLE_KERNEL_MAPPING was set when kernels was imported"
    if type(module).forward is not named.forward:
        return f"is a subclass of {named.__qualname__} with another forward"
    # samples are made for parameters and buffers of numbers alone
    if (
        module._modules
        or any(not buffer.is_floating_point() for buffer in module.buffers(recurse=False))
        or any(isinstance(value, torch.Tensor) for value in attributes.values())
    ):
        return "has state that the layers do not know"
    if compiled:
        return "is compiled already; accelerate first"
    if "_hf_hook" in attributes:
        return "its forward is wrapped by a hook of the accelerate library"
    # kernelize leaves the class's own forward bound where it has no kernel
    if own is not None and getattr(own, "__func__", None) is not type(module).forward:
        return "its forward was replaced on the module"
    return None


def _tensor_objection(tensors: list[torch.Tensor], whose: str) -> str | None:
    for tensor in tensors:
        if type(tensor) not in (torch.Tensor, nn.Parameter):
            return f"{whose} parameters are of type {type(tensor).__name__}"
        if tensor.device.type not in DEVICES:
            return f"{whose} device is {tensor.device.type}"
        if tensor.dtype not in DTYPES:
            return f"{whose} dtype is {tensor.dtype}"
    return None


# --- which layer ---------------------------------------------------------------------------------

_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


def _configuration(module: nn.Module) -> tuple:
    """Equal for modules that compute the same from parameters of the same shapes."""
    attributes = vars(module).keys() - _MODULE_ATTRIBUTES
    shapes = tuple((name, tensor.shape) for name, tensor in _own_tensors(module).items())
    return type(module), shapes, tuple((k, repr(vars(module)[k])) for k in sorted(attributes))


def _choose(module: nn.Module, rows: list[ForwardSwap], device: torch.device) -> type | None:
    """The first layer that gives what the module's class gives on all samples."""
    for row in rows:
        layer = getattr(load(row.kernel).layers, row.layer)
        # callers may pass arguments by name
        if list(inspect.signature(layer.forward).parameters) != list(
            inspect.signature(type(module).forward).parameters
        ):
            continue
        with (
            torch.random.fork_rng([] if device.type == "cpu" else [device]),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast(device.type, enabled=False),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            if all(
                _same(type(module), layer, _twin(module, tensors, training), x)
                for tensors, x in row.samples(module, device)
                for training in (False, True)
            ):
                return layer
    return None


def _twin(module: nn.Module, tensors: dict[str, torch.Tensor], training: bool) -> nn.Module:
    """A module like this one, with other parameters and buffers."""
    twin = object.__new__(type(module))
    twin.__dict__ = {
        **vars(module),
        "_parameters": {name: tensors.get(name) for name in module._parameters},
        "_buffers": {name: tensors.get(name) for name in module._buffers},
        "training": training,
    }
    return twin


def _same(original: type, layer: type, twin: nn.Module, x: torch.Tensor) -> bool:
    """Whether both forwards agree.

    Sums in another order move few elements to the other side of a rounding; to round elsewhere in
    the formula moves about a quarter of them. Each of up to three roundings (norm, weight, bias)
    may then go the other way, which with the sum's own error is up to 4 units in the last place of
    the row's largest element.
    """
    try:
        got, wanted = layer.forward(twin, x), original.forward(twin, x)
    except Exception:  # an attribute that the class lacks, a shape that the kernel refuses
        return False
    if not isinstance(wanted, torch.Tensor):
        return False
    if (got.dtype, got.shape) != (wanted.dtype, wanted.shape):
        return False
    if not wanted.numel() or not wanted.requires_grad:
        return False
    close = torch.isclose(got.float(), wanted.float(), rtol=1e-5, atol=1e-7)
    if close.float().mean().item() < 0.98:
        return False
    if not _near(got, wanted, 4 * torch.finfo(wanted.dtype).eps):
        return False
    # in float32 alone: in other dtypes the gradients round in other places than the layer's
    tensors = [x, *(tensor for tensor in _own_tensors(twin).values() if tensor.requires_grad)]
    if any(tensor.dtype != torch.float32 for tensor in tensors):
        return True
    gradients = [torch.autograd.grad(y.sum(), tensors, allow_unused=True) for y in (got, wanted)]
    return all(a is b if a is None or b is None else _near(a, b, 1e-3) for a, b in zip(*gradients))


def _near(got: torch.Tensor, wanted: torch.Tensor, limit: float) -> bool:
    """Whether all elements are, in parts of the largest in their row."""
    got, wanted = got.detach().double(), wanted.detach().double()
    return bool(((got - wanted).abs() <= limit * wanted.abs().amax(-1, keepdim=True)).all())


# --- binding -------------------------------------------------------------------------------------

HOOK = ("kernel_layer_name", "kernel_condition")
_layers: dict = {}  # by their forward, those that were bound


@dataclass(frozen=True)
class _LoadedLayer:
    """A repository, as mappings of the kernels library have them, for a layer that is loaded."""

    layer: type

    def load(self) -> type:
        return self.layer


def _slot(module: nn.Module) -> tuple[object, str]:
    """Where the module's forward is: hooks of diffusers and of accelerate move what they wrap."""
    references = getattr(vars(module).get("_diffusers_hook"), "_fn_refs", None)
    if references:
        first = references[0]
        return first, "forward" if first.original_forward is None else "original_forward"
    return module, "_old_forward" if "_old_forward" in vars(module) else "forward"


def _layer_of(forward) -> type | None:
    return _layers.get(getattr(forward, "__func__", None))


def _our_layer(module: nn.Module) -> type | None:
    """The layer that the module runs, if that is one of ours."""
    holder, slot = _slot(module)
    return _layer_of(vars(holder).get(slot))


def _wraps_ours(forward) -> bool:
    """Whether a layer of ours is inside, as far as a wrapper shows what it wraps."""
    while forward is not None:
        if _layer_of(forward):
            return True
        for cell in getattr(forward, "__closure__", None) or ():
            with suppress(ValueError):  # an empty cell
                if _layer_of(cell.cell_contents):
                    return True
        forward = getattr(forward, "__wrapped__", None)
    return False


def _bind_all(steps: list[tuple[_Step, object]]) -> None:
    bound = []
    try:
        for step, mode in steps:
            if step.layer is not None and _our_layer(step.module) is None:
                bound.append(step.module)
                _bind(step.module, step.layer, mode, step.device)
    except BaseException:
        for module in bound:
            vars(module).pop("forward", None)
        raise


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
    _guard(type(module))


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


@dataclass(frozen=True)
class _Guard:
    """The condition of a class with a hook: as before, but no for modules that run our layers.

    It makes later runs of kernelize, as in .train() of transformers, pass by these. As copies need
    it too, it stays when modules are restored.
    """

    before: Callable[[nn.Module], bool] | None

    def __call__(self, module: nn.Module) -> bool:
        return _our_layer(module) is None and (self.before is None or self.before(module))


def _guard(cls: type) -> None:
    owner = next((base for base in cls.__mro__ if HOOK[0] in vars(base)), None)
    condition = getattr(cls, "kernel_condition", None)
    if owner is not None and not isinstance(condition, _Guard):
        owner.kernel_condition = staticmethod(_Guard(condition))
