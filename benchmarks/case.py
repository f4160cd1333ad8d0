"""What is measured: cases (one shape each) and the providers that compete in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

OURS, EAGER, BUILTIN, COMPILE, PEER = "ours", "eager", "built-in", "torch.compile", "peer"

MAX_AUTOTUNE = "max-autotune-no-cudagraphs"


def identity(value: object) -> object:
    return value


def relative_error(output: torch.Tensor, reference: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of the reference; infinite where output is not finite."""
    output, reference = output.double(), reference.double()
    if not torch.isfinite(output).all():
        return float("inf")
    return ((output - reference).norm() / reference.norm().clamp_min(1e-30)).item()


def two_roundings(dtype: torch.dtype) -> float:
    """The relative error that two roundings to the dtype make at most, of half an eps each. Formulas of
    more steps stay below it too, since their errors are not all of one sign: eager attention in
    bfloat16 comes closest, with 5.7e-3 of 7.8e-3."""
    return torch.finfo(dtype).eps


def largest_difference(output: torch.Tensor, reference: torch.Tensor) -> float:
    return (output.double() - reference.double()).abs().max().item()


@dataclass(frozen=True)
class Provider:
    name: str
    kind: str
    # Imports what it needs and returns the function to time; ImportError: not installed.
    load: Callable[[], Callable]
    # For functions with inputs or outputs of another layout: applied to input sets before timing,
    # and to an output before it is compared.
    prepare: Callable[[tuple], tuple] = identity
    result: Callable = identity


@dataclass(frozen=True)
class Case:
    group: str  # the table it belongs to
    name: str
    make_inputs: Callable[[], tuple]  # one input set
    # The result of an input set in float64 (a tensor or a tuple), or a part of it, which `select`
    # takes of an output.
    reference: Callable
    tolerance: float
    providers: Sequence[Provider]
    num_bytes: int  # every input read once, every output written once
    flops: float | None = None  # given where the matrix rate, not memory, is the ceiling
    select: Callable = identity
    difference: Callable[..., float] = relative_error
    host_time: bool = False  # of interest where launches take longer than the GPU
    in_readme: bool = True  # README.md leaves out others, unless ours is slower than something
    sets: tuple[int, int] = (3, 48)  # input sets: least and most
    budget_ms: float = 20


def ready(function: Callable) -> Callable[[], Callable]:
    return lambda: function


def compiled(formula: Callable, mode: str | None = None) -> Callable[[], Callable]:
    """For fixed shapes."""
    return lambda: torch.compile(formula, dynamic=False, fullgraph=True, mode=mode)
