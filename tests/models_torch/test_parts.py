"""The layers of the architectures, the puzzle table, the loss head with its metrics and penalty, the registry."""

import dataclasses
import math

import pytest
import torch
from support.architectures import EVERY_VARIANT, make_head, set_halting

from models_torch import registry
from models_torch.layers import truncated_normal_
from models_torch.losses import (
    IGNORE_LABEL_ID,
    ACTLossHead,
    log_stablemax,
    softmax_cross_entropy,
    stablemax_cross_entropy,
)
from models_torch.trm import TRM, TRMConfig

TINY: TRMConfig = registry.ARCHITECTURES["trm"].tiny_config


def test_mlp_width_is_rounded_up_and_not_zero():
    for multiple_of, width in ((256, 256), (16, 96)):  # two thirds of 4 * 32 is 85
        layer = make_head("trm", mlp_multiple_of=multiple_of)[0].model.inner.L_level.layers[0]
        assert layer.mlp.down_proj.weight.shape == (32, width)
    make_head("trm", expansion=0.024)
    with pytest.raises(ValueError, match=r"expansion 0.01 gives an MLP of width 0 for 32 features; use more than 0.02"):
        make_head("trm", expansion=0.01)


def test_rotary_attention_depends_on_distance_only():
    head, config = make_head("trm", puzzle_emb_ndim=0, puzzle_emb_len=0)
    inner = head.model.inner
    attention = inner.L_level.layers[0].self_attn
    x = torch.zeros(1, config.positions, config.hidden_size)
    x[:, 3:6] = torch.randn(3, config.hidden_size)
    ahead = x.roll(4, dims=1)
    out, out_ahead = (attention(value, inner.rotary_emb()) for value in (x, ahead))
    torch.testing.assert_close(out[:, 3:6], out_ahead[:, 7:10])
    turned = torch.zeros_like(x)
    turned[:, 3:6] = x[:, 3:6].flip(1)
    out_turned = attention(turned, inner.rotary_emb())[:, 3:6].flip(1)
    assert not torch.allclose(out[:, 3:6], out_turned, atol=1e-3)


def test_truncated_normal_has_the_requested_deviation():
    torch.manual_seed(0)
    values = truncated_normal_(torch.empty(400_000), std=0.5)
    assert values.std().item() == pytest.approx(0.5, rel=5e-3)
    assert values.abs().max().item() <= 2 * 0.5 / 0.8796 + 1e-6


@EVERY_VARIANT
def test_puzzle_rows_get_one_gradient_for_each_example(name):
    head, config = make_head(name)
    ids = torch.tensor([3, 1, 3, 0], dtype=torch.int32)
    batch = registry.example_batch(config, 4, seed=0) | {"puzzle_identifiers": ids}
    table = head.model.inner.puzzle_emb
    before = table.weights.clone()
    _, loss, _, _, _ = head(head.initial_carry(batch), batch)
    loss.backward()
    assert table.local_ids.tolist() == [3, 1, 3, 0]
    torch.testing.assert_close(table.local_weights.detach(), table.weights[[3, 1, 3, 0]])
    assert (table.local_weights.grad.abs().sum(dim=1) > 0).all()
    assert not torch.equal(table.local_weights.grad[0], table.local_weights.grad[2])
    assert torch.equal(table.weights, before) and table.weights.grad is None
    assert not any("puzzle_emb" in name for name, _ in head.named_parameters())

    head, config = make_head(name)
    batch = registry.example_batch(config, 7, seed=0)  # in evaluation of another size, and the local rows are not set
    head.eval()(head.initial_carry(batch), batch)
    assert not head.model.inner.puzzle_emb.local_weights.any()


@pytest.mark.parametrize("loss_type", ["stablemax_cross_entropy", "softmax_cross_entropy"])
def test_loss_is_the_sum_of_per_sequence_means_and_ignores_padding(loss_type):
    head, config = make_head("trm", loss_type=loss_type)
    batch = registry.example_batch(config, 4, seed=0)
    batch["labels"][0, :5] = IGNORE_LABEL_ID
    batch["labels"][1] = IGNORE_LABEL_ID
    _, loss, metrics, outputs, _ = head(head.initial_carry(batch), batch, ["logits", "q_halt_logits", "preds"])

    lm_loss = 0.0
    sequence_correct = []
    for logits, labels, preds in zip(outputs["logits"], batch["labels"], outputs["preds"], strict=True):
        scores = torch.tensor([[score(x.item(), loss_type) for x in row] for row in logits])
        labelled = [i for i, label in enumerate(labels.tolist()) if label != IGNORE_LABEL_ID]
        losses = [-math.log(scores[i, labels[i]] / scores[i].sum()) for i in labelled]
        lm_loss += sum(losses) / max(len(losses), 1)
        sequence_correct.append(all(preds[i] == labels[i] for i in labelled))
    assert metrics["lm_loss"].item() == pytest.approx(lm_loss, rel=1e-5)
    q_halt = outputs["q_halt_logits"].sigmoid().tolist()
    halting = -sum(math.log(p if right else 1 - p) for p, right in zip(q_halt, sequence_correct, strict=True))
    assert loss.item() == pytest.approx(lm_loss + 0.5 * halting, rel=1e-5)


def score(x: float, loss_type: str) -> float:
    if loss_type == "softmax_cross_entropy":
        return math.exp(x)
    return x + 1 if x >= 0 else 1 / (1 - x)


def test_losses_agree_with_float64_and_have_finite_gradients():
    logits = torch.tensor([[-300.0, -1.0, 0.0, 1.0, 250.0]], requires_grad=True)
    for label in range(5):
        loss = stablemax_cross_entropy(logits, torch.tensor([label]))
        exact = -log_stablemax(logits.detach().double())[:, label]
        torch.testing.assert_close(loss.detach(), exact.float())
        (gradient,) = torch.autograd.grad(loss.sum(), logits)
        assert gradient.isfinite().all()  # the gradient at a logit of exactly 1 is NaN without the clamp
    ignored = torch.tensor([IGNORE_LABEL_ID])
    assert stablemax_cross_entropy(logits, ignored).item() == softmax_cross_entropy(logits, ignored).item() == 0


def test_metrics_count_halted_sequences_that_have_labels():
    head, config = make_head("trm", halt_max_steps=1)
    batch = registry.example_batch(config, 4, seed=0)
    _, _, _, outputs, _ = head(head.initial_carry(batch), batch, ["preds"])
    batch["labels"] = outputs["preds"].to(torch.int32)  # all correct,
    batch["labels"][1] = IGNORE_LABEL_ID  # one without labels,
    batch["labels"][2, :4] = (batch["labels"][2, :4] + 1) % config.vocab_size  # one with a quarter wrong,
    batch["labels"][3, 8:] = IGNORE_LABEL_ID  # one correct with half the labels
    set_halting(head, q_halt=2.0)
    _, _, metrics, outputs, all_halted = head(head.initial_carry(batch), batch, ["preds"])
    assert all_halted
    names = "count", "accuracy", "exact_accuracy", "steps", "q_halt_accuracy"
    assert [metrics[key].item() for key in names] == [3, 2.75, 2, 3, 2]  # the wrong one has a positive q_halt

    head, config = make_head("trm")
    set_halting(head, q_halt=-1.0)  # then no sequence has halted after one step
    metrics = head(head.initial_carry(batch), batch)[2]
    assert not any(metrics[key] for key in names)
    assert metrics["lm_loss"] > 0 and metrics["q_halt_loss"] > 0
    assert "cycle_loss" not in metrics, "it has no penalty"


@pytest.mark.parametrize("weight", [0.5, 0.05, 0.0])
def test_the_weight_of_the_halting_loss_is_a_field(weight):
    head, config = make_head("trm", halt_loss_weight=weight, no_ACT_continue=False)
    batch = registry.example_batch(config, config.batch_size, seed=0)
    _, loss, metrics, *_ = head(head.initial_carry(batch), batch)
    halting = metrics["q_halt_loss"] + metrics["q_continue_loss"]
    assert halting > 0.1
    torch.testing.assert_close(loss.detach(), metrics["lm_loss"] + weight * halting)


@EVERY_VARIANT
def test_the_penalty_is_on_the_change_over_the_last_h_cycle(name):
    """The previous answer is the answer with one H-cycle fewer, and has no gradient."""
    head, config = make_head(name, cycle_penalty=0.3)
    inner = head.model.inner
    batch = registry.example_batch(config, config.batch_size, seed=0)
    carry = head.initial_carry(batch)
    input_embeddings = inner.embed(batch["inputs"], batch["puzzle_identifiers"])
    start = inner.reset_carry(carry.halted, carry.inner_carry)
    cos_sin = None if inner.rotary_emb is None else inner.rotary_emb()
    _, answer, previous = inner.deep_recursion(start, input_embeddings, cos_sin)
    assert answer.requires_grad and not previous.requires_grad
    if name == "transformer":
        expected = start.z_H
    else:
        assert config.H_cycles == 2
        inner.config = dataclasses.replace(config, H_cycles=1)
        expected = inner.deep_recursion(start, input_embeddings, cos_sin)[1].detach()
        inner.config = config
    torch.testing.assert_close(previous, expected.expand_as(previous), rtol=0, atol=0)

    _, loss, metrics, *_ = head(carry, batch)
    head.cycle_penalty = 0.0
    _, without, *_ = head(carry, batch)
    change = (answer - previous).square().mean(dim=(1, 2)).sum()
    assert change > 1e-3
    torch.testing.assert_close(metrics["cycle_loss"], change.detach())
    torch.testing.assert_close(loss, without + 0.3 * change)


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ValueError, match="unknown architecture 'gru'; use one of trm"):
        registry.build("gru", TINY)
    with pytest.raises(ValueError, match="unknown loss 'mse'; use one of stablemax_cross_entropy, softmax"):
        ACTLossHead(TRM(TINY), "mse")
