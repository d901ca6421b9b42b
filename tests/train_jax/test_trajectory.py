"""A hundred steps of training, PyTorch eager and the train step on two devices: the same losses, the same weights.

Both start from the same weights and see the same batches; exploration uses the same random numbers; sequences stay in
their carry for several steps. Puzzles are easy and learning rates realistic: losses fall by half or more, solved
puzzles halt early, so that the examples in a batch depend on everything before.

In float64 only rounding of 1e-16 remains, and it stays small: the mathematics is the same. A recursion amplifies
rounding, and a sequence that halts a step later changes all batches after it; so in float32, where PyTorch's own
float32 differs from its float64 by more than the tolerance, 8 times that difference is allowed. It is not needed now.

bfloat16 is in `test_trajectory_bf16.py`.
"""

import functools

import numpy as np
import pytest
from support.markers import slow_or_campaign

from campaigns.trajectory_runs import (
    CASES,
    HALT_MAX_STEPS,
    STEPS,
    finish,
    in_dtype,
    job,
    loss_differences,
    start_jobs,
    tiny_run,
    worst_leaf,
    write_puzzles,
    write_start,
)

LOSS = 1e-4
WEIGHTS = 1e-3
SEED = 4
LEAKY = "TRM attention"

pytestmark = [  # 7 or 5 runs of a hundred steps; tests/bridge/test_trm_ladder.py has twenty of each case
    pytest.mark.slow,
    pytest.mark.usefixtures("full_compilation"),
]
every_case = pytest.mark.parametrize("case", slow_or_campaign([LEAKY], [case for case in CASES if case != LEAKY]))


@pytest.fixture(scope="module")
def runs(made_once):
    """`runs(case)`: the results of each run of the case by name."""

    @functools.cache
    def runs_of(case):
        folder = made_once(f"trajectory-{case.replace(' ', '-')}", functools.partial(train, case))
        return {path.stem: dict(np.load(path)) for path in folder.glob("*.npz")}

    return runs_of


def train(case, folder):
    """Every run of the case; JAX first, because it records the random numbers."""
    write_puzzles(folder / "data", size=4, count=64, num_empty=1)
    config = tiny_run(CASES[case], folder / "data")
    double = in_dtype(config, "float64")
    write_start(folder / "start.npz", config, seed=SEED)
    draws, wide_draws = (str(folder / f"draws-{dtype}.npz") for dtype in ("float32", "float64"))
    jax = [job(folder, "jax", config, draws=draws)]
    wide = [job(folder, "jax64", double, draws=wide_draws)]
    torch = [job(folder, "torch", config, draws=draws), job(folder, "reference", double, draws=draws)]
    torch += [job(folder, "torch64", double, draws=wide_draws)]
    if case == LEAKY:
        shifted = str(folder / "draws-shifted.npz")
        jax += [job(folder, "leaky", config, leaky=True)]
        torch += [job(folder, "shifted", config, draws=shifted)]
    for process in [start_jobs("jax", jobs, folder) for jobs in (jax, wide)]:
        finish(process)
    if case == LEAKY:
        np.savez(shifted, **{name: np.roll(array, 1, axis=0) for name, array in np.load(draws).items()})
    finish(start_jobs("torch", torch, folder))


@every_case
def test_float32_is_within_the_tolerance(runs, case):
    ours, theirs, exact = (runs(case)[side] for side in ("jax", "torch", "reference"))
    difference = loss_differences(ours, theirs)
    own = np.maximum.accumulate(loss_differences(exact, theirs))
    print(f"\n{case}: loss differs by {difference.max():.1e}, PyTorch's float32 from its float64 by {own.max():.1e}")
    assert len(difference) == STEPS and (difference <= np.maximum(LOSS, 8 * own)).all()
    for kind in ("params", "ema"):
        (worst, leaf), (own, _) = worst_leaf(ours, theirs, kind), worst_leaf(exact, theirs, kind)
        print(f"{kind}: {worst:.1e} in {leaf}, PyTorch's float32 from its float64 {own:.1e}")
        assert worst <= max(WEIGHTS, 8 * own), leaf


@every_case
def test_puzzle_table(runs, case):
    """Sign SGD turns a gradient that is zero except for rounding into a whole step: few entries may be steps apart."""
    ours = runs(case)["jax"]
    theirs = runs(case)["torch"]
    step = CASES[case].optim.sparse_lr
    ours, theirs = (side[f"{STEPS}/table/weights"] for side in (ours, theirs))
    assert np.median(np.abs(theirs[1:])) > 5 * step, "the rows hardly changed: nothing was compared"
    gaps = np.abs(ours - theirs)
    steps_apart = np.mean(gaps > step)
    rest = gaps[gaps <= step].max()
    print(f"\n{case}: {steps_apart:.2%} of the entries a step apart, the rest {rest:.1e}")
    assert steps_apart <= 0.01
    assert rest <= WEIGHTS * np.abs(theirs).max()


@every_case
def test_float64_differs_by_rounding_only(runs, case):
    ours = runs(case)["jax64"]
    theirs = runs(case)["torch64"]
    print(f"\n{case}: loss differs by {loss_differences(ours, theirs).max():.1e}")
    np.testing.assert_allclose(ours["loss"], theirs["loss"], rtol=1e-9)
    for name in ("count", "steps", "exact_accuracy", "q_halt_accuracy"):
        np.testing.assert_array_equal(ours[name], theirs[name])
    for step in (1, STEPS // 2, STEPS):
        for kind in ("params", "ema", "table"):
            worst, leaf = worst_leaf(ours, theirs, kind, step)
            assert worst <= 1e-8, leaf


@every_case
def test_the_runs_learn_halt_early_and_change_every_weight(runs, case):
    theirs = runs(case)["torch"]
    loss = theirs["loss"]
    late = slice(STEPS // 2, None)
    assert loss[-10:].mean() < 0.5 * loss[:5].mean()
    assert theirs["exact_accuracy"][late].sum() > 30, "too few puzzles were solved"
    assert HALT_MAX_STEPS * theirs["count"].sum() - theirs["steps"].sum() > 50, "too few sequences halted early"
    for name in [n for n in theirs if n.startswith(f"{STEPS}/params/")]:
        first = theirs[name.replace(str(STEPS), "1", 1)]
        last = theirs[name]
        assert np.abs(last - first).max() > 20 * WEIGHTS * np.abs(last).max(), f"{name} hardly changed"


def test_without_gradient_mode_the_losses_differ(runs):
    difference = loss_differences(runs(LEAKY)["leaky"], runs(LEAKY)["torch"])
    assert difference[0] < 1e-5 < 100 * LOSS < difference.max()


def test_with_the_random_numbers_of_another_step_the_losses_differ(runs):
    difference = loss_differences(runs(LEAKY)["jax"], runs(LEAKY)["shifted"])
    assert difference.max() > 100 * LOSS
