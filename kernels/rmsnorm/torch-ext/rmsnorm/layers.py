"""Layers for ``kernels.kernelize``: each computes what the classes it is named after compute.

``kernelize`` binds ``forward`` to modules of the model, so ``self`` and its attributes are the
model's, and parameters of ``forward`` have the names that the model's own class gives them.
"""

import torch
from torch import nn

from .op import rms_norm


def _with_rounded_offset(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """1 + weight is rounded to the dtype of weight, which the kernel does not do."""
    if module.weight.dtype == torch.float32:
        return rms_norm(x, module.weight, module.eps, weight_offset=1.0)
    return rms_norm(x, module.weight + 1.0, module.eps)


class LlamaRMSNorm(nn.Module):
    """transformers: most classes with the hook "RMSNorm" (Llama, Mistral, Qwen2, Qwen3, Phi-3)."""

    has_backward = True
    can_torch_compile = True
    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_states, self.weight, self.variance_epsilon, rounding="input_dtype")


class GptOssRMSNorm(nn.Module):
    """transformers: the others with the hook "RMSNorm" (gpt-oss, OLMo-2, Nemotron-H), and Helium."""

    has_backward = True
    can_torch_compile = True
    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)


class MoshiRMSNorm(nn.Module):
    """transformers: Moshi and Kyutai's speech-to-text."""

    has_backward = True
    can_torch_compile = True
    weight: torch.Tensor
    eps: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


class GemmaRMSNorm(nn.Module):
    """transformers: Gemma, Gemma2, Gemma3, RecurrentGemma, T5Gemma, whose weights start at 0."""

    has_backward = True
    can_torch_compile = True
    weight: torch.Tensor
    eps: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps, weight_offset=1.0)


class Qwen3_5RMSNorm(nn.Module):
    """transformers: the hook "RMSNormZeroCentered" (Qwen3.5), and Qwen3-Next."""

    has_backward = True
    can_torch_compile = True
    weight: torch.Tensor
    eps: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps, weight_offset=1.0)


class MuseSparkTextCenteredRMSNorm(nn.Module):
    """transformers: norms of Muse Spark, whose weights start at 0."""

    has_backward = True
    can_torch_compile = True
    weight: torch.Tensor
    eps: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _with_rounded_offset(self, x)


class Gemma3nRMSNorm(nn.Module):
    """transformers: Gemma3n and Gemma4, some of whose norms have no weight."""

    has_backward = True
    can_torch_compile = True
    weight: torch.Tensor
    with_scale: bool
    eps: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_states, self.weight if self.with_scale else None, self.eps)


class Llama4TextRMSNorm(nn.Module):
    """transformers: Llama-4."""

    has_backward = True
    can_torch_compile = True
    weight: torch.Tensor
    eps: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps, rounding="input_dtype")


class Llama4TextL2Norm(nn.Module):
    """transformers: the norm of queries and keys in Llama-4, and all norms of nanochat."""

    has_backward = True
    can_torch_compile = True
    eps: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, None, self.eps)


class T5LayerNorm(nn.Module):
    """transformers: T5, its relatives (mT5, UMT5, LongT5, Pix2Struct), and IDEFICS."""

    has_backward = True
    can_torch_compile = True
    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_states, self.weight, self.variance_epsilon, rounding="weight_dtype")


class TorchRMSNorm(nn.Module):
    """torch.nn.RMSNorm, whose eps of None stands for that of float32 in all dtypes but float64."""

    has_backward = True
    can_torch_compile = True
    weight: torch.Tensor | None
    eps: float | None
    normalized_shape: tuple[int, ...]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        eps = torch.finfo(torch.float32).eps if self.eps is None else self.eps
        shape = tuple(self.normalized_shape)
        if x.shape[-len(shape) :] != shape:
            raise RuntimeError(
                f"x: must end in the dims {list(shape)} that are normalized, got {list(x.shape)}"
            )
        if len(shape) == 1:
            return rms_norm(x, self.weight, eps)
        weight = None if self.weight is None else self.weight.flatten()
        return rms_norm(x.flatten(-len(shape)), weight, eps).unflatten(-1, shape)


class DiffusersRMSNorm(nn.Module):
    """diffusers: RMSNorm."""

    has_backward = True
    can_torch_compile = True
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    eps: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm(
            hidden_states, self.weight, self.eps, bias=self.bias, rounding="weight_dtype"
        )


class MochiRMSNorm(nn.Module):
    """diffusers: MochiRMSNorm, and the norms of Cosmos3's and Kolors' text models."""

    has_backward = True
    can_torch_compile = True
    weight: torch.Tensor | None
    eps: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_states, self.weight, self.eps)


class Krea2RMSNorm(nn.Module):
    """diffusers: Krea 2, whose weights start at 0."""

    has_backward = True
    can_torch_compile = True
    weight: torch.Tensor
    eps: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return _with_rounded_offset(self, hidden_states)


class QwenImage21ZeroCenterRMSNorm(nn.Module):
    """diffusers: the norm of the text in Qwen-Image 2.1, whose weights start at 0."""

    has_backward = True
    can_torch_compile = True
    weight: torch.Tensor
    eps: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_states, self.weight, self.eps, weight_offset=1.0)


class StableAudio3RMSNorm(nn.Module):
    """diffusers: Stable Audio 3, as its models make it, with `force_fp32`."""

    has_backward = True
    can_torch_compile = True
    gamma: torch.Tensor
    eps: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_states, self.gamma, self.eps)
