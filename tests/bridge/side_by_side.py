"""A row of the table of meanings as calls in PyTorch, and as one JAX function for a transformation to take.

Both sides make the same draws (PyTorch's, replayed) and have the same objective, a projection of all outputs. Compared
are outputs, buffers, parameters that the module wrote, and the gradients of parameters and of inputs.
"""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from rows_registry import Row

import bridge
from bridge.parity import ParityReport
from bridge.parity.report import Leaves, compare, leaf_of, named
from bridge.parity.sides import gradient_leaf, projection, watching
from bridge.tensor.arrays import array_of
from bridge.tensor.pytrees import convert


class Reference(NamedTuple):
    """PyTorch's results of several calls in a row on one module, and of one backward through all of them."""

    leaves: Leaves
    draws: list[list[torch.Tensor]]
    """The draws of each call."""


def in_pytorch(row: Row, train: bool, seeds: range) -> Reference:
    """Makes one call for each seed, on one module; the objective is the sum of all."""
    module = copy.deepcopy(row.build()).train(train)
    trained = {n: t for n, t in state_of(module).items() if t.requires_grad}
    outputs = {}
    inputs = {}
    draws = []
    total = torch.zeros(())
    for i, seed in enumerate(seeds):
        args, kwargs = convert(row.example(seed), lambda v: leaf(v, row.input_gradients))
        torch.manual_seed(seed)
        with watching(None) as watch:
            out = getattr(module, row.method)(*args, **kwargs)
        value = projection(out)
        if row.spans_calls:
            total = total + value
        else:  # gradients add up; PyTorch would not go back past a leaf that a later call has filled
            value.backward()
        outputs[f"call {i}"], inputs[f"input {i}"] = out, tensors_of((args, kwargs))
        draws.append(watch.draws)
    if row.spans_calls:
        total.backward()
    state = state_of(module)
    leaves = {
        "output": named(outputs),
        "gradient": {n: gradient_leaf(t) for n, t in trained.items()},
        "input gradient": {},
        "buffer": {n: leaf_of(t) for n, t in state.items() if n not in trained},
        "parameter": named({n: t for n, t in state.items() if n in trained}),
    }
    if row.input_gradients:
        leaves["input gradient"] = {f"{n}.{i}": gradient_leaf(t) for n, ts in inputs.items() for i, t in enumerate(ts)}
    return Reference(leaves, draws)


def state_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


def leaf(value: Any, requires_grad: bool) -> Any:
    return value.clone().requires_grad_(requires_grad) if torch.is_tensor(value) else value


def tensors_of(tree: Any) -> list:
    return [v for v in jax.tree.leaves(convert(tree, lambda v: v)) if torch.is_tensor(v)]


def stacked(values: list[list[torch.Tensor]]) -> list[jax.Array]:
    """Returns one array for each position, with the calls along a new first axis."""
    return [jnp.stack([array_of(v) for v in column]) for column in zip(*values, strict=True)]


def inputs_of(row: Row, seeds: range) -> list[jax.Array]:
    return stacked([tensors_of(row.example(seed)) for seed in seeds])


def objective_of(row: Row, train: bool) -> tuple[bridge.Functional, Callable]:
    """Returns the exported row, and (params, inputs, buffers, draws) -> objective, result."""
    fn = bridge.export(row.build())
    tree = convert(row.example(), lambda v: v)
    leaves, structure = jax.tree.flatten(tree)

    def objective(params, inputs, buffers, draws):
        given = iter(inputs)
        args, kwargs = structure.unflatten([next(given) if torch.is_tensor(v) else v for v in leaves])
        result = fn.run(params, buffers, *args, rng=draws, train=train, method=row.method, **kwargs)
        value = projection(result.outputs)
        return jnp.asarray(value, jnp.float32), result

    return fn, objective


def in_scan(objective: Callable) -> Callable:
    """Returns the sum over calls in a row, which hand buffers and written parameters on."""

    def total(params, inputs, buffers, draws):
        def step(state, given):
            value, result = objective(state[0], given[0], state[1], given[1])
            return (result.params, result.buffers), (value, result.outputs)

        (params, buffers), (values, outputs) = jax.lax.scan(step, (params, buffers), (inputs, draws))
        return values.sum(), bridge.Result(outputs, buffers, params)

    return total


def gradient_of(objective: Callable) -> Callable:
    return jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)


def compiled(function: Callable, *args: Any) -> Callable:
    """`jax.jit`, compiled once for all modes of a row whose programs are letter for letter the same."""
    traced = jax.jit(function).trace(*args)
    structure = jax.tree.structure((args, traced.out_info))
    program = str(traced.jaxpr), structure, *(np.asarray(c).tobytes() for c in traced.jaxpr.consts)
    if program not in _COMPILED:
        _COMPILED[program] = traced.lower().compile()
    return _COMPILED[program]


_COMPILED: dict[tuple, Callable] = {}


def leaves_of(row: Row, outputs: list, result: bridge.Result, gradients: tuple, inputs: list) -> dict:
    """Returns the leaves like `Reference.leaves`. `outputs` and the gradients of `inputs`: one for each call."""
    kinds = {
        "output": {f"call {i}": out for i, out in enumerate(outputs)},
        "gradient": gradients[0],
        "input gradient": {f"input {i}": g for i, g in enumerate(inputs)} if row.input_gradients else {},
        "buffer": result.buffers,
        "parameter": result.params,
    }
    return {kind: named(leaves) for kind, leaves in kinds.items()}


def report(row: Row, references: list[Reference], arrays: list[dict]) -> ParityReport:
    rows = []
    for i, (reference, leaves) in enumerate(zip(references, arrays, strict=True)):
        rows += compare(i, reference.leaves, leaves, row.tolerance)
    return ParityReport.of(rows)


def call(tree: Any, i: int) -> Any:
    return jax.tree.map(lambda a: np.asarray(a)[i, ...], tree)
