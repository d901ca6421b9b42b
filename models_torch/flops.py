"""Counts the FLOPs of a training step of a model without computing it, on PyTorch's meta device."""

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from models_torch import outside, registry
from models_torch.config import ACTConfig, ModelConfig

if TYPE_CHECKING:
    from models_torch.gpt import GPTConfig

PRODUCTS_OF_BACKWARD = 2
"""Number of products in the backward pass for each product of the forward pass: the gradients of its two factors."""
WITHOUT_EFFECT = {"batch_size": 1, "num_puzzle_identifiers": 1, "forward_dtype": "float32"}
"""Fields that do not change the FLOPs of an example in one step."""


def train_flops_per_example(model: str, arch: ModelConfig) -> float:
    """Returns the FLOPs of the matrix products of one training step, forward and backward, for one example.

    `arch` has the sizes of the data set; of a language model, an example is a row of `seq_len` tokens. A multiplication
    and addition count as two. Recomputation of activations and the optimizer are not counted. Raises ValueError if the
    model cannot be built, and for a model of the user that does not run on PyTorch's meta device.
    """
    if not isinstance(arch, ACTConfig):
        return _language_flops(model, arch)
    return _counted(model, _with_few_steps(arch))


def evaluation_flops_per_example(model: str, arch: ACTConfig) -> float:
    """Returns the FLOPs of the matrix products of one ACT step in evaluation, for one example.

    Raises ValueError as `train_flops_per_example` does.
    """
    return _counted(model, _with_few_steps(arch), train=False)


def _with_few_steps(arch: ACTConfig) -> ACTConfig:
    act_steps = min(2, arch.halt_max_steps)  # with one step, nothing is bootstrapped; more steps change nothing
    return dataclasses.replace(arch, **WITHOUT_EFFECT, halt_max_steps=act_steps)


def _language_flops(model: str, arch: ModelConfig) -> float:
    from models_torch.gpt import GPTConfig  # runs of puzzles need no language model
    from models_torch.hrm_text import HRMTextConfig

    if isinstance(arch, GPTConfig):
        return language_flops_per_token(arch) * arch.seq_len
    if isinstance(arch, HRMTextConfig):
        return _counted(model, dataclasses.replace(arch, forward_dtype="float32"))
    raise ValueError(f"the FLOPs of {model} are not known")


def language_flops_per_token(arch: "GPTConfig") -> float:
    """Returns the FLOPs of the matrix products of one training step, forward and backward, for one token.

    Six for every entry of a matrix that multiplies (embeddings do not), and 12 for every channel and every position
    that attention sees; the causal mask is not subtracted, a window counts with its length. Recomputation of
    activations and the optimizer are not counted.

    References:
      estimate_flops in nanochat/gpt.py, https://github.com/karpathy/nanochat
    """
    from models_torch.gpt_2026 import GPT2026Config, windows  # runs of puzzles need no language model

    with torch.device("meta"):
        module = registry.build_model("gpt_2026" if isinstance(arch, GPT2026Config) else "gpt", arch)
    matrices = sum(layer.weight.numel() for layer in module.modules() if isinstance(layer, nn.Linear))
    seen = [arch.seq_len] * arch.n_layer
    if isinstance(arch, GPT2026Config):
        seen = [min(window, arch.seq_len) for window in windows(arch.window_pattern, arch.seq_len, arch.n_layer)]
    return 6.0 * matrices + 12.0 * arch.n_embd * sum(seen)


_COUNTS: dict[tuple[str, str, bool], float] = {}
"""Counts by model, the text of its configuration, which may hold a dict of options, and whether it trains."""


def _counted(model: str, arch: ModelConfig, *, train: bool = True) -> float:
    key = model, repr(arch), train
    if key not in _COUNTS:
        try:
            _COUNTS[key] = _count(model, arch, train=train)
        except Exception as error:
            if not outside.is_outside(model):
                raise
            raise ValueError(f"the FLOPs of {model} are not known: {outside.one_line(error)}") from error
    return _COUNTS[key]


def _count(model: str, arch: ModelConfig, *, train: bool) -> float:
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        tokens = torch.zeros(1, arch.seq_len, dtype=torch.int32)
        if not isinstance(arch, ACTConfig):
            language_model = registry.build_model(model, arch)
            with _Products() as products:
                language_model(tokens, tokens)
            return products.flops
        module = _with_loss_head(model, arch).train(train)
        batch = {"inputs": tokens, "labels": tokens, "puzzle_identifiers": torch.zeros(1, dtype=torch.int32)}
        carry = module.initial_carry(batch)
        with torch.set_grad_enabled(train), _Products() as products:
            module(carry=carry, batch=batch, return_keys=())
    return products.flops


def _with_loss_head(model: str, arch: ACTConfig) -> Any:
    if not outside.is_outside(model):
        return registry.build(model, arch)
    # Its interface is not checked: the check reads values, which a tensor on the meta device has not.
    return outside.loss_head(outside.build_model(model, arch), arch)


class _Products(TorchDispatchMode):
    """Counts the products of operations as they run; those with gradients count for the backward pass, too."""

    def __init__(self):
        super().__init__()
        self.flops = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            passes = 1 + PRODUCTS_OF_BACKWARD if torch.is_grad_enabled() else 1
            self.flops += passes * count(*args, **(kwargs or {}), out_val=out)
        return out
