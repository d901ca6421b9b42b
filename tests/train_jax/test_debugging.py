"""`--debug-nans` names the operation and the PyTorch submodule; settings that do not go together are refused."""

import contextlib
import dataclasses

import numpy as np
import pytest
from support.toy_language import ToyConfig

from models_torch.outside import OutsideConfig
from train_jax.errors import UserError
from train_jax.hooks import check_debugging
from train_jax.loop import train
from train_jax.optim.config import OptimConfig
from train_jax.run.config import ComputeConfig, RunConfig


@pytest.fixture
def config(tmp_path):
    rng = np.random.default_rng(0)
    for split in ("train", "test"):
        np.save(tmp_path / f"{split}.npy", rng.integers(11, size=(16, 5)).astype(np.int32))
    return RunConfig(
        data_dir=str(tmp_path),
        run_dir=str(tmp_path / "run"),
        task="support.toy_language:ToyLanguage",
        task_config=ToyConfig(),
        model="support.toy_language:UnstableModel",
        arch=OutsideConfig(forward_dtype="float32"),
        optim=OptimConfig(warmup_steps=0, max_skipped_steps=1),
        steps=2,
        global_batch_size=8,
        eval_batch_size=8,
        wandb="disabled",
    )


def test_the_submodule_is_named(config):
    with pytest.raises(UserError) as caught:
        train(dataclasses.replace(config, debug_nans=True))
    message = str(caught.value)
    assert message.startswith("step 1 is not finite: ") and "nan" in message
    assert "in the forward pass, in model.log (Logarithm), at " in message and "toy_language.py:" in message


def test_without_it_the_run_stops_after_too_many_skipped_steps(config):
    with pytest.raises(UserError, match="2 consecutive steps up to step 2 had a loss or gradient that is not finite"):
        train(config)


@pytest.mark.parametrize(
    ("backend", "flags", "fields", "message"),
    [
        ("gpu", None, {"deterministic": True}, "run again with XLA_FLAGS=--xla_gpu_deterministic_ops=true"),
        ("gpu", "--xla_other", {"deterministic": True}, "deterministic needs an XLA flag"),
        ("gpu", "--xla_other --xla_gpu_deterministic_ops=true", {"deterministic": True}, ""),
        ("gpu", None, {}, ""),
        ("cpu", None, {"deterministic": True}, ""),
        ("cpu", None, {"debug_nans": True, "compute": ComputeConfig(cpu_examples=2)}, ""),
        ("cpu", None, {"debug_nans": True, "compute": ComputeConfig(accumulation_steps=2)}, "accumulation_steps is 2"),
        ("cpu", None, {"compute": ComputeConfig(steps_per_dispatch=2, accumulation_steps=2)}, ""),
        ("cpu", None, {"debug_nans": True, "compute": ComputeConfig(steps_per_dispatch=4)}, "steps_per_dispatch is 4"),
    ],
)
def test_debugging_needs_flags_and_single_steps(config, monkeypatch, backend, flags, fields, message):
    monkeypatch.setattr("jax.default_backend", lambda: backend)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    if flags is not None:
        monkeypatch.setenv("XLA_FLAGS", flags)
    every = {"eval_every_steps": 4, "checkpoint_every_steps": 4, "log_every_steps": 4}
    config = dataclasses.replace(config, **every | fields)
    with pytest.raises(UserError, match=message) if message else contextlib.nullcontext():
        check_debugging(config)
