"""Rows that a mask selects, in reductions, losses and layers; masks of known numbers; products of groups of rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from eager import Call, array, compare, in_jax, raises, randn

import bridge

X = randn(3, 4)
Y = randn(3, 4, seed=5)
WEIGHT = randn(5, 4, seed=7)
CUBE = randn(2, 3, 4, seed=6)
LABELS = torch.tensor([[1, 0, 3], [1, 2, 0]])


def own(cube):
    """Returns a mask of two dimensions, which depends on traced numbers."""
    return cube[..., 0] > 0


def losses(x, y, m):
    either = F.l1_loss(x[m], y[m], reduction="sum") + F.smooth_l1_loss(x[m], y[m]) + F.huber_loss(x[m], y[m])
    chance = y[m].sigmoid()
    return (
        F.mse_loss(x[m], y[m]),
        either,
        F.binary_cross_entropy_with_logits(x[m], chance, weight=y.detach()[m].exp()),
        F.binary_cross_entropy(x[m].sigmoid(), chance, reduction="none").sum(),
    )


REDUCED = {
    "mean": lambda x, y, m: (x[m].mean(0), x[m].mean(), x[m].mean((0, 1)), x[m].mean(0, keepdim=True)),
    "sum": lambda x, y, m: (x[m].sum(0), x[m].sum((0, 1)), (x[m] * y[m].exp()).sum(dim=0)),
    "extremes": lambda x, y, m: (x[m].amax(0), x[m].amin(0, True), x[m].max(), x[m].min()),
    "extremes and their places": lambda x, y, m: (*x[m].max(0), *x[m].min(dim=0, keepdim=True)),
    "of integers": lambda x, y, m: (*(x[m] * 9).int().max(0), (x[m] * 9).long().amin(0), (x[m] * 9).long().sum(0)),
    "product": lambda x, y, m: (x[m].prod(0), x[m].prod(), x[m].logsumexp(0)),
    "truth": lambda x, y, m: ((x[m] > 1).any(0), (x[m] > 1).any(), (x[m] > -9).all(0)),
    "each row first": lambda x, y, m: ((x[m] - y[m]).pow(2).sum(-1).sqrt().mean(), x[m].max(-1).values.sum()),
    "columns": lambda x, y, m: (CUBE[:, m] * x[m]).mean(1),
    "their number": lambda x, y, m: x[m].sum() / x[m].shape[0] + x[m].numel() * y[m].size(0) + x[m].dim(),
    "losses": losses,
    "classes": lambda x, y, m: (
        F.cross_entropy(x[m], LABELS[0][m]),
        F.cross_entropy(x[m], LABELS[0][m], WEIGHT[0].exp(), ignore_index=1, label_smoothing=0.1, reduction="sum"),
    ),
}


@pytest.mark.parametrize("name", REDUCED)
@pytest.mark.parametrize("mask", [[True, False, True], [False, True, False]])
def test_a_reduction_over_selected_rows(name, mask):
    known = torch.tensor(mask)
    compare(lambda x, y: REDUCED[name](x, y, (x[:, 0] < 99) & known), [X, Y])


def test_rows_by_a_mask_of_two_dimensions():
    compare(lambda z: (z[own(z)].mean(0), z[own(z)].amax(0, True), *z[own(z)].max(0)), [CUBE])
    compare(lambda z: F.cross_entropy(z[own(z)], LABELS[own(z)]), [CUBE])


def test_no_rows():
    """Sums are 0, means nan; PyTorch raises for the largest of none, which is not known here."""
    none = [in_jax(f, X, jit=True) for f in (lambda x: x[x > 99].sum(), lambda x: x[x[:, 0] > 99].mean(0))]
    assert none[0] == 0 and np.isnan(none[1]).all()
    assert np.isneginf(in_jax(lambda x: x[x[:, 0] > 99].amax(0), X, jit=True)).all()


def test_an_infinite_entry_is_among_the_selected():
    lost = torch.tensor([[1.0, 2.0], [-torch.inf, 3.0], [-torch.inf, 1.0]])
    compare(lambda x: tuple(x[x[:, 1] != 2].max(0)), [lost])


REFUSED = {
    "a mean of integers": lambda x, m: x[m].long().mean(0),
    "a median": lambda x, m: x[m].median(0),
    "a deviation": lambda x, m: x[m].std(0),
    "a sort": lambda x, m: x[m].sort(0).values.sum(),
    "a layer": lambda x, m: F.batch_norm(x[m], None, None, training=True),
    "probabilities of classes": lambda x, m: F.cross_entropy(x[m], x[m]),
    "weights of all rows": lambda x, m: F.binary_cross_entropy_with_logits(x[m], x[m], weight=x),
    "another mask": lambda x, m: F.mse_loss(x[m], x[~m]),
    "a sum by rows": lambda x, m: torch.where(m, x[:, 0], x[m].sum(1)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    error = RuntimeError if name == "a mean of integers" else bridge.BridgeError
    message = "could not infer output dtype" if error is RuntimeError else r"depends on data.*Remedy"
    raises(message, lambda x: REFUSED[name](x, x[:, 0] > 0), X, error=error)


def test_dropout_of_selected_rows_and_its_remedies():
    def forward(x, p):
        return F.dropout(x[x[:, 0] > 0], p, training=True).sum(0)

    raises(r"`dropout`.*Remedy: drop before the selection, or set p to 0", lambda x: forward(x, 0.5), X)
    compare(lambda x: forward(x, 0.0), [X])
    before = in_jax(lambda x: F.dropout(x, 0.5, training=True)[x[:, 0] > 0].sum(0), X, rng=jax.random.key(0))
    assert before.shape == (4,)


def test_a_loss_keeps_no_argument_from_the_error():
    raises("does not hand its argument `weight` on", lambda x: F.l1_loss(x[x > 0], x[x > 0], **{"weight": x}), X)


# ---- masks and indices that depend on no traced number decide shapes, as in PyTorch


def graph(x, edges):
    """A graph convolution, which replaces self loops."""
    edges = edges[:, edges[0] != edges[1]]
    edges = torch.cat([edges, torch.arange(len(x))[None].repeat(2, 1)], 1)
    degree = torch.zeros(len(x)).index_add(0, edges[1], torch.ones(edges.shape[1]))
    return torch.zeros_like(x).index_add(0, edges[1], x[edges[0]] / degree[edges[1], None])


EDGES = torch.tensor([[0, 1, 1, 2], [1, 1, 2, 0]])


@pytest.mark.parametrize("kind", [lambda e: e, lambda e: e.numpy(), lambda e: array(e)])
def test_a_known_mask(kind):
    fn = bridge.export(Call(graph))
    edges = kind(EDGES)
    ours = jax.jit(lambda x: fn({}, {}, x, edges)[0])(X.numpy())
    np.testing.assert_allclose(ours, graph(X, EDGES), rtol=1e-6)
    compare(graph, [X, EDGES])  # not known, either


def over_degrees(x, edges):
    """Edges that the code writes into a new tensor are as known as those it is given."""
    turned = edges.new_zeros(edges.shape[1], 2)
    turned[:, 0] = edges[1] + 1
    turned[1:, 1] = edges[0, 1:]
    return x[turned[:, 1]] / torch.bincount(turned[:, 0])[turned[:, 0], None]


def test_a_write_of_known_numbers_leaves_them_known():
    fn = bridge.export(Call(over_degrees))
    ours = jax.jit(lambda x: fn({}, {}, x, EDGES.numpy())[0])(X.numpy())
    np.testing.assert_allclose(ours, over_degrees(X, EDGES), rtol=1e-6)


def test_a_known_mask_of_many_elements_is_part_of_the_program():
    fn = bridge.export(Call(lambda x, i: torch.where(i[:, None] < i, x, 0).sum(0)))
    places = np.arange(512)
    text = jax.jit(lambda x: fn({}, {}, x, places)[0]).lower(jnp.ones(512)).as_text()
    assert "512x512xi1" in text and len(text) < 2**16


# ---- products of groups of rows, each by a matrix of its own

ENDS = torch.tensor([2, 6], dtype=torch.int32)
GROUPED = {
    "rows by matrices": (lambda x, w: F.grouped_mm(x, w, offs=ENDS), (6, 4), (2, 4, 8)),
    "an empty group": (lambda x, w: F.grouped_mm(x, w, offs=torch.tensor([0, 6]).int()), (6, 4), (2, 4, 8)),
    "transposed": (lambda x, w: F.grouped_mm(x, w.mT, offs=ENDS), (6, 4), (2, 8, 4)),
    "columns": (lambda x, w: F.grouped_mm(x, w, offs=torch.tensor([4, 8]).int()), (4, 8), (8, 4)),
    "matrices by columns": (lambda x, w: F.grouped_mm(x, w, offs=torch.tensor([4, 8]).int()), (2, 4, 8), (8, 8)),
    "matrices": (lambda x, w: F.grouped_mm(x, w), (2, 4, 8), (2, 8, 4)),
    "traced offsets": (lambda x, w: F.grouped_mm(x, w, offs=(x[0, 0] * 0 + ENDS).int()), (6, 4), (2, 4, 8)),
}


@pytest.mark.parametrize("name", GROUPED)
def test_grouped_product(name):
    function, *sizes = GROUPED[name]
    compare(function, [randn(*size, seed=i) for i, size in enumerate(sizes)])


def test_rows_of_no_group_are_zero_and_offsets_may_be_an_input():
    x = randn(6, 4)
    w = randn(2, 4, 6, seed=2)
    out = in_jax(lambda x, w, ends: F.grouped_mm(x, w[..., :4], offs=ends), x, w[..., :4].clone(), torch.tensor([2, 5]))
    expected = F.grouped_mm(x, w[..., :4].contiguous(), offs=torch.tensor([2, 5]).int())
    np.testing.assert_allclose(out[:5], expected[:5], rtol=1e-5)
    assert not out[5].any()
    assert in_jax(lambda x, w: F.grouped_mm(x, w, offs=ENDS).stride(), x, randn(2, 6, 4).mT.clone()[..., :4]) == (4, 1)


@pytest.mark.parametrize(
    ("x", "w", "settings"),
    [
        (randn(6, 4), randn(2, 4, 8), {}),
        (randn(6, 4), randn(3, 4, 8), {"offs": ENDS}),
        (randn(6, 8), randn(2, 4, 8), {"offs": ENDS}),
        (randn(6, 4), randn(2, 4, 8), {"offs": ENDS, "bias": randn(8)}),
        (randn(6, 8).bfloat16(), randn(2, 8, 8).bfloat16(), {"offs": ENDS, "out_dtype": torch.float32}),
    ],
)
def test_pytorch_s_own_error(x, w, settings):
    with pytest.raises(RuntimeError) as expected:
        F.grouped_mm(x, w, **settings)
    with pytest.raises(RuntimeError) as ours:
        in_jax(lambda x, w: F.grouped_mm(x, w, **settings), x, w)
    assert str(ours.value) == str(expected.value)


# ---- the positions of a mask


def by_positions(x, y, m):
    """Layers for the rows that a two-dimensional mask selects, added where they came from."""
    t, j = torch.where(m)
    added = torch.zeros_like(x).index_add_(0, t, F.linear(F.gelu(x[t]), WEIGHT[:4]) * y[t, j, None])
    return added, torch.zeros_like(x).index_add(0, t, (x[t, :] @ WEIGHT[:4].T) * y[t, 0][:, None], alpha=2)


def assigned_at_positions(x, y, m):
    """Assigns at positions of one dimension, so that none occurs twice."""
    t = torch.where(m[:, 0])[0]
    result = x.clone()
    result[t] = y[t].exp()
    result[t, 1:] *= 2
    result[torch.where(m[:, 1])] = 0.5
    return result


POSITIONS = {
    "layers": by_positions,
    "counted": lambda x, y, m: torch.zeros_like(x).index_add_(
        0, torch.where(m.long())[0], F.layer_norm(y[m.long().nonzero(as_tuple=True)[0]], (4,))
    ),
    "of columns": lambda x, y, m: CUBE.index_add(
        1, torch.where(m[:, 0])[0], (CUBE * x[:, 0, None])[:, torch.where(m[:, 0])[0]]
    ),
    "assigned": assigned_at_positions,
    "reduced": lambda x, y, m: (x[torch.where(m)[0]].mean(0), y[torch.where(m)].sum(), torch.where(m)[1].sum()),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_positions_of_a_mask(name):
    compare(lambda x, y: POSITIONS[name](x, y, x > y), [X, Y])


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (lambda x, t, j: x.index_add(0, t, x), "rows at their positions"),
        (lambda x, t, j: x.index_add(0, t[:, None], x[t]), "rows at their positions"),
        (lambda x, t, j: x.index_add(1, t, x[t]), "rows at their positions"),
        (lambda x, t, j: x.index_add(0, torch.where(x > 1)[0], x[t]), "rows at their positions"),
        (lambda x, t, j: x[t, torch.where(x > 1)[1]], "an index beside others"),
        (lambda x, t, j: x[t, [0, 1]], "an index beside others"),
        (lambda x, t, j: x.clone().__setitem__(t, x), "a tensor with rows of its own"),
        (lambda x, t, j: x.clone().__setitem__(t, x[x > 1]), "of rows by another mask"),
        (lambda x, t, j: x.clone().__setitem__((slice(None), t), 0.0), "at places beside others"),
        (lambda x, t, j: F.layer_norm(x[t], (3, 4)), "`layer_norm`"),
        (lambda x, t, j: F.linear(j.float(), x[0]), "`linear`"),
        (lambda x, t, j: x[0] if t.numel() == 0 else x[1], "asks for the value"),
        (
            lambda x, t, j: (x > 0).nonzero(),
            "a result needs; it was made in the module itself",
        ),
        (lambda x, t, j: x[t].chunk(2), "`chunk` along the rows"),
        (lambda x, t, j: x[t].reshape(3, -1), "`reshape` but of what is before the rows"),
        (lambda x, t, j: x[t].reshape(6, 2), "not one alone is the number of rows"),
        (lambda x, t, j: x[t].view(-1, 3), "`reshape` but of what is before the rows"),
    ],
)
def test_what_positions_of_a_mask_do_not_reach(function, what):
    raises(what, lambda x: function(x, *torch.where(x > 0)), X)


# ---- loops over what a mask selects: a turn of what is not selected writes nothing


def experts(x, w):
    """Runs five experts: the fifth is the end of the list, and no row chooses the fourth."""
    with torch.no_grad():
        mask = F.one_hot(x[:, :3].topk(2).indices, 5).permute(2, 1, 0)
        hit = (mask.sum((-1, -2)) > 0).nonzero(as_tuple=False)
    out = torch.zeros_like(x)
    turns = torch.zeros(())
    for e in hit:
        e = e[0]
        if e == 4:
            continue
        with torch.no_grad():
            j, t = torch.where(mask[e])
        gate, up = F.linear(x[t], w[e]).chunk(2, dim=-1)
        turns.add_(1)
        out.index_add_(0, t, F.silu(gate) * up * x[t, j, None])
    return out, turns


def named_experts(x, w):
    one_hot = F.one_hot(x.argmax(-1), 4)
    out = torch.zeros_like(x)
    for e in one_hot.sum(0).nonzero():
        out.index_add_(0, *rows_by_name(x, w, one_hot, e))
    return out


def rows_by_name(x, w, one_hot, e):
    layers = {f"expert_{e}": w[e, :4] for e in range(4)}
    t = torch.where(one_hot[:, e].squeeze(1))[0]
    return t, (x[None, t].reshape(-1, 4) @ layers[f"expert_{e[0]}"]).view(-1, 2, 2).reshape(-1, 4)


@pytest.mark.parametrize("function", [experts, named_experts])
def test_a_loop_over_experts(function):
    compare(function, [randn(5, 4, seed=3) * torch.tensor([1, 1, 1, 0.0]), randn(4, 8, 4, seed=2)])


def test_a_loop_in_a_loop():
    compare(products, [randn(5, 4, seed=3), randn(5, 4, seed=2)])


def products(x, w):
    out = torch.zeros(4)
    outer = w[x[:, 0] > 0]
    inner = x[x[:, 1] > 0]
    for row in outer:
        for other in inner:
            out.add_(row * other)
            out[1:].mul_(0.5)
    return out


def carried(x, hit):
    total = x[0]
    for e in hit:
        total = total + e
    return total


def read_afterwards(x, hit):
    for e in hit:
        last = x[e[0]]
    return last


def collected(x, hit):
    parts = [x]
    for e in hit:
        parts.append(e)
    return parts[-1]


def ended_early(x, hit):
    for e in hit:
        x[e[0]].mul_(2)
        break
    return x


def returned(x, hit):
    for e in hit:
        return x[e[0]]
    return x


def counted(x, hit):
    for i, e in enumerate(hit):
        x[e[0]].mul_(i)
    return x


class Kept:
    last = None


def kept(x, hit):
    for e in hit:
        Kept.last = e
    return x


def paired(x, hit):
    for e, row in zip(hit, x, strict=False):
        x[e[0]].mul_(row)
    return x


def ended_sometimes(x, hit):
    for e in hit:
        x[e[0]].mul_(2)
        if e[0] == 1:
            break
    return x


LOOPS = (
    paired,
    ended_sometimes,
    carried,
    read_afterwards,
    collected,
    ended_early,
    returned,
    counted,
    kept,
    lambda x, hit: [x[e] for e in hit],
)


def test_a_turn_that_changes_a_shape_is_refused():
    def transposed(x, hit):
        for _ in hit:
            x.t_()
        return x

    raises("a turn of a loop over selected rows changes a shape", lambda x: transposed(x, (x > 0)[0].nonzero()), X)


@pytest.mark.parametrize("function", LOOPS)
def test_a_loop_that_leaves_anything_else_is_refused(function):
    raises("a loop that does anything else than write into tensors", lambda x: function(x, (x[:, 0] > 0).nonzero()), X)
