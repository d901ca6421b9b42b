"""The layers of every architecture: linear and embedding layers that cast, RMS norm, SwiGLU, rotary, attention.

Weights are stored in float32 and cast in the forward pass, so that the optimizer works in full precision for any
`forward_dtype`. Parameter names are those of published TRM checkpoints.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

CosSin = tuple[Float[Tensor, "*batch seq half_head_dim"], Float[Tensor, "*batch seq half_head_dim"]]
Latent = Float[Tensor, "batch positions hidden"]
PerSequence = Float[Tensor, "batch"]
Heads = Float[Tensor, "batch heads seq head_dim"]

# The standard deviation of a unit normal truncated at +-2: sqrt(1 - 4 pdf(2) / (cdf(2) - cdf(-2))).
_STD_OF_UNIT_NORMAL_CUT_AT_2 = 0.8796256610342398


def at_least_float32(x: Tensor) -> Tensor:
    """Casts `x` to float32; a float64 tensor is not changed."""
    return x if x.dtype == torch.float64 else x.to(torch.float32)


def truncated_normal_(tensor: Tensor, std: float) -> Tensor:
    """Fills `tensor` in place from a normal truncated at two sigmas, such that the result has standard deviation `std`.

    `nn.init.trunc_normal_` takes the deviation *before* truncation, so its result is 12 % narrower than `std`; here
    sigma is raised to compensate, as in Flax and in the published TRM.
    """
    if std == 0:
        return nn.init.zeros_(tensor)
    sigma = std / _STD_OF_UNIT_NORMAL_CUT_AT_2
    return nn.init.trunc_normal_(tensor, std=sigma, a=-2 * sigma, b=2 * sigma)


def round_up(value: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def rms_norm(x: Float[Tensor, "*shape"], epsilon: float, dim: int = -1) -> Float[Tensor, "*shape"]:
    """Divides `x` by its root mean square over one axis; no learned scale.

    Computed in float32, since a mean of squares loses most of its digits in bf16; returned in the dtype of `x`.
    """
    wide = at_least_float32(x)
    mean_square = wide.square().mean(dim=dim, keepdim=True)
    return (wide * torch.rsqrt(mean_square + epsilon)).to(x.dtype)


class CastLinear(nn.Module):
    """A linear layer with float32 weights that computes in the dtype of its input; LeCun normal weights, zero bias."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(truncated_normal_(torch.empty(out_features, in_features), in_features**-0.5))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None

    def forward(self, x: Float[Tensor, "*batch in_features"]) -> Float[Tensor, "*batch out_features"]:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class CastEmbedding(nn.Module):
    """An embedding with float32 weights that returns rows in `dtype`."""

    def __init__(self, num_embeddings: int, embedding_dim: int, init_std: float, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype
        self.embedding_weight = nn.Parameter(truncated_normal_(torch.empty(num_embeddings, embedding_dim), init_std))

    def forward(self, ids: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch embedding_dim"]:
        return F.embedding(ids, self.embedding_weight.to(self.dtype))


class SwiGLU(nn.Module):
    """A gated MLP, `down(silu(gate) * up)`, with gate and up in one matrix.

    The hidden width is two thirds of `expansion * features`, so that its three matrices have as many parameters as the
    two of a plain MLP, rounded up to a multiple of `multiple_of`. Published checkpoints use 256. For small widths this
    rounding dominates (37 positions with expansion 4 give 99, rounded up to 256), so tiny models use a smaller
    multiple. Raises ValueError if the width is 0.
    """

    def __init__(self, features: int, expansion: float, multiple_of: int = 256):
        super().__init__()
        width = round_up(round(expansion * features * 2 / 3), multiple_of)
        if not width:
            raise ValueError(
                f"expansion {expansion} gives an MLP of width 0 for {features} features; "
                f"use more than {0.75 / features:.3g}"
            )
        self.gate_up_proj = CastLinear(features, 2 * width)
        self.down_proj = CastLinear(width, features)

    def forward(self, x: Float[Tensor, "*batch features"]) -> Float[Tensor, "*batch features"]:
        gate, up = (F.linear(x, weight) for weight in self.gate_up_proj.weight.to(x.dtype).chunk(2))
        return self.down_proj(F.silu(gate) * up)

    def along_positions(self, x: Float[Tensor, "batch features channels"]) -> Float[Tensor, "batch features channels"]:
        """Applies the MLP over the second axis, as `self(x.transpose(1, 2)).transpose(1, 2)`; channels stay last."""
        gate, up = (weight @ x for weight in self.gate_up_proj.weight.to(x.dtype).chunk(2))
        return self.down_proj.weight.to(x.dtype) @ (F.silu(gate) * up)


class RotaryEmbedding(nn.Module):
    """Cosines and sines of the rotary position encoding, precomputed; shape (positions, head_dim / 2).

    The buffers are not persistent, since the configuration determines them.
    """

    def __init__(self, head_dim: int, max_positions: int, base: float):
        super().__init__()
        frequencies = 1 / base ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
        self.cos_cached = nn.Buffer(angles.cos(), persistent=False)
        self.sin_cached = nn.Buffer(angles.sin(), persistent=False)

    def forward(self) -> CosSin:
        return self.cos_cached, self.sin_cached


def rotate(
    halves: tuple[Float[Tensor, "batch seq heads half_head_dim"], ...], cos_sin: CosSin
) -> Float[Tensor, "batch seq heads head_dim"]:
    """Rotates each pair of channels by the angle of its position, computed in the dtype of the cosines.

    A pair is channel i of the first half of a head and channel i of the second half, not two adjacent channels.
    """
    cos, sin = (table[..., None, :] for table in cos_sin)
    first, second = (half.to(cos.dtype) for half in halves)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(halves[0].dtype)


class Attention(nn.Module):
    """Multi-head attention without a causal mask; grouped-query attention if `num_key_value_heads` is smaller.

    One matrix projects to the heads of queries, keys and values, in this order.
    Raises ValueError if the query heads do not divide over the key/value heads.
    """

    def __init__(self, hidden_size: int, head_dim: int, num_heads: int, num_key_value_heads: int):
        super().__init__()
        if num_heads % num_key_value_heads:
            raise ValueError(
                f"{num_heads} query heads do not divide over {num_key_value_heads} key/value heads; "
                f"use a divisor of {num_heads}"
            )
        self.head_dim = head_dim
        self.num_heads = num_heads
        self.num_key_value_heads = num_key_value_heads
        self.qkv_proj = CastLinear(hidden_size, (num_heads + 2 * num_key_value_heads) * head_dim)
        self.o_proj = CastLinear(num_heads * head_dim, hidden_size)

    def forward(
        self, x: Float[Tensor, "batch seq hidden"], cos_sin: CosSin | None
    ) -> Float[Tensor, "batch seq hidden"]:
        sizes = [n * self.head_dim for n in (self.num_heads, self.num_key_value_heads, self.num_key_value_heads)]
        query, key, value = self.qkv_proj.weight.to(x.dtype).split(sizes)
        query = self.project(x, query, cos_sin)
        key = self.project(x, key, cos_sin)
        value = self.project(x, value, None)
        attended = self.attend(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
        return self.o_proj(attended.transpose(1, 2).flatten(2))

    def project(
        self, x: Float[Tensor, "batch seq hidden"], weight: Float[Tensor, "features hidden"], cos_sin: CosSin | None
    ) -> Float[Tensor, "batch seq heads head_dim"]:
        """Projects to heads and rotates them, with one product for each half of the channels of all heads."""
        if cos_sin is None:
            return F.linear(x, weight).unflatten(-1, (-1, self.head_dim))
        half = self.head_dim // 2
        weights = weight.unflatten(0, (-1, 2, half)).unbind(1)
        return rotate(tuple(F.linear(x, w.flatten(0, 1)).unflatten(-1, (-1, half)) for w in weights), cos_sin)

    def attend(self, query: Heads, key: Heads, value: Heads) -> Heads:
        """Computes the scaled dot-product attention of each head."""
        return F.scaled_dot_product_attention(query, key, value, enable_gqa=self.num_key_value_heads != self.num_heads)
