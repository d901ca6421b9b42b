"""Compares torchax alone and the bridge with PyTorch for each row of the table of semantics; prints a Markdown table.

    python -m campaigns.meanings

The rows are those of the tests (`tests/bridge/rows_*.py`), in training mode, one call, differentiated by `jax.grad`.
An error is the largest difference from PyTorch eager, relative to the largest entry of the leaf, or for gradients to
the largest entry of all gradients. A missing gradient or buffer counts as 1. torchax runs in a separate process, in its
most favourable form: `JittableModule.functional_call` with a new key, new tensors on its device, and buffers read back.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torchax
from torchax.interop import JittableModule, jax_view, torch_view

import bridge

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "bridge"))
rows = importlib.import_module("rows")
ROWS = rows.ROWS

Leaves = dict[str, np.ndarray]
Errors = dict[str, float]
"""Maps `output`, `gradient` and `buffer` to the largest error of its leaves."""
ALONE = "--torchax-alone"
KINDS = ("output", "gradient", "buffer")
EQUAL = "equal"


def tensors(value: Any) -> Iterator[Any]:
    """Yields the tensors in the result of a module."""
    if torch.is_tensor(value):
        yield value
    elif dataclasses.is_dataclass(value):
        yield from (t for f in dataclasses.fields(value) for t in tensors(getattr(value, f.name)))
    elif isinstance(value, (dict, list, tuple)):
        yield from (t for v in (value.values() if isinstance(value, dict) else value) for t in tensors(v))


def mapped(value: Any, leaf: Callable) -> Any:
    """Returns the same containers with other tensors or arrays."""
    if torch.is_tensor(value) or isinstance(value, jax.Array):
        return leaf(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{f.name: mapped(getattr(value, f.name), leaf) for f in dataclasses.fields(value)})
    if isinstance(value, dict):
        return {k: mapped(v, leaf) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        items = [mapped(v, leaf) for v in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def weights(shapes: list[tuple[int, ...]]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape) for shape in shapes]


def in_pytorch(row: Any, seed: int = 2) -> dict[str, Leaves]:
    module = copy.deepcopy(row.build()).train()
    state = dict(module.named_parameters()) | dict(module.named_buffers())
    trained = {n: t for n, t in state.items() if t.requires_grad}
    args, kwargs = row.example()
    torch.manual_seed(seed)
    out = list(tensors(getattr(module, row.method)(*args, **kwargs)))
    pairs = zip(out, weights([tuple(t.shape) for t in out]), strict=True)
    total: Any = sum((t * torch.as_tensor(w, dtype=t.dtype)).sum() for t, w in pairs if t.requires_grad)
    if torch.is_tensor(total):
        total.backward()
    return {
        "output": numbered(enumerate(out)),
        "gradient": numbered((n, torch.zeros_like(t) if t.grad is None else t.grad) for n, t in trained.items()),
        "buffer": numbered((n, t) for n, t in module.named_buffers() if n not in trained),
    }


def through_torchax(row: Any) -> dict[str, Leaves]:
    env = torchax.default_env()
    module = row.build().train()
    given = mapped(row.example(), lambda t: jnp.asarray(t.numpy()))
    wrapped = JittableModule(module)
    params, buffers = jax_view(env.to_xla((wrapped.params, wrapped.buffers)))  # pyright: ignore

    def loss(params: Any) -> Any:
        with env, env.override_property(prng=jax.random.key(0)), torch.device("jax"):
            state = torch_view(params), torch_view(buffers)
            args, kwargs = mapped(given, torch_view)
            out = wrapped.functional_call(row.method, *state, *args, **kwargs)
            arrays: list = [jax_view(t) for t in tensors(out)]
            pairs = zip(arrays, weights([a.shape for a in arrays]), strict=True)
            total = sum((a * jnp.asarray(w, a.dtype)).sum() for a, w in pairs if jnp.issubdtype(a.dtype, jnp.floating))
            return jnp.asarray(total, jnp.float32), (arrays, jax_view(state[1]))

    gradients, (out, written) = jax.grad(loss, has_aux=True)(params)
    return {
        "output": numbered(enumerate(out)),
        "gradient": numbered(gradients.items()),
        "buffer": numbered(written.items()),
    }


def numbered(leaves: Iterable[tuple[Any, Any]]) -> Leaves:
    doubles = ((str(n), v.detach().double() if torch.is_tensor(v) else v) for n, v in leaves)
    return {n: np.asarray(v, np.float64) for n, v in doubles}


def errors(actual: dict[str, Leaves], expected: dict[str, Leaves]) -> Errors:
    worst: Errors = {}
    for kind, leaves in expected.items():
        largest = max((np.abs(v).max(initial=0) for v in leaves.values()), default=0) if kind == "gradient" else 1e-3
        for name, theirs in leaves.items():
            ours = actual[kind].get(name)
            error = 1.0
            if ours is not None and ours.shape == theirs.shape:
                error = np.abs(ours - theirs).max(initial=0) / max(np.abs(theirs).max(initial=0), largest, 1e-30)
            worst[kind] = max(worst.get(kind, 0.0), float(np.nan_to_num(error, nan=np.inf)))
    return worst


def torchax_alone() -> dict[str, Errors | str]:
    """Maps each row to its errors, or to a description of the failure."""
    results: dict[str, Errors | str] = {}
    for name, row in ROWS.items():
        expected = in_pytorch(row)
        try:
            if errors(in_pytorch(row, seed=3), expected)["output"]:
                results[name] = draws_of_torchax(row)
            else:
                results[name] = errors(through_torchax(row), expected)
        except Exception as error:
            asserts_dtype = isinstance(error, AssertionError) and not str(error)  # the assertions of rows have no text
            results[name] = "wrong dtype" if asserts_dtype else f"raises {type(error).__name__}"
    return results


def draws_of_torchax(row: Any) -> str:
    """Describes whether two calls of the jitted function draw the same numbers; PyTorch's draw others."""
    states, function = torchax.extract_jax(row.build().train())
    call = jax.jit(function)
    args, _ = mapped(row.example(), lambda t: jnp.asarray(t.numpy()))
    one = call(states, args)
    two = call(states, args)
    return "the same numbers in every call" if (one == two).all() else "other numbers in each call"


def through_bridge() -> dict[str, Errors]:
    results = {}
    for name, row in ROWS.items():
        args, kwargs = row.example()
        torch.manual_seed(2)
        report = bridge.verify(row.build(), *args, train=True, method=row.method, **kwargs)
        results[name] = {kind: max((r.error for r in report.rows if r.kind == kind), default=None) for kind in KINDS}
    return results


def table() -> str:
    alone = subprocess.run([sys.executable, "-m", "campaigns.meanings", ALONE], check=True, stdout=subprocess.PIPE)
    theirs = json.loads(alone.stdout)
    ours = through_bridge()
    groups: dict[str, list[str]] = {}
    worst = {"float32": 0.0, "16 bits": 0.0}
    for name, row in ROWS.items():
        result, error = outcome(theirs[name], max(row.tolerance, 1e-4))
        groups.setdefault(result, []).append(f"{rows.in_words(name)} {error}".strip())
        width = "float32" if row.tolerance < 1e-4 else "16 bits"
        worst[width] = max(worst[width], *(error for error in ours[name].values() if error is not None))
    largest_first = sorted(groups.items(), key=lambda item: -len(item[1]))
    versions = f"torch {torch.__version__}, jax {jax.__version__}, torchax {version('torchax')}"
    lines = [
        f"`python -m campaigns.meanings`, {platform.machine()} CPU, {time.strftime('%-d %B %Y')}, {versions}.",
        "",
        "| torchax alone | meanings, with the largest error |",
        "|---|---|",
        *(f"| {result} | {', '.join(names)} |" for result, names in largest_first),
        "",
        f"{len(ROWS) - len(groups[EQUAL])} of {len(ROWS)} differ with torchax alone. The largest error of the bridge "
        f"is {worst['float32']:.0e} in float32 and {worst['16 bits']:.0e} in 16 bits.",
    ]
    return "\n".join(lines)


def outcome(found: Errors | str, limit: float) -> tuple[str, str]:
    """Returns the kinds of leaves with an error above the limit and the largest error, or the failure and no error."""
    if isinstance(found, str):
        return found, ""
    wrong = {kind: error for kind, error in found.items() if error > limit}
    if not wrong:
        return EQUAL, ""
    return f"wrong {' and '.join(f'{kind}s' for kind in wrong)}", f"{max(wrong.values()):.1g}"


if __name__ == "__main__":
    if ALONE in sys.argv:
        with contextlib.redirect_stdout(sys.stderr):
            results = torchax_alone()
        print(json.dumps(results))
    else:
        print(table())
