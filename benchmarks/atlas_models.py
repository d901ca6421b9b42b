"""Models for the atlas: tiny ones of transformers, timm and diffusers by the names in their registries."""

from __future__ import annotations

import importlib
import inspect
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

Model = tuple[nn.Module, tuple, dict[str, Any]]
"""A module, and the arguments and keywords of a call."""


class Entry(NamedTuple):
    family: str
    build: Callable[[], Model]


def entries(every: int, seed: int, zoo: Path | None) -> dict[str, Entry]:
    """Every n-th model of each registry, from a place that the seed decides, and those of a folder, by name."""
    entries: dict[str, Entry] = {}
    for registry in (_transformers, _timm, _diffusers) if every else ():
        names = sorted(registry().items())
        entries |= dict(names[random.Random(seed).randrange(every) :: every])
    if zoo is not None:
        sys.path.insert(0, str(zoo))
        for name, (family, build) in importlib.import_module("build").builders().items():
            entries[name] = Entry(f"zoo, {family}", build)
    return entries


def import_torchvision() -> None:
    """Import torchvision also where its library of operators does not load: its models need none of them."""
    register = torch.library.register_fake

    def lenient(op: Any, *args: Any, **kwargs: Any) -> Any:
        return (lambda f: f) if str(op).startswith("torchvision::") else register(op, *args, **kwargs)

    torch.library.register_fake = lenient  # pyright: ignore[reportAttributeAccessIssue]
    try:
        importlib.import_module("torchvision")
    finally:
        torch.library.register_fake = register


# ---- transformers

_TASKS = {
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": "causal",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES": "masked",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES": "seq2seq",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES": "image",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": "text",
}
_SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embed_dim", "embedding_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 1),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "d_ff", "n_inner", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_size"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_sequence_length"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "vocab_size": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0,
    "image_size": 32, "patch_size": 8, "num_labels": 3,
}  # fmt: skip


def _transformers() -> dict[str, Entry]:
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    entries: dict[str, Entry] = {}
    for mapping, task in _TASKS.items():
        for kind, model in getattr(auto, mapping).items():
            name = model if isinstance(model, str) else model[0]
            entries[f"transformers/{name}"] = Entry(
                f"transformers, {task}", lambda kind=kind, name=name, task=task: _of_transformers(kind, name, task)
            )
    return entries


_OWN: dict[str, dict[str, Any]] = {
    "deepseek_v32": {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "index_head_dim": 16},
    "longcat_flash": {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "head_dim": 8},
    "mamba2": {"num_heads": 8},
    "mllama": {"cross_attention_layers": [1], "pad_token_id": 0},
    "reformer": {"axial_pos_embds_dim": (16, 16), "axial_pos_shape": (2, 4)},
    "siglip2": {
        "vision_config": {
            "hidden_size": 32,
            "patch_size": 8,
            "num_patches": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
        }
    },
    "swinv2": {"embed_dim": 24, "patch_size": 2, "window_size": 2},
}
"""Settings that a kind of model needs besides `_SMALL`."""


def _of_transformers(kind: str, name: str, task: str) -> Model:
    import transformers

    model = getattr(transformers, name)
    default = model.config_class() if task == "causal" else transformers.AutoConfig.for_model(kind)
    numbers = {key: value for key, value in _SMALL.items() if isinstance(getattr(default, key, ()), (int, type(None)))}
    module = model(type(default)(**numbers | _OWN.get(kind, {})))
    config = module.config
    if hasattr(module, "set_default_language"):
        module.set_default_language(config.languages[0])
    if kind == "siglip2":
        patches = {"pixel_values": torch.randn(2, 16, 8 * 8 * 3), "spatial_shapes": torch.tensor([[4, 4], [2, 8]])}
        return module, (), {**patches, "pixel_attention_mask": torch.ones(2, 16, dtype=torch.int64)}
    if task == "image":
        size = config.image_size if isinstance(getattr(config, "image_size", None), int) else 32
        channels = getattr(config, "num_channels", 3)
        return module, (), {"pixel_values": torch.randn(2, channels, size, size), "labels": torch.tensor([0, 1])}
    ids = torch.randint(3, 60, (2, 8))
    labels = torch.tensor([0, 1]) if task == "text" else ids.clone()
    if task == "seq2seq" and kind != "fsmt":  # which takes its inputs for those of the decoder
        labels = ids[:, :6].contiguous()
    if task == "text":
        ids[:, -1] = 2  # the end, by which some models find the place to classify
    return module, (), {"input_ids": ids, "labels": labels}


# ---- timm


_LARGEST = 60_000_000
"""Parameters of a model of timm that is tried. Its widths are not made smaller; its depth is, where it has more."""
_SHALLOWER: tuple[dict[str, Any], ...] = (
    {}, {"depth": 2}, {"depths": (1, 1, 1, 1)}, {"layers": (1, 1, 1, 1)}, {"depths": (1, 1, 1)}, {"layers": (1, 1)},
)  # fmt: skip


def _timm() -> dict[str, Entry]:
    timm = importlib.import_module("timm")
    return {f"timm/{name}": Entry("timm", lambda n=name: _of_timm(n)) for name in timm.list_models()}


def _of_timm(name: str) -> Model:
    timm = importlib.import_module("timm")
    size = timm.models.get_pretrained_cfg(name).input_size if timm.models.is_model_pretrained(name) else (3, 224, 224)
    patch = re.search(r"patch(\d+)", name)
    small, count = min(size[-1], 4 * int(patch[1]) if patch else 64), 0
    for depth in _SHALLOWER:
        for settings in ({"img_size": small, **depth}, depth):
            try:
                with torch.device("meta"):
                    model = timm.create_model(name, num_classes=10, **settings)
            except (TypeError, RuntimeError, AssertionError, ValueError, IndexError):
                continue
            count = sum(p.numel() for p in model.parameters())
            if count > _LARGEST:
                break
            fixed = "img_size" not in settings and hasattr(model, "patch_embed")
            side = size[-1] if fixed else small
            return timm.create_model(name, num_classes=10, **settings), (torch.randn(2, size[0], side, side),), {}
    raise ValueError(f"{count / 1e6:.0f} million parameters, more than {_LARGEST / 1e6:.0f} million")


# ---- diffusers

_SMALL_DIFFUSION: dict[str, Any] = {
    "num_layers": 1, "num_single_layers": 1, "num_attention_heads": 2, "attention_head_dim": 16, "sample_size": 8,
    "patch_size": 2, "in_channels": 4, "out_channels": 4, "norm_num_groups": 8, "layers_per_block": 1,
    "cross_attention_dim": 32, "caption_channels": 32, "joint_attention_dim": 32, "pooled_projection_dim": 32,
    "caption_projection_dim": 32, "text_embed_dim": 32, "hidden_size": 32, "num_embeds_ada_norm": 10,
    "time_embed_dim": 32,
}  # fmt: skip
_INPUTS: dict[str, Callable[[], torch.Tensor]] = {
    "sample": lambda: torch.randn(2, 4, 8, 8),
    "hidden_states": lambda: torch.randn(2, 4, 8, 8),
    "timestep": lambda: torch.tensor([3, 7]),
    "encoder_hidden_states": lambda: torch.randn(2, 5, 32),
    "class_labels": lambda: torch.tensor([1, 2]),
    "pooled_projections": lambda: torch.randn(2, 32),
}


_OF_DIFFUSERS: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "AutoencoderKLKVAEVideo": (
        {"ch": 32, "ch_mult": (1, 2), "num_res_blocks": 1, "z_channels": 4, "temporal_compress_times": 2},
        lambda: {"sample": torch.randn(1, 3, 5, 16, 16)},
    ),
    "AutoencoderRAE": (
        {
            "encoder_hidden_size": 64, "encoder_num_hidden_layers": 1, "decoder_hidden_size": 32,
            "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2, "decoder_intermediate_size": 64,
            "encoder_input_size": 28, "patch_size": 14, "image_size": 28,
        },
        lambda: {"sample": torch.randn(2, 3, 28, 28)},
    ),
    "ConsistencyDecoderVAE": (
        {"encoder_block_out_channels": (32,) * 4, "decoder_block_out_channels": (32,) * 4}
        | {"encoder_layers_per_block": 1, "decoder_layers_per_block": 1},
        lambda: {"sample": torch.randn(2, 3, 32, 32)},
    ),
    "ErnieImageTransformer2DModel": (
        {"hidden_size": 32, "num_attention_heads": 2, "num_layers": 1, "ffn_hidden_size": 64, "in_channels": 4}
        | {"out_channels": 4, "text_in_dim": 32, "rope_axes_dim": (4, 6, 6)},
        lambda: {
            "hidden_states": torch.randn(2, 4, 8, 8), "timestep": torch.tensor([3, 7]),
            "text_bth": torch.randn(2, 5, 32), "text_lens": torch.tensor([5, 3]),
        },
    ),
    "HunyuanVideo15Transformer3DModel": (
        {
            "in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 1,
            "num_refiner_layers": 1, "text_embed_dim": 32, "text_embed_2_dim": 16, "image_embed_dim": 16,
            "rope_axes_dim": (4, 6, 6), "target_size": 16, "task_type": "t2v",
        },
        lambda: {
            "hidden_states": torch.randn(1, 4, 2, 4, 4), "timestep": torch.tensor([3.0]),
            "encoder_hidden_states": torch.randn(1, 5, 32), "encoder_attention_mask": torch.ones(1, 5),
            "encoder_hidden_states_2": torch.randn(1, 4, 16), "encoder_attention_mask_2": torch.ones(1, 4),
            "image_embeds": torch.randn(1, 3, 16),
        },
    ),
    "Kandinsky6Transformer3DModel": (
        {
            "in_visual_dim": 4, "out_visual_dim": 4, "in_text_dim": 32, "in_text_dim2": 16, "time_dim": 32,
            "model_dim": 32, "ff_dim": 64, "num_text_blocks": 1, "num_visual_blocks": 1, "axes_dims": (4, 6, 6),
            "visual_cond": False,
        },
        lambda: {
            "hidden_states": torch.randn(1, 2, 4, 4, 4), "encoder_hidden_states": torch.randn(1, 5, 32),
            "pooled_projections": torch.randn(1, 16), "timestep": torch.tensor([3.0]),
        },
    ),
    "OmniGenTransformer2DModel": (
        {
            "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 64,
            "num_layers": 1, "pad_token_id": 0, "vocab_size": 64, "max_position_embeddings": 64, "time_step_dim": 32,
            "original_max_position_embeddings": 64, "pos_embed_max_size": 16,
            "rope_scaling": {"short_factor": [1.0] * 8, "long_factor": [1.0] * 8},
        },
        lambda: {
            "hidden_states": torch.randn(2, 4, 8, 8), "timestep": torch.tensor([3.0, 7.0]),
            "input_ids": torch.randint(0, 64, (2, 5)), "input_img_latents": [], "input_image_sizes": {},
            "attention_mask": torch.ones(2, 22, 22), "position_ids": torch.arange(22)[None].repeat(2, 1),
        },
    ),
    "Transformer2DModel": (
        {"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 32, "norm_num_groups": 8},
        lambda: {"hidden_states": torch.randn(2, 32, 8, 8)},
    ),
    "WanTransformer3DModel": (
        {
            "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 32,
            "freq_dim": 32, "ffn_dim": 64, "num_layers": 1, "rope_max_seq_len": 32,
        },
        lambda: {
            "hidden_states": torch.randn(1, 4, 2, 8, 8), "timestep": torch.tensor([3]),
            "encoder_hidden_states": torch.randn(1, 5, 32),
        },
    ),
}  # fmt: skip
"""Settings and inputs of classes for which `_SMALL_DIFFUSION` and `_INPUTS` do not do."""


def _diffusers() -> dict[str, Entry]:
    models: Any = importlib.import_module("diffusers.models")
    names = [name for group in models._import_structure.values() for name in group]
    kinds = {name: kind for name, kind in ((n, getattr(models, n)) for n in names) if inspect.isclass(kind)}
    return {
        f"diffusers/{name}": Entry("diffusers", lambda kind=kind: _of_diffusers(kind))
        for name, kind in kinds.items()
        if issubclass(kind, nn.Module) and "Flax" not in name
    }


def _of_diffusers(kind: Any) -> Model:
    if kind.__name__ in _OF_DIFFUSERS:
        settings, inputs = _OF_DIFFUSERS[kind.__name__]
        return kind(**settings), (), inputs()
    known = inspect.signature(kind.__init__).parameters
    settings = {key: value for key, value in _SMALL_DIFFUSION.items() if key in known}
    if "block_out_channels" in known:
        blocks = known["block_out_channels"].default
        settings["block_out_channels"] = tuple(16 * (i + 1) for i in range(len(blocks)))
    module = kind(**settings)
    wanted = inspect.signature(module.forward).parameters.values()
    inputs = {p.name: _INPUTS[p.name]() for p in wanted if p.name in _INPUTS}
    return module, (), inputs


def names_of(chosen: dict[str, Entry], done: set[str]) -> Iterator[str]:
    """The models that were not tried yet, the families in turn, so that a run that ends early has something of all."""
    families: dict[str, list[str]] = {}
    for name, entry in chosen.items():
        if name not in done:
            families.setdefault(entry.family.partition(",")[0], []).append(name)
    while any(families.values()):
        yield from (names.pop(0) for names in families.values() if names)
