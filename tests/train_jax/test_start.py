"""The one place that makes a run: first weights from elsewhere."""

import dataclasses
import re
import shutil

import numpy as np
import pytest
import torch
from support.presets import with_fields
from support.untrained_run import write_run

import bridge
from train_jax.errors import UserError
from train_jax.research.table import RECURSION
from train_jax.run.presets import preset
from train_jax.run.restore import initial_weights, restore
from train_jax.runtime.devices import Devices
from train_jax.trainer.loop import train
from train_jax.trainer.start import part_count, part_size, start


@pytest.fixture
def config(data_dir, tmp_path):
    fields = {"data_dir": str(data_dir), "run_dir": str(tmp_path / "run"), "eval_batch_size": 8, "wandb": "disabled"}
    return with_fields(preset("tiny"), fields | {"H_cycles": 1, "L_cycles": 1, "halt_max_steps": 2})


@pytest.fixture(scope="module")
def source(tmp_path_factory, data_dir):
    """The folder of another run, whose raw weights are 0."""
    path = tmp_path_factory.mktemp("source") / "run"
    return write_run(path, data_dir, act_steps=2, step=3, zero_params=True, seed=5)


@pytest.fixture
def initial(config, tmp_path):
    """`initial(source, …)`: the state of a new run before and after it got the weights; a dict is saved as a file."""
    training = start(config, devices=Devices(1))
    new = training.initial_state()

    def state_of(source, *options):
        if isinstance(source, dict):
            bridge.save_weights(tmp_path / "weights.safetensors", source)
            source = str(tmp_path / "weights.safetensors")
        return new, initial_weights(new, training.objective, source, *options)

    return state_of


TABLE = "model.inner.puzzle_emb.weights"


def test_a_run_starts_with_the_averaged_weights_of_another(initial, source):
    new, state = initial(source)
    for name, array in restore(source).state.ema.items():
        np.testing.assert_array_equal(state.params[name], array)
        np.testing.assert_array_equal(state.ema[name], array)
    name = "model.inner.lm_head.weight"
    assert (np.asarray(new.params[name]) != np.asarray(state.params[name])).any()
    assert initial("")[1] is new


def test_a_table_of_another_size_starts_as_its_mean(initial, source):
    weights = restore(source).state_dict()
    said = []
    weights[TABLE] = torch.randn(9, weights[TABLE].shape[1])
    _, state = initial(weights, said.append)
    mean = weights[TABLE].double().mean(0).float().numpy()
    np.testing.assert_array_equal(state.buffers[TABLE], np.broadcast_to(mean, (6, len(mean))))
    assert len(said) == 1 and said[0].endswith(f"{TABLE} has 9 rows, here 6; every row starts as the mean of those")
    weights[TABLE] = torch.randn(6, len(mean) + 1)
    with pytest.raises(UserError, match=TABLE):
        initial(weights)


def test_only_the_named_weights_are_taken(initial, source):
    """The recursion may come from a model with another vocabulary, whose embeddings and heads would not fit."""
    weights = restore(source).state_dict()
    said = []
    weights["model.inner.lm_head.weight"] = torch.zeros(11, 32)
    new, state = initial(weights, said.append, RECURSION)
    taken = [name for name in state.params if ".L_level." in name]
    assert taken and len(said) == 1
    for name, array in state.params.items():
        expected = weights[name].numpy() if name in taken else np.asarray(new.params[name])
        np.testing.assert_array_equal(array, expected)
    with pytest.raises(UserError, match="init_only none matches no name"):
        initial(weights, said.append, "none")


def test_weights_of_another_model_are_refused_before_anything_is_written(config, source, tmp_path):
    with pytest.raises(UserError, match=r"lm_head|shape|embed"):
        train(with_fields(config, {"hidden_size": 64, "init_from": source}), Devices(1))
    with pytest.raises(UserError, match=r"init_from nowhere\.pt"):
        train(dataclasses.replace(config, init_from="nowhere.pt"), Devices(1))
    assert not (tmp_path / "run").exists()


@pytest.mark.campaign
def test_a_run_that_continues_or_is_finished_does_not_need_its_source(config, data_dir, tmp_path):
    source = write_run(tmp_path / "source", data_dir, act_steps=2, step=3)
    finished = tmp_path / "run" / "FINISHED"
    fields = {"init_from": source, "checkpoint_every_steps": 1, "eval_every_steps": 0, "log_every_steps": 1, "steps": 2}
    config = with_fields(config, fields)
    figures = train(config, Devices(1))
    shutil.rmtree(source)
    assert train(config, Devices(1)) == figures
    finished.unlink()
    assert train(config, Devices(1))["exact_accuracy"] == figures["exact_accuracy"]
    finished.unlink()
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(UserError, match="init_from"):
        train(config, Devices(1))


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({}, 1),
        ({"accumulation_steps": 2}, 2),
        ({"cpu_examples": 5}, 4),
        ({"cpu_examples": 4, "accumulation_steps": 8}, 8),
        ({"cpu_examples": 4, "debug_nans": True}, 1),
    ],
)
def test_parts_of_the_examples_of_a_cpu(config, monkeypatch, fields, count):
    changed = with_fields(config, fields)
    assert (part_count(changed, Devices(1)), part_size(changed, Devices(1))) == (count, 16 // count)
    monkeypatch.setattr(Devices, "platform", "tpu")
    assert part_count(changed, Devices(1)) == fields.get("accumulation_steps", 1)


@pytest.mark.parametrize(
    ("core_count", "processes", "fields", "devices"),
    [
        (2, 1, {}, 0),
        (2, 1, {"cpu_examples": 4}, 2),
        (3, 1, {"cpu_examples": 4, "global_batch_size": 48}, 2),  # 3 does not divide an evaluation batch of 8
        (64, 1, {"cpu_examples": 4}, 4),  # parts of 4 examples each
        (2, 2, {"cpu_examples": 4}, 0),  # hosts may have different numbers of cores
    ],
)
def test_virtual_devices_are_at_most_one_for_each_core(config, monkeypatch, core_count, processes, fields, devices):
    monkeypatch.setattr("train_jax.run.config.cores", lambda: core_count)
    assert with_fields(config, fields).virtual_devices(processes) == devices


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"accumulation_steps": 3}, "compute.accumulation_steps 3 does not divide the 16 examples"),
        ({"freeze": "nothing"}, "optim.freeze 'nothing' matches no parameter"),
        ({"keep_best": "exact_accuracy", "eval_every_steps": 0}, "keep_best exact_accuracy needs checkpoints at steps"),
    ],
)
def test_a_wrong_field_is_named_before_a_folder_is_made(config, fields, message, tmp_path):
    with pytest.raises(UserError, match=re.escape(message)):
        train(with_fields(config, fields), Devices(1))
    assert not (tmp_path / "run").exists()
