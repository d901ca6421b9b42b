"""`x[i]` and `x[i] = value` by an integer without dimensions that is traced, beside all other kinds of indices."""

import jax
import jax.numpy as jnp
import pytest
import torch
from eager import Call, randn
from support.markers import slow_unless

import bridge

TABLE = randn(4, 4, seed=5)


def read(x, i):
    cube = x.view(2, 2, 4)
    return (
        x[i],
        x[:, i],
        x[..., i],
        x[i, i],
        x[i - 3],
        x[None, i, ..., [0, 1]],
        x[[0, 1], i],
        x[:, i, None],
        cube[1, :, i],
    )


def written_through(x, i):
    x = x * 1
    x[i].add_(1)
    x[i][0] = 5.0
    x[i, 1:] *= 3
    x[1:, i] = 7.0
    x[i, [0, 1]] = x[i, [1, 0]]
    x[i, 1] += 2
    row = x[i]
    x.mul_(2)
    return x, row


def of_tables(x, i):
    made = torch.arange(16.0).view(4, 4)
    row = made[i]
    row += x[0]
    return made * 2, TABLE[i] * x, torch.arange(4)[i]


def without_gradient(x, i):
    with torch.no_grad():
        row = x[i]
    return row * x, x[i].detach() * x


@pytest.mark.parametrize(
    "case", slow_unless(lambda case: case is written_through, [read, written_through, of_tables, without_gradient])
)
def test_by_a_traced_integer(case):
    report = bridge.verify(Call(case), TABLE + 1, torch.tensor(2))
    assert report.ok, f"\n{report}"


def test_by_an_integer_whose_value_is_known():
    """Without `jit` it is: the value may be made of the very elements that it is written to."""

    def added(table, i, x):
        table = table.clone()
        table[i] += x
        table[:, i] *= 2
        return table

    inputs = TABLE, torch.tensor(2), TABLE[0]
    found = bridge.export(Call(added))({}, {}, *(jnp.asarray(t.numpy()) for t in inputs))[0]
    assert jnp.allclose(found, added(*inputs).numpy())


def test_a_parameter_by_a_traced_integer_under_vmap():
    fn = bridge.export(Call(lambda layer, i: layer.weight[i] * 2, torch.nn.Linear(3, 4)))
    rows = jax.vmap(lambda i: fn(fn.params, {}, i)[0])(jnp.asarray([3, 0]))
    assert jnp.array_equal(rows, fn.params["module.weight"][jnp.asarray([3, 0])] * 2)


REFUSED = {
    "a slice": (lambda x, i: x[i:], "asks for the value of a traced tensor"),
    "where it lies in memory": (lambda x, i: x[i].as_strided((2,), (1,)), "it reaches memory"),
    "a gradient inside": (lambda x, i: torch.autograd.grad(x[i].sum(), x)[0], "asks for the value of a traced tensor"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    function, message = REFUSED[name]
    fn = bridge.export(Call(lambda x, i: function(x.requires_grad_(), i)))
    with pytest.raises(bridge.BridgeError, match=message):
        jax.eval_shape(lambda x, i: fn({}, {}, x, i)[0], jnp.ones((4, 4)), jnp.asarray(2))


def test_too_many_indices_are_pytorch_s_error():
    fn = bridge.export(Call(lambda x, i: x[i, i, i]))
    with pytest.raises(IndexError, match="too many indices for tensor of dimension 2"):
        jax.eval_shape(lambda x, i: fn({}, {}, x, i)[0], jnp.ones((4, 4)), jnp.asarray(2))


def test_a_number_that_is_known_is_pytorch_s_index():
    fn = bridge.export(Call(lambda x, i: x[i]))
    assert jnp.array_equal(fn({}, {}, jnp.eye(3), jnp.asarray(-1))[0], jnp.eye(3)[2])
    with pytest.raises(IndexError, match="index 3 is out of bounds"):
        fn({}, {}, jnp.eye(3), jnp.asarray(3))


def test_a_traced_place_in_a_call_that_differentiates():
    """PyTorch's graph records operations, and a view at a traced place is none of them."""

    def penalised(select):
        def function(x, i):
            leaf = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(leaf.pow(3).sum(), leaf)
            return x[0] - 0.1 * slope[0] + select(x, i)

        return bridge.export(Call(function))

    refused, right = penalised(lambda x, i: x[i]), penalised(lambda x, i: x.index_select(0, i.view(1))[0])
    x = jnp.arange(6.0).reshape(3, 2)
    with pytest.raises(bridge.BridgeError, match=r"`x\[i\]` has a traced i in a call that asks .*index_select"):
        jax.jit(lambda x, i: refused({}, {}, x, i)[0])(x, 1)
    out = jax.jit(lambda x, i: right({}, {}, x, i)[0])(x, 1)
    assert jnp.allclose(out, x[0] - 0.3 * x[0] ** 2 + x[1])
