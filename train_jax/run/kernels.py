"""What a run may compute parts of its model with, as arguments of `bridge.export`.

Pallas kernels on a TPU, and on a CPU the same operations in an order that suits it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import bridge
from bridge.lowerings.registry import METAS
from models_torch.layers import Attention, CosSin, SwiGLU
from train_jax.kernels.attention import fused_mix_by_attention, mix_by_attention
from train_jax.kernels.mix_positions import fused_mix_positions, joined_mix_positions, mix_positions
from train_jax.kernels.normed_mlp import fused_normed_mlp, joined_normed_mlp, normed_mlp
from train_jax.run.config import ComputeConfig

_LIBRARY = torch.library.Library("trm", "DEF")
_LIBRARY.define("normed_mlp(Tensor x, Tensor gate_up, Tensor down, float epsilon, int dim) -> Tensor")
_LIBRARY.define("mix_positions(Tensor x, Tensor gate_up, Tensor down) -> Tensor")
_LIBRARY.define("attention(Tensor x, Tensor qkv, Tensor output, Tensor? cos, Tensor? sin, int head_dim) -> Tensor")

_NORMED_MLP, _MIX_POSITIONS = torch.ops.trm.normed_mlp.default, torch.ops.trm.mix_positions.default
_MIX_BY_ATTENTION = torch.ops.trm.attention.default
for _operation, _lowering in (
    (_NORMED_MLP, normed_mlp),
    (_MIX_POSITIONS, mix_positions),
    (_MIX_BY_ATTENTION, mix_by_attention),
):
    bridge.LOWERINGS[_operation] = _lowering
    METAS[_operation] = lambda x, *_: torch.empty_like(x)
_MLPS = {
    "tpu": {_NORMED_MLP.name(): fused_normed_mlp, _MIX_POSITIONS.name(): fused_mix_positions},
    "cpu": {_NORMED_MLP.name(): joined_normed_mlp, _MIX_POSITIONS.name(): joined_mix_positions},
}
"""Platform -> the lowerings of `--compute.mlp fused`."""
_ATTENTION = {
    "aten::scaled_dot_product_attention": bridge.fused_attention,
    _MIX_BY_ATTENTION.name(): fused_mix_by_attention,
}
"""The lowerings of `--compute.attention fused` on a TPU."""


def kernels(config: ComputeConfig, platform: str) -> dict[str, Any]:
    """Returns the arguments of `bridge.export` for the kernels that the run asks for; none on a GPU."""
    lowerings, functions = {}, {}
    if platform == "tpu" and config.attention == "fused":
        lowerings |= _ATTENTION
        functions["models_torch.blocks:mix_by_attention"] = _attention_as_one_operation
    if platform in _MLPS and config.mlp == "fused":
        lowerings |= _MLPS[platform]
        functions |= {f"models_torch.blocks:{name}": function for name, function in _MLPS_AS_ONE_OPERATION.items()}
    return {"lowerings": lowerings, "functions": functions}


def _mlp_as_one_operation(operation: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A function of `x`, an MLP and numbers as one operation, which a lowering can serve as a whole."""

    def call(x: torch.Tensor, mlp: SwiGLU, *args: Any, **kwargs: Any) -> torch.Tensor:
        return operation(*_given(x, mlp.gate_up_proj.weight, mlp.down_proj.weight), *args, **kwargs)

    return call


_MLPS_AS_ONE_OPERATION = {
    "normed_mlp": _mlp_as_one_operation(lambda *args, dim=-1: _NORMED_MLP(*args, dim)),
    "mix_positions": _mlp_as_one_operation(_MIX_POSITIONS),
}


def _attention_as_one_operation(x: torch.Tensor, attention: Attention, cos_sin: CosSin | None) -> torch.Tensor:
    """`models_torch.blocks.mix_by_attention` as one operation, if every query head has a key head."""
    if type(attention) is not Attention or attention.num_key_value_heads != attention.num_heads:
        return x + attention(x, cos_sin)
    weights = attention.qkv_proj.weight, attention.o_proj.weight
    return _MIX_BY_ATTENTION(*_given(x, *weights), *(cos_sin or (None, None)), attention.head_dim)


def _given(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors, detached where no gradient is computed: the kernel then keeps nothing for a backward pass."""
    return tensors if torch.is_grad_enabled() else tuple(each.detach() for each in tensors)
