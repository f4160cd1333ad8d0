"""RMSNorm forward: y = x / sqrt(mean(x^2) + eps) * weight, over the last dim."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from ..case import (
    BUILTIN,
    COMPILE,
    EAGER,
    MAX_AUTOTUNE,
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

# Decode of 1 and 16 sequences, prefill of 512 to 65536 tokens.
ROWS = (1, 16, 512, 4096, 16384, 65536)
HIDDEN = {
    "Llama-3.1-8B": LANGUAGE["Llama-3.1-8B"].hidden_size,
    "Llama-3.2-1B": LANGUAGE["Llama-3.2-1B"].hidden_size,
    "Llama-3.1-70B": LANGUAGE["Llama-3.1-70B"].hidden_size,
    "Llama-3.2-3B": LANGUAGE["Llama-3.2-3B"].hidden_size,
    "Wan2.1-14B": DIFFUSION["Wan2.1-14B"].hidden_size,
}
HEAD_DIM = LANGUAGE["Qwen3-8B"].head_dim
HEAD_ROWS = 10  # rows of the norm over heads for each of ROWS
LTX = DIFFUSION["LTX-Video-2B"]


def cases(device: str) -> Iterator[Case]:
    for model, hidden in HIDDEN.items():
        for rows in ROWS if device == "cuda" else (16, 4096):
            yield case(device, model, rows, hidden, "bfloat16")
    for rows in ROWS if device == "cuda" else (16, 4096):
        yield case(device, "q/k of Qwen3", rows * HEAD_ROWS, HEAD_DIM, "bfloat16")
    for dtype in ("float16", "float32") if device == "cuda" else ("float32",):
        rows = 16384 if device == "cuda" else 4096
        yield case(device, "Llama-3.1-8B", rows, HIDDEN["Llama-3.1-8B"], dtype)
    for rows in (16, LTX.tokens[0], 2 * LTX.tokens[1]) if device == "cuda" else (16,):
        yield case(device, "LTX-Video", rows, LTX.hidden_size, "bfloat16", weighted=False)


def case(
    device: str, model: str, rows: int, hidden: int, dtype_name: str, weighted: bool = True
) -> Case:
    dtype = DTYPES[dtype_name]

    def make_inputs() -> tuple:
        x = torch.randn(rows, hidden, device=device).to(dtype)
        weight = (1 + 0.1 * torch.randn(hidden, device=device)).to(dtype)
        return (x, weight) if weighted else (x,)

    def reference(x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        y = ends(x).double()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS)
        return y if weight is None else y * weight.double()

    return Case(
        group=f"{dtype_name}, weight" if weighted else f"{dtype_name}, no weight",
        name=f"{rows} x {hidden} ({model})",
        make_inputs=make_inputs,
        reference=reference,
        select=ends,
        tolerance=two_roundings(dtype),
        providers=list(providers(device, rows, dtype, weighted)),
        num_bytes=(2 * rows + weighted) * hidden * dtype.itemsize,
        host_time=device == "cuda" and rows in (16, 16 * HEAD_ROWS),
    )


def ends(rows: torch.Tensor) -> torch.Tensor:
    if len(rows) <= 2 * CHECKED_ROWS:
        return rows
    return torch.cat((rows[:CHECKED_ROWS], rows[-CHECKED_ROWS:]))


def formula(x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    """As transformers' LlamaRMSNorm; without weight as diffusers' RMSNorm."""
    y = x.float()
    y = (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)
    return y if weight is None else weight * y


def built_in(x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, EPS)


def providers(device: str, rows: int, dtype: torch.dtype, weighted: bool) -> Iterator[Provider]:
    yield Provider("eager", EAGER, ready(formula))
    yield Provider("F.rms_norm", BUILTIN, ready(built_in))
    yield Provider("compile", COMPILE, compiled(formula))
    if device == "cpu":
        return
    if rows in (16384, 16384 * HEAD_ROWS):
        yield Provider("compile max-autotune", COMPILE, compiled(formula, MAX_AUTOTUNE))
    yield Provider("liger (Triton)", PEER, liger_triton)
    yield Provider("liger (CuTe DSL)", PEER, liger_cute)
    yield Provider("quack", PEER, quack)
    if weighted and dtype != torch.float32:
        yield Provider("flashinfer", PEER, flashinfer)


def liger_triton() -> Callable:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return lambda x, weight=None: LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", False)


def liger_cute() -> Callable:
    import cutlass  # noqa: F401  liger leaves its CuTe implementation out without it
    from liger_kernel import backends

    def call(x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        backends.set_impl("nvidia-cutedsl")
        try:
            return backends.dispatch("rms_norm", x, weight, EPS, 0.0, "llama", False)
        finally:
            backends.set_impl(None)

    return call


def quack() -> Callable:
    from quack.rmsnorm import rmsnorm

    return lambda x, weight=None: rmsnorm(x, weight, eps=EPS)


def flashinfer() -> Callable:
    from flashinfer import rmsnorm

    return lambda x, weight: rmsnorm(x, weight, EPS)
