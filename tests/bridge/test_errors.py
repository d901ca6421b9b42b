"""Errors: the bridge's name operation, submodule, line and remedy; PyTorch's are those of PyTorch."""

import functools
import queue
from collections import OrderedDict

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from eager import Call, compare, in_jax, raises, randn, same
from torch import linalg, nn
from torch.utils.flop_counter import FlopCounterMode

import bridge
from bridge.dispatch import values

# ---- Code that cannot be translated gives one message: the op, the submodule, the line, the remedy


def nested(action):
    return nn.Sequential(OrderedDict(blocks=nn.Sequential(nn.Identity(), Call(action))))


def error_of(module, x, **settings):
    with pytest.raises(Exception) as caught:
        in_jax(module, x, jit=True, **settings)
    return caught.value


def both_errors(module, x, **settings):
    """PyTorch's and ours, which is of the same type."""
    with pytest.raises(Exception) as expected:
        module(x)
    ours = error_of(module, x, **settings)
    assert isinstance(ours, type(expected.value))
    return expected.value, ours


def said(action, **settings):
    error = error_of(nested(action), jnp.arange(4.0), **settings)
    text = str(error)
    assert isinstance(error, bridge.BridgeError) and "\n" not in text and len(text) < 500
    assert "in blocks.1 (Call)" in text and "test_errors.py:" in text and "Remedy: " in text
    return text


@torch.library.custom_op("tests_bridge::sine", mutates_args=())
def sine(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


@sine.register_fake
def _(x):
    return torch.empty_like(x)


def branch(x):
    return sum(v for v in x if v > 0)


def counted(x):
    with FlopCounterMode(display=False):
        return x * nn.Linear(4, 4)(x)


SAID = {
    "branch": (branch, "value of a traced tensor", "`return sum(v for v in x if v > 0)`", "torch.where"),
    "loop bound": (lambda x: [x * 2] * int(x[0]), "value of a traced tensor", "static under jit"),
    "branch of PyTorch's": (
        lambda x: x * nn.init.trunc_normal_(torch.empty(3)),
        "a `while` loop ends by a traced value, inside `torch.nn.init.trunc_normal_`",
        "a fixed number of steps",
    ),
    "mask": (lambda x: x[x > 1].cumsum(0), "makes a shape that depends on data"),
    "nonzero": (lambda x: x.nonzero(), "makes a shape that depends on data"),
    "unique": (lambda x: x.unique(), "makes a shape that depends on data"),
    "without a lowering": (lambda x: torch.special.airy_ai(x), "aten::special_airy_ai", "bridge.LOWERINGS"),
    "with a number that it does not take": (
        lambda x: torch.addcmul(x.long(), x.long(), x.long(), value=0.5),
        "`aten::addcmul` has no translation",
    ),
    "custom_op": (lambda x: sine(x), "`tests_bridge::sine` has no translation", "call the Python function"),
    "cond": (lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), "`cond` takes functions", "torch.where"),
    "FlopCounterMode": (counted, "`FlopCounterMode` is a TorchDispatchMode", "enter it around the module"),
}
"""Parts of each message, the remedy last."""


@pytest.mark.parametrize("name", SAID)
def test_what_cannot_be_translated_is_said(name):
    action, *parts = SAID[name]
    text = said(action, rng=jax.random.key(0))
    for part in parts:
        assert part in text
    assert len(parts) == 1 or parts[-1] in text.partition("Remedy: ")[2]


def test_randomness_without_a_key():
    text = said(lambda x: torch.rand_like(x))
    assert "`aten::rand_like` draws random numbers" in text and "rng=jax.random.key" in text


@pytest.mark.parametrize("place", range(3))
def test_an_array_that_was_donated(place):
    fn = bridge.export(nn.BatchNorm1d(3).eval())
    given = fn.params, fn.buffers, jnp.ones((2, 3))
    jax.tree.map(lambda array: array.delete(), given[place])
    with pytest.raises(bridge.BridgeError, match=r"of shape \(.*3,?\).* deleted .*Remedy: .*donate_argnums"):
        fn(*given)


def test_pytorch_s_own_errors_stay_pytorch_s():
    raises("mat1 and mat2 shapes cannot be multiplied", nn.Linear(3, 3), jnp.ones((2, 5)), error=RuntimeError)


def normalized(x):
    return next(nn.BatchNorm1d(4)(row) for row in [x[None]])


def loss(x):
    return nn.functional.nll_loss(x[None], torch.tensor([0, 1]))


@pytest.mark.parametrize("action", [normalized, loss], ids=["one example", "two labels"])
def test_errors_of_pytorch_s_python_code_name_the_submodule(action):
    expected, ours = both_errors(nested(action), torch.ones(4))
    assert type(ours) is ValueError and str(ours) == str(expected)
    assert any("in blocks.1 (Call), at " in note and "test_errors.py:" in note for note in ours.__notes__)


def test_errors_of_the_module_s_own_code_have_no_note():
    def own(x):
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as ours:
        in_jax(own, jnp.ones(4))
    assert not hasattr(ours.value, "__notes__")


def test_branches_on_constants_are_no_error():
    def constants(x):
        steps = torch.tensor([1, 2, 3])
        if (steps > 2).any() and int(steps.sum()) == 6:
            x = x + steps[-1].item()
        for width in torch.linspace(0, 1, 3).tolist():
            x = x + width
        return x

    assert float(in_jax(constants, jnp.zeros(()), jit=True)) == 4.5


def test_float64_is_said_once_with_its_place():
    def double(x):
        for _ in range(3):
            x = x.to(torch.float64).sum().to(torch.float32) + x
        return x

    with pytest.warns(bridge.BridgeWarning) as seen:
        in_jax(double, jnp.ones(3))
    (text,) = (str(w.message) for w in seen if issubclass(w.category, bridge.BridgeWarning))
    assert "JAX_ENABLE_X64=1" in text and "test_errors.py" in text


def test_a_tensor_that_escapes_says_so():
    kept = queue.SimpleQueue()  # a list would be emptied after the call

    in_jax(lambda x: kept.put(x) or x, jnp.ones(2))
    with pytest.raises(RuntimeError, match="outside the call that made it"):
        kept.get_nowait() + 1


@pytest.mark.parametrize("kind", [RuntimeError, Exception])
def test_an_error_that_the_module_catches_is_raised_all_the_same(kind):
    def guarded(x):
        try:
            scale = torch.ones(int(x.mean())).sum() * 2
        except kind:
            scale = 5.0
        return x * scale

    raises("asks for the value of a traced tensor", guarded, jnp.ones(3))
    assert in_jax(guarded, jnp.ones(3))[0] == 2.0


def test_out_of_another_size():
    """PyTorch resizes it."""
    x = jnp.ones(2)
    raises("it resizes the tensor of `out=`", lambda x: torch.cat([x, x * 2], out=torch.empty(0)) + 1, x)
    assert in_jax(lambda x: torch.cat([x, x * 2], out=torch.empty(4)) + 1, x).tolist() == [2, 2, 3, 3]


# ---- PyTorch's errors about values known while tracing, or about dtypes: the same error, before anything runs

X = randn(3, 4)
long = torch.tensor

REFUSED = {
    "gather": lambda x: x.gather(1, long([[7]])),
    "gather, negative": lambda x: x.gather(1, long([[-1]])),
    "embedding": lambda x: F.embedding(long([3]), x),
    "embedding bag": lambda x: F.embedding_bag(long([[0, 3]]), x),
    "index_select": lambda x: x.index_select(1, long([0, 4])),
    "index_add": lambda x: x.index_add(0, long([3]), x[:1]),
    "index_copy": lambda x: x.index_copy(0, long([3]), x[:1]),
    "index_fill": lambda x: x.index_fill(0, long([3]), 1.0),
    "index_reduce": lambda x: x.index_reduce(0, long([5]), x[:1], "amax"),
    "scatter": lambda x: x.scatter(1, long([[4]]), 1.0),
    "scatter_add": lambda x: x.scatter_add(0, long([[3]]), x),
    "scatter_reduce": lambda x: x.scatter_reduce(0, long([[3]]), x, "amax"),
    "brackets": lambda x: x[:, long([0, 4])],
    "brackets written": lambda x: (x * 1).index_put_((long([3]),), x[0]),
    "mask": lambda x: x[long([True, False])],
    "mask written": lambda x: (x * 1).masked_fill_(long([True, False]), 0.0),
    "one_hot": lambda x: F.one_hot(long([4]), 4) + x,
    "one_hot, negative": lambda x: F.one_hot(long([-1]), 4) + x,
    "matmul of two dtypes": lambda x: x.half() @ x.T,
    "linear of two dtypes": lambda x: F.linear(x.bfloat16(), x),
    "conv of two dtypes": lambda x: F.conv1d(x[None].bfloat16(), x[:, :3, None]),
    "integers times floats in place": lambda x: torch.ones(4, dtype=torch.int32).mul_(x[0]),
    "floats into rows of integers": lambda x: x.long().index_copy_(0, long([0]), x[:1]),
    "floats added to rows of integers": lambda x: x.long().index_add_(0, long([0]), x[:1]),
    "floats put among integers": lambda x: x.long().index_put_((long([0]),), x[0]),
    "products of floats added to integers": lambda x: x[:, :3].long().addbmm_(x[None], x.T[None]),
    "product of floats, out= of integers": lambda x: torch.mm(x, x.T, out=x[:, :3].long()),
    "bools plus integers in place": lambda x: (x > 0).add_(1),
    "bits of floats": lambda x: x | x,
    "mean of integers": lambda x: x.long().mean(),
    "largest of none": lambda x: x[:0].max(),
    "norm of integers": lambda x: x.long().norm(),
    "dropout probability": lambda x: F.dropout(x, 1.5),
    "embedding by floats": lambda x: F.embedding(x, x),
    "gather by 32 bits and bool": lambda x: x.gather(1, x > 0),
    "integers to a negative power": lambda x: x.long() ** -1,
    "softmax of a dimension": lambda x: F.softmax(x, dim=4),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_as_by_pytorch(name):
    _, ours = both_errors(Call(REFUSED[name]), X, rng=jax.random.key(0))
    assert not isinstance(ours, bridge.BridgeError)
    assert any("in the module itself (Call)" in note for note in ours.__notes__)


def test_what_pytorch_takes_is_let_through():
    def function(x):
        ignored = F.cross_entropy(x, long([0, -100, 3])) + F.nll_loss(x, long([7, 1, 2]), ignore_index=7)
        return (
            ignored,
            x[long([-3, 2])],
            torch.take_along_dim(x, long([[-1, 4, 9]]), 1),
            x.take(long([-12, 11])),
            x[long([True, False, True])],
            x[:, None, long([0, -4])],
            x[x.new_ones(3, 4).bool()],
            x.half() * x,
            x.sum().gather(0, long(0)),
            x.long().softmax(0, dtype=torch.float32),
            x.long().copy_(x).fill_(2.5).masked_fill_(x > 0, 1.5),
            torch.cumsum(x.detach(), 0, out=x.long()),
        )

    compare(function, [X])


def test_a_constant_like_an_integer_input_counts_as_one_of_64_bits():
    compare(lambda h, y: F.cross_entropy(h, torch.zeros_like(y)), [randn(3, 5), long([0, 2, 1])])
    compare(lambda h, y: F.nll_loss(h, y.new_full((3,), 1)), [randn(3, 5), long([0, 2, 1])])


# ---- Shapes that do not fit: the text of the error is that of PyTorch's kernel, on which code may decide

WIDE = randn(3, 7)
ones = torch.ones

MISFITS = {
    "matmul": lambda x: x @ ones(8, 2),
    "linear": lambda x: F.linear(x, ones(2, 8), ones(2)),
    "linear, bias": lambda x: F.linear(x, ones(2, 7), ones(3)),
    "linear, large": lambda x: x.repeat(300, 100) @ ones(800, 800),
    "addmm": lambda x: torch.addmm(ones(3, 3), x, ones(7, 2)),
    "bmm": lambda x: torch.bmm(x[None], x[None]),
    "add": lambda x: x + ones(3, 8),
    "where": lambda x: torch.where(x > 0, x, ones(8)),
    "addcmul": lambda x: torch.addcmul(x, ones(9), x),
    "added in place": lambda x: (x * 1).add_(ones(3, 8)),
    "masked": lambda x: x.masked_fill(ones(8) > 0, 0.0),
    "cat": lambda x: torch.cat([x, ones(2, 2)]),
    "stack": lambda x: torch.stack([x, ones(2, 2)]),
    "conv2d": lambda x: F.conv2d(x[None, None], ones(2, 5, 3, 3)),
    "conv, groups": lambda x: F.conv1d(x[None], ones(2, 3, 3), groups=2),
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "embedding": lambda x: F.embedding(torch.tensor([0]), x[0]),
    "kl_div": lambda x: F.kl_div(x, ones(3, 8)),
    "strides": lambda x: x.t().view(21),
    "for each row": lambda x: torch.vmap(lambda row: row + ones(8))(x),
}


@pytest.mark.parametrize("name", MISFITS)
def test_the_text_is_that_of_the_kernel(name):
    expected, ours = both_errors(Call(MISFITS[name]), WIDE)
    assert str(ours) == str(expected)
    assert sum("in the module itself (Call)" in note for note in ours.__notes__) == 1


def test_code_that_reads_the_text():
    def function(layer, x):
        try:
            return layer(x)
        except RuntimeError as error:
            return layer(x.mT) if "shapes cannot be multiplied" in str(error) else x

    compare(Call(function, nn.Linear(3, 2)), [WIDE])


def test_kernels_are_not_asked_with_arguments_that_are_too_large(monkeypatch):
    monkeypatch.setattr(values, "AFFORDABLE", 20)
    raises("same reduction dim", MISFITS["matmul"], WIDE, error=RuntimeError)


# ---- Singular and indefinite matrices: what PyTorch raises, its info, and code that catches the error

INDEFINITE = torch.diag(torch.tensor([1.0, 4.0, -2.0, 3.0]))
SINGULAR = torch.diag(torch.tensor([2.0, 0.0, 5.0, 0.0]))
GOOD = (lambda m: m @ m.mT + 4 * torch.eye(4))(randn(4, 4))
STACK = torch.stack([GOOD, INDEFINITE, SINGULAR])


def test_info():
    def infos(x):
        made = linalg.inv_ex(x), linalg.solve_ex(x, x), linalg.lu_factor_ex(x), linalg.cholesky_ex(x)
        return [each.info for each in (*made, linalg.cholesky_ex(x, upper=True))]

    ours = in_jax(infos, STACK, jit=True)
    assert [info.tolist() for info in ours] == [info.tolist() for info in infos(STACK)]


def test_code_that_chooses_by_info():
    def regularised(x):
        info = linalg.cholesky_ex(x).info
        safe = torch.where((info > 0)[:, None, None], torch.eye(4), x)
        return torch.where((info > 0)[:, None, None], x * 2, linalg.cholesky(safe))

    compare(regularised, [STACK])


def test_values_that_are_known_raise_pytorchs_error():
    for function, matrix in ((linalg.cholesky, INDEFINITE), (linalg.inv, SINGULAR)):
        with pytest.raises(linalg.LinAlgError) as expected:
            function(matrix)
        with pytest.raises(linalg.LinAlgError) as ours:
            in_jax(function, matrix)
        assert str(ours.value) == str(expected.value)


def test_equality_of_values_that_are_known():
    for other in (X.clone(), X + 1, X[:2], X.double()):
        assert in_jax(lambda x, y: 0 * x + torch.equal(x, y), X, other).all() == torch.equal(X, other)
    weighted = functools.partial(torch.cov, fweights=long([1, 2, 3, 1]))
    same(lambda x, w: weighted(x, aweights=w), X, X[0].abs(), jit=False, rtol=1e-5)
    raises("asks for the value of a traced tensor", lambda x, y: x + torch.equal(x, y), X, X)


class Solved(torch.autograd.Function):
    """The backward may raise in PyTorch, outside of every `try` of the module's."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        matrix = torch.diag(x.square() + 1)
        return linalg.inv(matrix) @ linalg.solve(matrix, gradient) + linalg.cholesky(matrix) @ gradient


def guarded_apply(x):
    try:
        return Solved.apply(x)
    except RuntimeError:
        return x


@pytest.mark.parametrize("function", [Solved.apply, guarded_apply], ids=["plain", "guarded"])
@pytest.mark.parametrize("transform", [jax.jit, jax.checkpoint, jax.jacrev])  # pyright: ignore
def test_code_that_catches_errors_around_the_gradient_is_not_the_modules(transform, function):
    gradient = jax.grad(lambda x: in_jax(function, x).sum())
    try:
        jax.eval_shape(transform(gradient), jnp.arange(1.0, 4.0))
    except RuntimeError as error:
        pytest.fail(str(error))
