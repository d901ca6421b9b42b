"""Help for models of the atlas that are refused as people call them: options, a call before, functions to replace."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

import bridge


@dataclasses.dataclass(frozen=True)
class Help:
    """Help that a user would give."""

    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Options of `bridge.verify`."""
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Attributes that are set, on both sides, wherever a submodule has them."""
    called: bool = False
    """The module is called once before, in its mode and without gradients, and fills its tables."""
    edited: Callable[[torch.nn.Module], torch.nn.Module] | None = None
    """Returns the module as its author would change it; its outputs are compared with those before."""
    functions: Mapping[str, Callable] = dataclasses.field(default_factory=dict)
    """Functions for `bridge.register_function`."""

    def applied(self, module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> torch.nn.Module:
        """Returns the module to export. Raises `AssertionError` if an edited one has other outputs in PyTorch."""
        for each in module.modules():
            vars(each).update({name: value for name, value in self.settings.items() if name in vars(each)})
        for name, replacement in self.functions.items():
            bridge.register_function(name, replacement)
        if not self.called and self.edited is None:
            return module
        expected = module(*args, **kwargs)
        if self.edited is not None:
            module = self.edited(module)
            torch.testing.assert_close(module(*args, **kwargs), expected)
        return module

    def __str__(self) -> str:
        words = [
            f'{name}="{value}"' if isinstance(value, str) else f"{name}={value}" for name, value in self.options.items()
        ]
        if self.settings:
            values = {f"{value:g}" for value in self.settings.values()}
            words.append(f"{', '.join(self.settings)} = {' or '.join(sorted(values))}")
        words += ["called once before"] * self.called + ["the module edited"] * (self.edited is not None)
        return ", ".join(words + [f"functions={{{name}}}" for name in self.functions])


def dbrx_experts(self: Any, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The experts in turn; the library counts one more than there are, whose weights an index would not find."""
    count = x.shape[0]
    x = x.reshape(-1, self.hidden_size)
    shape = (-1, self.ffn_hidden_size, self.hidden_size)
    out = torch.zeros_like(x)
    mask = F.one_hot(chosen, self.num_experts + 1).permute(2, 1, 0)
    for e in range(self.num_experts):
        j, t = torch.where(mask[e])
        parts = [weight.view(shape)[e] for weight in (self.mlp.w1, self.mlp.v1, self.mlp.w2)]
        out.index_add_(0, t, self.mlp(x[t], *parts) * weights[t, j, None])
    return out.view(count, -1, self.hidden_size)


def longcat_experts(self: Any, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The experts in turn, without a branch on the number of rows."""
    out = torch.zeros_like(x)
    mask = F.one_hot(chosen, self.total_experts).permute(2, 1, 0)
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


def frames_up_to(count: int) -> Callable[..., torch.Tensor]:
    """Returns a `torch.arange` whose end, where it is a traced value, is the longest length that the caller expects."""

    def arange(*bounds: Any, **options: Any) -> torch.Tensor:
        return ARANGE(*(count if isinstance(bound, torch.Tensor) else bound for bound in bounds), **options)

    return arange


def without_recomputation(x: torch.Tensor, layers: Any, mask: Any, hashes: Any, *rest: Any) -> torch.Tensor:
    """Reformer's layers in turn, differentiated as any others; the library draws the numbers of dropout again."""
    x, y = x.chunk(2, dim=-1)
    for layer in layers:
        y = y + layer.attention(x, attention_mask=mask, num_hashes=hashes).hidden_states
        x = x + layer.feed_forward(y)
    return torch.cat([y, x], dim=-1)


def steps_that_are_kept(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Heun's method with `torch.where` in the place of branches, and as many steps as the longest path takes."""
    t = torch.zeros(())
    h = torch.full((), 0.3)
    for _ in range(20):
        slope = self.f(x)
        other = self.f(x + h * slope)
        is_near = (h * (other - slope) / 2).abs().max() < 0.5
        is_kept = is_near & (t < 1)
        x = torch.where(is_kept, x + h * (slope + other) / 2, x)
        t = torch.where(is_kept, t + h, t)
        h = torch.where(is_near, h, h / 2)
    return x


def _with_forward(module: torch.nn.Module, forward: Callable) -> torch.nn.Module:
    module.forward = types.MethodType(forward, module)
    return module


def _unscripted(module: torch.nn.Module) -> torch.nn.Module:
    source = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    source.load_state_dict(module.state_dict())
    return source


ARANGE = torch.arange
NO_DROPOUT = {"p": 0.0, "dropout": 0.0, "activation_dropout": 0.0, "layerdrop": 0.0, "moe_token_dropout": 0.0}
FINITE = Help(functions={"torch:isfinite": all_finite})
_OF_TRANSFORMERS = "transformers.models.{0}.modeling_{0}:{1}.forward".format
_REFORMER = "transformers.models.reformer.modeling_reformer:_ReversibleFunction.apply"
HELP: dict[str, Help] = {
    **dict.fromkeys(("hf/detr", "hf/mask2former", "hf/rt_detr"), FINITE),
    **dict.fromkeys(("hf/m2m_100", "hf/time_series_transformer"), Help(settings={"layerdrop": 0.0})),
    **dict.fromkeys(("hf/informer", "hf/nllb_moe"), Help(settings=NO_DROPOUT)),
    "hf/switch": Help(settings=NO_DROPOUT),
    "hf/vits": Help(
        settings=NO_DROPOUT | {"noise_scale_duration": 0.0},
        functions={"torch:arange": frames_up_to(12), "numpy.random:uniform": lambda low, high: high},
    ),
    **dict.fromkeys(
        ("hf/reformer", "transformers/ReformerForSequenceClassification"),
        Help(settings=NO_DROPOUT | {"hash_seed": 0}, functions={_REFORMER: without_recomputation}),
    ),
    "neural ODE adaptive": Help(edited=lambda module: _with_forward(module, steps_that_are_kept)),
    "ScriptModule": Help(edited=_unscripted),
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
