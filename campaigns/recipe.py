"""The study of levers of training: rows with equal counted FLOPs on hard 6x6 Sudokus, one process for each.

    python -m campaigns.recipe --measure        # trains one row, and prints the hours that all rows need
    python -m campaigns.recipe                  # trains the rows that have no record yet, those of a seed together
    python -m campaigns.recipe --budget 4       # with four times the FLOPs
    python -m campaigns.recipe --table          # writes the table of the records into the page, and trains nothing

The puzzles have 26 of 36 cells empty: 1 000 for training, each example a fresh symmetry, and 4 000 held out. The first
row is a TRM of 47 378 parameters; every row has as many steps as the FLOPs of the first one pay for, to 0.5 %. An
interrupted command goes on where it stopped.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import scipy.stats
import tyro

from models_torch.flops import evaluation_flops_per_example
from train_jax.puzzles.kinds import kind_from_key
from train_jax.research.equal_flops import with_equal_flops
from train_jax.research.jobs import Job, cost_of
from train_jax.research.runs import with_changes
from train_jax.research.table import DataSet
from train_jax.run.presets import preset

ROOT = Path(__file__).resolve().parents[1]
RECORDS = Path(__file__).with_suffix(".jsonl")
PAGE = ROOT / "docs" / "dev" / "recipe.md"
BEGIN = "<!-- the table of `python -m campaigns.recipe --table` begins -->"
END = "<!-- and ends -->"

MODEL = "train_jax.research.levers:LeverTRM"
STEPS = 600
"""Optimizer steps of the first row at budget 1."""
PUZZLES = 4000
DATA = ("sudoku", "--size", "6", "--num-train", "1000", "--num-test", str(PUZZLES), "--num-empty", "26")
KIND = "sudoku-6x6"
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
}
ATTENTION = {"mlp_t": False, "pos_encodings": "rope"}


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the study: a TRM with levers, or with other fields of the run."""

    levers: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of the run by dotted name; with any of `task_config`, the model is the TRM without levers."""
    against: str = "baseline"
    """The row with which this one is compared."""


ROWS: dict[str, Row] = {
    "baseline": Row(),
    "repair 0.2": Row({"repair": 0.2}),
    "random latents 1": Row({"random_latents": 1.0}),
    "path noise 0.1": Row({"path_noise": 0.1}),
    "race of 2": Row({"race": 2}),
    "label smoothing 0.1": Row({"label_smoothing": 0.1}),
    "halting loss x 0.05": Row({"halt_loss_weight": 0.05}),
    "ACT steps x 0.7^t": Row({"act_step_weights": [1.0, 0.7, 0.49, 0.343]}),
    "position tables": Row({"position_tables": True}),
    "looped flow 1": Row({"looped_flow": 1.0}),
    "attention": Row(ATTENTION),
    "attention, QK norm": Row({**ATTENTION, "qk_norm": True}, against="attention"),
    "growing depth": Row(changes={"task_config.curriculum_start": (1, 1)}),
    "muon 1.6e-2": Row(changes={"optim.optimizer": "muon", "optim.lr": 1.6e-2, "optim.weight_decay": 0.25}),
}
GROWING_SHARE = 0.3
"""Share of the steps of `growing depth` after which it has the depth of the other rows."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Train the rows of the study that have no record yet, and write their table."""

    folder: Path = Path("runs/recipe")
    """Folder of the data set and of the runs."""
    records: Path = RECORDS
    """File to which a line is appended for each finished row."""
    page: Path = PAGE
    """Page with the table."""
    budget: int = 1
    """FLOPs in multiples of those of the first row at budget 1."""
    seeds: int = 3
    rows: tuple[str, ...] = tuple(ROWS)
    measure: bool = False
    """Train only the first row that has no record, and print the hours that all rows need."""
    table: bool = False
    """Only write the table."""


# ---- the rows as runs


def job_of(name: str, seed: int, options: Options) -> Job:
    """Returns a row at the FLOPs of the first one."""
    first = _job("baseline", seed, options)
    return with_equal_flops([first, _job(name, seed, options)], None)[1]


def _job(name: str, seed: int, options: Options) -> Job:
    row = ROWS[name]
    steps = STEPS * options.budget
    folder = name.replace(" ", "-").replace(",", "").replace("^", "")
    data = DataSet(str(options.folder / "data"), DATA, KIND, 1000)
    base = preset("study")
    changes: dict[str, Any] = {
        "data_dir": data.folder,
        "run_dir": str(options.folder / f"budget-{options.budget}" / folder / f"seed-{seed}"),
        "seed": seed,
        "steps": steps,
        "eval_every_steps": 0,
        "checkpoint_every_steps": 10**6,
        "wandb": "disabled",
        "platform": "cpu",
        "compute.mlp": "fused",
        **row.changes,
    }
    if "task_config.curriculum_start" in changes:
        # Half a step more, because whole steps are counted.
        steps_of_growth = int(GROWING_SHARE * steps) + 0.5
        changes["task_config.curriculum_epochs"] = steps_of_growth * base.global_batch_size / data.puzzles
    else:
        arch = dataclasses.asdict(base.arch)
        of_all = {field.name for field in dataclasses.fields(preset_of_own_model())}
        options_of_model = {key: value for key, value in arch.items() if key not in of_all}
        changes |= {"model": MODEL, "arch.options": {**options_of_model, **row.levers}}
    config = with_changes(base, changes)
    return Job(
        name=f"{name} {seed}",
        steps=steps,
        command=(),
        builds=(data.command,),
        needs="",
        experiment="study",
        group="recipe",
        seed=seed,
        config=config,
        sets=(data,),
    )


def preset_of_own_model() -> Any:
    """Returns the configuration of an own model with its defaults, whose other values are options."""
    from models_torch.outside import OutsideConfig

    return OutsideConfig()


def train(job: Job, options: Options) -> None:
    """Builds the data set if it is not there, and trains a row in a process with one thread."""
    words = []
    if not (options.folder / "data" / "recipe.json").is_file():
        words.append(job.builds[0])
    verify = ["--no-verify"] if job.config.model == MODEL else []  # tests compare every lever with PyTorch
    words.append((*job.command, *verify))
    for command in words:
        environment = {**os.environ, **ONE_THREAD}
        subprocess.run([sys.executable, "-m", "train_jax", *command], env=environment, check=True)


def record_of(name: str, job: Job, options: Options, seconds: float) -> dict[str, Any]:
    """Returns the record of a finished row."""
    folder = Path(job.config.run_dir)
    figures = json.loads((folder / "FINISHED").read_text())
    machine = json.loads((folder / "machine.json").read_text())
    kind = kind_from_key(KIND)
    assert kind is not None
    arch: Any = dataclasses.replace(job.config.arch, seq_len=kind.seq_len, vocab_size=kind.vocab_size)
    per_step = evaluation_flops_per_example(job.config.model, arch)
    return {
        "budget": options.budget,
        "row": name,
        "seed": job.seed,
        "steps": job.steps,
        "train_flops": cost_of(job)[1],
        "evaluation_flops": per_step * figures["steps"] * figures["count"],
        "exact_accuracy": figures["exact_accuracy"],
        "accuracy": figures["accuracy"],
        "q_halt_accuracy": figures["q_halt_accuracy"],
        "count": figures["count"],
        "parameters": machine["parameters"],
        "seconds": round(seconds, 1),
    }


# ---- records and the table


def records_of(options: Options) -> list[dict[str, Any]]:
    if not options.records.is_file():
        return []
    return [json.loads(line) for line in options.records.read_text().splitlines()]


def missing(options: Options) -> list[tuple[str, int]]:
    """Returns name and seed of the rows without a record, those of a seed together."""
    done = {(each["row"], each["seed"]) for each in records_of(options) if each["budget"] == options.budget}
    wanted = [(name, seed) for seed in range(options.seeds) for name in options.rows]
    return [each for each in wanted if each not in done]


def exact(records: Sequence[Mapping[str, Any]], budget: int, row: str) -> dict[int, float]:
    """Returns the share of solved puzzles of a row by seed."""
    return {each["seed"]: each["exact_accuracy"] for each in records if (each["budget"], each["row"]) == (budget, row)}


def table(records: Sequence[Mapping[str, Any]], budget: int, seeds: int) -> Iterator[str]:
    """Yields the lines of the table of a budget."""
    titles = ["row", *(f"seed {seed}" for seed in range(seeds)), "mean", "difference (95 % interval)", "steps"]
    yield f"| {' | '.join(titles)} | TFLOP trained | GFLOP evaluated |"
    yield "|---" * (len(titles) + 2) + "|"
    for name, row in ROWS.items():
        found = exact(records, budget, name)
        shown = [f"{found[seed]:.3f}" if seed in found else "not run" for seed in range(seeds)]
        mean = f"{statistics.mean(found.values()):.3f}" if found else "-"
        costs = [each for each in records if (each["budget"], each["row"]) == (budget, name)]
        cost = ["-", "-", "-"]
        if costs:
            cost = [
                str(costs[0]["steps"]),
                f"{costs[0]['train_flops'] / 1e12:.4f}",
                f"{costs[0]['evaluation_flops'] / 1e9:.1f}",
            ]
        against = difference(found, exact(records, budget, row.against)) if name != row.against else "-"
        if row.against != "baseline" and against != "-":
            against += f" against {row.against}"
        yield f"| {' | '.join([name, *shown, mean, against, *cost])} |"


def difference(found: Mapping[int, float], base: Mapping[int, float]) -> str:
    """Returns the mean difference over the seeds that both have, with the interval of Student's t from three on."""
    both = [found[seed] - base[seed] for seed in sorted(found.keys() & base.keys())]
    if not both:
        return "-"
    mean = statistics.mean(both)
    if len(both) < 3:
        return f"{mean:+.3f} ({len(both)} of the seeds)"
    half = scipy.stats.t.ppf(0.975, len(both) - 1) * statistics.stdev(both) / len(both) ** 0.5
    return f"{mean:+.3f} ({mean - half:+.3f} to {mean + half:+.3f})"


def write_table(options: Options) -> None:
    """Writes the tables of all budgets between the two marks of the page."""
    records = records_of(options)
    lines: list[str] = []
    for budget in sorted({each["budget"] for each in records}):
        lines += ["", f"Budget {budget}:", "", *table(records, budget, options.seeds)]
    before, _, rest = options.page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    options.page.write_text("\n".join([before + BEGIN, *lines, "", END + after]))


def main(options: Options) -> None:
    left = [] if options.table else missing(options)
    for name, seed in left[:1] if options.measure else left:
        job = job_of(name, seed, options)
        began = time.monotonic()
        try:
            train(job, options)
        except subprocess.CalledProcessError as error:
            print(f"{name}, seed {seed}: failed with status {error.returncode}", flush=True)
            continue
        seconds = time.monotonic() - began
        record = record_of(name, job, options, seconds)
        with options.records.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(f"{name}, seed {seed}: {record['exact_accuracy']:.4f} exact in {seconds:.0f} s", flush=True)
        if options.measure:
            print(f"{len(left)} rows of this length need {len(left) * seconds / 3600:.2f} hours")
    if options.page.is_file():
        write_table(options)


if __name__ == "__main__":
    main(tyro.cli(Options))
