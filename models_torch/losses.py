"""Token losses, the halting loss, and metrics as sums and counts."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from models_torch.layers import at_least_float32

IGNORE_LABEL_ID = -100


def log_stablemax(logits: Float[Tensor, "*batch vocab"]) -> Float[Tensor, "*batch vocab"]:
    """Returns log stablemax (arXiv 2501.04697): softmax with `x + 1` (x >= 0) or `1 / (1 - x)` (x < 0) for `exp`."""
    # Without the clamp, the unused branch divides by zero at a logit of exactly 1 (common in bfloat16), and
    # `where` turns its infinite gradient into NaN.
    score = torch.where(logits < 0, 1 / (1 - logits.clamp(max=0)), logits + 1)
    return score.log() - score.sum(dim=-1, keepdim=True).log()


def _cross_entropy(
    log_probs: Float[Tensor, "*batch vocab"], labels: Int[Tensor, "*batch"], ignore_index: int
) -> Float[Tensor, "*batch"]:
    counted = labels != ignore_index
    # `gather` needs a valid class index for ignored labels too.
    safe_labels = torch.where(counted, labels, 0).to(torch.long)
    picked = log_probs.gather(-1, safe_labels.unsqueeze(-1)).squeeze(-1)
    return -torch.where(counted, picked, 0)


def stablemax_cross_entropy(
    logits: Float[Tensor, "*batch vocab"], labels: Int[Tensor, "*batch"], ignore_index: int = IGNORE_LABEL_ID
) -> Float[Tensor, "*batch"]:
    """Returns the cross-entropy of each token under stablemax, 0 if the label is `ignore_index`.

    Computed in float32; the published code uses float64, but TPUs have no float64, and JAX silently uses float32
    unless x64 is enabled. Both agree to float32 rounding, because there is no cancellation.
    """
    return _cross_entropy(log_stablemax(at_least_float32(logits)), labels, ignore_index)


def softmax_cross_entropy(
    logits: Float[Tensor, "*batch vocab"], labels: Int[Tensor, "*batch"], ignore_index: int = IGNORE_LABEL_ID
) -> Float[Tensor, "*batch"]:
    """Returns the cross-entropy of each token under softmax in float32, 0 if the label is `ignore_index`."""
    return _cross_entropy(F.log_softmax(at_least_float32(logits), dim=-1), labels, ignore_index)


LOSSES: dict[str, Callable[..., Tensor]] = {
    "stablemax_cross_entropy": stablemax_cross_entropy,
    "softmax_cross_entropy": softmax_cross_entropy,
}


class ACTLossHead(nn.Module):
    """A model with adaptive computation time, with its loss and metrics.

    The loss is the *sum* over the batch of each sequence's mean token loss (over labels that are not ignored), plus
    `halt_loss_weight` times the halting loss, plus `cycle_penalty` times `cycle_change` if the model returns it. The
    trainer divides by the global batch size, so the gradient does not depend on the sharding of the batch.

    The model takes `(carry, batch)` and returns `(carry, outputs)`. The carry has `halted`, `steps` and
    `current_data["labels"]`. The outputs have `logits` and `q_halt_logits`; with bootstrapped halting also
    `q_continue_logits` and `target_q_continue`; with the penalty also `cycle_change` of shape (batch,).
    """

    def __init__(self, model: nn.Module, loss_type: str, cycle_penalty: float = 0.0, halt_loss_weight: float = 0.5):
        super().__init__()
        if loss_type not in LOSSES:
            raise ValueError(f"unknown loss {loss_type!r}; use one of {', '.join(LOSSES)}")
        self.model: Any = model
        self.token_loss = LOSSES[loss_type]
        self.cycle_penalty = cycle_penalty
        self.halt_loss_weight = halt_loss_weight

    def initial_carry(self, batch: dict[str, Tensor]) -> Any:
        """Returns the model's carry before the first ACT step, for batches with the shapes of `batch`."""
        return self.model.initial_carry(batch)

    def sequence_loss(self, logits: Float[Tensor, "batch seq vocab"], carry: Any) -> Float[Tensor, "batch"]:
        """Returns the sum of the token losses of each sequence, after the ACT step that ended with `carry`."""
        return self.token_loss(logits, carry.current_data["labels"]).sum(dim=-1)

    def forward(
        self, carry: Any, batch: dict[str, Tensor], return_keys: Sequence[str] = ()
    ) -> tuple[Any, Float[Tensor, ""], dict[str, Tensor], dict[str, Tensor], Bool[Tensor, ""]]:
        """Runs one ACT step; returns carry, summed loss, metrics, detached outputs in `return_keys`, and `all_halted`.

        `return_keys` may name outputs of the model and `preds`, the most likely token at each position. The metrics
        `accuracy`, `exact_accuracy`, `q_halt_accuracy` and `steps` are sums over the `count` sequences that halted in
        this step and have labels; the losses are sums over the whole batch.
        """
        new_carry, outputs = self.model(carry, batch)
        logits = outputs["logits"]
        q_halt_logits = outputs["q_halt_logits"]
        labels = new_carry.current_data["labels"]

        with torch.no_grad():
            preds = logits.argmax(dim=-1)
            counted = labels != IGNORE_LABEL_ID
            label_counts = counted.sum(dim=-1)
            divisor = label_counts.clamp(min=1)  # a padding sequence has no labels; its loss is 0, not NaN
            correct = counted & (preds == labels)
            sequence_correct = correct.sum(dim=-1) == label_counts
            finished = new_carry.halted & (label_counts > 0)
            metrics = {
                "count": finished.sum(),
                "accuracy": torch.where(finished, correct.sum(dim=-1) / divisor, 0).sum(),
                "exact_accuracy": (finished & sequence_correct).sum(),
                "q_halt_accuracy": (finished & ((q_halt_logits >= 0) == sequence_correct)).sum(),
                "steps": torch.where(finished, new_carry.steps, 0).sum(),
            }

        lm_loss = (self.sequence_loss(logits, new_carry) / divisor).sum()
        halting_loss = q_halt_loss = F.binary_cross_entropy_with_logits(
            q_halt_logits, sequence_correct.to(q_halt_logits.dtype), reduction="sum"
        )
        metrics |= {"lm_loss": lm_loss.detach(), "q_halt_loss": q_halt_loss.detach()}
        if "target_q_continue" in outputs:
            q_continue_loss = F.binary_cross_entropy_with_logits(
                outputs["q_continue_logits"], outputs["target_q_continue"], reduction="sum"
            )
            halting_loss = halting_loss + q_continue_loss
            metrics["q_continue_loss"] = q_continue_loss.detach()

        loss = lm_loss + self.halt_loss_weight * halting_loss
        if "cycle_change" in outputs:
            cycle_loss = outputs["cycle_change"].sum()
            loss = loss + self.cycle_penalty * cycle_loss
            metrics["cycle_loss"] = cycle_loss.detach()

        available = outputs | {"preds": preds}
        returned = {key: available[key].detach() for key in return_keys if key in available}
        return new_carry, loss, metrics, returned, new_carry.halted.all()
