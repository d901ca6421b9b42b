"""A run's newest checkpoint, ready to use: the module it was trained as and what it has learned."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

import bridge
from train_jax.core.objective import Objective
from train_jax.core.state import Learner, new_learner
from train_jax.errors import UserError
from train_jax.optim.optimizer import dense_optimizer
from train_jax.run.checkpoint import Checkpoints
from train_jax.run.config import RunConfig
from train_jax.run.folder import RunFolder, read_run
from train_jax.run.model import build_objective
from train_jax.tasks.puzzles.format import Metadata, read_metadata


@dataclasses.dataclass(frozen=True)
class Restored:
    """A run as its newest checkpoint has it."""

    folder: RunFolder
    config: RunConfig
    data: Metadata
    """Of the training set."""
    objective: Objective
    learner: Learner
    step: int

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The averaged weights under their PyTorch names, everything a strict load wants."""
        fn = self.objective.fn
        return bridge.state_dict(fn, fn.params | self.learner.ema, fn.buffers | self.learner.buffers)

    def with_weights(self, state: Mapping[str, torch.Tensor]) -> Restored:
        """The same run with other weights, in PyTorch names. Raises `UserError` for those of another model."""
        try:
            params, buffers = bridge.into(self.objective.fn, state)
        except bridge.BridgeError as error:
            raise UserError(str(error)) from error
        params = {name: params[name] for name in self.learner.params}
        buffers = {name: buffers[name] for name in self.learner.buffers}
        return dataclasses.replace(self, learner=self.learner._replace(params=params, ema=params, buffers=buffers))

    def in_float32(self) -> Restored:
        """The same run computing in float32 whatever it was trained in."""
        config = dataclasses.replace(self.config, arch=dataclasses.replace(self.config.arch, forward_dtype="float32"))
        objective = build_objective(config, self.data, 1)
        buffers = {name: array.astype(objective.buffers[name].dtype) for name, array in self.learner.buffers.items()}
        return dataclasses.replace(
            self, config=config, objective=objective, learner=self.learner._replace(buffers=buffers)
        )


def restore(run_dir: str, *, batch_size: int = 1) -> Restored:
    """`batch_size`: examples on one device in a training batch; of no consequence for evaluation.

    Raises `UserError` where there is no run, no checkpoint yet, or one of another model.
    """
    folder, config = read_run(run_dir)
    if not folder.data.is_file():
        raise UserError(f"{folder.data} is missing; `trm train` writes it when the run starts")
    data = read_metadata(folder.data)
    objective = build_objective(config, data, batch_size)
    like = new_learner(objective.params, objective.buffers, dense_optimizer(config.optim, 1))
    checkpoints = Checkpoints(folder)
    step = checkpoints.latest_step()
    if step is None:
        raise UserError(f"{run_dir} has no checkpoint yet; train it with `trm train`")
    learner = checkpoints.restore_learner(step, like)
    checkpoints.close()
    return Restored(folder, config, data, objective, learner, step)
