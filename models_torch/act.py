"""Adaptive computation time (ACT): a sequence stays in the batch for several ACT steps, until it halts."""

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
    """The state between ACT steps: latents, number of ACT steps taken, halted sequences, the current examples."""

    inner_carry: Any
    steps: Int[Tensor, "batch"]
    halted: Bool[Tensor, "batch"]
    current_data: dict[str, Tensor]


class ACT(nn.Module):
    """Adds halting to an `Inner`: a call is one ACT step for every sequence of the batch.

    A sequence that halted in the previous step is replaced by the example at its index in `batch`; other sequences keep
    their current example. In evaluation no sequence halts before `halt_max_steps`, so all sequences halt together.
    """

    def __init__(self, config: ArchitectureConfig, inner: Inner):
        super().__init__()
        self.config = config
        self.inner = inner

    def initial_carry(self, batch: dict[str, Tensor]) -> ACTCarry:
        """Returns a carry of zeros with every sequence halted, so that the first step loads the whole batch."""
        batch_size = batch["inputs"].shape[0]
        device = batch["inputs"].device
        return ACTCarry(
            inner_carry=self.inner.empty_carry(batch_size, device),
            steps=torch.zeros(batch_size, dtype=torch.int32, device=device),
            halted=torch.ones(batch_size, dtype=torch.bool, device=device),
            current_data={key: torch.zeros_like(value) for key, value in batch.items()},
        )

    def forward(self, carry: ACTCarry, batch: dict[str, Tensor]) -> tuple[ACTCarry, dict[str, Tensor]]:
        """Runs one ACT step; `batch` has `inputs`, `labels` and `puzzle_identifiers`."""
        replaced = carry.halted
        data = {
            key: torch.where(replaced.view(-1, *[1] * (value.ndim - 1)), batch[key], value)
            for key, value in carry.current_data.items()
        }
        inner_carry = self.inner.reset_carry(replaced, carry.inner_carry)
        inner_carry, logits, (q_halt, q_continue), cycle_change = self.inner(inner_carry, data)
        outputs = {"logits": logits, "q_halt_logits": q_halt, "q_continue_logits": q_continue}
        if cycle_change is not None:
            outputs["cycle_change"] = cycle_change

        with torch.no_grad():
            steps = torch.where(replaced, 0, carry.steps) + 1
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
        """Decides halting in training: at the limit or by the halting head, after a random minimum of steps."""
        prefers_halting = q_halt > 0 if self.config.no_ACT_continue else q_halt > q_continue
        explores = torch.rand_like(q_halt) < self.config.halt_exploration_prob
        minimum_steps = torch.randint_like(steps, low=2, high=self.config.halt_max_steps + 1)
        return (at_limit | prefers_halting) & (steps >= explores * minimum_steps)

    def _continue_target(
        self, inner_carry: Any, data: dict[str, Tensor], at_limit: Bool[Tensor, "batch"]
    ) -> PerSequence:
        """Returns the Q-learning target of `q_continue`, in [0, 1]: the larger value of the next step, or its `q_halt`
        at the limit."""
        _, _, (next_halt, next_continue), _ = self.inner(inner_carry, data)
        return torch.sigmoid(torch.where(at_limit, next_halt, torch.maximum(next_halt, next_continue)))
