"""The published HRM-Text modules, with FlashAttention replaced by one function; HRM_TEXT_DIR names a checkout."""

import importlib
import os
import sys
from types import ModuleType

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


def import_published(monkeypatch):
    """Returns a function that imports a module of the published `models`; nothing of it stays imported."""
    monkeypatch.syspath_prepend(os.environ["HRM_TEXT_DIR"])
    for name in [name for name in sys.modules if name.partition(".")[0] == "models"]:
        monkeypatch.delitem(sys.modules, name)
    unused = dict.fromkeys(("flash_attn_with_kvcache", "_flash_attn_backward", "maybe_contiguous"))
    replaced = {"flash_attn_varlen_prefixlm": attention}
    for name, contents in (("flash_attn_interface", unused), ("models.flash_attention_prefixlm_v2", replaced)):
        stand_in = ModuleType(name)
        vars(stand_in).update(contents)
        monkeypatch.setitem(sys.modules, name, stand_in)

    def imported(name):
        module = importlib.import_module(f"models.{name}")
        for each in [each for each in sys.modules if each.partition(".")[0] == "models"]:
            monkeypatch.setitem(sys.modules, each, sys.modules[each])  # removed after the test
        return module

    return imported


def build_published(monkeypatch, config) -> torch.nn.Module:
    """Returns the published module, without its loss, of an `HRMTextConfig`."""
    imported = import_published(monkeypatch)
    module, name = CLASSES[config.design].split(":")
    high = min(config.H_cycles, config.bp_steps - 1)
    same = "n_layers", "hidden_size", "num_heads", "expansion", "rope_theta", "vocab_size"
    fields = {name: getattr(config, name) for name in same}
    fields |= {"max_seq_len": config.seq_len, "norm_eps": config.rms_norm_eps}
    fields |= {"init_type": "lecun_normal", "norm_type": "pre", "pos_emb_type": "rope"}
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
