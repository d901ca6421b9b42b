"""The clock of a run, with a time that is set by hand."""

from types import SimpleNamespace

import jax.numpy as jnp

from train_jax.runtime.clock import Clock
from train_jax.session import Session


def test_a_pause_counts_neither_as_training_nor_as_a_step():
    now = [100.0]
    clock = Clock(now=lambda: now[0])
    clock.earlier_train_seconds = 50.0
    now[0] += 6
    assert clock.train_seconds == 50, "the start"
    clock.switch("steps")
    now[0] += 5
    with clock.doing("data"):
        now[0] += 1
    assert clock.train_seconds == 56 and clock.lap() == {"steps": 5, "compile": 0, "data": 1}
    now[0] += 4
    session = Session(*[SimpleNamespace(clock=clock)] * 6, state=jnp.zeros(()), carry=(), dispatch=range(3))
    session.clock = clock
    with session.pausing("evaluation"):
        now[0] += 1000
        assert clock.train_seconds == 60
    now[0] += 4
    assert clock.train_seconds == 64 and clock.lap() == {"steps": 8, "compile": 0, "data": 0}
    assert clock.spent()[2] == {"steps": 13, "start": 6, "data": 1, "evaluation": 1000}
