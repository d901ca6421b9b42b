"""Presets with nanochat's sizes: every depth, parameter groups; training and generation when small.

`support/published_depths.jsonl` has what the published scripts derive at 4a87a0d and at 92d63d4;
`NANOCHAT_DIR=/path/to/nanochat` derives it again from a checkout at one of them.
"""

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.scripts import ENVIRONMENT, script

from models_torch import registry
from models_torch.flops import language_flops_per_token
from train_jax.__main__ import main as trm
from train_jax.core.optim.chain import group_labels
from train_jax.core.optim.muon import muon_labels
from train_jax.errors import UserError
from train_jax.language.presets import PRESETS, derived, parameters, scaling_parameters
from train_jax.pods.stages.prove import Prove
from train_jax.run.arguments import parse_run, split_arguments
from train_jax.run.config import from_json, to_json
from train_jax.run.presets import preset

TESTS = Path(__file__).parents[1]
GROUPS = {
    r"transformer\.h\..*": "blocks", r"transformer\.wte\..*": "wte", r"lm_head\..*": "lm_head",
    r"value_embeds\..*": "value_embeds", "resid_lambdas": "resid_lambdas", "x0_lambdas": "x0_lambdas",
    r"smear_gate\..*|smear_lambda|backout_lambda": "smear_gate",
}  # fmt: skip


def modules_parameters(config):
    with torch.device("meta"):
        module = registry.build_model(config.model, config.arch)
    return dict(module.named_parameters())


def rows():
    return [json.loads(line) for line in (TESTS / "support" / "published_depths.jsonl").read_text().splitlines()]


NAMES = frozenset(PRESETS)


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row['year']}, {row['depth']}")
def test_every_depth_has_the_published_run(row):
    name = f"d{row['depth']}{'-2026' * (row['year'] == 2026)}"
    if "width" not in row:  # refused there, too
        with pytest.raises(UserError, match=rf"has no depth {row['depth']}: \d+ channels do not divide into \d+ heads"):
            preset(name)
        assert name not in NAMES
        return
    config = preset(name)
    arch = preset(name).arch
    tokens = config.global_batch_size * arch.seq_len
    ours = {
        "year": row["year"], "depth": arch.n_layer, "width": arch.n_embd, "heads": arch.n_head,
        "parameters": parameters(arch), "tokens_per_step": tokens, "steps": config.steps,
        "flops_per_token": language_flops_per_token(arch),
    }  # fmt: skip
    assert ours == {key: row[key] for key in ours} and name in NAMES
    rates = {GROUPS[group.pattern]: [group.lr, group.weight_decay or 0.0] for group in config.optim.groups}
    for group, expected in rates.items():
        assert expected == pytest.approx(row["rates"][group], rel=1e-6), group
    assert f"{config.steps:,} steps, {tokens * config.steps:,} tokens" in derived(config)


def test_the_table_is_that_of_the_published_script(nanochat):
    environment = os.environ | ENVIRONMENT | {"NANOCHAT_DTYPE": "float32"}
    printed = subprocess.run(script("published_depths"), env=environment, capture_output=True, text=True, check=True)
    published = [json.loads(line) for line in printed.stdout.splitlines()]
    assert len(published) == 29 and published == [row for row in rows() if row["year"] == published[0]["year"]]


@pytest.mark.parametrize("name", ["d20", "d7", "d32", "d24-2026", "d5-2026", "chat-d3"])
def test_parameters_are_those_of_the_module(name):
    config = preset(name)
    counts = {name: p.numel() for name, p in modules_parameters(config).items()}
    assert sum(counts.values()) == parameters(config.arch)
    if config.model == "gpt_2026":
        counted = sum(count for name, count in counts.items() if name.startswith(("transformer.h", "lm_head")))
        assert counted == scaling_parameters(config.arch)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("d5", "the rule of 2025 has no depth 5: 320 channels do not divide into 3 heads; use 4 or 6, or d5-2026"),
        ("d100", "d100 has depth 100; use 2 to 64, such as d12, d12-2026 or chat-d4"),
        ("tiny-r8", "unknown preset 'tiny-r8'; use one of sudoku-extreme,"),
    ],
)
def test_mistakes_with_a_depth_are_one_line(name, said, capsys):
    assert trm(["train", name]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "same"),
    [
        (["--depth", "4", "--steps", "3"], ["d4", "--steps", "3"]),
        (["d20-2026-r8", "--depth=6"], ["d6-2026-r8"]),
        (["chat-d4", "--depth", "3"], ["chat-d3"]),
    ],
)
def test_the_depth_is_an_option(words, same):
    runs = [parse_run(each, prog="trm train", description="") for each in (words, same)]
    assert runs[0] == runs[1]
    assert split_arguments(words, Prove, prog="trm prove") == split_arguments(same, Prove, prog="trm prove")


DEPTHS = "d4 to d32, d4-2026 to d32-2026, chat-d2 to chat-d8"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "--depth", "deep"], f"--depth deep is not a number of layers; presets by depth are {DEPTHS}"),
        (
            ["train", "chat-tiny", "--depth", "4"],
            f"--depth 4 is no option of chat-tiny; omit it, or use a preset by depth: {DEPTHS}",
        ),
        (["prove", "--depth", "65"], "d65 has depth 65; use 2 to 64, such as d12, d12-2026 or chat-d4"),
        (["compile-pod", "--depth", "5"], "the rule of 2025 has no depth 5"),
        (["serve", "--depth", "4"], "--depth 4: runs/d4 does not exist; train it with `trm train --depth 4`"),
    ],
)
def test_a_wrong_depth_names_the_presets(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert trm(words) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_a_name_may_have_the_tokens_per_parameter():
    assert preset("d4-2026-r0.5").steps == 22
    assert (preset("d24-2026-r8").steps, preset("d24-2026-r8").run_dir) == (5568, "runs/d24-2026-r8")


@pytest.mark.parametrize("name", ["d20", "chat-tiny-2026"])
def test_every_parameter_has_the_published_group(name):
    config = preset(name).optim
    params = modules_parameters(preset(name))
    labels = group_labels(params, config)
    assert "default" not in labels.values()
    groups = {name: config.groups[int(label.split()[1])] for name, label in labels.items()}
    matrices = {n: SimpleNamespace(ndim=p.ndim) for n, p in params.items() if n.startswith("transformer.h.")}
    assert set(muon_labels(matrices).values()) == {"muon"}
    assert {n for n, group in groups.items() if (group.optimizer or "").startswith("muon")} == set(matrices)


def test_a_preset_comes_back_from_json():
    for name, config in PRESETS.items():
        assert from_json(to_json(config)) == config == preset(name)
