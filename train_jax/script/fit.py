"""`train_jax.fit`: trains a model from Python, as `trm train mine.py` trains that of a script."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import nn

from bridge.module.copying import independent
from train_jax.core.optim.config import OptimConfig
from train_jax.errors import UserError
from train_jax.plugin import use_scripts
from train_jax.run.config import RunConfig
from train_jax.run.folder import RunFolder
from train_jax.run.restore import Restored, restore
from train_jax.runtime.devices import devices_of
from train_jax.script.live import live, notebook
from train_jax.script.models import Models, as_given
from train_jax.script.optim_fields import beside_optimizer, check_beside_optimizer
from train_jax.script.presets import run_of
from train_jax.script.source import Script, use_script
from train_jax.storage.storage import path_of
from train_jax.trainer.loop import train


@dataclasses.dataclass(frozen=True)
class Fitted:
    """The result of `fit`."""

    metrics: dict[str, Any]
    """The metrics of the final evaluation on the test data, `train_seconds` and `train_steps`."""
    run: Restored
    """The run at its last checkpoint: `run.state_dict()` returns the weights under PyTorch's names."""


def fit(
    model: nn.Module | dict[str, nn.Module],
    train_data: Any,
    loss: Callable[[Any, Any], Any],
    *,
    steps: int,
    run_dir: str,
    test_data: Any = None,
    collate: Callable[[list], Any] | None = None,
    optimizer: Callable[[Any], Any] | None = None,
    schedule: Callable[[Any], Any] | None = None,
    preview: Callable[[Any, Any], Any] | None = None,
    verify: bool = True,
    **fields: Any,
) -> Fitted:
    """Trains a PyTorch module in JAX on all devices, or continues the run in `run_dir`; the module is not changed.

    A notebook shows a progress bar and the curves of the loss below the cell.

    `train_data`, `loss`, `test_data`, `collate`, `optimizer`, `schedule` and `preview` are those of a training script;
    the data are given as objects. `steps`: number of optimizer steps. `verify`: compare the first steps of a new run
    with PyTorch's. `fields` are fields of `RunConfig`, such as `global_batch_size=64`, or dataclasses of it, such as
    `optim=OptimConfig(...)`.

    Raises `UserError` for what cannot be trained, before a folder is made.
    """
    script = Script(
        name="fit",
        path="fit",
        model=lambda: _copied(model),
        train_data=lambda: train_data,
        loss=loss,
        test_data=None if test_data is None else lambda: test_data,
        collate=collate,
        optimizer=optimizer,
        schedule=schedule,
        preview=preview,
    )
    use_scripts()
    use_script(script)
    known = {field.name for field in dataclasses.fields(RunConfig)}
    if unknown := sorted(fields.keys() - known):
        raise UserError(f"{unknown[0]} is no field of a run; use one of {', '.join(sorted(known))}")
    config = dataclasses.replace(run_of("fit"), **{"wandb": "disabled", **fields, "run_dir": run_dir, "steps": steps})
    if optimizer is not None and "optim" in fields:
        check_beside_optimizer(config.optim, "optimizer", OptimConfig())
        config = dataclasses.replace(config, optim=beside_optimizer(config.optim))
    with live(RunFolder(path_of(run_dir)), steps, notebook()):
        metrics = train(config, devices_of(config.compute), verify=verify)
    return Fitted(metrics, restore(run_dir))


def _copied(model: Any) -> Any:
    """Returns a copy of one module or of several, which may share parameters."""
    if isinstance(model, nn.Module):
        return independent(model)
    if isinstance(model, dict) and all(isinstance(each, nn.Module) for each in model.values()):
        return as_given(independent(Models(model)))
    return model  # which is refused by name
