"""Memory, autograd identities and views of tensors: values in JAX, while writes and gradient paths follow PyTorch.

A PyTorch tensor is three things that a JAX array is not: memory that several tensors share, an identity that the
autograd graph follows, and a window on both. So here:

* `Storage` is the memory. Whoever writes last is what everybody reads.
* `Cell` is one autograd identity over a storage. A tensor and its differentiable views share a cell. `detach`, `.data`
  and views made while gradients are off get a cell of their own over the same storage.
* `BridgeTensor` (`tensor.py`) is the window: a cell and the chain of views from the cell's base to this tensor.

JAX differentiates the arrays inside. The rules of PyTorch's gradient mode are then three:

1. A result computed while gradients are off carries no tangent (`stop_gradient`).
2. A write while gradients are on is a functional update of the cell, and JAX sees through it.
3. A write while gradients are off, or through another cell of the same storage, changes the value and leaves the
   gradient path as it was: `regraft(new value, old path)`. That is how a leaf that is filled under `no_grad` keeps
   its gradient.

`Cell.live` says whether an array may carry a tangent of JAX's, which decides what has to be stopped; `Cell.tracked` is
PyTorch's `requires_grad`, which decides what the code sees. An input or a buffer is live and not tracked: PyTorch has
no gradient for it, but `jax.grad` may be asked for that of the input, or span the call that wrote a buffer and the call
that reads it.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import torch

if TYPE_CHECKING:
    from bridge.tensor.tensor import BridgeTensor


@jax.custom_jvp
def regraft(value: jax.Array, path: jax.Array) -> jax.Array:
    """`value`, with the gradient path of `path`: what a write that autograd does not see leaves behind."""
    return value


@regraft.defjvp
def _regraft_jvp(primals, tangents):
    # Through `regraft` itself: what a second derivative sees of the value follows the same path.
    return regraft(*primals), tangents[1]


def differentiable(dtype: torch.dtype) -> bool:
    """True if PyTorch lets tensors of this dtype require grad."""
    return dtype.is_floating_point or dtype.is_complex


def has_tangents(array: jax.Array) -> bool:
    return jnp.issubdtype(array.dtype, jnp.inexact)


class Region(threading.local):
    """Code whose arrays must not outlive it: notes what it makes and what it changes, in the innermost region open."""

    notes: list[weakref.ref] | None = None

    def note(self, holder: Storage | Cell | BridgeTensor) -> None:
        if self.notes is not None:
            self.notes.append(weakref.ref(holder))


REGION = Region()


class Storage:
    """Memory: the array that was written last, and how often it was written."""

    __slots__ = ("__weakref__", "array", "bounds", "inference", "layout", "overlaps", "version")

    def __init__(self, array: jax.Array, layout: torch.Tensor | None = None):
        self.array = array
        self.layout = layout
        """A tensor on the meta device with the array's shape, and the strides and the offset that PyTorch gave it."""
        self.version = 0
        self.inference = torch.is_inference_mode_enabled()
        self.overlaps = False
        """True if several elements of the array are one in PyTorch's memory, as in an expanded tensor."""
        self.bounds: Any = None
        """The interval of the numbers (`bridge.symbolic.ranges.Interval`), until a write; None if none is known."""
        if REGION.notes is not None:
            REGION.note(self)


class Cell:
    """One autograd identity over a storage: the same values as the storage, and a gradient path of its own."""

    __slots__ = ("__weakref__", "_array", "_seen", "leaf", "live", "storage", "thawed", "tracked")

    def __init__(
        self,
        storage: Storage,
        array: jax.Array,
        tracked: bool,
        live: bool = True,
        leaf: tuple[View, ...] | None = None,
    ):
        self.storage = storage
        self._array = array
        self._seen = storage.version
        self.tracked = tracked
        """The value of PyTorch's `requires_grad`."""
        self.live = live
        """True if the array may carry a tangent."""
        self.leaf = leaf
        """The views of the tensor that is a leaf of PyTorch's graph, where the cell is tracked and no result."""
        self.thawed: Cell | None = None
        """Of a frozen leaf: the cell that it has again once it requires grad."""
        if REGION.notes is not None:
            REGION.note(self)

    @property
    def version(self) -> int:
        return self.storage.version

    def read(self) -> jax.Array:
        if self._seen != self.storage.version:
            self._array = self._keep_path(self.storage.array)
            self._seen = self.storage.version
            REGION.note(self)
        return self._array

    def write(self, array: jax.Array, *, tracked: bool, grad_enabled: bool, live: bool = True) -> None:
        """Replace the base array. `tracked`, `live`: what the new value is by itself."""
        old = self.read()
        if grad_enabled:
            self.leaf = None if tracked else self.leaf
            self.tracked = self.tracked or tracked
            self.live = self.live or live
        elif self.live and has_tangents(old):
            array = regraft(array, old)
        elif live:
            array = stop_gradient(array)
        self._array = array
        self.storage.array = array
        self.storage.version += 1
        self._seen = self.storage.version
        self.storage.bounds = None
        REGION.note(self)
        REGION.note(self.storage)

    def same_values(self, other: Cell) -> bool:
        """True if both read the same array, gradient path included."""
        return self is other or (self.storage is other.storage and not self.live and not other.live)

    def detached(self) -> Cell:
        array = self.read()
        return Cell(self.storage, stop_gradient(array) if self.live else array, False, live=False)

    @contextlib.contextmanager
    def holding(self, array: jax.Array) -> Iterator[None]:
        """Another array for a while, for everything over this storage."""
        before = self.read()
        self._hold(array)
        try:
            yield
        finally:
            self._hold(before)

    def _hold(self, array: jax.Array) -> None:
        self._array = self.storage.array = array
        self.storage.version += 1
        self._seen = self.storage.version

    def as_leaf(self, views: tuple[View, ...]) -> Cell:
        return Cell(self.storage, self.read(), True, live=self.live, leaf=views)

    def frozen(self) -> Cell:
        """The same memory without a gradient, as long as the leaf does not require one."""
        cell = Cell(self.storage, self.storage.array, False, live=False)
        cell._seen = -1  # reads the memory at its first use: the program does not depend on when the leaf was frozen
        cell.thawed = self
        return cell

    def _keep_path(self, value: jax.Array) -> jax.Array:
        if self.live and has_tangents(value):
            return regraft(value, self._array)
        return stop_gradient(value)


class UnreadableCell(Cell):
    """In place of a cell whose values the running code would have from another time than in PyTorch."""

    __slots__ = ("_refuse",)

    def __init__(self, cell: Cell, refuse: Callable[[], Exception]):
        super().__init__(cell.storage, cell._array, cell.tracked, cell.live, cell.leaf)
        self._seen, self._refuse = -1, refuse  # so that `BridgeTensor.value` reads

    def read(self) -> jax.Array:
        raise self._refuse()


def stop_gradient(array: jax.Array) -> jax.Array:
    return jax.lax.stop_gradient(array) if has_tangents(array) else array


def _never() -> bool:
    return False


@dataclass(frozen=True, eq=False)
class View:
    """One step from a tensor to a view of it: how to read the view, how to write it back."""

    get: Callable[[jax.Array], jax.Array]
    put: Callable[[jax.Array, jax.Array], jax.Array]
    """(the viewed array, the view's new value) -> the viewed array's new value"""
    repeats: Callable[[], bool] = _never
    """True if several elements of the view are one element of the viewed array; then `put` cannot be used."""
    one_of_several: bool = False
    """True if an operation with several views as results made it, with gradients on."""
    base: Cell | None = None
    """The cell that it was taken from, where gradients were off."""
    inference: bool = False
    """True if that was in inference mode."""
    detached: bool = False
    """True if it starts over: for PyTorch's rules the views before it do not count."""
    renew: Callable[[], None] | None = None
    """To be called before a write through it, where PyTorch then takes the view of another tensor: the base of all."""
