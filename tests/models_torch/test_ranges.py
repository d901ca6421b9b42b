"""Configurations: declared ranges, published defaults, and the one line of a refusal."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import pytest

from models_torch import registry
from models_torch.outside import OutsideConfig
from models_torch.outside_language import OutsideLanguageConfig
from models_torch.ranges import Choices, Range, check_ranges, field_rules

CONFIG_CLASSES = [
    *(each.config_class for each in registry.ARCHITECTURES.values()),
    OutsideConfig,
    OutsideLanguageConfig,
]


@dataclass(frozen=True)
class Example:
    count: Annotated[int, Range(1, 10)] = 1
    rate: Annotated[float, Range(0, why="nothing breaks however large it is")] = 0.0
    decay: Annotated[float, Range(0, 1, high_excluded=True)] = 0.5
    end: Annotated[float | None, Range(0, 1)] = None
    start: Annotated[float, Range(0, 1)] | None = None
    depth: Annotated[tuple[int, int], Range(1, 4)] = (1, 2)
    widths: tuple[Annotated[int, Range(1, 4)], ...] = ()
    mode: Annotated[str, Choices(("fast", "exact"))] = "fast"
    runner: Literal["pmap", "shard_map"] = "pmap"
    verbose: bool = False
    folder: str = ""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        check_ranges(self)


def test_values_in_range_are_accepted():
    Example(count=10, rate=1e308, decay=0, end=1.0, start=0, depth=(4, 1), widths=(1, 2, 3), mode="exact")
    Example(count=np.int64(2), rate=np.float32(0.5), runner="shard_map", verbose=True, folder="anything")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": 0}, "count is 0; use at least 1"),
        ({"count": 1.0}, "count is 1.0; use a whole number from 1 to 10"),
        ({"rate": math.inf}, "rate is inf; use a finite value from 0"),
        ({"decay": 1.0}, "decay is 1.0; use a value from 0 to below 1"),
        ({"decay": math.nan}, "decay is nan; use a value from 0 to below 1"),
        ({"depth": (1, 5)}, r"depth is \(1, 5\); use at most 4"),
        ({"widths": (0,)}, r"widths is \(0,\); use at least 1"),
        ({"mode": "slow"}, "mode is 'slow'; use one of fast, exact"),
        ({"runner": "vmap"}, "runner is 'vmap'; use one of pmap, shard_map"),
        ({"verbose": "false"}, "verbose is 'false'; use True or False"),
    ],
)
def test_a_refused_value_is_named_with_what_to_use(values, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        Example(**values)


@pytest.mark.parametrize("config_class", CONFIG_CLASSES, ids=lambda each: each.__name__)
def test_every_field_of_every_model_refuses_what_is_out_of_range(config_class):
    rules = field_rules(config_class)
    assert rules.keys() >= {"batch_size", "seq_len", "vocab_size"}
    for name, rule in rules.items():
        wrong = [""] if name != "options" else []
        if rule.base in (int, float):
            wrong += [rule.declared.low - 1, 2 * rule.declared.high, math.nan, math.inf, -math.inf, None]
        for value in wrong:
            with pytest.raises(ValueError, match=f"^{name} is .*; use [^\n]*$"):
                config_class(**{name: value})


# ---- models

MODELS = registry.ARCHITECTURES | registry.LANGUAGE_MODELS

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
    fields = dataclasses.asdict(registry.config_class(name)())
    expected = shared | PUBLISHED_CONFIGURATIONS[name]
    assert {key: fields[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("trm", {"pos_encodings": "sine"}, "pos_encodings is 'sine'; use one of none, rope, learned"),
        ("trm_hier6", {"L_cycles": 7}, "L_cycles is 7, but each needs its own latent; use at most 6, or model trm"),
        ("trm", {"num_heads": 10}, "10 heads of 3 channels, but rope needs an even number; use a hidden_size of 40"),
        ("trm", {"puzzle_emb_ndim": 0}, "puzzle_emb_len 2 has no effect with puzzle_emb_ndim 0; use"),
        ("trm", {"puzzle_emb_ndim": 65}, "does not fit in 2 positions of 32 channels; use at most 64"),
        ("trm", {"attention_window": 4}, "attention_window is 4; use an odd number"),
        ("trm", {"attention_window": 3, "mlp_t": True}, "use mlp_t False, or attention_window 0"),
        ("trm", {"attention_window": 3, "seq_len": 15}, "15 is not a square; use attention_window 0"),
        ("trm", {"convolution_window": 3, "attention_window": 3}, "set one of them to 0"),
        ("gpt", {"n_embd": 60}, "n_embd 60 does not divide into 4 heads of .*; use a multiple of 8"),
        ("gpt", {"n_kv_head": 3}, "n_kv_head 3 does not divide n_head 4; use a divisor of it"),
        ("gpt_2026", {"window_pattern": "SXL"}, "window_pattern is 'SXL'; use letters S and L, such as SSSL"),
        ("gpt_2026", {"n_embd": 16}, "n_embd is 16; use at least 24"),
    ],
)
def test_the_message_says_what_to_use_instead(name, changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(MODELS[name].tiny_config, **changes)
