"""A task whose batches depend on the model, with two evaluations at cadences of their own: nothing else changes."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from support.toy_language import ToyConfig, ToyLanguage, write_tokens

import train_jax
from models_torch.outside import OutsideConfig
from train_jax.errors import UserError
from train_jax.loop import train
from train_jax.optim.config import OptimConfig
from train_jax.run.checkpoint import Checkpoints
from train_jax.run.config import ComputeConfig, RunConfig
from train_jax.run.folder import RunFolder
from train_jax.run.presets import preset
from train_jax.run.tracking import read_metrics
from train_jax.task import Evaluation, Periodic

STEPS = 17
CALLS = []


class Rollouts(ToyLanguage):
    """The weight of each token is drawn with a share that depends on the model."""

    needs_state = True
    evaluated = ("loss", "share/mean")

    def batch(self, step, shard, state=None):
        CALLS.append(step)
        share = self.share(state)
        batch = super().batch(step, shard)
        rng = np.random.Generator(np.random.Philox(key=[self.config.seed + 1, step]))
        return batch | {"weights": (rng.random(batch["weights"].shape) < share).astype(np.float32)}

    def share(self, state):
        head = np.asarray(jax.device_get(state.params["model.head.weight"]))
        assert head.shape == (11, 16)
        return 0.5 + 0.5 * np.tanh(np.abs(head).mean())

    def evaluations(self, objective, devices):
        def shares(state, *, limit=0, metrics_only=False):
            return Evaluation({"mean": float(self.share(state)), "count": 1.0})

        return [Periodic(self.evaluator(objective, devices), 3), Periodic(shares, 7, name="share")]


@pytest.fixture
def config(tmp_path):
    write_tokens(tmp_path)
    return RunConfig(
        data_dir=str(tmp_path), run_dir=str(tmp_path / "run"), task=f"{__name__}:Rollouts", task_config=ToyConfig(),
        model="support.toy_language:TokenModel", arch=OutsideConfig(forward_dtype="float32"),
        optim=OptimConfig(warmup_steps=0), steps=STEPS, global_batch_size=8, eval_batch_size=8, wandb="disabled",
        checkpoint_every_steps=5, keep_checkpoints=9, log_every_steps=2,
    )  # fmt: skip


def state_of(run_dir, step):
    checkpoints = Checkpoints(RunFolder(run_dir), writes=False)
    arrays = checkpoints._manager.restore(step)
    checkpoints.close()
    return {item: arrays[item] for item in ("model", "optimizer")}


def test_it_trains_and_reports_both_and_continues_bit_for_bit(config, tmp_path, capsys):
    CALLS.clear()
    figures = train(config)
    assert list(range(STEPS)) == CALLS, "each batch once, also the first one"
    folder = RunFolder(tmp_path / "run")
    for name, steps in (("eval/loss", [3, 6, 9, 12, 15, STEPS]), ("eval/share/mean", [7, 14, STEPS])):
        assert [record["step"] for record in read_metrics(folder) if name in record] == steps
    assert {"loss", "share/mean"} <= figures.keys() and "share: mean" in capsys.readouterr().out
    assert json.loads(folder.evaluation("share").read_text())["count"] == 1

    again = dataclasses.replace(config, run_dir=str(tmp_path / "again"), steps=10)
    train(again)
    CALLS.clear()
    train(dataclasses.replace(again, steps=STEPS))
    assert list(range(10, STEPS)) == CALLS
    one, other = state_of(tmp_path / "run", STEPS), state_of(tmp_path / "again", STEPS)
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_a_run_from_python(config):
    figures = train_jax.train(config)
    run = train_jax.load_run(config.run_dir)
    tokens = np.load(f"{config.data_dir}/test.npy")
    loss, weight = run.apply(tokens, np.ones(tokens[:, 1:].shape, np.float32))
    assert float(loss / weight) == pytest.approx(figures["loss"], rel=1e-5) and run.step == STEPS
    assert train_jax.preset("tiny") == preset("tiny") and train_jax.train(config)["loss"] == figures["loss"]


def test_impossible_dispatches_are_refused_before_a_folder_is_made(config, tmp_path):
    fields = {"compute": ComputeConfig(steps_per_dispatch=5), "eval_every_steps": 0, "log_every_steps": 5}
    several = dataclasses.replace(config, **fields)
    with pytest.raises(UserError, match=r"depend on the model after every step, and compute\.steps_per_dispatch is 5"):
        train(several)
    several = dataclasses.replace(several, task=f"{__name__}:Known")
    with pytest.raises(UserError, match="evaluation share every 7 steps does not end with a dispatch of 5"):
        train(several)
    assert not (tmp_path / "run").exists()


class Known(Rollouts):
    """Batches that do not depend on the model."""

    needs_state = False

    def batch(self, step, shard, state=None):
        return ToyLanguage.batch(self, step, shard)

    def evaluations(self, objective, devices):
        return [Periodic(each.evaluator, 7, name="share") for each in super().evaluations(objective, devices)[1:]]
