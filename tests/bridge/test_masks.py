"""`x[mask]` and `x[mask] = …` by a traced mask, which may select any number of rows, against PyTorch eager."""

import itertools

import jax
import jax.numpy as jnp
import pytest
import torch
from eager import Call, Doubled, compare, randn

import bridge

X = randn(3, 4, seed=0)


def written(base, place, value):
    out = base * 2
    out[place] = value
    return out


def conditional(x):
    """By masks without dimensions."""
    yes, no = x[0, 0] > -9, x[0, 0] < -9
    places = [yes, no, (..., yes, 2), (slice(None), no, 2), (yes, slice(1)), (1, yes, no), (None, yes, slice(1, 3))]
    made = [written(x, place, value) for place, value in zip(places, itertools.cycle([x[1, :1], 3.0, x[0, 0]]))]
    return [*made, written(torch.zeros(3, 4), yes, x[0]), written(x > 0, no, True), written(x, (yes, x.argmax()), 1)]


def values_of_known_shape(x):
    cube, rows, mask = torch.stack([x, x + 1]), x[:, 0] > 0, x > 0
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
    mask, away = x > 0, x * 2
    distance, shared = x.clone(), x[0, 0] * 3
    distance[mask] = away[mask]
    away[mask] -= 1
    scaled = x * 1
    scaled[mask] = (scaled[mask].exp() + shared).clamp(max=9) / away[mask].add_(2) * distance[mask].detach()
    with torch.no_grad():
        scaled[~mask] *= 3
    return distance, away, scaled


def rows_and_columns(x):
    rows, columns, y = x[:, 0] > 0, x[0] > 0, torch.stack([x, x + 1], -1)
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
    mask, counts = x > 0, (x * 10).long()
    waves = torch.polar(x.abs(), x)
    return x[mask].sum(), (x[mask] ** 2).mean(), x[x[:, 0] > 0].mean(), counts[mask].sum(), waves[mask].mean().abs()


def masked_select(x):
    mask, of_columns = x > 0, x[0] > 0
    return (
        torch.masked_select(x, mask).sum(),
        x.masked_select(mask=mask).exp().mean(),
        (x.masked_select(of_columns) * 2).sum(),
        torch.masked_select(mask=mask, input=x[0]).mean(),
    )


def computed_twice(x):
    """Each mask is computed again on the right side, by the same operations on the same tensors."""
    y, shifted = x * 1, x + torch.arange(4)
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


CASES = (values_of_known_shape, elementwise, rows_and_columns, sums_and_means, masked_select, computed_twice)


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case):
    compare(Call(case), [X])


def test_what_is_not_selected_has_no_part_in_a_gradient():
    """Logarithms and quotients of what the mask leaves out would be infinite; the mask may select nothing."""

    def forward(x, scale):
        positive, y = x > 0, x * 1
        y[positive] = torch.sqrt(y[positive]).log() * scale / y[positive]
        return y

    scale = torch.tensor(2.0)
    compare(Call(forward), [torch.tensor([0.0, 4.0, -1.0]), scale])
    compare(Call(forward), [torch.tensor([0.0, -4.0, -1.0]), scale])


REFUSED = {
    "a result": lambda x: x[x > 0],
    "its size": lambda x: x * x[x > 0].shape[0],
    "its length": lambda x: x * len(x[x > 0]),
    "a dimension": lambda x: x[x[:, 0] > 0].sum(0),
    "a softmax": lambda x: written(x, (mask := x[:, 0] > 0), x[mask].softmax(-1)),
    "a draw": lambda x: written(x, (mask := x > 0), torch.rand_like(x[mask])),
    "a list": lambda x: torch.cat([x[x > 0], x[0]]),
    "another mask": lambda x: written(x, x > 0, x[x >= 0] + 1),
    "the mask of another number": lambda x: written(x, x > 0, x[x > 1] + 1),
    "the mask of another row": lambda x: written(x, (slice(None), x[0] > 0), x[:, x[1] > 0] + 1),
    "a mask of what was written since": computed_twice_beside_a_write,
    "a mask of other draws": lambda x: written(x, torch.rand(3, 4) > x, x[torch.rand(3, 4) > x] + 1),
    "rows of another tensor": lambda x: written(x, (mask := x > 0), x[mask] + x),
    "a read place": lambda x: x[x > 0][0],
    "a written place": lambda x: x[x > 0].__setitem__(0, 1.0),
    "a branch": lambda x: x if x[x > 0] else -x,
    "a loop": lambda x: sum(x[x > 0]),
    "two masks": lambda x: x[x[:, 0] > 0, x[0] > 0],
    "a matrix product": lambda x: x[x[:, 0] > 0] @ x.T,
    "a backward of its own": lambda x: Doubled.apply(x[x > 0]).sum(),
    "a write elsewhere": lambda x: (x[0, 0] * 1).add_(x[x > 0]),
}


def shape_of(function):
    fn = bridge.export(Call(function))
    jax.eval_shape(lambda x: fn({}, {}, x, rng=jax.random.key(0))[0], X.numpy())


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    with pytest.raises(bridge.BridgeError, match=r"depends on data.*Remedy.*torch\.where"):
        shape_of(REFUSED[name])


@pytest.mark.parametrize("value", [X[0, :2], X[:2, :3]])
def test_values_that_do_not_fit_are_an_error(value):
    with pytest.raises(bridge.BridgeError, match="do not fit"):
        shape_of(lambda x: written(x, x[:, 0] > 0, value))


def test_values_of_another_dtype_are_pytorch_s_error():
    with pytest.raises(RuntimeError, match="requires the source and destination dtypes match"):
        shape_of(lambda x: written(x, (mask := x > 0), x[mask].half()))


def test_a_mask_that_is_known_selects_as_in_pytorch():
    fn = bridge.export(Call(lambda x: x[x > 0]))
    assert fn({}, {}, jnp.asarray([1.0, -1, 2]))[0].shape == (2,)


def test_a_mask_that_is_computed_again_under_vmap():
    def function(x):
        y = torch.zeros_like(x)
        y[x > 0] = x[x > 0] * 2
        y[~(x.abs() > 1)] += 3
        return y

    fn = bridge.export(Call(function))
    expected = torch.stack([function(x) for x in X])
    for wrap in (lambda f: f, jax.jit):
        ours = wrap(jax.vmap(lambda x: fn({}, {}, x)[0]))(jnp.asarray(X.numpy()))
        assert jnp.allclose(ours, expected.numpy())

    def other(x):
        y = torch.zeros_like(x)
        y[x > 0.1] = x[x > 0] * 2
        return y

    fn = bridge.export(Call(other))
    with pytest.raises(bridge.BridgeError, match="another mask"):
        jax.jit(jax.vmap(lambda x: fn({}, {}, x)[0]))(jnp.asarray(X.numpy()))
