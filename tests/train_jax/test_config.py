"""The configuration of a run for every architecture: `--model`, JSON and back, sizes from the data."""

import dataclasses
import json

import pytest

from benchmarks.example_puzzles import ExamplePuzzles, example_run
from models_torch.outside import OutsideConfig
from models_torch.registry import ARCHITECTURES, config_class
from train_jax.errors import UserError
from train_jax.run.config import RunConfig, from_json, to_json, with_model
from train_jax.run.model import sized
from train_jax.run.presets import preset
from train_jax.run.resume import open_run
from train_jax.stages.train import cli

OUTSIDE = "support.outside_models:Thinker"
PLAIN = "support.outside_models:CellNet"


@pytest.fixture
def parsed_run(monkeypatch):
    """The configuration that `trm train …` would train."""
    configs: list[RunConfig] = []
    monkeypatch.setattr("train_jax.stages.train.main", configs.append)

    def parse(*argv: str) -> RunConfig:
        cli(list(argv))
        return configs[-1]

    return parse


@pytest.mark.parametrize("name", [*ARCHITECTURES, OUTSIDE])
def test_every_architecture_round_trips_through_json_and_takes_the_sizes_of_the_data(name, parsed_run):
    options = ["--arch.options", '{"width": 8, "deep": {"a": [1, null]}}'] if ":" in name else []
    config = parsed_run("tiny", "--model", name, "--arch.halt-max-steps", "3", *options)
    assert type(config.arch) is config_class(name) and config.arch.halt_max_steps == 3
    again = from_json(to_json(config))
    assert again == config and type(again.arch) is type(config.arch)
    sizes = dataclasses.replace(config.arch, seq_len=36, vocab_size=8, num_puzzle_identifiers=5)
    arch = sized(config.arch, ExamplePuzzles(example_run(name, sizes)), 7)
    assert (arch.batch_size, arch.seq_len, arch.vocab_size, arch.num_puzzle_identifiers) == (7, 36, 8, 5)
    assert dataclasses.replace(arch, batch_size=1, seq_len=1, vocab_size=2, num_puzzle_identifiers=1) == config.arch


def test_fields_that_a_preset_sets_are_carried_over_and_the_rest_are_the_architectures_own(parsed_run):
    config = parsed_run("sudoku6", "--model=hrm", "--arch.H-layers", "2")
    arch, before = dataclasses.asdict(config.arch), dataclasses.asdict(preset("sudoku6").arch)
    for name in ("hidden_size", "mlp_t", "L_layers", "H_cycles", "puzzle_emb_len", "loss_type", "forward_dtype"):
        assert arch[name] == before[name], name
    # Fields that the preset does not set have HRM's published values, not TRM's.
    assert arch["no_ACT_continue"] is False and before["no_ACT_continue"] is True
    assert arch["H_layers"] == 2 and arch["num_heads"] == 8
    assert config.optim == preset("sudoku6").optim and config.model == "hrm"
    assert with_model(preset("sudoku-extreme"), "transformer").arch.num_heads == 12


def test_the_presets_own_model_changes_nothing(parsed_run):
    assert parsed_run("tiny") == parsed_run("tiny", "--model", "trm") == preset("tiny")


def test_an_outside_module_keeps_the_fields_that_every_model_has(parsed_run):
    config = parsed_run("tiny", "--model", OUTSIDE, "--arch.options", '{"width": 4}')
    assert config.arch == OutsideConfig(halt_max_steps=4, forward_dtype="float32", options={"width": 4})
    plain = parsed_run("tiny", "--model", PLAIN)
    assert isinstance(plain.arch, OutsideConfig) and plain.arch.halt_max_steps == 1


def test_the_configuration_must_be_that_of_the_model():
    with pytest.raises(UserError, match="model hrm needs HRMConfig, found TRMConfig"):
        dataclasses.replace(preset("tiny"), model="hrm")


def test_another_model_or_fewer_options_make_another_run(tmp_path, parsed_run):
    options = "--arch.options", '{"width": 4, "more": 1}'
    config = parsed_run("tiny", "--model", OUTSIDE, *options, "--run-dir", str(tmp_path))
    open_run(config)
    open_run(config)
    fewer = dataclasses.replace(config, arch=dataclasses.replace(config.arch, options={"width": 4}))
    with pytest.raises(UserError, match=r"\(arch.options.more 1 there, None requested\)"):
        open_run(fewer)
    with pytest.raises(UserError, match=r"\(model support.outside_models:Thinker there, hrm requested\)"):
        open_run(with_model(config, "hrm"))
    assert json.loads((tmp_path / "config.json").read_text())["arch"]["options"] == {"width": 4, "more": 1}


def test_the_defaults_of_a_run():
    """Scripts of users depend on them; those of the architecture and the optimizer are tested with the presets."""
    given = {"data_dir": "", "run_dir": "", "arch": preset("tiny").arch, "task_config": preset("tiny").task_config}
    config = RunConfig(**given)
    parts = {*given, "optim", "compute"}
    assert {name: value for name, value in vars(config).items() if name not in parts} == {
        "resume": "auto", "task": "puzzles", "model": "trm", "platform": "auto", "init_from": "", "init_only": "",
        "init_optimizer": False,
        "epochs": 50_000, "steps": 0, "global_batch_size": 6144, "eval_every_steps": 1000, "eval_batch_size": 6144,
        "eval_examples": 0, "checkpoint_every_steps": 1000, "checkpoint_every_minutes": 0, "keep_checkpoints": 2,
        "keep_every_steps": 0, "keep_best": "", "log_every_steps": 50, "seed": 0, "profile": 0, "profile_skip": 10,
        "profile_server": 0,
        "debug_nans": False, "deterministic": False, "wandb": "auto", "wandb_project": "trm", "wandb_group": "",
        "wandb_name": "",
    }  # fmt: skip
    assert vars(config.compute) == {
        "runner": "pmap", "cpu_devices": 0, "cpu_examples": 0, "accumulation_steps": 1, "steps_per_dispatch": 1,
        "reduction": "flat", "shard_optimizer": False, "remat": "", "attention": "plain", "mlp": "plain",
        "choices": "", "batches_ahead": 2, "compile_cache": True, "load": "",
    }  # fmt: skip
