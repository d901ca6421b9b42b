"""Instructions: the published layout and sampler, rows, the schedule of gradients, a hundred steps beside PyTorch."""

import dataclasses
import hashlib
import importlib
import json
import os
import sys
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import torch.nn.functional as F
from support.published_hrm_text import import_published
from support.scripted_model import BYTES
from support.torch_optimizers import AdamATan2

import bridge
from models_torch.gpt import IGNORED_TARGET
from models_torch.hrm_text import HRMText, HRMTextConfig
from train_jax.__main__ import main as trm
from train_jax.errors import UserError
from train_jax.optim.chain import dense_optimizer
from train_jax.run.presets import preset
from train_jax.tasks.language.instructions.data import InstructionSet, PackedSteps, assign, count_fitting, fits
from train_jax.tasks.language.instructions.presets import _optimizer
from train_jax.tasks.language.instructions.task import BackpropSchedule, InstructionTask, response_sums

VOCAB = 37


def write_set(folder, count, *, seed=0, epochs=2, longest=12, test=None):
    """Writes samples of random tokens in the published layout; with `test`, also held-out ones."""
    rng = np.random.default_rng(seed)
    asked, answered = rng.integers(1, longest, size=(2, count))
    starts = np.concatenate([[0], np.cumsum(asked + answered)[:-1]])
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "tokens.npy", rng.integers(VOCAB, size=int((asked + answered).sum()), dtype=np.int32))
    for epoch in range(epochs):
        order = rng.permutation(count)
        (folder / f"epoch_{epoch}").mkdir()
        columns = {"inst_start": starts, "inst_len": asked, "resp_start": starts + asked, "resp_len": answered}
        for name, column in columns.items():
            np.save(folder / f"epoch_{epoch}" / f"{name}.npy", column[order].astype(np.int64))
    metadata = {"tokenizer_info": {"vocab_size": VOCAB}, "vocab_size": None, "max_seq_len": 2 * longest}
    (folder / "metadata.json").write_text(json.dumps(metadata | {"total_length": int((asked + answered).sum())}))
    if test:
        write_set(folder / "test", test, seed=seed + 1, epochs=1, longest=longest)
    return folder


def assigned(count, rows, capacity, seed):
    lengths = np.random.default_rng(seed).geometric(0.02, size=40_000).clip(1, capacity)
    first, steps = 0, []
    for _ in range(count):
        fitting = count_fitting(lengths[first : first + rows * capacity], rows, capacity)
        steps.append([[first + n for n in row] for row in assign(lengths[first : first + fitting], rows)])
        first += fitting
    return lengths, steps


def test_a_step_has_as_many_samples_as_fit():
    assert fits(np.array([5, 5, 3, 3]), 2, 8) and not fits(np.array([5, 5, 3, 4]), 2, 8)
    assert assign(np.array([2, 5, 2, 4]), 2) == [[1, 0], [3, 2]]
    lengths, steps = assigned(20, 8, 1024, seed=0)
    loads = np.array([[lengths[row].sum() for row in step] for step in steps])
    assert loads.max() <= 1024 and loads.mean() > 0.97 * 1024
    taken = [number for step in steps for number in sorted(number for row in step for number in row)]
    assert taken == list(range(len(taken)))


def test_the_samples_of_a_step_are_the_same_as_when_they_were_compared_with_the_published_sampler():
    _, steps = assigned(20, 8, 1024, seed=0)
    assert hashlib.sha256(json.dumps(steps).encode()).hexdigest()[:16] == "a547a527705ddc1b"


def test_two_hundred_steps_are_those_of_the_published_sampler(monkeypatch):
    if "HRM_TEXT_DIR" not in os.environ:
        pytest.skip("set HRM_TEXT_DIR to a checkout of HRM-Text")
    compiler = ModuleType("numba")
    compiler.njit = lambda function: function  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "numba", compiler)
    monkeypatch.syspath_prepend(os.environ["HRM_TEXT_DIR"])
    monkeypatch.delitem(sys.modules, "multipack_sampler", raising=False)
    published = importlib.import_module("multipack_sampler")
    lengths, steps = assigned(200, 8, 1024, seed=0)
    for rank in range(8):
        sampler = published.MultipackDistributedBatchSampler(1024, lengths, num_replicas=8, rank=rank)
        for step, batch in zip(steps, sampler.iter(), strict=False):
            assert step[rank] == batch.tolist()


def test_rows_have_the_samples_with_their_positions_and_targets(tmp_path):
    data = InstructionSet(str(write_set(tmp_path, 60)))
    steps = PackedSteps(data, 4, 32)
    batch, samples = steps.batch(0, (0, 1)), data.epoch(0)
    seen = 0
    for row in range(4):
        for number in range(batch["samples"][row].max() + 1):
            own = batch["samples"][row] == number
            size, asked = own.sum(), (batch["instruction"][row] & own).sum()
            assert batch["positions"][row][own].tolist() == list(range(size))
            targets = batch["targets"][row][own]
            assert (targets[: asked - 1] == IGNORED_TARGET).all() and (targets[asked - 1 :] >= 0).all()
            assert batch["inputs"][row][own][asked:].tolist() == targets[asked - 1 : -1].tolist()
            seen += 1
        assert (batch["targets"][row][batch["samples"][row] < 0] == IGNORED_TARGET).all()
    assert seen == steps.at(0).count and data.vocab_size == 256
    halves = [steps.batch(0, (index, 2)) for index in (0, 1)]
    for name, array in batch.items():
        np.testing.assert_array_equal(array, np.concatenate([half[name] for half in halves]))
    everything = steps.batch(0, (0, 1), target_only=False)
    assert (everything["targets"] == IGNORED_TARGET).sum() == (batch["samples"] < 0).sum()
    several = [steps.at(n) for n in range(12)]
    assert several[0] == PackedSteps(data, 4, 32).at(0) and several[-1].epoch > 0
    for step in several:
        assert step.first + step.count < len(samples.lengths)


def test_every_held_out_sample_is_evaluated_once(tmp_path):
    data = InstructionSet(str(write_set(tmp_path, 33)))
    steps, done, number = PackedSteps(data, 4, 32, drop_last=False), 0, 0
    while (step := steps.at(number)).epoch == 0:
        done, number = done + int((steps.batch(number, (0, 1))["samples"].max(axis=1) + 1).sum()), number + 1
        assert step.first + step.count == done
    assert done == 33


def test_responses_are_exact_if_every_token_is():
    logits = jnp.asarray(np.eye(4, dtype=np.float32)[[0, 1, 2, 3, 0, 1]])[None]
    batch = {
        "targets": jnp.array([[IGNORED_TARGET, 1, 2, 3, 1, IGNORED_TARGET]]),
        "samples": jnp.array([[0, 0, 0, 1, 1, -1]]),
    }
    sums = {name: float(value) for name, value in response_sums(logits, batch).items()}
    assert (sums["tokens"], sums["correct"], sums["responses"], sums["exact"]) == (4, 3, 2, 1)


def test_the_number_of_updates_with_gradients_increases_as_published():
    schedule = BackpropSchedule(2, 5, 20.0)
    published = [2 + int(min(1.0, step / 20.0) * 3) for step in range(1, 41)]
    assert [schedule.at(step) for step in range(40)] == published
    assert [schedule.after(step) for step in (0, 6, 13, 30)] == [3, 4, 5, None]
    assert BackpropSchedule(2, 5, 0.0).at(0) == 5


def test_a_data_set_that_cannot_be_trained_on_is_refused(tmp_path):
    config = dataclasses.replace(preset("hrm-text-tiny"), data_dir=str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"metadata.json is missing\); build them with `trm build-data instructions"):
        InstructionTask(config)
    write_set(tmp_path / "set", 60)
    config = dataclasses.replace(config, data_dir=str(tmp_path / "set"))
    with pytest.raises(UserError, match="has no held-out samples in test"):
        _ = InstructionTask(config).held_out
    (tmp_path / "set/epoch_0/inst_len.npy").write_bytes(b"")
    with pytest.raises(UserError, match=r"inst_len.npy cannot be read"):
        InstructionSet(str(tmp_path / "set")).epoch(0)


def test_samples_of_a_file_are_built_into_the_published_layout(tmp_path, capsys):
    rows = [{"instruction": f"{n} + 1 =", "response": f"{n + 1}"} for n in range(40)]
    rows += [{"instruction": "empty", "response": ""}, {"instruction": "slow", "response": "1", "condition": "cot"}]
    (tmp_path / "sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    BYTES.save(tmp_path / "text")
    options = ["--source", str(tmp_path / "sums.jsonl"), "--test-share", "0.2", "--tokenizer", str(tmp_path / "text")]
    build = ["build-data", "instructions", *options, "--output-dir", str(tmp_path / "set")]
    assert trm(build) == 0 and "built in" in capsys.readouterr().out
    assert trm(build) == 0 and "already there" in capsys.readouterr().out
    train, test = InstructionSet(str(tmp_path / "set")), InstructionSet(str(tmp_path / "set/test"))
    assert train.epochs == 4 and len(train.epoch(0).inst_len) + len(test.epoch(0).inst_len) == 41
    assert sorted(train.epoch(0).inst_start) == sorted(train.epoch(3).inst_start)
    assert trm([*build, "--conditions", "direct=<|nothing|>"]) == 2
    assert "the token '<|nothing|>' of condition direct is not special" in capsys.readouterr().err


@pytest.mark.slow
def test_a_hundred_steps_are_those_of_pytorch_across_the_changes_of_gradients(tmp_path, monkeypatch):
    arch = HRMTextConfig(
        seq_len=32, vocab_size=256, n_layers=2, hidden_size=16, num_heads=2, mlp_multiple_of=16, forward_dtype="float64"
    )
    steps = PackedSteps(InstructionSet(str(write_set(tmp_path, 400))), 2, 32)
    optim, total = dataclasses.replace(_optimizer(3e-3, 10), ema_decay=0.99), 100
    schedule = BackpropSchedule(2, 5, 0.2 * total)
    torch.manual_seed(0)
    modules = {n: HRMText(dataclasses.replace(arch, bp_steps=n)).double() for n in (2, 3, 4, 5)}
    start = modules[5].state_dict()
    for module in modules.values():
        module.load_state_dict(start)
        for name, parameter in modules[5].named_parameters():
            owner, _, last = name.rpartition(".")
            setattr(module.get_submodule(owner), last, parameter)  # one set of weights
    parts = ("positions", "samples", "instruction")
    with jax.enable_x64(True):
        fns = {n: bridge.export(module) for n, module in modules.items()}
        params, buffers = fns[5].params, fns[5].buffers
        optimizer = dense_optimizer(optim, total)
        opt_state, gradients = optimizer.init(params), {}
        for n, fn in fns.items():

            def loss(params, batch, fn=fn):
                logits, _ = fn(params, buffers, batch["inputs"], **{k: batch[k] for k in parts}, train=True)
                counts = batch["targets"] != IGNORED_TARGET
                targets = jnp.where(counts, batch["targets"], 0)
                losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
                return jnp.where(counts, losses, 0).sum() / counts.sum()

            gradients[n] = jax.jit(jax.grad(loss))
        apply = jax.jit(optimizer.update)
        theirs = dict(modules[5].named_parameters())
        reference = AdamATan2(list(theirs.values()), optim)
        for number in range(total):
            batch, stage = steps.batch(number, (0, 1)), schedule.at(number)
            updates, opt_state = apply(gradients[stage](params, batch), opt_state, params)
            params = optax.apply_updates(params, updates)
            tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
            logits = modules[stage](tensors["inputs"], **{name: tensors[name] for name in parts})
            targets = tensors["targets"].flatten().long()
            value = F.cross_entropy(logits.flatten(0, 1), targets, ignore_index=IGNORED_TARGET)
            for parameter in theirs.values():
                parameter.grad = None
            value.backward()
            with torch.no_grad():
                reference.step(min(1.0, (number + 1) / 10) * optim.lr)
        largest = max(float(np.abs(params[name] - p.detach().numpy()).max()) for name, p in theirs.items())
    assert largest < 1e-9, largest
    if "HRM_TEXT_DIR" in os.environ:
        published = import_published(monkeypatch)("adam_atan2").AdamATan2
        weight = torch.randn(3, 4, dtype=torch.float64)
        one, two = (torch.nn.Parameter(weight.clone()) for _ in range(2))
        ours = AdamATan2([one], optim)
        other = published([two], lr=0.01, betas=(optim.beta1, optim.beta2), weight_decay=0.1, ema=0.99)
        for _ in range(20):
            one.grad = two.grad = torch.randn(3, 4, dtype=torch.float64)
            with torch.no_grad():
                ours.step(0.01)
            other.step()
        torch.testing.assert_close(one, two, rtol=0, atol=1e-6)  # its corrections are float32
