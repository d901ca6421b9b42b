"""The table of experiments: for each id, the fields that differ from the baseline, and the data set.

The baseline is the preset `sudoku-extreme` with an evaluation every 5 000 steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

BASE_PRESET = "sudoku-extreme"


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One row of the table."""

    group: str
    changes: Mapping[str, Any]
    """Fields of `RunConfig` by dotted name."""
    puzzles: int = 1000
    """Number of training puzzles: `trm build-data sudoku --subsample-size`."""
    augmentations: int = 1000
    """Augmentations per puzzle: `--num-aug`."""

    @property
    def data_dir(self) -> str:
        """The expected folder of the data set."""
        if (self.puzzles, self.augmentations) == (1000, 1000):
            return "data/sudoku-extreme"
        return f"data/sudoku-extreme-{self.puzzles}-aug-{self.augmentations}"


GROUPS = {
    "baseline": "the reference of all comparisons",
    "exp01": "model size",
    "exp02a": "L-cycles",
    "exp02b": "H-cycles",
    "exp03": "depth against recursion",
    "exp04a": "training puzzles",
    "exp04b": "augmentations",
    "exp05": "supervision steps",
    "exp06": "batch size",
    "exp07": "precision",
    "exp08": "EMA",
    "exp09": "optimizer",
    "exp10": "learning rate",
    "contrib01": "curriculum on recursion depth",
    "contrib02": "adaptive halting exploration",
}


LETTERS = "abcdef"
MODEL_SIZES = ((256, 4), (384, 6), (512, 8), (768, 8), (1024, 8), (1536, 8))
"""(hidden size, heads)"""
DEPTHS = ((1, 12), (2, 6), (3, 4), (4, 3), (6, 2))
"""(layers, L-cycles)"""
OPTIMIZERS = (
    ("adam_atan2", 0.9, 0.95),
    ("adamw", 0.9, 0.95),
    ("adamw", 0.9, 0.99),
    ("adamw", 0.9, 0.999),
    ("lion", 0.9, 0.99),
)
LEARNING_RATES = ((3e-5, 1.0), (1e-4, 1.0), (3e-4, 1.0), (1e-4, 0.1), (1e-4, 0.01))
"""(learning rate, share of it at the last step)"""


def _model_size(size: tuple[int, int]) -> dict[str, Any]:
    hidden, heads = size
    return {"arch.hidden_size": hidden, "arch.num_heads": heads, "arch.puzzle_emb_ndim": hidden}


def _batch_size(batch: int) -> dict[str, Any]:
    rate = 1e-4 * (batch / 6144) ** 0.5
    return {"global_batch_size": batch, "optim.lr": rate, "optim.sparse_lr": rate}


def _optimizer(rule: tuple[str, float, float]) -> dict[str, Any]:
    return dict(zip(("optim.optimizer", "optim.beta1", "optim.beta2"), rule, strict=True))


def _by_letter(group: str, changes: Iterable[Mapping[str, Any]], separator: str = "") -> dict[str, Experiment]:
    return {
        f"{group}{separator}{letter}": Experiment(group, change)
        for letter, change in zip(LETTERS, changes, strict=False)
    }


def _by_number(group: str, field: str, values: Iterable[int]) -> dict[str, Experiment]:
    return {f"{group}_{number:02}": Experiment(group, {field: value}) for number, value in enumerate(values, 1)}


EXPERIMENTS: dict[str, Experiment] = {
    "baseline": Experiment("baseline", {}),
    **_by_letter("exp01", map(_model_size, MODEL_SIZES)),
    **_by_number("exp02a", "arch.L_cycles", (2, 4, 6, 8, 10, 12)),
    **_by_number("exp02b", "arch.H_cycles", (1, 2, 3, 4, 5)),
    **_by_letter("exp03", ({"arch.L_layers": layers, "arch.L_cycles": cycles} for layers, cycles in DEPTHS)),
    **{f"exp04a_{n}": Experiment("exp04a", {}, puzzles=n) for n in (100, 250, 500, 1000, 2000, 5000)},
    **{f"exp04b_{n:04}": Experiment("exp04b", {}, augmentations=n) for n in (10, 100, 500, 1000, 2000)},
    **_by_letter("exp05", ({"arch.halt_max_steps": steps} for steps in (4, 8, 12, 16, 24, 32)), "_"),
    **_by_letter("exp06", map(_batch_size, (1536, 3072, 6144, 12288, 24576, 49152)), "_"),
    **_by_letter("exp07", ({"arch.forward_dtype": dtype} for dtype in ("float32", "bfloat16", "float16"))),
    **_by_letter("exp08", ({"optim.ema_decay": decay} for decay in (0.0, 0.99, 0.995, 0.999, 0.9995))),
    **_by_letter("exp09", map(_optimizer, OPTIMIZERS)),
    **_by_letter("exp10", ({"optim.lr": rate, "optim.lr_min_ratio": ratio} for rate, ratio in LEARNING_RATES)),
    "contrib01_baseline": Experiment("contrib01", {}),
    "contrib01_curriculum": Experiment(
        "contrib01", {"task_config.curriculum_epochs": 10_000, "task_config.curriculum_start": (1, 2)}
    ),
    "contrib02_baseline": Experiment("contrib02", {}),
    "contrib02_adaptive": Experiment(
        "contrib02", {"arch.halt_exploration_prob": 0.3, "task_config.halt_exploration_end": 0.05}
    ),
}
"""id -> experiment, `baseline` first."""
