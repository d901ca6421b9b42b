"""`--compute.attention fused` of TRM: the Pallas kernels in interpret mode beside the plain path and PyTorch."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from support.block_kernels import cycles, exported, text_and_gradients, values_and_gradients
from support.markers import slow_or_campaign
from support.scripts import run_script

from models_torch.blocks import mix_by_attention
from models_torch.layers import Attention, RotaryEmbedding
from train_jax.core.kernels import attention
from train_jax.run.config import ComputeConfig
from train_jax.run.kernels import kernels

INTERPRETED = functools.partial(attention.fused_mix_by_attention, interpret=True)


def arrays(batch, positions, hidden, head_dim, rotary, scale=1.5):
    """`x`, both weights, cosines and sines; scores have a standard deviation of `scale` squared."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(batch, positions, hidden)), jnp.float32)
    scales = np.repeat([scale, scale, 1], hidden)[:, None] * hidden**-0.5
    qkv = rng.normal(size=(3 * hidden, hidden)) * scales
    output = rng.normal(size=(hidden, hidden)) * hidden**-0.5
    tables = [jnp.asarray(each.numpy()) for each in RotaryEmbedding(head_dim, positions, 10_000.0)()]
    return x, jnp.asarray(qkv, jnp.float32), jnp.asarray(output, jnp.float32), *(tables if rotary else (None, None))


def computed(function, dtype, given, head_dim):
    *arguments, cos, sin = given
    return values_and_gradients(lambda *each: function(*each, cos, sin, head_dim), dtype, arguments)


def errors(given, head_dim):
    """Relative errors in bfloat16 against float32: those of the kernels, and those of the plain path."""
    exact, plain = (computed(attention.mix_by_attention, each, given, head_dim) for each in (jnp.float32, jnp.bfloat16))
    ours = computed(INTERPRETED, jnp.bfloat16, given, head_dim)
    return [
        [np.linalg.norm(each - right) / np.linalg.norm(right) for each, right in zip(side, exact, strict=True)]
        for side in (ours, plain)
    ]


def heads(shape, rows=None, head_dim=64, dtype=jnp.bfloat16):
    qkv = np.empty((rows or 3 * shape[2], shape[2]))
    return attention.heads_of(jax.ShapeDtypeStruct(shape, dtype), qkv, head_dim)


CASES = [
    pytest.param((5, 24, 128, 64, True), id="examples that are not there"),
    *slow_or_campaign(
        [(2, 97, 128, 64, True), (2, 29, 256, 32, True)],  # the published sizes, and four heads in a group
        [(2, 29, 128, 32, False), (2, 20, 256, 128, True)],
    ),
]
"""Batch size, positions, hidden size, width of a head, and whether there is a rotation."""


@pytest.mark.parametrize("case", CASES)
def test_the_kernels_are_as_exact_as_the_plain_path(case):
    *shape, head_dim, _ = case
    assert heads(shape, head_dim=head_dim)
    for ours, theirs in zip(*errors(arrays(*case), head_dim), strict=True):
        assert ours < 1.1 * theirs < 0.02


@pytest.mark.parametrize("rotary", [True, False])
def test_the_plain_path_is_that_of_the_module(rotary):
    x, qkv, output, cos, sin = arrays(2, 13, 128, 32, rotary)
    module = Attention(128, 32, 4, 4)
    with torch.no_grad():
        module.qkv_proj.weight.copy_(torch.tensor(np.asarray(qkv)))
        module.o_proj.weight.copy_(torch.tensor(np.asarray(output)))
    given = torch.tensor(np.asarray(x), requires_grad=True)
    tables = (torch.tensor(np.asarray(cos)), torch.tensor(np.asarray(sin))) if rotary else None
    out = mix_by_attention(given, module, tables)
    cotangent = np.random.default_rng(1).normal(size=x.shape).astype(np.float32)
    (out * torch.tensor(cotangent)).sum().backward()
    expected = out.detach(), given.grad, module.qkv_proj.weight.grad, module.o_proj.weight.grad
    ours = computed(attention.mix_by_attention, jnp.float32, (x, qkv, output, cos, sin), 32)
    for mine, theirs in zip(ours, expected, strict=True):
        np.testing.assert_allclose(mine, theirs.numpy(), rtol=0, atol=2e-6 * np.abs(mine).max())


def test_other_shapes_have_no_kernels():
    assert heads((2, 16, 128)) is not None
    assert heads((2, 16, 128), dtype=jnp.float32) is None
    assert heads((2, 16, 192)) is None, "hidden size"
    assert heads((2, 129, 128)) is None, "more than 128 positions"
    assert heads((2, 16, 128), rows=256, head_dim=32) is None, "shared keys"
    assert heads((2, 16, 1024)) is None, "weights too large"


def test_only_a_tpu_has_them_and_shared_keys_are_as_written():
    for platform in ("cpu", "gpu"):
        assert kernels(ComputeConfig(attention="fused"), platform) == {"lowerings": {}, "functions": {}}
    module = Attention(128, 32, 4, 2)
    x = torch.randn(2, 5, 128)
    replacement = kernels(ComputeConfig(attention="fused"), "tpu")["functions"]["models_torch.blocks:mix_by_attention"]
    torch.testing.assert_close(replacement(x, module, None), mix_by_attention(x, module, None), rtol=0, atol=0)


def test_a_shape_without_kernels_takes_the_plain_path():
    x, *others = arrays(2, 129, 128, 64, True)
    ours, plain = (each(x.astype(jnp.bfloat16), *others, 64) for each in (INTERPRETED, attention.mix_by_attention))
    np.testing.assert_array_equal(np.asarray(ours, np.float32), np.asarray(plain, np.float32))


def gradients(fused, recompute="", **fields):
    """The text of a step in bfloat16, its gradients, and those in float32, with the kernels in interpret mode."""
    module, x = cycles(batch_size=2, seq_len=16, mlp_t=False, expansion=1.0, **fields)
    fn = exported(module, "tpu", recompute, attention="fused" if fused else "plain")
    text, narrow = text_and_gradients(fn, x, jnp.bfloat16)
    return text, narrow, text_and_gradients(fn, x, jnp.float32)[1]


@pytest.mark.slow
def test_the_blocks_of_a_model_call_the_kernels():
    text, ours, _ = gradients(True)
    _, theirs, exact = gradients(False)
    for mine, their, right in zip(ours, theirs, exact, strict=True):
        assert np.linalg.norm(mine - right) <= 1.1 * np.linalg.norm(their - right) < 0.1 * np.linalg.norm(right)
    names = re.findall(r"name=(attention\w*)\n", text)
    assert sorted(names) == ["attention", "attention", "attention_gradient"]
    results = [each.count(":") for each in re.findall(r"((?:\w+:[\w\[\],]+\s+)+)= pallas_call", text)]
    assert sorted(results) == [1, 2, 5], "the pass without gradients keeps nothing"


@pytest.mark.campaign
@pytest.mark.parametrize("fields", [{"attention_window": 3}, {"convolution_window": 3}])
def test_other_blocks_are_as_written(fields):
    text, ours, _ = gradients(True, **fields)
    _, theirs, _ = gradients(False, **fields)
    assert "pallas_call" not in text
    for mine, their in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(mine, their)


SIZES = slow_or_campaign(
    [["--attention", "192x97x512x64", "5x97x640x64"]],
    [["--attention", "16x128x512x128", "12x40x256x32", "4x17x128x16"], ["--attention-without-rotation", "4x5x128x64"]],
)


@pytest.mark.parametrize("sizes", SIZES)
def test_the_kernels_fit_the_memory_of_a_tpu(sizes):
    """The kernels are compiled in a process of their own, since libtpu changes the environment."""
    run_script("compile_kernels", *sizes)
