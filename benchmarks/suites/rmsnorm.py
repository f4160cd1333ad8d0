"""RMSNorm over the last dim, y = x / sqrt(mean(x^2) + eps) * weight: forward, with a residual added
before, and gradients."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

import warpsmith

from .. import timing
from ..case import (
    BUILTIN,
    COMPILE,
    EAGER,
    MAX_AUTOTUNE,
    OURS,
    PEER,
    Case,
    Provider,
    compiled,
    ready,
    two_roundings,
)
from ..models import DIFFUSION, LANGUAGE

EPS = 1e-6
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
CHECKED_ROWS = 1024  # at the start and at the end

LLAMA, HEADS, LTX = "Llama-3.1-8B", "q/k of Qwen3", "LTX-Video"
HIDDEN = {
    LLAMA: LANGUAGE[LLAMA].hidden_size,
    "Llama-3.2-1B": LANGUAGE["Llama-3.2-1B"].hidden_size,
    "Llama-3.1-70B": LANGUAGE["Llama-3.1-70B"].hidden_size,
    "Llama-3.2-3B": LANGUAGE["Llama-3.2-3B"].hidden_size,
    "Wan2.1-14B": DIFFUSION["Wan2.1-14B"].hidden_size,
    HEADS: LANGUAGE["Qwen3-8B"].head_dim,
    LTX: DIFFUSION["LTX-Video-2B"].hidden_size,
}
# Decode of 1 and 16 sequences, prefill of 512 to 65536 tokens.
ROWS = (1, 16, 512, 4096, 16384, 65536)
HEAD_ROWS = 10  # rows of the norm over heads for each of ROWS
LTX_TOKENS = DIFFUSION["LTX-Video-2B"].tokens
README_ROWS = (1, 16, 4096, 16384)  # of LLAMA

# (model, rows)
ADD_SHAPES = [
    (model, rows)
    for model in (LLAMA, "Llama-3.2-1B", "Llama-3.1-70B")
    for rows in (16, 4096, 16384)
]
GRADIENT_SHAPES = [
    (LLAMA, 4096),
    (LLAMA, 16384),
    ("Llama-3.2-1B", 16384),
    ("Llama-3.1-70B", 16384),
    (HEADS, 16384 * HEAD_ROWS),
]
CPU_SHAPES = [(LLAMA, 16), (LLAMA, 4096)]


def cases(device: str) -> Iterator[Case]:
    gpu = device == "cuda"
    for model in HIDDEN:
        if model not in (HEADS, LTX):
            for rows in ROWS if gpu else (1, 16, 4096) if model == LLAMA else (16, 4096):
                yield forward(device, model, rows, "bfloat16")
    for rows in ROWS if gpu else (16, 4096):
        yield forward(device, HEADS, rows * HEAD_ROWS, "bfloat16")
    for dtype in ("float16", "float32") if gpu else ("float32",):
        for rows in (16384,) if gpu else (1, 4096):
            yield forward(device, LLAMA, rows, dtype)
    for rows in (16, LTX_TOKENS[0], 2 * LTX_TOKENS[1]) if gpu else (16,):
        yield forward(device, LTX, rows, "bfloat16", weighted=False)
    for model, rows in ADD_SHAPES if gpu else CPU_SHAPES:
        yield residual_add(device, model, rows)
    for model, rows in ADD_SHAPES if gpu else CPU_SHAPES:
        yield residual_add_in_place(device, model, rows)
    for model, rows in GRADIENT_SHAPES if gpu else CPU_SHAPES:
        yield backward(device, model, rows)
    for model, rows in GRADIENT_SHAPES if gpu else CPU_SHAPES:
        yield forward_and_backward(device, model, rows)


def name(model: str, rows: int) -> str:
    return f"{rows} x {HIDDEN[model]} ({model})"


def in_readme(model: str, rows: int) -> bool:
    return model == LLAMA and rows in README_ROWS


def has_host_time(device: str, rows: int) -> bool:
    return device == "cuda" and rows in (16, 16 * HEAD_ROWS)


def random_inputs(
    device: str, model: str, rows: int, tensors: int, dtype: torch.dtype = torch.bfloat16
) -> list[torch.Tensor]:
    """As many tensors of the shape of x, and a weight."""
    hidden = HIDDEN[model]
    inputs = [torch.randn(rows, hidden, device=device).to(dtype) for _ in range(tensors)]
    return [*inputs, (1 + 0.1 * torch.randn(hidden, device=device)).to(dtype)]


def ends(rows: torch.Tensor) -> torch.Tensor:
    if len(rows) <= 2 * CHECKED_ROWS:
        return rows
    return torch.cat((rows[:CHECKED_ROWS], rows[-CHECKED_ROWS:]))


def in_float64(x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    x = x.double()
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    return y if weight is None else y * weight.double()


# --- forward -------------------------------------------------------------------------------------


def forward(device: str, model: str, rows: int, dtype_name: str, weighted: bool = True) -> Case:
    dtype = DTYPES[dtype_name]
    return Case(
        group=f"{dtype_name}, weight" if weighted else f"{dtype_name}, no weight",
        name=name(model, rows),
        make_inputs=lambda: tuple(random_inputs(device, model, rows, 1, dtype)[: 1 + weighted]),
        reference=lambda x, *weight: in_float64(ends(x), *weight),
        select=ends,
        tolerance=two_roundings(dtype),
        providers=list(forward_providers(device, rows, dtype, weighted)),
        num_bytes=(2 * rows + weighted) * HIDDEN[model] * dtype.itemsize,
        host_time=has_host_time(device, rows),
        in_readme=in_readme(model, rows) or rows in (16384, 16384 * HEAD_ROWS, 2 * LTX_TOKENS[1]),
    )


def formula(x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    """As transformers' LlamaRMSNorm; without weight as diffusers' RMSNorm."""
    y = x.float()
    y = (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)
    return y if weight is None else weight * y


def built_in(x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, EPS)


def forward_providers(
    device: str, rows: int, dtype: torch.dtype, weighted: bool
) -> Iterator[Provider]:
    yield from differentiable_providers(device)
    if device == "cpu":
        return
    if rows in (16384, 16384 * HEAD_ROWS):
        yield Provider("compile max-autotune", COMPILE, compiled(formula, MAX_AUTOTUNE))
    if weighted and dtype != torch.float32:
        yield Provider("flashinfer", PEER, flashinfer)


def differentiable_providers(device: str) -> Iterator[Provider]:
    yield Provider("warpsmith", OURS, ours)
    yield Provider("eager", EAGER, ready(formula))
    yield Provider("F.rms_norm", BUILTIN, ready(built_in))
    yield Provider("compile", COMPILE, compiled(formula))
    if device == "cpu":
        return
    yield Provider("liger (Triton)", PEER, liger_triton)
    yield Provider("liger (CuTe DSL)", PEER, functools.partial(liger_cute, "rms_norm"))
    yield Provider("quack", PEER, quack)


def ours() -> Callable:
    rms_norm = warpsmith.load("rmsnorm").rms_norm
    return functools.partial(rms_norm, eps=EPS, rounding="input_dtype")


def liger_triton() -> Callable:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    # The last argument: not to write dx over dy.
    return lambda x, weight=None: LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", False)


def liger_cute(function: str) -> Callable:
    import cutlass  # noqa: F401  liger leaves its CuTe implementation out without it
    from liger_kernel import backends

    def call(x: torch.Tensor, *others: torch.Tensor) -> tuple | torch.Tensor:
        backends.set_impl("nvidia-cutedsl")
        try:
            return backends.dispatch(function, x, *(others or (None,)), EPS, 0.0, "llama", False)
        finally:
            backends.set_impl(None)

    return call


def quack() -> Callable:
    from quack.rmsnorm import rmsnorm

    return lambda x, weight=None: rmsnorm(x, weight, eps=EPS)


def flashinfer() -> Callable:
    from flashinfer import rmsnorm

    return lambda x, weight: rmsnorm(x, weight, EPS)


# --- with a residual -----------------------------------------------------------------------------


def residual_add(device: str, model: str, rows: int) -> Case:
    """(y, x + residual)"""

    def reference(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple:
        total = ends(x).double() + ends(residual).double()
        return in_float64(total, weight), total

    return Case(
        group="bfloat16, residual add",
        name=name(model, rows),
        make_inputs=lambda: tuple(random_inputs(device, model, rows, 2)),
        reference=reference,
        select=lambda out: tuple(map(ends, out)),
        tolerance=two_roundings(torch.bfloat16),
        providers=list(add_providers(device)),
        num_bytes=(4 * rows + 1) * HIDDEN[model] * torch.bfloat16.itemsize,
        host_time=has_host_time(device, rows),
        in_readme=in_readme(model, rows),
    )


def residual_add_in_place(device: str, model: str, rows: int) -> Case:
    """The same, written over x and residual. Replays go on from what the one before left: there y is
    about 1, so the residual grows by as much each time and stays finite."""
    return dataclasses.replace(
        residual_add(device, model, rows),
        group="bfloat16, residual add in place",
        providers=list(add_in_place_providers(device)),
    )


def add_formula(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple:
    total = x + residual
    return formula(total, weight), total


def add_formula_in_place(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple:
    residual.add_(x)
    return x.copy_(formula(residual, weight)), residual


def add_providers(device: str) -> Iterator[Provider]:
    yield Provider("warpsmith", OURS, ours_add)
    yield Provider("eager", EAGER, ready(add_formula))
    yield Provider("compile", COMPILE, compiled(add_formula))
    if device == "cpu":
        return
    yield Provider("liger (Triton)", PEER, liger_triton_add)
    yield Provider("liger (CuTe DSL)", PEER, functools.partial(liger_cute, "fused_add_rms_norm"))
    yield Provider("quack", PEER, quack_add)
    yield Provider("flashinfer, in place", PEER, flashinfer_add)


def add_in_place_providers(device: str) -> Iterator[Provider]:
    yield Provider("warpsmith", OURS, ours_add_in_place)
    yield Provider("eager", EAGER, ready(add_formula_in_place))
    if device == "cuda":  # inductor 2.13 compiles no such function for the CPU
        yield Provider("compile", COMPILE, compiled(add_formula_in_place))
        yield Provider("flashinfer", PEER, flashinfer_add)


def ours_add() -> Callable:
    fused_add_rms_norm = warpsmith.load("rmsnorm").fused_add_rms_norm
    return functools.partial(fused_add_rms_norm, eps=EPS, rounding="input_dtype")


def ours_add_in_place() -> Callable:
    fused_add_rms_norm_ = warpsmith.load("rmsnorm").fused_add_rms_norm_

    def call(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple:
        fused_add_rms_norm_(x, residual, weight, EPS, rounding="input_dtype")
        return x, residual

    return call


def liger_triton_add() -> Callable:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    return lambda x, residual, weight: LigerFusedAddRMSNormFunction.apply(
        x, residual, weight, EPS, 0.0, "llama", False
    )


def quack_add() -> Callable:
    from quack.rmsnorm import rmsnorm

    return lambda x, residual, weight: rmsnorm(x, weight, residual=residual, eps=EPS, prenorm=True)


def flashinfer_add() -> Callable:
    from flashinfer import fused_add_rmsnorm

    def call(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple:
        fused_add_rmsnorm(x, residual, weight, EPS)
        return x, residual

    return call


# --- gradients -----------------------------------------------------------------------------------


def backward(device: str, model: str, rows: int) -> Case:
    """(dx, dweight) of a forward that ran before."""
    providers = list(differentiable_providers(device))
    return Case(
        group="bfloat16, backward",
        name=name(model, rows),
        make_inputs=lambda: gradient_inputs(device, model, rows),
        reference=gradients_in_float64,
        select=lambda out: (ends(out[0]), out[1]),
        tolerance=two_roundings(torch.bfloat16),
        providers=list(map(backward_alone, providers)),
        num_bytes=(3 * rows + 2) * HIDDEN[model] * torch.bfloat16.itemsize,
        in_readme=in_readme(model, rows),
    )


def forward_and_backward(device: str, model: str, rows: int) -> Case:
    """(dx, dweight, y). Bytes are those of the two apart: x and weight count twice."""
    providers = list(differentiable_providers(device))
    return dataclasses.replace(
        backward(device, model, rows),
        group="bfloat16, forward and backward",
        reference=lambda x, weight, dy: (
            *gradients_in_float64(x, weight, dy),
            in_float64(ends(x), weight),
        ),
        select=lambda out: (ends(out[0]), out[1], ends(out[2])),
        providers=[dataclasses.replace(p, load=both_of(p.load)) for p in providers],
        num_bytes=(5 * rows + 3) * HIDDEN[model] * torch.bfloat16.itemsize,
    )


def gradient_inputs(device: str, model: str, rows: int) -> tuple:
    x, dy, weight = random_inputs(device, model, rows, 2)
    return x, weight, dy


def gradients_in_float64(x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor) -> tuple:
    x, weight, dy = x.double(), weight.double(), dy.double()
    rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    normed, scaled = ends(x * rstd), ends(dy * weight)
    dx = ends(rstd) * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    return dx, (dy * x * rstd).sum(0)


def leaves(*tensors: torch.Tensor) -> Iterator[torch.Tensor]:
    return (tensor.detach().requires_grad_() for tensor in tensors)


def both_of(load: Callable[[], Callable]) -> Callable[[], Callable]:
    def load_both() -> Callable:
        norm = load()

        def call(x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor) -> tuple:
            with torch.enable_grad():
                x, weight = leaves(x, weight)
                y = norm(x, weight)
                return *torch.autograd.grad(y, (x, weight), dy), y.detach()

        return call

    return load_both


def backward_alone(provider: Provider) -> Provider:
    """Its input sets hold a forward that has run, whose buffers every call keeps for the next."""
    norm = functools.cache(provider.load)

    def load() -> Callable:
        norm()
        return call

    def call(
        y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(y, (x, weight), dy, retain_graph=True)

    def prepare(inputs: tuple) -> tuple:
        x, weight, dy = inputs
        # Else torch.compile's backward overwrites what its forward saved, and runs once only.
        kept = torch._functorch.config.patch(donated_buffer=False)
        with torch.enable_grad(), timing.on_capture_stream(x.device), kept:
            x, weight = leaves(x, weight)
            return norm()(x, weight), x, weight, dy

    return dataclasses.replace(provider, load=load, prepare=prepare)
