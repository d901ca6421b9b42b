"""What a run may compute parts of its model with, as arguments of `bridge.export`.

Pallas kernels on a TPU, and on a CPU the same operations in an order that suits it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import bridge
from bridge.lowerings.registry import METAS
from models_torch.layers import SwiGLU
from train_jax.kernels.mix_positions import fused_mix_positions, mix_positions
from train_jax.kernels.normed_mlp import fused_normed_mlp, normed_mlp
from train_jax.kernels.on_cpu import joined_mix_positions, joined_normed_mlp
from train_jax.run.config import ComputeConfig

_ATTENTION = "aten::scaled_dot_product_attention"
_LIBRARY = torch.library.Library("trm", "DEF")
_LIBRARY.define("normed_mlp(Tensor x, Tensor gate_up, Tensor down, float epsilon, int dim) -> Tensor")
_LIBRARY.define("mix_positions(Tensor x, Tensor gate_up, Tensor down) -> Tensor")

_NORMED_MLP, _MIX_POSITIONS = torch.ops.trm.normed_mlp.default, torch.ops.trm.mix_positions.default
bridge.LOWERINGS[_NORMED_MLP], bridge.LOWERINGS[_MIX_POSITIONS] = normed_mlp, mix_positions
METAS[_NORMED_MLP] = METAS[_MIX_POSITIONS] = lambda x, *_: torch.empty_like(x)
_MLPS = {
    "tpu": {_NORMED_MLP.name(): fused_normed_mlp, _MIX_POSITIONS.name(): fused_mix_positions},
    "cpu": {_NORMED_MLP.name(): joined_normed_mlp, _MIX_POSITIONS.name(): joined_mix_positions},
}
"""Platform -> the lowerings of `--compute.mlp fused`."""


def kernels(config: ComputeConfig, platform: str) -> dict[str, Any]:
    """Returns the arguments of `bridge.export` for the kernels that the run asks for; none on a GPU."""
    lowerings, functions = {}, {}
    if platform == "tpu" and config.attention == "fused":
        lowerings[_ATTENTION] = bridge.fused_attention
    if platform in _MLPS and config.mlp == "fused":
        lowerings |= _MLPS[platform]
        functions = {f"models_torch.blocks:{name}": replacement for name, replacement in _AS_ONE_OPERATION.items()}
    return {"lowerings": lowerings, "functions": functions}


def _as_one_operation(operation: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A function of `x`, an MLP and numbers as one operation, which a lowering can serve as a whole."""

    def call(x: torch.Tensor, mlp: SwiGLU, *args: Any, **kwargs: Any) -> torch.Tensor:
        tensors = x, mlp.gate_up_proj.weight, mlp.down_proj.weight
        if not torch.is_grad_enabled():  # the kernel then keeps nothing for a backward pass
            tensors = tuple(each.detach() for each in tensors)
        return operation(*tensors, *args, **kwargs)

    return call


_AS_ONE_OPERATION = {
    "normed_mlp": _as_one_operation(lambda *args, dim=-1: _NORMED_MLP(*args, dim)),
    "mix_positions": _as_one_operation(_MIX_POSITIONS),
}
