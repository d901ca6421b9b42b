"""`export_blocks(module, pattern)`: equal submodules that run one after another, as one `jax.lax.scan`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from torch import nn

from bridge.context import refusal
from bridge.errors import BridgeError
from bridge.functional import Functional, export
from bridge.module.changes import equal
from bridge.module.copying import independent
from bridge.module.state import state_of


@dataclasses.dataclass(frozen=True, eq=False)
class Blocks:
    """Equal blocks as one program. Arrays have their names inside a block, and a leading axis of blocks."""

    cell: Functional
    names: tuple[str, ...]
    """The names of the blocks, in the module's order, which is the order in which they run."""

    def __call__(
        self, params: Any, buffers: Any, x: Any, *args: Any, rng: jax.Array | None = None, **kwargs: Any
    ) -> tuple[Any, dict[str, jax.Array]]:
        """Runs `x = block(x, *args, **kwargs)` for every block; returns the last `x`, and the buffers that they wrote.

        If a block returns a tuple, the first item is `x`. Each block folds its number into the key. `train`,
        `method` and `overrides` are those of an exported module.
        """
        if not (rng is None or isinstance(rng, jax.Array)):
            raise BridgeError(f"blocks in a scan draw from a JAX key of their own, and not from {type(rng).__name__}")

        def step(x: Any, block: tuple) -> tuple[Any, dict[str, jax.Array]]:
            index, params, buffers = block
            key = None if rng is None else jax.random.fold_in(rng, index)
            out, buffers = self.cell(params, buffers, x, *args, rng=key, **kwargs)
            return out[0] if isinstance(out, tuple) else out, buffers

        return jax.lax.scan(step, x, (jnp.arange(len(self.names)), dict(params), dict(buffers)))

    def stacked(self, arrays: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Returns the parameters, or the buffers, of the blocks among those of the module."""
        keys = [key for key in (*self.cell.params, *self.cell.buffers) if f"{self.names[0]}.{key}" in arrays]
        return {key: jnp.stack([arrays[f"{name}.{key}"] for name in self.names]) for key in keys}

    def unstacked(self, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Returns the arrays of each block by the names that they have in the module."""
        return {f"{name}.{key}": array[i] for key, array in arrays.items() for i, name in enumerate(self.names)}


def export_blocks(module: nn.Module, pattern: str, **options: Any) -> Blocks:
    """Returns the submodules whose whole names match a regular expression, as one function of their stacked state.

    The program has one block, however many there are. `options` are those of `export`. A block may differ from the
    others in a plain attribute that its code does not read, such as the number of its layer.

    Raises `BridgeError` for blocks that differ in class, state, mode or hooks; a call, where it reads what differs.
    """
    blocks = {name: child for name, child in module.named_modules() if re.fullmatch(pattern, name)}
    if not blocks:
        names = ", ".join([name for name, _ in module.named_modules()][1:6])
        raise BridgeError(f"blocks {pattern!r} matches no submodule; names here are {names} …")
    first, *others = blocks
    state = [id(tensor) for block in blocks.values() for tensor in state_of(block).values()]
    if len(set(state)) < len(state):
        raise BridgeError(f"the blocks {first} … {others[-1]} share a parameter or buffer; call them one by one")
    cell = independent(blocks[first])
    for name in others:
        for path, attribute in _differences(blocks[first], blocks[name]):
            if attribute.startswith("_") or attribute in ("", "training"):
                what = ".".join(filter(None, (path, attribute))) or "class, submodules or state"
                raise BridgeError(f"the blocks {first} and {name} differ in {what}; match equal blocks only")
            _refuse_reading(cell.get_submodule(path), attribute)
    return Blocks(export(cell, **options), tuple(blocks))


def _differences(one: nn.Module, two: nn.Module) -> Iterator[tuple[str, str]]:
    """Yields the path of a submodule and the attribute in which it differs; no attribute for what is not comparable."""
    ours = dict(one.named_modules())
    theirs = dict(two.named_modules())
    twins = {id(child): theirs.get(path) for path, child in ours.items()}
    states = [[(n, t.shape, t.dtype, t.requires_grad) for n, t in state_of(each).items()] for each in (one, two)]
    if states[0] != states[1] or [(n, type(m)) for n, m in ours.items()] != [(n, type(m)) for n, m in theirs.items()]:
        yield "", ""
        return
    for path, child in ours.items():
        mine = vars(child)
        other = vars(theirs[path])
        for name in sorted({*mine, *other} - {"_parameters", "_buffers"}):
            if not (name in mine and name in other and equal(mine[name], other[name], twins)):
                yield path, name


def _refuse_reading(module: nn.Module, attribute: str) -> None:
    """Makes reading the attribute an error, because its value would be that of a single block."""

    def read(_: nn.Module) -> Any:
        what = f"the blocks differ in the attribute {attribute}, which their code reads"
        raise refusal(what, "export blocks for which it is equal, each group by its own pattern")

    vars(module).pop(attribute, None)
    if not isinstance(getattr(type(module), attribute, None), property):
        module.__class__ = type(type(module).__name__, (type(module),), {attribute: property(read, lambda *_: None)})
