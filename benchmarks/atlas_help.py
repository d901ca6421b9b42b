"""Help for models of the atlas that are refused as people call them: options, a call before, functions to replace."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F


@dataclasses.dataclass(frozen=True)
class Help:
    """Help that a user would give."""

    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Options of `bridge.verify`."""
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Attributes that are set, on both sides, wherever a submodule has them."""
    called: bool = False
    """The module is called once before, in its mode and without gradients, and fills its tables."""
    functions: Mapping[str, Callable] = dataclasses.field(default_factory=dict)
    """Functions for `bridge.register_function`."""

    def __str__(self) -> str:
        words = [
            f'{name}="{value}"' if isinstance(value, str) else f"{name}={value}" for name, value in self.options.items()
        ]
        words += [f"every {name} set to {value}" for name, value in self.settings.items()]
        words += ["called once before"] * self.called
        return ", ".join(words + [f"functions={{{name}}}" for name in self.functions])


def dbrx_experts(self: Any, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The experts in turn; the library counts one more than there are, whose weights an index would not find."""
    count, x, shape = x.shape[0], x.reshape(-1, self.hidden_size), (-1, self.ffn_hidden_size, self.hidden_size)
    out, mask = torch.zeros_like(x), F.one_hot(chosen, self.num_experts + 1).permute(2, 1, 0)
    for e in range(self.num_experts):
        j, t = torch.where(mask[e])
        parts = [weight.view(shape)[e] for weight in (self.mlp.w1, self.mlp.v1, self.mlp.w2)]
        out.index_add_(0, t, self.mlp(x[t], *parts) * weights[t, j, None])
    return out.view(count, -1, self.hidden_size)


def longcat_experts(self: Any, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The experts in turn, without a branch on the number of rows."""
    out, mask = torch.zeros_like(x), F.one_hot(chosen, self.total_experts).permute(2, 1, 0)
    for e in range(self.total_experts):
        j, t = torch.where(mask[e])
        rows = x[t]
        if e < self.num_routed_experts:
            gate, up = F.linear(rows, self.gate_up_proj[e]).chunk(2, dim=-1)
            rows = F.linear(self.act_fn(gate) * up, self.down_proj[e])
        out.index_add_(0, t, rows * weights[t, j, None])
    return out


def jetmoe_router(self: Any, x: torch.Tensor) -> tuple:
    """The sizes of the groups as a tensor."""
    logits = self.layer(x).float()
    best, chosen = logits.topk(self.top_k, dim=1)
    gates = best.softmax(1).type_as(x).flatten()
    order = chosen.flatten().sort(0).indices
    sizes = F.one_hot(chosen.flatten(), self.num_experts).sum(0)
    return order, order.div(self.top_k, rounding_mode="trunc"), gates[order], sizes, logits


def jetmoe_experts(self: Any, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    return F.grouped_mm(x, self.weight.transpose(1, 2), offs=sizes.cumsum(0).to(torch.int32))


def all_finite(x: torch.Tensor) -> torch.Tensor:
    """`torch.isfinite` of values that are known to be finite: what follows is no branch on a traced value."""
    return torch.ones(x.shape, dtype=torch.bool)


FINITE = Help(functions={"torch:isfinite": all_finite})
_OF_TRANSFORMERS = "transformers.models.{0}.modeling_{0}:{1}.forward".format
HELP: dict[str, Help] = {
    **dict.fromkeys(("hf/detr", "hf/mask2former", "hf/rt_detr"), FINITE),
    **dict.fromkeys(
        ("hf/informer", "hf/m2m_100", "hf/nllb_moe", "hf/time_series_transformer"), Help(settings={"layerdrop": 0.0})
    ),
    "pyg/GCN": Help({"known_inputs": "1"}),
    "pyg/GAT": Help({"known_inputs": "1"}),
    "pyg/GCN const edges": Help({"static": "e"}),
    "hf/encodec": Help({"static": r".*(padding_total|kernel_size|stride)"}),
    "hf/qwen2_vl": Help({"known_inputs": "image_grid_thw|input_ids|mm_token_type_ids|attention_mask"}),
    "transformers/FSMTForConditionalGeneration": Help(
        functions={
            "transformers.models.fsmt.modeling_fsmt:make_padding_mask": lambda ids, padding_idx=1: ids.eq(padding_idx)
        }
    ),
    "diffusers/HunyuanVideo15Transformer3DModel": Help(
        {"known_inputs": "image_embeds|.*mask.*", "input_gradients": False}
    ),
    "diffusers/OmniGenTransformer2DModel": Help({"known_inputs": "position_ids"}),
    "transformers/LongcatFlashForCausalLM": Help(
        functions={_OF_TRANSFORMERS("longcat_flash", "LongcatFlashExperts"): longcat_experts}
    ),
    "transformers/Siglip2ForImageClassification": Help({"known_inputs": "spatial_shapes"}),
    "hf/levit": Help(called=True),
    "timm/levit_128s": Help(called=True),
    "hf/dbrx": Help(functions={_OF_TRANSFORMERS("dbrx", "DbrxExperts"): dbrx_experts}),
    "hf/jetmoe": Help(
        functions={
            _OF_TRANSFORMERS("jetmoe", "JetMoeTopKGating"): jetmoe_router,
            _OF_TRANSFORMERS("jetmoe", "JetMoeParallelExperts"): jetmoe_experts,
        }
    ),
}
"""Help by the names of the registries, and of the folder of `--zoo`."""
