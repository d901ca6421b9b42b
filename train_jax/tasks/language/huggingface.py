"""A run as a folder that `transformers` loads, and with it vLLM and SGLang, by its class `NanoChatForCausalLM`.

The class is nanochat's model of November 2025. Its weights have other names and the same values; rotary channels are in
the same order. It computes the rotary tables in the dtype of the activations, here they are stored in bfloat16.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import bridge
from train_jax.errors import UserError
from train_jax.run.files import whole_file, write_text
from train_jax.run.restore import Restored
from train_jax.tasks.language.task import language_task
from train_jax.tasks.language.tokenizer import BOS, Tokenizer
from train_jax.tasks.mixing import data_dirs

_MODEL = "gpt"
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
"""Renders messages, whose contents are texts or parts, as `conversations.render` does."""


def write_folder(run: Restored, folder: Path) -> Iterator[Path]:
    """Writes weights, configuration and tokenizer; yields each file.

    Raises `UserError` for a model without a class in `transformers`.
    """
    config = run.config
    if config.model != _MODEL:
        raise UserError(
            f"transformers has no class for --model {config.model}: its NanoChatForCausalLM is --model {_MODEL}; use "
            "--format safetensors"
        )
    sizes, tokenizer = language_task(run).sizes, Tokenizer.load(data_dirs(config.data_dir)[0])
    if tokenizer.vocab_size != sizes["vocab_size"]:
        raise UserError(
            f"the tokenizer of {config.data_dir} has {tokenizer.vocab_size:,} tokens, the model "
            f"{sizes['vocab_size']:,}; restore the data of the training"
        )
    folder.mkdir(exist_ok=True)
    with whole_file(folder / "model.safetensors") as scratch:
        bridge.save_weights(scratch, {_named(name): weight for name, weight in run.state_dict().items()})
    yield folder / "model.safetensors"
    for name, content in (
        ("config.json", json.dumps(_config(config.arch, tokenizer), indent=1)),
        ("generation_config.json", json.dumps(_ends(tokenizer), indent=1)),
        ("tokenizer.json", json.dumps(_tokenizer(tokenizer), ensure_ascii=False, indent=1)),
        ("tokenizer_config.json", json.dumps(_tokenizer_config(config.arch), indent=1)),
        ("chat_template.jinja", CHAT_TEMPLATE),
    ):
        write_text(folder / name, content)
        yield folder / name


def _named(name: str) -> str:
    for pattern, replacement in _NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def _ends(tokenizer: Tokenizer) -> dict[str, Any]:
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


def _tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns `tokenizer.json` that puts <|bos|> before a text, as in training; the chat template has its own."""
    bos = {"SpecialToken": {"id": BOS, "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    processor = {
        "type": "TemplateProcessing",
        "single": [bos, text],
        "pair": [bos, text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {BOS: {"id": BOS, "ids": [tokenizer.bos], "tokens": [BOS]}},
    }
    return json.loads(tokenizer.to_json()) | {"post_processor": processor}


def _tokenizer_config(arch: Any) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": _END,
        "pad_token": _END,
        "model_max_length": arch.seq_len,
        "clean_up_tokenization_spaces": False,
    }
