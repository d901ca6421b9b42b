"""The puzzle task: its fields, data sets, ACT loss head, evaluation, schedules of recursion depth and exploration."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import PurePath
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
import optax

from models_torch import registry
from models_torch.ranges import Range
from train_jax.core.objective import Batch, Call, LossSums, Objective
from train_jax.core.state import TrainState
from train_jax.errors import UserError, check_fields
from train_jax.plugin import recipes
from train_jax.puzzles.batches import Mixture, check_augmentable, load_mixture
from train_jax.puzzles.kind import Kind
from train_jax.puzzles.kinds import MIXED, add_kind, kind_from_key
from train_jax.puzzles.metadata import Metadata, metadata_of
from train_jax.puzzles.metrics import halting_histogram, means
from train_jax.run.config import RunConfig
from train_jax.run.mixing import CHANGED, data_dirs
from train_jax.runtime.batch_size import epochs_to_steps
from train_jax.task import OneVariant, Task, TaskConfig, VariantSchedule

if TYPE_CHECKING:
    import torch

    from train_jax.puzzles.evaluation import Evaluator
    from train_jax.puzzles.scan import EvalStep
    from train_jax.runtime.devices import Devices


Cycles = Annotated[int, Range(1, 4096)]


@dataclasses.dataclass(frozen=True)
class PuzzleConfig(TaskConfig):
    """Fields of the data and schedules of a puzzle run."""

    kind: str = ""
    """Kind of puzzle of your own, package.module:Class, for data sets that no built-in kind recognises."""
    data_weights: str = ""
    """Share of each data set in a batch, for several data sets (3,1: three quarters and one quarter); by default one
    pass over each data set takes the same number of steps."""
    augment: bool = False
    """Transform every training example by a random symmetry, for Sudokus and mazes; replaces stored augmentations.
    Evaluation is never augmented."""
    curriculum_epochs: Annotated[float, Range(0, 1e12)] = 0
    """Epochs during which H-cycles and L-cycles increase linearly to those of `arch`; 0: constant."""
    curriculum_start: tuple[Cycles, Cycles] = (1, 2)
    """H-cycles and L-cycles at the start of the curriculum."""
    halt_exploration_end: Annotated[float, Range(0, 1)] | None = None
    """Halting exploration at the last step; it changes linearly, starting from `arch.halt_exploration_prob`."""

    def __post_init__(self):
        check_fields(self)


class PuzzleTask(Task):
    """Sudokus, mazes and ARC puzzles for models with adaptive computation time."""

    config_class = PuzzleConfig
    models = tuple(registry.ARCHITECTURES)
    console: ClassVar = {"lm_loss": "loss {:.4f}", "exact_accuracy": "exact {:.3f}"}
    evaluated = (
        "exact_accuracy", "accuracy", "lm_loss", "q_halt_accuracy", "q_halt_loss", "q_continue_loss", "steps",
    )  # fmt: skip

    def __init__(self, config: RunConfig, facts: dict[str, Any] | None = None):
        """If `facts` are given (from a run folder), the data sets are opened only when they are needed."""
        super().__init__(config, facts)
        self._task_config: PuzzleConfig = config.task_config  # pyright: ignore[reportAttributeAccessIssue]
        add_kind(self._task_config.kind)
        self.metadata: Metadata = self.train_set.metadata if facts is None else metadata_of(facts)
        self.halt_max_steps: int = config.arch.halt_max_steps  # pyright: ignore[reportAttributeAccessIssue]
        self.bootstrapped_halting = not getattr(config.arch, "no_ACT_continue", True)

    # ---- data

    @cached_property
    def train_set(self) -> Mixture:
        return load_mixture(self.config.data_dir, "train", self._task_config.data_weights)

    @cached_property
    def test_set(self) -> Mixture:
        return load_mixture(self.config.data_dir, "test", self._task_config.data_weights)

    @property
    def sizes(self) -> Mapping[str, int]:
        names = ("seq_len", "vocab_size", "num_puzzle_identifiers")
        return {name: getattr(self.metadata, name) for name in names}

    @property
    def facts(self) -> dict[str, Any]:
        return dataclasses.asdict(self.metadata) | {"sets": list(self.metadata.sets)}  # JSON has no tuples

    @cached_property
    def fingerprint(self) -> str:
        return self.train_set.fingerprint + self.test_set.fingerprint

    @property
    def examples_per_epoch(self) -> float:
        return self.train_set.examples_per_epoch

    @property
    def description(self) -> str:
        return (
            f"{self.train_set.num_groups:,} puzzles ({self.train_set.num_examples:,} examples), "
            f"{self.test_set.num_examples:,} held out" + CHANGED * (self.train_set.changed or self.test_set.changed)
        )

    def batch(self, step: int, shard: tuple[int, int], state: TrainState | None = None) -> dict[str, np.ndarray]:
        return self.train_set.train_batch(
            seed=self.config.seed,
            step=step,
            batch_size=self.config.global_batch_size,
            shard=shard,
            augment=self._task_config.augment,
        )

    def check(self, config: RunConfig, devices: Devices) -> None:
        self.train_set.rows_of_parts(config.global_batch_size)
        _ = self.test_set
        if self._task_config.augment:
            check_augmentable(config.data_dir, self.train_set)
        for name in ("H_cycles", "L_cycles"):
            if self._task_config.curriculum_epochs and not hasattr(config.arch, name):
                raise UserError(f"curriculum_epochs changes {name}, but {config.model} has no such field; omit it")

    # ---- model and loss

    def wrap(self, module: torch.nn.Module, arch: Any) -> torch.nn.Module:
        return registry.with_loss_head(self.config.model, module, arch)

    def initial_carry(self, call: Call, batch: Batch) -> Any:
        carry, _ = call(batch, method="initial_carry")
        return carry

    @classmethod
    def unbuilt(cls, config: RunConfig, kind: str = "", puzzle_identifiers: int = 1) -> Task | None:
        return UnbuiltPuzzles(config, kind, puzzle_identifiers, recipes())

    def loss(self, call: Call, carry: Any, batch: Batch) -> LossSums:
        outputs, buffers = call(carry=carry, batch=batch, return_keys=())
        carry, loss, metrics, *_ = outputs
        return LossSums(loss, None, metrics | halting_histogram(carry, self.halt_max_steps), carry, buffers)

    def figures(self, sums: dict[str, Any], examples: int) -> dict[str, float]:
        """Returns the means; `halted_at/N` is the share of the halted sequences that halted after N ACT steps."""
        sums = dict(sums)
        halted_at = sums.pop("halted_at", ())
        sums |= {f"halted_at/{number}": count for number, count in enumerate(halted_at, 1)}
        return means({name: float(value) for name, value in sums.items()}, examples)

    # ---- evaluation

    def evaluator(
        self,
        objective: Objective,
        devices: Devices,
        puzzles: Mixture | None = None,
        *,
        batch_size: int = 0,
        **options: Any,
    ) -> Evaluator:
        """Returns an `Evaluator` with `options`, by default of the test set with the batch size of the run."""
        from train_jax.puzzles.evaluation import Evaluator  # a plan, and a batch, need no evaluation

        puzzles = self.test_set if puzzles is None else puzzles
        batch_size = batch_size or self.config.eval_batch_size
        return Evaluator(objective, puzzles, devices, max_steps=self.halt_max_steps, batch_size=batch_size, **options)

    def eval_step(self, objective: Objective) -> tuple[EvalStep, dict[str, np.ndarray]]:
        """Returns the step of evaluations during training, of one device, and a batch of zeros for all of them."""
        from train_jax.puzzles.scan import make_eval_step

        rows = self.config.eval_batch_size
        tokens = np.zeros((rows, self.metadata.seq_len), np.int32)
        numbers = np.zeros(rows, np.int32)
        batch = {"inputs": tokens, "labels": tokens, "puzzle_identifiers": numbers, "is_example": numbers > 0}
        return make_eval_step(objective, self.halt_max_steps, metrics_only=True), batch

    # ---- schedules

    def variants(self, total_steps: int) -> VariantSchedule:
        """Returns the schedule of (H-cycles, L-cycles)."""
        epochs = self._task_config.curriculum_epochs
        if not epochs:
            return OneVariant()
        steps = epochs_to_steps(self.examples_per_epoch, epochs, self.config.global_batch_size)
        arch: Any = self.config.arch
        return Curriculum(self._task_config.curriculum_start, (arch.H_cycles, arch.L_cycles), steps)

    def arch_of(self, variant: tuple[int, int]) -> Any:
        H_cycles, L_cycles = variant
        return dataclasses.replace(self.config.arch, H_cycles=H_cycles, L_cycles=L_cycles)  # pyright: ignore

    def overrides(self, module: torch.nn.Module, total_steps: int) -> Mapping[str, optax.Schedule]:
        end = self._task_config.halt_exploration_end
        if end is None:
            return {}
        first = self.config.arch.halt_exploration_prob  # pyright: ignore[reportAttributeAccessIssue]
        return {exploration_path(module): optax.linear_schedule(first, end, total_steps)}


@dataclasses.dataclass(frozen=True)
class Curriculum:
    """A schedule that increases H-cycles and L-cycles linearly from `start` to `end`, which is reached at `steps`."""

    start: tuple[int, int]
    """H-cycles and L-cycles at the first step."""
    end: tuple[int, int]
    steps: int
    """Duration in optimizer steps; 0: `end` from the first step."""

    def at(self, step: int) -> tuple[int, int]:
        """Returns the depth of the step that follows `step` completed steps."""
        share = min(step / self.steps, 1.0) if self.steps else 1.0
        low, high = ((a + share * (b - a)) for a, b in zip(self.start, self.end, strict=True))
        return int(low + 0.5), int(high + 0.5)

    def after(self, step: int) -> tuple[int, int] | None:
        """Returns the next depth that differs from the one at `step`; None if there is none."""
        now = self.at(step)
        if now == self.end:
            return None
        return next(depth for s in range(step + 1, self.steps + 1) if (depth := self.at(s)) != now)


def exploration_path(module: torch.nn.Module) -> str:
    """Returns the dotted path of the module's halting exploration. Raises `UserError` if it has none."""
    name = "halt_exploration_prob"
    for path, submodule in module.named_modules():
        for owner, step in ((submodule, ""), (getattr(submodule, "config", None), "config.")):
            if isinstance(getattr(owner, name, None), (int, float)):
                return f"{path}.{step}{name}".removeprefix(".")
    raise UserError(f"halt_exploration_end changes {name} during training, but the model has no such value; omit it")


PUZZLES = 1000
"""Assumed number of train puzzles of a data set of which nothing else is known."""

_FOLDERS = {
    r"sudoku-extreme(-.*)?": "sudoku-9x9",
    r"(?P<key>sudoku-\d+x\d+)(-.*)?": r"\g<key>",
    r"maze-(?P<size>\d+)x(?P=size)(-.*)?": r"maze-\g<size>",
    r"maze-hard(-.*)?": "maze-30",
    r"maze-unique": "maze-9",
    r"arc[12]concept(-.*)?": "arc",
}
"""Names of the folders that `trm build-data` writes and presets read, and the keys of the kinds of their puzzles."""


class UnbuiltPuzzles(PuzzleTask):
    """The parts of a puzzle task that are needed to compile its steps, without a data set."""

    def __init__(
        self,
        config: RunConfig,
        kind: str = "",
        puzzle_identifiers: int = 1,
        recipes: Mapping[str, tuple[str, int]] = MappingProxyType({}),
    ):
        """`kind` is a key such as `sudoku-9x9`, by default that of each folder in `config.data_dir`, by its name;
        `puzzle_identifiers` is the number of rows of the puzzle table for each of them. `recipes` has the kind and the
        train puzzles of folders by name.

        Raises `UserError` if a kind is not known.
        """
        names = [PurePath(folder).name for folder in data_dirs(config.data_dir)] or [config.data_dir]
        kinds = [_kind(name, kind or (recipes[name][0] if name in recipes else ""), config) for name in names]
        puzzles = sum(recipes[name][1] if name in recipes else PUZZLES for name in names)
        seq_len, vocab_size = (max(getattr(each, size) for each in kinds) for size in ("seq_len", "vocab_size"))
        whole = (each.key for each in kinds if (each.seq_len, each.vocab_size) == (seq_len, vocab_size))
        facts: dict[str, Any] = {
            "seq_len": seq_len,
            "vocab_size": vocab_size,
            "pad_id": 0,
            "ignore_label_id": 0,
            "blank_identifier_id": 0,
            "num_puzzle_identifiers": puzzle_identifiers * len(names),
            "total_groups": puzzles,
            "mean_puzzle_examples": 1.0,
            "total_puzzles": puzzles,
            "sets": ["all"],
            "kind": next(whole, MIXED),
        }
        super().__init__(config, facts)

    @property
    def examples_per_epoch(self) -> float:
        return float(self.metadata.total_groups)

    def batch(self, step: int, shard: tuple[int, int], state: Any = None) -> dict[str, np.ndarray]:
        rows = self.config.global_batch_size // shard[1]
        tokens = np.zeros((rows, self.metadata.seq_len), np.int32)
        return {"inputs": tokens, "labels": tokens, "puzzle_identifiers": np.zeros(rows, np.int32)}


def _kind(name: str, key: str, config: RunConfig) -> Kind:
    """Returns the kind with a key, or that of a folder with a known name."""
    named = (found.expand(of) for pattern, of in _FOLDERS.items() if (found := re.fullmatch(pattern, name)))
    wanted = key or next(named, name)
    kind = kind_from_key(wanted)
    if kind is None:
        wrong = f"unknown kind {key!r}" if key else f"{config.data_dir} is not built, and does not name its kind"
        raise UserError(f"{wrong}; use --kind with one such as sudoku-9x9, maze-30 or arc")
    return kind
