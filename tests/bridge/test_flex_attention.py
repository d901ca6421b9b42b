"""`flex_attention` with functions of scores and masks, against the formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from eager import Call, array, in_jax, randn, verified
from support.markers import slow_unless
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention, noop_mask

import bridge

LENGTH = 32
Q = randn(2, 2, LENGTH, 8)
BIAS = randn(2, 2 * LENGTH, seed=2)
LENGTHS = torch.tensor([20, 7])


def causal(b, h, i, j):
    return i >= j


def blocks(mask_mod, batch=None, heads=None, length=LENGTH):
    return create_block_mask(mask_mod, batch, heads, length, LENGTH, device="cpu", BLOCK_SIZE=16)


def by_formula(query, key, value, mask=None, score=None, scale=None):
    scores = query @ key.mT * (scale or query.shape[-1] ** -0.5)
    indices = torch.meshgrid(*map(torch.arange, scores.shape), indexing="ij")
    if score is not None:
        scores = score(scores, *indices)
    if mask is not None:
        scores = scores.masked_fill(~mask(*indices), float("-inf"))
    return torch._safe_softmax(scores, -1) @ value


def near(score, b, h, i, j):
    return score - (h + 1) * (i - j).abs()


def capped(score, b, h, i, j):
    return 5 * torch.tanh(score / 5)


def of_documents(q):
    documents = (q[0, 0, :, 0] > 0.5).cumsum(0)
    return lambda b, h, i, j: (i >= j) & (documents[i] == documents[j])


def with_bias(bias):
    return lambda score, b, h, i, j: score + bias[h, i - j + LENGTH]


def in_lengths(b, h, i, j):
    return j < LENGTHS[b]


def by_heads(b, h, i, j):
    return (i - j).abs() < 3 + 4 * h


def after_four(b, h, i, j):
    return (i >= j) & (i > 3)


def with_sums(q):
    return flex_attention(q, q * 2, q + 1, block_mask=blocks(causal), return_lse=True)


def with_sums_by_formula(q):
    allowed = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    scores = (q @ (q * 2).mT * 8**-0.5).masked_fill(~allowed, float("-inf"))
    return scores.softmax(-1) @ (q + 1), scores.logsumexp(-1)


def shared_heads(q):
    key = q[:, :1]
    return flex_attention(q, key * 2, key + 1, block_mask=blocks(causal), enable_gqa=True, scale=0.3)


def viewed(q):
    """The result has the layout of the query, so that heads and widths are next to each other."""
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    return flex_attention(q, q * 2, q + 1).transpose(1, 2).view(2, LENGTH, 16)


CASES = {
    "nothing": (lambda q: flex_attention(q, q * 2, q + 1), lambda q: by_formula(q, q * 2, q + 1)),
    "causal": (
        lambda q: flex_attention(q, q * 2, q + 1, block_mask=blocks(causal)),
        lambda q: by_formula(q, q * 2, q + 1, causal),
    ),
    "documents": (
        lambda q: flex_attention(q, q * 2, q + 1, block_mask=blocks(of_documents(q))),
        lambda q: by_formula(q, q * 2, q + 1, of_documents(q)),
    ),
    "a learned bias": (
        lambda q, bias: flex_attention(q, q * 2, q + 1, score_mod=with_bias(bias), block_mask=blocks(causal)),
        lambda q, bias: by_formula(q, q * 2, q + 1, causal, with_bias(bias)),
    ),
    "scores by distance": (
        lambda q: flex_attention(q, q * 2, q + 1, score_mod=near),
        lambda q: by_formula(q, q * 2, q + 1, None, near),
    ),
    "capped scores": (
        lambda q: flex_attention(q, q * 2, q + 1, score_mod=capped),
        lambda q: by_formula(q, q * 2, q + 1, None, capped),
    ),
    "by batch": (
        lambda q: flex_attention(q, q * 2, q + 1, block_mask=blocks(in_lengths, batch=2)),
        lambda q: by_formula(q, q * 2, q + 1, in_lengths),
    ),
    "by heads": (
        lambda q: flex_attention(q, q * 2, q + 1, block_mask=blocks(by_heads, heads=2)),
        lambda q: by_formula(q, q * 2, q + 1, by_heads),
    ),
    "rows without a key": (
        lambda q: flex_attention(q, q * 2, q + 1, block_mask=blocks(after_four)),
        lambda q: by_formula(q, q * 2, q + 1, after_four),
    ),
    "an odd length": (
        lambda q: flex_attention(q[:, :, :27], q * 2, q + 1, block_mask=blocks(causal, length=27)),
        lambda q: by_formula(q[:, :, :27], q * 2, q + 1, causal),
    ),
    "shared heads": (
        shared_heads,
        lambda q: by_formula(q, q[:, :1].expand_as(q) * 2, q[:, :1].expand_as(q) + 1, causal, scale=0.3),
    ),
    "sums": (with_sums, with_sums_by_formula),
    "a view": (viewed, lambda q: by_formula(q, q * 2, q + 1).transpose(1, 2).reshape(2, LENGTH, 16)),
}


def results_of(function, *inputs):
    made = function(*inputs)
    return made if isinstance(made, tuple) else (made,)


@pytest.mark.parametrize("name", slow_unless(("nothing", "documents").__contains__, CASES))
def test_it_is_the_formula(name):
    """PyTorch's own function has no gradient on a CPU."""
    function, formula = CASES[name]
    inputs = [Q, BIAS] if name == "a learned bias" else [Q]
    leaves = [x.clone().requires_grad_() for x in inputs]
    expected = results_of(formula, *leaves)
    torch.stack([out.square().sum() for out in expected]).sum().backward()
    with torch.no_grad():
        for out, wanted in zip(results_of(function, *inputs), expected, strict=True):
            torch.testing.assert_close(out, wanted.detach(), rtol=1e-4, atol=1e-5)
    fn = bridge.export(Call(function))

    def loss(*arrays):
        made = fn({}, {}, *arrays)[0]
        outs = made if isinstance(made, tuple) else (made,)
        return sum(jnp.square(out).sum() for out in outs), outs

    places = tuple(range(len(inputs)))
    gradients, outs = jax.jit(jax.grad(loss, places, has_aux=True))(*map(array, inputs))
    for out, wanted in zip(outs, expected, strict=True):
        np.testing.assert_allclose(out, wanted.detach(), rtol=1e-5, atol=2e-5)
    for gradient, leaf in zip(gradients, leaves, strict=True):
        np.testing.assert_allclose(gradient, leaf.grad, rtol=1e-4, atol=5e-4)


class Attention(nn.Module):
    """Slopes are a parameter, the window is a buffer, and the mask is made once."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.slopes = nn.Parameter(torch.tensor([0.5, 0.25]))
        self.register_buffer("window", torch.tensor(9))
        self.mask = blocks(lambda b, h, i, j: (i >= j) & (i - j < self.window))

    def forward(self, x):
        q, k, v = self.qkv(x).view(-1, LENGTH, 3, 2, 8).permute(2, 0, 3, 1, 4)
        out = flex_attention(q, k, v, score_mod=self.sloped, block_mask=self.mask)
        return out.transpose(1, 2).reshape(-1, LENGTH, 16)

    def sloped(self, score, b, h, i, j):
        return score - self.slopes[h] * (i - j)


def test_a_module_with_slopes_and_a_window():
    module = Attention()
    x = randn(2, LENGTH, 16)
    verified(module, x)
    fn = bridge.export(module)
    rows = jax.vmap(lambda row: fn(fn.params, fn.buffers, row[None])[0][0])(array(x))
    with torch.no_grad():
        np.testing.assert_allclose(rows, module(x), rtol=1e-4, atol=1e-5)


def test_compiled_functions_are_the_functions():
    attention = torch.compile(flex_attention, dynamic=False)
    make = torch.compile(create_block_mask)

    def compiled(q):
        return attention(q, q * 2, q + 1, block_mask=make(causal, 1, 1, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16))

    ours = in_jax(compiled, Q, jit=True)
    np.testing.assert_allclose(ours, by_formula(Q, Q * 2, Q + 1, causal), rtol=1e-5, atol=2e-5)


def test_a_block_that_is_in_no_list_is_left_out():
    """As by PyTorch's kernels, also without a function: each block of rows attends to its own block of keys."""

    def diagonal(q):
        counts = torch.ones(1, 1, 2, dtype=torch.int32)
        places = torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32)
        mask = BlockMask.from_kv_blocks(counts, places, BLOCK_SIZE=16, mask_mod=noop_mask)
        return flex_attention(q, q * 2, q + 1, block_mask=mask)

    expected = by_formula(Q, Q * 2, Q + 1, lambda b, h, i, j: i // 16 == j // 16)
    np.testing.assert_allclose(in_jax(diagonal, Q, jit=True), expected, rtol=1e-5, atol=2e-5)


def test_a_large_mask_is_computed_by_the_program(monkeypatch):
    monkeypatch.setattr("bridge.dispatch.flex._KNOWN", 10)
    monkeypatch.setattr("bridge.dispatch.computation.EMBEDDED", 10)
    function, formula = CASES["causal"]
    fn = bridge.export(Call(function))
    np.testing.assert_allclose(fn({}, {}, array(Q))[0], formula(Q), rtol=1e-5, atol=2e-5)
    program = jax.make_jaxpr(lambda q: fn({}, {}, q)[0])(array(Q))
    assert all(jnp.shape(const) != (LENGTH, LENGTH) for const in program.consts)


def test_masks_reach_fused_attention():
    def twice(q):
        window = create_block_mask(lambda b, h, i, j: (i >= j) & (i - j < 40), None, None, 128, 128, device="cpu")
        whole = create_block_mask(causal, None, None, 128, 128, device="cpu")
        return flex_attention(q, q, q, block_mask=window) + flex_attention(q, q, q, block_mask=whole)

    fused = {"aten::scaled_dot_product_attention": bridge.fused_attention}
    fn = bridge.export(Call(twice), lowerings=fused)
    program = jax.make_jaxpr(lambda q: fn({}, {}, q)[0])(jnp.zeros((1, 2, 128, 128), jnp.bfloat16))
    assert str(program).count("pallas_call") == 2


def test_a_gradient_inside_the_call():
    def moved(q):
        key = (q * 2).detach().requires_grad_()
        out = flex_attention(q.detach(), key, q.detach() + 1, score_mod=near, block_mask=blocks(causal))
        return torch.autograd.grad(out.square().sum(), key)[0]

    def moved_by_formula(q):
        key = (q * 2).detach().requires_grad_()
        out = by_formula(q.detach(), key, q.detach() + 1, causal, near)
        return torch.autograd.grad(out.square().sum(), key)[0]

    ours = in_jax(moved, Q, jit=True)
    np.testing.assert_allclose(ours, moved_by_formula(Q), rtol=1e-4, atol=1e-4)
