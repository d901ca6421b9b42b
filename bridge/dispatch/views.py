"""How each of PyTorch's view operations reads its base and writes back to it."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from bridge._compat.torch import below_modes
from bridge.lowerings.cache import inlined
from bridge.lowerings.creation import broadcast
from bridge.lowerings.registry import METAS
from bridge.tensor.convert import jax_dtype
from bridge.tensor.layout import elements, positions
from bridge.tensor.storage import REGION, View, stop_gradient
from bridge.tensor.tensor import BridgeTensor

aten = torch.ops.aten

_RESHAPES = {
    aten.view.default, aten._reshape_alias.default, aten.unsqueeze.default, aten.squeeze.default,
    aten.squeeze.dim, aten.squeeze.dims, aten.alias.default, aten.detach.default, aten.lift_fresh.default,
    aten._unsafe_view.default,
}  # fmt: skip


def view_steps(  # noqa: C901 (one case for each view operation)
    func: Any, base: BridgeTensor, args: tuple, kwargs: dict, outs: list[torch.Tensor]
) -> list[View]:
    """One `View` for each output of the view operation `func`; `outs` are its outputs on the meta device.

    Raises `NotImplementedError` for a view this cannot follow.
    """
    shape = tuple(base.shape)
    if func in _RESHAPES:
        return [_reshape(tuple(out.shape)) for out in outs]
    rest = args[1:]
    if func is aten.permute.default:
        return [_permute([d % len(shape) for d in rest[0]])]
    if func is aten.transpose.int:
        order = list(range(len(shape)))
        if order:
            a, b = rest[0] % len(shape), rest[1] % len(shape)
            order[a], order[b] = order[b], order[a]
        return [_permute(order)]
    if func is aten.t.default:
        return [_permute(list(reversed(range(len(shape)))))]
    if func is aten.slice.Tensor:
        dim = (rest[0] if rest else kwargs.get("dim", 0)) % len(shape)
        start, end, step = (*rest[1:], *(None,) * (3 - len(rest[1:])))
        return [_index(dim, slice(*slice(start, end, step or 1).indices(shape[dim])))]
    if func is aten.select.int:
        dim = rest[0] % len(shape)
        return [_index(dim, int(rest[1]) % shape[dim])]
    if func is aten.unbind.int:
        dim = (rest[0] if rest else kwargs.get("dim", 0)) % len(shape)
        return [_index(dim, i) for i in range(shape[dim])]
    if func in (aten.split.Tensor, aten.split_with_sizes.default):
        dim = (rest[1] if len(rest) > 1 else kwargs.get("dim", 0)) % len(shape)
        return _split(dim, [out.shape[dim] for out in outs])
    if func is aten.expand.default:
        wide = tuple(outs[0].shape)
        repeats = functools.partial(operator.ne, outs[0].numel(), base.numel())
        return [View(lambda x: broadcast(x, wide), lambda x, new: jnp.reshape(new, x.shape), repeats)]
    if func is aten.as_strided.default:
        return [_as_strided(base, outs[0])]
    if func is aten.view.dtype:
        return [_bits(base.dtype, outs[0].dtype)]
    if func in _OF_NUMBERS:
        return [_OF_NUMBERS[func]]
    if func.namespace != "aten":
        raise NotImplementedError("a view that is not PyTorch's own")
    return _by_index_map(func, base, args, kwargs)


def _parts(x: jax.Array) -> jax.Array:
    return jnp.stack([jnp.real(x), jnp.imag(x)], -1)


def _joined(x: jax.Array) -> jax.Array:
    return lax.complex(x[..., 0], x[..., 1])


_OF_NUMBERS = {
    aten.view_as_real.default: View(_parts, lambda x, new: _joined(new)),
    aten.view_as_complex.default: View(_joined, lambda x, new: _parts(new)),
    # PyTorch puts both off until somebody reads, and marks the tensor; here the view itself computes it.
    aten._conj.default: View(jnp.conj, lambda x, new: jnp.conj(new)),
    aten._neg_view.default: View(jnp.negative, lambda x, new: jnp.negative(new)),
}
METAS[aten._conj.default] = METAS[aten._neg_view.default] = aten.alias.default


def _bits(old: torch.dtype, new: torch.dtype) -> View:
    """The same bits read as another dtype; nothing of it is differentiable, in PyTorch neither."""
    if old.is_complex or new.is_complex:
        raise NotImplementedError("the bits of complex numbers; use view_as_real and view_as_complex")
    here, there = jnp.dtype(jax_dtype(old)), jnp.dtype(jax_dtype(new))
    if (here.itemsize, there.itemsize) != (old.itemsize, new.itemsize):
        raise NotImplementedError(
            "the bits of 64-bit numbers, which JAX stores as 32-bit ones while x64 is off; an integer input of 32 bits "
            "counts as one of 64, and `x.to(torch.int32)` has 32"
        )
    # XLA takes two casts in a row together, and fails where three sizes are involved.
    there, back = (functools.partial(_bitcast_alone, dtype=dtype) for dtype in (there, here))
    return View(there, lambda x, value: back(value))


def _bitcast_alone(x: jax.Array, dtype: Any) -> jax.Array:
    return _bitcast(lax.optimization_barrier(stop_gradient(x)), dtype)


def _bitcast(x: jax.Array, dtype: Any) -> jax.Array:
    dtype = jnp.dtype(dtype)
    x = x.view(jnp.uint8) if x.dtype == bool else x
    if jnp.issubdtype(dtype, jnp.bool_):
        return _bitcast(x, jnp.uint8) != 0
    ratio = dtype.itemsize // x.dtype.itemsize
    if ratio > 1:
        x = jnp.reshape(x, (*x.shape[:-1], x.shape[-1] // ratio, ratio))
    out = lax.bitcast_convert_type(x, dtype)
    return jnp.reshape(out, (*out.shape[:-2], -1)) if out.ndim > x.ndim else out


_reshaped, _transposed, _split_up = map(inlined, (lax.reshape, lax.transpose, lax.split))
_taken, _sliced = map(inlined, (lax.index_in_dim, lax.slice_in_dim))


def _reshape(shape: tuple[int, ...]) -> View:
    return View(lambda x: _reshaped(x, shape), lambda x, new: _reshaped(new, x.shape))


def _permute(dims: Sequence[int]) -> View:
    order = tuple(dims)
    inverse = tuple(order.index(i) for i in range(len(order)))
    return View(lambda x: _transposed(x, order), lambda x, new: _transposed(new, inverse))


def _index(dim: int, index: int | slice) -> View:
    where = (slice(None),) * dim + (index,)

    if isinstance(index, int):
        return View(lambda x: _taken(x, index, dim, keepdims=False), lambda x, new: x.at[where].set(new))
    start, stop, step = index.start, max(index.start, index.stop), index.step
    return View(lambda x: _sliced(x, start, stop, step, dim), lambda x, new: x.at[where].set(new))


def _split(dim: int, sizes: list[int]) -> list[View]:
    """All pieces at once: the gradients then meet in one concatenation instead of a sum of padded arrays."""
    known: list[Any] = [None, None, ()]

    def piece(i: int) -> View:
        start = sum(sizes[:i])

        def get(x: jax.Array) -> jax.Array:
            if known[0] is not x or known[1] is not REGION.notes:
                known[:] = [x, REGION.notes, _split_up(x, tuple(sizes), dim)]
            return known[2][i]

        return View(get, _index(dim, slice(start, start + sizes[i], 1)).put)

    return [piece(i) for i in range(len(sizes))]


def _by_index_map(func: Callable, base: BridgeTensor, args: tuple, kwargs: dict) -> list[View]:
    """Any other view: run it in PyTorch on the numbers of the elements, and gather and scatter by them."""
    with below_modes():
        return [_gather(index) for index in _index_maps(func, base, args, kwargs)]


def _index_maps(func: Callable, base: BridgeTensor, args: tuple, kwargs: dict) -> list[np.ndarray]:
    out = func(torch.arange(base.numel()).reshape(base.shape), *args[1:], **kwargs)
    return [o.numpy() for o in (out if isinstance(out, (list, tuple)) else [out])]


def _as_strided(base: BridgeTensor, out: torch.Tensor) -> View:
    """It counts in memory, not in the tensor it is called on, so it starts from the cell's whole base.

    The gradient reaches the elements of the tensor it is called on only, as in PyTorch. Once something was written into
    the memory, PyTorch takes the view of the base, and it reaches all.
    """
    layout = base._cell.storage.layout
    assert layout is not None
    if layout.dtype != out.dtype:
        raise NotImplementedError("it counts elements of a tensor that views another dtype")
    index = elements(layout, positions(out))
    if index is None:
        raise NotImplementedError("it reaches memory that is no element of the tensor")
    view = _gather(index)
    own = np.isin(positions(out), positions(base._meta))
    if own.all():
        return view
    storage, versions = base._cell.storage, [base._cell.version]

    def get(x: jax.Array) -> jax.Array:
        as_it_was = storage.version in versions
        return jnp.where(own, view.get(x), stop_gradient(view.get(x))) if as_it_was else view.get(x)

    return dataclasses.replace(view, get=get, renew=versions.clear)


def _gather(index: np.ndarray) -> View:
    return View(
        lambda x: jnp.reshape(x, -1)[index],
        lambda x, new: jnp.reshape(jnp.reshape(x, -1).at[index].set(new), x.shape),
        lambda: np.unique(index).size != index.size,
    )
