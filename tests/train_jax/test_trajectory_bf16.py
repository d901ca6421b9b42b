"""Losses in bfloat16 stay within the spread of PyTorch's seeds; without gradient mode they do not."""

import pytest

from campaigns.trajectory import distance, pairs, train
from campaigns.trajectory_runs import CASES

SEEDS = 4


@pytest.mark.campaign  # seven minutes; its table is in docs/dev/trajectory.md
def test_losses_are_within_the_spread_of_pytorch_seeds(tmp_path):
    """The share of steps inside the other curves, as in `campaigns.trajectory`, means little with so few seeds."""
    for case, curves in train(list(CASES), SEEDS, tmp_path).items():
        ours = distance(curves.jax, curves.torch)
        spread = distance(*pairs(curves.torch))
        leaky = distance(curves.jax_leaky, curves.torch[:1])
        print(f"\n{case}: {ours}; two seeds of PyTorch {spread}; without gradient mode {leaky}")
        assert 0 < ours.mean <= spread.mean < leaky.mean, case
        assert ours.largest <= spread.largest, case
