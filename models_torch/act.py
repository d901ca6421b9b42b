"""Adaptive computation time: a sequence stays in the batch for several steps of its model, until it halts."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from models_torch.config import ArchitectureConfig
from models_torch.inner import Inner
from models_torch.layers import PerSequence


@dataclass
class ACTCarry:
    """What lives on between ACT steps: latents, ACT steps taken, who has halted, the examples in work."""

    inner_carry: Any
    steps: Int[Tensor, "batch"]
    halted: Bool[Tensor, "batch"]
    current_data: dict[str, Tensor]


class ACT(nn.Module):
    """The halting around an `Inner`: a call is one ACT step for every sequence of the batch.

    A sequence that halted in the last step makes room for the example at its place in `batch`; the others go
    on with the example they have. In evaluation nothing halts before `halt_max_steps`, so that a batch ends
    together.
    """

    def __init__(self, config: ArchitectureConfig, inner: Inner):
        super().__init__()
        self.config = config
        self.inner = inner

    def initial_carry(self, batch: dict[str, Tensor]) -> ACTCarry:
        """All halted, so that the first step takes up its whole batch; the zeros elsewhere are never read."""
        batch_size, device = batch["inputs"].shape[0], batch["inputs"].device
        return ACTCarry(
            inner_carry=self.inner.empty_carry(batch_size, device),
            steps=torch.zeros(batch_size, dtype=torch.int32, device=device),
            halted=torch.ones(batch_size, dtype=torch.bool, device=device),
            current_data={key: torch.zeros_like(value) for key, value in batch.items()},
        )

    def forward(self, carry: ACTCarry, batch: dict[str, Tensor]) -> tuple[ACTCarry, dict[str, Tensor]]:
        """One ACT step; `batch` gives `inputs`, `labels` and `puzzle_identifiers`."""
        fresh = carry.halted
        data = {
            key: torch.where(fresh.view(-1, *[1] * (value.ndim - 1)), batch[key], value)
            for key, value in carry.current_data.items()
        }
        inner_carry = self.inner.reset_carry(fresh, carry.inner_carry)
        inner_carry, logits, (q_halt, q_continue), change = self.inner(inner_carry, data)
        outputs = {"logits": logits, "q_halt_logits": q_halt, "q_continue_logits": q_continue}
        if change is not None:
            outputs["cycle_change"] = change

        with torch.no_grad():
            steps = torch.where(fresh, 0, carry.steps) + 1
            halted = at_limit = steps >= self.config.halt_max_steps
            if self.training and self.config.halt_max_steps > 1:
                halted = self._halt_early(q_halt, q_continue, steps, at_limit)
                if not self.config.no_ACT_continue:
                    outputs["target_q_continue"] = self._continue_target(inner_carry, data, at_limit)
        return ACTCarry(inner_carry, steps, halted, data), outputs

    def _halt_early(
        self,
        q_halt: PerSequence,
        q_continue: PerSequence,
        steps: Int[Tensor, "batch"],
        at_limit: Bool[Tensor, "batch"],
    ) -> Bool[Tensor, "batch"]:
        """Who halts in training: who must or wants to, unless a random minimum of steps forbids it."""
        wants_to = q_halt > 0 if self.config.no_ACT_continue else q_halt > q_continue
        explores = torch.rand_like(q_halt) < self.config.halt_exploration_prob
        minimum_steps = torch.randint_like(steps, low=2, high=self.config.halt_max_steps + 1)
        return (at_limit | wants_to) & (steps >= explores * minimum_steps)

    def _continue_target(
        self, inner_carry: Any, data: dict[str, Tensor], at_limit: Bool[Tensor, "batch"]
    ) -> PerSequence:
        """What going on is worth, in [0, 1]: the better value of the next step; at the limit, its halting."""
        _, _, (next_halt, next_continue), _ = self.inner(inner_carry, data)
        return torch.sigmoid(torch.where(at_limit, next_halt, torch.maximum(next_halt, next_continue)))
