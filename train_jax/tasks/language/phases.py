"""The phases of a language model's training after the base: mid, sft (supervised fine-tuning) and rl.

A phase starts with the weights of a run and inherits its sizes, its batch, and its optimizer. Rates are those of that
run times a factor, without warm-up, and fall linearly to 0 at the end. Factors and shares are nanochat's, of mid at
4a87a0d, of the others at 92d63d4, https://github.com/karpathy/nanochat.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from train_jax.errors import UserError
from train_jax.optim.config import OptimConfig
from train_jax.run.config import RunConfig, with_task
from train_jax.run.folder import read_run


@dataclasses.dataclass(frozen=True)
class Phase:
    """What a phase changes in the run that it starts from."""

    task: str
    fields: dict[str, Any]
    """Of the task."""
    rate: float
    """Factor of the learning rates."""
    decay_share: float
    """Share of the steps in which the rates fall."""
    init_optimizer: bool
    """Whether the optimizer's state goes on."""


PHASES = {
    "mid": Phase("chat", {"packing": "bestfit-pad"}, 1.0, 0.2, True),
    "sft": Phase("chat", {"packing": "bestfit-pad"}, 0.8, 0.5, True),
    "rl": Phase("rollouts", {}, 0.05, 1.0, False),
}


def phase_run(preset: RunConfig, phase: str, source: str | None) -> RunConfig:
    """Returns the run of a phase. `preset` has the model of the run `source`, whose other fields it inherits.

    Raises `UserError` for an unknown phase, and without a run of this model. `base` is the preset itself.
    """
    if phase == "base":
        return preset
    if phase not in PHASES:
        raise UserError(f"--phase is {phase!r}; use one of base, {', '.join(PHASES)}")
    if not source:
        raise UserError(f"--phase {phase} starts from a run; give --init-from RUN")
    _, run = read_run(source)
    if run.model != preset.model:
        raise UserError(f"{source} is a run of the model {run.model}, the preset has {preset.model}; name its preset")
    changes = PHASES[phase]
    config = with_task(run, changes.task)
    return dataclasses.replace(
        config,
        task_config=dataclasses.replace(config.task_config, **changes.fields),
        optim=_scaled(run.optim, changes),
        data_dir=run.data_dir if phase == "rl" else "data/chat",
        run_dir=f"{preset.run_dir}-{phase}",
        init_from=source,
        init_optimizer=changes.init_optimizer,
        init_only="",
        epochs=1.0,
        steps=0,
        keep_best="",
    )


def _scaled(optim: OptimConfig, phase: Phase) -> OptimConfig:
    def changed(rates: Any) -> Any:
        own = {
            "lr": None if rates.lr is None else rates.lr * phase.rate,
            "warmup_steps": 0,
            "decay": "warmdown",
            "decay_share": phase.decay_share,
            "lr_min_ratio": 0.0,
            "weight_decay": 0.0,
            "weight_decay_schedule": "constant",
        }
        return dataclasses.replace(rates, **own)

    return dataclasses.replace(changed(optim), groups=tuple(map(changed, optim.groups)))
