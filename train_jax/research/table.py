"""The table of experiments: for each id, the fields that differ from the baseline, and the data sets.

The baseline is the preset `sudoku-extreme` with an evaluation every 5 000 steps. `LISTED` has the 67 experiments of the
list. Where a group varies several things at once, two twins of each row answer its question: `_equal_steps` trains for
the steps of the baseline, `_scaled_warmup` warms up during 10 % of its own steps. Contributions 3 to 6 follow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Any

BASE_PRESET = "sudoku-extreme"
BASE_STEPS = 8138
"""Optimizer steps of the baseline: 50 000 epochs of 1 000 puzzles in batches of 6 144."""
WARMUP_SHARE = 0.1
"""Share of the steps that `_scaled_warmup` warms up."""


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
    data: tuple[str, ...] = ("sudoku",)
    """Kinds of puzzles to train on: sudoku, or maze-N for generated mazes of N rows."""
    starts_from: str = ""
    """The experiment whose trained weights are the initial ones; empty for random weights."""
    twin: str = ""
    """`equal_steps` or `scaled_warmup` for a twin of a listed experiment."""


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
    "contrib03": "gradient checkpointing",
    "contrib04": "cycle consistency",
    "contrib05": "local and global attention on large grids",
    "contrib06": "one model for Sudokus and mazes, and transfer",
}
CONFOUNDED = {
    "exp04a": "puzzles and steps change together",
    "exp06": "batch size and steps change together",
    "contrib01": "the curriculum ends within the warm-up",
}
"""Listed groups whose runs differ in more than the question; their twins are groups with the name of the twin."""
TWINS = {
    "equal_steps": f"each run has the {BASE_STEPS:,} steps of the baseline",
    "scaled_warmup": f"each run warms up during {WARMUP_SHARE:.0%} of its own steps",
}
GROUPS |= {f"{group}_{twin}": f"{GROUPS[group]}; {TWINS[twin]}" for group in CONFOUNDED for twin in TWINS}


def _by_letter(group: str, fields: str, *rows: Any, separator: str = "") -> dict[str, Experiment]:
    """Returns an experiment for each row of values of the fields, or for each value of a single field."""
    names = fields.split()
    values = [row if isinstance(row, tuple) else (row,) for row in rows]
    return {
        f"{group}{separator}{letter}": Experiment(group, dict(zip(names, row, strict=True)))
        for letter, row in zip("abcdef", values, strict=False)
    }


def _by_number(group: str, field: str, values: Iterable[int]) -> dict[str, Experiment]:
    return {f"{group}_{number:02}": Experiment(group, {field: value}) for number, value in enumerate(values, 1)}


def _batch_size(batch: int) -> tuple[int, float, float]:
    rate = 1e-4 * (batch / 6144) ** 0.5
    return batch, rate, rate


LISTED: dict[str, Experiment] = {
    **_by_letter(
        "exp01", "arch.hidden_size arch.num_heads arch.puzzle_emb_ndim",
        (256, 4, 256), (384, 6, 384), (512, 8, 512), (768, 8, 768), (1024, 8, 1024), (1536, 8, 1536),
    ),
    **_by_number("exp02a", "arch.L_cycles", (2, 4, 6, 8, 10, 12)),
    **_by_number("exp02b", "arch.H_cycles", (1, 2, 3, 4, 5)),
    **_by_letter("exp03", "arch.L_layers arch.L_cycles", (1, 12), (2, 6), (3, 4), (4, 3), (6, 2)),
    **{f"exp04a_{n}": Experiment("exp04a", {}, puzzles=n) for n in (100, 250, 500, 1000, 2000, 5000)},
    **{f"exp04b_{n:04}": Experiment("exp04b", {}, augmentations=n) for n in (10, 100, 500, 1000, 2000)},
    **_by_letter("exp05", "arch.halt_max_steps", 4, 8, 12, 16, 24, 32, separator="_"),
    **_by_letter(
        "exp06", "global_batch_size optim.lr optim.sparse_lr",
        *map(_batch_size, (1536, 3072, 6144, 12288, 24576, 49152)), separator="_",
    ),
    **_by_letter("exp07", "arch.forward_dtype", "float32", "bfloat16", "float16"),
    **_by_letter("exp08", "optim.ema_decay", 0.0, 0.99, 0.995, 0.999, 0.9995),
    **_by_letter(
        "exp09", "optim.optimizer optim.beta1 optim.beta2",
        ("adam_atan2", 0.9, 0.95), ("adamw", 0.9, 0.95), ("adamw", 0.9, 0.99), ("adamw", 0.9, 0.999),
        ("lion", 0.9, 0.99),
    ),
    **_by_letter(
        "exp10", "optim.lr optim.lr_min_ratio",
        (3e-5, 1.0), (1e-4, 1.0), (3e-4, 1.0), (1e-4, 0.1), (1e-4, 0.01),
    ),
    "contrib01_baseline": Experiment("contrib01", {}),
    "contrib01_curriculum": Experiment(
        "contrib01", {"task_config.curriculum_epochs": 10_000, "task_config.curriculum_start": (1, 2)}
    ),
    "contrib02_baseline": Experiment("contrib02", {}),
    "contrib02_adaptive": Experiment(
        "contrib02", {"arch.halt_exploration_prob": 0.3, "task_config.halt_exploration_end": 0.05}
    ),
}  # fmt: skip
"""The 67 experiments of the list, literally."""

ATTENTION = {"arch.mlp_t": False, "arch.pos_encodings": "rope"}
"""Attention instead of the MLP mixer, whose weights depend on the number of positions."""
RECURSION = r".*\.L_level\..*"
"""The parameters of the recursion, without embeddings and heads."""
REMAT = {"compute.remat": "blocks"}
WINDOW = {"arch.attention_window": 7}

CONTRIBUTIONS: dict[str, Experiment] = {
    "contrib03_baseline": Experiment("contrib03", {}),
    **{f"contrib03_{cycles:02}": Experiment("contrib03", {**REMAT, "arch.L_cycles": cycles}) for cycles in (6, 12, 24)},
    **_by_letter("contrib04", "arch.cycle_penalty", 0.0, 0.01, 0.1, 1.0, separator="_"),
    **{
        f"contrib05_{side}_{name}": Experiment("contrib05", {**ATTENTION, **window}, data=(f"maze-{side}",))
        for side in (30, 50)
        for name, window in (("full", {}), ("local", WINDOW))
    },
    "contrib06_sudoku": Experiment("contrib06", ATTENTION),
    "contrib06_maze": Experiment("contrib06", ATTENTION, data=("maze-30",)),
    "contrib06_joint": Experiment("contrib06", ATTENTION, data=("sudoku", "maze-30")),
    "contrib06_transfer": Experiment(
        "contrib06",
        {**ATTENTION, "init_only": RECURSION, "optim.freeze": RECURSION},
        data=("maze-30",),
        starts_from="contrib06_sudoku",
    ),
    "contrib06_frozen": Experiment("contrib06", {**ATTENTION, "optim.freeze": RECURSION}, data=("maze-30",)),
}
"""Contributions 3 to 6. `contrib06_frozen` is the control of `contrib06_transfer`: its recursion is never trained."""


def _twin(row: Experiment, twin: str) -> Experiment:
    steps = 50_000 * row.puzzles // row.changes.get("global_batch_size", 6144)  # the 50 000 epochs of the listed row
    warmup = {"optim.warmup_steps": int(WARMUP_SHARE * steps)}
    change = {"equal_steps": {"steps": BASE_STEPS}, "scaled_warmup": warmup}[twin]
    return dataclasses.replace(row, group=f"{row.group}_{twin}", changes={**row.changes, **change}, twin=twin)


def twins_of(name: str) -> str:
    """Returns the names of the twins of an experiment or a group, as words of a sentence."""
    return " and ".join(f"{name}_{twin}" for twin in TWINS)


EXPERIMENTS: dict[str, Experiment] = {
    "baseline": Experiment("baseline", {}),
    **LISTED,
    **CONTRIBUTIONS,
    **{
        f"{name}_{twin}": _twin(row, twin)
        for group in CONFOUNDED
        for twin in TWINS
        for name, row in LISTED.items()
        if row.group == group
    },
}
"""id -> experiment, `baseline` first."""


# ---- data sets

SUDOKU_SIZES = {"sudoku9": 9, "sudoku6": 6, "study": 6, "tiny": 4}
"""Presets with generated Sudokus. There are only about a thousand different 4x4 puzzles with eight empty cells."""
SMALL_MAZES = {30: 6, 50: 10}
"""Rows of mazes at full size, and in presets with generated Sudokus."""


@dataclasses.dataclass(frozen=True)
class DataSet:
    """A data set that `trm build-data` makes."""

    folder: str
    options: tuple[str, ...]
    """The arguments of `trm build-data` without the output folder."""
    kind: str
    """Key of the kind of puzzle."""
    puzzles: int
    """Train puzzles, each of which is one example of an epoch."""

    @property
    def command(self) -> tuple[str, ...]:
        """The words of the command after `trm`."""
        return ("build-data", *self.options, "--output-dir", self.folder)


def data_sets(row: Experiment, preset: str = BASE_PRESET, root: str = "data") -> tuple[DataSet, ...]:
    """Returns the data sets of an experiment, at full size or at the size of a preset with generated Sudokus."""
    small = preset in SUDOKU_SIZES
    sets = []
    for kind in row.data:
        if kind == "sudoku":
            sets.append(_small_sudokus(row, SUDOKU_SIZES[preset]) if small else _sudoku_extreme(row))
        else:
            side = int(kind.removeprefix("maze-"))
            side = SMALL_MAZES[side] if small else side
            sets.append(DataSet(f"maze-{side}x{side}", ("maze", "--size", str(side)), f"maze-{side}", 1000))
    return tuple(dataclasses.replace(each, folder=f"{root.rstrip('/')}/{each.folder}") for each in sets)


def puzzles_of(sets: Iterable[DataSet]) -> float:
    """Returns the examples of an epoch, which has one augmentation of each train puzzle."""
    return float(sum(each.puzzles for each in sets))


def recipes() -> dict[str, tuple[str, int]]:
    """Returns kind and train puzzles of the data sets of all experiments, at every size, by the name of its folder."""
    rows = [(row, preset) for row in EXPERIMENTS.values() for preset in (BASE_PRESET, *SUDOKU_SIZES)]
    sets = [each for row, preset in rows for each in data_sets(row, preset)]
    return {PurePath(each.folder).name: (each.kind, each.puzzles) for each in sets}


def _sudoku_extreme(row: Experiment) -> DataSet:
    usual = (row.puzzles, row.augmentations) == (1000, 1000)
    folder = "sudoku-extreme" + ("" if usual else f"-{row.puzzles}-aug-{row.augmentations}")
    options = ("sudoku", "--source", "sapientinc/sudoku-extreme", "--subsample-size", str(row.puzzles))
    return DataSet(folder, (*options, "--num-aug", str(row.augmentations)), "sudoku-9x9", row.puzzles)


def _small_sudokus(row: Experiment, size: int) -> DataSet:
    """Returns the data set of the preset; for groups 4a and 4b one with a tenth of the puzzles or augmentations."""
    name = f"sudoku-{size}x{size}"
    options = ("sudoku", "--size", str(size))
    if not row.group.startswith("exp04"):
        return DataSet(name, options, name, 500 if size == 4 else 1000)
    puzzles = row.puzzles // 10 if size == 4 else row.puzzles
    augmentations = row.augmentations // 10 if row.group == "exp04b" else 0
    options += ("--num-train", str(puzzles), "--num-aug", str(augmentations))
    return DataSet(f"{name}-{puzzles}-aug-{augmentations}", options, name, puzzles)
