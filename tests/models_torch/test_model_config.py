"""Configurations: published defaults, and the message for one that cannot work."""

import dataclasses

import pytest

from models_torch import registry

TINY = registry.ARCHITECTURES | registry.LANGUAGE_MODELS

# from config/arch of the published code; `mlp_t` is not in the transformer's
PUBLISHED_CONFIGURATIONS = {
    "trm": {"H_cycles": 3, "L_cycles": 6, "L_layers": 2, "num_heads": 8, "puzzle_emb_len": 16, "no_ACT_continue": True},
    "trm_singlez": {"H_cycles": 3, "L_cycles": 6, "L_layers": 2, "puzzle_emb_len": 16, "no_ACT_continue": True},
    "trm_hier6": {"H_cycles": 3, "L_cycles": 6, "L_layers": 2, "puzzle_emb_len": 16, "no_ACT_continue": True},
    "hrm": {"H_cycles": 2, "L_cycles": 2, "H_layers": 4, "L_layers": 4, "num_heads": 8, "no_ACT_continue": False},
    "transformer": {"H_layers": 8, "num_heads": 12, "no_ACT_continue": False},
}


@pytest.mark.parametrize("name", registry.ARCHITECTURES)
def test_defaults_are_the_published_configuration(name):
    shared = {"hidden_size": 512, "expansion": 4, "puzzle_emb_ndim": 512, "pos_encodings": "rope", "mlp_t": False}
    shared |= {"halt_max_steps": 16, "halt_exploration_prob": 0.1, "forward_dtype": "bfloat16"}
    shared |= {"loss_type": "stablemax_cross_entropy", "mlp_multiple_of": 256}
    config = registry.config_class(name)()
    fields = dataclasses.asdict(config)
    expected = shared | PUBLISHED_CONFIGURATIONS[name]
    assert {key: fields[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("trm", {"pos_encodings": "sine"}, "pos_encodings is 'sine'; use one of none, rope, learned"),
        ("hrm", {"forward_dtype": "int8"}, "forward_dtype is 'int8'; use one of float32, bfloat16, float16"),
        ("trm", {"L_cycles": 0}, "L_cycles is 0; use at least 1"),
        ("hrm", {"H_layers": 0}, "H_layers is 0; use at least 1"),
        ("transformer", {"H_layers": 0}, "H_layers is 0; use at least 1"),
        ("trm_hier6", {"L_cycles": 7}, "L_cycles is 7, but each needs its own latent; use at most 6, or model trm"),
        ("trm", {"num_heads": 10}, "10 heads of 3 channels, but rope needs an even number; use a hidden_size of 40"),
        ("trm", {"num_heads": 33}, "hidden_size 32 is too small for 33 heads; use at most 16 heads"),
        ("trm", {"puzzle_emb_ndim": 0}, "puzzle_emb_len 2 has no effect with puzzle_emb_ndim 0; use"),
        ("trm", {"puzzle_emb_ndim": 65}, "does not fit in 2 positions of 32 channels; use at most 64"),
        ("trm", {"attention_window": 4}, "attention_window is 4; use an odd number"),
        ("trm", {"attention_window": -3}, "attention_window is -3; use an odd number"),
        ("trm", {"attention_window": 3, "mlp_t": True}, "use mlp_t False, or attention_window 0"),
        ("trm", {"attention_window": 3, "seq_len": 15}, "15 is not a square; use attention_window 0"),
        ("trm", {"convolution_window": 4}, "convolution_window is 4; use an odd number"),
        ("trm", {"convolution_window": 3, "mlp_t": True}, "use mlp_t False, or convolution_window 0"),
        ("trm", {"convolution_window": 3, "attention_window": 3}, "set one of them to 0"),
        ("trm", {"convolution_window": 3, "seq_len": 15}, "15 is not a square; use convolution_window 0"),
        ("trm", {"cycle_penalty": -1.0}, "cycle_penalty is -1.0; use at least 0"),
        (
            "gpt",
            {"n_embd": 60},
            "n_embd 60 does not divide into 4 heads of .*; use a multiple of 8",
        ),
        ("gpt", {"n_kv_head": 3}, "n_kv_head 3 does not divide n_head 4; use a divisor of it"),
        ("gpt", {"forward_dtype": "float16"}, "forward_dtype is 'float16'; use one of float32, bfloat16"),
        ("gpt_2026", {"window_pattern": "SXL"}, "window_pattern is 'SXL'; use letters S and L, such as SSSL"),
        ("gpt_2026", {"window_pattern": ""}, "window_pattern is ''; use letters S and L"),
        ("gpt_2026", {"n_embd": 16}, "n_embd is 16; use at least 24"),
    ],
)
def test_the_message_says_what_to_use_instead(name, changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY[name].tiny_config, **changes)
