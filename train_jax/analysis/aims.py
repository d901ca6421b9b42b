"""What each group of experiments asks, and the value on the horizontal axis of its plot."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from train_jax.analysis.records import Run
from train_jax.experiments.table import TWINS

OPERATIONAL = ("seed", "run_dir", "data_dir", "init_from", "platform", "resume")


@dataclasses.dataclass(frozen=True)
class Aim:
    """A group's question; without an axis, its experiments are compared by name."""

    text: str
    axis: str = ""
    """A dotted field of the configuration, `parameters`, or `facts.NAME` of the data set."""
    label: str = ""
    """Of the axis."""
    log: bool = False


AIMS = {
    "baseline": Aim("What does the baseline reach?"),
    "exp01": Aim("Where does accuracy saturate with parameters?", "parameters", "parameters", log=True),
    "exp02a": Aim("How many L-cycles are best?", "arch.L_cycles", "L-cycles"),
    "exp02b": Aim("How many H-cycles are best?", "arch.H_cycles", "H-cycles"),
    "exp03": Aim("Does recursion replace layers?", "arch.L_layers", "layers, with fewer L-cycles for more layers"),
    "exp04a": Aim("How many training puzzles are needed?", "facts.total_groups", "training puzzles", log=True),
    "exp04b": Aim("Do augmentations replace puzzles?", "facts.mean_puzzle_examples", "examples per puzzle", log=True),
    "exp05": Aim("How many supervision steps are worth their cost?", "arch.halt_max_steps", "ACT step limit"),
    "exp06": Aim("Which batch size is the largest without a loss?", "global_batch_size", "batch size", log=True),
    "exp07": Aim("Which number formats train as well as float32?"),
    "exp08": Aim("What does the average of the weights add?"),
    "exp09": Aim("Which optimizer is best, and which converges first?"),
    "exp10": Aim("Which learning rate is robust?"),
    "contrib01": Aim("Does a curriculum on the recursion depth save steps?"),
    "contrib02": Aim("Does less exploration over time save ACT steps at equal accuracy?"),
    "contrib03": Aim("Does recomputation give deeper recursion in the same memory?", "arch.L_cycles", "L-cycles"),
    "contrib04": Aim("Does a penalty on changes between H-cycles help?", "arch.cycle_penalty", "weight"),
    "contrib05": Aim("Does a local window do as well as full attention on large grids?"),
    "contrib06": Aim("Does one model for both puzzles, or a transferred recursion, do as well as one for each?"),
}


def aim_of(group: str, runs: Sequence[Run]) -> Aim:
    """Returns the question of a group; of a free sweep, which of its values is best."""
    listed = next((group.removesuffix(f"_{twin}") for twin in TWINS if group.endswith(f"_{twin}")), group)
    if listed in AIMS and not any("@" in run.experiment for run in runs):
        return AIMS[listed]
    names = differing_fields(runs)
    what = " and ".join(name.rpartition(".")[2] for name in names) or "experiment"
    numeric = len(names) == 1 and all(_is_number(run.config.get(names[0])) for run in runs)
    return Aim(f"Which {what} is best?", names[0] if numeric else "", names[0] if numeric else "")


def differing_fields(runs: Sequence[Run]) -> list[str]:
    """Returns the fields in which the runs differ and that change what is learned."""
    names = {name for run in runs for name in run.config}
    differing = {name for name in names if len({repr(run.config.get(name)) for run in runs}) > 1}
    return sorted(name for name in differing if name not in OPERATIONAL and not name.startswith("wandb"))


def axis_value(run: Run, aim: Aim) -> float | None:
    """Returns the place of a run on the axis; None without one."""
    if not aim.axis:
        return None
    if aim.axis == "parameters":
        value: Any = run.parameters
    elif aim.axis.startswith("facts."):
        value = run.facts.get(aim.axis.removeprefix("facts."))
    else:
        value = run.config.get(aim.axis)
    return float(value) if _is_number(value) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
