"""Operations whose result has a shape, or is a Python number, that depends on values.

Under `jit` values are not known, and the dispatcher raises an error; where they are (a constant of the module, or a
call outside `jit`), PyTorch itself computes the answer.
"""

import itertools
from typing import Any

import torch
import torch.nn.functional as F

from bridge._compat.jax import Tracer
from bridge._compat.torch import below_modes, tree_map_only
from bridge.context import current, refusal
from bridge.lowerings.indexing import picked
from bridge.lowerings.registry import DECOMPOSITIONS, FUNCTIONS, decomposes, lowers
from bridge.symbolic.ranges import range_of
from bridge.tensor.arrays import array_of, tensor_of
from bridge.tensor.tensor import BridgeTensor, empty_meta, wrap

aten = torch.ops.aten


def is_traced(tensor: Any) -> bool:
    return isinstance(tensor, BridgeTensor) and isinstance(tensor.value, Tracer)


def known(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the numbers on the host; JAX refuses those of a traced array."""
    if isinstance(tensor, BridgeTensor):
        return tensor_of(tensor.value).to(tensor.dtype)
    return tensor


def _constant(tensor: torch.Tensor) -> BridgeTensor:
    return wrap(array_of(tensor), empty_meta(tensor.shape, None, tensor.dtype), live=False)


def _by_pytorch(op: Any) -> Any:
    def computed(*args, **kwargs):
        with below_modes():
            args, kwargs = tree_map_only(BridgeTensor, known, (args, kwargs))
            return tree_map_only(torch.Tensor, _constant, op(*args, **kwargs))

    return computed


for _op in (
    aten.nonzero.default, aten._unique2.default, aten.unique_dim.default, aten.unique_consecutive.default,
):  # fmt: skip
    DECOMPOSITIONS[_op] = _by_pytorch(_op)


@decomposes(aten.bincount.default)
def bincount(x, weights=None, minlength=0):
    """Traced numbers are taken to lie below `minlength`, which is then the size of the result.

    Where PyTorch's result is longer, every count is the least integer, or NaN with weights.
    """
    within = None
    if not is_traced(x):
        counts = _by_pytorch(aten.bincount.default)(x, None, minlength)
        if weights is None:
            return counts
        minlength = counts.numel()
    elif not minlength:
        raise refusal(
            "`torch.bincount` of traced numbers has a length that depends on data",
            "give it minlength=n, with a number n that is larger than all of them",
        )
    elif not (range_of(x).low >= 0 and range_of(x).high < minlength):
        call = current()
        if call is not None:
            call.note_check()
        within = ((x >= 0) & (x < minlength)).all()
    if weights is None:
        weights = torch.ones(x.shape, dtype=torch.int64)
        wrong = -(2**31)
    else:
        if weights.dtype != torch.float32:
            weights = weights.to(torch.float64)
        wrong = float("nan")
    if within is None:
        return torch.zeros(minlength, dtype=weights.dtype).scatter_add(0, x.to(torch.int64), weights)
    places = x.clamp(0, minlength - 1).to(torch.int64)
    counts = torch.zeros(minlength, dtype=weights.dtype).scatter_add(0, places, weights)
    return torch.where(within, counts, wrong)


@decomposes(aten.allclose.default)
def allclose(x, y, rtol=1e-05, atol=1e-08, equal_nan=False):
    return bool(torch.isclose(x, y, rtol, atol, equal_nan).all())


@decomposes(aten.masked_select.default)
def masked_select(x, mask):
    x, mask = torch.broadcast_tensors(x, mask)
    return x.reshape(-1)[torch.nonzero(mask.reshape(-1))[:, 0]]


@decomposes(aten.index.Tensor)
def index(x, indices):
    """Replaces a mask by the positions where it is true, which needs its values."""
    expanded = []
    for place in indices:
        if place is not None and place.dtype in (torch.bool, torch.uint8):
            with below_modes():
                expanded += [_constant(column) for column in known(place).nonzero().unbind(1)]
        else:
            expanded.append(place)
    return aten._unsafe_index.Tensor(x, expanded)


@lowers(aten._unsafe_index.Tensor)
def index_by_positions(x, indices):
    return picked(lambda x, indices: x[tuple(slice(None) if i is None else i for i in indices)], x, indices)


@decomposes(aten.repeat_interleave.Tensor)
def repeat_interleave(repeats, *, output_size=None):
    """Returns the positions to repeat; with `output_size` given, no values are needed."""
    size = int(repeats.sum()) if output_size is None else output_size
    return torch.searchsorted(repeats.cumsum(0), torch.arange(size), right=True)


@decomposes(aten.one_hot.default)
def one_hot(x, num_classes=-1):
    """PyTorch's function insists on int64, and integers that come from JAX have 32 bits unless x64 is on."""
    count = int(x.max()) + 1 if num_classes == -1 else num_classes
    return (x.unsqueeze(-1) == torch.arange(count)).to(torch.int64)


@decomposes(aten.take_along_dim.default)
def take_along_dim(x, indices, dim=None):
    """Replaces PyTorch's function for the same reason as `one_hot`."""
    return aten.take_along_dim.default.decompose(x, indices.to(torch.int64), dim)


FUNCTIONS[F.one_hot] = aten.one_hot.default
FUNCTIONS[torch.take_along_dim] = FUNCTIONS[torch.Tensor.take_along_dim] = aten.take_along_dim.default


DECOMPOSITIONS[aten._is_any_true.default] = torch.any
DECOMPOSITIONS[aten._assert_async.default] = DECOMPOSITIONS[aten._assert_async.msg] = lambda *_: None
"""A check of a traced value is taken for passed, as by PyTorch's compiler."""


@decomposes(aten._new_zeros_with_same_feature_meta.default)
def zeros_for_a_tangent(x, other, *, self_num_batch_dims=0):
    """Returns the tensor into which forward mode copies a tangent whose memory layout differs from that of `other`."""
    batch = x.shape[:self_num_batch_dims]
    offset = other.storage_offset()
    if other.is_contiguous() and not offset:
        return other.new_zeros((*batch, *other.shape))
    size = offset + sum((n - 1) * s for n, s in zip(other.shape, other.stride(), strict=True)) + 1
    memory = other.new_zeros((*batch, size))
    return memory.as_strided((*batch, *other.shape), (*memory.stride()[:-1], *other.stride()), offset)


# PyTorch does not treat the parts as views, and cells of recurrent networks write into them; `split` would forbid it.


@decomposes(aten.unsafe_split.Tensor)
def unsafe_split(x, size, dim=0):
    length = x.shape[dim]
    return unsafe_split_with_sizes(x, [min(size, length - start) for start in range(0, length, size)] or [0], dim)


@decomposes(aten.unsafe_split_with_sizes.default)
def unsafe_split_with_sizes(x, sizes, dim=0):
    starts = itertools.accumulate(sizes, initial=0)
    return [x.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=False)]
