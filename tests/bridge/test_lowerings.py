"""Lowerings against float64, what they choose, and those that JAX traces once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from eager import Call
from lowering_calls import TOLERANCE, assert_close, in_jax, in_pytorch, to_jax
from lowering_cases import CASES, ELSEWHERE, UNDEFINED, X, aten, numbers
from support.markers import slow_unless
from torch import nn

import bridge
from bridge.lowerings import DECOMPOSITIONS, LOWERINGS
from bridge.lowerings.registry import inlined

# ---- Every lowering of ours against PyTorch in float64, with and without it, and in narrow dtypes

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


@pytest.mark.campaign
@pytest.mark.parametrize(
    "op",
    [op for op in LOWERINGS if op in CASES and op not in UNDEFINED],
    ids=lambda op: op.name().removeprefix("aten::"),
)
def test_lowering_can_be_switched_off(op, monkeypatch):
    """Without it, torchax or PyTorch's composition is as right, away from corners, or refuses the op in one message."""
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


@pytest.mark.parametrize("function", [None, abs])
def test_names_of_lowerings_are_checked(function):
    with pytest.raises(bridge.BridgeError, match=r"no lowering is called aten::lineer.*aten::linear"):
        bridge.export(nn.Linear(2, 2), lowerings={"aten::lineer": function})


AIRY = aten.special_airy_ai.default


@pytest.mark.parametrize(
    ("key", "forward"),
    [
        (AIRY, torch.special.airy_ai),
        (AIRY.name(), torch.special.airy_ai),
        ("aten::i0", torch.i0),  # a decomposition of PyTorch's
        ("aten::take_along_dim", lambda x: torch.take_along_dim(x, x.long())),  # one of the bridge's
        (aten.relu.default, torch.relu),
    ],
)
def test_a_lowering_of_one_export(key, forward):
    fn = bridge.export(Call(forward), lowerings={key: lambda x, *_: x + 1})
    assert fn({}, {}, jnp.ones(3))[0].tolist() == [2, 2, 2]


@pytest.mark.parametrize("key", ["aten::matmul", "aten::add_.Tensor", "aten::t", "aten::rand", "no::such", "mm", 3])
def test_an_operation_that_no_lowering_serves(key):
    with pytest.raises(bridge.BridgeError, match=f"no lowering is called {key}, and no operation that could have one"):
        bridge.export(nn.Linear(2, 2), lowerings={key: abs})


def test_none_removes_a_lowering():
    fn = bridge.export(nn.Tanh(), lowerings={aten.tanh.default: None})
    assert fn.survey(jnp.ones(3)).ops == {("aten::tanh", "torchax"): 1}
    with pytest.raises(bridge.BridgeError, match="no lowering is called aten::special_airy_ai"):
        bridge.export(nn.Tanh(), lowerings={AIRY: None})


def test_batch_norm_can_be_switched_off():
    """A decomposition of ours: without it torchax serves, which forgets the running statistics."""
    module = nn.BatchNorm1d(4)
    x = jnp.asarray(X.numpy(), jnp.float32)
    ours, without = (bridge.export(module, lowerings=off) for off in ({}, {"aten::native_batch_norm": None}))
    (out, buffers), (other, forgotten) = (fn(fn.params, fn.buffers, x, train=True) for fn in (ours, without))
    np.testing.assert_allclose(out, other, atol=1e-5)
    assert (buffers["running_mean"] != 0).all() and (forgotten["running_mean"] == 0).all()


def test_switching_off_changes_who_serves():
    x = jnp.ones((2, 4))
    module = nn.Linear(4, 3)
    servers = [
        {server for name, server in bridge.export(module, lowerings=off).survey(x).ops if "linear" in name}
        for off in ({}, {"aten::linear": None})
    ]
    assert servers == [{"ours"}, set()]


def test_lstm_layer():
    torch.manual_seed(0)
    module = nn.LSTM(5, 7, bidirectional=True)
    x = numbers(6, 2, 5)
    fn = bridge.export(module)
    found, _ = jax.jit(lambda p, x: fn(p, {}, x))(fn.params, jnp.asarray(x.numpy(), jnp.float32))
    assert "ours" in {s for n, s in fn.survey(jnp.ones((6, 2, 5))).ops if "mkldnn_rnn" in n}
    out, (h, c) = module.double()(x)
    assert_close([found[0], *found[1]], [out, h, c])


NARROW = {
    "softmax": lambda x: F.softmax(x, -1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.arange(64), reduction="none"),
    "layer_norm": lambda x: F.layer_norm(x, (96,)),
    "rms_norm": lambda x: F.rms_norm(x, (96,)),
    "group_norm": lambda x: F.group_norm(x.view(8, 8, 96), 4),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "mish": F.mish,
    "softplus": F.softplus,
    "logsigmoid": F.logsigmoid,
    "sum": lambda x: x.sum(-1),
    "mean": lambda x: x.mean(-1),
    "var": lambda x: x.var(-1),
    "norm": lambda x: x.norm(dim=-1),
    "cumsum": lambda x: x.cumsum(-1),
    "matmul": lambda x: x @ x.T,
    "linear": lambda x: F.linear(x, x),
}


@pytest.mark.parametrize("dtype", slow_unless("bfloat16".__eq__, ["bfloat16", "float16"]))
@pytest.mark.parametrize("name", NARROW)
def test_narrow_dtypes_are_as_exact_as_pytorchs(name, dtype):
    """The largest error against float64, of values and gradients; PyTorch computes in float32 inside."""
    x = (3 * numbers(64, 96)).to(getattr(torch, dtype))
    cotangent = numbers(*NARROW[name](x).shape, seed=1).to(x.dtype)

    def in_pytorch(x):
        x = x.clone().requires_grad_()
        out = NARROW[name](x)
        return [t.detach().double().numpy() for t in (out, *torch.autograd.grad(out, x, cotangent.to(x.dtype)))]

    fn = bridge.export(Call(NARROW[name]))
    out, pull = jax.vjp(jax.jit(lambda x: fn({}, {}, x)[0]), to_jax(x, dtype))
    truth = in_pytorch(x.double())
    for exact, theirs, ours in zip(truth, in_pytorch(x), (out, *pull(to_jax(cotangent, dtype))), strict=True):
        ours = np.asarray(ours.astype(jnp.float32), np.float64)
        assert np.abs(ours - exact).max() <= 1.05 * np.abs(theirs - exact).max() + 1e-12


# ---- Lowerings that JAX traces once: the program is the same, and so is what tells one call from another


def counted(function):
    """`function`, with the number of times that its code runs."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        call.count += 1
        return function(*args, **kwargs)

    call.count = 0
    return call


def traced(function, *arguments):
    return jax.make_jaxpr(lambda *arrays: function(*arrays))(*arguments)


def test_code_runs_once_for_equal_shapes():
    code = counted(lambda x, y, scale=1.0: (x @ y) * scale)
    function = inlined(code)

    def layers(x):
        for _ in range(5):
            x = function(x, x)
        return x.sum()

    program = traced(jax.grad(layers), jnp.ones((3, 3)))
    assert code.count == 1 and "jit" not in str(program)
    traced(layers, jnp.ones((2, 2)))
    assert code.count == 2, "another shape"


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, 1.0), (True, 1), (0.0, -0.0), (None, 0), ([1, 2], (1, 2)), ("a", "b"), (torch.float32, torch.float64)],
)
def test_other_values_are_other_traces(one, other):
    seen = []
    function = inlined(lambda x, setting: seen.append(setting) or x)
    for setting in (one, other, one):
        traced(lambda x, setting=setting: function(x, setting), 1.0)
    assert list(map(repr, seen)) == list(map(repr, [one, other]))


def test_nan_and_numbers_that_change_keep_no_more_than_a_share():
    function = inlined(counted(lambda x, number: x * number))
    for _ in range(3):
        traced(lambda x: function(x, float("nan")), 1.0)
    assert function.__wrapped__.count == 1


def test_arrays_without_a_trace_are_computed_at_once():
    function = inlined(lambda x: np.asarray(x) + 1)  # a trace has no numbers
    assert function(jnp.ones(2)).tolist() == [2, 2]


def test_precision_in_force_belongs_to_the_trace():
    function = inlined(lambda x: x @ x)
    programs = []
    for precision in ("highest", "default"):
        with jax.default_matmul_precision(precision):
            programs.append(str(traced(lambda x: function(x), jnp.ones((2, 2)))))
    assert "HIGHEST" in programs[0] and "HIGHEST" not in programs[1]


class Layers(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(count))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x * 0.5


@pytest.mark.slow
def test_program_is_the_one_without_it(monkeypatch):
    x = np.ones((2, 3, 8), np.float32)

    def program():
        fn = bridge.export(Layers(2))
        loss = jax.value_and_grad(lambda params: fn(params, fn.buffers, x)[0].sum())
        compiled = jax.jit(loss).lower(fn.params).compile()
        (figures,) = [compiled.cost_analysis()]
        return figures["flops"], figures["bytes accessed"]

    with_it = program()
    for op, lowering in LOWERINGS.items():
        monkeypatch.setitem(LOWERINGS, op, getattr(lowering, "__wrapped__", lowering))
    assert program() == pytest.approx(with_it, rel=1e-3)


def test_another_layer_is_not_traced_again(monkeypatch):
    """The operations of a layer are copied: lowerings run as often for six layers as for two."""
    runs = []
    for op, lowering in list(LOWERINGS.items()):
        if hasattr(lowering, "__wrapped__"):
            code = lowering.__wrapped__

            def recorded(*args, code=code, op=op, **kwargs):
                runs.append(op)
                return code(*args, **kwargs)

            monkeypatch.setitem(LOWERINGS, op, inlined(functools.wraps(code)(recorded)))
    counts = []
    for count in (2, 6):
        runs.clear()
        # a shape of its own
        fn = bridge.export(Layers(count))
        x = np.ones((count, 3, 8), np.float32)
        jax.make_jaxpr(jax.grad(lambda params, fn=fn, x=x: fn(params, fn.buffers, x)[0].sum()))(fn.params)
        counts.append(len(runs))
    assert counts[0] == counts[1] > 5


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
@pytest.mark.parametrize("of", [lambda x: x * 0.1, lambda x: 0.1 * x, lambda x: x / 0.3, lambda x: x.mul(0.7)])
def test_a_number_is_not_rounded_before_the_result(name, of):
    """0.1 is 0.1001 in bfloat16: all results would be too large by 0.1 %."""
    x = torch.linspace(-3, 3, 999).to(getattr(torch, name))
    out = jax.jit(lambda x: bridge.export(Call(of))({}, {}, x)[0])(to_jax(x, name))
    different = np.asarray(out.astype(jnp.float32)) != of(x).float().numpy()
    assert different.mean() < 0.02, "XLA multiplies by the reciprocal, another float32"


# ---- An index that PyTorch has expanded moves whole rows

BLOCK = numbers(3, 4, 5)
EXPANDED = {
    "of the last dimensions": (0, torch.tensor([2, 0])[:, None, None].expand(2, 4, 3)),
    "of the first dimensions": (-1, torch.tensor([4, 1]).expand(3, 4, 2)),
    "of the middle dimension": (2, torch.tensor([[4, 1], [0, 0]])[:, None].expand(2, 3, 2)),
    "of both ends": (1, torch.tensor([3, 3, 0])[None, :, None].expand(2, 3, 5)),
    "of all": (1, torch.tensor(3).expand(2, 3, 5)),
    "not at all": (0, torch.tensor([[[1], [0]]])),
}


@pytest.mark.parametrize("dim, index", EXPANDED.values(), ids=EXPANDED)
def test_an_expanded_index_against_float64(dim, index):
    source = numbers(*index.shape, seed=1)
    calls = [(aten.gather.default, (BLOCK, dim, index)), (aten.scatter_add.default, (BLOCK, dim, index, source))]
    reductions = [(BLOCK, dim, index, source, reduce) for reduce in ("prod", "mean", "amax")]
    for op, args in calls + [(aten.scatter_reduce.two, args) for args in reductions]:
        truth, slopes = in_pytorch(op, args, {})
        outputs, grads = in_jax(op, args, {})
        assert_close(outputs, truth)
        assert_close(grads, slopes)


def test_an_expanded_index_moves_rows():
    """The sum over the neighbours of an atom, as graph networks write it, has one index for all features."""

    def sums(messages, receivers):
        places = receivers[:, None].expand_as(messages)
        return torch.zeros(4, 16).scatter_add(0, places, messages).gather(0, places)

    fn = bridge.export(Call(sums))
    edges = jnp.array([0, 2, 2, 1, 0, 3, 3, 3])
    program = jax.make_jaxpr(jax.grad(lambda x: (fn({}, {}, x, edges)[0] ** 2).sum()))(jnp.ones((8, 16)))
    places = [str(eqn.invars[1].aval.shape) for eqn in program.eqns if eqn.primitive.name in ("gather", "scatter-add")]
    assert len(places) >= 4 and set(places) == {"(8, 1)"}
