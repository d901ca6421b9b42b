"""Every lowering of ours against PyTorch in float64, with and without it, and in narrow dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.lowering_calls import TOLERANCE, assert_close, in_jax, in_pytorch, to_jax
from support.lowering_cases import CASES, ELSEWHERE, UNDEFINED, X, aten, numbers
from support.markers import slow_unless
from torch import nn

import bridge
from bridge.lowerings import DECOMPOSITIONS, LOWERINGS

OF_PYTORCH = [op for op in dict.fromkeys((*LOWERINGS, *CASES)) if op.namespace != "trm"]
"""Ours, and some that torchax or PyTorch's decompositions serve. Those of "trm": tests/train_jax/test_kernels.py."""


@pytest.mark.parametrize("op", OF_PYTORCH, ids=lambda op: op.name().removeprefix("aten::"))
def test_lowering_against_float64(op):
    """Outputs and gradients; a lowering of ours without samples fails here."""
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


@pytest.mark.slow
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


@pytest.mark.parametrize("op", [aten.addmm.default, aten.addmv.default])
def test_a_beta_of_zero_ignores_what_it_multiplies(op):
    vector = op is aten.addmv.default
    args = torch.full((3,), torch.nan, dtype=torch.float64), X, numbers(4) if vector else numbers(4, 3)
    (truth,), _ = in_pytorch(op, args, {"beta": 0})
    (output,), _ = in_jax(op, args, {"beta": 0})
    assert_close([output], [truth])


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


@pytest.mark.parametrize("dtype", slow_unless("bfloat16".__eq__, ["bfloat16", "float16"]))
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
