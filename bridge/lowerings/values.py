"""Operations whose result has a shape, or is a Python number, that depends on values.

Under `jit` values are not known and the dispatcher says so; where they are (a constant of the module, or a call outside
`jit`), PyTorch itself computes the answer.
"""

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F

from bridge._compat.jax import Tracer
from bridge._compat.torch import below_modes, tree_map_only
from bridge.errors import refusal
from bridge.lowerings.indexing import picked
from bridge.lowerings.registry import DECOMPOSITIONS, FUNCTIONS, decomposes, lowers
from bridge.symbolic.ranges import range_of
from bridge.tensor.arrays import jax_dtype
from bridge.tensor.tensor import BridgeTensor, blank, fresh

aten = torch.ops.aten


def _known(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, BridgeTensor):
        return tensor
    array = np.array(jnp.asarray(tensor.value, jnp.float32) if tensor.dtype == torch.bfloat16 else tensor.value)
    return torch.from_numpy(array).to(tensor.dtype)


def _constant(tensor: torch.Tensor) -> BridgeTensor:
    array = jnp.asarray(tensor.numpy(), jax_dtype(tensor.dtype))
    return fresh(array, blank(tensor.shape, None, tensor.dtype), live=False)


def _by_pytorch(op: Any) -> Any:
    def computed(*args, **kwargs):
        with below_modes():
            args, kwargs = tree_map_only(BridgeTensor, _known, (args, kwargs))
            return tree_map_only(torch.Tensor, _constant, op(*args, **kwargs))

    return computed


for _op in (
    aten.nonzero.default, aten._unique2.default, aten.unique_dim.default, aten.unique_consecutive.default,
    aten.equal.default,
):  # fmt: skip
    DECOMPOSITIONS[_op] = _by_pytorch(_op)


_bincount_by_pytorch = _by_pytorch(aten.bincount.default)


@decomposes(aten.bincount.default)
def bincount(x, weights=None, minlength=0):
    """Of traced numbers where they are known to lie below `minlength`, which then is the size of the result."""
    if not isinstance(x, BridgeTensor) or not isinstance(x.value, Tracer):
        if not isinstance(weights, BridgeTensor) or not isinstance(weights.value, Tracer):
            return _bincount_by_pytorch(x, weights, minlength)
        minlength = max(minlength, int(x.max()) + 1 if x.numel() else 0)
    elif not (range_of(x).low >= 0 and range_of(x).high < minlength):
        raise refusal(
            "`torch.bincount` counts numbers that are not known to be less than `minlength`, so the shape of its "
            "result depends on data",
            "write one_hot(x, n).sum(0) with a number n of classes, or x.clamp(0, n - 1) and minlength=n",
        )
    if weights is None:
        weights = torch.ones(x.shape, dtype=torch.int64)
    elif weights.dtype != torch.float32:
        weights = weights.to(torch.float64)
    return torch.zeros(minlength, dtype=weights.dtype).scatter_add(0, x.to(torch.int64), weights)


@decomposes(aten.allclose.default)
def allclose(x, y, rtol=1e-05, atol=1e-08, equal_nan=False):
    return bool(torch.isclose(x, y, rtol, atol, equal_nan).all())


@decomposes(aten.masked_select.default)
def masked_select(x, mask):
    x, mask = torch.broadcast_tensors(x, mask)
    return x.reshape(-1)[torch.nonzero(mask.reshape(-1))[:, 0]]


@decomposes(aten.index.Tensor)
def index(x, indices):
    """A mask becomes the positions where it is true, which takes its values."""
    expanded = []
    for place in indices:
        if place is not None and place.dtype in (torch.bool, torch.uint8):
            with below_modes():
                expanded += [_constant(column) for column in _known(place).nonzero().unbind(1)]
        else:
            expanded.append(place)
    return aten._unsafe_index.Tensor(x, expanded)


@lowers(aten._unsafe_index.Tensor)
def index_by_positions(x, indices):
    return picked(lambda x, indices: x[tuple(slice(None) if i is None else i for i in indices)], x, indices)


@decomposes(aten.repeat_interleave.Tensor)
def repeat_interleave(repeats, *, output_size=None):
    """The positions to repeat; with `output_size` given it needs no values."""
    size = int(repeats.sum()) if output_size is None else output_size
    return torch.searchsorted(repeats.cumsum(0), torch.arange(size), right=True)


@decomposes(aten.one_hot.default)
def one_hot(x, num_classes=-1):
    """Taken whole: PyTorch insists on int64, and integers that come from JAX have 32 bits unless x64 is on."""
    count = int(x.max()) + 1 if num_classes == -1 else num_classes
    return (x.unsqueeze(-1) == torch.arange(count)).to(torch.int64)


@decomposes(aten.take_along_dim.default)
def take_along_dim(x, indices, dim=None):
    """Taken whole, as `one_hot` is."""
    if dim is None:
        return x.reshape(-1).gather(0, indices.reshape(-1).to(torch.int64))
    dim = dim % x.dim()
    if not isinstance(indices, BridgeTensor):
        indices = indices % x.shape[dim]  # PyTorch lets them wrap around; JAX does so for the negative ones
    shape = torch.broadcast_shapes(
        [1 if d == dim else n for d, n in enumerate(x.shape)],
        [1 if d == dim else n for d, n in enumerate(indices.shape)],
    )
    wide = [(*shape[:dim], t.shape[dim], *shape[dim + 1 :]) for t in (x, indices)]
    return x.expand(wide[0]).gather(dim, indices.expand(wide[1]).to(torch.int64))


@decomposes(aten.cov.default)
def cov(x, *, correction=1, fweights=None, aweights=None):
    """Taken whole: PyTorch asks for the values of weights, to refuse some and to divide by zero at least."""
    weights = [w for w in (fweights, aweights) if w is not None]
    if not any(isinstance(w, BridgeTensor) and isinstance(w.value, Tracer) for w in weights):
        return aten.cov.default(x, correction=correction, fweights=fweights, aweights=aweights)
    weight = weights[0] if len(weights) == 1 else weights[0] * weights[1]
    total = weight.sum()
    lost = correction if aweights is None or not correction else correction * (weight * aweights).sum() / total
    rows = x.reshape(1, -1) if x.dim() < 2 else x
    centred = rows - ((rows * weight).sum(1) / total).unsqueeze(1)
    products, freedom = centred @ (centred * weight).mT.conj(), total - lost
    return (products / torch.where(freedom <= 0, 0, freedom)).squeeze()


FUNCTIONS[torch.cov] = FUNCTIONS[torch.Tensor.cov] = aten.cov.default
FUNCTIONS[F.one_hot] = aten.one_hot.default
FUNCTIONS[torch.take_along_dim] = FUNCTIONS[torch.Tensor.take_along_dim] = aten.take_along_dim.default


@decomposes(aten._has_same_storage_numel.default)
def has_same_storage_numel(x, y):
    first, second = (getattr(t, "_meta", t).untyped_storage().size() // t.itemsize for t in (x, y))
    return first == second


DECOMPOSITIONS |= {aten._is_all_true.default: torch.all, aten._is_any_true.default: torch.any}


@decomposes(aten._new_zeros_with_same_feature_meta.default)
def zeros_for_a_tangent(x, other, *, self_num_batch_dims=0):
    """The tensor into which forward-mode differentiation copies a tangent that lies in memory unlike `other`."""
    batch, offset = x.shape[:self_num_batch_dims], other.storage_offset()
    if other.is_contiguous() and not offset:
        return other.new_zeros((*batch, *other.shape))
    size = offset + sum((n - 1) * s for n, s in zip(other.shape, other.stride(), strict=True)) + 1
    memory = other.new_zeros((*batch, size))
    return memory.as_strided((*batch, *other.shape), (*memory.stride()[:-1], *other.stride()), offset)


# The parts are no views to PyTorch, which cells of recurrent networks write into; `split` would forbid it.


@decomposes(aten.unsafe_split.Tensor)
def unsafe_split(x, size, dim=0):
    length = x.shape[dim]
    starts = range(0, length, size) if length else [0]
    return [x.narrow(dim, start, min(size, length - start)) for start in starts]


@decomposes(aten.unsafe_split_with_sizes.default)
def unsafe_split_with_sizes(x, sizes, dim=0):
    starts = itertools.accumulate(sizes, initial=0)
    return [x.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=False)]
