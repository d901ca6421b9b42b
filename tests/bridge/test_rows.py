"""Rows whose number depends on data, as models of experts and of graphs use them: as indices, in writes, as lengths."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from eager import compare, in_jax, raises, randn
from support.markers import slow_unless

import bridge

X = randn(6, 8)
WEIGHTS = randn(4, 8, 8, seed=3)


def layer(x, w):
    return F.silu(x @ w)


# ---- experts: each token is sent to two of four


def routed(x):
    return x[:, :4].softmax(-1).topk(2, -1)


def assigned_where_true(x, w):
    """`y[t] += …` at the first of two positions, as litgpt does."""
    shares, chosen = routed(x)
    y = torch.zeros_like(x)
    for mask, own in zip((chosen.unsqueeze(-1) == torch.arange(4)).permute(2, 0, 1), w, strict=True):
        t, k = torch.where(mask)
        y[t] += shares[t, k, None] * layer(x[t], own)
    return y


def added_if_any(x, w):
    """Experts that nobody chose are skipped, by the size of an index."""
    shares, chosen = routed(x)
    y = torch.zeros_like(x)
    for number, own in enumerate(w):
        t, k = torch.where(chosen == number)
        if t.numel() > 0:
            y.index_add_(0, t, layer(x[t], own) * shares[t, k, None])
    return y


def left_out_by_shape(x, w):
    shares, chosen = routed(x)
    y = torch.zeros_like(x)
    for number, own in enumerate(w):
        t, k = torch.where(chosen == number)
        if t.shape[0] == 0:
            continue
        y[t] += layer(x[t], own) * shares[t, k, None]
    return y


def left_out_by_length(x, w):
    shares, chosen = routed(x)
    y = torch.zeros_like(x)
    for number, own in enumerate(w):
        t, k = torch.where(chosen == number)
        if len(t) == 0:
            continue
        y.index_add_(0, t, layer(x[t], own) * shares[t, k, None] * float(len(t)))
    return y


def written_by_mask_if_any(x, w):
    chosen = routed(x).indices
    y = torch.zeros_like(x)
    for number, own in enumerate(w):
        mask = (chosen == number).any(-1)
        if mask.any():
            y[mask] += layer(x[mask], own)
    return y


def by_nonzero(x, w):
    chosen = routed(x).indices
    y = torch.zeros_like(x)
    for number, own in enumerate(w):
        t = (chosen == number).any(-1).nonzero().squeeze(-1)
        y = y.index_add(0, t, layer(x.index_select(0, t), own))
        t = (chosen == number).any(-1).nonzero(as_tuple=True)[0]
        y[t] = y[t] + isinstance(t, torch.Tensor) * own[0]
    return y


def one_more_than_weights(x, w):
    """DBRX counts one class more than there are experts."""
    chosen = routed(x).indices
    y = torch.zeros_like(x)
    hits = F.one_hot(chosen, len(w) + 1).permute(2, 1, 0)
    for number in (hits.sum((-1, -2)) > 0).nonzero():
        _, t = torch.where(hits[number[0]])
        y.index_add_(0, t, layer(x[t], w[number[0]]))
    return y


EXPERTS = [assigned_where_true, added_if_any, left_out_by_shape, left_out_by_length, written_by_mask_if_any, by_nonzero]
EXPERTS += [one_more_than_weights]


@pytest.mark.parametrize("experts", slow_unless(lambda each: each is added_if_any, EXPERTS))
@pytest.mark.parametrize("unused", slow_unless(lambda unused: unused, [False, True]))
def test_experts(experts, unused):
    """`unused`: no token chooses the third expert."""
    x = X * torch.tensor([1, 1, 0, 1, 1, 1, 1, 1.0]) - 9 * unused * F.one_hot(torch.tensor(2), 8)
    compare(experts, [x, WEIGHTS])


# ---- graphs


def normalized(x, w, edges):
    """A graph convolution that removes self loops and adds its own, as PyTorch Geometric does."""
    edges = edges[:, edges[0] != edges[1]]
    loops = torch.arange(len(x)).unsqueeze(0).repeat(2, 1)
    row, column = torch.cat([edges, loops], dim=1)
    weight = torch.ones(row.size(0), dtype=x.dtype, device=row.device)
    degree = x.new_zeros(len(x)).scatter_add_(0, column, weight)
    scale = degree.pow(-0.5).masked_fill(degree == 0, 0)
    messages = (x @ w[0])[row] * (scale[row] * weight * scale[column]).view(-1, 1)
    index = column.view(-1, 1).expand_as(messages)
    return torch.zeros_like(x).scatter_add_(0, index, messages)


def attended(x, w, edges):
    """Attention over the edges of each node: the largest score of a node, and a sum of exponentials."""
    keep = edges[0] != edges[1]
    row, column = edges[:, keep]
    scores = (x[row] * (x @ w[0])[column]).sum(-1)
    largest = scores.new_full((len(x),), -torch.inf).scatter_reduce(0, column, scores.detach(), "amax")
    shares = (scores - largest.index_select(0, column)).exp()
    total = torch.zeros(len(x)).scatter_add(0, column, shares)
    return torch.zeros_like(x).index_add(0, column, (shares / total[column])[:, None] * x[row])


def of_kept_nodes(x, w, edges):
    """Edges between the nodes that a score keeps, as pooling and dropping of edges have them."""
    keep = x[:, 0] > -0.5
    among = keep[edges[0]] & keep[edges[1]]
    row, column = edges.t()[among].t()
    mean = torch.zeros_like(x).scatter_reduce_(
        0, column[:, None].expand(-1, x.shape[1]), layer(x[row], w[1]), "mean", include_self=False
    )
    degrees = torch.zeros(len(x), dtype=torch.long).index_put_((row,), torch.tensor(1), accumulate=True)
    return mean + degrees[:, None]


EDGES = torch.tensor([[0, 1, 2, 3, 3, 5, 4, 4], [1, 1, 0, 3, 4, 0, 5, 0]])


@pytest.mark.parametrize("graph", [normalized, attended, of_kept_nodes])
def test_graphs(graph):
    compare(graph, [X, WEIGHTS, EDGES])


# ---- one function at a time


def selected(x):
    return x[x[:, 0] > 0]


def other(x):
    return (x * 2 - 1)[x[:, 0] > 0]


def assigned(x):
    rows = selected(x).clone()
    rows[:, 1] = rows[:, 2].exp()
    rows[..., 3:] *= 2
    rows[:, :1] += x[:1, :1]
    rows.masked_fill_(rows > 1.5, 0.5)
    rows[rows[:, 1] > 0.6] -= 1
    rows[rows[:, 2] > 0.3] = rows[rows[:, 2] > 0.3].exp()
    return rows.sum(0)


def left_by_a_branch(x):
    rows = selected(x)
    if rows.numel() == 0:
        later = rows
    else:
        later = rows.exp() * 2
        rows = rows + 1
    return (later * rows).sum(0)


ROWS = {
    "left by a branch": left_by_a_branch,
    "views": lambda x: selected(x).unsqueeze(0).squeeze(0).transpose(0, 1).t().permute(1, 0).sum(1),
    "parts": lambda x: (selected(x)[:, 0].sum(), selected(x)[..., 1:3].sum(0), selected(x)[:, None, ::2].sum((0, 1))),
    "reshaped": lambda x: (
        selected(x).reshape(-1, 2, 4).sum(0),
        selected(x).view(-1).sum(),
        selected(x).flatten().amax(),
    ),
    "expanded": lambda x: selected(x)[:, :1].expand(-1, 3).sum(0) + selected(x)[:, :1].expand(-1, 8)[:, :3].sum(0),
    "unbound": lambda x: tuple(each.sum() for each in selected(x)[:, :2].unbind(-1)),
    "joined": lambda x: (
        torch.cat([selected(x), x[:2], other(x)]).mean(0),
        torch.cat([selected(x), other(x)], -1).sum(0),
        torch.stack([selected(x), other(x)]).sum((0, 1)),
        torch.stack([selected(x)[:, 0], other(x)[:, 1]], -1).sum(0),
    ),
    "along each row": lambda x: (
        selected(x).softmax(-1).sum(0),
        selected(x).topk(2).values.sum(0),
        selected(x).std(1).sum(),
    ),
    "along the rows": lambda x: (
        (selected(x).softmax(0) * selected(x)).sum(0),
        (selected(x).cumsum(0) * selected(x)).sum(0),
        selected(x).argmax(0),
    ),
    "broadcast": lambda x: (selected(x) * x[:1] + x[None, 0] + x[0]).sum(0),
    "of their size": lambda x: (
        (torch.ones(len(x[0]), selected(x).size(0)).t() * selected(x)).sum(0),
        (selected(x).new_full((selected(x).shape[0], 8), 2.0) * selected(x)).sum(0),
        (torch.zeros_like(selected(x)) + selected(x)).sum(0),
        (torch.arange(selected(x).shape[0])[:, None] * selected(x)).sum(0),
    ),
    "selected twice": lambda x: (selected(x)[selected(x)[:, 1] > 0] * 3).sum(0),
    "a part that is assigned": assigned,
    "gathered": lambda x: selected(x).gather(1, selected(x).argsort(1)[:, :2]).sum(0),
    "a table": lambda x: F.embedding(torch.arange(6)[x[:, 0] > 0], x.exp()).sum(0),
    "one hot": lambda x: F.one_hot(torch.arange(6)[x[:, 0] > 0], 6).sum(0) * x[0, 0],
    "places of a grid": lambda x: (
        (torch.where(x.flatten() > 0)[0] // 8 * torch.where(x.flatten() > 0)[0] % 8).sum(),
        x[torch.where(x.flatten() > 0)[0] // 8].mean(0),
    ),
    "in reverse": lambda x: (selected(x).flip(1).sum(0), torch.flip(selected(x).unsqueeze(1), [-1, 1]).sum(0)),
    "products of matrices": lambda x: torch.bmm(selected(x).view(-1, 2, 4), selected(x).view(-1, 4, 2)).sum(0),
    "facts": lambda x: (
        x * isinstance(selected(x), torch.Tensor) * selected(x).dim() * selected(x).is_floating_point(),
        selected(x).numel() + x[0, 0],
    ),
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("sign", slow_unless((1).__eq__, [1, -1]))
def test_a_function_of_rows(name, sign):
    compare(ROWS[name], [X * sign])


def test_the_last_of_two_rows_at_one_place_is_assigned():
    def forward(x):
        mask = x[:, 1] > 0
        y = torch.zeros_like(x)
        y[torch.tensor([0, 1, 0, 2, 1, 0])[mask]] = x[mask] * 2
        return y

    np.testing.assert_allclose(in_jax(forward, X, jit=True), forward(X))


def test_rows_that_are_left_out_are_in_no_gradient():
    def forward(x):
        rows = x[x[:, 0] > 0]
        y = torch.zeros_like(x)
        y[torch.where(x[:, 0] > 0)[0]] = rows.sqrt()
        return y.sum() + rows.log().sum()

    def gradient(x):
        return jax.grad(lambda x: in_jax(forward, x))(x)

    x = jnp.asarray([[1.0, 4.0], [0.0, -1.0], [-1.0, jnp.nan]])
    np.testing.assert_allclose(jax.jit(gradient)(x), [[1.5, 0.5], [0, 0], [0, 0]])


def test_a_softmax_along_no_rows_has_no_gradient():
    def forward(x):
        rows = x[x[:, 0] > 0]
        return (rows.softmax(0) * rows).sum() + (rows.log_softmax(0) * 2).sum() + x[0, 0]

    compare(forward, [-X.abs()])


def test_experts_under_transformations():
    fn = functools.partial(in_jax, added_if_any)
    x = np.stack([X.numpy(), X.numpy()[::-1]])
    each = [added_if_any(torch.tensor(part), WEIGHTS).numpy() for part in x.copy()]
    np.testing.assert_allclose(jax.vmap(lambda x: fn(x, WEIGHTS.numpy()))(x), each, atol=1e-5)


REFUSED = {
    "a sum by two masks": (lambda x: (selected(x) + x[x[:, 1] > 0]).sum(), "rows by two masks"),
    "a tensor with rows of its own": (lambda x: (selected(x) + x).sum(), "rows of its own"),
    "places by two masks": (lambda x: x[torch.where(x > 0)[0], torch.where(x > 1)[1]].sum(), "an index beside others"),
    "a result": (lambda x: selected(x), "a result needs; it was made in"),
    "rows in reverse": (lambda x: selected(x).flip(0).sum(), "`flip` along the rows"),
    "a sorted result": (lambda x: selected(x).sort(0).values.sum(), "`sort` along the rows"),
    "a function that is not known": (lambda x: torch.linalg.svdvals(selected(x)).sum(), "`linalg_svdvals`"),
    "another dimension of the rows": (lambda x: torch.cat([selected(x).t(), x], 0).sum(), "rows of its own|two masks"),
    "some rows that are assigned": (lambda x: selected(x).__setitem__(0, 1.0), "an index of the rows"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    function, what = REFUSED[name]
    raises(rf"depends on data.*({what}).*Remedy", function, X)


def test_verify_takes_both_sides_of_a_test_for_rows():
    class Experts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = torch.nn.Parameter(WEIGHTS.clone())

        def forward(self, x):
            return added_if_any(x, self.weights)

    report = bridge.verify(Experts(), X)
    assert report.ok, report
