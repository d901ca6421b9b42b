"""The penalty on the change of the answer over the last H-cycle."""

import dataclasses

import torch
from support.architectures import EVERY_VARIANT, make_head

from models_torch import registry


@EVERY_VARIANT
def test_the_penalty_is_on_the_change_over_the_last_h_cycle(name):
    """The previous answer is the answer with one H-cycle fewer, and has no gradient."""
    head, config = make_head(name, cycle_penalty=0.3)
    inner, batch = head.model.inner, registry.example_batch(config, config.batch_size, seed=0)
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
    weight = next(p for key, p in inner.named_parameters() if key.endswith("down_proj.weight"))
    penalised, plain, penalty = (
        torch.autograd.grad(value, weight, retain_graph=True)[0] for value in (loss, without, 0.3 * change)
    )
    assert penalty.abs().max() > 1e-4
    torch.testing.assert_close(penalised, plain + penalty, rtol=1e-4, atol=1e-5)


def test_without_a_penalty_there_is_no_cycle_loss():
    head, config = make_head("trm")
    batch = registry.example_batch(config, config.batch_size, seed=0)
    _, _, metrics, *_ = head(head.initial_carry(batch), batch)
    assert "cycle_loss" not in metrics
