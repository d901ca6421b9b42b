"""Every architecture: names and shapes of its weights, halting, where gradients begin, what lives on between steps."""

import dataclasses
from functools import reduce

import pytest
import torch
from torch import Tensor

from models_torch import registry
from models_torch.config import ArchitectureConfig
from models_torch.losses import ACTLossHead

VARIANTS = {name: {} for name in registry.ARCHITECTURES} | {"trm-mixer": {"mlp_t": True, "pos_encodings": "none"}}
EVERY = pytest.mark.parametrize("name", VARIANTS)


def make_head(name: str, **changes) -> tuple[ACTLossHead, ArchitectureConfig]:
    """A tiny one whose halting head and puzzle table are not the zeros they start as."""
    model = name.removesuffix("-mixer")
    config = dataclasses.replace(registry.ARCHITECTURES[model].tiny_config, **(VARIANTS[name] | changes))
    torch.manual_seed(0)
    head = registry.build(model, config)
    assert isinstance(head, ACTLossHead)
    torch.nn.init.normal_(head.model.inner.q_head.weight)
    torch.nn.init.zeros_(head.model.inner.q_head.bias)
    torch.nn.init.normal_(head.model.inner.puzzle_emb.weights)
    return head, config


def set_halting(head: ACTLossHead, q_halt: float, q_continue: float = 0.0) -> None:
    """Makes the halting logits constants."""
    torch.nn.init.zeros_(head.model.inner.q_head.weight)
    with torch.no_grad():
        head.model.inner.q_head.bias.copy_(torch.tensor([q_halt, q_continue]))


def latents(inner_carry) -> dict[str, Tensor]:
    return {field.name: getattr(inner_carry, field.name) for field in dataclasses.fields(inner_carry)}


def run_steps(head: ACTLossHead, config: ArchitectureConfig, count: int) -> list:
    carry, carries = head.initial_carry(registry.example_batch(config, config.batch_size, seed=0)), []
    for step in range(count):
        carry, *_ = head(carry, registry.example_batch(config, config.batch_size, seed=step))
        carries.append(carry)
    return carries


# names and shapes

# As in the published checkpoints, `_orig_mod.` of the compiled module taken off; shapes of the tiny configurations.
IN_AND_OUT = {
    "embed_tokens.embedding_weight": (6, 32),
    "lm_head.weight": (6, 32),
    "q_head.weight": (2, 32),
    "q_head.bias": (2,),
    "puzzle_emb.weights": (5, 32),
}
MLP = {"mlp.gate_up_proj.weight": (192, 32), "mlp.down_proj.weight": (32, 96)}
BLOCK = {"self_attn.qkv_proj.weight": (96, 32), "self_attn.o_proj.weight": (32, 32)} | MLP
MIXER_BLOCK = {"mlp_t.gate_up_proj.weight": (96, 18), "mlp_t.down_proj.weight": (18, 48)} | MLP


def under(prefix: str, names: dict) -> dict:
    return {f"{prefix}.{name}": shape for name, shape in names.items()}


PUBLISHED = {
    "trm": {"H_init": (32,), "L_init": (32,)} | under("L_level.layers.0", BLOCK) | under("L_level.layers.1", BLOCK),
    "trm-mixer": {"H_init": (32,), "L_init": (32,)}
    | under("L_level.layers.0", MIXER_BLOCK)
    | under("L_level.layers.1", MIXER_BLOCK),
    "trm_singlez": {"L_init": (32,)} | under("L_level.layers.0", BLOCK) | under("L_level.layers.1", BLOCK),
    "trm_hier6": {"H_init": (32,), "L1_init": (32,), "L2_init": (32,), "L3_init": (32,), "L4_init": (32,)}
    | {"L5_init": (32,), "L6_init": (32,)}
    | under("L_level.layers.0", BLOCK),
    "hrm": {"H_init": (32,), "L_init": (32,)} | under("H_level.layers.0", BLOCK) | under("L_level.layers.0", BLOCK),
    "transformer": {"H_init": (32,)} | under("H_level.layers.0", BLOCK) | under("H_level.layers.1", BLOCK),
}


@EVERY
def test_state_has_the_published_names_and_shapes(name):
    head, _ = make_head(name)
    found = {key: tuple(value.shape) for key, value in head.state_dict().items()}
    assert found == under("model.inner", IN_AND_OUT | PUBLISHED[name])


@EVERY
def test_positions_learned_rotary_or_none(name):
    heads = {kind: make_head(name, pos_encodings=kind) for kind in ("none", "rope", "learned")}
    names = {kind: set(head.state_dict()) for kind, (head, _) in heads.items()}
    assert names["none"] == names["rope"]  # what the configuration says is not saved
    assert names["learned"] - names["rope"] == {"model.inner.embed_pos.embedding_weight"}
    inner = heads["learned"][0].model.inner
    assert inner.embed_pos.embedding_weight.shape == (heads["learned"][1].positions, 32)
    assert (heads["rope"][0].model.inner.rotary_emb is None) == (name == "trm-mixer")
    # Without any, attention cannot tell the cells apart: the answer moves with the question. A mixer can.
    batch = registry.example_batch(heads["none"][1], 4, seed=0)
    turned = {key: value.roll(5, dims=1) if value.ndim == 2 else value for key, value in batch.items()}
    for kind, (head, _) in heads.items():
        head.eval()
        answers = [head(head.initial_carry(b), b, ["logits"])[3]["logits"] for b in (batch, turned)]
        moved = torch.allclose(answers[0].roll(5, dims=1), answers[1], atol=1e-4)
        assert moved == (kind == "none" and name != "trm-mixer"), kind


# from config/arch of the published code; `mlp_t` is not in the transformer's
PUBLISHED_CONFIGURATIONS = {
    "trm": {"H_cycles": 3, "L_cycles": 6, "L_layers": 2, "num_heads": 8, "puzzle_emb_len": 16, "no_ACT_continue": True},
    "trm_singlez": {"H_cycles": 3, "L_cycles": 6, "L_layers": 2, "puzzle_emb_len": 16, "no_ACT_continue": True},
    "trm_hier6": {"H_cycles": 3, "L_cycles": 6, "L_layers": 2, "puzzle_emb_len": 16, "no_ACT_continue": True},
    "hrm": {"H_cycles": 2, "L_cycles": 2, "H_layers": 4, "L_layers": 4, "num_heads": 8, "no_ACT_continue": False},
    "transformer": {"H_layers": 8, "num_heads": 12, "no_ACT_continue": False},
}


@pytest.mark.parametrize("name", registry.ARCHITECTURES)
def test_defaults_are_the_published_configuration(name):
    shared = {"hidden_size": 512, "expansion": 4, "puzzle_emb_ndim": 512, "pos_encodings": "rope", "mlp_t": False}
    shared |= {"halt_max_steps": 16, "halt_exploration_prob": 0.1, "forward_dtype": "bfloat16"}
    shared |= {"loss_type": "stablemax_cross_entropy", "mlp_multiple_of": 256}
    config = registry.config_class(name)()
    found = dataclasses.asdict(config)
    expected = shared | PUBLISHED_CONFIGURATIONS[name]
    assert {key: found[key] for key in expected} == expected


def test_heads_that_leave_a_remainder_as_in_the_published_transformer():
    with torch.device("meta"):
        head = registry.build("transformer", registry.config_class("transformer")(H_layers=1))
    shapes = {key: tuple(value.shape) for key, value in head.state_dict().items()}
    assert shapes["model.inner.H_level.layers.0.self_attn.qkv_proj.weight"] == (1512, 512)
    assert shapes["model.inner.H_level.layers.0.self_attn.o_proj.weight"] == (512, 504)


# halting


@EVERY
def test_initial_carry_is_deterministic_and_all_halted(name):
    head, config = make_head(name)
    carry = head.initial_carry(registry.example_batch(config, 4, seed=0))
    assert carry.halted.all() and not carry.steps.any() and carry.steps.dtype == torch.int32
    assert not any(z.any() for z in latents(carry.inner_carry).values())
    assert not any(value.any() for value in carry.current_data.values())


@EVERY
def test_nobody_halts_before_the_limit_without_wanting_to(name):
    head, config = make_head(name, halt_max_steps=3)
    set_halting(head, q_halt=-1.0)
    carries = run_steps(head, config, 4)
    assert [c.halted.tolist() for c in carries] == [[False] * 4, [False] * 4, [True] * 4, [False] * 4]
    assert [c.steps.tolist() for c in carries] == [[1] * 4, [2] * 4, [3] * 4, [1] * 4]


@EVERY
def test_without_the_continue_loss_halts_when_q_halt_is_positive(name):
    head, config = make_head(name, halt_exploration_prob=0.0, no_ACT_continue=True)
    set_halting(head, q_halt=0.1, q_continue=5.0)
    assert all(carry.halted.all() for carry in run_steps(head, config, 2))
    set_halting(head, q_halt=0.0, q_continue=-5.0)
    assert not run_steps(head, config, 1)[0].halted.any()
    batch = registry.example_batch(config, 4, seed=0)
    assert "q_continue_loss" not in head(head.initial_carry(batch), batch)[2]


@EVERY
def test_with_the_continue_loss_halts_when_it_is_worth_more(name):
    head, config = make_head(name, no_ACT_continue=False, halt_max_steps=2, halt_exploration_prob=0.0)
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


@EVERY
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
    assert shares[1] == pytest.approx(1 / 3, abs=0.2)  # a minimum of 2, out of 2, 3 and 4


def test_exploration_never_exceeds_the_limit():
    head, config = make_head("trm", halt_exploration_prob=1.0, halt_max_steps=2)
    set_halting(head, q_halt=-1.0)
    assert run_steps(head, config, 2)[1].halted.all()


@EVERY
def test_evaluation_always_runs_to_the_limit(name):
    head, config = make_head(name, halt_max_steps=3)
    set_halting(head, q_halt=5.0)
    carries = run_steps(head.eval(), config, 3)
    assert [carry.halted.all().item() for carry in carries] == [False, False, True]


@EVERY
def test_halted_rows_take_the_next_example_and_start_afresh(name):
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


# gradients: each architecture once more, as its paper tells it, every cut an explicit `detach`


def trm_by_the_book(inner, carry, question, cos_sin) -> Tensor:
    y, z = carry["z_H"], carry["z_L"]
    for _ in range(inner.config.H_cycles):
        y, z = y.detach(), z.detach()
        for _ in range(inner.config.L_cycles):
            z = inner.L_level(z + y + question, cos_sin)
        y = inner.L_level(y + z, cos_sin)
    return y


def single_z_by_the_book(inner, carry, question, cos_sin) -> Tensor:
    z = carry["z_L"]
    for _ in range(inner.config.H_cycles):
        z = z.detach()
        for _ in range(inner.config.L_cycles):
            z = inner.L_level(z + question, cos_sin)
        z = inner.L_level(z, cos_sin)
    return z


def six_pads_by_the_book(inner, carry, question, cos_sin) -> Tensor:
    y, pads = carry["z_H"], [carry[f"z_L{i}"] for i in range(1, 7)]
    for _ in range(inner.config.H_cycles):
        y, pads = y.detach(), [pad.detach() for pad in pads]
        for i in range(inner.config.L_cycles):
            pads[i] = inner.L_level(reduce(torch.add, pads) + y + question, cos_sin)
        y = inner.L_level(y + reduce(torch.add, pads), cos_sin)
    return y


def hrm_by_the_book(inner, carry, question, cos_sin) -> Tensor:
    high, low = carry["z_H"], carry["z_L"]
    updates = inner.config.H_cycles * inner.config.L_cycles
    for i in range(updates):
        high, low = high.detach(), low.detach()
        low = inner.L_level(low + high + question, cos_sin)
        if (i + 1) % inner.config.L_cycles == 0:
            high = inner.H_level(high + (low if i == updates - 1 else low.detach()), cos_sin)
    return high


def transformer_by_the_book(inner, carry, question, cos_sin) -> Tensor:
    x = carry["z_H"] + question
    for layer in inner.H_level.layers:
        x = layer(x, cos_sin)
    return x


BY_THE_BOOK = {
    "trm": trm_by_the_book,
    "trm-mixer": trm_by_the_book,
    "trm_singlez": single_z_by_the_book,
    "trm_hier6": six_pads_by_the_book,
    "hrm": hrm_by_the_book,
    "transformer": transformer_by_the_book,
}
DEEP = {"transformer": {}, "hrm": {"H_cycles": 2, "L_cycles": 3}}


def gradients(head: ACTLossHead, loss: Tensor) -> dict[str, Tensor]:
    """The gradient of every parameter, and of the batch's puzzle rows."""
    leaves = dict(head.named_parameters()) | {"rows": head.model.inner.puzzle_emb.local_weights}
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


@EVERY
def test_one_act_step_is_the_one_in_the_book_and_gradients_begin_where_it_says(name):
    deep = DEEP.get(name, {"H_cycles": 3})
    head, config = make_head(name, **deep, no_ACT_continue=True, forward_dtype="float64")
    head.double()
    batch = registry.example_batch(config, 4, seed=0)
    carry = head.initial_carry(batch)
    drawn = {key: torch.randn_like(z) for key, z in latents(carry.inner_carry).items()}
    carry.inner_carry = type(carry.inner_carry)(**drawn)
    carry.halted, carry.current_data = torch.zeros(4, dtype=torch.bool), batch
    _, loss, _, outputs, _ = head(carry, batch, ["logits"])
    found = gradients(head, loss)

    inner = head.model.inner
    inner.think = lambda carry, question, cos_sin: (
        carry,
        BY_THE_BOOK[name](inner, latents(carry), question, cos_sin),
        question,  # what it was before does not count here
    )
    _, expected_loss, _, expected_outputs, _ = head(carry, batch, ["logits"])
    expected = gradients(head, expected_loss)
    torch.testing.assert_close(outputs["logits"], expected_outputs["logits"])
    for leaf in expected:
        torch.testing.assert_close(found[leaf], expected[leaf], msg=lambda text, leaf=leaf: f"{leaf}: {text}")


@EVERY
def test_gradients_do_not_cross_act_steps(name):
    head, config = make_head(name, halt_max_steps=4)
    set_halting(head, q_halt=-1.0)
    batch = registry.example_batch(config, 4, seed=0)
    carry, first_loss, _, _, _ = head(head.initial_carry(batch), batch)
    assert not any(z.requires_grad for z in latents(carry.inner_carry).values())
    first_loss.backward()
    _, second_loss, _, _, _ = head(carry, batch)
    second_loss.backward()  # would raise if it reached into the graph of the first step


@EVERY
def test_puzzle_rows_get_one_gradient_for_each_example(name):
    head, config = make_head(name)
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


def test_evaluation_reads_the_table_and_leaves_the_local_rows():
    head, config = make_head("trm")
    batch = registry.example_batch(config, 7, seed=0)  # not the batch size of training
    head.eval()(head.initial_carry(batch), batch)
    assert not head.model.inner.puzzle_emb.local_weights.any()


# precision and learning


@EVERY
def test_bfloat16_forward_keeps_float32_parameters_and_halting_logits(name):
    head, config = make_head(name, forward_dtype="bfloat16")
    batch = registry.example_batch(config, 4, seed=0)
    carry, loss, _, outputs, _ = head(head.initial_carry(batch), batch, ["logits", "q_halt_logits"])
    loss.backward()
    assert all(z.dtype == torch.bfloat16 for z in latents(carry.inner_carry).values())
    assert outputs["logits"].dtype == torch.bfloat16
    assert outputs["q_halt_logits"].dtype == loss.dtype == torch.float32
    assert all(p.dtype == torch.float32 and p.grad is not None for p in head.parameters())


@EVERY
def test_adam_learns_one_batch(name):
    head, config = make_head(name, halt_max_steps=2, loss_type="softmax_cross_entropy")
    batch = registry.example_batch(config, 4, seed=0)
    optimizer = torch.optim.Adam(head.parameters(), lr=3e-3)
    losses, carry = [], head.initial_carry(batch)
    for _ in range(40):
        carry, loss, metrics, _, _ = head(carry, batch)
        optimizer.zero_grad()
        (loss / 4).backward()
        optimizer.step()
        losses.append(metrics["lm_loss"].item())
    assert losses[-1] < 0.7 * losses[0]


# configuration


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("trm", {"pos_encodings": "sine"}, "pos_encodings is 'sine'; use one of none, rope, learned"),
        ("hrm", {"forward_dtype": "int8"}, "forward_dtype is 'int8'; use one of float32, bfloat16, float16"),
        ("trm", {"L_cycles": 0}, "L_cycles is 0; use at least 1"),
        ("hrm", {"H_layers": 0}, "H_layers is 0; use at least 1"),
        ("transformer", {"H_layers": 0}, "H_layers is 0; use at least 1"),
        ("trm_hier6", {"L_cycles": 7}, "L_cycles is 7, and each has a latent of its own; use at most 6, or model trm"),
        ("trm", {"num_heads": 10}, "10 heads of 3 channels, and rope turns channels in pairs; use a hidden_size of 40"),
        ("trm", {"num_heads": 33}, "hidden_size 32 leaves no channel for each of 33 heads; use at most 16 heads"),
        ("trm", {"puzzle_emb_ndim": 0}, "puzzle_emb_len 2 has no vector to hold with puzzle_emb_ndim 0; use"),
        ("trm", {"puzzle_emb_ndim": 65}, "does not fit in 2 positions of 32 channels; use at most 64"),
    ],
)
def test_bad_configurations_say_what_to_do(name, changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(registry.ARCHITECTURES[name].tiny_config, **changes)


# the penalty on the answer's change


@EVERY
def test_the_penalty_is_on_the_change_over_the_last_h_cycle(name):
    """What the answer was before is what one H-cycle fewer gives, and has no gradient."""
    head, config = make_head(name, cycle_penalty=0.3)
    inner, batch = head.model.inner, registry.example_batch(config, config.batch_size, seed=0)
    carry = head.initial_carry(batch)
    question = inner.embed(batch["inputs"], batch["puzzle_identifiers"])
    start = inner.reset_carry(carry.halted, carry.inner_carry)
    cos_sin = None if inner.rotary_emb is None else inner.rotary_emb()
    _, answer, before = inner.think(start, question, cos_sin)
    assert answer.requires_grad and not before.requires_grad
    if name == "transformer":
        expected = start.z_H
    else:
        assert config.H_cycles == 2
        inner.config = dataclasses.replace(config, H_cycles=1)
        expected = inner.think(start, question, cos_sin)[1].detach()
        inner.config = config
    torch.testing.assert_close(before, expected.expand_as(before), rtol=0, atol=0)

    _, loss, metrics, *_ = head(carry, batch)
    head.cycle_penalty = 0.0
    _, without, *_ = head(carry, batch)
    change = (answer - before).square().mean(dim=(1, 2)).sum()
    assert change > 1e-3
    torch.testing.assert_close(metrics["cycle_loss"], change.detach())
    torch.testing.assert_close(loss, without + 0.3 * change)
    weight = next(p for key, p in inner.named_parameters() if key.endswith("down_proj.weight"))
    penalised, plain, penalty = (
        torch.autograd.grad(value, weight, retain_graph=True)[0] for value in (loss, without, 0.3 * change)
    )
    assert penalty.abs().max() > 1e-4
    torch.testing.assert_close(penalised, plain + penalty, rtol=1e-4, atol=1e-5)


def test_without_a_penalty_nothing_is_computed():
    head, config = make_head("trm")
    batch = registry.example_batch(config, config.batch_size, seed=0)
    _, _, metrics, *_ = head(head.initial_carry(batch), batch)
    assert "cycle_loss" not in metrics
