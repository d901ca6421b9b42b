"""In bfloat16 the losses stay within the spread of PyTorch's seeds; without the rule of gradient mode they do not."""

import pytest

from benchmarks.trajectory import distance, pairs, trained
from benchmarks.trajectory_runs import CASES

SEEDS = 4


@pytest.mark.slow
def test_within_the_spread_of_pytorchs_seeds(tmp_path):
    """How often a curve is inside the others, which `benchmarks.trajectory` adds, says little of so few seeds."""
    for case, curves in trained(list(CASES), SEEDS, tmp_path).items():
        ours, spread = distance(curves.jax, curves.torch), distance(*pairs(curves.torch))
        leaky = distance(curves.jax_leaky, curves.torch[:1])
        print(f"\n{case}: {ours}; two seeds of PyTorch {spread}; without the rule {leaky}")
        assert 0 < ours.mean <= spread.mean < leaky.mean, case
        assert ours.largest <= spread.largest, case
