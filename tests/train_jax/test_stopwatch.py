"""The stopwatch of a run's training time, with a clock that is set by hand."""

import jax.numpy as jnp

from train_jax.runtime.stopwatch import Stopwatch


def test_a_pause_counts_neither_as_training_nor_as_a_step():
    now = [100.0]
    watch = Stopwatch(50.0, lambda: now[0])
    now[0] += 6
    assert watch.seconds == 56 and watch.lap(3) == 2
    now[0] += 4
    with watch.paused(jnp.zeros(())):
        now[0] += 1000
        assert watch.seconds == 60
    now[0] += 4
    assert watch.seconds == 64 and watch.lap(2) == 4
