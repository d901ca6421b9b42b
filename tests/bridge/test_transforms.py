"""Every row of the table of meanings under `checkpoint`, `vmap` and `scan`, in both modes, against PyTorch eager.

By default each row runs under one of them in training mode; the slow tests have the rest. `test_meaning.py` has `jit`
and `grad`; `test_replicas.py` has `pmap`.
"""

import itertools

import jax
import pytest
from rows import ROWS
from side_by_side import call, compiled, gradient_of, in_pytorch, in_scan, inputs_of, leaves_of, objective_of, stacked
from side_by_side import report as compare
from support.markers import slow_or_campaign, slow_unless


def under_checkpoint(row, train):
    """Makes the forward pass twice, once for the values and once for the gradients."""
    reference = in_pytorch(row, train, range(1, 2))
    fn, objective = objective_of(row, train)
    inputs, draws = call((inputs_of(row, range(1, 2)), stacked(reference.draws)), 0)
    args = fn.params, inputs, fn.buffers, draws
    (_, result), gradients = compiled(gradient_of(jax.checkpoint(objective)), *args)(*args)
    return compare(row, [reference], [leaves_of(row, [result.outputs], result, gradients, [gradients[1]])])


def under_vmap(row, train):
    """Compares a batch of examples with a loop over them: each has outputs, buffers and gradients of its own."""
    references = [in_pytorch(row, train, range(seed, seed + 1)) for seed in (1, 2)]
    fn, objective = objective_of(row, train)
    args = fn.params, inputs_of(row, range(1, 3)), fn.buffers, stacked([r.draws[0] for r in references])
    gradient = jax.vmap(gradient_of(objective), in_axes=(None, 0, None, 0))
    (_, results), gradients = compiled(gradient, *args)(*args)
    per_example = []
    for i in range(2):
        result, slopes = call((results, gradients), i)
        per_example.append(leaves_of(row, [result.outputs], result, slopes, [slopes[1]]))
    return compare(row, references, per_example)


def under_scan(row, train):
    """Three calls that hand buffers on, and the gradient of the sum of their objectives."""
    seeds = range(1, 4)
    reference = in_pytorch(row, train, seeds)
    fn, objective = objective_of(row, train)
    args = fn.params, inputs_of(row, seeds), fn.buffers, stacked(reference.draws)
    (_, result), gradients = compiled(gradient_of(in_scan(objective)), *args)(*args)
    outputs, inputs = ([call(tree, i) for i in range(3)] for tree in (result.outputs, gradients[1]))
    return compare(row, [reference], [leaves_of(row, outputs, result, gradients, inputs)])


TRANSFORMATIONS = [under_checkpoint, under_vmap, under_scan]


def by_turns(case):
    """Chooses one transformation for every second row, in turns."""
    under, name, _ = case
    turn, is_odd = divmod(list(ROWS).index(name), 2)
    return not is_odd and under is TRANSFORMATIONS[turn % len(TRANSFORMATIONS)]


@pytest.mark.parametrize(
    "case",
    [
        *slow_unless(by_turns, itertools.product(TRANSFORMATIONS, ROWS, (True,))),
        *slow_or_campaign([], itertools.product(TRANSFORMATIONS, ROWS, (False,))),
    ],
    ids=lambda case: f"{case[0].__name__}-{case[1]}-{'train' if case[2] else 'eval'}",
)
def test_row(case):
    under, name, train = case
    report = under(ROWS[name], train)
    assert report.ok, f"\n{report}"
