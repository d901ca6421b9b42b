"""Indices and slices at traced positions, slices of a traced length, branches on them, and objects that carry them."""

import jax
import jax.numpy as jnp
import pytest
import torch
from eager import Call, array, in_jax, raises, randn, verified
from support.markers import slow_unless
from torch.nn.functional import scaled_dot_product_attention as attention

import bridge

TABLE = randn(4, 6, seed=5)
MATRIX = randn(4, 4, seed=5)
QUERY = randn(1, 4, 2, 8, seed=6)
KEY = randn(1, 2, 7, 8, seed=7)
VALUE = randn(1, 2, 7, 8, seed=8)


def read(x, i):
    i = i.clamp(0, 4)
    cube = x.view(2, 2, 6)
    return x[:, i : i + 2], x[i - 0 : i + 0], cube[1, ..., i : i + 1], x[None, i % 4, i : i + 2], x[[0, 1], i : i + 2]


def written_through(x, i):
    x = x * 1
    i = i.clamp(1, 3)
    x[:, i : i + 2] = x[:, i - 1 : i + 1] * 3
    x[1:, i : i + 3] += 1
    x[i, i : i + 1] = 7.0
    window = x[0, i : i + 2]
    window.mul_(2)
    x.mul_(2)
    return x, window


def without_gradient(x, i):
    i = i.clamp(0, 4)
    held = x * 1
    with torch.no_grad():
        window = x[:, i : i + 2]
        held[:, i : i + 2] = 5.0
    return window * x[:, i : i + 2], x[:, i : i + 2].detach() * held[:, i : i + 2], held


def of_tables(x, i):
    i = i.clamp(0, 4)
    made = torch.arange(24.0).view(4, 6)
    made[:, i : i + 2] += x[:, i : i + 2]
    return made, TABLE[:, i : i + 2] * x[:, :2]


def read_item(x, i):
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


def item_written_through(x, i):
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


def items_of_tables(x, i):
    made = torch.arange(16.0).view(4, 4)
    row = made[i]
    row += x[0]
    return made * 2, MATRIX[i] * x, torch.arange(4)[i]


def item_without_gradient(x, i):
    with torch.no_grad():
        row = x[i]
    return row * x, x[i].detach() * x


CASES = [read, written_through, without_gradient, of_tables]
CASES += [read_item, item_written_through, items_of_tables, item_without_gradient]


@pytest.mark.parametrize("case", slow_unless({written_through, item_written_through}.__contains__, CASES))
def test_values_and_gradients_are_pytorch_s(case):
    verified(case, MATRIX + 1 if "item" in case.__name__ else TABLE, torch.tensor(2))


def attended(query, key, value, n):
    n = n.clamp(2, 7)
    keys = key[:, :, :n]
    values = value[..., :n, :]
    queries = query.shape[2]
    size = keys.shape[2]
    mask = torch.ones(queries, size, dtype=torch.bool) if queries < 9 and size >= 2 else None
    return (
        attention(query, keys, values, enable_gqa=True),
        attention(query, keys, values, attn_mask=mask.tril(size - queries), enable_gqa=True),
        attention(query, keys, values, is_causal=True, scale=0.5, enable_gqa=True),
    )


def masked(query, key, value, n):
    n = n.clamp(1, 6)
    keys = key[0, :, : n + 1]
    values = value[0, :, : n + 1]
    rows = torch.tensor([[True], [False]])
    return (
        attention(query[0, :2], keys, values, attn_mask=rows),
        attention(query[0, :2], keys, values, attn_mask=torch.zeros(2, n + 1)),
    )


def summed(x, i):
    first = x[:, : i.clamp(0, 6)]
    return first.sum(), (first.log().abs() * first).mean(), torch.exp(x[: i.clamp(1, 3)] * x[0]).sum()


ZEROS_BEYOND = (TABLE.abs() + 0.1).index_fill(1, torch.tensor([3, 4, 5]), 0.0)
"""A tensor whose logarithm has no part in a gradient."""


@pytest.mark.parametrize(
    ("case", "inputs"),
    [
        (attended, [QUERY, KEY, VALUE, torch.tensor(5)]),
        (summed, [ZEROS_BEYOND, torch.tensor(3)]),
        pytest.param(masked, [QUERY, KEY, VALUE, torch.tensor(4)], marks=pytest.mark.slow),
    ],
)
def test_a_traced_length_is_pytorch_s(case, inputs):
    verified(case, *inputs)


@pytest.mark.slow
def test_what_lies_beyond_the_length_is_in_no_result_and_no_gradient():
    def attended(q, k, v, n):
        return attention(q, k[:, :, : n.clamp(1, 7)], v[:, :, : n.clamp(1, 7)])

    query, key, value = (jnp.asarray(x) for x in (QUERY[:, :2], KEY.clone(), VALUE.clone()))
    rotten = [x.at[:, :, 3:].set(jnp.nan) for x in (key, value)]
    slopes = jax.grad(lambda q, k, v, n: in_jax(attended, q, k, v, jnp.asarray(n)).sum(), argnums=(0, 1, 2))
    gradients = jax.jit(slopes)(query, *rotten, 3)
    expected = slopes(query, key[:, :, :3], value[:, :, :3], 3)
    assert jnp.allclose(gradients[0], expected[0], atol=1e-6)
    for gradient, cut in zip(gradients[1:], expected[1:], strict=True):
        assert jnp.allclose(gradient[:, :, :3], cut, atol=1e-6) and not gradient[:, :, 3:].any()


def test_rows_at_their_own_positions_are_one_program():
    fn = bridge.export(Call(lambda layer, i: layer.weight[(j := i.clamp(0, 2)) : j + 2], torch.nn.Linear(3, 4)))
    rows = jax.jit(jax.vmap(lambda i: fn(fn.params, {}, i)[0]))
    weight = fn.params["module.weight"]
    for places in ([2, 0], [1, 1]):
        expected = jnp.stack([weight[i : i + 2] for i in places])
        assert jnp.array_equal(rows(jnp.asarray(places)), expected)
    assert rows._cache_size() == 1


def test_branches_that_the_range_decides():
    def answers(p):
        p = p.clamp(1, 7)
        asked = p + 3 > 10, p + 3 < 3, p + 2 != 2, p % 4 >= 4, p < p + 1, p - 9 == p, p.clamp(max=20) <= 7
        return [torch.tensor(1 if answer else 0) for answer in asked]

    expected = [int(answer) for answer in answers(torch.tensor(4))]
    assert expected == [int(answer) for answer in answers(torch.tensor(1))] == [0, 0, 1, 0, 1, 0, 1]
    assert [int(x) for x in in_jax(answers, jnp.asarray(4), jit=True)] == expected


def first(x, i, most=3):
    return x[: i.clamp(0, most)]


ASKS = "asks for the value of a traced tensor"
DEPENDS = r"`x\[:n\]` makes a shape that depends on data"
REFUSED = {
    "a range that is not known": (
        lambda x, i: x[i : i + 1],
        r"`x\[i : i \+ 1\]` of 4 elements has a traced i that may be",
    ),
    "a window that may lie outside": (
        lambda x, i: x[i.clamp(0, 3) : i.clamp(0, 3) + 2],
        r"may be from 0 to 3 .* Remedy: .*i.clamp\(0, 2\)",
    ),
    "a write that may lie outside": (lambda x, i: x.mul(1)[:, i : i + 1].zero_(), "has a traced i that may be"),
    "a length that is not known": (lambda x, i: x[:i], r"`x\[:n\]` of 4 elements has a traced n that may be from"),
    "the rest": (lambda x, i: x[i.clamp(0, 3) :], ASKS),
    "two positions": (lambda x, i: x[i.clamp(0, 2) : (i + 1).clamp(0, 2)], ASKS),
    "a branch that the range does not decide": (lambda x, i: x if i.clamp(0, 3) > 2 else -x, ASKS),
    "a branch on a float that was cut": (lambda x, i: x if x[0, 0].clamp(0.5, 0.7).bool() else -x, ASKS),
    "a branch on a float that may be nan": (lambda x, i: x if x[0, 0].clamp(0, 1) < 2 else -x, ASKS),
    "a median along a dimension": (lambda x, i: first(x, i).median(0), f"{DEPENDS}, which `median` needs"),
    "a product": (lambda x, i: x.T @ first(x, i), f"{DEPENDS}, which `matmul`"),
    "a write": (lambda x, i: first(x * 1, i).mul_(2), f"{DEPENDS}, which `mul_` needs"),
    "two lengths in a sum": (
        lambda x, i: (first(x, i) + first(x, i, 2)).sum(),
        f"{DEPENDS}, which `add` of rows by two masks",
    ),
    "a result": (first, f"{DEPENDS}, which a result needs; it was made in"),
    "keys alone": (lambda x, i: attention(x, first(x, i), x), "which attention in which not keys and values alone"),
    "two lengths": (
        lambda x, i: attention(x, first(x, i), first(x, i, 2)),
        "which attention to keys and values of different lengths needs",
    ),
    "a mask of the whole buffer": (
        lambda x, i: attention(x, first(x, i), first(x, i), torch.ones(4, 4) > 0),
        "which attention with a mask of another length needs",
    ),
    "where it lies in memory": (lambda x, i: x[i].as_strided((2,), (1,)), "it reaches memory"),
    "a size without an end": (lambda x, i: torch.ones(2, i), "has a traced n that may be from -inf to inf"),
}


@pytest.mark.parametrize(("function", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(function, message):
    raises(message, lambda x, i: function(x.requires_grad_(), i), jnp.ones((4, 4)), jnp.asarray(2))


class Filled:
    """An object that is no dataclass: a buffer, and the number of elements in it that are filled."""

    __slots__ = ("buffer", "name", "position")

    def __init__(self, size):
        self.buffer = torch.zeros(2, size)
        self.position = torch.tensor(0)
        self.name = "filled"

    def append(self, x):
        first = self.position.clamp(0, self.buffer.shape[1] - x.shape[1])
        self.buffer[:, first : first + x.shape[1]] = x
        self.position = first + x.shape[1]
        return self


def _rebuilt(name, children):
    rebuilt = object.__new__(Filled)
    rebuilt.name, (rebuilt.buffer, rebuilt.position) = name, children
    return rebuilt


def test_an_object_that_is_carried_from_call_to_call():
    with pytest.raises(TypeError, match="Filled keeps its state elsewhere than in attributes; give flatten"):
        bridge.register(Filled)
    with pytest.raises(TypeError, match="has one of flatten and unflatten; give both"):
        bridge.register(Filled, lambda filled: ((), None))
    flatten = lambda filled: ((filled.buffer, filled.position), filled.name)  # noqa: E731
    assert bridge.register(Filled, flatten, _rebuilt) is bridge.register(Filled, flatten, _rebuilt) is Filled
    step = jax.jit(lambda filled, x: in_jax(lambda filled, x: filled.append(x), filled, x))
    parts = randn(3, 2, 2)
    theirs = Filled(6)
    ours = jax.tree.map(lambda x: array(x), theirs)
    for part in parts:
        ours = step(ours, part.numpy())
        theirs = theirs.append(part)
    assert type(ours) is Filled and ours.name == "filled" and ours.position == 6 and step._cache_size() == 1
    assert jnp.array_equal(ours.buffer, theirs.buffer.numpy())


# ---- `x[i]` and `x[i] = value` by an integer without dimensions that is traced, beside all other kinds of indices


def test_by_an_integer_whose_value_is_known():
    """The value is known without `jit`: it may be made of the very elements that it is written to."""

    def added(table, i, x):
        table = table.clone()
        table[i] += x
        table[:, i] *= 2
        return table

    inputs = MATRIX, torch.tensor(2), MATRIX[0]
    assert jnp.allclose(in_jax(added, *inputs), added(*inputs).numpy())


def test_a_parameter_by_a_traced_integer_under_vmap():
    fn = bridge.export(Call(lambda layer, i: layer.weight[i] * 2, torch.nn.Linear(3, 4)))
    rows = jax.vmap(lambda i: fn(fn.params, {}, i)[0])(jnp.asarray([3, 0]))
    assert jnp.array_equal(rows, fn.params["module.weight"][jnp.asarray([3, 0])] * 2)


def test_too_many_indices_are_pytorch_s_error():
    message = "too many indices for tensor of dimension 2"
    raises(message, lambda x, i: x[i, i, i], jnp.ones((4, 4)), jnp.asarray(2), error=IndexError)


def test_a_number_that_is_known_is_pytorch_s_index():
    assert jnp.array_equal(in_jax(lambda x, i: x[i], jnp.eye(3), jnp.asarray(-1)), jnp.eye(3)[2])
    with pytest.raises(IndexError, match="index 3 is out of bounds"):
        in_jax(lambda x, i: x[i], jnp.eye(3), jnp.asarray(3))


def test_a_traced_place_in_a_call_that_differentiates():
    """PyTorch's graph records operations, and a view at a traced place is none of them."""

    def penalised(select):
        def function(x, i):
            leaf = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(leaf.pow(3).sum(), leaf)
            return x[0] - 0.1 * slope[0] + select(x, i)

        return function

    x = jnp.arange(6.0).reshape(3, 2)
    i = jnp.asarray(1)
    message = r"`x\[i\]` has a traced i in a call that asks .*index_select"
    raises(message, penalised(lambda x, i: x[i]), x, i)
    out = in_jax(penalised(lambda x, i: x.index_select(0, i.view(1))[0]), x, i, jit=True)
    assert jnp.allclose(out, x[0] - 0.3 * x[0] ** 2 + x[1])
