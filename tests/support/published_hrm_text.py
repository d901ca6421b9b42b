"""The published HRM-Text modules, with FlashAttention replaced by one function; HRM_TEXT_DIR names a checkout."""

import importlib
import os
import sys
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

CLASSES = {
    "hrm": "baselines.hrm_nocarry_bp_warmup:HierarchicalReasoningModel",
    "trm": "baselines.trm_nocarry:TinyRecursiveModel",
    "ut": "baselines.ut_nocarry:UniversalTransformer",
    "rins": "baselines.rins_nocarry:RINS",
    "transformer": "baselines.transformer_wrapper:TransformerWrapper",
}


def attention(query, key, value, is_causal, *, attends):
    """Attention of (seq, heads, head_dim), in the place of `flash_attn_varlen_prefixlm`; `attends` is (seq, seq)."""
    del is_causal
    heads = (each.transpose(0, 1)[None] for each in (query, key, value))
    return F.scaled_dot_product_attention(*heads, attn_mask=attends)[0].transpose(0, 1)


def import_published(monkeypatch) -> Any:
    """Returns a function that imports a module of the published `models`; nothing of it stays imported."""
    monkeypatch.syspath_prepend(os.environ["HRM_TEXT_DIR"])
    stand_in = ModuleType("flash_attn_interface")
    for name in ("flash_attn_with_kvcache", "_flash_attn_backward", "maybe_contiguous"):
        setattr(stand_in, name, None)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", stand_in)
    replaced = ModuleType("models.flash_attention_prefixlm_v2")
    replaced.flash_attn_varlen_prefixlm = attention  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "models.flash_attention_prefixlm_v2", replaced)
    for name in [name for name in sys.modules if name == "models" or name.startswith("models.")]:
        if name != "models.flash_attention_prefixlm_v2":
            monkeypatch.delitem(sys.modules, name)

    def imported(name):
        module = importlib.import_module(f"models.{name}")
        for each in [each for each in sys.modules if each == "models" or each.startswith("models.")]:
            monkeypatch.setitem(sys.modules, each, sys.modules[each])  # removed after the test
        return module

    return imported


def build_published(monkeypatch, config) -> torch.nn.Module:
    """Returns the published module, without its loss, of an `HRMTextConfig`."""
    imported = import_published(monkeypatch)
    module, name = CLASSES[config.design].split(":")
    high = min(config.H_cycles, config.bp_steps - 1)
    fields = {
        "max_seq_len": config.seq_len,
        "n_layers": config.n_layers,
        "hidden_size": config.hidden_size,
        "num_heads": config.num_heads,
        "expansion": config.expansion,
        "init_type": "lecun_normal",
        "norm_type": "pre",
        "norm_eps": config.rms_norm_eps,
        "pos_emb_type": "rope",
        "rope_theta": config.rope_theta,
        "vocab_size": config.vocab_size,
    }
    cycles = {
        "hrm": {"half_layers": True, "bp_warmup_ratio": 0.2, "bp_min_steps": 2, "bp_max_steps": 5},
        "trm": {"H_bp_steps": high, "L_bp_steps": config.bp_steps - high},
        "ut": {"cycles": config.L_cycles, "bp_cycles": config.bp_steps},
        "rins": {"half_layers": True, "L_bp_cycles": config.bp_steps},
        "transformer": {},
    }[config.design]
    sizes = {"H_cycles": config.H_cycles, "L_cycles": config.L_cycles} if config.design != "transformer" else {}
    model = getattr(imported(module), name)(fields | sizes | cycles)
    return imported("lm_head").LMHead(model, fields)
