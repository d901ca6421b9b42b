"""Networks of other packages on a CPU, value and gradient of all weights: the bridge beside PyTorch's eager mode.

    python -m benchmarks.published [ViT-S DiT-S GPT-2 BERT ResNet-50] [--page docs/performance.md]

Needs transformers and diffusers. The weights are random, in float32, in training mode without dropout. Both sides take
turns, and wait before each call until the threads of the other framework sleep; a quiet machine is needed. Losses and
gradients are compared first.
"""

# pyright: reportMissingImports=false
# diffusers is in the extra examples.

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import torch
import tyro

import bridge
from benchmarks.resnet import median_seconds
from benchmarks.tables import Files, between, figures_before, finish, header, row
from train_jax.runtime.backend import cores

SETTLE = 0.05
"""Seconds before each call."""


@dataclasses.dataclass(frozen=True)
class Case:
    module: Any
    inputs: dict[str, torch.Tensor]
    loss: Callable[[Any], Any]
    """The loss of the outputs of either side."""
    about: str
    tolerance: float = 1e-3
    """Largest error of a gradient."""


def vit() -> Case:
    from transformers import ViTConfig, ViTModel

    sizes: dict[str, Any] = {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536}
    dropout: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    module = ViTModel(ViTConfig(**sizes, **dropout))
    images = {"pixel_values": torch.randn(4, 3, 224, 224)}
    return Case(module, images, lambda outputs: (outputs.last_hidden_state**2).mean(), "4 images")


def dit() -> Case:
    from diffusers import DiTTransformer2DModel

    module = DiTTransformer2DModel(
        num_attention_heads=6, attention_head_dim=64, out_channels=8, num_layers=12, sample_size=32
    )
    module.transformer_blocks.apply(_without_label_dropout)
    labels = {"timestep": torch.tensor([3, 5]), "class_labels": torch.tensor([1, 2])}
    inputs = {"hidden_states": torch.randn(2, 4, 32, 32), **labels}
    return Case(module, inputs, lambda outputs: (outputs.sample**2).mean(), "2 latents")


def _without_label_dropout(part: Any) -> None:
    if hasattr(part, "dropout_prob"):
        part.dropout_prob = 0.0


def gpt2() -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    dropout: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    module = GPT2LMHeadModel(GPT2Config(use_cache=False, **dropout))
    tokens = {"input_ids": torch.randint(0, 50_257, (1, 256))}
    return Case(module, tokens, lambda outputs: (outputs.logits**2).mean(), "256 tokens")


def bert() -> Case:
    from transformers import BertConfig, BertModel

    module = BertModel(BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    tokens = {"input_ids": torch.randint(0, 30_522, (2, 128))}
    return Case(module, tokens, lambda outputs: (outputs.last_hidden_state**2).mean(), "2 x 128 tokens")


def resnet() -> Case:
    from transformers import ResNetConfig, ResNetModel

    images = {"pixel_values": torch.randn(4, 3, 224, 224)}
    module = ResNetModel(ResNetConfig())
    # Rounding decides which ReLUs of a network with BatchNorms on few images are open.
    return Case(module, images, lambda outputs: (outputs.pooler_output**2).mean(), "4 images", 0.1)


CASES: dict[str, Callable[[], Case]] = {
    "ViT-S": vit,
    "DiT-S": dit,
    "GPT-2": gpt2,
    "BERT": bert,
    "ResNet-50": resnet,
}


@dataclasses.dataclass(frozen=True)
class Options:
    names: Annotated[list[str], tyro.conf.Positional] = dataclasses.field(default_factory=lambda: [*CASES])
    """Names of networks."""
    page: Path | None = None
    """Write the table into this page."""
    files: tyro.conf.OmitArgPrefixes[Files] = dataclasses.field(default_factory=Files)


def measured(case: Case) -> dict[str, float]:
    """Returns the medians of both sides in seconds. Ends the command if their losses or gradients differ.

    An error is a share of the largest entry of all gradients.
    """
    module = case.module.train()

    def in_pytorch() -> Any:
        module.zero_grad(set_to_none=True)
        loss = case.loss(module(**case.inputs))
        loss.backward()
        return loss

    fn = bridge.export(module)
    inputs = {name: jax.numpy.asarray(tensor.numpy()) for name, tensor in case.inputs.items()}

    def loss(params: Any) -> jax.Array:
        return case.loss(fn(params, fn.buffers, rng=jax.random.key(0), module_kwargs=inputs)[0])

    program = jax.jit(jax.value_and_grad(loss)).lower(fn.params).compile()
    value, gradients = program(fn.params)
    expected = in_pytorch().detach()
    theirs = {name: p.grad.numpy() for name, p in module.named_parameters() if p.grad is not None}
    largest = max(np.abs(gradient).max() for gradient in theirs.values())
    error = max(np.abs(gradients[name] - gradient).max() for name, gradient in theirs.items()) / largest
    if abs(float(value) - float(expected)) > 1e-4 * abs(float(expected)) or error > case.tolerance:
        raise SystemExit(f"the sides differ: losses {float(value)} and {float(expected)}, gradients by {error:.0e}")
    in_jax = {"bridge": lambda: jax.block_until_ready(program(fn.params))}
    return median_seconds({"PyTorch": in_pytorch} | in_jax, SETTLE)


def main(options: Options) -> int:
    torch.manual_seed(0)
    torch.set_num_threads(cores())
    before = figures_before(options.files)
    rows = [header(["network", "inputs", "PyTorch, ms", "bridge, ms", "/ PyTorch"])]
    print(rows[0])
    figures = {}
    for name in options.names:
        case = CASES[name]()
        found = measured(case)
        ratio = found["bridge"] / found["PyTorch"]
        figures[f"{name}, bridge / PyTorch"] = ratio
        times = [f"{1000 * seconds:.0f}" for seconds in found.values()]
        rows.append(row([name, case.about, *times, f"{ratio:.2f}"]))
        print(rows[-1], flush=True)
    if options.page is not None:
        options.page.write_text(between(options.page.read_text(), "published", rows))
    return finish(options.files, figures, before, "cpu")


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(Options, description=__doc__)))
