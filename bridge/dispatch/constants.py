"""Real PyTorch tensors in a traced call: state tensors have stand-ins; tensors that depend on no input stay real.

An operation whose arguments are all real runs in PyTorch. So a mask or a table has PyTorch's exact values, Python can
read them, and the code may cache the tensor. A real tensor becomes an array when it meets a traced one: a small one is
embedded in the program, a large one is computed there again by the operations that made it. A real tensor that the code
writes traced values into is traced from then on.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bridge._compat.torch import below_modes, is_view_of, storage_id
from bridge.context import CallState
from bridge.dispatch.computation import EMBEDDED
from bridge.dispatch.metas import meta_of, meta_of_strided, zeros_like
from bridge.dispatch.schemas import is_random, kind_of, listed, tensors_in, written_arguments
from bridge.dispatch.views import view_steps
from bridge.symbolic.rows import Rows
from bridge.tensor.arrays import array_of, elements, storage_offsets, version_of, what_is_special
from bridge.tensor.tensor import REGION, AutogradHandle, BridgeTensor, View, as_view, empty_meta, wrap

aten = torch.ops.aten

REAL = 2**22
"""Number of elements from which a constant is not made by PyTorch on the host, but only by the program."""

_NEW = {aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default}
BY_SHAPE = _NEW | {
    aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
}  # fmt: skip
"""Operations that may make a constant of the shape or dtype of a tensor."""

_UNINITIALISED = (
    "aten::empty",
    "aten::new_empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty_strided",
)


@dataclasses.dataclass
class _Made:
    """A real tensor that an operation of this call made, and the operation."""

    real: torch.Tensor
    func: Any
    args: tuple
    kwargs: dict
    index: int
    """Its number among the operation's results."""
    versions: tuple
    """The number of writes to each tensor among the arguments, and to the result itself."""
    differentiable: bool
    """True if gradients were enabled."""


class WrittenByOneSide(BaseException):
    """A side of a branch writes a tensor of known numbers that was there before it, and has to be traced by then.

    It is no `Exception`, which the module's code might catch.
    """

    def __init__(self, root: torch.Tensor):
        super().__init__()
        self.root = root
        """The first tensor on that memory."""


class ConstantTable:
    """The traced tensor of every real tensor, by identity or, for one that shares memory, by storage.

    Methods that make one take the call's context: a reference to it would be a cycle and keep arrays after their trace.
    """

    def __init__(self):
        self._known: dict[int, tuple[torch.Tensor, Any, BridgeTensor]] = {}
        """The version of the real tensor that the traced one was made from; None if only the traced one is current."""
        self._owners: dict[int, list[tuple[BridgeTensor, AutogradHandle]]] = {}
        """The traced tensors over each memory, each with its first handle: `x.data = y` replaces the handle."""
        self._made: dict[int, _Made] = {}
        self._storages: dict[int, torch.Tensor] = {}
        """Memory that the call made, by the first tensor on it."""
        self.before_side: frozenset[int] = frozenset()
        """The memory that was there before the side of a branch that is being traced, by `own_memory`."""
        self._writes = collections.Counter[int]()
        """The writes into each memory that operations of this call have run. PyTorch's own count leaves out what its
        formulas of gradients write into a tensor that they have just made, such as `ones_like(x).sub_(y)`."""

    def bind(self, real: torch.Tensor, tensor: BridgeTensor) -> None:
        """Associates `tensor` with `real`: code that touches `real`, or a view of it, gets `tensor`."""
        self._known[id(real)] = real, None, tensor
        self._owners.setdefault(storage_id(real), []).append((tensor, tensor._handle))

    def known(self) -> dict[int, tuple[torch.Tensor, Any, BridgeTensor]]:
        """Returns the traced tensors that real ones have now, for `restore`."""
        return dict(self._known)

    def restore(self, known: dict[int, tuple[torch.Tensor, Any, BridgeTensor]]) -> None:
        """Forgets traced tensors made since, except those of memory that has become traced."""
        traced = {i: entry for i, entry in self._known.items() if entry[1] is None}
        before = {i: entry for i, entry in known.items() if entry[1] is None or not self.is_traced(entry[0])}
        self._known = before | traced

    # Tests for real tensors.

    def is_traced(self, tensor: torch.Tensor) -> bool:
        """True if the tensor is, or stands for, a tensor of the bridge."""
        if isinstance(tensor, BridgeTensor):
            return True
        return tensor.layout is torch.strided and (tensor.requires_grad or storage_id(tensor) in self._owners)

    def real_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Returns the real tensor that a traced one stands for; the tensor itself if it is real."""
        if not isinstance(tensor, BridgeTensor):
            return tensor
        return next((real for real, _, known in self._known.values() if known is tensor), None)

    def any_traced(self, *values: Any) -> bool:
        return any(self.is_traced(t) for t in tensors_in(values))

    def without_values(self, func: Any, args: tuple, kwargs: dict) -> tuple | None:
        """Returns the arguments with a real tensor for a traced one of which only shape and dtype matter, or None."""
        if not isinstance(args[0], BridgeTensor):
            return None
        if any(m.numel() > REAL for m in listed(meta_of(func, args, kwargs))):
            return None
        meta = args[0]._meta
        with below_modes():
            if func in _NEW:
                return torch.zeros((), dtype=meta.dtype), *args[1:]
            return zeros_like(meta), *args[1:]

    def is_large(self, func: Any, args: tuple, kwargs: dict) -> bool:
        """True if the operation makes a tensor from nothing that is too large for the host."""
        if func is aten._efficientzerotensor.default:  # it has no memory: PyTorch takes shortcuts with it
            return True
        if tensors_in((args, kwargs)):
            return False
        return any(isinstance(m, torch.Tensor) and m.numel() > REAL for m in listed(meta_of(func, args, kwargs)))

    def may_write(self, real: torch.Tensor) -> bool:
        """True if the memory belongs to the call."""
        return storage_id(real) in self._storages

    def compute(self, run: Callable[..., Any], func: Any, args: tuple, kwargs: dict) -> Any:
        """Returns `run(*args, **kwargs)`, the operation `func` in PyTorch.

        None of its arguments is traced, and any memory that it writes belongs to the call.
        """
        if "device" in kwargs:
            kwargs = kwargs | {"device": "cpu"}
        with below_modes():
            before = self._versions(args, kwargs)
            out = run(*args, **kwargs)
            self._writes.update(map(storage_id, written_arguments(func, args, kwargs)))
            if func.name().partition(".")[0] in _UNINITIALISED:
                out.zero_()  # its content is undefined; zeros are deterministic
            if torch.Tag.inplace_view in func.tags:
                self._made.pop(id(out), None)
            if kind_of(func) == "write":
                return out
            for index, real in enumerate(listed(out)):
                if isinstance(real, torch.Tensor) and real.layout is torch.strided:
                    versions = (*before, self._version(real))
                    self._made[id(real)] = _Made(real, func, args, kwargs, index, versions, torch.is_grad_enabled())
                    if kind_of(func) == "compute" or func is aten.lift_fresh.default:
                        self._storages.setdefault(storage_id(real), real)
        return out

    def _version(self, real: torch.Tensor) -> tuple:
        return version_of(real), self._writes[storage_id(real)]

    def _versions(self, *values: Any) -> tuple:
        return tuple(map(self._version, tensors_in(values)))

    def _is_unchanged(self, made: _Made) -> bool:
        return made.versions == (*self._versions(made.args, made.kwargs), self._version(made.real))

    # Making tensors traced.

    def wrap(self, context: CallState, real: torch.Tensor) -> BridgeTensor:
        """Returns the traced tensor for any tensor: itself, the stand-in of a state tensor, or a constant."""
        if isinstance(real, BridgeTensor):
            return real
        known = self._known.get(id(real))
        if known is not None and known[1] in (None, self._version(real)):
            return known[2]
        if type(real) is Rows:
            raise real.refused("a result", made=f"; it was made {real.made}")
        special = what_is_special(real)
        if special is not None:
            what, _, remedy = special.partition("; ")
            raise context.error(f"a tensor {what}", remedy)
        owners = self._owners.get(storage_id(real))
        made = self._made.get(id(real))
        if owners is not None and made is not None and kind_of(made.func) == "view":
            tensor = self._recomputed(context, made)
        elif owners is not None:
            tensor = self._alias(context, owners, real)
        elif real.requires_grad:  # a leaf that the call made
            tensor = self._constant(context, real)
            self.bind(real, tensor)
        else:
            tensor = self._constant(context, real)
        self._known[id(real)] = real, None if storage_id(real) in self._owners else self._version(real), tensor
        return tensor

    def materialize(self, context: CallState, real: torch.Tensor) -> BridgeTensor:
        """Returns the traced tensor for a real one that traced values are about to be written into."""
        if not self.is_traced(real):
            root = self._storages.get(storage_id(real))
            if root is None:
                _refuse_static(context, real)
                raise context.error(
                    "the call writes into a tensor that was there before it and is no parameter or buffer, which the "
                    "next call would not see",
                    "register the tensor as a buffer, or clone it before the write",
                )
            if id(root) in self.before_side:
                raise WrittenByOneSide(root)
            memory = storage_id(root)
            self._known = {i: entry for i, entry in self._known.items() if storage_id(entry[0]) != memory}
            self.bind(root, self._constant(context, root))
        return self.wrap(context, real)

    def materialize_with_aliases(self, context: CallState, root: torch.Tensor) -> None:
        """Makes memory traced that one side of a branch will write, and all tensors over it, before the side."""
        self.materialize(context, root)
        memory = storage_id(root)
        for made in [*self._made.values()]:
            if storage_id(made.real) == memory:
                self.wrap(context, made.real)

    def own_memory(self) -> frozenset[int]:
        """Returns the `id` of the first tensor on each memory that the call has made until now, for `before_side`."""
        return frozenset(map(id, self._storages.values()))

    def _alias(
        self, context: CallState, known: list[tuple[BridgeTensor, AutogradHandle]], real: torch.Tensor
    ) -> BridgeTensor:
        """Returns a view or `.data` of a state tensor, taken before the call, as a traced tensor."""
        owners = [
            owner if owner._handle.storage is handle.storage else BridgeTensor(handle, _layout(handle))
            for owner, handle in known
        ]
        if any(o.dtype != real.dtype for o in owners):
            raise context.error(
                "a tensor shares the memory of a parameter or buffer of another dtype",
                "make the view inside the call, or clone it",
            )
        owner = next((o for o in owners if elements(o._meta, storage_offsets(real)) is not None), None)
        if owner is None:
            raise context.error(
                "a tensor shares memory with a parameter or buffer and reaches beyond it",
                "register the whole tensor as one parameter or buffer, or clone it",
            )
        root = self.real_of(owner)
        differentiable = real.requires_grad or (root is not None and is_view_of(real, root))
        return alias_of(owner, real, differentiable=differentiable)

    def _constant(self, context: CallState, real: torch.Tensor) -> BridgeTensor:
        if real.requires_grad and real.grad_fn is not None:
            raise context.error(
                f"a tensor of shape {tuple(real.shape)} that PyTorch has computed with gradients before the call",
                "compute it in the call, before it is read (a layer with weight_norm computes its weight when it is "
                "called); or detach it before export",
            )
        made = self._made.get(id(real))
        if real.numel() > EMBEDDED and made is not None and self._is_unchanged(made) and _repeatable(made):
            return self._recomputed(context, made)
        return _embedded(real)

    def _recomputed(self, context: CallState, made: _Made) -> BridgeTensor:
        with torch.set_grad_enabled(made.differentiable):
            again = listed(context.redispatch(made.func, made.args, made.kwargs))[made.index]
        # It is real if PyTorch decomposes the operation.
        return again if isinstance(again, BridgeTensor) else _embedded(made.real)


def _embedded(real: torch.Tensor) -> BridgeTensor:
    """Returns a tensor whose array is a constant of the program."""
    meta = empty_meta(real.shape, real.stride(), real.dtype)
    with _unnoted():  # made before the call: it belongs to no region of recomputation
        return wrap(array_of(real), meta, tracked=real.requires_grad, live=real.requires_grad, leaf=True)


def alias_of(owner: BridgeTensor, real: torch.Tensor, differentiable: bool) -> BridgeTensor:
    """Returns `real` as a view of the tensor that owns its memory."""
    if (real.shape, real.stride(), real.storage_offset()) == (owner.shape, owner.stride(), owner.storage_offset()):
        whole = View(lambda x: x, lambda x, new: new)
        return as_view(owner, owner._meta, whole, differentiable=differentiable)
    place = (real.shape, real.stride(), int(real.storage_offset()))
    meta = meta_of_strided(owner, *place)
    (step,) = view_steps(aten.as_strided.default, owner, (owner, *place), {}, [meta])
    return as_view(BridgeTensor(owner._handle, owner._meta), meta, step, differentiable=differentiable)


def _layout(handle: AutogradHandle) -> torch.Tensor:
    assert handle.storage.layout is not None, "`wrap` gives each storage a layout"
    return handle.storage.layout


def _refuse_static(context: CallState, real: torch.Tensor) -> None:
    for name, tensor in context.options.static.items():
        if storage_id(tensor) == storage_id(real):
            what = f"the call writes {name}, which `static=` makes a constant"
            remedy = (
                "call the module once before `export` if only the first call writes it; else leave it out of `static`"
            )
            raise context.error(what, remedy)


@contextlib.contextmanager
def _unnoted() -> Iterator[None]:
    before = REGION.notes
    REGION.notes = None
    try:
        yield
    finally:
        REGION.notes = before


def _repeatable(made: _Made) -> bool:
    """True if the operation gives the same numbers again; PyTorch's C++ may have filled an empty tensor by itself."""
    if made.func.name().partition(".")[0] in _UNINITIALISED:
        with below_modes():
            return not made.real.any()
    return not is_random(made.func) and made.func is not aten.lift_fresh.default
