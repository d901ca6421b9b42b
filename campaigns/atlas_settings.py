"""Settings and inputs of small models for the atlas: by name, by type and by class."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

TRANSFORMERS: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embed_dim", "embedding_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 1),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "d_ff", "n_inner", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_size", "qk_rope_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_sequence_length"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "vocab_size": 64, "v_head_dim": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0,
    "index_topk": 4, "index_head_dim": 16, "index_n_heads": 2, "image_size": 32, "patch_size": 8, "num_labels": 3,
}  # fmt: skip
"""Small sizes for a configuration of transformers that has settings of these names."""
TRANSFORMERS_BY_TYPE: dict[str, dict[str, Any]] = {
    "cvt": {"embed_dim": (16, 32, 64), "num_heads": (1, 2, 4), "depth": (1, 2, 3)},
    "deepseek_v32": {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    "fsmt": {"src_vocab_size": 64, "tgt_vocab_size": 64},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2},
    "longcat_flash": {"ffn_hidden_size": 64, "expert_ffn_hidden_size": 32, "moe_topk": 2, "zero_expert_num": 2},
    "luke": {"entity_vocab_size": 64, "entity_emb_size": 32},
    "mamba2": {"num_heads": 8, "state_size": 16, "n_groups": 2, "chunk_size": 4},
    "reformer": {
        "axial_pos_shape": (2, 4), "axial_pos_embds_dim": (16, 16), "attn_layers": ["local", "lsh"],
        "feed_forward_size": 64, "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4,
    },
    "siglip2_vision_model": {"num_patches": 16},
    "swinv2": {
        "patch_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4,
        "pretrained_window_sizes": (0, 0),
    },
    **{name: {"num_hidden_layers": 4} for name in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")},
    "t5": {"decoder_start_token_id": 0},
    "xmod": {"default_language": "en_XX"},
}  # fmt: skip
"""Settings by `model_type`: sizes that have to agree with others of the type, and names that no other type has."""
LEFT_OUT = {"nemo_speechlm": "three encoders of audio and a language model, whose settings have to agree"}
"""Models of transformers that are left out: `model_type` -> reason."""
TRANSFORMERS_INPUTS: dict[str, Callable[[], dict[str, Any]]] = {
    "siglip2": lambda: {
        "pixel_values": torch.randn(2, 16, 3 * 8 * 8),
        "pixel_attention_mask": torch.ones(2, 16, dtype=torch.long),
        "spatial_shapes": torch.tensor([[4, 4], [2, 8]]),
    },
}
"""Inputs by `model_type`, where those of the task do not serve."""

DIFFUSERS: dict[str, Any] = {
    "num_layers": 1, "num_single_layers": 1, "num_attention_heads": 2, "attention_head_dim": 16, "sample_size": 8,
    "patch_size": 2, "in_channels": 4, "out_channels": 4, "norm_num_groups": 8, "layers_per_block": 1,
    "cross_attention_dim": 32, "caption_channels": 32, "joint_attention_dim": 32, "pooled_projection_dim": 32,
    "caption_projection_dim": 32, "text_embed_dim": 32, "hidden_size": 32, "num_embeds_ada_norm": 10,
    "time_embed_dim": 32, "text_dim": 32, "freq_dim": 32, "ffn_dim": 64,
}  # fmt: skip
"""Small sizes for a constructor of diffusers that has parameters of these names."""
DIFFUSERS_INPUTS: dict[str, Callable[[], torch.Tensor]] = {
    "timestep": lambda: torch.tensor([3, 7]),
    "encoder_hidden_states": lambda: torch.randn(2, 5, 32),
    "class_labels": lambda: torch.tensor([1, 2]),
    "pooled_projections": lambda: torch.randn(2, 32),
}
"""Inputs for a forward of diffusers that has parameters of these names; images have the model's channels."""


@dataclasses.dataclass(frozen=True)
class Special:
    """What a class of diffusers wants differently."""

    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    inputs: Callable[[], dict[str, Any]] = dict


def _packed() -> dict[str, Any]:
    """A sequence of two text tokens, four of video and two of audio."""
    return {
        "hidden_states": torch.randn(2, 4, 16), "audio_hidden_states": torch.randn(2, 2, 8),
        "encoder_hidden_states": torch.randn(2, 2, 32), "timestep": torch.tensor([0.1, 0.7]),
        "timestep_indices": torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]),
        "token_tags": torch.tensor([1, 1, 0, 0, 0, 0, 2, 2]),
        "position_ids": torch.arange(24).reshape(8, 3) % 5,
        "text_indices": torch.arange(2), "video_indices": torch.arange(2, 6), "audio_indices": torch.arange(6, 8),
    }  # fmt: skip


DIFFUSERS_BY_CLASS: dict[str, Special] = {
    "AutoencoderKLKVAEVideo": Special(
        {"ch": 32, "ch_mult": (1, 1, 2, 2), "num_res_blocks": 1, "z_channels": 4},
        lambda: {"sample": torch.randn(1, 3, 5, 16, 16)},
    ),
    "AutoencoderRAE": Special(
        {
            "encoder_hidden_size": 64, "encoder_num_hidden_layers": 1, "encoder_input_size": 28, "image_size": 32,
            "decoder_hidden_size": 32, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2,
            "decoder_intermediate_size": 64, "patch_size": 16,
        },
        lambda: {"sample": torch.rand(2, 3, 32, 32)},
    ),
    "CogVideoXTransformer3DModel": Special(
        {"max_text_seq_length": 5, "sample_frames": 5, "sample_height": 8, "sample_width": 8},
        lambda: {"hidden_states": torch.randn(2, 2, 4, 8, 8)},
    ),
    "ConsistencyDecoderVAE": Special(
        {
            "encoder_block_out_channels": (16, 16, 32, 32), "encoder_norm_num_groups": 8,
            "encoder_layers_per_block": 1, "decoder_block_out_channels": (16, 16, 32, 32),
            "decoder_norm_num_groups": 8, "decoder_layers_per_block": 1,
        },
        lambda: {"sample": torch.randn(1, 3, 32, 32)},
    ),
    "ControlNetModel": Special(
        {"num_attention_heads": None}, lambda: {"controlnet_cond": torch.randn(2, 3, 64, 64)}
    ),
    "ErnieImageTransformer2DModel": Special(
        {"ffn_hidden_size": 64, "patch_size": 1, "text_in_dim": 24, "rope_axes_dim": (4, 6, 6)},
        lambda: {"text_bth": torch.randn(2, 5, 24), "text_lens": torch.tensor([5, 3])},
    ),
    "FluxTransformer2DModel": Special(
        {"patch_size": 1, "axes_dims_rope": (4, 6, 6)},
        lambda: {
            "hidden_states": torch.randn(2, 16, 4), "img_ids": torch.randint(0, 4, (16, 3)).float(),
            "txt_ids": torch.zeros(5, 3),
        },
    ),
    "HunyuanVideo15Transformer3DModel": Special(
        {
            "num_refiner_layers": 1, "patch_size": 1, "text_embed_2_dim": 24, "image_embed_dim": 24,
            "rope_axes_dim": (4, 6, 6),
        },
        lambda: {
            "hidden_states": torch.randn(2, 4, 2, 4, 4), "timestep": torch.tensor([3.0, 7.0]),
            "encoder_attention_mask": torch.ones(2, 5, dtype=torch.long),
            "encoder_hidden_states_2": torch.randn(2, 3, 24),
            "encoder_attention_mask_2": torch.ones(2, 3, dtype=torch.long), "image_embeds": torch.randn(2, 4, 24),
        },
    ),
    "Kandinsky6Transformer3DModel": Special(
        {
            "in_visual_dim": 4, "out_visual_dim": 4, "in_text_dim": 32, "in_text_dim2": 32, "time_dim": 32,
            "model_dim": 32, "ff_dim": 64, "num_text_blocks": 1, "num_visual_blocks": 1, "axes_dims": (4, 6, 6),
        },
        lambda: {"hidden_states": torch.randn(2, 2, 8, 8, 9), "audio_hidden_states": torch.randn(2, 3, 20)},
    ),
    "MiniMaxH3Transformer3DModel": Special(
        {"num_refiner_layers": 1, "audio_in_channels": 8, "time_embed_hidden_dim": 32, "rope_freq_dim": 2}, _packed
    ),
    "OmniGenTransformer2DModel": Special(
        {
            "num_key_value_heads": 2, "intermediate_size": 64, "pad_token_id": 0, "vocab_size": 64,
            "pos_embed_max_size": 8, "time_step_dim": 32,
            "rope_scaling": {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
        },
        lambda: {
            "input_ids": torch.randint(3, 60, (2, 6)), "input_img_latents": [torch.randn(1, 4, 4, 4)],
            "input_image_sizes": {0: [[1, 5]]}, "attention_mask": torch.ones(2, 23, 23),
            "position_ids": torch.arange(23).expand(2, 23).contiguous(),
        },
    ),
    "Transformer2DModel": Special(
        {
            "patch_size": None, "num_embeds_ada_norm": None, "caption_channels": None, "in_channels": 8,
            "out_channels": 8,
        },
        lambda: {"hidden_states": torch.randn(2, 8, 8, 8)},
    ),
    "UNet2DConditionModel": Special({"num_attention_heads": None}),
    "UNet2DModel": Special({"num_class_embeds": 10}),
}  # fmt: skip
