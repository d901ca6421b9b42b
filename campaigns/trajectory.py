"""Training in bfloat16: compares the difference between JAX and PyTorch with the differences between PyTorch's seeds.

    python -m campaigns.trajectory [--seeds N] [--svg docs/dev/trajectory_bf16.svg]

The runs of `tests/train_jax/test_trajectory.py` in bfloat16: a hundred steps, ACT carry, exploration, puzzle rows.
Seeds only differ in exploration; weights, batches and puzzles are the same. This is the smallest possible effect of a
seed in PyTorch, and so the narrowest spread. One row of the table has seeds that also change weights and puzzle order.
For every seed, PyTorch in bfloat16, PyTorch in float32 and JAX in bfloat16 explore with the same random numbers.

Rounding first changes the loss slightly. Then it changes whether a puzzle is solved, which is the target of the halting
head, so that the loss jumps. Then it changes which sequences halt, and after that the batches differ. Therefore:

- the distance of two runs is computed from running means of their losses over ten steps, relative to the second run:
  the mean over all steps, and the largest value;
- a run is inside at a step if it is between the lowest and the highest of PyTorch's *other* seeds, for single steps
  (strict) and for running means. PyTorch's run of the same seed is measured in the same way for comparison: one of N
  equivalent runs is the lowest or the highest, and so outside, at two of N steps.

JAX is within the spread if its distance from PyTorch's run of the same seed is at most the distance between two seeds
of PyTorch, in the mean (over all seeds, over all pairs) and in the largest value (of any seed, of any pair), and if its
running means are inside at least as often as those of PyTorch's worst seed.

The row of JAX without the rule of gradient mode shows that this test can fail.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tyro
from jaxtyping import Float

from campaigns.trajectory_runs import (
    BATCH_SIZE,
    CASES,
    finish,
    in_dtype,
    job,
    load_results,
    start_jobs,
    tiny_run,
    write_puzzles,
    write_start,
)

SMOOTHED_STEPS = 10
WEIGHTS_SEED = 4
Losses = Float[np.ndarray, "seeds steps"]
Jobs = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Options:
    """Train in JAX and in PyTorch in bfloat16 and print their distances; three minutes on two cores."""

    seeds: int = 6
    """Seeds of exploration."""
    svg: Path | None = None
    """File for a plot of the curves."""


class Curves(NamedTuple):
    """The loss per example in the runs of one architecture, in bfloat16 unless the name says otherwise."""

    jax: Losses
    jax_leaky: Losses
    """The first seed only, with gradients through operations under `torch.no_grad`."""
    torch: Losses
    torch_float32: Losses
    torch_other: Losses
    """Seeds also change the weights and the order of the puzzles."""


def train(cases: Sequence[str], seeds: int, root: Path) -> dict[str, Curves]:
    """Runs all jobs, two processes at a time. JAX runs first, because it records the random numbers."""
    write_puzzles(root / "data", size=4, count=64, num_empty=1)
    jobs = {case: _jobs(case, seeds, root) for case in cases}
    for side in ("jax", "torch"):
        every = [
            job for kinds in jobs.values() for kind, listed in kinds.items() if kind.startswith(side) for job in listed
        ]
        for process in [start_jobs(side, half, root) for half in (every[::2], every[1::2]) if half]:
            finish(process)
    return {case: Curves(**{kind: _losses(listed) for kind, listed in kinds.items()}) for case, kinds in jobs.items()}


def _jobs(case: str, seeds: int, root: Path) -> dict[str, Jobs]:
    """Returns the jobs of one architecture by the names of `Curves`."""
    folder = root / case.replace(" ", "-")
    config = in_dtype(tiny_run(CASES[case], root / "data"), "bfloat16")
    exact = in_dtype(config, "float32")
    jobs: dict[str, Jobs] = {kind: [] for kind in Curves._fields}
    for seed in range(seeds):
        other = folder / f"other-{seed}"
        other.mkdir(parents=True)
        write_start(other / "start.npz", config, seed=WEIGHTS_SEED + seed)
        jobs["torch_other"].append(job(other, "torch", dataclasses.replace(config, seed=seed), seed=seed))
        same = {"seed": seed, "draws": str(folder / f"draws-{seed}.npz")}
        jobs["jax"].append(job(folder, f"jax-{seed}", config, **same))
        jobs["torch"].append(job(folder, f"torch-{seed}", config, **same))
        jobs["torch_float32"].append(job(folder, f"float32-{seed}", exact, **same))
    jobs["jax_leaky"].append(job(folder, "leaky", config, leaky=True))
    write_start(folder / "start.npz", config, seed=WEIGHTS_SEED)
    return jobs


def _losses(jobs: Jobs) -> Losses:
    return np.stack([load_results(job)["loss"] / BATCH_SIZE for job in jobs])


def smoothed(losses: Losses) -> Losses:
    """Returns running means; the first one is the mean of the first ten steps."""
    return np.lib.stride_tricks.sliding_window_view(losses, SMOOTHED_STEPS, axis=-1).mean(-1)


def relative_distance(ours: Losses, theirs: Losses) -> Losses:
    """Returns the distance of the running means of each pair of runs at each step, relative to `theirs`."""
    return np.abs(smoothed(ours) / smoothed(theirs) - 1)


def pairs(losses: Losses) -> tuple[Losses, Losses]:
    """Returns all ordered pairs of two seeds."""
    first, second = zip(*permutations(losses, 2), strict=True)
    return np.stack(first), np.stack(second)


class Distance(NamedTuple):
    """The distance over all steps and all pairs of runs, relative to the loss."""

    mean: float
    largest: float

    def __str__(self) -> str:
        return f"{self.mean:.1%}, {self.largest:.1%}"


def distance(ours: Losses, theirs: Losses) -> Distance:
    difference = relative_distance(ours, theirs)
    return Distance(float(difference.mean()), float(difference.max()))


class Inside(NamedTuple):
    """The share of steps at which a run is inside PyTorch's other seeds: mean and minimum over the runs."""

    mean: float
    least: float


def inside(runs: Losses, seeds: Losses) -> Inside:
    """Compares each run with all `seeds` except the one with the same index."""
    others = [np.delete(seeds, number, axis=0) for number in range(len(seeds))]
    shares = [np.mean((o.min(0) <= run) & (run <= o.max(0))) for run, o in zip(runs, others, strict=True)]
    return Inside(float(np.mean(shares)), float(np.min(shares)))


def within_the_spread(curves: Curves) -> bool:
    ours = distance(curves.jax, curves.torch)
    spread = distance(*pairs(curves.torch))
    jax, torch = (inside(smoothed(runs), smoothed(curves.torch)) for runs in (curves.jax, curves.torch))
    return ours.mean <= spread.mean and ours.largest <= spread.largest and jax.mean >= torch.least


def cells(curves: Curves) -> dict[str, str]:
    """Returns the cells of one architecture by the names of their rows."""
    single = [inside(runs, curves.torch) for runs in (curves.jax, curves.torch)]
    means = [inside(smoothed(runs), smoothed(curves.torch)) for runs in (curves.jax, curves.torch)]
    distances = {
        "**JAX from PyTorch, same seed**": (curves.jax, curves.torch),
        "**two seeds of PyTorch**": pairs(curves.torch),
        "JAX from PyTorch, the first seed alone": (curves.jax[:1], curves.torch[:1]),
        "PyTorch's second seed from its first": (curves.torch[1:2], curves.torch[:1]),
        "PyTorch's float32 from its bfloat16, same seed": (curves.torch_float32, curves.torch),
        "two seeds of PyTorch, other weights and order too": pairs(curves.torch_other),
        "JAX without gradient mode, first seed": (curves.jax_leaky, curves.torch[:1]),
    }
    return {name: str(distance(*runs)) for name, runs in distances.items()} | {
        "single steps inside, JAX / PyTorch": " / ".join(f"{share.mean:.0%}" for share in single),
        "running means inside, JAX / PyTorch": " / ".join(f"{share.mean:.0%}" for share in means),
        "the same of the worst seed": " / ".join(f"{share.least:.0%}" for share in means),
        "within the spread": "yes" if within_the_spread(curves) else "NO",
    }


def table(curves_by_case: dict[str, Curves]) -> str:
    columns = [cells(curves) for curves in curves_by_case.values()]
    rows = [
        ["", *curves_by_case],
        ["---"] * (1 + len(curves_by_case)),
        *([name, *(c[name] for c in columns)] for name in columns[0]),
    ]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main(options: Options) -> None:
    with tempfile.TemporaryDirectory() as folder:
        curves_by_case = train(list(CASES), options.seeds, Path(folder))
    print(table(curves_by_case))
    if options.svg:
        from campaigns.trajectory_plot import picture

        options.svg.write_text(picture(curves_by_case))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
