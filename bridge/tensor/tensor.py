"""Tensors with the semantics of PyTorch: memory, autograd identity and view over JAX arrays.

A PyTorch tensor is three things that a JAX array is not: memory that several tensors share, an identity that the
autograd graph follows, and a window on both. So here:

* `Storage` is the memory. Whoever writes last is what everybody reads.
* `AutogradHandle` is one autograd identity over a storage. A tensor and its differentiable views share a handle.
  `detach`, `.data` and views made while gradients are off get a handle of their own over the same storage.
* `BridgeTensor` is the window: a handle and the chain of views from the handle's base to this tensor. Its twin on
  PyTorch's `meta` device lets PyTorch decide shape, dtype, strides and which results are views.

JAX differentiates the arrays inside. The rules of PyTorch's gradient mode are then three:

1. A result computed while gradients are off carries no tangent (`stop_gradient`).
2. A write while gradients are on is a functional update of the handle, and JAX sees through it.
3. A write while gradients are off, or through another handle of the same storage, changes the value and leaves the
   gradient path as it was: `regraft(new value, old path)`. That is how a leaf that is filled under `no_grad` keeps
   its gradient.

`AutogradHandle.tracked` is PyTorch's `requires_grad`, which decides what the code sees. An input or a buffer is live
and not tracked: PyTorch has no gradient for it, but `jax.grad` may be asked for that of the input, or span the call
that wrote a buffer and the call that reads it.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from bridge._compat.jax import Tracer
from bridge._compat.torch import (
    NO_TORCH_FUNCTION,
    below_modes,
    class_of,
    engine_leaf,
    is_parameter,
    make_wrapper,
    mark_as_parameter,
)
from bridge.context import CURRENT, current, refusal
from bridge.tensor.arrays import DTYPES, elements, storage_offsets, torch_dtype


@jax.custom_jvp
def regraft(value: jax.Array, path: jax.Array) -> jax.Array:
    """Returns `value` with the gradient path of `path`: the result of a write that autograd does not see."""
    return value


@regraft.defjvp
def _regraft_jvp(primals, tangents):
    # Through `regraft` itself: what a second derivative sees of the value follows the same path.
    return regraft(*primals), tangents[1]


DIFFERENTIABLE = frozenset(dtype for dtype in DTYPES if dtype.is_floating_point or dtype.is_complex)
"""The dtypes of tensors that PyTorch lets require grad."""


def has_tangents(array: jax.Array) -> bool:
    return jnp.issubdtype(array.dtype, jnp.inexact)


class Undo:
    """What storages and handles that were there before a region held then."""

    def __init__(self):
        self._made = weakref.WeakSet[Any]()
        """What the region has made. Not their `id`, which a constant, made outside of regions, may get after them."""
        self._before: dict[int, tuple[Any, dict[str, Any]]] = {}

    def note(self, holder: Storage | AutogradHandle, new: bool) -> None:
        if new:
            self._made.add(holder)
        elif holder not in self._made and id(holder) not in self._before:
            slots = [name for name in type(holder).__slots__ if name != "__weakref__"]
            self._before[id(holder)] = holder, {name: getattr(holder, name) for name in slots}

    def written(self) -> list[Storage | AutogradHandle]:
        """Returns the storages that have been written, and then the handles over them."""
        storages = [
            holder
            for holder, before in self._before.values()
            if isinstance(holder, Storage) and holder.array is not before["array"]
        ]
        handles = [holder for holder, _ in self._before.values() if isinstance(holder, AutogradHandle)]
        return [*storages, *(handle for handle in handles if handle.storage in storages)]

    def run(self) -> None:
        for holder, before in self._before.values():
            for name, value in before.items():
                setattr(holder, name, value)


class Region(threading.local):
    """Code whose arrays must not outlive it: the innermost open region notes what the code makes and changes."""

    notes: list[weakref.ref] | None = None
    undo: Undo | None = None
    """That of the innermost side of a branch."""

    def note(self, holder: Storage | AutogradHandle | BridgeTensor, new: bool = False) -> None:
        """Must be called before a change, and only if `notes` is not None."""
        assert self.notes is not None
        self.notes.append(weakref.ref(holder))
        if self.undo is not None and not isinstance(holder, BridgeTensor):
            self.undo.note(holder, new)


REGION = Region()


class Storage:
    """Memory: the array that was written last, and the number of writes."""

    __slots__ = ("__weakref__", "array", "bounds", "inference", "layout", "overlaps", "version")

    def __init__(self, array: jax.Array, layout: torch.Tensor | None = None):
        self.array = array
        self.layout = layout
        """A tensor on the meta device with the array's shape, and the strides and the offset that PyTorch gave it."""
        self.version = 0
        self.inference = torch.is_inference_mode_enabled()
        self.overlaps = False
        """True if several elements of the array share memory in PyTorch, as in an expanded tensor."""
        self.bounds: Any = None
        """The interval of the numbers (`bridge.symbolic.ranges.Interval`), until a write; None if unknown."""
        if REGION.notes is not None:
            REGION.note(self, new=True)

    def put(self, array: jax.Array) -> None:
        """Replaces the array; handles follow when they are read."""
        if REGION.notes is not None:
            REGION.note(self)
        self.array = array
        self.version += 1
        self.bounds = None


class AutogradHandle:
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
        """The views of the tensor that is a leaf of PyTorch's graph, if the handle is tracked and no result."""
        self.thawed: AutogradHandle | None = None
        """The handle that a frozen leaf gets back once it requires grad again."""
        if REGION.notes is not None:
            REGION.note(self, new=True)

    @property
    def version(self) -> int:
        return self.storage.version

    def read(self) -> jax.Array:
        if self._seen != self.storage.version:
            if REGION.notes is not None:
                REGION.note(self)
            self._array = self._keep_path(self.storage.array)
            self._seen = self.storage.version
        return self._array

    def write(self, array: jax.Array, *, tracked: bool, grad_enabled: bool, live: bool = True) -> None:
        """Replaces the base array. `tracked`, `live`: properties of the new value by itself."""
        old = self.read()
        if REGION.notes is not None:
            REGION.note(self)
            REGION.note(self.storage)
        if grad_enabled:
            if tracked:
                self.leaf = None
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

    def same_values(self, other: AutogradHandle) -> bool:
        """True if both read the same array, including its gradient path."""
        return self is other or (self.storage is other.storage and not self.live and not other.live)

    def detached(self) -> AutogradHandle:
        array = self.read()
        return AutogradHandle(self.storage, stop_gradient(array) if self.live else array, False, live=False)

    @contextlib.contextmanager
    def holding(self, array: jax.Array) -> Iterator[None]:
        """Replaces the array temporarily, for everything over this storage."""
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

    def put(self, array: jax.Array, tracked: bool, live: bool) -> None:
        """Replaces the array, with its gradient path; the memory has the same values already."""
        if REGION.notes is not None:
            REGION.note(self)
        self._array = array
        self._seen = self.storage.version
        self.tracked = tracked
        self.live = live
        if tracked:
            self.leaf = None

    def as_leaf(self, views: tuple[View, ...]) -> AutogradHandle:
        return AutogradHandle(self.storage, self.read(), True, live=self.live, leaf=views)

    def frozen(self) -> AutogradHandle:
        """Returns a handle on the same memory without a gradient, used while the leaf does not require one."""
        handle = AutogradHandle(self.storage, self.storage.array, False, live=False)
        handle._seen = -1  # reads the memory at first use: the program must not depend on when the leaf was frozen
        handle.thawed = self
        return handle

    def _keep_path(self, value: jax.Array) -> jax.Array:
        if self.live and has_tangents(value):
            return regraft(value, self._array)
        return stop_gradient(value)


def stop_gradient(array: jax.Array) -> jax.Array:
    if has_tangents(array):
        return jax.lax.stop_gradient(array)
    return array


def _never() -> bool:
    return False


@dataclass(frozen=True, eq=False)
class View:
    """One step from a tensor to a view of it: functions that read the view and write it back."""

    get: Callable[[jax.Array], jax.Array]
    put: Callable[[jax.Array, jax.Array], jax.Array]
    """(the viewed array, the view's new value) -> the viewed array's new value"""
    repeats: Callable[[], bool] = _never
    """True if several elements of the view are one element of the viewed array; then `put` cannot be used."""
    one_of_several: bool = False
    """True if an operation with several views as results made it, with gradients enabled."""
    base: AutogradHandle | None = None
    """The handle that the view was taken from, if gradients were off."""
    inference: bool = False
    """True if the view was made in inference mode."""
    detached: bool = False
    """True if the view starts over: PyTorch's rules then ignore the views before it."""


# ---- the tensor of a traced call

_NO_LEAF = (
    "you can only change requires_grad flags of leaf variables. If you want to use a computed variable in a subgraph "
    "that doesn't require differentiation use var_no_grad = var.detach()."
)


_NO_DEEPCOPY = (
    "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the moment.  If you "
    "were attempting to deepcopy a module, this may be because of a torch.nn.utils.weight_norm usage, see "
    "https://github.com/pytorch/pytorch/pull/103001"
)
_DETACHED = View(lambda x: x, lambda x, new: new, detached=True)


class Node:
    """Represents the `grad_fn` of a result, which exists, but has no further properties."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise refusal(
            f"`grad_fn.{name}` asks for PyTorch's graph, which a traced call does not have",
            "write what a hook does to a gradient as the backward of a torch.autograd.Function, or leave it out",
        )


class BridgeTensor(torch.Tensor):
    """The tensor that a module holds while it is traced: a CPU tensor without data to PyTorch, a JAX array inside."""

    _handle: AutogradHandle
    _views: tuple[View, ...]
    _meta: torch.Tensor
    _cache: tuple[int, jax.Array] | None
    _parent: BridgeTensor | None

    __torch_function__ = NO_TORCH_FUNCTION  # pyright: ignore[reportAssignmentType]

    @staticmethod
    def __new__(cls, handle: AutogradHandle, meta: torch.Tensor, views: tuple[View, ...] = ()) -> BridgeTensor:
        # The device is the CPU because that is what code without an accelerator branch expects, and because
        # PyTorch's own dispatcher (autocast, device checks) then treats these as ordinary tensors.
        self = make_wrapper(
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=torch.device("cpu"),
        )
        self._handle = handle
        self._meta = meta
        self._views = views
        self._cache = None
        self._parent = None
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # pyright: ignore
        raise refusal(
            f"`{func}` met a traced tensor outside the call that made it: after its end, in another thread, or where a "
            "tensor of another class is made of it",
            "compute in the thread that runs forward, on plain tensors, and return the results",
        )

    @property
    def value(self) -> jax.Array:
        handle = self._handle
        if handle._seen == handle.storage.version:
            base = handle._array
        else:
            base = handle.read()
        if not self._views:
            return base
        if self._cache is None or self._cache[0] != handle.storage.version:
            views = self._views
            parent = self._parent
            # Read through the tensor it was taken from, so that siblings share what they have in common.
            if parent is not None and parent._handle.same_values(self._handle) and parent._views == views[:-1]:
                base = parent.value
                views = views[-1:]
            known = not isinstance(base, Tracer) and not has_tangents(base)
            with jax.ensure_compile_time_eval() if known else contextlib.nullcontext():
                for view in views:
                    base = view.get(base)
            self._cache = (self._handle.storage.version, base)
            if REGION.notes is not None:
                REGION.note(self)
        return self._cache[1]

    def write(self, value: jax.Array, *, tracked: bool, grad_enabled: bool, live: bool = True) -> None:
        """Writes through the views into the handle's base."""
        if self._handle.storage.overlaps:
            raise NotImplementedError("a write into elements that share memory; clone the tensor first")
        if self._views:
            value = self._base_with(value)
        self._handle.write(value, tracked=tracked, grad_enabled=grad_enabled, live=live)

    def _base_with(self, value: jax.Array) -> jax.Array:
        """Returns the base, with `value` in the place of this view of it."""
        if any(view.repeats() for view in self._views):
            return self._put_by_position(value)
        stages = [self._handle.read()]
        for view in self._views[:-1]:
            stages.append(view.get(stages[-1]))
        for view, stage in zip(reversed(self._views), reversed(stages), strict=True):
            value = view.put(stage, value)
        return value

    def _put_by_position(self, value: jax.Array) -> jax.Array:
        """Returns the base with `value` at the tensor's positions in PyTorch's memory.

        Raises `NotImplementedError` if two elements of the tensor are at one position, or its positions do not count
        the base's elements.
        """
        layout = self._handle.storage.layout
        here = storage_offsets(self._meta)
        index = None
        if layout is not None and layout.dtype == self._meta.dtype and not layout.is_complex():
            index = elements(layout, here)
        if index is None or np.unique(here).size != here.size:
            raise NotImplementedError("a write into elements that share memory; clone the tensor first")
        base = self._handle.read()
        return jnp.reshape(jnp.reshape(base, -1).at[index].set(value), base.shape)

    def detach_in_place(self) -> None:
        """Detaches the tensor; a leaf is frozen, because it may require grad again."""
        if self.requires_grad and self.is_leaf:
            self._handle = self._handle.frozen()
        else:
            self._handle = self._handle.detached()
        self._cache = None

    def become(self, other: BridgeTensor) -> None:
        """Looks at the same handle through other views, after PyTorch changed this object's shape."""
        self._handle = other._handle
        self._views = other._views
        self._meta = other._meta
        self._cache = None

    def replace(self, other: BridgeTensor) -> None:
        """Runs `self.data = other`: the other's memory, the same gradient path, and no tie to the old memory."""
        frozen = self._handle.thawed is not None
        if frozen:
            self.requires_grad_(True)
        old = self.value
        handle = self._handle
        memory = stop_gradient(other._handle.read())
        if handle.live and has_tangents(old):
            scratch = AutogradHandle(Storage(memory, other._handle.storage.layout), memory, False)
            try:
                BridgeTensor(scratch, other._meta, other._views).write(old, tracked=False, grad_enabled=True)
            except NotImplementedError:
                what = "`.data = …` gives a tensor elements that share memory"
                raise refusal(what, "clone what is assigned") from None
            memory = regraft(memory, scratch.read())
        leaf = other._views if self.is_leaf else None
        self._handle = AutogradHandle(other._handle.storage, memory, handle.tracked, live=handle.live, leaf=leaf)
        self._views = other._views
        self._cache = None
        if other._meta.stride() == self._meta.stride():
            self._meta = other._meta
        if frozen:
            self.requires_grad_(False)

    # Questions of Python code about a tensor's autograd state, which PyTorch's engine cannot answer, as it is not used.

    @property
    def requires_grad(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._handle.tracked and self._meta.dtype in DIFFERENTIABLE

    @requires_grad.setter
    def requires_grad(self, wanted: bool) -> None:
        self.requires_grad_(wanted)

    @property
    def may_have_gradient(self) -> bool:
        """True if a gradient can reach it, by PyTorch or by JAX."""
        return (self._handle.tracked or self._handle.live) and self._meta.dtype in DIFFERENTIABLE

    @property
    def is_leaf(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return not self.requires_grad or self._handle.leaf is self._views

    @property
    def grad_fn(self) -> Node | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if self.is_leaf:
            return None
        return Node()

    def requires_grad_(self, requires_grad: bool = True) -> BridgeTensor:
        """Makes a leaf require grad, or freezes it until it does again. Nothing changes if the flag is the same.

        A new leaf keeps its gradient path: PyTorch sees none in it, but JAX may differentiate by the input or buffer
        that it is or comes from, which in PyTorch would have required grad before. Raises PyTorch's
        `RuntimeError` for the result of an operation, and for integers.
        """
        if requires_grad == self.requires_grad:
            return self
        if not self.is_leaf:
            raise RuntimeError(_NO_LEAF)
        if self._meta.dtype not in DIFFERENTIABLE:
            raise RuntimeError("only Tensors of floating point dtype can require gradients")
        if requires_grad:
            self._handle = self._handle.thawed or self._handle.as_leaf(self._views)
        else:
            self._handle = self._handle.frozen()
        self._cache = None
        if CURRENT.recording:
            engine_leaf(self, requires_grad)
        return self

    @property
    def data(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        # Made without PyTorch, which would count the writes through it with those of `self`.
        if any(v.one_of_several or v.base for v in self._views):
            views = (*self._views, _DETACHED)
        else:
            views = self._views
        return BridgeTensor(self._handle.detached(), self._meta, views)

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        if other.shape != self.shape or other.dtype != self.dtype:
            raise refusal("`.data = …` gives a tensor another shape or dtype", "assign a new tensor instead")
        if not isinstance(other, BridgeTensor):
            other = self._materialized(other)
        self.replace(other)

    def _materialized(self, constant: torch.Tensor) -> BridgeTensor:
        """Returns the traced tensor for a tensor of the call that no traced value has reached yet."""
        call = current()
        if call is None or not call.constants.may_write(constant):
            what = "`.data = …` gives a traced tensor the memory of one that was there before the call"
            raise refusal(what, "assign a clone()")
        taken = call.materialize(constant)
        assert isinstance(taken, BridgeTensor)
        return taken

    def item(self) -> Any:  # PyTorch's would make an object of a class of its own of a traced number
        call = current()
        if call is None or self.numel() != 1:
            return torch.Tensor.item(self)
        return call.number_of(self)

    def tolist(self) -> Any:
        # PyTorch refuses subclasses; element by element this is `.item()`, with its answer or its error.
        if self.dim():
            return [row.tolist() for row in self.unbind(0)]
        return self.item()

    def as_subclass(self, cls: type) -> torch.Tensor:
        """Refuses a subclass; without the modes of the call, PyTorch would make one."""
        if cls is torch.Tensor:
            return self.view_as(self)
        raise refusal(
            f"`as_subclass({cls.__name__})` gives a traced tensor a behaviour of its own, which would be lost",
            "call functions of PyTorch instead of overriding them",
        )

    def _set_class(self, cls: type) -> None:
        raise refusal(
            f"a traced tensor is made a {cls.__name__}, as `torch.utils.swap_tensors` does",
            "exchange values by copy_ instead of tensors",
        )

    __class__: Any = property(class_of, _set_class)

    def __format__(self, spec: str) -> str:  # without `super()`, which does not work with a property `__class__`
        if spec and not self.dim():
            return self.item().__format__(spec)
        return torch.Tensor.__format__(self, spec)

    def __copy__(self) -> torch.Tensor:
        """Returns a leaf over the same memory with the same attributes, as PyTorch does."""
        copied = self.detach().requires_grad_(self.requires_grad)
        mark_as_parameter(copied, is_parameter(self))
        vars(copied).update(self._attributes())
        return copied

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        """Returns a leaf with memory of its own: a gradient reaches the copy and goes no further.

        As in PyTorch, copies of tensors that share memory share memory, and have copies of the attributes; a copy
        of a parameter has neither. Raises PyTorch's `RuntimeError` for the result of an operation.
        """
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(_NO_DEEPCOPY)
        if is_parameter(self):
            copied = self.detach().clone()
            mark_as_parameter(copied, True)
        else:
            copied = self._over_copied_memory(memo)
        memo[id(self)] = copied.requires_grad_(self.requires_grad)
        if not is_parameter(self):
            vars(copied).update(copy.deepcopy(self._attributes(), memo))
        return copied

    def _over_copied_memory(self, memo: dict) -> BridgeTensor:
        storage = self._handle.storage
        if id(storage) not in memo:
            memo[id(storage)] = copied = Storage(stop_gradient(storage.array), storage.layout)
            copied.overlaps = storage.overlaps
            copied.bounds = storage.bounds
        handle = AutogradHandle(memo[id(storage)], memo[id(storage)].array, False, live=False)
        return BridgeTensor(handle, self._meta, (*self._views, _DETACHED) if self._views else ())

    def _attributes(self) -> dict[str, Any]:
        """Returns the attributes that the code has set on the tensor."""
        return {name: value for name, value in vars(self).items() if name not in INTERNAL}

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise refusal("a tensor of the call is pickled", "return it, and pickle the result")

    def jax(self) -> jax.Array:
        """The JAX array. Libraries ask torchax's tensors for it to see whether they are being traced."""
        return self.value

    def __repr__(self, *, tensor_contents=None) -> str:
        return (
            f"BridgeTensor(shape={tuple(self.shape)}, dtype={self.dtype}, requires_grad={self.requires_grad}, traced)"
        )


INTERNAL = frozenset(BridgeTensor.__annotations__) | {"_is_param"}
"""Attributes of a tensor that belong to the bridge; all others belong to the code."""


def empty_meta(shape: Sequence[int], stride: Sequence[int] | None, dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
    """Returns a twin on the meta device, made below every mode; without `stride` it is contiguous."""
    with below_modes():
        if stride is None:
            return torch.empty(shape, dtype=dtype, device="meta")
        if offset:
            if 0 not in shape:
                reach = sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
            else:
                reach = 0
            whole = torch.empty(offset + reach + 1, dtype=dtype, device="meta")
            return whole.as_strided(shape, stride, offset)
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def wrap(
    array: jax.Array,
    meta: torch.Tensor | None = None,
    *,
    tracked: bool = False,
    live: bool = True,
    leaf: bool = False,
) -> BridgeTensor:
    """Returns a tensor over memory of its own. Without `meta` it is contiguous, with the dtype of the array.

    `leaf`: a `tracked` tensor, which requires grad, is then a leaf and no result of an operation.
    """
    if meta is None:
        meta = empty_meta(array.shape, None, torch_dtype(array.dtype))
    return BridgeTensor(AutogradHandle(Storage(array, meta), array, tracked, live, () if leaf else None), meta)


def as_view(base: BridgeTensor, meta: torch.Tensor, view: View, *, differentiable: bool) -> BridgeTensor:
    """Returns a view of `base`; one that is not differentiable follows the memory and carries no gradient."""
    # The handle is shared even if it carries no tangent yet: a later write to the base may bring one.
    handle = base._handle if differentiable else base._handle.detached()
    tensor = BridgeTensor(handle, meta, (*base._views, view))
    if not CURRENT.recording:  # PyTorch's graph keeps the tensor, and a cycle through that is never collected
        tensor._parent = base
    return tensor
