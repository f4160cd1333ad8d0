"""Which classes of which libraries the kernels' layers stand in for.

Each row is data for `warpsmith.accelerate`, which also lists what it leaves alone. A row says where
a layer may fit; whether it does is tried on samples, since classes of one name, or behind one hook
of transformers, differ in where they round.

All rows here put a layer's forward into modules. A kernel that goes in by another way, say in place
of a function, adds a dataclass and its rows here and the code for them in acceleration.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

Samples = Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]


@dataclass(frozen=True)
class ForwardSwap:
    """A kernel's layer for modules whose class is named by one of the patterns.

    Where several rows name a class, the first whose layer computes what the class computes is used.
    """

    kernel: str
    layer: str  # a class in the kernel's `layers`
    classes: tuple[str, ...]  # fnmatch patterns for module and class name
    # values for parameters and buffers, and an input
    samples: Callable[[torch.nn.Module, torch.device], Samples]
    mismatch: str  # said of a module that none of the rows' layers fits

    def names(self, class_name: str) -> bool:
        # a norm fused with a gate takes more than the input
        return "Gated" not in class_name and any(fnmatchcase(class_name, c) for c in self.classes)


def norm_samples(module: torch.nn.Module, device: torch.device) -> Samples:
    """All pairs of two dtypes, since classes differ in where they round, and rows of all sizes.

    The last of `scales` gives rows where the module's eps counts. Dimensions differ, so that a
    class that takes another than the last shows.
    """
    generator = torch.Generator().manual_seed(0)
    parameters = dict(module.named_parameters(recurse=False))
    weight = getattr(module, "weight", next(iter(parameters.values()), None))
    shape = getattr(module, "normalized_shape", (64,)) if weight is None else tuple(weight.shape)
    eps = getattr(module, "eps", None) or getattr(module, "variance_epsilon", None)
    eps = eps if isinstance(eps, float) else torch.finfo(torch.float32).eps
    scales = torch.tensor([1, 2**-10, 1e3, abs(eps) ** 0.5], device="cpu", dtype=torch.float32)
    outer = next(n for n in itertools.count(4, 4) if n not in shape)
    rows = max(5, 1024 // max(1, math.prod(shape)))
    inner = next(n for n in itertools.count(rows) if n not in (outer, *shape))

    def random(shape):
        return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)

    x = random((outer, inner, *shape))
    x *= scales.repeat(outer // 4).reshape(outer, *[1] * (x.dim() - 1))
    values = {name: random(p.shape) for name, p in parameters.items()}
    buffers = {name: random(b.shape) for name, b in module.named_buffers(recurse=False)}
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for tensor_dtype, dtype in itertools.product(dtypes, repeat=2):
        tensors = {n: v.to(device, tensor_dtype).requires_grad_() for n, v in values.items()}
        tensors |= {name: value.to(device, tensor_dtype) for name, value in buffers.items()}
        yield tensors, x.to(device, dtype).requires_grad_()


def rmsnorm(layer: str, *classes: str) -> ForwardSwap:
    return ForwardSwap("rmsnorm", layer, classes, norm_samples, "its formula is none of rmsnorm's")


# In models of the library, and in those whose code comes with their checkpoint. Classes with the
# hook "RMSNorm" are among them, as are those of Gemma and others that have none.
TRANSFORMERS = ("transformers.models.*RMSNorm", "transformers_modules.*RMSNorm")

SWAPS = (
    rmsnorm("LlamaRMSNorm", *TRANSFORMERS),
    rmsnorm("GptOssRMSNorm", *TRANSFORMERS),
    rmsnorm("MoshiRMSNorm", *TRANSFORMERS),
    rmsnorm("MuseSparkTextCenteredRMSNorm", "transformers.models.*.MuseSparkTextCenteredRMSNorm"),
    rmsnorm("Qwen3_5RMSNorm", "transformers.models.qwen3_[5n]*RMSNorm"),
    rmsnorm("GemmaRMSNorm", *TRANSFORMERS),
    rmsnorm("Gemma3nRMSNorm", *TRANSFORMERS),
    rmsnorm("Llama4TextRMSNorm", *TRANSFORMERS),
    rmsnorm("Llama4TextL2Norm", "transformers.models.*.Llama4TextL2Norm", *TRANSFORMERS),
    rmsnorm(
        "T5LayerNorm",
        "transformers.models.*.IdeficsRMSNorm",
        "transformers.models.*.Kosmos2_5LayerNorm",
        "transformers.models.*.LongT5LayerNorm",
        "transformers.models.*.MT5LayerNorm",
        "transformers.models.*.Pix2StructLayerNorm",
        "transformers.models.*.Pop2PianoLayerNorm",
        "transformers.models.*.SwitchTransformersLayerNorm",
        "transformers.models.*.T5LayerNorm",
        "transformers.models.*.UdopLayerNorm",
        "transformers.models.*.UMT5LayerNorm",
        "diffusers.*.T5LayerNorm",
    ),
    rmsnorm("TorchRMSNorm", "torch.nn.modules.normalization.RMSNorm"),
    rmsnorm("DiffusersRMSNorm", "diffusers.models.normalization.RMSNorm"),
    rmsnorm(
        "MochiRMSNorm",
        "diffusers.models.normalization.MochiRMSNorm",
        "diffusers.*.Cosmos3NemotronRMSNorm",
        "diffusers.pipelines.kolors.text_encoder.RMSNorm",
    ),
    *(
        rmsnorm(layer, f"diffusers.models.transformers.*.{layer}")
        for layer in ("Krea2RMSNorm", "QwenImage21ZeroCenterRMSNorm", "StableAudio3RMSNorm")
    ),
)
