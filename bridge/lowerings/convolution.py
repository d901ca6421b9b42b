"""Convolutions. torchax pads a transposed one as if its kernel were not dilated."""

import jax
import jax.numpy as jnp
import torch

from bridge.lowerings.broadcasting import broadcast
from bridge.lowerings.registry import lowers

aten = torch.ops.aten


@lowers(aten.convolution.default)
def convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups):
    rank = weight.ndim - 2
    stride, padding, dilation, extra = (
        tuple(v) * (rank // len(v)) for v in (stride, padding, dilation, output_padding)
    )
    sizes = weight.shape[2:]
    if transposed:  # the gradient of a convolution by its input: holes in the input, the kernel turned round
        weight = jnp.flip(weight, tuple(range(2, rank + 2)))
        weight = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:]).swapaxes(1, 2)
        weight = weight.reshape(-1, *weight.shape[2:])
        reach = [d * (k - 1) for d, k in zip(dilation, sizes, strict=True)]
        pads = [(r - p, r - p + e) for r, p, e in zip(reach, padding, extra, strict=True)]
        stride, holes = (1,) * rank, stride
    else:
        pads, holes = [(p, p) for p in padding], (1,) * rank
    out = jax.lax.conv_general_dilated(
        x, weight, stride, pads, lhs_dilation=holes, rhs_dilation=dilation, feature_group_count=groups
    )
    return out if bias is None else out + broadcast(bias.reshape(1, -1, *(1,) * rank), out.shape)
