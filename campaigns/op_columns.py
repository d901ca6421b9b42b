"""The columns of the op survey: how one sample of PyTorch's op database is run and compared in each."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import math
import signal
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

import bridge
from bridge.errors import named_failure
from bridge.parity import Row
from bridge.parity.arbiter import beside_float64, is_beyond
from bridge.parity.report import Leaves, compare, leaf_of, named
from bridge.parity.sides import Steps, TorchSide, copied, in_float64, projection, to_jax, watching, widened

TOLERANCE = {"bfloat16": 4 * torch.finfo(torch.bfloat16).eps}
"""Tolerance of a column, 1e-5 by default."""
SETTINGS: Any = {"steps": 1, "input_gradients": False, "int64": "wrap"}
"""Options of `verify`: inputs with gradients are parameters here, and the integers in the samples are small."""
COLUMNS = ("float32", "bfloat16", "complex64", "forward mode", "torchax")
"""The last one is last: importing torchax changes PyTorch for the whole process."""
PYTORCH_FAILS = "PyTorch itself fails"
RANDOM = "torchax draws other random numbers than PyTorch"


class Call(nn.Module):
    """An op as a module: differentiable inputs are parameters, other tensors are arguments of `forward`.

    `process` is a function of the database that removes undefined parts of the outputs, such as signs of eigenvectors.
    """

    def __init__(self, op: Callable, args: tuple, kwargs: dict, process: Callable = lambda out: out):
        super().__init__()
        self.op = op
        self.process = process
        leaves, self.structure = tree_flatten((args, kwargs))
        self.inputs: list[torch.Tensor] = []
        self.recipe: list[tuple[str, Any]] = []
        self.leaves = nn.ParameterList()
        placed: dict[int, tuple[str, Any]] = {}
        for leaf in leaves:
            if not torch.is_tensor(leaf):
                self.recipe.append(("constant", leaf))
                continue
            if id(leaf) not in placed:
                if leaf.requires_grad:
                    placed[id(leaf)] = ("parameter", len(self.leaves))
                    self.leaves.append(nn.Parameter(leaf.detach().clone()))
                else:
                    placed[id(leaf)] = ("input", len(self.inputs))
                    self.inputs.append(leaf.detach().clone())
            self.recipe.append(placed[id(leaf)])

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.run(self.leaves, inputs)

    def run(self, parameters: Any, inputs: Any) -> Any:
        """Calls the op with these tensors in the place of its own."""
        homes = {"parameter": parameters, "input": inputs}
        leaves = [value if kind == "constant" else homes[kind][value] for kind, value in self.recipe]
        args, kwargs = tree_unflatten(leaves, self.structure)
        out = self.process(self.op(*args, **kwargs))
        # A result that is an input itself, or a subclass of list, is returned as a plain tensor or tuple.
        return tuple(out) if isinstance(out, (tuple, list)) else out

    def on(self, device: str) -> Call:
        """Returns the call with the CPU as an argument replaced, for an op that makes a tensor."""
        self.recipe = [(k, device if k == "constant" and str(v) == "cpu" else v) for k, v in self.recipe]
        return self


def database() -> list[Any]:
    module: Any = importlib.import_module("torch.testing._internal.common_methods_invocations")
    # The original version seeds in the call, which makes the draws constants; `verify` replays PyTorch's instead.
    module.wrapper_set_seed = unseeded
    return module.op_db


def unseeded(op: Callable, *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


def lacking(entry: Any, column: str) -> str | None:
    """Returns the reason why PyTorch has nothing to compare with in a column."""
    if column == "forward mode" and not entry.supports_forward_ad:
        return "PyTorch has no forward mode of it"
    if (dtype := getattr(torch, column, torch.float32)) not in entry.dtypes and column != "float32":
        return f"PyTorch does not have it in {str(dtype).removeprefix('torch.')}"
    return None


def samples(entry: Any, column: str, limit: int) -> Iterator[tuple[tuple, dict, Callable]]:
    """Yields up to `limit` evenly spaced samples; in the column float32 also up to two each of int64 and bool."""
    counts = {getattr(torch, column, torch.float32): limit}
    if column == "float32":
        counts |= {torch.int64: min(limit, 2), torch.bool: min(limit, 2)}
    for dtype, count in counts.items():
        if dtype not in entry.dtypes:
            continue
        torch.manual_seed(0)
        reverse = entry.supports_autograd and dtype in entry.backward_dtypes
        floating = dtype.is_floating_point or dtype.is_complex
        found = list(
            entry.sample_inputs("cpu", dtype, requires_grad=floating and (reverse or column == "forward mode"))
        )
        for i in range(min(count, len(found))):
            sample = found[i * len(found) // min(count, len(found))]
            args = (sample.input, *sample.args)
            kwargs = sample.kwargs
            tensors = [t for t in tree_flatten((args, kwargs))[0] if torch.is_tensor(t)]
            if column == "complex64" or not any(t.is_complex() for t in tensors):
                yield args, kwargs, sample.output_process_fn_grad


def within(row: Row) -> bool:
    """Returns True if the error is within the tolerance. Inputs and cotangents are of order 1, which float32 rounds to
    1e-7, so the scale of a leaf is at least 1e-2.
    """
    return row.error * row.scale <= row.tolerance * max(row.scale, 1e-2)


def reason(column: str, op: Callable, args: tuple, kwargs: dict, process: Callable) -> tuple[str | None, bool]:
    """Returns (reason of the failure or `None`, whether the sample ran under `jit`)."""
    jit = True
    compared = {"forward mode": forward_mode, "torchax": through_torchax}.get(column, verified)
    wide_args, wide_kwargs = tree_map_only(torch.Tensor, widened, (args, kwargs))
    settings = TOLERANCE.get(column, 1e-5), Call(op, wide_args, wide_kwargs, process)
    try:
        try:
            rows = compared(Call(op, args, kwargs, process), *settings, jit=True)
        except Exception as error:
            if not any(text in str(error) for text in ("traced tensor", "depends on data", "racer")):
                raise
            jit = False
            rows = compared(Call(op, args, kwargs, process), *settings, jit=False)
    except Exception as error:
        return f"{type(error).__name__}: {error}".split(" in the module", 1)[0].split("\n", 1)[0][:240], jit
    row = next((r for r in rows if not within(r)), None)
    if row is None:
        return None, jit
    note = f" ({row.note})" if row.note and math.isinf(row.error) else ""
    return f"{row.kind} {row.name} is off by {row.error:.1e} of {row.scale:.1e}{note}", jit


Rows = list[Row] | tuple[Row, ...]


def verified(module: Call, tolerance: float, wide: Call, jit: bool) -> Rows:
    """Compares values and gradients in reverse mode."""
    narrow = tolerance > 1e-4  # no result in 16 bits is near enough to float64 for `verify` to judge by itself
    settings = SETTINGS | {"tolerance": tolerance, "jit": jit}
    report = bridge.verify(module, *module.inputs, **settings, double=wide if narrow else None)
    if not narrow and not all(map(within, report.rows)):
        with contextlib.suppress(RuntimeError):  # the op does not accept one of the float64 inputs
            report = bridge.verify(module, *module.inputs, **settings, double=wide)
    return report.rows


def forward_mode(module: Call, tolerance: float, wide: Call, jit: bool) -> Rows:
    """Compares values and derivatives along one direction, `torch.autograd.forward_ad` with `jax.jvp`."""
    generator = torch.Generator().manual_seed(0)
    tangents = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in module.leaves]

    def in_pytorch(call: Call, draws: list[torch.Tensor] | None = None) -> Leaves:
        with named_failure(PYTORCH_FAILS), watching(draws) as watch, forward_ad.dual_level():
            pairs = zip(call.leaves, tangents, strict=True)
            duals = [forward_ad.make_dual(p.detach().clone(), t.to(p.dtype)) for p, t in pairs]
            leaves, structure = tree_flatten(call.run(duals, [t.clone() for t in call.inputs]))
            found = [forward_ad.unpack_dual(t) if torch.is_tensor(t) else (t, None) for t in leaves]
        recorded[:] = watch.draws
        slopes = {str(i): _slope(*pair) for i, pair in enumerate(found) if _inexact(pair[0])}
        return {"output": named(tree_unflatten([p for p, _ in found], structure)), "tangent": slopes}

    recorded: list[torch.Tensor] = []
    ours = in_pytorch(module)
    fn = bridge.export(module, int64="wrap")
    draws = [to_jax(t) for t in recorded]

    def call(params: Any) -> Any:
        outputs = fn.run(params, fn.buffers, *map(to_jax, module.inputs), rng=draws).outputs
        return jax.tree.map(lambda v: v if isinstance(v, jax.Array) else None, outputs), outputs_of(outputs)

    def derivative(params: Any, slopes: Any) -> Any:
        return jax.jvp(call, (params,), (slopes,))

    given = {f"leaves.{i}": to_jax(t) for i, t in enumerate(tangents)}
    with named_failure("the exported call fails where PyTorch does not, in step 0"):
        (out, flat), (_, slopes) = (jax.jit(derivative) if jit else derivative)(fn.params, given)
    slopes = {str(i): leaf_of(t) for i, t in enumerate(slopes) if jnp.issubdtype(flat[i].dtype, jnp.inexact)}
    theirs = {"output": named(out), "tangent": slopes}
    ours["output"] = {n: leaf for n, leaf in ours["output"].items() if leaf.dtype or n in theirs["output"]}

    def again() -> tuple[Leaves, Leaves]:
        same = list(recorded)
        with in_float64():
            doubles = in_pytorch(wide, list(same))
        return doubles, in_pytorch(module, same)

    return judged([*compare(0, ours, theirs, tolerance)], ours, again)


def judged(rows: list[Row], ours: Leaves, again: Callable[[], tuple[Leaves, Leaves]]) -> Rows:
    """Returns the rows, those beyond tolerance judged by PyTorch's leaves in float64 and in another run."""
    if not any(map(is_beyond, rows)):
        return rows
    try:
        doubles, same = again()
    except Exception as error:
        note = f"PyTorch fails in float64: {error}"
        return [dataclasses.replace(row, note=note) if is_beyond(row) else row for row in rows]
    return [beside_float64(row, ours, doubles, same, math.inf) if is_beyond(row) else row for row in rows]


def outputs_of(outputs: Any) -> list[jax.Array]:
    return [leaf for leaf in tree_flatten(outputs)[0] if isinstance(leaf, jax.Array)]


def _inexact(value: Any) -> bool:
    return torch.is_tensor(value) and (value.is_floating_point() or value.is_complex())


def _slope(primal: torch.Tensor, tangent: torch.Tensor | None) -> Any:
    return leaf_of(torch.zeros_like(primal) if tangent is None else tangent)


@functools.cache
def torchax_modules() -> tuple[Any, Any, Any]:
    """Returns torchax, its `interop` and its `mappings`; imported late, since they change PyTorch."""
    return tuple(importlib.import_module(f"torchax{part}") for part in ("", ".interop", ".ops.mappings"))  # pyright: ignore


def through_torchax(module: Call, tolerance: float, wide: Call, jit: bool) -> Rows:
    """Compares values and gradients in reverse mode of torchax alone, with a new key, on torchax's device."""
    torchax, interop, mappings = torchax_modules()
    steps = Steps((*module.inputs,), {}, None, None, "forward", projection, False)
    side = TorchSide(copied(module), steps)
    with named_failure(PYTORCH_FAILS):
        ours = side.next()
    if side.draws:
        raise NotImplementedError(RANDOM)
    arrays, inputs = ([mappings.t2j(t.detach()) for t in each] for each in (module.leaves, module.inputs))
    call = interop.jax_view(module.on("jax").run)

    def objective(parameters: Any) -> Any:
        with torch.device("jax"), torchax.default_env().override_property(prng=jax.random.key(0)):
            out = call(parameters, inputs)
        return jnp.asarray(projection(out), jnp.float32), out

    gradient = jax.value_and_grad(objective, has_aux=True)
    (_, out), gradients = (jax.jit(gradient) if jit else gradient)(arrays)
    theirs = {
        "output": named(out),
        "gradient": {f"leaves.{i}": leaf_of(jnp.conj(g)) for i, g in enumerate(gradients)},
    }
    ours = {kind: leaves for kind, leaves in ours.items() if kind in theirs}

    def again() -> tuple[Leaves, Leaves]:
        with in_float64():
            doubles = TorchSide(copied(wide), dataclasses.replace(steps, args=(*wide.inputs,))).next()
        return doubles, TorchSide(copied(module), steps).next()

    return judged([*compare(0, ours, theirs, tolerance)], ours, again)


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises `TimeoutError` in the code under it after this time."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"the sample took more than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
