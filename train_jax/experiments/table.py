"""The literal table of experiments: for each id, the fields that differ from the baseline, and its data set.

The baseline is the preset `sudoku-extreme` with an evaluation every 5 000 steps. `docs/experiments.md` says what the
table can and cannot answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

BASE_PRESET = "sudoku-extreme"


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One row of the table."""

    group: str
    changes: Mapping[str, Any]
    """Fields of `RunConfig` by dotted name."""
    puzzles: int = 1000
    """Training puzzles of its data set: `trm build-data sudoku --subsample-size`."""
    augmentations: int = 1000
    """Augmentations of each: `--num-aug`."""

    @property
    def data_dir(self) -> str:
        """Where its data set is expected."""
        if (self.puzzles, self.augmentations) == (1000, 1000):
            return "data/sudoku-extreme"
        return f"data/sudoku-extreme-{self.puzzles}-aug-{self.augmentations}"


GROUPS = {
    "baseline": "the run that all others are compared with",
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


def _experiments() -> dict[str, Experiment]:
    table = {"baseline": Experiment("baseline", {})}

    def add(experiment_id: str, group: str, changes: Mapping[str, Any], **data: int) -> None:
        table[experiment_id] = Experiment(group, changes, **data)

    sizes = ((256, 4), (384, 6), (512, 8), (768, 8), (1024, 8), (1536, 8))
    for letter, (hidden, heads) in zip("abcdef", sizes, strict=True):
        changes = {"arch.hidden_size": hidden, "arch.num_heads": heads, "arch.puzzle_emb_ndim": hidden}
        add(f"exp01{letter}", "exp01", changes)
    for number, cycles in enumerate((2, 4, 6, 8, 10, 12), 1):
        add(f"exp02a_{number:02}", "exp02a", {"arch.L_cycles": cycles})
    for number, cycles in enumerate((1, 2, 3, 4, 5), 1):
        add(f"exp02b_{number:02}", "exp02b", {"arch.H_cycles": cycles})
    depths = ((1, 12), (2, 6), (3, 4), (4, 3), (6, 2))
    for letter, (layers, cycles) in zip("abcde", depths, strict=True):
        add(f"exp03{letter}", "exp03", {"arch.L_layers": layers, "arch.L_cycles": cycles})
    for puzzles in (100, 250, 500, 1000, 2000, 5000):
        add(f"exp04a_{puzzles}", "exp04a", {}, puzzles=puzzles)
    for augmentations in (10, 100, 500, 1000, 2000):
        add(f"exp04b_{augmentations:04}", "exp04b", {}, augmentations=augmentations)
    for letter, steps in zip("abcdef", (4, 8, 12, 16, 24, 32), strict=True):
        add(f"exp05_{letter}", "exp05", {"arch.halt_max_steps": steps})
    for letter, batch in zip("abcdef", (1536, 3072, 6144, 12288, 24576, 49152), strict=True):
        rate = 1e-4 * (batch / 6144) ** 0.5
        add(f"exp06_{letter}", "exp06", {"global_batch_size": batch, "optim.lr": rate, "optim.sparse_lr": rate})
    for letter, dtype in zip("abc", ("float32", "bfloat16", "float16"), strict=True):
        add(f"exp07{letter}", "exp07", {"arch.forward_dtype": dtype})
    for letter, decay in zip("abcde", (0.0, 0.99, 0.995, 0.999, 0.9995), strict=True):
        add(f"exp08{letter}", "exp08", {"optim.ema_decay": decay})
    optimizers = (
        ("adam_atan2", 0.9, 0.95),
        ("adamw", 0.9, 0.95),
        ("adamw", 0.9, 0.99),
        ("adamw", 0.9, 0.999),
        ("lion", 0.9, 0.99),
    )
    for letter, (name, beta1, beta2) in zip("abcde", optimizers, strict=True):
        changes = {"optim.optimizer": name, "optim.beta1": beta1, "optim.beta2": beta2}
        add(f"exp09{letter}", "exp09", changes)
    rates = ((3e-5, 1.0), (1e-4, 1.0), (3e-4, 1.0), (1e-4, 0.1), (1e-4, 0.01))
    for letter, (rate, ratio) in zip("abcde", rates, strict=True):
        add(f"exp10{letter}", "exp10", {"optim.lr": rate, "optim.lr_min_ratio": ratio})
    add("contrib01_baseline", "contrib01", {})
    curriculum = {"task_config.curriculum_epochs": 10_000, "task_config.curriculum_start": (1, 2)}
    add("contrib01_curriculum", "contrib01", curriculum)
    add("contrib02_baseline", "contrib02", {})
    adaptive = {"arch.halt_exploration_prob": 0.3, "task_config.halt_exploration_end": 0.05}
    add("contrib02_adaptive", "contrib02", adaptive)
    return table


EXPERIMENTS = _experiments()
"""id -> experiment, `baseline` first."""
