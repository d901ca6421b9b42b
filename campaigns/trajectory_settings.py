"""The evaluations behind `campaigns.trajectories`: its options, a setting, and results that are kept on disk."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import json
import time
from pathlib import Path
from typing import Annotated, Any

import tyro

from train_jax.puzzles.batches import load_mixture
from train_jax.puzzles.evaluation import PuzzleEvaluation
from train_jax.puzzles.scan import Chooser, TrajectoryOptions
from train_jax.puzzles.solving import puzzle_task
from train_jax.puzzles.trajectories import TrajectoryEvaluator
from train_jax.run.restore import Restored, restore
from train_jax.runtime.devices import Devices


@dataclasses.dataclass(frozen=True)
class Options:
    """Choose noise and depth on a validation set, and report the accuracy on a test set."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Runs of the same preset with different seeds."""
    validation: str = "data/validation"
    test: str = "data/test"
    trajectories: tuple[int, ...] = (8,)
    """Numbers of trajectories. Without `--thresholds`, only the largest is evaluated, and its curve contains the
    smaller ones.
    """
    depth: tuple[int, ...] = (16,)
    """Numbers of ACT steps of a trajectory, evaluated like `--trajectories`."""
    noises: tuple[float, ...] = (0.05, 0.1, 0.2, 0.3)
    choose: Chooser = "halting"
    validation_puzzles: int = 1000
    test_puzzles: int = 4000
    halting: bool = False
    """Choose settings with early halting: a puzzle is computed until a halting probability exceeds a threshold."""
    thresholds: tuple[float, ...] = ()
    """Halting probabilities to choose from, each evaluated with every noise, number of trajectories and depth."""
    target: float = 0.99
    """Report also the cheapest setting that reaches this mean accuracy on the validation set."""
    timed: int = 0
    """Number of puzzles on which the seconds of each setting are measured, with the first run; 0 measures none."""
    batch_size: int = 0
    """Examples per batch; 0 uses that of the run."""
    results: Path = Path("trajectories")
    """Folder of the evaluations, one JSON file each, and of the table, `table.json`."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """A setting to choose: numbers of trajectories and ACT steps, and the noise."""

    trajectories: int
    noise: float
    depth: int
    threshold: float | None = None
    """Halting probability above which the computation of a puzzle ends; None computes all trajectories."""


class Study:
    """Evaluates each run with each noise once, and remembers the results on disk."""

    def __init__(self, options: Options):
        self._options = options
        self._restored: dict[str, Restored] = {}

    def run(self, path: str) -> Restored:
        """Returns a run, which is restored when an evaluation needs it."""
        if path not in self._restored:
            self._restored[path] = restore(path)
        return self._restored[path]

    def evaluated(self, path: str, settings: Setting, data_dir: str, limit: int) -> dict[str, Any]:
        """Returns the numbers of trajectories and depths of the curves, the shares by name, and the count."""
        files = [_digest(Path(path) / "FINISHED"), _digest(Path(data_dir) / "recipe.json")]
        key = [path, data_dir, *files, dataclasses.asdict(settings), limit, self._options.choose]
        name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
        file = self._options.results / f"{name}.json"
        if file.is_file():
            return json.loads(file.read_text())["result"]
        content = self._computed(path, settings, data_dir, limit)[0]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"key": key, "result": content}, indent=1))
        return content

    def seconds(self, setting: Setting) -> float:
        """Returns the seconds of an evaluation of the first puzzles of the test set after the one that compiles."""
        options = self._options
        return self._computed(options.runs[0], setting, options.test, options.timed)[1]

    @property
    def halt_limit(self) -> int:
        """ACT steps of an ordinary evaluation."""
        return puzzle_task(self.run(self._options.runs[0])).halt_max_steps

    def _computed(self, path: str, setting: Setting, data_dir: str, limit: int) -> tuple[dict[str, Any], float]:
        """Returns the results of an evaluation that are kept, and its seconds."""
        run = self.run(path)
        options = self._options
        settings = TrajectoryOptions(setting.trajectories, setting.noise, setting.depth, options.choose)
        task = puzzle_task(run)
        puzzles = load_mixture(data_dir, "test")
        if setting.threshold is not None:
            evaluator = task.evaluator(
                run.objective,
                Devices(),
                puzzles,
                batch_size=options.batch_size,
                halt_threshold=setting.threshold,
                trajectories=settings,
            )
        else:
            batch_size = options.batch_size or run.config.eval_batch_size
            evaluator = TrajectoryEvaluator(run.objective, puzzles, Devices(), settings, batch_size=batch_size)
        if options.timed:
            evaluator(run.state, limit=1)
        start = time.perf_counter()
        result = evaluator(run.state, limit=limit)
        seconds = time.perf_counter() - start
        if isinstance(result, PuzzleEvaluation):
            return result.metrics, seconds
        content = {
            "trajectories": result.trajectories,
            "depths": result.depths,
            "shares": {name: values.tolist() for name, values in result.shares.items()},
            "stops": {name: values.tolist() for name, values in result.stops.items()},
            "count": result.evaluation.metrics["count"],
        }
        return content, seconds


COLUMNS = "data", "run", "trajectories", "noise", "depth", "threshold", "act_steps", "exact", "puzzles"


def write_evaluations(results: Path) -> None:
    """Writes `evaluations.csv`, one row for each evaluation in the folder, or for each point of its curve."""
    rows = []
    for file in results.glob("*.json"):
        stored = json.loads(file.read_text())
        if not (isinstance(stored, dict) and stored.keys() == {"key", "result"}):
            continue  # the table
        (path, data_dir, *_, settings, _, choose), result = stored["key"], stored["result"]
        names = Path(data_dir).name, Path(path).name
        if settings["threshold"] is not None:
            points = [(*settings.values(), result["steps"], result["exact_accuracy"])]
        else:
            points = [
                (count, settings["noise"], depth, None, count * depth, result["shares"][f"{choose}/best"][i][j])
                for i, count in enumerate(result["trajectories"])
                for j, depth in enumerate(result["depths"])
            ]
        rows += [(*names, *point, round(result["count"])) for point in points]
    with (results / "evaluations.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(sorted(rows, key=lambda row: tuple(-1 if value is None else value for value in row)))


def _digest(path: Path) -> str:
    """Returns the SHA-256 of a file that changes with the run or the data set; "" without it."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
