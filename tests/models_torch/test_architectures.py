"""Every architecture: published names and shapes of its weights, its ACT step against a reference with gradients."""

from functools import reduce

import torch
from support.architectures import EVERY_VARIANT, latents, make_head, set_halting
from torch import Tensor

from models_torch import registry
from models_torch.losses import ACTLossHead

# Names of the published checkpoints, without the `_orig_mod.` of compiled modules; shapes of the tiny configurations.
EMBEDDINGS_AND_HEADS = {
    "embed_tokens.embedding_weight": (6, 32),
    "lm_head.weight": (6, 32),
    "q_head.weight": (2, 32),
    "q_head.bias": (2,),
    "puzzle_emb.weights": (5, 32),
}
MLP = {"mlp.gate_up_proj.weight": (192, 32), "mlp.down_proj.weight": (32, 96)}
BLOCK = {"self_attn.qkv_proj.weight": (96, 32), "self_attn.o_proj.weight": (32, 32)} | MLP
MIXER_BLOCK = {"mlp_t.gate_up_proj.weight": (96, 18), "mlp_t.down_proj.weight": (18, 48)} | MLP


def with_prefix(prefix: str, names: dict) -> dict:
    return {f"{prefix}.{name}": shape for name, shape in names.items()}


def layers(level: str, block: dict, count: int) -> dict:
    return {key: shape for n in range(count) for key, shape in with_prefix(f"{level}_level.layers.{n}", block).items()}


def initial(*names: str) -> dict:
    return {f"{name}_init": (32,) for name in names}


PUBLISHED = {
    "trm": initial("H", "L") | layers("L", BLOCK, 2),
    "trm-mixer": initial("H", "L") | layers("L", MIXER_BLOCK, 2),
    "trm_singlez": initial("L") | layers("L", BLOCK, 2),
    "trm_hier6": initial("H", "L1", "L2", "L3", "L4", "L5", "L6") | layers("L", BLOCK, 1),
    "hrm": initial("H", "L") | layers("H", BLOCK, 1) | layers("L", BLOCK, 1),
    "transformer": initial("H") | layers("H", BLOCK, 2),
}


@EVERY_VARIANT
def test_state_has_the_published_names_and_shapes(name):
    head, _ = make_head(name)
    shapes = {key: tuple(value.shape) for key, value in head.state_dict().items()}
    assert shapes == with_prefix("model.inner", EMBEDDINGS_AND_HEADS | PUBLISHED[name])


@EVERY_VARIANT
def test_positions_learned_rotary_or_none(name):
    heads = {kind: make_head(name, pos_encodings=kind) for kind in ("none", "rope", "learned")}
    names = {kind: set(head.state_dict()) for kind, (head, _) in heads.items()}
    assert names["none"] == names["rope"]  # rotary tables are not saved: the configuration determines them
    assert names["learned"] - names["rope"] == {"model.inner.embed_pos.embedding_weight"}
    inner = heads["learned"][0].model.inner
    assert inner.embed_pos.embedding_weight.shape == (heads["learned"][1].positions, 32)
    assert (heads["rope"][0].model.inner.rotary_emb is None) == (name == "trm-mixer")


def test_heads_that_leave_a_remainder_as_in_the_published_transformer():
    with torch.device("meta"):
        head = registry.build("transformer", registry.config_class("transformer")(H_layers=1))
    shapes = {key: tuple(value.shape) for key, value in head.state_dict().items()}
    assert shapes["model.inner.H_level.layers.0.self_attn.qkv_proj.weight"] == (1512, 512)
    assert shapes["model.inner.H_level.layers.0.self_attn.o_proj.weight"] == (512, 504)


# gradients: a reference for each architecture, written from its paper with an explicit `detach` at every cut


def trm_reference(inner, carry, input_embeddings, cos_sin) -> Tensor:
    y = carry["z_H"]
    z = carry["z_L"]
    for _ in range(inner.config.H_cycles):
        y = y.detach()
        z = z.detach()
        for _ in range(inner.config.L_cycles):
            z = inner.L_level(z + y + input_embeddings, cos_sin)
        y = inner.L_level(y + z, cos_sin)
    return y


def single_z_reference(inner, carry, input_embeddings, cos_sin) -> Tensor:
    z = carry["z_L"]
    for _ in range(inner.config.H_cycles):
        z = z.detach()
        for _ in range(inner.config.L_cycles):
            z = inner.L_level(z + input_embeddings, cos_sin)
        z = inner.L_level(z, cos_sin)
    return z


def six_features_reference(inner, carry, input_embeddings, cos_sin) -> Tensor:
    y = carry["z_H"]
    features = [carry[f"z_L{i}"] for i in range(1, 7)]
    for _ in range(inner.config.H_cycles):
        y = y.detach()
        features = [z.detach() for z in features]
        for i in range(inner.config.L_cycles):
            features[i] = inner.L_level(reduce(torch.add, features) + y + input_embeddings, cos_sin)
        y = inner.L_level(y + reduce(torch.add, features), cos_sin)
    return y


def hrm_reference(inner, carry, input_embeddings, cos_sin) -> Tensor:
    high = carry["z_H"]
    low = carry["z_L"]
    updates = inner.config.H_cycles * inner.config.L_cycles
    for i in range(updates):
        high = high.detach()
        low = low.detach()
        low = inner.L_level(low + high + input_embeddings, cos_sin)
        if (i + 1) % inner.config.L_cycles == 0:
            high = inner.H_level(high + (low if i == updates - 1 else low.detach()), cos_sin)
    return high


def transformer_reference(inner, carry, input_embeddings, cos_sin) -> Tensor:
    x = carry["z_H"] + input_embeddings
    for layer in inner.H_level.layers:
        x = layer(x, cos_sin)
    return x


REFERENCES = {
    "trm": trm_reference,
    "trm-mixer": trm_reference,
    "trm_singlez": single_z_reference,
    "trm_hier6": six_features_reference,
    "hrm": hrm_reference,
    "transformer": transformer_reference,
}
CYCLES = {"transformer": {}, "hrm": {"H_cycles": 2, "L_cycles": 3}}


def gradients(head: ACTLossHead, loss: Tensor) -> dict[str, Tensor]:
    """Returns the gradient of every parameter and of the puzzle rows of the batch."""
    leaves = dict(head.named_parameters()) | {"rows": head.model.inner.puzzle_emb.local_weights}
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


@EVERY_VARIANT
def test_one_act_step_equals_the_reference_with_all_gradients(name):
    cycles = CYCLES.get(name, {"H_cycles": 3})
    head, config = make_head(name, **cycles, no_ACT_continue=True, forward_dtype="float64")
    head.double()
    batch = registry.example_batch(config, 4, seed=0)
    carry = head.initial_carry(batch)
    random_latents = {key: torch.randn_like(z) for key, z in latents(carry.inner_carry).items()}
    carry.inner_carry = type(carry.inner_carry)(**random_latents)
    carry.halted = torch.zeros(4, dtype=torch.bool)
    carry.current_data = batch
    _, loss, _, outputs, _ = head(carry, batch, ["logits"])
    actual = gradients(head, loss)

    inner = head.model.inner
    inner.deep_recursion = lambda carry, input_embeddings, cos_sin: (
        carry,
        REFERENCES[name](inner, latents(carry), input_embeddings, cos_sin),
        input_embeddings,  # the previous answer is not used here
    )
    _, expected_loss, _, expected_outputs, _ = head(carry, batch, ["logits"])
    expected = gradients(head, expected_loss)
    torch.testing.assert_close(outputs["logits"], expected_outputs["logits"])
    for leaf in expected:
        torch.testing.assert_close(actual[leaf], expected[leaf], msg=lambda text, leaf=leaf: f"{leaf}: {text}")


@EVERY_VARIANT
def test_gradients_do_not_cross_act_steps(name):
    head, config = make_head(name, halt_max_steps=4)
    set_halting(head, q_halt=-1.0)
    batch = registry.example_batch(config, 4, seed=0)
    carry, first_loss, _, _, _ = head(head.initial_carry(batch), batch)
    assert not any(z.requires_grad for z in latents(carry.inner_carry).values())
    first_loss.backward()
    _, second_loss, _, _, _ = head(carry, batch)
    second_loss.backward()  # would raise if it used the freed graph of the first step


@EVERY_VARIANT
def test_bfloat16_forward_keeps_float32_parameters_and_halting_logits(name):
    head, config = make_head(name, forward_dtype="bfloat16")
    batch = registry.example_batch(config, 4, seed=0)
    carry, loss, _, outputs, _ = head(head.initial_carry(batch), batch, ["logits", "q_halt_logits"])
    loss.backward()
    assert all(z.dtype == torch.bfloat16 for z in latents(carry.inner_carry).values())
    assert outputs["logits"].dtype == torch.bfloat16
    assert outputs["q_halt_logits"].dtype == loss.dtype == torch.float32
    assert all(p.dtype == torch.float32 and p.grad is not None for p in head.parameters())
