"""Reinforcement learning: gradients are PyTorch's on the same answers, and a run continues bit for bit."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from support.markers import slow_unless
from support.presets import with_fields
from support.processes import run_processes
from support.scripts import run_script, script
from support.small_gpt import small_gpt
from support.untrained_run import write_run_of

from models_torch.gpt import IGNORED_TARGET
from train_jax.core.state import new_state
from train_jax.errors import UserError
from train_jax.loop import train
from train_jax.run.checkpoint import Checkpoints
from train_jax.run.config import with_task
from train_jax.run.folder import RunFolder
from train_jax.run.presets import preset
from train_jax.start import start
from train_jax.tasks.language.chat.rollouts import token_loss
from train_jax.tasks.language.text_building import write_documents
from train_jax.tasks.language.tokenizer import Tokenizer

SIZES = {
    "seq_len": 48, "n_layer": 2, "n_head": 2, "n_kv_head": 1, "n_embd": 32, "global_batch_size": 16, "samples": 8,
    "eval_batch_size": 2, "max_tokens": 8, "problems": "arithmetic,digits=1", "problems_limit": 4, "pass_samples": 4,
    "problems_samples": 2, "problems_every_steps": 2, "eval_every_steps": 0, "log_every_steps": 1, "wandb": "disabled",
}  # fmt: skip
TOKENIZER = Tokenizer({bytes([number]): number for number in range(256)})


@pytest.fixture(scope="module")
def config(made_once):
    def make(folder):
        documents = [(np.array([TOKENIZER.bos, *b"1 + 1 = 2"]), np.ones(10, np.uint8))] * 100
        write_documents(folder / "set", TOKENIZER, {}, {"train": documents, "test": documents})

    folder = made_once("reinforcement", make)
    base = dataclasses.replace(with_task(preset("chat-tiny"), "rollouts"), data_dir=str(folder / "set"))
    return with_fields(base, SIZES)


@pytest.fixture(scope="module")
def training(config):
    """The assembled run; its task compiles the engine once for all tests."""
    return start(config)


def rewarded(task, monkeypatch):
    """Rewards that differ, since an untrained model is never right."""
    monkeypatch.setattr(type(task.problems), "is_right", lambda self, index, text: len(text) % 2 == 0)


@pytest.mark.parametrize("normalization", slow_unless("published".__eq__, ["global", "published"]))
def test_the_gradient_is_pytorch_s_on_the_same_answers(training, monkeypatch, normalization):
    """The reference is the published loop, with a pass for each question, or one mean over all tokens."""
    task, objective = training.task, training.objective
    options = {"normalization": normalization, "train_end": normalization == "global"}
    monkeypatch.setattr(task, "fields", dataclasses.replace(task.fields, **options))
    rewarded(task, monkeypatch)
    module = small_gpt(**{name: SIZES[name] for name in ("seq_len", "n_layer", "n_head", "n_kv_head", "n_embd")},
                       vocab_size=TOKENIZER.vocab_size)  # fmt: skip
    params = {name: jnp.asarray(value.detach().numpy()) for name, value in module.named_parameters()}
    state = new_state(params, objective.buffers, training.optimizer)
    batch = task.batch(3, (0, 1), state)
    assert len(set(batch["reward"])) == 2 and (batch["targets"] != IGNORED_TARGET).any(axis=1).all()

    def loss(params):
        sums = task.loss(objective.call(params, objective.buffers, train=True), (), jax.tree.map(jnp.asarray, batch))
        return sums.loss / sums.weight, sums.metrics

    gradients, metrics = jax.jit(jax.grad(loss, has_aux=True))(params)
    assert float(metrics["log_prob_difference"].max()) <= 1e-5
    expected = torch_gradients(module, batch, normalization)
    for name, value in expected.items():
        np.testing.assert_allclose(gradients[name], value, atol=1e-5 * max(1e-2, np.abs(value).max()), rtol=1e-4)
    assert max(np.abs(value).max() for value in expected.values()) > 1e-3


def torch_gradients(module, batch, normalization):
    inputs, targets = (torch.tensor(batch[name]) for name in ("inputs", "targets"))
    rewards = torch.tensor(batch["reward"]).reshape(-1, 8)
    advantages = (rewards - rewards.mean(dim=1, keepdim=True)).flatten()
    size = 4 if normalization == "published" else 16
    passes = [slice(first, first + size) for first in range(0, 16, size)]
    for part in passes:
        losses = module(inputs[part], targets[part], loss_reduction="none").view(size, -1)
        counted = (targets[part] != IGNORED_TARGET).sum().clamp(min=1)
        ((losses * advantages[part, None]).sum() / (counted * len(passes))).backward()
    return {name: value.grad.numpy() for name, value in module.named_parameters()}


def test_the_sampled_tokens_of_an_answer_are_trained(training):
    """Sampled tokens are trained, with the end if there is one; outputs of tools and the question are not."""
    task, state = training.task, training.initial_state()
    batch = task.batch(0, (0, 1), state)
    halves = [task.batch(0, (number, 2), state) for number in (0, 1)]
    for name, values in batch.items():
        np.testing.assert_array_equal(values, np.concatenate([half[name] for half in halves]))
    trained = batch["targets"] != IGNORED_TARGET
    following = np.roll(batch["inputs"], -1, axis=1)
    for row in np.arange(16):  # the last token of an answer is no input
        np.testing.assert_array_equal(batch["targets"][row][trained[row]][:-1], following[row][trained[row]][:-1])
    assert not (batch["weights"] != 0).any() and not batch["reward"].any(), "every answer is wrong, none is better"
    assert set(trained.sum(axis=1)) <= set(range(1, 9))


def test_clipping_has_the_same_gradient_where_the_weights_sampled():
    losses, advantages = jnp.array([0.5, 2.0, 1.0]), jnp.array([1.0, -0.5, 2.0])

    def slope(clip, old):
        return jax.grad(lambda x: token_loss(x, old, advantages, clip).sum())(losses)

    np.testing.assert_allclose(slope(0.2, -losses), slope(0.0, -losses), rtol=1e-6)
    np.testing.assert_allclose(slope(0.2, -losses - 0.5), [0, -0.5 * np.exp(0.5), 0], rtol=1e-5)


@pytest.mark.slow
def test_a_run_continues_bit_for_bit_and_reports(config, tmp_path, monkeypatch, capsys):
    weights = dataclasses.replace(with_task(config, "language"), run_dir=str(tmp_path / "base"))
    write_run_of(weights, step=3)
    common = {"steps": 4, "checkpoint_every_steps": 1, "keep_checkpoints": 9, "init_from": str(tmp_path / "base")}
    whole = dataclasses.replace(with_fields(config, common), run_dir=str(tmp_path / "whole"))
    rewarded(start(whole).task, monkeypatch)
    train(whole)
    assert "problems: accuracy" in capsys.readouterr().out
    records = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    logged = [record for record in records if "train/reward" in record]
    assert len(logged) == 4 and all(record["train/log_prob_difference"] <= 1e-5 for record in logged)
    assert any(0 < record["train/reward"] < 1 for record in logged)
    asked = [record for record in records if "eval/problems/accuracy" in record]
    assert [record["step"] for record in asked] == [2, 4] and all(
        record["eval/problems/pass@2"] > record["eval/problems/accuracy"] == record["eval/problems/chat_core"] > 0
        for record in asked
    )
    part = dataclasses.replace(whole, run_dir=str(tmp_path / "part"), steps=2)
    train(part)
    train(dataclasses.replace(part, steps=4))
    for item in ("model", "optimizer"):
        jax.tree.map(np.testing.assert_array_equal, *(saved(tmp_path / name)[item] for name in ("whole", "part")))


@pytest.mark.slow
def test_a_step_is_the_same_on_eight_devices_and_two_processes_and_compiles_once(config, tmp_path):
    """The questions of the second step are longer than those of the first one."""
    run_script("rollouts_on_devices", config.data_dir, tmp_path, 8)
    statuses, texts = run_processes([script("rollouts_on_devices", config.data_dir, tmp_path, 4)] * 2)
    assert statuses == [0, 0], texts
    one, *others = (np.load(tmp_path / f"{name}.npz") for name in ("1", "8", "process 0", "process 1"))
    answers = [name for name in one if name.startswith("answers ")]
    gradients = [name for name in one if name.endswith(".weight")]
    largest = max(np.abs(one[name]).max() for name in gradients)
    assert len(answers) == 4 and len(gradients) == 8 and largest > 1e-3 and set(one["answers reward"]) == {0, 1}
    for other in others:
        for name in ("answers inputs", "answers targets", "answers reward"):
            np.testing.assert_array_equal(other[name], one[name])
        np.testing.assert_allclose(other["answers log_probs"], one["answers log_probs"], atol=1e-5)
        for name in gradients:
            np.testing.assert_allclose(other[name], one[name], rtol=0, atol=1e-5 * largest)
    assert all(each["difference"] <= 1e-5 and not len(each["compiled"]) for each in (one, *others))


def saved(run_dir):
    checkpoints = Checkpoints(RunFolder(run_dir), writes=False)
    arrays = checkpoints._manager.restore(4)
    checkpoints.close()
    return arrays


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"samples": 5}, "samples 5 does not divide global_batch_size 16; use a divisor of it"),
        ({"normalization": "published", "pass_samples": 3}, "pass_samples 3 does not divide samples 8"),
        ({"problems": "chess"}, "unknown task 'chess'"),
        ({"seq_len": 8}, "and arch.seq_len is 8; use a longer one"),
    ],
    ids=str,
)
def test_impossible_fields_are_refused_before_a_folder_is_made(config, tmp_path, fields, message):
    wrong = dataclasses.replace(with_fields(config, fields), run_dir=str(tmp_path / "run"))
    with pytest.raises(UserError, match=message):
        train(wrong)
    assert not (tmp_path / "run").exists()


def test_another_model_than_the_one_that_answered_is_noticed(training):
    sums = {"log_prob_difference": np.array([0.0, 1e-3]), "loss": 1.0, "divisor": 1.0, "reward": 0, "answer_tokens": 1}
    with pytest.raises(UserError, match=r"differs by 1.0e-03 between generation and training, the limit of float32"):
        training.task.figures(sums, 16)
