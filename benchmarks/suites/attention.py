"""Scaled dot product attention, forward. Inputs are [batch, tokens, heads, head dim] in memory and seen
as [batch, heads, tokens, head dim], as in transformers and diffusers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..case import BUILTIN, EAGER, PEER, Case, Provider, ready, two_roundings
from ..models import DIFFUSION, LANGUAGE

CHECKED_QUERIES = 256  # of the start and of the end, in the first and the last head
EAGER_LIMIT = 2 * 32 * 5000**2  # scores that eager attention materialises


@dataclass(frozen=True)
class Shape:
    model: str
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    causal: bool
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        heads = f"{self.heads}/{self.kv_heads}" if self.kv_heads != self.heads else str(self.heads)
        tokens = (
            str(self.queries) if self.keys == self.queries else f"{self.queries}, {self.keys} keys"
        )
        return f"{self.model}: {self.batch} x {heads} x {tokens} x {self.head_dim}"


def of_language_model(name: str, tokens: int) -> Shape:
    model = LANGUAGE[name]
    return Shape(name, 1, model.heads, model.kv_heads, tokens, tokens, model.head_dim, True)


def of_diffusion_model(
    name: str,
    *,
    batch: int = 1,
    level: int = 0,
    joint: bool = False,
    cross: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Shape:
    """`joint`: text tokens attend along; `cross`: they are the keys."""
    model = DIFFUSION[name]
    queries = model.tokens[level] + (model.text_tokens if joint else 0)
    keys = model.text_tokens if cross else queries
    return Shape(name, batch, model.heads, model.heads, queries, keys, model.head_dim, False, dtype)


GPU_SHAPES = [
    of_diffusion_model("SDXL 640", batch=2),
    of_diffusion_model("SDXL 1280", batch=2),
    of_diffusion_model("SDXL 640", batch=2, cross=True),
    of_diffusion_model("SDXL 1280", batch=2, cross=True),
    of_diffusion_model("FLUX.1", joint=True),
    of_diffusion_model("LTX-Video-2B"),
    of_diffusion_model("LTX-Video-2B", level=1),
    of_diffusion_model("LTX-Video-2B", dtype=torch.float16),
    *(of_language_model("Llama-3.1-8B", tokens) for tokens in (1024, 4096, 8192, 16384)),
    of_language_model("Gemma-2-9B", 4096),
    Shape("head dim 64", 1, 32, 32, 4096, 4096, 64, True),
]
CPU_SHAPES = [
    of_diffusion_model("SDXL 1280", cross=True, dtype=torch.float32),
    of_language_model("Llama-3.2-1B", 512),
]


def cases(device: str) -> Iterator[Case]:
    for shape in GPU_SHAPES if device == "cuda" else CPU_SHAPES:
        yield case(device, shape)


def case(device: str, shape: Shape) -> Case:
    sizes = (
        (shape.queries, shape.heads),
        (shape.keys, shape.kv_heads),
        (shape.keys, shape.kv_heads),
    )

    def make_inputs() -> tuple:
        return tuple(
            torch.randn(shape.batch, tokens, heads, shape.head_dim, device=device)
            .to(shape.dtype)
            .transpose(1, 2)
            for tokens, heads in sizes
        )

    elements = sum(shape.batch * tokens * heads * shape.head_dim for tokens, heads in sizes)
    elements += shape.batch * shape.queries * shape.heads * shape.head_dim
    scores = shape.batch * shape.heads * shape.queries * shape.keys
    few_keys = shape.keys < 128
    return Case(
        group=f"{str(shape.dtype).removeprefix('torch.')}, {'causal' if shape.causal else 'full'}"
        + (", few keys" if few_keys else ""),
        name=shape.name,
        make_inputs=make_inputs,
        reference=lambda q, k, v: reference(shape, q, k, v),
        select=lambda out: torch.stack([out[0, head, checked(shape)] for head in (0, -1)]),
        # Scores in float32 carry the rounding of their own sums: 3e-7 was measured.
        tolerance=1e-6 if shape.dtype == torch.float32 else two_roundings(shape.dtype),
        providers=list(providers(device, shape, scores)),
        num_bytes=elements * shape.dtype.itemsize,
        # With few keys, memory is the ceiling.
        flops=None if few_keys else 4 * scores * shape.head_dim * (0.5 if shape.causal else 1),
        host_time=device == "cuda" and few_keys,
        sets=(2, 8),
        budget_ms=50,
    )


def checked(shape: Shape) -> list[int]:
    start = range(min(CHECKED_QUERIES, shape.queries))
    end = range(max(len(start), shape.queries - CHECKED_QUERIES), shape.queries)
    return [*start, *end]


def reference(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    rows = torch.tensor(checked(shape), device=q.device)
    results = []
    for head in (0, -1):
        scores = q[0, head, rows].double() @ k[0, head].double().T * shape.head_dim**-0.5
        if shape.causal:
            later = torch.arange(shape.keys, device=q.device)[None] > rows[:, None]
            scores = scores.masked_fill(later, float("-inf"))
        results.append(scores.softmax(-1) @ v[0, head].double())
    return torch.stack(results)


def providers(device: str, shape: Shape, scores: int) -> Iterator[Provider]:
    yield Provider("SDPA default", BUILTIN, ready(sdpa(shape, None)))
    if scores <= EAGER_LIMIT:
        yield Provider("eager", EAGER, eager(shape, device))
    if device == "cpu":
        return
    for name, backend in (
        ("SDPA cuDNN", SDPBackend.CUDNN_ATTENTION),
        ("SDPA flash (FA2)", SDPBackend.FLASH_ATTENTION),
        ("SDPA mem-efficient", SDPBackend.EFFICIENT_ATTENTION),
    ):
        yield Provider(name, BUILTIN, ready(sdpa(shape, backend)))
    yield Provider("FA4", PEER, flash_attention_4(shape))
    if shape.dtype == torch.bfloat16:
        yield Provider(
            "flashinfer fa3",
            PEER,
            flashinfer(shape),
            prepare=heads_hold_batches,
            result=lambda out: out.unflatten(1, (shape.batch, -1)).permute(1, 2, 0, 3),
        )


def sdpa(shape: Shape, backend: SDPBackend | None) -> Callable:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=shape.causal, enable_gqa=shape.heads != shape.kv_heads
        )

    def attend_with_backend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return attend(q, k, v)

    return attend if backend is None else attend_with_backend


def eager(shape: Shape, device: str) -> Callable[[], Callable]:
    """As transformers' eager_attention_forward, which is given the mask."""
    groups = shape.heads // shape.kv_heads

    def load() -> Callable:
        mask = None
        if shape.causal:
            full = torch.full((shape.queries, shape.keys), float("-inf"), device=device)
            mask = full.triu(1).to(shape.dtype)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if groups > 1:
                k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
            scores = torch.matmul(q, k.transpose(-1, -2)) * shape.head_dim**-0.5
            if mask is not None:
                scores = scores + mask
            return torch.matmul(scores.softmax(-1, dtype=torch.float32).to(q.dtype), v)

        return attend

    return load


def flash_attention_4(shape: Shape) -> Callable[[], Callable]:
    def load() -> Callable:
        from flash_attn.cute import flash_attn_func

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
            return flash_attn_func(q, k, v, causal=shape.causal)[0].transpose(1, 2)

        return attend

    return load


def flashinfer(shape: Shape) -> Callable[[], Callable]:
    def load() -> Callable:
        from flashinfer import single_prefill_with_kv_cache

        return lambda q, k, v: single_prefill_with_kv_cache(
            q, k, v, causal=shape.causal, backend="fa3"
        )

    return load


def heads_hold_batches(inputs: tuple) -> tuple:
    """[B, H, S, D] -> [S, B * H, D]: the function takes one sequence."""
    return tuple(tensor.permute(2, 0, 1, 3).flatten(1, 2).contiguous() for tensor in inputs)
