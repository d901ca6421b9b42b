"""The implementations of operations that a run can choose, as arguments of `bridge.export`.

They are Pallas kernels on a TPU, and on a CPU the same operations in an order that needs fewer products.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

import bridge
from bridge.lowerings.attention import attention_by_operations
from bridge.lowerings.registry import METAS
from models_torch.layers import Attention, CosSin, SwiGLU
from train_jax.core.kernels.attention import fused_mix_by_attention, mix_by_attention
from train_jax.core.kernels.mix_positions import fused_mix_positions, joined_mix_positions, mix_positions
from train_jax.core.kernels.normed_mlp import fused_normed_mlp, joined_normed_mlp, normed_mlp
from train_jax.errors import UserError
from train_jax.run.choices import choices_for
from train_jax.run.config import ComputeConfig

_LIBRARY = torch.library.Library("trm", "DEF")
_LIBRARY.define("normed_mlp(Tensor x, Tensor gate_up, Tensor down, float epsilon, int dim) -> Tensor")
_LIBRARY.define("mix_positions(Tensor x, Tensor gate_up, Tensor down) -> Tensor")
_LIBRARY.define("attention(Tensor x, Tensor qkv, Tensor output, Tensor? cos, Tensor? sin, int head_dim) -> Tensor")

_NORMED_MLP = torch.ops.trm.normed_mlp.default
_MIX_POSITIONS = torch.ops.trm.mix_positions.default
_MIX_BY_ATTENTION = torch.ops.trm.attention.default
for _operation, _lowering in (
    (_NORMED_MLP, normed_mlp),
    (_MIX_POSITIONS, mix_positions),
    (_MIX_BY_ATTENTION, mix_by_attention),
):
    bridge.LOWERINGS[_operation] = _lowering
    METAS[_operation] = lambda x, *_: torch.empty_like(x)
_JOINED = {_NORMED_MLP.name(): {"joined": joined_normed_mlp}, _MIX_POSITIONS.name(): {"joined": joined_mix_positions}}
ATTENTION = "aten::scaled_dot_product_attention"
CANDIDATES: dict[str, dict[str, dict[str, Callable]]] = {
    "tpu": {
        _NORMED_MLP.name(): {"fused": fused_normed_mlp},
        _MIX_POSITIONS.name(): {"fused": fused_mix_positions},
        _MIX_BY_ATTENTION.name(): {"fused": fused_mix_by_attention},
        ATTENTION: {"fused": bridge.fused_attention},
    },
    "cpu": _JOINED,
    "gpu": _JOINED | {ATTENTION: {"operations": attention_by_operations}},
}
"""Platform -> operation -> implementations beside the plain one, which `trm prove --choose` compares. The plain
attention on a GPU is cuDNN's where that serves it."""
_OF_MLP = (_NORMED_MLP.name(), _MIX_POSITIONS.name())


def kernels(config: ComputeConfig, platform: str) -> dict[str, Any]:
    """Returns the arguments of `bridge.export` for the kernels that the run asks for; none on a GPU."""
    names = {}
    if platform == "tpu" and config.attention == "fused":
        names |= {ATTENTION: "fused", _MIX_BY_ATTENTION.name(): "fused"}
    if platform in ("tpu", "cpu") and config.mlp == "fused":
        names |= dict.fromkeys(_OF_MLP, "fused" if platform == "tpu" else "joined")
    if config.choices:
        names = choices_for(config.choices, platform)
    candidates = CANDIDATES.get(platform, {})
    try:
        lowerings = {operation: candidates[operation][name] for operation, name in names.items()}
    except KeyError as error:
        raise UserError(f"--compute.choices: {error} is not known on a {platform}; run trm prove --choose") from None
    return {"lowerings": lowerings, "functions": functions_of(lowerings)}


def check_served(module: torch.nn.Module, config: ComputeConfig, operations: Collection[str]) -> None:
    """Raises `UserError` for a submodule that the kernels of the run do not serve, by its attribute `UNSERVED`: names
    of kernels of `--compute` and what they leave out."""
    asked = {name for name in ("attention", "mlp") if getattr(config, name) == "fused"}
    if {ATTENTION, _MIX_BY_ATTENTION.name()} & set(operations):
        asked.add("attention")
    for submodule in module.modules():
        for kernel, left_out in getattr(submodule, "UNSERVED", {}).items():
            if kernel in asked:
                option = f"--compute.{kernel}"
                raise UserError(f"{option} fused does not serve {left_out}; use {option} plain, or omit {left_out}")


def functions_of(operations: Collection[str]) -> dict[str, Callable]:
    """Returns what `bridge.export` replaces so that these operations are one each in the program."""
    return {f"models_torch.blocks:{name}": call for name, (of, call) in _AS_ONE.items() if of in operations}


def plain_of(operation: str) -> Callable:
    """Returns the lowering that a program has without kernels."""
    namespace, name = operation.split("::")
    return bridge.LOWERINGS[getattr(getattr(torch.ops, namespace), name).default]


def _mlp_as_one_operation(operation: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A function of `x`, an MLP and numbers as one operation, which a lowering can serve as a whole."""

    def call(x: torch.Tensor, mlp: SwiGLU, *args: Any, **kwargs: Any) -> torch.Tensor:
        return operation(*_given(x, mlp.gate_up_proj.weight, mlp.down_proj.weight), *args, **kwargs)

    return call


def _attention_as_one_operation(x: torch.Tensor, attention: Attention, cos_sin: CosSin | None) -> torch.Tensor:
    """`models_torch.blocks.mix_by_attention` as one operation, if every query head has a key head."""
    if type(attention) is not Attention or attention.num_key_value_heads != attention.num_heads:
        return x + attention(x, cos_sin)
    weights = attention.qkv_proj.weight, attention.o_proj.weight
    return _MIX_BY_ATTENTION(*_given(x, *weights), *(cos_sin or (None, None)), attention.head_dim)


def _given(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors, detached where no gradient is computed: the kernel then keeps nothing for a backward pass."""
    return tensors if torch.is_grad_enabled() else tuple(each.detach() for each in tensors)


_AS_ONE: dict[str, tuple[str, Callable]] = {
    "normed_mlp": (_NORMED_MLP.name(), _mlp_as_one_operation(lambda *args, dim=-1: _NORMED_MLP(*args, dim))),
    "mix_positions": (_MIX_POSITIONS.name(), _mlp_as_one_operation(_MIX_POSITIONS)),
    "mix_by_attention": (_MIX_BY_ATTENTION.name(), _attention_as_one_operation),
}
