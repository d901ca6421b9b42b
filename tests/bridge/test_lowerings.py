"""Every lowering of ours against PyTorch in float64, with and without it; attention in all its forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bridge
from bridge.lowerings import DECOMPOSITIONS, FUNCTIONS, LOWERINGS
from bridge.lowerings import attention as lowerings_attention

aten = torch.ops.aten
TOLERANCE = 1e-5
"""Float32, one operation."""


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, Y = numbers(3, 4), numbers(3, 4, seed=1)
UNIT = torch.sigmoid(X)
IMAGES = numbers(2, 3, 7, 6)
VOLUME = numbers(1, 2, 5, 6, 4)
SQUARE = numbers(2, 4, 4)
POSITIVE = SQUARE @ SQUARE.mT + 4 * torch.eye(4, dtype=torch.float64)
INDEX = torch.tensor([[0, 2, 1, 0], [1, 1, 0, 2]])
SIZED = ([2, 3],)

CASES = {
    aten.linear.default: [((X, Y, numbers(3)), {}), ((numbers(2, 3, 4), Y), {})],
    aten.scaled_dot_product_attention.default: [((numbers(2, 3, 5, 8), numbers(2, 3, 6, 8), numbers(2, 3, 6, 8)), {})],
    aten._to_copy.default: [((X,), {"dtype": torch.int32}), ((X,), {})],
    aten.clone.default: [((X,), {})],
    aten.lift_fresh_copy.default: [((X,), {})],
    aten.copy.default: [((X.int(), torch.arange(4)), {})],
    aten.zeros.default: [(SIZED, {}), (SIZED, {"dtype": torch.int64})],
    aten.empty.memory_format: [(SIZED, {})],
    aten.empty_strided.default: [(([2, 3], [3, 1]), {})],
    aten.empty_like.default: [((X,), {})],
    aten.new_empty.default: [((X, [2, 3]), {})],
    aten.ones.default: [(SIZED, {})],
    aten.full.default: [(([2, 3], 1.5), {}), (([2], 3), {})],
    aten.zeros_like.default: [((X,), {}), ((X,), {"dtype": torch.bool})],
    aten.ones_like.default: [((X,), {})],
    aten.full_like.default: [((X, 2.5), {})],
    aten.new_zeros.default: [((X, [2, 3]), {})],
    aten.new_ones.default: [((X, [2, 3]), {})],
    aten.new_full.default: [((X, [2, 3], 1.5), {})],
    aten.scalar_tensor.default: [((2.5,), {})],
    aten.masked_fill.Scalar: [((X, X > 0, 2.0), {})],
    aten.masked_fill.Tensor: [((X, X > 0, torch.tensor(2.0, dtype=torch.float64)), {})],
    aten._softmax.default: [((X, 1, False), {}), ((SQUARE, 0, False), {})],
    aten._log_softmax.default: [((X, -1, False), {})],
    aten.native_layer_norm.default: [
        ((X, [4], numbers(4), numbers(4, seed=1), 1e-5), {}),
        ((X, [4], None, None, 1e-5), {}),
    ],
    aten.native_group_norm.default: [((numbers(2, 4, 3), numbers(4), numbers(4, seed=1), 2, 4, 3, 2, 1e-5), {})],
    aten.sigmoid.default: [((X,), {})],
    aten.rsqrt.default: [((UNIT,), {})],
    aten.erf.default: [((X,), {})],
    aten.erfc.default: [((X,), {})],
    aten.erfinv.default: [((UNIT - 0.5,), {})],
    aten.special_log_ndtr.default: [((X,), {})],
    aten.silu.default: [((X,), {})],
    aten.tanh.default: [((X,), {})],
    aten.sinc.default: [((X,), {})],
    aten.gelu.default: [((X,), {}), ((X,), {"approximate": "tanh"})],
    aten.glu.default: [((X,), {}), ((SQUARE, 1), {})],
    aten.abs.default: [((X,), {})],
    aten.sign.default: [((X,), {})],
    aten.sgn.default: [((X,), {})],
    aten.clamp.default: [((X, -0.5, 0.5), {}), ((X, None, 0.5), {}), ((X, -0.5), {})],
    aten.clamp.Tensor: [((X, UNIT - 1, UNIT), {}), ((X, None, UNIT), {})],
    aten.clamp_min.default: [((X, 0.2), {})],
    aten.clamp_min.Tensor: [((X, Y), {})],
    aten.clamp_max.default: [((X, 0.2), {})],
    aten.clamp_max.Tensor: [((X, Y), {})],
    aten.hardtanh.default: [((X,), {}), ((X, -0.5, 0.25), {})],
    aten.hardsigmoid.default: [((3 * X,), {})],
    aten.hardswish.default: [((3 * X,), {})],
    aten.leaky_relu.default: [((X, 0.1), {})],
    aten.fmax.default: [((X, Y), {})],
    aten.fmin.default: [((X, Y), {})],
    aten.pow.Tensor_Tensor: [((UNIT, Y), {})],
    aten.pow.Tensor_Scalar: [((UNIT, 1.7), {}), ((X, 3), {}), ((X, -2), {}), ((X, 0), {})],
    aten.xlogy.Tensor: [((X, UNIT), {})],
    aten.max.dim: [((X, 1), {}), ((X, 0, True), {})],
    aten.min.dim: [((X, 1), {})],
    aten.median.default: [((X,), {})],
    aten.cummax.default: [((X, 1), {})],
    aten.cummin.default: [((X, 0), {})],
    aten.cumsum.default: [((X, 1), {}), ((INDEX, 0), {}), ((INDEX > 0, 1), {})],
    aten.logcumsumexp.default: [((X, 1), {})],
    aten.std.correction: [((X, [1]), {"correction": 1}), ((X,), {"correction": 0})],
    aten.std_mean.correction: [((X, [1]), {"correction": 1, "keepdim": True})],
    aten.linalg_vector_norm.default: [((X, p, [1]), {}) for p in (2, 1, 3, 0.5, float("inf"), -float("inf"), 0)],
    aten.dist.default: [((X, Y, 2), {}), ((X, Y, 1), {})],
    aten._cdist_forward.default: [((X, numbers(5, 4, seed=2), 2.0, None), {})],
    aten.binary_cross_entropy.default: [
        ((UNIT, UNIT.flip(0)), {}),
        ((UNIT, UNIT.flip(0)), {"weight": UNIT.round(), "reduction": 2}),
    ],
    aten.linalg_cholesky_ex.default: [((POSITIVE,), {}), ((POSITIVE,), {"upper": True})],
    aten._linalg_det.default: [((SQUARE,), {})],
    aten._linalg_slogdet.default: [((SQUARE,), {})],
    aten._linalg_eigh.default: [((POSITIVE,), {})],
    aten._linalg_solve_ex.default: [((SQUARE, numbers(2, 4, 3)), {}), ((SQUARE, numbers(2, 3, 4)), {"left": False})],
    aten.max_pool2d_with_indices.default: [
        ((IMAGES, [3, 2], [2, 1], [1, 0], [1, 2], True), {}),
        ((IMAGES, [3], [2]), {}),
    ],
    aten.max_pool3d_with_indices.default: [((VOLUME, [2, 3, 2], [2, 2, 1]), {}), ((VOLUME, [2], [1], [1], [2]), {})],
    aten.adaptive_max_pool2d.default: [((IMAGES, [3, 4]), {})],
    aten.adaptive_max_pool3d.default: [((VOLUME, [2, 3, 3]), {})],
    aten.avg_pool1d.default: [((numbers(2, 3, 7), [3], [2], [1], True), {})],
    aten.avg_pool2d.default: [((IMAGES, [3, 2], [2, 2], [1, 1], True, False), {})],
    aten.avg_pool3d.default: [((VOLUME, [2, 3, 2]), {"divisor_override": 5})],
    aten.scatter_reduce.two: [
        ((X, 0, INDEX, Y[:2], reduce), {"include_self": include})
        for reduce in ("sum", "prod", "mean", "amax", "amin")
        for include in (True, False)
    ],
    # PyTorch has no gradient of the first.
    aten.scatter.reduce: [((X.int(), 0, INDEX, Y[:2].int()), {"reduce": r}) for r in ("add", "multiply")],
    aten.index_put.default: [
        ((X, [torch.tensor([2, 0]), None], Y[:2]), {}),
        ((X, [INDEX[0], None], numbers(4, 4), True), {}),
        ((X, [X > 0], numbers()), {}),
        ((X > 0, [INDEX[0]], numbers(4, 4) > 0, True), {}),
    ],
    aten.scatter_add.default: [((X, 0, INDEX, Y[:2]), {})],
    aten.index_reduce.default: [((X, 0, torch.tensor([1, 1, 0]), Y, "prod"), {})],
    aten.index_add.default: [((X, 1, torch.tensor([1, 1, 0, 3]), Y), {"alpha": 0.5})],
    aten.take.default: [((X, torch.tensor([[0, 5], [11, -1]])), {})],
    aten._unsafe_index.Tensor: [((X, [None, torch.tensor([1, 1, -1])]), {})],
    aten.searchsorted.Tensor: [((X.sort(1).values, Y), {"right": True}), ((X[0].sort().values, Y), {})],
    aten.searchsorted.Scalar: [((X[0].sort().values, 0.25), {})],
}
"""Op -> (arguments, keywords) of its samples, in float64."""

UNDEFINED = {aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default}
"""Ops that promise a shape and no values."""

WORKSPACE = {aten._linalg_det.default: 1, aten._linalg_slogdet.default: 2, aten._linalg_solve_ex.default: 1}
"""Op -> how many of its outputs are results; the others serve PyTorch's own backward."""

ELSEWHERE = {
    aten.mkldnn_rnn_layer.default,
    aten._pdist_forward.default,
    aten._safe_softmax.default,
    aten.embedding.default,
    aten.linalg_pinv.atol_rtol_tensor,
    aten.max_pool2d_with_indices_backward.default,
    aten.max_pool3d_with_indices_backward.default,
}
"""Served by a test of their own: below, where PyTorch has them in float32 only, and in test_rare_operations.py."""


class Op(nn.Module):
    """One call of one op; the floating arguments are given at the call."""

    def __init__(self, op, args, kwargs):
        super().__init__()
        self.op, self.args, self.kwargs = op, args, kwargs

    def forward(self, *tensors):
        rest = iter(tensors)
        args = [next(rest) if is_free(a) else a for a in self.args]
        out = FUNCTIONAL.get(self.op, self.op)(*args, **self.kwargs)
        out = tuple(out)[: WORKSPACE.get(self.op, 9)] if isinstance(out, (tuple, list)) else (out,)
        return tuple(abs(o) for o in out) if self.op is aten._linalg_eigh.default else out  # a vector's sign is free


FUNCTIONAL = {op: function for function, op in FUNCTIONS.items() if op in LOWERINGS}


def is_free(value):
    return torch.is_tensor(value) and value.is_floating_point()


def in_pytorch(op, args, kwargs):
    """Outputs and the gradients of every floating argument, in float64."""
    leaves = [a.clone().requires_grad_() for a in args if is_free(a)]
    outputs = Op(op, args, kwargs)(*leaves)
    total = sum((o * weights(o.shape)).sum() for o in outputs if o.requires_grad)
    grads = torch.autograd.grad(total, leaves, allow_unused=True) if torch.is_tensor(total) else [None] * len(leaves)
    return outputs, [
        torch.zeros_like(a) if g is None else g + torch.zeros_like(a) for a, g in zip(leaves, grads, strict=True)
    ]


def in_jax(op, args, kwargs, off=()):
    fn = bridge.export(Op(op, args, kwargs), without_lowerings=off)
    leaves = [jnp.asarray(a.numpy(), jnp.float32) for a in args if is_free(a)]

    def objective(leaves):
        outputs, _ = fn({}, {}, *leaves)
        floats = [o for o in outputs if jnp.issubdtype(o.dtype, jnp.floating)]
        return sum((jnp.sum(o * jnp.asarray(weights(o.shape).numpy(), jnp.float32)) for o in floats), 0.0), outputs

    (_, outputs), grads = jax.jit(jax.value_and_grad(objective, has_aux=True))(leaves)
    return outputs, grads


def weights(shape):
    return numbers(*shape, seed=7)


def assert_close(found, expected, tolerance=TOLERANCE):
    assert len(found) == len(expected)
    for ours, truth in zip(found, expected, strict=True):
        truth = truth.detach().double().numpy()
        assert ours.shape == truth.shape
        scale = max(np.abs(truth).max(initial=0), 1e-3)
        np.testing.assert_allclose(np.asarray(ours, np.float64), truth, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("op", LOWERINGS, ids=lambda op: op.name().removeprefix("aten::"))
def test_lowering_against_float64(op):
    """Outputs and gradients; a lowering without samples fails here."""
    if op in ELSEWHERE:
        return
    for args, kwargs in CASES[op]:
        truth, slopes = in_pytorch(op, args, kwargs)
        outputs, grads = in_jax(op, args, kwargs)
        if op in UNDEFINED:
            assert [o.shape for o in outputs] == [t.shape for t in truth]
            continue
        assert_close(outputs, truth)
        assert_close(grads, slopes, tolerance=5e-5 if "linalg" in op.name() else TOLERANCE)  # inverses amplify rounding


COARSER = {
    aten.native_layer_norm.default: "torchax differentiates its second and third output, which PyTorch does not",
    aten.linalg_cholesky_ex.default: "torchax gives the gradient of one triangle, PyTorch that of both halves",
}
"""Op -> how the gradient of what serves it otherwise is another."""


@pytest.mark.parametrize(
    "op",
    [op for op in LOWERINGS if op in CASES and op not in UNDEFINED],
    ids=lambda op: op.name().removeprefix("aten::"),
)
def test_lowering_can_be_switched_off(op, monkeypatch):
    """Then torchax or PyTorch's own composition is as right, away from corners, or the op is refused in one message."""
    for table in (LOWERINGS, DECOMPOSITIONS):
        if op in table:
            monkeypatch.setitem(table, op, lambda *args, **kwargs: pytest.fail("it is off and was called"))
    refused = 0
    for args, kwargs in CASES[op]:
        truth, slopes = in_pytorch(op, args, kwargs)
        try:
            outputs, grads = in_jax(op, args, kwargs, off=(op.name(),))
        except bridge.BridgeError as error:
            assert op.name() in str(error) and "Remedy: " in str(error)
            refused += 1
            continue
        except NotImplementedError as error:
            assert "window dilation" in str(error), "JAX itself cannot differentiate these"
            refused += 1
            continue
        assert_close(outputs, truth, tolerance=2e-5)
        if op not in COARSER:
            assert_close(grads, slopes, tolerance=5e-5)
    if refused == len(CASES[op]):
        pytest.skip("nothing else computes it")


def test_names_of_lowerings_are_checked():
    with pytest.raises(bridge.BridgeError, match=r"no lowering is called aten::lineer.*aten::linear"):
        bridge.export(nn.Linear(2, 2), without_lowerings=("aten::lineer",))


def test_batch_norm_can_be_switched_off():
    """A decomposition of ours: without it torchax serves, which forgets the running statistics."""
    module = nn.BatchNorm1d(4)
    x = jnp.asarray(X.numpy(), jnp.float32)
    ours, without = (bridge.export(module, without_lowerings=off) for off in ((), ("aten::native_batch_norm",)))
    (out, buffers), (other, forgotten) = (fn(fn.params, fn.buffers, x, train=True) for fn in (ours, without))
    np.testing.assert_allclose(out, other, atol=1e-5)
    assert (buffers["running_mean"] != 0).all() and (forgotten["running_mean"] == 0).all()


def test_switching_off_changes_who_serves():
    x = jnp.ones((2, 4))
    module = nn.Linear(4, 3)
    servers = [
        {server for name, server in bridge.export(module, without_lowerings=off).survey(x).ops if "linear" in name}
        for off in ((), ("aten::linear",))
    ]
    assert servers == [{"ours"}, set()]


@pytest.mark.parametrize("reverse", [False, True])
def test_lstm_layer(reverse):
    torch.manual_seed(0)
    module = nn.LSTM(5, 7, bidirectional=reverse)
    x = numbers(6, 2, 5)
    fn = bridge.export(module)
    found, _ = jax.jit(lambda p, x: fn(p, {}, x))(fn.params, jnp.asarray(x.numpy(), jnp.float32))
    assert "ours" in {s for n, s in fn.survey(jnp.ones((6, 2, 5))).ops if "mkldnn_rnn" in n}
    out, (h, c) = module.double()(x)
    assert_close([found[0], *found[1]], [out, h, c])


# ---- attention

Q, K, V = numbers(2, 4, 5, 8), numbers(2, 4, 7, 8, seed=1), numbers(2, 4, 7, 8, seed=2)
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
    "bool mask for all": ((Q, K, V), {"attn_mask": KEEP[0, 0, :1]}),
    "scale": ((Q, K, V), {"scale": 0.3}),
    "scale of zero": ((Q, K, V), {"scale": 0.0}),
    "grouped": ((Q, K[:, :2], V[:, :2]), {"enable_gqa": True}),
    "grouped, one head, causal": ((K, K[:, :1], V[:, :1]), {"enable_gqa": True, "is_causal": True}),
    "wider values": ((Q, K, numbers(2, 4, 7, 12)), {}),
    "no batch": ((Q[0], K[0], V[0]), {}),
    "no heads": ((Q[0, 0], K[0, 0], V[0, 0]), {}),
    "one row": ((Q[:, :, :1], K, V), {}),
    "grouped, masked": ((Q, K[:, :2], V[:, :2]), {"enable_gqa": True, "attn_mask": KEEP}),
}


def attend(module_kwargs, dtype, off=()):
    """(query, key, value) -> output, through the bridge."""
    kwargs = {k: v.to(dtype) if is_free(v) else v for k, v in module_kwargs.items()}

    class Attend(nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, **kwargs)

    fn = bridge.export(Attend(), without_lowerings=off)
    return lambda *inputs: fn({}, {}, *inputs)[0]


def to_jax(tensor, dtype):
    return jnp.asarray(tensor.double().numpy(), jnp.float64 if jax.config.jax_enable_x64 else jnp.float32).astype(dtype)


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "without"])
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

    class Attend(nn.Module):
        def forward(self, mask):
            return F.scaled_dot_product_attention(*(t.float() for t in inputs), attn_mask=mask)

    fn = bridge.export(Attend())
    cotangent = to_jax(weights(truth.shape), jnp.float32)
    found = jax.jit(jax.grad(lambda m: (fn({}, {}, m)[0] * cotangent).sum()))(to_jax(mask.detach(), jnp.float32))
    assert_close([found], [slope])


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
    slack = 1.25 if name in ("wider values", "no batch", "no heads") else 1.1
    assert np.abs(ours).max() <= slack * theirs.abs().max().item()
    assert np.sqrt((ours**2).mean()) <= slack * theirs.square().mean().sqrt().item()


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_with_dropout_is_pytorchs(name):
    """Values and gradients, with PyTorch's own draws."""
    inputs, kwargs = ATTENTION[name]
    kwargs = {k: v.float() if is_free(v) else v for k, v in kwargs.items()}

    class Attend(nn.Module):
        def __init__(self):
            super().__init__()
            self.inputs = nn.ParameterList([nn.Parameter(t.float()) for t in inputs])

        def forward(self):
            return F.scaled_dot_product_attention(*self.inputs, **kwargs, dropout_p=0.3)

    torch.manual_seed(0)
    report = bridge.verify(Attend(), tolerance=TOLERANCE)
    assert report.ok, f"\n{report}"


def test_attention_with_dropout_keeps_the_mean_and_wants_a_key():
    inputs = [to_jax(t, jnp.float32) for t in (Q, K, V)]

    class Attend(nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)

    fn = bridge.export(Attend())
    with pytest.raises(bridge.BridgeError, match="draws random numbers but the call has no key"):
        fn({}, {}, *inputs)
    draws = jax.vmap(lambda key: fn({}, {}, *inputs, rng=key)[0])(jax.random.split(jax.random.key(0), 2000))
    np.testing.assert_allclose(draws.mean(0), F.scaled_dot_product_attention(Q, K, V).numpy(), atol=0.08)
    assert draws.std(0).mean() > 0.1


@pytest.mark.parametrize("name", ["plain", "scale", "grouped", "causal, square", "grouped, one head, causal"])
def test_attention_hands_a_gpu_the_fused_form(name, monkeypatch):
    """The layout, the groups and the scale that cuDNN's attention is given, with XLA's own computing in its place."""
    calls = []
    original = jax.nn.dot_product_attention

    def stand_in(*args, implementation, **kwargs):
        calls.append(implementation)
        return original(*args, implementation="xla", **kwargs)

    inputs, kwargs = ATTENTION[name]
    narrow = [to_jax(t, jnp.bfloat16) for t in inputs]
    expected = lowerings_attention.attention(*narrow, **kwargs)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [type("Device", (), {"compute_capability": "8.0"})])
    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    found = lowerings_attention.attention(*narrow, **kwargs)
    assert calls == ["cudnn"]
    np.testing.assert_allclose(found.astype(jnp.float32), expected.astype(jnp.float32), atol=0.04)
    lowerings_attention.attention(*(x.astype(jnp.float32) for x in narrow), **kwargs)
    lowerings_attention.attention(*narrow, attn_mask=jnp.ones((), bool), **kwargs)
    assert calls == ["cudnn"], "float32 and masks stay with the einsum"


# ---- narrow dtypes

NARROW = {
    "softmax": lambda x: F.softmax(x, -1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "softmin": lambda x: F.softmin(x, 0),
    "logsumexp": lambda x: x.logsumexp(-1),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.arange(64), reduction="none"),
    "layer_norm": lambda x: F.layer_norm(x, (96,)),
    "rms_norm": lambda x: F.rms_norm(x, (96,)),
    "group_norm": lambda x: F.group_norm(x.view(8, 8, 96), 4),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "instance_norm": lambda x: F.instance_norm(x.view(8, 8, 96)),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "glu": F.glu,
    "mish": F.mish,
    "softplus": F.softplus,
    "logsigmoid": F.logsigmoid,
    "elu": F.elu,
    "sum": lambda x: x.sum(-1),
    "mean": lambda x: x.mean(-1),
    "var": lambda x: x.var(-1),
    "std": lambda x: x.std(-1),
    "norm": lambda x: x.norm(dim=-1),
    "cumsum": lambda x: x.cumsum(-1),
    "matmul": lambda x: x @ x.T,
    "linear": lambda x: F.linear(x, x),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", NARROW)
def test_narrow_dtypes_are_as_exact_as_pytorchs(name, dtype):
    """The largest error against float64, of values and gradients; PyTorch computes in float32 inside."""

    class Function(nn.Module):
        def forward(self, x):
            return NARROW[name](x)

    x = (3 * numbers(64, 96)).to(getattr(torch, dtype))
    cotangent = numbers(*NARROW[name](x).shape, seed=1).to(x.dtype)

    def in_pytorch(x):
        x = x.clone().requires_grad_()
        out = NARROW[name](x)
        return [t.detach().double().numpy() for t in (out, *torch.autograd.grad(out, x, cotangent.to(x.dtype)))]

    fn = bridge.export(Function())
    out, pull = jax.vjp(jax.jit(lambda x: fn({}, {}, x)[0]), to_jax(x, dtype))
    truth = in_pytorch(x.double())
    for exact, theirs, ours in zip(truth, in_pytorch(x), (out, *pull(to_jax(cotangent, dtype))), strict=True):
        ours = np.asarray(ours.astype(jnp.float32), np.float64)
        assert np.abs(ours - exact).max() <= 1.05 * np.abs(theirs - exact).max() + 1e-12
