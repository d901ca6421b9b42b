"""Is it the same training in bfloat16? JAX beside PyTorch, measured by how far PyTorch's own seeds are apart.

    python -m benchmarks.trajectory [--seeds N] [--svg docs/trajectory_bf16.svg]

The runs of `tests/train_jax/test_trajectory.py` in bfloat16: a hundred steps, ACT carry, exploration, puzzle rows. A
seed is the exploration alone; weights, batches and puzzles are those of every other seed. That is the least that a seed
of PyTorch's can change, and so its narrowest spread; other weights and another order of the puzzles are a row of the
table. For every seed PyTorch in bfloat16, PyTorch in float32 and JAX in bfloat16 explore by the same random numbers.

Rounding first moves a loss a little; then whether a puzzle counts as solved, which is what halting learns, so that the
loss jumps; then who halts, and from there on the batches differ. And where curves cross they are not apart at all. So:

- the distance of two runs is that of the running means of their losses over ten steps, relative to the second one's:
  its mean over the course, and its largest value;
- a run is inside at a step where it lies between the lowest and the highest of PyTorch's *other* seeds: of single
  steps (strict) and of running means. PyTorch's run of the seed is measured the same way and is the yardstick: one of
  N equals is the lowest or the highest, and so outside of the others, at two of N steps.

JAX stays within the spread when it is no further from PyTorch's run of the same seed than two seeds of PyTorch's are
from each other, by the mean (of all seeds, of all pairs) and by the largest value (of any seed, of any pair), and when
its running means are inside no less often than those of PyTorch's worst seed.

That this can fail is the row of JAX without the rule of gradient mode.
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
from markupsafe import Markup

from benchmarks.trajectory_runs import (
    BATCH_SIZE,
    CASES,
    finish,
    found,
    in_dtype,
    job,
    start_jobs,
    tiny_run,
    write_puzzles,
    write_start,
)
from train_jax.report.picture import MARGIN, card
from train_jax.report.plots import Band, Series, plot

SMOOTHED_STEPS = 10
WEIGHTS_SEED = 4
Losses = Float[np.ndarray, "seeds steps"]
Jobs = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Options:
    """Train in JAX and in PyTorch in bfloat16 and print how far they come apart; three minutes on two cores."""

    seeds: int = 6
    """Seeds of exploration."""
    svg: Path | None = None
    """Where to draw the curves."""


class Curves(NamedTuple):
    """The losses of an example in the runs of one architecture, in bfloat16 but for one of them."""

    jax: Losses
    jax_leaky: Losses
    """The first seed alone: the gradient goes through what is computed under `torch.no_grad`."""
    torch: Losses
    torch_float32: Losses
    torch_other: Losses
    """Seeds of the weights and of the order of the puzzles too."""


def trained(cases: Sequence[str], seeds: int, root: Path) -> dict[str, Curves]:
    """All runs, two processes at a time. JAX first: it writes down the random numbers."""
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
    """The runs of one architecture under the names of `Curves`."""
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
    return np.stack([found(job)["loss"] / BATCH_SIZE for job in jobs])


def smoothed(losses: Losses) -> Losses:
    """Running means; the first is that of the first ten steps."""
    return np.lib.stride_tricks.sliding_window_view(losses, SMOOTHED_STEPS, axis=-1).mean(-1)


def apart(ours: Losses, theirs: Losses) -> Losses:
    """How far the running means of each pair of runs are apart at each step, relative to `theirs`."""
    return np.abs(smoothed(ours) / smoothed(theirs) - 1)


def pairs(losses: Losses) -> tuple[Losses, Losses]:
    """Every two seeds, either way round."""
    first, second = zip(*permutations(losses, 2), strict=True)
    return np.stack(first), np.stack(second)


class Distance(NamedTuple):
    """Over the course and all pairs of runs, relative to the loss."""

    mean: float
    largest: float

    def __str__(self) -> str:
        return f"{self.mean:.1%}, {self.largest:.1%}"


def distance(ours: Losses, theirs: Losses) -> Distance:
    difference = apart(ours, theirs)
    return Distance(float(difference.mean()), float(difference.max()))


class Inside(NamedTuple):
    """The share of steps at which a run lies among PyTorch's other seeds: average of all runs, and the least."""

    mean: float
    least: float


def inside(runs: Losses, seeds: Losses) -> Inside:
    """Of each run among all of `seeds` but the one of its own number."""
    others = [np.delete(seeds, number, axis=0) for number in range(len(seeds))]
    shares = [np.mean((o.min(0) <= run) & (run <= o.max(0))) for run, o in zip(runs, others, strict=True)]
    return Inside(float(np.mean(shares)), float(np.min(shares)))


def within_the_spread(curves: Curves) -> bool:
    ours, spread = distance(curves.jax, curves.torch), distance(*pairs(curves.torch))
    jax, torch = (inside(smoothed(runs), smoothed(curves.torch)) for runs in (curves.jax, curves.torch))
    return ours.mean <= spread.mean and ours.largest <= spread.largest and jax.mean >= torch.least


def cells(curves: Curves) -> dict[str, str]:
    """The figures of one architecture by the names of their rows."""
    single = [inside(runs, curves.torch) for runs in (curves.jax, curves.torch)]
    means = [inside(smoothed(runs), smoothed(curves.torch)) for runs in (curves.jax, curves.torch)]
    distances = {
        "**JAX from PyTorch, same seed**": (curves.jax, curves.torch),
        "**two seeds of PyTorch**": pairs(curves.torch),
        "JAX from PyTorch, the first seed alone": (curves.jax[:1], curves.torch[:1]),
        "PyTorch's second seed from its first": (curves.torch[1:2], curves.torch[:1]),
        "PyTorch's float32 from its bfloat16, same seed": (curves.torch_float32, curves.torch),
        "two seeds of PyTorch, other weights and order too": pairs(curves.torch_other),
        "JAX without the rule of gradient mode, first seed": (curves.jax_leaky, curves.torch[:1]),
    }
    return {name: str(distance(*runs)) for name, runs in distances.items()} | {
        "single steps inside, JAX / PyTorch": " / ".join(f"{share.mean:.0%}" for share in single),
        "running means inside, JAX / PyTorch": " / ".join(f"{share.mean:.0%}" for share in means),
        "the same of the worst seed": " / ".join(f"{share.least:.0%}" for share in means),
        "within the spread": "yes" if within_the_spread(curves) else "NO",
    }


def table(ran: dict[str, Curves]) -> str:
    columns = [cells(curves) for curves in ran.values()]
    rows = [["", *ran], ["---"] * (1 + len(ran)), *([name, *(c[name] for c in columns)] for name in columns[0])]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


WIDTH, HEIGHT, TITLE = 430, 230, 58
"""Of a panel, above them; in pixels."""


def losses_panel(case: str, curves: Curves) -> Markup:
    jax, torch = smoothed(curves.jax), smoothed(curves.torch)
    edges = [
        (x, float(low), float(high)) for x, low, high in zip(_steps(torch[0]), torch.min(0), torch.max(0), strict=True)
    ]
    return plot(
        [_series("PyTorch, one seed", torch[0], 1), _series("JAX, the same", jax[0], 2)],
        band=Band(f"PyTorch, {len(torch)} seeds", edges),
        title=f"{case}: loss of an example",
        x_label="steps",
        width=WIDTH,
        height=HEIGHT,
    )


def distances_panel(curves: Curves) -> Markup:
    return plot(
        [
            _series("another seed", 100 * apart(*pairs(curves.torch)).mean(0), 1),
            _series("JAX, same seed", 100 * apart(curves.jax, curves.torch).mean(0), 2),
            _series("float32, same seed", 100 * apart(curves.torch_float32, curves.torch).mean(0), 3),
        ],
        title="distance from PyTorch, % of the loss, mean of all seeds",
        x_label="steps",
        log_y=True,
        width=WIDTH,
        height=HEIGHT,
    )


def _steps(values: np.ndarray) -> range:
    return range(SMOOTHED_STEPS, SMOOTHED_STEPS + len(values))


def _series(name: str, values: np.ndarray, colour: int) -> Series:
    return Series(name, list(zip(_steps(values), values.tolist(), strict=True)), colour)


def picture(ran: dict[str, Curves]) -> str:
    """A standalone SVG, a row for each architecture: the first seed in the spread of all; how far they come apart."""
    panels = [
        (MARGIN + column * (WIDTH + MARGIN), TITLE + row * (HEIGHT + MARGIN), "", panel)
        for row, (case, curves) in enumerate(ran.items())
        for column, panel in enumerate((losses_panel(case, curves), distances_panel(curves)))
    ]
    width, height = 3 * MARGIN + 2 * WIDTH, TITLE + len(ran) * (HEIGHT + MARGIN)
    return card(f"A hundred steps in bfloat16, running means of {SMOOTHED_STEPS}", panels, width, height)


def main(options: Options) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ran = trained(list(CASES), options.seeds, Path(folder))
    print(table(ran))
    if options.svg:
        options.svg.write_text(picture(ran))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
