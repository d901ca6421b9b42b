"""Halting: when a sequence halts in training and in evaluation, what replaces it, the targets of the halting head."""

import pytest
import torch
import torch.nn.functional as F
from support.architectures import EVERY_VARIANT, latents, make_head, run_steps, set_halting

from models_torch import registry


@EVERY_VARIANT
def test_no_sequence_halts_before_the_limit_at_a_negative_q_halt_or_in_evaluation(name):
    head, config = make_head(name, halt_max_steps=3)
    set_halting(head, q_halt=-1.0)
    carries = run_steps(head, config, 4)
    assert [c.halted.tolist() for c in carries] == [[False] * 4, [False] * 4, [True] * 4, [False] * 4]
    assert [c.steps.tolist() for c in carries] == [[1] * 4, [2] * 4, [3] * 4, [1] * 4]
    set_halting(head, q_halt=5.0)
    carries = run_steps(head.eval(), config, 3)
    assert [c.halted.tolist() for c in carries] == [[False] * 4, [False] * 4, [True] * 4]


@EVERY_VARIANT
def test_without_the_continue_loss_a_sequence_halts_when_q_halt_is_positive(name):
    head, config = make_head(name, halt_exploration_prob=0.0, no_ACT_continue=True)
    set_halting(head, q_halt=0.1, q_continue=5.0)
    assert all(carry.halted.all() for carry in run_steps(head, config, 2))
    set_halting(head, q_halt=0.0, q_continue=-5.0)
    assert not run_steps(head, config, 1)[0].halted.any()
    batch = registry.example_batch(config, 4, seed=0)
    assert "q_continue_loss" not in head(head.initial_carry(batch), batch)[2]


def halting_loss(logit, target):
    return F.binary_cross_entropy_with_logits(torch.tensor(logit), torch.tensor(target).sigmoid())


@EVERY_VARIANT
def test_with_the_continue_loss_a_sequence_halts_when_q_halt_is_larger(name):
    head, config = make_head(name, no_ACT_continue=False, halt_max_steps=2, halt_exploration_prob=0.0)
    batch = registry.example_batch(config, 4, seed=0)
    set_halting(head, q_halt=-1.0, q_continue=-2.0)  # q_halt is larger, though negative
    carry, loss, metrics, _, _ = head(head.initial_carry(batch), batch)
    assert carry.halted.all()
    # Before the limit the target is the larger value of the next step.
    torch.testing.assert_close(metrics["q_continue_loss"], 4 * halting_loss(-2.0, target=-1.0))
    total = metrics["lm_loss"] + 0.5 * (metrics["q_halt_loss"] + metrics["q_continue_loss"])
    torch.testing.assert_close(loss.detach(), total)

    set_halting(head, q_halt=-2.0, q_continue=-1.0)
    carry, *_ = head(head.initial_carry(batch), batch)
    assert not carry.halted.any()
    carry, _, metrics, _, _ = head(carry, batch)
    # At the limit the target is the value of halting, the smaller one here.
    torch.testing.assert_close(metrics["q_continue_loss"], 4 * halting_loss(-1.0, target=-2.0))
    assert "q_continue_loss" not in head.eval()(carry, batch)[2]


@EVERY_VARIANT
def test_the_continue_target_is_the_value_of_the_step_that_follows(name):
    head, config = make_head(name, no_ACT_continue=False, halt_exploration_prob=0.0)
    batch = registry.example_batch(config, 4, seed=0)
    carry, _, _, outputs, _ = head(head.initial_carry(batch), batch, ["target_q_continue"])
    carry.halted = torch.zeros(4, dtype=torch.bool)
    following = head.eval()(carry, batch, ["q_halt_logits", "q_continue_logits"])[3]
    best = torch.maximum(following["q_halt_logits"], following["q_continue_logits"])
    torch.testing.assert_close(outputs["target_q_continue"], best.sigmoid())


def test_exploration_draws_a_minimum_between_two_and_the_limit():
    head, config = make_head("trm", halt_exploration_prob=1.0, halt_max_steps=4, batch_size=64)
    set_halting(head, q_halt=1.0)
    torch.manual_seed(0)
    shares = [carry.halted.float().mean().item() for carry in run_steps(head, config, 2)]
    assert shares[0] == 0.0
    assert shares[1] == pytest.approx(1 / 3, abs=0.2)  # the share with a minimum of 2, drawn from 2, 3 and 4


@EVERY_VARIANT
def test_halted_sequences_are_replaced_and_start_from_the_initial_latents(name):
    head, config = make_head(name)
    first, second = (registry.example_batch(config, 4, seed=seed) for seed in (1, 2))
    carry, *_ = head(head.initial_carry(first), first)
    carry.halted = torch.tensor([True, False, True, False])
    mixed, _, _, outputs, _ = head(carry, second, ["logits"])
    for key in first:
        expected = [second[key][0], first[key][1], second[key][2], first[key][3]]
        assert torch.equal(mixed.current_data[key], torch.stack(expected))
    assert mixed.steps.tolist() == [1, 2, 1, 2]
    fresh, _, _, fresh_outputs, _ = head(head.initial_carry(second), second, ["logits"])
    torch.testing.assert_close(outputs["logits"][::2], fresh_outputs["logits"][::2])
    assert not torch.allclose(outputs["logits"][1::2], fresh_outputs["logits"][1::2], atol=1e-3)
    for key, z in latents(mixed.inner_carry).items():
        torch.testing.assert_close(z[::2], latents(fresh.inner_carry)[key][::2])
