"""TRM in plain PyTorch: names, shapes, halting, where gradients flow, what the loss counts."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from models_torch import registry
from models_torch.layers import Attention, truncated_normal_
from models_torch.losses import (
    IGNORE_LABEL_ID,
    ACTLossHead,
    log_stablemax,
    softmax_cross_entropy,
    stablemax_cross_entropy,
)
from models_torch.sparse_embedding import SparseEmbedding
from models_torch.trm import TRM, TRMConfig

TINY: TRMConfig = registry.ARCHITECTURES["trm"].tiny_config
MIXERS = pytest.mark.parametrize("mlp_t", [False, True], ids=["attention", "mlp"])

# As in the published checkpoints of TRM with two layers, `_orig_mod.` of the compiled module taken off.
PUBLISHED_NAMES = {
    False: [
        "model.inner.H_init",
        "model.inner.L_init",
        "model.inner.embed_tokens.embedding_weight",
        "model.inner.lm_head.weight",
        "model.inner.q_head.weight",
        "model.inner.q_head.bias",
        "model.inner.puzzle_emb.weights",
        "model.inner.L_level.layers.0.self_attn.qkv_proj.weight",
        "model.inner.L_level.layers.0.self_attn.o_proj.weight",
        "model.inner.L_level.layers.0.mlp.gate_up_proj.weight",
        "model.inner.L_level.layers.0.mlp.down_proj.weight",
        "model.inner.L_level.layers.1.self_attn.qkv_proj.weight",
        "model.inner.L_level.layers.1.self_attn.o_proj.weight",
        "model.inner.L_level.layers.1.mlp.gate_up_proj.weight",
        "model.inner.L_level.layers.1.mlp.down_proj.weight",
    ],
    True: [
        "model.inner.H_init",
        "model.inner.L_init",
        "model.inner.embed_tokens.embedding_weight",
        "model.inner.lm_head.weight",
        "model.inner.q_head.weight",
        "model.inner.q_head.bias",
        "model.inner.puzzle_emb.weights",
        "model.inner.L_level.layers.0.mlp_t.gate_up_proj.weight",
        "model.inner.L_level.layers.0.mlp_t.down_proj.weight",
        "model.inner.L_level.layers.0.mlp.gate_up_proj.weight",
        "model.inner.L_level.layers.0.mlp.down_proj.weight",
        "model.inner.L_level.layers.1.mlp_t.gate_up_proj.weight",
        "model.inner.L_level.layers.1.mlp_t.down_proj.weight",
        "model.inner.L_level.layers.1.mlp.gate_up_proj.weight",
        "model.inner.L_level.layers.1.mlp.down_proj.weight",
    ],
}


def make_head(seed: int = 0, **changes) -> tuple[ACTLossHead, TRMConfig]:
    """A tiny TRM whose halting head and puzzle table are not the zeros they start as."""
    config = dataclasses.replace(TINY, **changes)
    torch.manual_seed(seed)
    head = registry.build("trm", config)
    assert isinstance(head, ACTLossHead)
    torch.nn.init.normal_(head.model.inner.q_head.weight)
    torch.nn.init.zeros_(head.model.inner.q_head.bias)
    if config.puzzle_emb_ndim:
        torch.nn.init.normal_(head.model.inner.puzzle_emb.weights)
    return head, config


def set_halting(head: ACTLossHead, q_halt: float, q_continue: float = 0.0) -> None:
    """Makes the halting logits constants."""
    torch.nn.init.zeros_(head.model.inner.q_head.weight)
    with torch.no_grad():
        head.model.inner.q_head.bias.copy_(torch.tensor([q_halt, q_continue]))


def gradients(head: ACTLossHead, loss: Tensor) -> dict[str, Tensor]:
    """The gradient of every parameter, and of the batch's puzzle rows."""
    leaves = dict(head.named_parameters()) | {"rows": head.model.inner.puzzle_emb.local_weights}
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


# names and shapes


@MIXERS
def test_state_names_are_the_published_ones(mlp_t):
    head, _ = make_head(mlp_t=mlp_t)
    assert sorted(head.state_dict()) == sorted(PUBLISHED_NAMES[mlp_t])


@MIXERS
def test_shapes(mlp_t):
    head, config = make_head(mlp_t=mlp_t)
    batch = registry.example_batch(config, 4, seed=0)
    carry, loss, metrics, outputs, all_halted = head(
        head.initial_carry(batch), batch, ["logits", "preds", "q_halt_logits", "nothing"]
    )
    assert carry.inner_carry.z_H.shape == carry.inner_carry.z_L.shape == (4, 2 + 16, 32)
    assert {key: tuple(value.shape) for key, value in outputs.items()} == {
        "logits": (4, 16, 6),
        "preds": (4, 16),
        "q_halt_logits": (4,),
    }
    assert loss.shape == () and all(value.shape == () for value in metrics.values())
    assert all_halted.dtype == torch.bool and carry.steps.dtype == torch.int32
    assert not carry.inner_carry.z_H.requires_grad and not outputs["logits"].requires_grad


@pytest.mark.parametrize("multiple_of, width", [(256, 256), (16, 96)])
def test_mlp_width_is_rounded_up(multiple_of, width):
    head, _ = make_head(mlp_multiple_of=multiple_of)
    layer = head.model.inner.L_level.layers[0]
    assert layer.mlp.down_proj.weight.shape == (32, width)  # two thirds of 4 * 32 is 85


@pytest.mark.parametrize("ndim, length, positions", [(0, 0, 0), (33, 0, 2), (20, 3, 3)])
def test_puzzle_positions(ndim, length, positions):
    head, config = make_head(puzzle_emb_ndim=ndim, puzzle_emb_len=length)
    batch = registry.example_batch(config, 4, seed=0)
    carry, *_ = head(head.initial_carry(batch), batch)
    assert config.puzzle_positions == positions
    assert carry.inner_carry.z_H.shape[1] == positions + 16


def test_fewer_key_value_heads_share_their_keys():
    torch.manual_seed(0)
    few, many = Attention(16, 4, 4, 2), Attention(16, 4, 4, 4)
    with torch.no_grad():
        q, k, v = few.qkv_proj.weight.unflatten(0, (-1, 4)).split((4, 2, 2))
        k, v = (rows.repeat_interleave(2, dim=0) for rows in (k, v))
        many.qkv_proj.weight.copy_(torch.cat((q, k, v)).flatten(0, 1))
        many.o_proj.weight.copy_(few.o_proj.weight)
    x = torch.randn(2, 5, 16)
    torch.testing.assert_close(few(x, None), many(x, None))


def test_rotary_attention_depends_on_distance_only():
    head, config = make_head(puzzle_emb_ndim=0, puzzle_emb_len=0)
    inner = head.model.inner
    attention = inner.L_level.layers[0].self_attn
    x = torch.zeros(1, config.positions, config.hidden_size)
    x[:, 3:6] = torch.randn(3, config.hidden_size)
    ahead = x.roll(4, dims=1)
    out, out_ahead = (attention(value, inner.rotary_emb()) for value in (x, ahead))
    torch.testing.assert_close(out[:, 3:6], out_ahead[:, 7:10])
    reversed_x = x.clone()
    reversed_x[:, 3:6] = x[:, 3:6].flip(1)
    turned = attention(reversed_x, inner.rotary_emb())[:, 3:6].flip(1)
    assert not torch.allclose(out[:, 3:6], turned, atol=1e-3)


def test_truncated_normal_has_the_deviation_asked_for():
    torch.manual_seed(0)
    values = truncated_normal_(torch.empty(400_000), std=0.5)
    assert values.std().item() == pytest.approx(0.5, rel=5e-3)
    assert values.abs().max().item() <= 2 * 0.5 / 0.8796 + 1e-6


# halting


def run_steps(head: ACTLossHead, config: TRMConfig, count: int, batch_size: int = 4) -> list:
    carry = head.initial_carry(registry.example_batch(config, batch_size, seed=0))
    carries = []
    for step in range(count):
        carry, *_ = head(carry, registry.example_batch(config, batch_size, seed=step))
        carries.append(carry)
    return carries


def test_nobody_halts_before_the_limit_without_wanting_to():
    head, config = make_head(halt_max_steps=3)
    set_halting(head, q_halt=-1.0)
    carries = run_steps(head, config, 4)
    assert [c.halted.tolist() for c in carries] == [[False] * 4, [False] * 4, [True] * 4, [False] * 4]
    assert [c.steps.tolist() for c in carries] == [[1] * 4, [2] * 4, [3] * 4, [1] * 4]


def test_halts_at_once_when_q_halt_is_positive():
    head, config = make_head(halt_exploration_prob=0.0)
    set_halting(head, q_halt=0.1)
    assert all(carry.halted.all() for carry in run_steps(head, config, 2))
    set_halting(head, q_halt=0.0)
    assert not run_steps(head, config, 1)[0].halted.any()


def test_exploration_draws_a_minimum_between_two_and_the_limit():
    head, config = make_head(halt_exploration_prob=1.0, halt_max_steps=4, batch_size=64)
    set_halting(head, q_halt=1.0)
    torch.manual_seed(0)
    shares = [carry.halted.float().mean().item() for carry in run_steps(head, config, 2, batch_size=64)]
    assert shares[0] == 0.0
    assert shares[1] == pytest.approx(1 / 3, abs=0.2)  # a minimum of 2, out of 2, 3 and 4


def test_exploration_never_exceeds_the_limit():
    head, config = make_head(halt_exploration_prob=1.0, halt_max_steps=2)
    set_halting(head, q_halt=-1.0)
    assert run_steps(head, config, 2)[1].halted.all()


def test_evaluation_always_runs_to_the_limit():
    head, config = make_head(halt_max_steps=3)
    set_halting(head, q_halt=5.0)
    carries = run_steps(head.eval(), config, 3)
    assert [carry.halted.all().item() for carry in carries] == [False, False, True]


@MIXERS
def test_halted_rows_take_the_next_example_and_start_afresh(mlp_t):
    head, config = make_head(mlp_t=mlp_t)
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
    torch.testing.assert_close(mixed.inner_carry.z_H[::2], fresh.inner_carry.z_H[::2])


def test_bootstrapped_halting():
    head, config = make_head(no_ACT_continue=False, halt_max_steps=2, halt_exploration_prob=0.0)
    batch = registry.example_batch(config, 4, seed=0)
    set_halting(head, q_halt=-1.0, q_continue=-2.0)  # more to be had by halting, though q_halt is negative
    carry, loss, metrics, _, _ = head(head.initial_carry(batch), batch)
    assert carry.halted.all()
    # Not at the limit: the target is the better of the two values of the next step.
    target, logit = torch.sigmoid(torch.tensor(-1.0)), torch.tensor(-2.0)
    expected = 4 * torch.nn.functional.binary_cross_entropy_with_logits(logit, target)
    torch.testing.assert_close(metrics["q_continue_loss"], expected)
    total = metrics["lm_loss"] + 0.5 * (metrics["q_halt_loss"] + metrics["q_continue_loss"])
    torch.testing.assert_close(loss.detach(), total)

    set_halting(head, q_halt=-2.0, q_continue=-1.0)
    carry, *_ = head(head.initial_carry(batch), batch)
    assert not carry.halted.any()
    carry, _, metrics, _, _ = head(carry, batch)
    # At the limit: the target is the value of halting, which is the smaller one here.
    target, logit = torch.sigmoid(torch.tensor(-2.0)), torch.tensor(-1.0)
    expected = 4 * torch.nn.functional.binary_cross_entropy_with_logits(logit, target)
    torch.testing.assert_close(metrics["q_continue_loss"], expected)
    assert "q_continue_loss" not in head.eval()(carry, batch)[2]


# gradients


@MIXERS
def test_gradients_flow_through_the_last_h_cycle_only(mlp_t):
    head, config = make_head(mlp_t=mlp_t, H_cycles=3)
    batch = registry.example_batch(config, 4, seed=0)
    _, loss, _, _, _ = head(head.initial_carry(batch), batch)
    actual = gradients(head, loss)

    # The same answer, with the latents that enter the last cycle given as constants in the carry.
    inner = head.model.inner
    start = inner.reset_carry(torch.ones(4, dtype=torch.bool), head.initial_carry(batch).inner_carry)
    question = inner.embed(batch["inputs"], batch["puzzle_identifiers"]).detach()
    cos_sin = inner.rotary_emb() if inner.rotary_emb else None
    z_H, z_L = start.z_H, start.z_L
    for _ in range(2):
        z_H, z_L = inner.h_cycle(z_H, z_L, question, cos_sin)
    one_cycle, _ = make_head(mlp_t=mlp_t, H_cycles=1)
    one_cycle.load_state_dict(head.state_dict())
    carry = one_cycle.initial_carry(batch)
    carry.inner_carry.z_H, carry.inner_carry.z_L = z_H.detach(), z_L.detach()
    carry.halted, carry.current_data = torch.zeros(4, dtype=torch.bool), batch
    _, constant_loss, _, _, _ = one_cycle(carry, batch)
    torch.testing.assert_close(loss, constant_loss)
    expected = gradients(one_cycle, constant_loss)
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], msg=lambda text, name=name: f"{name}: {text}")


def test_gradients_do_not_cross_act_steps():
    head, config = make_head(halt_max_steps=4)
    set_halting(head, q_halt=-1.0)
    batch = registry.example_batch(config, 4, seed=0)
    carry, first_loss, _, _, _ = head(head.initial_carry(batch), batch)
    first_loss.backward()
    _, second_loss, _, _, _ = head(carry, batch)
    second_loss.backward()  # would raise if it reached into the graph of the first step


def test_puzzle_rows_get_one_gradient_for_each_example():
    head, config = make_head()
    batch = registry.example_batch(config, 4, seed=0) | {
        "puzzle_identifiers": torch.tensor([3, 1, 3, 0], dtype=torch.int32)
    }
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


def test_puzzle_rows_still_train_after_the_module_moves():
    table = SparseEmbedding(3, 4, batch_size=2, init_std=0.0, dtype=torch.float32).to(torch.float64)
    table(torch.tensor([1, 2])).sum().backward()
    assert table.local_weights.grad is not None
    assert list(table.state_dict()) == ["weights"]


def test_evaluation_reads_the_table_and_leaves_the_local_rows():
    head, config = make_head()
    batch = registry.example_batch(config, 7, seed=0)  # not the batch size of training
    head.eval()(head.initial_carry(batch), batch)
    assert not head.model.inner.puzzle_emb.local_weights.any()


# loss and metrics


@pytest.mark.parametrize("loss_type", ["stablemax_cross_entropy", "softmax_cross_entropy"])
def test_loss_is_the_sum_of_per_sequence_means_and_ignores_padding(loss_type):
    head, config = make_head(loss_type=loss_type)
    batch = registry.example_batch(config, 4, seed=0)
    batch["labels"][0, :5] = IGNORE_LABEL_ID
    batch["labels"][1] = IGNORE_LABEL_ID
    _, loss, metrics, outputs, _ = head(head.initial_carry(batch), batch, ["logits", "q_halt_logits", "preds"])

    lm_loss, sequence_correct = 0.0, []
    for logits, labels, preds in zip(outputs["logits"], batch["labels"], outputs["preds"], strict=True):
        scores = torch.tensor([[score(x.item(), loss_type) for x in row] for row in logits])
        kept = [i for i, label in enumerate(labels.tolist()) if label != IGNORE_LABEL_ID]
        losses = [-math.log(scores[i, labels[i]] / scores[i].sum()) for i in kept]
        lm_loss += sum(losses) / max(len(losses), 1)
        sequence_correct.append(all(preds[i] == labels[i] for i in kept))
    assert metrics["lm_loss"].item() == pytest.approx(lm_loss, rel=1e-5)
    q_halt = outputs["q_halt_logits"].sigmoid().tolist()
    halting = -sum(math.log(p if right else 1 - p) for p, right in zip(q_halt, sequence_correct, strict=True))
    assert loss.item() == pytest.approx(lm_loss + 0.5 * halting, rel=1e-5)


def score(x: float, loss_type: str) -> float:
    if loss_type == "softmax_cross_entropy":
        return math.exp(x)
    return x + 1 if x >= 0 else 1 / (1 - x)


def test_losses_hold_in_float64_and_at_their_corner():
    logits = torch.tensor([[-300.0, -1.0, 0.0, 1.0, 250.0]], requires_grad=True)
    for label in range(5):
        loss = stablemax_cross_entropy(logits, torch.tensor([label]))
        exact = -log_stablemax(logits.detach().double())[:, label]
        torch.testing.assert_close(loss.detach(), exact.float())
        (gradient,) = torch.autograd.grad(loss.sum(), logits)
        assert gradient.isfinite().all()  # a logit of exactly 1 is the trap
    ignored = torch.tensor([IGNORE_LABEL_ID])
    assert stablemax_cross_entropy(logits, ignored).item() == softmax_cross_entropy(logits, ignored).item() == 0


def test_metrics_count_halted_sequences_that_have_labels():
    head, config = make_head(halt_max_steps=1)
    batch = registry.example_batch(config, 4, seed=0)
    _, _, _, outputs, _ = head(head.initial_carry(batch), batch, ["preds"])
    batch["labels"] = outputs["preds"].to(torch.int32)  # all right,
    batch["labels"][1] = IGNORE_LABEL_ID  # one without labels,
    batch["labels"][2, :4] = (batch["labels"][2, :4] + 1) % config.vocab_size  # one with a quarter wrong,
    batch["labels"][3, 8:] = IGNORE_LABEL_ID  # one right with half the labels
    set_halting(head, q_halt=2.0)
    _, _, metrics, outputs, all_halted = head(head.initial_carry(batch), batch, ["preds"])
    assert all_halted
    assert {key: metrics[key].item() for key in ("count", "accuracy", "exact_accuracy", "steps")} == {
        "count": 3,
        "accuracy": 2.75,
        "exact_accuracy": 2,
        "steps": 3,
    }
    assert metrics["q_halt_accuracy"] == 2  # the wrong one was called right


def test_metrics_of_sequences_that_go_on_are_left_out():
    head, config = make_head()
    set_halting(head, q_halt=-1.0)
    batch = registry.example_batch(config, 4, seed=0)
    metrics = head(head.initial_carry(batch), batch)[2]
    assert all(metrics[key] == 0 for key in ("count", "accuracy", "exact_accuracy", "q_halt_accuracy", "steps"))
    assert metrics["lm_loss"] > 0 and metrics["q_halt_loss"] > 0


# precision and reproducibility


@MIXERS
def test_bfloat16_forward_keeps_float32_parameters_and_halting_logits(mlp_t):
    head, config = make_head(mlp_t=mlp_t, forward_dtype="bfloat16")
    batch = registry.example_batch(config, 4, seed=0)
    carry, loss, _, outputs, _ = head(head.initial_carry(batch), batch, ["logits", "q_halt_logits"])
    loss.backward()
    assert carry.inner_carry.z_H.dtype == outputs["logits"].dtype == torch.bfloat16
    assert outputs["q_halt_logits"].dtype == loss.dtype == torch.float32
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in head.parameters())


def test_initial_carry_is_deterministic_and_all_halted():
    head, config = make_head()
    carry = head.initial_carry(registry.example_batch(config, 4, seed=0))
    assert carry.halted.all() and not carry.steps.any()
    assert not carry.inner_carry.z_H.any() and not carry.inner_carry.z_L.any()
    assert not any(value.any() for value in carry.current_data.values())


def test_adam_learns_one_batch():
    head, config = make_head(seed=1, mlp_t=True)
    batch = registry.example_batch(config, 4, seed=0)
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    losses, carry = [], head.initial_carry(batch)
    for _ in range(50):
        carry, loss, metrics, _, _ = head(carry, batch)
        optimizer.zero_grad()
        (loss / 4).backward()
        optimizer.step()
        losses.append(metrics["lm_loss"].item())
    assert losses[-1] < 0.5 * losses[0]


# configuration and registry


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"pos_encodings": "sine"}, "pos_encodings is 'sine'; use one of none, rope, learned"),
        ({"forward_dtype": "int8"}, "forward_dtype is 'int8'; use one of float32, bfloat16, float16"),
        ({"L_cycles": 0}, "L_cycles is 0; use at least 1"),
        (
            {"num_heads": 5},
            "hidden_size 32 does not divide into 5 heads of an even size; use a multiple of 10",
        ),
        ({"puzzle_emb_ndim": 0}, "puzzle_emb_len 2 has no vector to hold with puzzle_emb_ndim 0; use"),
        (
            {"puzzle_emb_ndim": 65},
            "puzzle_emb_ndim 65 does not fit in 2 positions of 32 channels; use at most 64",
        ),
    ],
)
def test_bad_configurations_say_what_to_do(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **changes)


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ValueError, match="unknown architecture 'gru'; use one of trm"):
        registry.build("gru", TINY)
    with pytest.raises(ValueError, match="unknown loss 'mse'; use one of stablemax_cross_entropy, softmax"):
        ACTLossHead(TRM(TINY), "mse")


def test_example_batch_is_a_function_of_its_seed():
    first, again, other = (registry.example_batch(TINY, 4, seed=seed) for seed in (0, 0, 1))
    assert all(torch.equal(first[key], again[key]) and first[key].dtype == torch.int32 for key in first)
    assert not torch.equal(first["inputs"], other["inputs"])
    assert (first["labels"] == IGNORE_LABEL_ID).any()
