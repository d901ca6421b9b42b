"""Counts the FLOPs of a training step of a model without computing it, on PyTorch's meta device."""

import dataclasses
import functools

import torch
from torch.utils.flop_counter import FlopCounterMode

from models_torch import registry
from models_torch.config import ACTConfig


@functools.cache
def train_flops_per_example(model: str, arch: ACTConfig) -> float:
    """Returns the FLOPs of the matrix products of one training step, forward and backward, for one example.

    `arch` has the sizes of the data set. One product of a multiplication and an addition counts as two. Recomputation
    of activations and the optimizer are not counted. Raises ValueError if the model cannot be built.
    """
    arch = dataclasses.replace(arch, batch_size=1, num_puzzle_identifiers=1)
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        module = registry.build(model, arch).train()
        tokens = torch.zeros(1, arch.seq_len, dtype=torch.int32)
        batch = {"inputs": tokens, "labels": tokens, "puzzle_identifiers": torch.zeros(1, dtype=torch.int32)}
        carry = module.initial_carry(batch)
        with FlopCounterMode(display=False) as counter:
            _, loss, *_ = module(carry=carry, batch=batch, return_keys=())
            loss.backward()
    return float(counter.get_total_flops())
