"""`embedding_bag` and its gradients in torch operations."""

import torch

from bridge.lowerings.registry import decomposes

aten = torch.ops.aten


@decomposes(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def embedding_bag(
    weight,
    indices,
    offsets,
    scale_grad_by_freq=False,
    mode=0,
    sparse=False,
    per_sample_weights=None,
    include_last_offset=False,
    padding_idx=-1,
):
    if scale_grad_by_freq:
        raise NotImplementedError("scale_grad_by_freq is not followed")
    starts = offsets[:-1] if include_last_offset else offsets
    bag = torch.searchsorted(starts, torch.arange(indices.numel()), right=True) - 1
    keep = indices != padding_idx if padding_idx >= 0 else torch.ones_like(indices, dtype=torch.bool)
    rows = weight[indices].to(torch.promote_types(weight.dtype, torch.float32))
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(1)
    count = torch.zeros(starts.numel(), dtype=torch.int64).index_add(0, bag, keep.to(torch.int64))
    largest = count
    if mode == 2:
        out, places = _largest_in_bags(rows, bag, keep, count)
        largest = indices[places] if indices.numel() else places
    else:
        out = rows.new_zeros(starts.numel(), weight.shape[1]).index_add(0, bag, rows * keep.unsqueeze(1))
        if mode == 1:
            out = out / count.clamp(min=1).unsqueeze(1)
    return out.to(weight.dtype), bag, count, largest


@decomposes(aten._embedding_bag_backward.default)
def embedding_bag_backward(
    gradient, indices, _offsets, bags, counts, largest, num_weights, by_frequency, mode, sparse, weights, padding_idx=-1
):
    if by_frequency or sparse:
        raise NotImplementedError("scale_grad_by_freq and sparse gradients are not followed")
    zeros = gradient.new_zeros(num_weights, gradient.shape[1])
    if mode == 2:
        return zeros.scatter_add(0, largest, torch.where((counts == 0).unsqueeze(1), 0, gradient))
    rows = gradient[bags]
    if mode == 1:
        rows = rows / counts.clamp(min=1)[bags].unsqueeze(1)
    if weights is not None:
        rows = rows * weights.unsqueeze(1)
    return zeros.index_add(0, indices, torch.where((indices == padding_idx).unsqueeze(1), 0, rows))


@decomposes(aten._embedding_bag_per_sample_weights_backward.default)
def per_sample_weights_backward(gradient, weight, indices, _offsets, bags, _mode, padding_idx=-1):
    products = (gradient[bags.long()] * weight[indices.long()]).sum(-1)
    return torch.where(indices == padding_idx, 0, products)


def _largest_in_bags(
    rows: torch.Tensor, bag: torch.Tensor, keep: torch.Tensor, count: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest entries of each bag, and their rows: the first of equals; nan only where it is first in its bag."""
    size = rows.shape[0]
    if not size:
        zeros = rows.new_zeros(count.shape[0], rows.shape[1])
        return zeros, zeros.to(torch.int64)

    def first(chosen: torch.Tensor) -> torch.Tensor:
        places = torch.where(chosen, torch.arange(size, dtype=torch.int32).unsqueeze(1), size - 1)
        last = torch.full((count.shape[0], chosen.shape[1]), size - 1, dtype=torch.int32)
        return last.index_reduce(0, bag, places, "amin")

    with torch.no_grad():
        kept = keep.unsqueeze(1)
        leads = torch.arange(size).unsqueeze(1) == first(kept)[bag]
        key = torch.where(rows.isnan(), torch.where(leads, float("inf"), float("-inf")), rows)
        key = key.masked_fill(~kept, float("-inf"))
        largest = key.new_zeros(count.shape[0], rows.shape[1]).index_reduce(0, bag, key, "amax", include_self=False)
        places = first(kept & (key == largest[bag])).to(torch.int64)
    return torch.where((count == 0).unsqueeze(1), 0, rows.gather(0, places)), places
