"""The language task: loss and figures by hand, checks, whole runs: continued, on eight devices, beside PyTorch."""

import dataclasses
import json
import math
import string

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from support.presets import with_fields
from support.scripts import run_script
from support.text_sets import sums, text_set

from models_torch.gpt import GPT
from models_torch.outside_language import OutsideLanguageConfig
from tests.references.torch_language import Rates, train
from train_jax.errors import UserError
from train_jax.language.task import LanguageTask, figures_of, token_sums
from train_jax.run.config import from_json, to_json, with_model
from train_jax.run.presets import preset
from train_jax.run.restore import restore
from train_jax.runtime.devices import Devices
from train_jax.trainer.start import start

RUNS = {"whole 1": (1,), "continued 1": (1, 10), "whole 8": (8,), "continued 8": (8, 10)}


@pytest.fixture(scope="module")
def data_dir(made_once):
    return made_once("sums", lambda folder: text_set(folder, sums(80, 20))) / "set"


def tiny(data_dir, **fields):
    sizes = {"seq_len": 24, "n_layer": 2, "n_head": 2, "n_kv_head": 1, "n_embd": 32, "global_batch_size": 16}
    return with_fields(dataclasses.replace(preset("chat-tiny"), data_dir=str(data_dir)), sizes | fields)


# ---- loss and figures


def test_sums_leave_out_ignored_targets_and_special_tokens():
    """Tokens 0 and 1 have 1 and 3 bytes, token 2 is special."""
    targets = jnp.array([[0, 1, -1], [2, 1, 0]])
    losses = jnp.array([1.0, 2.0, 100.0, 10.0, 4.0, 8.0])
    sums = token_sums(losses, targets, np.array([1, 3, 0], np.int32))
    assert {name: float(value) for name, value in sums.items()} == {"loss": 25, "tokens": 5, "nats": 15, "bytes": 8}
    figures = figures_of(sums)
    assert figures == {"loss": 5, "bits_per_byte": pytest.approx(15 / (8 * math.log(2))), "tokens": 5}


def test_a_model_that_knows_nothing_needs_log2_of_the_vocabulary(data_dir):
    """All logits are 0 at initialization."""
    task = LanguageTask(tiny(data_dir))
    training = start(tiny(data_dir), task, Devices(1))
    assert training.objective.params["transformer.wte.weight"].shape == (290, 32), "the vocabulary is that of the data"
    assert set(training.groups) == {"transformer", "lm_head"}
    evaluator = task.evaluator(training.objective, Devices(1))
    state = training.initial_state()
    evaluation = evaluator(state)
    assert "gzip -9" in evaluation.summary
    assert evaluation.metrics["loss"] == pytest.approx(math.log(290), rel=1e-5)
    test = task.data.splits["test"]
    assert evaluation.metrics["tokens"] == test.tokens - 1
    # All targets but <|bos|> have bytes, and the first document's <|bos|> is no target.
    expected = math.log2(290) * (test.tokens - test.documents) / test.bytes
    assert evaluation.metrics["bits_per_byte"] == pytest.approx(expected, rel=1e-5)
    assert evaluation.metrics["count"] == -(-(test.tokens - 1) // 24)


def test_a_model_of_the_user_has_the_losses_of_pytorch(data_dir):
    config = with_model(tiny(data_dir, groups=(), optimizer="adamw"), "support.outside_gpts:Outputs")
    assert config.arch == OutsideLanguageConfig(seq_len=24, vocab_size=1024, forward_dtype="float32")
    assert from_json(to_json(config)) == config
    training = start(config, None, Devices(1))
    batch = training.task.batch(0, (0, 1))
    call = training.objective.call(training.objective.params, training.objective.buffers, train=True)
    sums = training.task.loss(call, (), batch)
    inputs, targets = (torch.from_numpy(batch[name]) for name in ("inputs", "targets"))
    expected = training.objective.fn.module(inputs, targets, loss_reduction="sum")
    assert float(sums.loss) == pytest.approx(expected.item(), rel=1e-6)


def test_data_and_models_that_do_not_fit_are_one_line(data_dir):
    config = tiny(data_dir)
    with pytest.raises(UserError, match="nowhere is not a text data set; build one with `trm build-data text --source"):
        start(dataclasses.replace(config, data_dir="nowhere"), devices=Devices(1))


# ---- whole runs


@pytest.fixture(scope="module")
def trained(made_once, data_dir):
    """`trained("whole 8")`: the last state of that run, its lines of metrics, and its folder."""

    def train(folder):
        words = [(devices, folder / name, folder / f"{name}.npz", *stops) for name, (devices, *stops) in RUNS.items()]
        run_script("language_process", data_dir, *[word for run in words for word in ("--", *run)])

    folder = made_once("language", train)

    def result(name):
        records = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
        return dict(np.load(folder / f"{name}.npz")), records, folder / name

    return result


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 8])
def test_trains_evaluates_and_continues_bit_for_bit(trained, devices):
    (arrays, records, folder), (resumed, again, other) = trained(f"whole {devices}"), trained(f"continued {devices}")
    assert arrays.keys() == resumed.keys()
    for name, array in arrays.items():
        assert array.tobytes() == resumed[name].tobytes(), name
    for figure in ("train/loss", "train/bits_per_byte", "eval/bits_per_byte"):
        values = [record[figure] for record in records if figure in record]
        assert values == [record[figure] for record in again if figure in record] and values[-1] < values[0]
    samples = {path.name: path.read_bytes() for path in (folder / "samples").iterdir()}
    assert samples == {path.name: path.read_bytes() for path in (other / "samples").iterdir()}
    assert samples.keys() == {"10.json", "20.json"} and samples["10.json"] != samples["20.json"]
    assert samples["20.json"] == (folder / "evaluation" / "samples.json").read_bytes()


@pytest.mark.slow
def test_one_device_equals_eight(trained):
    (one, records, _), (eight, again, _) = trained("whole 1"), trained("whole 8")
    for name, array in one.items():
        if array.dtype.kind == "V":  # the rotary tables: NumPy does not know bfloat16
            assert array.tobytes() == eight[name].tobytes(), name
            continue
        path = 20 * 0.98 if "wte" in name else 1.0  # 20 steps of Adam at the learning rate of the embedding
        atol = 1e-5 * max(path, np.abs(array).max(initial=0))
        np.testing.assert_allclose(eight[name], array, rtol=0, atol=atol, err_msg=name)
    for figure in ("train/loss", "eval/loss"):
        losses, others = ([each[figure] for each in of if figure in each] for of in (records, again))
        np.testing.assert_allclose(others, losses, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_weights_have_published_names_and_give_the_loss_in_pytorch(trained):
    arrays, _, folder = trained("whole 1")
    run = restore(str(folder))
    module = GPT(dataclasses.replace(run.config.arch, **run.task.sizes))
    module.load_state_dict(run.state_dict(), strict=True)
    stream = run.task.test_stream
    total = 0.0
    count = 0
    tokens = torch.tensor(stream.take(0, len(stream)))
    for first in range(0, len(tokens) - 1, 24):
        row = tokens[first : first + 25][None]
        with torch.no_grad():
            total += module(row[:, :-1], row[:, 1:], loss_reduction="sum").item()
        count += row.shape[1] - 1
    assert total / count == pytest.approx(float(arrays["__loss"]), abs=1e-5)


STEPS = 100
WIDTH = (384 / 768) ** -0.5
"""The factor of the rates of embedding and head in the preset, whose model has 384 channels."""


@pytest.fixture(scope="module")
def alphabet_run(made_once):
    def make(folder):
        rng = np.random.default_rng(0)
        letters = np.array(list(string.ascii_letters))
        share = 1 / np.arange(1, len(letters) + 1)
        # Muon would orthogonalize the rounding errors of gradients of lower rank.
        text_set(folder, ("".join(rng.choice(letters, size=2000, p=share / share.sum())) for _ in range(80)))

    sizes = {"seq_len": 48, "n_layer": 2, "n_head": 2, "n_kv_head": 1, "n_embd": 32, "global_batch_size": 16}
    data_dir = str(made_once("language_trajectory", make) / "set")
    run = dataclasses.replace(preset("chat-small"), data_dir=data_dir, steps=STEPS)
    run = dataclasses.replace(run, optim=dataclasses.replace(run.optim, decay_share=0.2))
    return with_fields(run, sizes | {"eval_batch_size": 16})


def losses_in_jax(training):
    devices = training.devices
    program = training.parallel_step()
    state = training.initial_state()
    batches = training.batches
    carry = training.initial_carry(state, batches.at(0, state))
    state = devices.replicate(state)
    key = devices.random_key(0)
    losses = []
    for step in range(STEPS):
        state, carry, metrics = program(state, carry, devices.shard(batches.from_step(step)), key)
        sums = devices.to_host(metrics)
        losses.append(float(np.sum(sums["loss"])) / float(np.sum(sums["tokens"])))
    return np.array(losses)


@pytest.mark.slow
def test_a_hundred_steps_beside_plain_pytorch(alphabet_run):
    training = start(alphabet_run, devices=Devices(1))
    rates = Rates(blocks=0.02, wte=0.2 * WIDTH, lm_head=0.004 * WIDTH)
    ours, (_, theirs) = losses_in_jax(training), train(training, rates, STEPS)
    assert theirs[0] > 5.6 and theirs[-1] < 4.5, "it learns"
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
