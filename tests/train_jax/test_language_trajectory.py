"""A hundred steps of base training beside a plain PyTorch loop: the same batches, the losses within 1e-5.

Rates are the published ones, which `chat-small` has, and so is the schedule.
"""

import dataclasses
import string

import numpy as np
import pytest
from support.presets import with_fields
from support.torch_language import Rates, train

from train_jax.run.presets import preset
from train_jax.runtime.devices import Devices
from train_jax.start import start
from train_jax.tasks.language.text_building import TextData

STEPS = 100
WIDTH = (384 / 768) ** -0.5
"""The factor of the rates of embedding and head in the preset, whose model has 384 channels."""


@pytest.fixture(scope="module")
def config(made_once):
    def make(folder):
        (folder / "source").mkdir()
        rng, letters = np.random.default_rng(0), np.array(list(string.ascii_letters))
        share = 1 / np.arange(1, len(letters) + 1)
        for number in range(80):  # Muon would orthogonalize the rounding errors of gradients of lower rank
            text = rng.choice(letters, size=2000, p=share / share.sum())
            (folder / "source" / f"{number}.txt").write_text("".join(text))
        options = {"vocab_size": 290, "test_share": 0.2, "output_dir": folder / "set"}
        TextData(source=(str(folder / "source"),), **options).build(lambda *_: None)

    sizes = {"seq_len": 48, "n_layer": 2, "n_head": 2, "n_kv_head": 1, "n_embd": 32, "global_batch_size": 16}
    data_dir = str(made_once("language_trajectory", make) / "set")
    run = preset("chat-small")
    run = dataclasses.replace(
        run, data_dir=data_dir, steps=STEPS, optim=dataclasses.replace(run.optim, decay_share=0.2)
    )
    return with_fields(run, sizes | {"eval_batch_size": 16})


def losses_in_jax(training):
    """Returns the losses of every step, with `pmap` on one device."""
    devices, program = training.devices, training.parallel_step()
    state, batches = training.initial_state(), training.batches
    carry = training.initial_carry(state, batches.at(0, state))
    state, key, losses = devices.replicate(state), devices.random_key(0), []
    for step in range(STEPS):
        state, carry, metrics = program(state, carry, devices.shard(batches.from_step(step)), key)
        sums = devices.to_host(metrics)
        losses.append(float(np.sum(sums["loss"])) / float(np.sum(sums["tokens"])))
    return np.array(losses)


@pytest.mark.slow
def test_a_hundred_steps_beside_plain_pytorch(config):
    training = start(config, devices=Devices(1))
    rates = Rates(blocks=0.02, wte=0.2 * WIDTH, lm_head=0.004 * WIDTH)
    ours, (_, theirs) = losses_in_jax(training), train(training, rates, STEPS)
    assert theirs[0] > 5.6 and theirs[-1] < 4.5, "it learns"
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
