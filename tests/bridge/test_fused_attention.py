"""`bridge.fused_attention`: the Pallas kernel in interpret mode beside the plain path, and what it leaves to it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.markers import slow_unless
from torch import nn

import bridge
from bridge.lowerings.attention import attention

NAME = "aten::scaled_dot_product_attention"
INTERPRETED = functools.partial(bridge.fused_attention, interpret=True)
LENGTH, WIDTH = 256, 128


class Attention(nn.Module):
    def __init__(self, window=None, scale=None):
        super().__init__()
        self.window, self.scale = window, scale

    def forward(self, query, key, value):
        mask = None
        if self.window is not None:
            length = query.shape[-2]
            mask = torch.ones(length, length, dtype=torch.bool).tril().triu(-self.window)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=True
        )


def arrays(length=LENGTH, width=WIDTH, dtype=jnp.bfloat16, heads=2, key_heads=2):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(1, count, length, width)), dtype) for count in (heads, key_heads, key_heads)]


CASES = {
    "causal": (Attention(), arrays()),
    "blocks": (Attention(), arrays(length=1152, heads=1, key_heads=1)),
    "shared heads": (Attention(), arrays(key_heads=1)),
    "window": (Attention(window=70), arrays()),
    "scale of a power of two": (Attention(scale=0.0625), arrays()),
}


@pytest.mark.parametrize("case", slow_unless(["causal", "shared heads"].__contains__, CASES))
def test_values_and_gradients_are_as_exact_as_those_of_the_plain_path(case):
    module, given = CASES[case]
    cotangent = np.random.default_rng(1).normal(size=given[0].shape).astype(np.float32)

    def computed(lowerings, dtype):
        fn = bridge.export(module, lowerings=lowerings)

        def call(*given):
            out = fn({}, {}, *given)[0].astype(jnp.float32)
            return jnp.sum(out * cotangent), out

        inputs = [array.astype(dtype) for array in given]
        assert ("pallas_call" in str(jax.make_jaxpr(call)(*inputs))) == bool(lowerings)
        gradients, out = jax.grad(call, (0, 1, 2), has_aux=True)(*inputs)
        return [np.asarray(each, np.float32) for each in (out, *gradients)]

    exact = computed({}, jnp.float32)
    plain, fused = (computed(lowerings, jnp.bfloat16) for lowerings in ({}, {NAME: INTERPRETED}))
    for ours, theirs, right in zip(fused, plain, exact, strict=True):
        assert np.linalg.norm(ours - right) <= 1.25 * np.linalg.norm(theirs - right) < 0.02 * np.linalg.norm(right)


def test_products_of_a_kernel_that_is_computed_again():
    """Mosaic refuses bfloat16 with PyTorch's precision for float32, which the call has outside of operations."""
    fn = bridge.export(nn.ModuleDict({"inner": Attention()})["inner"], lowerings={NAME: INTERPRETED}, recompute=r".*")

    def loss(*given):
        return jnp.sum(fn({}, {}, *given)[0].astype(jnp.float32))

    text = str(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(*arrays()))
    assert "remat" in text and "pallas_call" in text
    assert "HIGHEST" not in text


OTHERS = {
    "float32": (arrays(dtype=jnp.float32), {"is_causal": True}),
    "narrow": (arrays(width=64), {"is_causal": True}),
    "odd length": (arrays(length=200), {"is_causal": True}),
    "everything": (arrays(), {}),
    "bias": (arrays(), {"attn_mask": jnp.zeros((LENGTH, LENGTH), jnp.bfloat16)}),
    "a query without keys": (arrays(), {"attn_mask": jnp.arange(LENGTH)[:, None] > jnp.arange(LENGTH)}),
    "a mask for each row": (arrays(), {"attn_mask": jnp.ones((1, 1, LENGTH, LENGTH), bool)}),
}


@pytest.mark.parametrize("case", OTHERS)
def test_every_other_attention_is_the_plain_one(case):
    given, options = OTHERS[case]
    np.testing.assert_array_equal(bridge.fused_attention(*given, **options), attention(*given, **options))


def test_a_traced_mask_is_left_to_the_plain_path():
    given, mask = arrays(), jnp.asarray(np.tri(LENGTH, dtype=bool))
    out = jax.jit(lambda mask: bridge.fused_attention(*given, attn_mask=mask))(mask)
    np.testing.assert_allclose(out.astype(np.float32), attention(*given, attn_mask=mask).astype(np.float32), atol=0.02)


def test_a_lowering_for_no_operation_is_refused():
    with pytest.raises(bridge.BridgeError, match="no lowering is called aten::attention"):
        bridge.export(nn.Linear(2, 2), lowerings={"aten::attention": bridge.fused_attention})


def test_a_chosen_lowering_is_in_the_survey():
    fn = bridge.export(nn.GELU(), lowerings={"aten::gelu": lambda x, approximate="none": 2 * x})
    assert fn({}, {}, np.ones(3, np.float32))[0].tolist() == [2, 2, 2]
    assert fn.survey(np.ones(3, np.float32)).ops == {("aten::gelu", "chosen"): 1}
