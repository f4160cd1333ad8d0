"""Models of transformers and diffusers with few random weights, and inputs for them.

Each function imports its library itself. A model's inputs come with it, as keyword arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Family:
    build: Callable[[], torch.nn.Module]
    inputs: Callable[[], dict]
    layers: dict[str, int]  # modules that each layer of the rmsnorm kernel is to replace
    calls: int  # of the kernel in one forward pass


TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LINEAR_ATTENTION = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_value_head_dim": 8,
}
PER_LAYER_INPUT = {
    "hidden_size_per_layer_input": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "vocab_size_per_layer_input": 64,
}


def tokens() -> dict:
    return {"input_ids": torch.arange(3, 19).reshape(2, 8)}


def text(name: str, layers: dict[str, int], calls: int | None = None, config="Config", **options):
    def build():
        import transformers

        settings = getattr(transformers, name + config)(**{**TEXT, **options})
        return getattr(transformers, f"{name}ForCausalLM")(settings)

    return Family(build, tokens, layers, calls or sum(layers.values()))


def t5():
    import transformers

    config = transformers.T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def llava():
    """Two classes behind the hook "RMSNorm", whose formulas differ."""
    import transformers

    vision = transformers.PixtralVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        image_size=8,
        patch_size=4,
    )
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=transformers.Olmo2Config(**TEXT),
        image_token_index=63,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    return transformers.LlavaForConditionalGeneration(config)


def image_and_tokens() -> dict:
    return {
        "input_ids": torch.tensor([[1, 63, 63, 63, 63, 5]]),
        "pixel_values": torch.rand(1, 3, 8, 8),
        "image_sizes": torch.tensor([[8, 8]]),
    }


def diffusion(name: str, inputs: Callable[[], dict], layers: dict[str, int], calls=None, **options):
    def build():
        import diffusers

        return getattr(diffusers, name)(**options)

    return Family(build, inputs, layers, calls or sum(layers.values()))


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


LLAMA, GPT_OSS, GEMMA = "LlamaRMSNorm", "GptOssRMSNorm", "GemmaRMSNorm"
DIFFUSERS, TORCH = "DiffusersRMSNorm", "TorchRMSNorm"

FAMILIES = {
    "llama": text("Llama", {LLAMA: 5}),
    "mistral": text("Mistral", {LLAMA: 5}),
    "qwen2": text("Qwen2", {LLAMA: 5}),
    "qwen3": text("Qwen3", {LLAMA: 9}, head_dim=16),
    "phi3": text("Phi3", {LLAMA: 5}),
    "falcon_h1": text(
        "FalconH1",
        {LLAMA: 5},
        mamba_d_ssm=32,
        mamba_n_heads=4,
        mamba_d_head=8,
        mamba_d_state=8,
        mamba_n_groups=1,
        mamba_chunk_size=8,
    ),
    "deepseek_v3": text(
        "DeepseekV3",
        {LLAMA: 9},
        num_key_value_heads=2,
        n_routed_experts=2,
        num_experts_per_tok=1,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
    ),
    "gpt_oss": text(
        "GptOss", {GPT_OSS: 5}, head_dim=16, num_local_experts=2, num_experts_per_tok=1
    ),
    "olmo2": text("Olmo2", {GPT_OSS: 9}),
    "helium": text("Helium", {GPT_OSS: 5}, head_dim=16),
    "gemma": text("Gemma", {GEMMA: 5}, head_dim=16),
    "gemma2": text("Gemma2", {GEMMA: 9}, head_dim=16),
    "gemma3": text("Gemma3", {GEMMA: 13}, config="TextConfig", head_dim=16),
    "recurrent_gemma": text(
        "RecurrentGemma",
        {GEMMA: 5},
        block_types=["recurrent", "attention"],
        lru_width=32,
        attention_window_size=8,
    ),
    "qwen3_5": text(
        "Qwen3_5", {"Qwen3_5RMSNorm": 7}, config="TextConfig", head_dim=16, **LINEAR_ATTENTION
    ),
    "qwen3_next": text(
        "Qwen3Next",
        {"Qwen3_5RMSNorm": 7},
        head_dim=16,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        **LINEAR_ATTENTION,
    ),
    # one norm is called for each layer
    "gemma3n": text(
        "Gemma3n",
        {"Gemma3nRMSNorm": 22},
        calls=24,
        config="TextConfig",
        head_dim=16,
        num_kv_shared_layers=0,
        laurel_rank=4,
        altup_num_inputs=2,
        activation_sparsity_pattern=None,
        **PER_LAYER_INPUT,
    ),
    "gemma4": text(
        "Gemma4",
        {"Gemma3nRMSNorm": 18},
        config="TextConfig",
        head_dim=16,
        global_head_dim=16,
        **PER_LAYER_INPUT,
    ),
    # one L2 norm for both queries and keys
    "llama4": text(
        "Llama4",
        {"Llama4TextRMSNorm": 5, "Llama4TextL2Norm": 2},
        calls=9,
        config="TextConfig",
        head_dim=16,
        intermediate_size_mlp=32,
        num_local_experts=2,
        num_experts_per_tok=1,
    ),
    "t5": Family(
        t5,
        lambda: {**tokens(), "decoder_input_ids": torch.tensor([[0], [0]])},
        {"T5LayerNorm": 7},
        7,
    ),
    "llava": Family(llava, image_and_tokens, {LLAMA: 3, GPT_OSS: 9}, 12),
    "ltx": diffusion(
        "LTXVideoTransformer3DModel",
        lambda: {
            "hidden_states": random(1, 8, 4),
            "encoder_hidden_states": random(1, 4, 16),
            "encoder_attention_mask": torch.ones(1, 4),
            "timestep": torch.tensor([[3]]),
            "num_frames": 2,
            "height": 2,
            "width": 2,
        },
        {DIFFUSERS: 4, TORCH: 8},
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        cross_attention_dim=32,
        num_layers=2,
        caption_channels=16,
    ),
    "flux": diffusion(
        "FluxTransformer2DModel",
        lambda: {
            "hidden_states": random(1, 8, 4),
            "encoder_hidden_states": random(1, 4, 16),
            "pooled_projections": random(1, 16),
            "timestep": torch.tensor([0.5]),
            "img_ids": random(8, 3),
            "txt_ids": random(4, 3),
        },
        {TORCH: 6},
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        axes_dims_rope=(4, 4, 8),
    ),
    "wan": diffusion(
        "WanTransformer3DModel",
        lambda: {
            "hidden_states": random(1, 4, 2, 4, 4),
            "encoder_hidden_states": random(1, 4, 16),
            "timestep": torch.tensor([3]),
        },
        {TORCH: 4},
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=16,
        ffn_dim=32,
        num_layers=1,
        rope_max_seq_len=32,
    ),
    "sd3.5": diffusion(
        "SD3Transformer2DModel",
        lambda: {
            "hidden_states": random(1, 4, 8, 8),
            "encoder_hidden_states": random(1, 4, 32),
            "pooled_projections": random(1, 16),
            "timestep": torch.tensor([3]),
        },
        {DIFFUSERS: 10},
        sample_size=8,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=16,
        pos_embed_max_size=8,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    ),
    "qwen_image": diffusion(
        "QwenImageTransformer2DModel",
        lambda: {
            "hidden_states": random(1, 4, 16),
            "encoder_hidden_states": random(1, 4, 16),
            "encoder_hidden_states_mask": torch.ones(1, 4, dtype=torch.bool),
            "timestep": torch.tensor([0.5]),
            "img_shapes": [[(1, 2, 2)]],
        },
        {DIFFUSERS: 5},
        in_channels=16,
        out_channels=4,
        num_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(4, 4, 8),
    ),
    "sana": diffusion(
        "SanaTransformer2DModel",
        lambda: {
            "hidden_states": random(1, 4, 8, 8),
            "encoder_hidden_states": random(1, 4, 16),
            "timestep": torch.tensor([3]),
        },
        {DIFFUSERS: 5},
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=1,
        num_cross_attention_heads=2,
        cross_attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=16,
        sample_size=8,
        qk_norm="rms_norm_across_heads",
    ),
    # one norm of the last block's text has no use
    "mochi": diffusion(
        "MochiTransformer3DModel",
        lambda: {
            "hidden_states": random(1, 4, 2, 4, 4),
            "encoder_hidden_states": random(1, 8, 16),
            "encoder_attention_mask": torch.ones(1, 8, dtype=torch.bool),
            "timestep": torch.tensor([3]),
        },
        {DIFFUSERS: 14, "MochiRMSNorm": 8},
        calls=21,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        pooled_projection_dim=16,
        in_channels=4,
        text_embed_dim=16,
        time_embed_dim=4,
        max_sequence_length=8,
    ),
    "krea2": diffusion(
        "Krea2Transformer2DModel",
        lambda: {
            "hidden_states": random(1, 4, 4),
            "encoder_hidden_states": random(1, 3, 2, 16),
            "timestep": torch.tensor([0.3]),
            "position_ids": torch.arange(21).reshape(7, 3),
        },
        {"Krea2RMSNorm": 26},
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=16,
        timestep_embed_dim=8,
        text_hidden_dim=16,
        num_text_layers=2,
        text_num_attention_heads=2,
        text_num_key_value_heads=2,
        text_intermediate_size=16,
        axes_dims_rope=(4, 2, 2),
    ),
    "hunyuan_video": diffusion(
        "HunyuanVideoTransformer3DModel",
        lambda: {
            "hidden_states": random(1, 4, 2, 4, 4),
            "encoder_hidden_states": random(1, 4, 16),
            "encoder_attention_mask": torch.ones(1, 4, dtype=torch.bool),
            "pooled_projections": random(1, 16),
            "timestep": torch.tensor([3]),
        },
        {DIFFUSERS: 6},
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        guidance_embeds=False,
        text_embed_dim=16,
        pooled_projection_dim=16,
        rope_axes_dim=(4, 4, 8),
    ),
}
