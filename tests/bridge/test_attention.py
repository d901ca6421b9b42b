"""Attention: its lowering, the fused kernel, and masks."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from eager import Call, Doubled, compare, in_jax, raises, randn, verified
from lowering_calls import TOLERANCE, assert_close, is_free, to_jax, weights
from lowering_cases import numbers
from support.cudnn_attention import cudnn_attention
from support.markers import slow_unless
from torch import nn

import bridge
from bridge._compat.jax import tracing_for_gpu
from bridge.lowerings import attention as lowerings_attention
from bridge.lowerings.attention import attention

# ---- Attention in all its forms against PyTorch: float32, narrow dtypes, masks, dropout

Q = numbers(2, 4, 5, 8)
K = numbers(2, 4, 7, 8, seed=1)
V = numbers(2, 4, 7, 8, seed=2)
KEEP = numbers(2, 1, 5, 7, seed=3) > -0.5
NOTHING = KEEP.clone()
NOTHING[0, 0, 2] = False
ATTENTION = {
    "plain": ((Q, K, V), {}),
    "causal": ((Q, K, V), {"is_causal": True}),
    "causal, square": ((K, K, V), {"is_causal": True}),
    "bool mask": ((Q, K, V), {"attn_mask": KEEP}),
    "mask of keys": ((Q, K, V), {"attn_mask": KEEP[:, :, :1]}),
    "float mask": ((Q, K, V), {"attn_mask": numbers(5, 7, seed=4)}),
    "float mask with -inf": ((Q, K, V), {"attn_mask": torch.where(KEEP, 0.0, -torch.inf).double()}),
    "a row without keys": ((Q, K, V), {"attn_mask": NOTHING}),
    "float mask for all heads": ((Q, K, V), {"attn_mask": numbers(2, 1, 1, 7, seed=5)}),
    "float mask for each head": ((Q, K, V), {"attn_mask": numbers(4, 5, 7, seed=6)}),
    "scale": ((Q, K, V), {"scale": 0.3}),
    "grouped": ((Q, K[:, :2], V[:, :2]), {"enable_gqa": True}),
    "grouped, one head, causal": ((K, K[:, :1], V[:, :1]), {"enable_gqa": True, "is_causal": True}),
    "wider values": ((Q, K, numbers(2, 4, 7, 12)), {}),
    "no heads": ((Q[0, 0], K[0, 0], V[0, 0]), {}),
    "one row": ((Q[:, :, :1], K, V), {}),
    "causal, in blocks": (
        (numbers(1, 2, 1030, 4), *[numbers(1, 1, 1030, 4, seed=n) for n in (1, 2)]),
        {"is_causal": True},
    ),
    "grouped, masked": ((Q, K[:, :2], V[:, :2]), {"enable_gqa": True, "attn_mask": KEEP}),
}


def attend(module_kwargs, dtype, off=()):
    """(query, key, value) -> output, through the bridge."""
    kwargs = {k: v.to(dtype) if is_free(v) else v for k, v in module_kwargs.items()}
    attention = Call(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **kwargs))
    fn = bridge.export(attention, lowerings=dict.fromkeys(off))
    return lambda *inputs: fn({}, {}, *inputs)[0]


@pytest.mark.parametrize(
    "ours", [pytest.param(True, id="ours"), pytest.param(False, id="without", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_in_float32(name, ours):
    """Values and gradients against float64, with our lowering and with PyTorch's own composition."""
    if name == "a row without keys" and not ours:
        pytest.skip("PyTorch's composition has NaN gradients there; its fused kernel and our lowering have not")
    inputs, kwargs = ATTENTION[name]
    leaves = [t.clone().requires_grad_() for t in inputs]
    truth = F.scaled_dot_product_attention(*leaves, **kwargs)
    cotangent = weights(truth.shape)
    slopes = torch.autograd.grad((truth * cotangent).sum(), leaves)
    call = attend(kwargs, torch.float32, () if ours else ("aten::scaled_dot_product_attention",))
    out, pull = jax.vjp(jax.jit(call), *(to_jax(t, jnp.float32) for t in inputs))
    assert_close([out], [truth])
    assert_close(pull(to_jax(cotangent, jnp.float32)), slopes)


@pytest.mark.parametrize("name", [name for name, (_, kwargs) in ATTENTION.items() if is_free(kwargs.get("attn_mask"))])
def test_a_float_mask_has_its_gradient(name):
    inputs, kwargs = ATTENTION[name]
    mask = kwargs["attn_mask"].clone().requires_grad_()
    truth = F.scaled_dot_product_attention(*inputs, attn_mask=mask)
    (slope,) = torch.autograd.grad((truth * weights(truth.shape)).sum(), mask)
    floats = [t.float() for t in inputs]
    fn = bridge.export(Call(lambda mask: F.scaled_dot_product_attention(*floats, attn_mask=mask)))
    cotangent = to_jax(weights(truth.shape), jnp.float32)
    found = jax.jit(jax.grad(lambda m: (fn({}, {}, m)[0] * cotangent).sum()))(to_jax(mask.detach(), jnp.float32))
    assert_close([found], [slope])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_in_narrow_dtypes_is_as_exact_as_pytorchs(name, dtype):
    inputs, kwargs = ATTENTION[name]
    to_torch = getattr(torch, dtype)
    narrow = [t.to(to_torch) for t in inputs]
    truth = F.scaled_dot_product_attention(*(t.double() for t in narrow), **kwargs)
    masked = {k: v.to(to_torch) if is_free(v) else v for k, v in kwargs.items()}
    theirs = F.scaled_dot_product_attention(*narrow, **masked).double() - truth
    found = attend(kwargs, to_torch)(*(to_jax(t, dtype) for t in narrow))
    ours = np.asarray(found.astype(jnp.float32), np.float64) - truth.numpy()
    # For shapes its fused kernel refuses, PyTorch multiplies in float32 throughout, which no accelerator would want.
    # Over 1 030 positions the largest of 8 240 errors varies.
    slack = 1.25 if name in ("wider values", "no heads", "causal, in blocks") else 1.1
    assert np.abs(ours).max() <= slack * theirs.abs().max().item()
    assert np.sqrt((ours**2).mean()) <= slack * theirs.square().mean().sqrt().item()


def products_of_the_gradient(call, *arrays):
    """Returns the dtypes of the two operands of every matrix product."""
    gradient = jax.grad(lambda *x: call(*x).sum().astype(jnp.float32), (0, 1, 2))
    program = jax.jit(gradient).lower(*arrays).as_text()
    return re.findall(r"dot_general.*: \(tensor<[\dx]*(\w+)>, tensor<[\dx]*(\w+)>\)", program)


@pytest.mark.parametrize(
    "name", slow_unless("causal, square".__eq__, ["causal, square", "grouped", "float mask", "float mask with -inf"])
)
def test_attention_under_autocast_is_that_of_the_narrow_dtype(name):
    """PyTorch's own composition, which autocast leads to, would multiply in float32."""
    inputs, kwargs = ATTENTION[name]
    mask = {k: v.float() if is_free(v) else v for k, v in kwargs.items()}

    @torch.autocast("cpu", torch.bfloat16)
    def autocast(*inputs):
        return F.scaled_dot_product_attention(*inputs, **mask)

    fn = bridge.export(Call(autocast))
    arrays = [to_jax(t, jnp.float32) for t in inputs]
    found = fn({}, {}, *arrays)[0]
    expected = attend(kwargs, torch.bfloat16)(*(x.astype(jnp.bfloat16) for x in arrays))
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found.astype(jnp.float32), expected.astype(jnp.float32))
    assert set(products_of_the_gradient(lambda *x: fn({}, {}, *x)[0], *arrays)) == {("bf16", "bf16")}


def test_a_causal_mask_that_is_too_large_to_embed():
    """PyTorch's composition makes it by `torch.where` of two numbers, which is itself a composition."""
    query, key, value = (numbers(1, 1, 257, 2, seed=seed) for seed in range(3))
    off = ("aten::scaled_dot_product_attention",)
    found = attend({"is_causal": True}, torch.float32, off)(*(to_jax(t, jnp.float32) for t in (query, key, value)))
    assert_close([found], [F.scaled_dot_product_attention(query, key, value, is_causal=True)])


@pytest.mark.parametrize("name", slow_unless({"plain", "causal, square", "grouped"}.__contains__, ATTENTION))
def test_attention_with_dropout_is_pytorchs(name):
    """Values and gradients, with PyTorch's own draws."""
    inputs, kwargs = ATTENTION[name]
    kwargs = {k: v.float() if is_free(v) else v for k, v in kwargs.items()}
    torch.manual_seed(0)
    dropped = Call(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **kwargs, dropout_p=0.3))
    verified(dropped, *(t.float().requires_grad_() for t in inputs), tolerance=TOLERANCE)


def test_attention_with_dropout_keeps_the_mean_and_wants_a_key():
    inputs = [to_jax(t, jnp.float32) for t in (Q, K, V)]
    fn = bridge.export(Call(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)))
    with pytest.raises(bridge.BridgeError, match="draws random numbers but the call has no key"):
        fn({}, {}, *inputs)
    draws = jax.vmap(lambda key: fn({}, {}, *inputs, rng=key)[0])(jax.random.split(jax.random.key(0), 2000))
    np.testing.assert_allclose(draws.mean(0), F.scaled_dot_product_attention(Q, K, V).numpy(), atol=0.08)
    assert draws.std(0).mean() > 0.1


@pytest.mark.parametrize("name", ["plain", "scale", "grouped, one head, causal"])
def test_attention_hands_a_gpu_the_fused_form(name, monkeypatch):
    """The layout, the groups and the scale that cuDNN's attention is given, with XLA's own computing in its place."""
    calls = []
    original = jax.nn.dot_product_attention

    def bind(*args, implementation, **kwargs):
        calls.append(implementation)
        return original(*args, implementation="xla", **kwargs)

    inputs, kwargs = ATTENTION[name]
    odd = [to_jax(t, jnp.bfloat16) for t in inputs]
    narrow = [jnp.concatenate([x, x], axis=2) for x in odd]
    expected = lowerings_attention.attention(*narrow, **kwargs)
    host = jax.devices()[0]
    monkeypatch.setattr(jax, "devices", lambda: [type("Device", (), {"compute_capability": "8.0"})])
    monkeypatch.setattr(jax.nn, "dot_product_attention", bind)
    found = lowerings_attention.attention(*narrow, **kwargs)
    assert calls == ["cudnn"]
    np.testing.assert_allclose(found.astype(jnp.float32), expected.astype(jnp.float32), atol=0.04)
    lowerings_attention.attention(*(x.astype(jnp.float32) for x in narrow), **kwargs)
    lowerings_attention.attention(*narrow, attn_mask=jnp.ones((), bool), **kwargs)
    lowerings_attention.attention(*odd, **kwargs)
    with jax.default_device(host):
        lowerings_attention.attention(*narrow, **kwargs)
    assert calls == ["cudnn"], "float32, masks, odd lengths and what runs on the host stay with the einsum"


@pytest.fixture
def on_a_gpu(monkeypatch):
    """A GPU, with the emulated kernel of cuDNN; returns the lengths of queries and keys of its calls."""
    lengths = []

    def recorded(query, key, *args, **kwargs):
        lengths.append((query.shape[1], key.shape[1]))
        return cudnn_attention(query, key, *args, **kwargs)

    monkeypatch.setattr(jax, "devices", lambda: [type("Device", (), {"compute_capability": "9.0"})])
    monkeypatch.setattr(jax.nn, "dot_product_attention", recorded)
    return lengths


LENGTHS = {
    "97": (97, 97, False),
    "98": (98, 98, False),
    "64": (64, 64, False),
    "916": (916, 916, False),
    "97, causal": (97, 97, True),
    "97 to 131": (97, 131, False),
    "98 to 131": (98, 131, False),
}
EVERY_LENGTH = pytest.mark.parametrize("length", slow_unless(["97", "64", "98 to 131"].__contains__, LENGTHS))


def rows_of(length):
    """Returns query, key and value, the cotangent and the options of a case; two heads of the query share a key."""
    queries, keys, is_causal = LENGTHS[length]
    shapes = [(1, 4, queries, 32), (1, 2, keys, 32), (1, 2, keys, 32), (1, 4, queries, 32)]
    *inputs, cotangent = (numbers(*shape, seed=seed) for seed, shape in enumerate(shapes))
    return inputs, cotangent, {"is_causal": is_causal, "enable_gqa": True}


def truth_of(inputs, cotangent, kwargs):
    """Returns the output and the gradients in float64."""
    leaves = [t.double().requires_grad_() for t in inputs]
    out = F.scaled_dot_product_attention(*leaves, **kwargs)
    return [out.detach(), *torch.autograd.grad((out * cotangent.double()).sum(), leaves)]


@EVERY_LENGTH
def test_fused_attention_of_any_length_is_exact(length, on_a_gpu):
    """Values and gradients of the padded call in float32, which cuDNN does not have: only the masks count."""
    inputs, cotangent, kwargs = rows_of(length)
    arrays = [to_jax(t, jnp.float32) for t in inputs]

    def flash(query, key, value):
        return lowerings_attention._flash(query, key, value, kwargs["is_causal"], None)

    with jax.default_matmul_precision("highest"):
        out, pullback = jax.vjp(jax.jit(flash), *arrays)
        found = [out, *pullback(to_jax(cotangent, jnp.float32))]
    for ours, truth in zip(found, truth_of(inputs, cotangent, kwargs), strict=True):
        np.testing.assert_allclose(ours, truth.numpy(), rtol=0, atol=1e-5 * truth.abs().max())
    assert [count % 2 for count in on_a_gpu[-1]] == [0, 0]


@EVERY_LENGTH
def test_fused_attention_in_bfloat16_is_as_exact_as_the_plain_path(length, on_a_gpu):
    inputs, cotangent, kwargs = rows_of(length)
    narrow = [t.bfloat16() for t in (*inputs, cotangent)]
    truth = truth_of(narrow[:-1], narrow[-1], kwargs)
    *arrays, slope = (to_jax(t, jnp.bfloat16) for t in narrow)

    def errors(function):
        out, pullback = jax.vjp(jax.jit(lambda *x: function(*x, **kwargs).astype(jnp.bfloat16)), *arrays)
        found = (np.asarray(x.astype(jnp.float32), np.float64) for x in (out, *pullback(slope)))
        return [np.sqrt(np.square(x - t.numpy()).mean()) for x, t in zip(found, truth, strict=True)]

    plain = errors(lowerings_attention.attention_by_operations)
    assert not on_a_gpu
    fused = errors(lowerings_attention.attention)
    assert on_a_gpu, "97 positions of 32 channels have more scores than queries"
    assert all(ours <= 1.02 * theirs for ours, theirs in zip(fused, plain, strict=True)), (fused, plain)


def test_attention_without_a_gradient_is_not_padded(on_a_gpu):
    query, key, value = arrays = [to_jax(t, jnp.bfloat16) for t in rows_of("97 to 131")[0]]
    jax.jit(lowerings_attention.attention)(*arrays)
    assert on_a_gpu == [(97, 131)], "JAX accepts odd lengths there"
    jax.grad(lambda *x: lowerings_attention.attention(*x).sum().astype(jnp.float32))(*arrays)
    assert on_a_gpu[-1] == (98, 132)
    on_a_gpu.clear()
    lowerings_attention.attention(query[:, :, :1], key, value, enable_gqa=True)
    assert not on_a_gpu, "the keys of a single query are not copied"


VMAPS = {"all": (0, 0, 0), "a later axis": (1, 0, 2), "queries": (0, None, None), "keys": (None, 0, None)}


@pytest.mark.parametrize("length", [97, 98])
@pytest.mark.parametrize("axes", VMAPS.values(), ids=VMAPS)
def test_fused_attention_is_batched_in_every_way(axes, length):
    """JAX's rules for cuDNN take for granted that all arrays are batched along their first axis."""
    one = (2, 4, length, 64)
    arrays = [
        jax.ShapeDtypeStruct(one if axis is None else (*one[:axis], 3, *one[axis:]), jnp.bfloat16) for axis in axes
    ]

    def loss(*x):
        return lowerings_attention.attention(*x).astype(jnp.float32).sum()

    def rows(*x):  # the cotangents are batched, the arrays are not
        out, pullback = jax.vjp(lowerings_attention.attention, *x)
        return jax.vmap(pullback)(jnp.stack([out, out]))

    gradient = jax.grad(loss, (0, 1, 2))
    plain = [jax.ShapeDtypeStruct(one, jnp.bfloat16)] * 3
    with tracing_for_gpu((9, 0), 91000):
        for call, inputs, batch in (
            (jax.vmap(lowerings_attention.attention, axes), arrays, 6),
            (jax.vmap(gradient, axes), arrays, 6),
            (rows, plain, 4),
        ):
            program = jax.jit(call).trace(*inputs).lower(lowering_platforms=("cuda",)).as_text()
            assert re.findall(r"@__cudnn.fmha\w+\(.*?: \(tensor<(\d+)x", program)[-1] == str(batch)


def test_products_of_the_backward_pass_are_in_the_dtype_of_the_inputs():
    """Scores and sums are in float32; a cotangent in float32 would double the bytes that the backward pass moves."""
    arrays = [to_jax(t, jnp.bfloat16) for t in (Q, K, V)]
    assert products_of_the_gradient(attend({}, torch.bfloat16), *arrays) == [("bf16", "bf16")] * 5


def test_long_causal_attention_leaves_out_blocks_without_keys():
    """10 of the 16 products of 4 x 4 blocks of 256 rows are computed, also in the backward pass."""
    query = jnp.ones((1, 1, 1024, 8))
    call = jax.grad(lambda *x: attend({"is_causal": True}, torch.float32)(*x).sum(), (0, 1, 2))
    flops = jax.jit(call).lower(query, query, query).cost_analysis()["flops"]
    plain = jax.jit(jax.grad(lambda *x: attend({}, torch.float32)(*x).sum(), (0, 1, 2)))
    assert 0.6 < flops / plain.lower(query, query, query).cost_analysis()["flops"] < 0.7


# ---- `bridge.fused_attention`: the Pallas kernel in interpret mode beside the plain path, and what it leaves to it

NAME = "aten::scaled_dot_product_attention"
INTERPRETED = functools.partial(bridge.fused_attention, interpret=True)
LENGTH = 256
WIDTH = 128


def causal(window=None, scale=None):
    def forward(query, key, value):
        length = query.shape[-2]
        mask = None if window is None else torch.ones(length, length, dtype=torch.bool).tril().triu(-window)
        settings = {"attn_mask": mask, "is_causal": mask is None, "scale": scale, "enable_gqa": True}
        return F.scaled_dot_product_attention(query, key, value, **settings)

    return Call(forward)


def arrays(length=LENGTH, width=WIDTH, dtype=jnp.bfloat16, heads=2, key_heads=2):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(1, count, length, width)), dtype) for count in (heads, key_heads, key_heads)]


CASES = {
    "causal": (causal(), arrays()),
    "blocks": (causal(), arrays(length=1152, heads=1, key_heads=1)),
    "shared heads": (causal(), arrays(key_heads=1)),
    "window": (causal(window=70), arrays()),
    "scale": (causal(scale=0.0625), arrays()),
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
    fn = bridge.export(causal(), lowerings={NAME: INTERPRETED}, recompute=r".*")

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
    "a mask for each head": (arrays(), {"attn_mask": jnp.ones((1, 2, LENGTH, LENGTH), bool)}),
}


@pytest.mark.parametrize("case", OTHERS)
def test_every_other_attention_is_the_plain_one(case):
    given, options = OTHERS[case]
    np.testing.assert_array_equal(bridge.fused_attention(*given, **options), attention(*given, **options))


def prefix_masks():
    """Masks of two rows with three samples each, both ways inside of the first half of a sample."""
    place = np.arange(LENGTH)
    ends = np.array([[60, 200, LENGTH], [128, 131, LENGTH]])
    samples = (place[None, :, None] >= ends[:, None]).sum(-1)
    begin = np.take_along_axis(np.pad(ends, [(0, 0), (1, 0)]), samples, 1)
    end = np.take_along_axis(ends, samples, 1)
    asked = 2 * (place - begin) < end - begin
    seen = np.tri(LENGTH, dtype=bool) | (asked[:, :, None] & asked[:, None])
    return seen & (samples[:, :, None] == samples[:, None])


@pytest.mark.slow
@pytest.mark.parametrize("case", ["samples of a row", "one for all"])
def test_masks_that_are_data_are_as_exact_as_in_the_plain_path(case):
    """One query of the first row has no key, and none of the last row has any: their values are zeros."""
    masks = np.concatenate([prefix_masks(), np.zeros((1, LENGTH, LENGTH), bool)])
    masks[0, 3] = False
    masks = masks[:, None] if case == "samples of a row" else masks[0]
    given = [jnp.concatenate([each, each[:, ::-1], each]) for each in arrays()]
    cotangent = np.random.default_rng(1).normal(size=given[0].shape).astype(np.float32)

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def computed(function, dtype, mask):
        def loss(*given):
            out = function(*given, attn_mask=mask, scale=0.0625).astype(jnp.float32)
            return jnp.sum(out * cotangent), out

        gradients, out = jax.grad(loss, (0, 1, 2), has_aux=True)(*(array.astype(dtype) for array in given))
        return out, *gradients

    exact, plain = (computed(attention, dtype, masks) for dtype in (jnp.float32, jnp.bfloat16))
    fused = computed(INTERPRETED, jnp.bfloat16, masks)
    assert not np.any(fused[0][0, :, 3]) and not np.any(exact[0][0, :, 3])
    assert case == "one for all" or not np.any(fused[0][2])
    for ours, theirs, right in zip(
        *(map(lambda x: np.asarray(x, np.float32), each) for each in (fused, plain, exact)), strict=True
    ):
        assert np.isfinite(ours).all()
        assert np.linalg.norm(ours - right) <= 1.25 * np.linalg.norm(theirs - right) < 0.02 * np.linalg.norm(right)


def test_a_chosen_lowering_is_in_the_survey():
    fn = bridge.export(nn.GELU(), lowerings={"aten::gelu": lambda x, approximate="none": 2 * x})
    assert fn({}, {}, np.ones(3, np.float32))[0].tolist() == [2, 2, 2]
    assert fn.survey(np.ones(3, np.float32)).ops == {("aten::gelu", "chosen"): 1}


# ---- `x[mask]` and `x[mask] = …` by a traced mask, which may select any number of rows, against PyTorch eager

X = randn(3, 4, seed=0)


def written(base, place, value):
    out = base * 2
    out[place] = value
    return out


def conditional(x):
    """Writes by masks without dimensions."""
    yes = x[0, 0] > -9
    no = x[0, 0] < -9
    places = [yes, no, (..., yes, 2), (slice(None), no, 2), (yes, slice(1)), (1, yes, no), (None, yes, slice(1, 3))]
    made = [written(x, place, value) for place, value in zip(places, itertools.cycle([x[1, :1], 3.0, x[0, 0]]))]
    return [*made, written(torch.zeros(3, 4), yes, x[0]), written(x > 0, no, True), written(x, (yes, x.argmax()), 1)]


def values_of_known_shape(x):
    cube = torch.stack([x, x + 1])
    rows = x[:, 0] > 0
    mask = x > 0
    return [
        written(cube, (slice(None), mask), 0),
        written(cube, (slice(None), mask), x.sum()),
        written(cube, (slice(None), mask), x[:2, :1]),
        written(cube, (..., mask), x[0, :1]),
        written(cube, (slice(None), rows), x[0]),
        written(cube, (slice(None), rows), x[:2, None]),
        written(cube, (slice(None), rows, 1), 3.0),
        written(cube, (1, rows, slice(1, None)), x[1, 1:]),
        written(x, (slice(None), x[0] > 0), x[:, :1]),
        written(x, rows, x[:1]),
        written(torch.stack([cube, cube], 1), x[:2, 0] < 9, x[0]),
        torch.ops.aten.index_put(x * 2, [None, x[0] > 0], x[:, :1], True),
        *conditional(x),
    ]


def elementwise(x):
    mask = x > 0
    away = x * 2
    distance = x.clone()
    shared = x[0, 0] * 3
    distance[mask] = away[mask]
    away[mask] -= 1
    scaled = x * 1
    scaled[mask] = (scaled[mask].exp() + shared).clamp(max=9) / away[mask].add_(2) * distance[mask].detach()
    with torch.no_grad():
        scaled[~mask] *= 3
    return distance, away, scaled


def rows_and_columns(x):
    rows = x[:, 0] > 0
    columns = x[0] > 0
    y = torch.stack([x, x + 1], -1)
    y[rows] = torch.where(y[rows] > 1, y[rows] * x[0, :2], torch.tanh(y[rows]))
    y[:, columns] = y[:, columns] * 2 + y[:, columns].sigmoid()
    first = x[:, columns]
    first *= 2
    x = x * 1
    x[:, columns] = first.half().float()
    table = torch.ones(3, 4)
    table[rows] = table[rows] + x[rows]
    y[rows, :, 0] += 1
    y[1, columns] = y[1, columns] * x[0, 0].half()
    return y, x, table


def sums_and_means(x):
    mask = x > 0
    counts = (x * 10).long()
    waves = torch.polar(x.abs(), x)
    return x[mask].sum(), (x[mask] ** 2).mean(), x[x[:, 0] > 0].mean(), counts[mask].sum(), waves[mask].mean().abs()


def masked_select(x):
    mask = x > 0
    of_columns = x[0] > 0
    return (
        torch.masked_select(x, mask).sum(),
        x.masked_select(mask=mask).exp().mean(),
        (x.masked_select(of_columns) * 2).sum(),
        torch.masked_select(mask=mask, input=x[0]).mean(),
    )


def computed_twice(x):
    """Computes each mask again on the right side, by the same operations on the same tensors."""
    y = x * 1
    shifted = x + torch.arange(4)
    y[x > 0] = x[x > 0] * 2 + shifted[~(x <= 0) & (x > 0)].mean()
    y[(shifted > x.mean())[:, 0], 1:] *= y[(shifted > x.mean())[:, 0], 1:]
    y[(x[:, 0] > 0) & (x.sum(1) > 1)] = y[(x[:, 0] > 0) & (x.sum(1) > 1)].exp()
    y[~torch.isnan(x) & (x < 0)] = shifted[~torch.isnan(x) & (x < 0)] ** 2
    y[torch.where(x > 1, 0.0, x) > 0] -= shifted[torch.where(x > 1, 0.0, x) > 0]
    return y, torch.distributions.StudentT(x.abs() * 2 + 1.5).variance


def computed_twice_beside_a_write(x):
    y = x * 1
    before = y[y > 0]
    y[0] -= 1
    y[y > 0] = before
    return y


MASKED = (values_of_known_shape, elementwise, rows_and_columns, sums_and_means, masked_select, computed_twice)


@pytest.mark.parametrize("case", MASKED)
def test_values_and_gradients(case):
    compare(case, [X])


def test_what_is_not_selected_has_no_part_in_a_gradient():
    """Logarithms and quotients of what the mask leaves out would be infinite; the mask may select nothing."""

    def forward(x, scale):
        positive = x > 0
        y = x * 1
        y[positive] = torch.sqrt(y[positive]).log() * scale / y[positive]
        return y

    scale = torch.tensor(2.0)
    compare(forward, [torch.tensor([0.0, 4.0, -1.0]), scale])
    compare(forward, [torch.tensor([0.0, -4.0, -1.0]), scale])


REFUSED = {
    "a result": lambda x: x[x > 0],
    "a median": lambda x: written(x, (mask := x[:, 0] > 0), x[mask].median(-1).values),
    "a list": lambda x: torch.cat([x[x > 0], x[0]]),
    "another mask": lambda x: written(x, x > 0, x[x >= 0] + 1),
    "the mask of another number": lambda x: written(x, x > 0, x[x > 1] + 1),
    "a mask of what was written since": computed_twice_beside_a_write,
    "a mask of other draws": lambda x: written(x, torch.rand(3, 4) > x, x[torch.rand(3, 4) > x] + 1),
    "rows of another tensor": lambda x: written(x, (mask := x > 0), x[mask] + x),
    "a read place": lambda x: x[x > 0][0],
    "two masks": lambda x: x[x[:, 0] > 0, x[0] > 0],
    "a matrix product": lambda x: x[x[:, 0] > 0] @ x.T,
    "a backward of its own": lambda x: Doubled.apply(x[x > 0]).sum(),
    "a write elsewhere": lambda x: (x[0, 0] * 1).add_(x[x > 0]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    raises(r"depends on data.*Remedy.*torch\.where", REFUSED[name], X, rng=jax.random.key(0))


def test_values_that_do_not_fit_and_those_of_another_dtype():
    for value in (X[0, :2], X[:2, :3]):
        raises("do not fit", lambda x, value=value: written(x, x[:, 0] > 0, value), X)


def test_a_mask_that_is_known_selects_as_in_pytorch():
    assert in_jax(lambda x: x[x > 0], torch.tensor([1.0, -1, 2])).shape == (2,)


def test_a_mask_that_is_computed_again_under_vmap():
    def function(x):
        y = torch.zeros_like(x)
        y[x > 0] = x[x > 0] * 2
        y[~(x.abs() > 1)] += 3
        return y

    fn = bridge.export(Call(function))
    expected = torch.stack([function(x) for x in X])
    for wrap in (lambda f: f, jax.jit):
        ours = wrap(jax.vmap(lambda x: fn({}, {}, x)[0]))(X.numpy())
        assert jnp.allclose(ours, expected.numpy())

    def other(x):
        y = torch.zeros_like(x)
        y[x > 0.1] = x[x > 0] * 2
        return y

    fn = bridge.export(Call(other))
    with pytest.raises(bridge.BridgeError, match="another mask"):
        jax.eval_shape(jax.vmap(lambda x: fn({}, {}, x)[0]), X.numpy())
