"""The loss head of a TRM with levers: label smoothing and weights over ACT steps, in training."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from models_torch.act import ACT
from models_torch.layers import at_least_float32
from models_torch.losses import IGNORE_LABEL_ID, ACTLossHead, log_stablemax
from train_jax.research.levers.config import LeverConfig
from train_jax.research.levers.inner import LeverInner


class LeverTRM(ACTLossHead):
    """A TRM with levers, halting and loss; an own model of `trm train --model`."""

    def __init__(self, config: LeverConfig):
        model = ACT(config, LeverInner(config))
        super().__init__(model, config.loss_type, config.cycle_penalty, config.halt_loss_weight)
        self.config = config

    @classmethod
    def from_config(cls, values: Mapping[str, Any]) -> "LeverTRM":
        """Returns the module with the values of a run and of `--arch.options`."""
        weights = tuple(values.get("act_step_weights", ()))  # JSON has lists
        return cls(LeverConfig(**{**values, "act_step_weights": weights}))

    def sequence_loss(self, logits: Float[Tensor, "batch seq vocab"], carry: Any) -> Float[Tensor, "batch"]:
        labels = carry.current_data["labels"]
        loss = super().sequence_loss(logits, carry)
        if not self.training:
            return loss
        share = self.config.label_smoothing
        if share:
            loss = (1 - share) * loss + share * self._mean_over_tokens(logits, labels != IGNORE_LABEL_ID)
        if self.config.act_step_weights:
            weights = torch.tensor(self.config.act_step_weights, dtype=loss.dtype, device=loss.device)
            loss = loss * weights[(carry.steps - 1).clamp(max=len(weights) - 1)]
        return loss

    def _mean_over_tokens(self, logits: Tensor, counted: Tensor) -> Float[Tensor, "batch"]:
        """Returns the mean cross-entropy over all tokens, summed over the labelled positions."""
        wide = at_least_float32(logits)
        is_stablemax = self.config.loss_type == "stablemax_cross_entropy"
        log_probs = log_stablemax(wide) if is_stablemax else F.log_softmax(wide, dim=-1)
        return -torch.where(counted, log_probs.mean(dim=-1), 0).sum(dim=-1)
