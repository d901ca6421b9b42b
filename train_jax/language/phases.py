"""The phases of a language model's training after the base: mid, sft (supervised fine-tuning) and rl.

A phase starts with the weights of a run and inherits its sizes, its batch, and its optimizer. Rates are those of that
run times a factor, without warm-up, and fall linearly to 0 at the end. Factors and shares are nanochat's, of mid at
4a87a0d, of the others at 92d63d4, https://github.com/karpathy/nanochat. The small presets for a CPU have values of
their own, found on two cores.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from train_jax.core.optim.config import OptimConfig
from train_jax.errors import UserError
from train_jax.run.arguments import option_value
from train_jax.run.config import RunConfig, with_task
from train_jax.run.folder import read_run


@dataclasses.dataclass(frozen=True)
class Phase:
    """The changes of a phase to the run that it starts from."""

    task: str
    fields: dict[str, Any]
    """Fields of the task."""
    rate: float
    """Factor on the learning rates."""
    decay_share: float
    """Share of the steps in which the learning rates decay."""
    init_optimizer: bool
    """True if the phase continues with the state of the optimizer."""
    run: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of the run."""
    optim: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of the optimizer that replace the inherited ones."""


PHASES = {
    "mid": Phase("chat", {"packing": "bestfit-pad"}, 1.0, 0.2, True),
    "sft": Phase("chat", {"packing": "bestfit-pad"}, 0.8, 0.5, True),
    "rl": Phase("rollouts", {}, 0.05, 1.0, False),
}
SMALL_PHASES = PHASES | {
    "sft": dataclasses.replace(
        PHASES["sft"],
        fields=PHASES["sft"].fields | {"eval_problems": "spelling:128 calculator:128", "problems_every_steps": 200},
        run={"epochs": 2.6, "eval_batch_size": 64},
    ),
    "rl": Phase(
        "rollouts",
        fields={"problems": "arithmetic,operations=3,digits=1,operators=+-:4000", "samples": 8, "max_tokens": 40},
        rate=1.0,
        decay_share=1.0,
        init_optimizer=False,
        run={"global_batch_size": 128, "steps": 300, "eval_every_steps": 0},
        optim={"groups": (), "lr": 3e-4, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8},
    ),
}
"""The phases of the presets `chat-…`. Rollouts have 128 answers: their gradient is mostly noise, and Muon would take as
long a step in its directions as in that of the reward."""


def phase_run(name: str, preset: RunConfig, phase: str, arguments: Sequence[str]) -> RunConfig:
    """Returns the run of a phase. The preset `name` has the model of the run in `--init-from`, whose other fields it
    inherits.

    Raises `UserError` for an unknown phase, and without a run of this model. `base` is the preset itself.
    """
    if phase == "base":
        return preset
    if phase not in PHASES:
        raise UserError(f"--phase is {phase!r}; use one of base, {', '.join(PHASES)}")
    source = option_value(arguments, "--init-from")
    if not source:
        raise UserError(f"--phase {phase} starts from a run; give --init-from RUN")
    _, run = read_run(source)
    if run.model != preset.model:
        raise UserError(f"{source} is a run of the model {run.model}, the preset has {preset.model}; name its preset")
    changes = (SMALL_PHASES if name.startswith("chat-") else PHASES)[phase]
    config = with_task(run, changes.task)
    return dataclasses.replace(
        config,
        task_config=dataclasses.replace(config.task_config, **changes.fields),
        optim=_scaled(dataclasses.replace(run.optim, **changes.optim), changes),
        data_dir=run.data_dir if phase == "rl" else "data/chat",
        run_dir=f"{preset.run_dir}-{phase}",
        init_from=source,
        init_optimizer=changes.init_optimizer,
        init_only="",
        keep_best="",
        **({"epochs": 1.0, "steps": 0} | changes.run),
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
