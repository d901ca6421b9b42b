"""Presets with nanochat's sizes: parameters, steps, parameter groups; training and generation when small."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from models_torch import registry
from train_jax.__main__ import main as trm
from train_jax.optim.chain import group_labels
from train_jax.optim.muon import muon_labels
from train_jax.run.config import from_json, to_json
from train_jax.run.presets import preset
from train_jax.tasks.language.presets import PRESETS, scaling_parameters
from train_jax.tasks.language.task import UnbuiltText
from train_jax.tasks.language.text_building import TextData

PUBLISHED = {"d20": (560_988_160, 21_400), "d32": (1_879_048_192, 71_680), "d24-2026": (1_384_122_122, 5_568)}
"""Parameters and steps."""


def parameters(name):
    with torch.device("meta"):
        module = registry.build_model(PRESETS[name].model, PRESETS[name].arch)
    return dict(module.named_parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_and_steps(name):
    count = sum(p.numel() for p in parameters(name).values())
    assert (count, PRESETS[name].steps) == PUBLISHED[name]
    if name == "d24-2026":
        blocks = [p.numel() for n, p in parameters(name).items() if n.startswith(("transformer.h", "lm_head"))]
        assert sum(blocks) == scaling_parameters(PRESETS[name].arch)


@pytest.mark.parametrize("name", ["d20", "chat-tiny-2026"])
def test_every_parameter_has_the_published_group(name):
    config, params = PRESETS[name].optim, parameters(name)
    labels = group_labels(params, config)
    assert "default" not in labels.values()
    groups = {name: config.groups[int(label.split()[1])] for name, label in labels.items()}
    matrices = {n: SimpleNamespace(ndim=p.ndim) for n, p in params.items() if n.startswith("transformer.h.")}
    assert set(muon_labels(matrices).values()) == {"muon"}
    assert {n for n, group in groups.items() if (group.optimizer or "").startswith("muon")} == set(matrices)


def test_rates_of_d24():
    """By hand: twice the tokens of the reference step, 1536 channels, 8 tokens per parameter."""
    rates = {group.pattern: (group.lr, group.weight_decay) for group in PRESETS["d24-2026"].optim.groups}
    assert rates[r"lm_head\..*"] == (pytest.approx(0.008), 0.01)
    assert rates[r"value_embeds\..*"] == (pytest.approx(0.15), 0.01)
    assert rates["resid_lambdas"] == (pytest.approx(0.005 * 2**0.5), 0.05)
    assert rates[r"transformer\.h\..*"] == (pytest.approx(0.02 * 2**0.5), pytest.approx(0.05974, abs=1e-5))


def test_a_preset_comes_back_from_json():
    for name, config in PRESETS.items():
        assert from_json(to_json(config)) == config == preset(name)


def test_a_task_without_a_data_set_has_the_shapes_of_the_run():
    config = PRESETS["d24-2026"]
    batch = UnbuiltText(config).batch(0, (0, 4))
    assert batch["inputs"].shape == batch["targets"].shape == (128, 2048)
    assert UnbuiltText(config).sizes == {"vocab_size": 32768} and len(UnbuiltText(config).token_bytes) == 32768


@pytest.mark.slow
def test_training_and_generation(tmp_path, capsys):
    (tmp_path / "source").mkdir()
    for number in range(40):
        (tmp_path / "source" / f"{number}.txt").write_text(f"{number} + {number} = {2 * number}\n" * 20)
    options = {"vocab_size": 280, "test_share": 0.2, "output_dir": tmp_path / "set"}
    TextData(source=(str(tmp_path / "source"),), **options).build(lambda *_: None)
    sizes = ["--arch.seq-len", "24", "--arch.n-layer", "2", "--arch.n-embd", "48", "--global-batch-size", "4"]
    where = ["--data-dir", str(tmp_path / "set"), "--run-dir", str(tmp_path / "run"), "--wandb", "disabled"]
    lengths = ["--steps", "6", "--log-every-steps", "2", "--eval-every-steps", "6", "--eval-batch-size", "4"]
    assert trm(["train", "chat-tiny-2026", *where, *sizes, *lengths]) == 0
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [each["train/loss"] for each in metrics if "train/loss" in each]
    assert len(losses) == 3 and np.isfinite(losses).all() and losses[-1] < losses[0]
    capsys.readouterr()
    command = ["generate", str(tmp_path / "run"), "--prompt", "1 + 1 =", "--prompt", "", "--max-tokens", "9", "--json"]
    assert trm(command) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["prompt"] for record in records] == ["1 + 1 =", ""]
    assert all(re.fullmatch("stop|length", record["finish"]) for record in records)
