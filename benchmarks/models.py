"""Sizes of well-known models, from which the suites take their shapes.

Published checkpoints or defaults of the transformers 5.22.2 and diffusers 0.42.1 configurations.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LanguageModel:
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int


@dataclass(frozen=True)
class DiffusionModel:
    hidden_size: int
    heads: int
    head_dim: int
    tokens: tuple[int, ...]  # image or video tokens at usual resolutions, of each level for a U-Net
    text_tokens: int


LANGUAGE = {
    "Llama-3.2-1B": LanguageModel(2048, 32, 8, 64, 8192),
    "Llama-3.2-3B": LanguageModel(3072, 24, 8, 128, 8192),
    "Llama-3.1-8B": LanguageModel(4096, 32, 8, 128, 14336),
    "Llama-3.1-70B": LanguageModel(8192, 64, 8, 128, 28672),
    "Mistral-7B": LanguageModel(4096, 32, 8, 128, 14336),
    "Qwen2.5-7B": LanguageModel(3584, 28, 4, 128, 18944),
    "Qwen3-0.6B": LanguageModel(1024, 16, 8, 128, 3072),
    "Qwen3-8B": LanguageModel(4096, 32, 8, 128, 12288),
    "Gemma-2-2B": LanguageModel(2304, 8, 4, 256, 9216),
    "Gemma-2-9B": LanguageModel(3584, 16, 8, 256, 14336),
    "Gemma-3-4B": LanguageModel(2560, 8, 4, 256, 10240),
    "Gemma-3-27B": LanguageModel(5376, 32, 16, 128, 21504),
    "Phi-3-mini": LanguageModel(3072, 32, 32, 96, 8192),
    "gpt-oss-20b": LanguageModel(2880, 64, 8, 64, 2880),
    "OLMo-2-7B": LanguageModel(4096, 32, 32, 128, 11008),
}

DIFFUSION = {
    "SDXL 640": DiffusionModel(640, 10, 64, (4096,), 77),
    "SDXL 1280": DiffusionModel(1280, 20, 64, (1024,), 77),
    "SD3-medium": DiffusionModel(1536, 24, 64, (4096,), 154),
    "SD3.5-large": DiffusionModel(2432, 38, 64, (4096,), 333),
    "FLUX.1": DiffusionModel(3072, 24, 128, (4096,), 512),
    "LTX-Video-2B": DiffusionModel(2048, 32, 64, (4992, 12288), 128),
    "PixArt-Sigma": DiffusionModel(1152, 16, 72, (4096,), 300),
    "DiT-XL/2": DiffusionModel(1152, 16, 72, (256, 1024), 0),
    "Wan2.1-1.3B": DiffusionModel(1536, 12, 128, (32760, 75600), 512),
    "Wan2.1-14B": DiffusionModel(5120, 40, 128, (32760, 75600), 512),
    "HunyuanVideo": DiffusionModel(3072, 24, 128, (67320,), 256),
    "Qwen-Image": DiffusionModel(3072, 24, 128, (6889,), 1024),
    "CogVideoX-2B": DiffusionModel(1920, 30, 64, (17550,), 226),
    "Sana-1.6B": DiffusionModel(2240, 70, 32, (1024,), 300),
}

# Height and width.
FRAMES = {
    "224": (224, 224),
    "512": (512, 512),
    "1024": (1024, 1024),
    "1080p": (1080, 1920),
    "4K": (2160, 3840),
    "4096": (4096, 4096),
}
