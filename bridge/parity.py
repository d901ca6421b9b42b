"""Run a module in PyTorch and through the bridge, compare everything, name the worst leaf first."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from bridge.arrays import array_of
from bridge.export import export
from bridge.generators import draw, generator_of, own_default_generator
from bridge.internals import DispatchMode
from bridge.operations import is_draw
from bridge.pytrees import convert

Advance = Callable[[Any, tuple, dict], tuple[tuple, dict]]
"""(outputs, args, kwargs) of one step -> args and kwargs of the next; written for either side's arrays."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One compared leaf at one step."""

    kind: str
    """`output`, `gradient` or `buffer`; `parameter` only where one was written and the two sides differ."""
    name: str
    step: int
    error: float
    """max |JAX - PyTorch|, relative to `scale`."""
    scale: float
    """The leaf's largest magnitude in PyTorch; not below 1e-3 of the largest gradient (or of 1, for outputs)."""
    tolerance: float


@dataclasses.dataclass(frozen=True)
class ParityReport:
    """What `verify` found. `str()` is the table, worst leaf first."""

    rows: tuple[Row, ...]

    @property
    def ok(self) -> bool:
        return all(row.error <= row.tolerance for row in self.rows)

    @property
    def worst(self) -> Row:
        return self.rows[0]

    def __str__(self) -> str:
        lines = [f"{'error':>9}  {'tolerance':>9}  {'scale':>9}  step  leaf"]
        for row in self.rows:
            mark = " " if row.error <= row.tolerance else "!"
            lines.append(
                f"{row.error:9.1e}{mark} {row.tolerance:9.1e}  {row.scale:9.1e}  {row.step:4d}  {row.kind} {row.name}"
            )
        broken = sum(row.error > row.tolerance for row in self.rows)
        lines.append(f"{len(self.rows)} leaves compared, {broken} beyond tolerance")
        return "\n".join(lines)

    def to_json(self) -> str:
        return json.dumps({"ok": self.ok, "rows": [dataclasses.asdict(row) for row in self.rows]}, indent=1)


def verify(
    module: nn.Module,
    *args: Any,
    steps: int = 1,
    advance: Advance | None = None,
    loss: Callable[[Any], Any] | None = None,
    train: bool | None = None,
    method: str = "forward",
    tolerance: float = 1e-4,
    double: nn.Module | None = None,
    jit: bool = True,
    **kwargs: Any,
) -> ParityReport:
    """Compare outputs, every gradient leaf and every buffer over `steps` calls.

    `args` and `kwargs` hold torch tensors. The gradient is that of `loss(outputs)`, by default of a fixed random
    projection of all outputs that carry one. Buffers and written parameters go from step to step; `advance` makes the
    next step's inputs (a carry, say) from the outputs. Random draws are PyTorch's, replayed in JAX. With `double`, the
    same module built in float64, a leaf may differ by 8 times what PyTorch's own float32 differs from float64, where
    that is more than `tolerance`. The module itself is not changed.
    """
    torch_side = _TorchSide(module, train, method, loss)
    wide_side = None if double is None else _TorchSide(double, train, method, loss)
    jax_side = _JaxSide(module, train, method, loss, jit)
    torch_call = wide_call = (args, kwargs)
    jax_call: tuple[tuple, dict] = convert((args, kwargs), _to_jax)
    rows: list[Row] = []
    for step in range(steps):
        outputs, ours = torch_side.step(*torch_call)
        jax_outputs, theirs = jax_side.step(*jax_call, draws=torch_side.draws)
        wide = None
        if wide_side is not None:
            wide_outputs, wide = wide_side.step(*wide_call, draws=torch_side.draws)
            wide_call = advance(wide_outputs, *wide_call) if advance else wide_call
        rows += _compare(step, ours, theirs, wide, tolerance)
        if advance is not None:
            torch_call, jax_call = advance(outputs, *torch_call), advance(jax_outputs, *jax_call)
    return ParityReport(tuple(sorted(rows, key=lambda row: row.tolerance - row.error)))


_Leaves = dict[str, dict[str, np.ndarray]]
"""kind -> name -> values"""


class _TorchSide:
    def __init__(self, module: nn.Module, train: bool | None, method: str, loss: Callable | None):
        self.module = copy.deepcopy(module)
        if train is not None:
            self.module.train(train)
        self.method, self.loss, self.draws = method, loss, []
        # As they are before the first call: a buffer that is assigned a result requires grad after it.
        self._leaves = {n: t for n, t in self._state().items() if t.requires_grad}

    def step(self, args: tuple, kwargs: dict, draws: list | None = None) -> tuple[Any, _Leaves]:
        for tensor in self._leaves.values():
            tensor.grad = None
        with _drawing(draws) as self.draws:
            outputs = getattr(self.module, self.method)(*args, **kwargs)
        objective = self.loss(outputs) if self.loss else _projection(outputs, torch.is_tensor, _torch_weigh)
        if torch.is_tensor(objective) and objective.requires_grad:
            objective.backward()
        gradients = {n: (torch.zeros_like(t) if t.grad is None else t.grad) for n, t in self._leaves.items()}
        state = self._state()  # after the call: a buffer may have been assigned anew
        leaves = {
            "output": _named(outputs),
            "gradient": _named(gradients),
            "buffer": _named({n: t for n, t in state.items() if n not in gradients}),
            "parameter": _named({n: t for n, t in state.items() if n in gradients}),
        }
        return convert(outputs, lambda v: v.detach() if torch.is_tensor(v) else v), leaves

    def _state(self) -> dict[str, torch.Tensor]:
        return dict(self.module.named_parameters()) | dict(self.module.named_buffers())


class _JaxSide:
    def __init__(self, module: nn.Module, train: bool | None, method: str, loss: Callable | None, jit: bool):
        fn = export(module)
        self.params, self.buffers = fn.params, fn.buffers

        def objective(params, buffers, draws, args, kwargs):
            result = fn.run(params, buffers, *args, rng=draws, train=train, method=method, **kwargs)
            value = loss(result.outputs) if loss else _projection(result.outputs, _is_jax, _jax_weigh)
            return jnp.asarray(value, jnp.result_type(float)), result

        gradient = jax.value_and_grad(objective, has_aux=True)
        self.gradient = _jit_arrays(gradient) if jit else gradient

    def step(self, args: tuple, kwargs: dict, draws: list) -> tuple[Any, _Leaves]:
        numbers = [array_of(draw) for draw in draws]
        (_, result), gradients = self.gradient(self.params, self.buffers, numbers, args, kwargs)
        outputs, self.buffers, self.params = result
        leaves = {
            "output": _named(outputs),
            "gradient": _named(gradients),
            "buffer": _named(self.buffers),
            "parameter": _named(self.params),
        }
        return outputs, leaves


def _jit_arrays(function: Callable) -> Callable:
    """`jax.jit` over the arrays; everything else (numbers, texts, `None`) stays as it is in Python.

    Compiled again only where something else than the arrays changed since the last call.
    """
    traced: Callable = function
    known: Any = None

    def call(params, buffers, draws, args, kwargs):
        nonlocal traced, known
        leaves, structure = jax.tree.flatten((args, kwargs))
        slots = [i for i, leaf in enumerate(leaves) if _is_jax(leaf)]
        fixed = [None if _is_jax(leaf) else (type(leaf), leaf) for leaf in leaves]

        def filled(params, buffers, draws, arrays):
            given = list(leaves)
            for slot, array in zip(slots, arrays, strict=True):
                given[slot] = array
            return function(params, buffers, draws, *jax.tree.unflatten(structure, given))

        if known != (structure, fixed):
            traced, known = jax.jit(filled), (structure, fixed)
        return traced(params, buffers, draws, [leaves[i] for i in slots])

    return call


@contextlib.contextmanager
def _drawing(given: list[torch.Tensor] | None) -> Iterator[list[torch.Tensor]]:
    """Record what PyTorch draws, or replay `given`."""
    mode = _Draws(given)
    with own_default_generator(), mode:
        yield mode.draws


class _Draws(DispatchMode):
    def __init__(self, given: list[torch.Tensor] | None):
        super().__init__()
        self.draws = [] if given is None else list(given)
        self._replay = None if given is None else iter(given)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        generator = generator_of((kwargs or {}).get("generator")) if is_draw(func) else None
        if generator is not None:  # the same constants on the other side
            return draw(generator, func, args, kwargs or {})
        out = func(*args, **(kwargs or {}))
        if is_draw(func):
            if self._replay is None:
                self.draws.append(out.detach().clone())
            else:
                out.copy_(next(self._replay))
        return out


def _compare(step: int, ours: _Leaves, theirs: _Leaves, wide: _Leaves | None, tolerance: float) -> Iterator[Row]:
    largest = max(map(_magnitude, ours["gradient"].values()), default=0.0)
    for kind, leaves in ours.items():
        floor = 1e-3 * largest if kind == "gradient" else 1e-3
        if set(leaves) != set(theirs[kind]):
            raise AssertionError(f"{kind}s differ in name: {sorted(set(leaves) ^ set(theirs[kind]))}")
        for name, expected in leaves.items():
            found = theirs[kind][name]
            scale = max(_magnitude(expected), floor, 1e-30)
            error = _difference(found, expected) / scale
            if kind == "parameter" and not error:
                continue
            allowed = tolerance
            if wide is not None:
                allowed = max(tolerance, 8 * _difference(wide[kind][name], expected) / scale)
            yield Row(kind, name, step, error, scale, allowed)


def _magnitude(a: np.ndarray) -> float:
    """Of the finite entries: an infinity that both sides have shall hide no difference beside it."""
    return float(np.abs(a, where=np.isfinite(a), out=np.zeros_like(a)).max(initial=0.0))


def _difference(a: np.ndarray, b: np.ndarray) -> float:
    if a.shape != b.shape:
        return float("inf")
    if not a.size:
        return 0.0
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        gap = np.where(same, 0.0, np.abs(a - b))
    return float(np.where(np.isnan(gap), np.inf, gap).max())


def _named(tree: Any) -> dict[str, np.ndarray]:
    if isinstance(tree, dict) and all(isinstance(k, str) for k in tree):
        flat = [(k, v) for key, value in tree.items() for k, v in _flatten(value, key)]
    else:
        flat = list(_flatten(tree, ""))
    return {name or "value": _numbers(leaf) for name, leaf in flat if _is_number(leaf)}


def _flatten(tree: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    tree = convert(tree, lambda v: v)
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        yield prefix + jax.tree_util.keystr(path), leaf


def _numbers(leaf: Any) -> np.ndarray:
    if torch.is_tensor(leaf):
        leaf = leaf.detach().to(torch.float64)
        return leaf.numpy()
    leaf = jnp.asarray(leaf)
    return np.asarray(leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf).astype(np.float64)


def _to_jax(value: Any) -> Any:
    return array_of(value) if torch.is_tensor(value) else value


def _is_number(value: Any) -> bool:
    return torch.is_tensor(value) or _is_jax(value) or isinstance(value, (bool, int, float))


def _is_jax(value: Any) -> bool:
    return isinstance(value, (jax.Array, np.ndarray))


def _projection(outputs: Any, is_leaf: Callable[[Any], bool], weigh: Callable) -> Any:
    """A scalar that feels every element of every output: the default objective."""
    leaves = [leaf for leaf in jax.tree.leaves(convert(outputs, lambda v: v)) if is_leaf(leaf)]
    rng = np.random.default_rng(0)
    total: Any = 0.0
    for leaf in leaves:
        weights = rng.normal(size=tuple(leaf.shape)) / max(leaf.size if _is_jax(leaf) else leaf.numel(), 1) ** 0.5
        total = total + weigh(leaf, weights)
    return total


def _torch_weigh(leaf: torch.Tensor, weights: np.ndarray) -> Any:
    if not leaf.requires_grad:
        return 0.0
    return (leaf * torch.as_tensor(weights, dtype=leaf.dtype)).sum()


def _jax_weigh(leaf: jax.Array, weights: np.ndarray) -> Any:
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return 0.0
    return (leaf * jnp.asarray(weights, leaf.dtype)).sum()
