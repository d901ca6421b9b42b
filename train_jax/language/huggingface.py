"""A run as a folder that `transformers` loads.

`NanoChatForCausalLM` is nanochat's model of November 2025. Its weights have other names and the same values; rotary
channels are in the same order. It computes the rotary tables in the dtype of the activations, here they are stored in
bfloat16. `HrmTextForCausalLM` is HRM-Text. Its tokenizer makes an instruction of a text, and gives each of its tokens
the type 1 in `token_type_ids`, which the model needs to read it in both directions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import bridge
from models_torch.hrm_text import HRMTextConfig, to_transformers
from train_jax.errors import UserError
from train_jax.language.generation import TextModel
from train_jax.language.tokenizer import BOS, Tokenizer
from train_jax.run.restore import Restored
from train_jax.storage.files import whole_file, write_text

_NAMES = (
    (r"transformer\.wte\.", "model.embed_tokens."),
    (r"transformer\.h\.(\d+)\.", r"model.layers.\1."),
    (r"\.attn\.c_proj\.", ".self_attn.o_proj."),
    (r"\.attn\.c_([qkv])\.", r".self_attn.\1_proj."),
    (r"\.mlp\.c_fc\.", ".mlp.fc1."),
    (r"\.mlp\.c_proj\.", ".mlp.fc2."),
)
_END = "<|assistant_end|>"
CHAT_TEMPLATE = """\
{%- set system = messages[0].content ~ '\\n\\n' if messages[0].role == 'system' else '' -%}
{{- bos_token -}}
{%- for message in messages if message.role != 'system' -%}
{{- '<|' ~ message.role ~ '_start|>' ~ (system if loop.first else '') -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'text' -%}
{{- part.text -}}
{%- else -%}
{%- set tool = 'python' if part.type == 'python' else 'output' -%}
{{- '<|' ~ tool ~ '_start|>' ~ part.text ~ '<|' ~ tool ~ '_end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|' ~ message.role ~ '_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant_start|>' -}}
{%- endif -%}
"""
"""Template that renders messages, whose contents are texts or parts, like `conversations.render`."""


INSTRUCTION_TEMPLATE = """\
{{- '%s' -}}
{%%- for message in messages -%%}
{{- message.content ~ ('' if loop.last else '\\n') -}}
{%%- endfor -%%}
{{- '%s' -}}
"""
"""Renders messages as one instruction, between its special tokens.

The text has no `token_type_ids`: the tokenizer of `transformers` adds them, and the model of a program that does not
pass them on reads the instruction in one direction.
"""


def write_folder(run: Restored, folder: Path) -> Iterator[Path]:
    """Writes weights, configuration and tokenizer; yields each file.

    Raises `UserError` for a model without a class in `transformers`.
    """
    config: Any = run.config
    arch = config.arch
    recurs = isinstance(arch, HRMTextConfig) and arch.design == "hrm"
    if config.model != "gpt" and not recurs:
        raise UserError(
            f"transformers has no class for --model {config.model}: its NanoChatForCausalLM is --model gpt, its "
            "HrmTextForCausalLM hrm_text of design hrm; use --format safetensors"
        )
    tokenizer = TextModel(run).tokenizer
    weights = to_transformers(run.state_dict()) if recurs else _renamed(run.state_dict())
    model = _hrm_config(arch, tokenizer, weights) if recurs else _config(arch, tokenizer)
    folder.mkdir(exist_ok=True)
    with whole_file(folder / "model.safetensors") as scratch:
        bridge.save_weights(scratch, weights)
    yield folder / "model.safetensors"
    for name, content in (
        ("config.json", json.dumps(model, indent=1)),
        ("generation_config.json", json.dumps(_ends(tokenizer), indent=1)),
        ("tokenizer.json", json.dumps(_tokenizer(tokenizer), ensure_ascii=False, indent=1)),
        ("tokenizer_config.json", json.dumps(_tokenizer_config(arch, tokenizer), indent=1)),
        ("chat_template.jinja", _template(tokenizer)),
    ):
        write_text(folder / name, content)
        yield folder / name


def _renamed(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nanochat's weights by the names of transformers."""
    renamed = {}
    for name, weight in state.items():
        for pattern, replacement in _NAMES:
            name = re.sub(pattern, replacement, name)
        renamed[name] = weight
    return renamed


def _template(tokenizer: Tokenizer) -> str:
    form = tokenizer.instructions
    if form is None:
        return CHAT_TEMPLATE
    return INSTRUCTION_TEMPLATE % (tokenizer.decode(form.begin), tokenizer.decode([form.end]))


def _ends(tokenizer: Tokenizer) -> dict[str, Any]:
    if form := tokenizer.instructions:
        return {"bos_token_id": form.begin[0], "eos_token_id": form.stop, "pad_token_id": form.stop}
    end = tokenizer.specials.get(_END, tokenizer.bos)
    return {"bos_token_id": tokenizer.bos, "eos_token_id": [end, tokenizer.bos], "pad_token_id": end}


def _config(arch: Any, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "architectures": ["NanoChatForCausalLM"],
        "model_type": "nanochat",
        "vocab_size": tokenizer.vocab_size,
        "hidden_size": arch.n_embd,
        "intermediate_size": 4 * arch.n_embd,
        "num_hidden_layers": arch.n_layer,
        "num_attention_heads": arch.n_head,
        "num_key_value_heads": arch.n_kv_head,
        "max_position_embeddings": arch.seq_len,
        "hidden_act": "relu2",
        "rms_norm_eps": float(np.finfo(np.float32).eps),  # PyTorch's default
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "final_logit_softcapping": 15.0,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "dtype": "float32",
        **_ends(tokenizer),
    }


def _hrm_config(arch: HRMTextConfig, tokenizer: Tokenizer, weights: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["HrmTextForCausalLM"],
        "model_type": "hrm_text",
        "vocab_size": tokenizer.vocab_size,
        "hidden_size": arch.hidden_size,
        "intermediate_size": weights["model.L_module.layers.0.mlp.down_proj.weight"].shape[1],
        "num_hidden_layers": arch.layers_per_stack,  # transformers multiplies it by the cycles when it loads it
        "num_attention_heads": arch.num_heads,
        "head_dim": arch.hidden_size // arch.num_heads,
        "H_cycles": arch.H_cycles,
        "L_cycles": arch.L_cycles,
        "embedding_scale": arch.hidden_size**0.5,
        "initializer_range": arch.hidden_size**-0.5,
        "prefix_lm": tokenizer.instructions is not None,
        "max_position_embeddings": arch.seq_len,
        "rms_norm_eps": arch.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": arch.rope_theta},
        "tie_word_embeddings": False,
        "dtype": "float32",
        **_ends(tokenizer),
    }


def _tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns the content of `tokenizer.json`: the tokenizer puts <|bos|> before a text, as in training.

    The tokenizer of a model of instructions puts the special tokens of an instruction around the text, and gives all
    its tokens the type 1. The chat template has its own special tokens.
    """
    form = tokenizer.instructions
    type_id = int(tokenizer.instructions is not None)
    before, after = (form.begin, (form.end,)) if form else ((tokenizer.bos,), ())
    names = {number: tokenizer.decode([number]) for number in (*before, *after)}
    first, last = ([{"SpecialToken": {"id": names[n], "type_id": type_id}} for n in each] for each in (before, after))
    text = {"Sequence": {"id": "A", "type_id": type_id}}
    processor = {
        "type": "TemplateProcessing",
        "single": [*first, text, *last],
        "pair": [*first, text, *last, {"Sequence": {"id": "B", "type_id": 1 - type_id}}],
        "special_tokens": {name: {"id": name, "ids": [number], "tokens": [name]} for number, name in names.items()},
    }
    return json.loads(tokenizer.to_json()) | {"post_processor": processor}


def _tokenizer_config(arch: Any, tokenizer: Tokenizer) -> dict[str, Any]:
    form = tokenizer.instructions
    bos, end = (tokenizer.decode([n]) for n in (form.begin[0], form.stop)) if form else (BOS, _END)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": end,
        "pad_token": end,
        "model_max_length": arch.seq_len,
        "clean_up_tokenization_spaces": False,
        **({"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]} if form else {}),
    }
