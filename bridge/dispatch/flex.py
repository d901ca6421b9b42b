"""`flex_attention`, by evaluating its functions on all indices.

Without a function of the scores it is attention with a boolean mask, which the lowering of
`scaled_dot_product_attention` serves, `bridge.fused_attention` among others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from bridge._compat.flex import SAFE_SOFTMAX, is_identity, is_without_mask
from bridge.context import current
from bridge.symbolic.places import places_of
from bridge.tensor.tensor import BridgeTensor

_KNOWN = 2**24
"""Largest number of elements of a mask that is a constant of the program."""


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable,
    block_mask: tuple,
    scale: float,
    kernel_options: dict[str, Any],
    *_captured: tuple,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the attention, and logarithms to the base 2 of the sums of its weights and of the largest of them."""
    key, value = (x.expand(len(query), -1, -1, -1) for x in (key, value))
    mask = _mask(block_mask, len(query), query.shape[1], query.shape[2], key.shape[2])
    is_plain = is_identity(score_mod)
    if is_plain and not any(kernel_options.get(name) for name in ("OUTPUT_LOGSUMEXP", "OUTPUT_MAX")):
        out = _plain(query, key, value, mask, scale)
        nothing = query.new_empty(0)
        return _laid_out_as(query, out), nothing, nothing
    wide = torch.promote_types(query.dtype, torch.float32)
    heads = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(heads, dim=1) for x in (key, value))
    scores = query.to(wide) @ key.to(wide).mT * scale
    if not is_plain:
        scores = _scored(score_mod, scores).to(wide)
    if mask is not None:
        scores = torch.where(mask, scores, float("-inf"))
    alone = (scores == float("-inf")).all(-1)
    sums = torch.where(alone, float("-inf"), scores.logsumexp(-1))
    out = SAFE_SOFTMAX(scores, -1).to(query.dtype) @ value.to(query.dtype)
    return _laid_out_as(query, out), sums / math.log(2), scores.amax(-1) / math.log(2)


def _plain(query: Any, key: Any, value: Any, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    settings = {"scale": scale, "enable_gqa": query.shape[1] != key.shape[1]}
    if mask is not None and _is_causal(mask):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, **settings)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **settings)


def _is_causal(mask: torch.Tensor) -> bool:
    """True for a known mask with which each position attends to itself and to earlier ones."""
    if type(mask) is BridgeTensor or mask.dim() != 2 or mask.shape[0] != mask.shape[1]:
        return False
    return torch.equal(mask, torch.ones_like(mask).tril())


def _laid_out_as(query: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Returns the result with its dimensions in the order of the query's, as PyTorch's kernels do."""
    order = sorted(range(3), key=lambda dim: -query.stride(dim))
    if order == [0, 1, 2]:
        return out
    back = [order.index(dim) for dim in range(3)]
    return out.permute(*order, 3).contiguous().permute(*back, 3)


def _mask(block_mask: tuple, batch: int, heads: int, length: int, keys: int) -> torch.Tensor | None:
    """Returns which keys a query attends to, without dimensions on which it does not depend; None for all keys.

    A block that is in no list is left out, whatever the mask's function says, as by PyTorch's kernels; its unfused form
    reads the function alone.
    """
    (_, _, partial, partial_places, full, full_places), (rows, columns, mask_mod) = block_mask[:6], block_mask[-3:]
    positions = torch.arange(length), torch.arange(keys)
    call = current()
    if length * keys > _KNOWN and call is not None:
        positions = call.materialize(positions[0]), call.materialize(positions[1])
    places = positions[0] // rows, positions[1] // columns
    blocks = _blocks(partial, partial_places, places, -(-keys // columns))
    if not is_without_mask(mask_mod):
        blocks = blocks & _evaluated(mask_mod, batch, heads, positions)
    if full is not None:
        blocks = blocks | _blocks(full, full_places, places, -(-keys // columns))
    while blocks.dim() > 2 and blocks.shape[0] == 1:
        blocks = blocks[0]
    if type(blocks) is not BridgeTensor and bool(blocks.all()):
        return None
    return blocks


def _blocks(
    counts: torch.Tensor, listed: torch.Tensor, places: tuple[torch.Tensor, torch.Tensor], columns: int
) -> torch.Tensor:
    """Returns the mask of the blocks that are in the lists, the first `counts` of `listed`.

    `places`: the block of each row, and of each key. `columns`: the number of blocks of keys.
    """
    counted = torch.arange(listed.shape[-1]) < counts.unsqueeze(-1)
    made = torch.zeros((*listed.shape[:-1], columns), dtype=torch.int32)
    made = made.scatter_add(-1, listed.long() * counted, counted.to(torch.int32)) > 0
    return made.index_select(-2, places[0]).index_select(-1, places[1])


def _evaluated(
    mask_mod: Callable, batch: int, heads: int, positions: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Returns `mask_mod` of all indices. It has dimensions for batch and heads only if the function depends on them."""
    inner = torch.vmap(torch.vmap(mask_mod, (None, None, None, 0)), (None, None, 0, None))
    for of_batch, of_heads in itertools.product((False, True), repeat=2):
        over_heads = torch.vmap(inner, (None, 0, None, None), out_dims=0 if of_heads else None)
        function = torch.vmap(over_heads, (0, None, None, None), out_dims=0 if of_batch else None)
        try:
            with _Indexing():
                mask = function(torch.arange(batch), torch.arange(heads), *positions)
        except ValueError as error:  # it depends on what it was taken not to
            if "out_dim" not in str(error) or (of_batch and of_heads):
                raise
        else:
            return mask.unsqueeze(1) if of_batch and not of_heads else mask
    raise AssertionError


def _scored(score_mod: Callable, scores: torch.Tensor) -> torch.Tensor:
    function = score_mod
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        function = torch.vmap(function, (0, *dims))
    with _Indexing():
        return function(scores, *map(torch.arange, scores.shape))


class _Indexing(TorchFunctionMode):
    """Indexes by tensors without dimensions, whose number `torch.vmap` would ask for."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__getitem__:
            places = places_of(args[1])
            if all(isinstance(each, torch.Tensor) and not each.dim() for each in places):
                return torch.ops.aten.index.Tensor(args[0], list(places))
        return func(*args, **(kwargs or {}))
