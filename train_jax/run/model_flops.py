"""The FLOPs that a train step needs at least, from the sizes of the model."""

from __future__ import annotations

from models_torch.flops import language_flops_per_token, train_flops_per_example
from models_torch.gpt import GPTConfig
from models_torch.registry import ARCHITECTURES
from train_jax.run.config import RunConfig
from train_jax.run.model import sized
from train_jax.task import Task


def model_flops(config: RunConfig, task: Task, devices: int) -> float | None:
    """Returns the FLOPs of the matrix products in one forward and one backward pass, of the examples of one device.

    Recomputation and the optimizer are not counted. None for models of the user.
    """
    examples = config.global_batch_size // devices
    arch = sized(config.arch, task, examples)
    if isinstance(arch, GPTConfig):
        return examples * arch.seq_len * language_flops_per_token(arch)
    return examples * train_flops_per_example(config.model, arch) if config.model in ARCHITECTURES else None
