"""Rows of the table of meanings: gradient mode in all its forms, and in-place writes."""

import torch
from rows_registry import Weighted, meaning, row, weighted
from torch import nn

# ---- gradient mode in all its forms


@weighted()
def no_grad(m, x):
    with torch.no_grad():
        h = torch.tanh(x @ m.a)
    return h @ m.b + x @ m.a


@meaning((3, 4))
class NoGradDecorator(Weighted):
    @torch.no_grad()
    def frozen(self, x):
        return torch.tanh(x @ self.a)

    @torch.no_grad
    def bare(self, x):
        return x @ self.a

    @torch.inference_mode()
    def inferred(self, x):
        return x @ self.a

    def forward(self, x):
        return (self.frozen(x) + self.bare(x) + self.inferred(x).clone()) @ self.b


@weighted()
def set_grad_enabled(m, x):
    with torch.set_grad_enabled(False):
        h = x @ m.a
        torch.set_grad_enabled(True)
        k = x @ m.b
        torch.set_grad_enabled(False)
    return h @ m.b + k


@weighted()
def inference_mode(m, x):
    with torch.inference_mode():
        h = x @ m.a
    return h.clone() + x @ m.b


@weighted()
def nested_enable_grad(m, x):
    with torch.no_grad():
        h = x @ m.a
        with torch.enable_grad():
            k = h @ m.b
        j = k @ m.a
    return k + j


@weighted()
def detach(m, x):
    h = x @ m.a
    return h.detach() @ m.b + torch.detach(h[0]) * m.a[0] + h.data * m.b[1]


@weighted()
def detach_in_place(m, x):
    h = x @ m.a
    h.detach_()
    return h @ m.b


@weighted()
def parameter_data(m, x):
    return x @ m.a.data + x @ m.b + m.a.detach().sum()


@weighted()
def view_made_without_grad(m, x):
    h = x @ m.a
    with torch.no_grad():
        row = h[1]
        flat = h.view(-1)
    return h * row + flat[:4]


@weighted()
def detached_view_shares_memory(m, x):
    h = x @ m.a
    d = h.detach()
    d.mul_(2)
    h.data[0] = 7.0
    return h @ m.b


@weighted()
def requires_grad_is_visible(m, x):
    with torch.no_grad():
        h = x @ m.a
    k = x @ m.b
    return k * (2.0 if h.requires_grad else 3.0) * (5.0 if k.requires_grad else 7.0)


@weighted()
def leaf_made_inside(m, x):
    """A tensor that becomes a leaf on the way: gradients stop there, and the code sees that it requires them."""
    h = (x @ m.a).detach().requires_grad_()
    with torch.no_grad():
        k = x @ m.b
    k.requires_grad = True
    j = (x @ m.a).requires_grad_()
    n = torch.ones(3, 4, requires_grad=True)
    frozen = (x @ m.a).detach().requires_grad_().requires_grad_(False)
    seen = [t.requires_grad for t in (h, k, j, n, h * 1, frozen)]
    return (h @ m.b + k + j * n + frozen) * (2.0 if seen == [True] * 5 + [False] else 3.0)


# ---- in-place writes


@weighted()
def set_item(m, x):
    y = x @ m.a
    y[0] = y[1] * 2
    y[:, 1:3] = m.b[:3, :2]
    y[1:, ::2] += 1
    return y @ m.b


@weighted()
def set_item_without_grad(m, x):
    y = x @ m.a
    with torch.no_grad():
        y[0] = 5.0
        y[1:, 2] = x[1:, 0]
    return y * y.detach() + y @ m.b


@weighted()
def write_through_chain_of_views(m, x):
    y = (x @ m.a).clone()
    v = y.t()[1:3].reshape(2, 3)
    v[0, :].mul_(m.b[0, :3])
    y.view(-1)[3:6].add_(x.reshape(-1)[:3])
    z = y.unsqueeze(0).expand(2, 3, 4)
    y.transpose(0, 1).unsqueeze(-1).squeeze(-1)[2].copy_(m.b[1, :3])
    return y.sum(0) + z.sum((0, 1))


@weighted()
def views_see_later_writes(m, x):
    y = (x @ m.a).clone()
    first = y[0]
    rest = y[1:]
    y.mul_(m.b[:3])
    return first + rest.sum(0) + y.unbind(0)[2] + y.chunk(2, dim=1)[0].sum() + y.split([1, 2])[1].mean(0)


@weighted()
def in_place_arithmetic(m, x):
    y = (x @ m.a).clone()
    y.add_(1).mul_(m.b[:3]).sub_(x).div_(2.0).clamp_(-1, 1).sigmoid_()
    y = y * 2
    y.exp_()
    z = (x @ m.b).relu_()
    w = torch.ones(3, 4)
    w.zero_().add_(m.b[:3]).square_()
    return y + z + w


@weighted()
def in_place_arithmetic_without_grad(m, x):
    y = (x @ m.a).clone()
    with torch.no_grad():
        y.add_(1).mul_(m.b[:3])
        y += x
        y[1] -= 2
        y.t()[0].exp_()
    return y * y.detach() + y @ m.b


@weighted(input_gradients=False)
def input_written(m, x):
    x.mul_(2)
    x[0] = 1.0
    return x @ m.a @ m.b


@weighted()
def copy_from_outside(m, x):
    buffer = torch.zeros(3, 4)
    with torch.no_grad():
        buffer.copy_(x @ m.a)
    other = torch.empty(3, 4)
    other.copy_(x @ m.b)
    return buffer @ m.b + other


@weighted()
def copy_into_tracked(m, x):
    """`copy_` over a tensor that has a gradient: without grad it keeps it, with grad it takes the source's."""
    y = (x @ m.a).clone()
    with torch.no_grad():
        y.copy_(x)
        y[1:].copy_(m.b[:2])
    y[:, 2:].copy_(m.b[:3, :2])
    return y @ m.b


@weighted()
def masked_indexed_scattered(m, x):
    y = (x @ m.a).clone()
    y.masked_fill_(x > 0.5, 2.0)
    y.index_put_((torch.tensor([0, 2]), torch.tensor([1, 3])), m.b[0, :2])
    y.index_put_((torch.tensor([0, 0]),), m.b[:2], accumulate=True)
    y.scatter_(1, torch.tensor([[0], [1], [2]]), m.b[:3, 3:])
    y.scatter_add_(0, torch.tensor([[0, 0, 0, 0], [0, 1, 2, 0]]), m.b[:2])
    y.index_add_(0, torch.tensor([1, 1]), m.a[:2])
    y.index_copy_(0, torch.tensor([2]), m.a[:1])
    y[x < -0.5] = 0.25
    return y


@weighted()
def masked_without_grad(m, x):
    y = (x @ m.a).clone()
    with torch.no_grad():
        y.masked_fill_(x > 0.5, 2.0)
        y.scatter_(1, torch.tensor([[0], [1], [2]]), 9.0)
        y.index_put_((torch.tensor([0]),), x[1])
    return y * 3 + m.b[:3]


@weighted()
def out_argument(m, x):
    with torch.no_grad():
        out = torch.empty(3, 4)
        torch.mul(x, 2.0, out=out)
        torch.add(out, m.a[:3], out=out)
    return out @ m.b


def table_and_leaf():
    leaf = torch.zeros(2, 4, requires_grad=True)
    ids = torch.zeros(2, dtype=torch.int32)
    state = {"leaf": nn.Buffer(leaf, persistent=False), "ids": nn.Buffer(ids, persistent=False)}
    return {"table": nn.Buffer(torch.randn(5, 4))} | state


@row(table_and_leaf, (2, 4))
def leaf_filled_without_grad(m, x):
    """The puzzle rows of the Tiny Recursive Model: the leaf gets the value and keeps the gradient."""
    with torch.no_grad():
        m.leaf.copy_(m.table[torch.tensor([3, 1])])
        m.ids.copy_(torch.tensor([3, 1]))
    return torch.tanh(m.leaf * x)


@row(table_and_leaf, (2, 4))
def leaf_filled_through_data(m, x):
    m.leaf.data.copy_(m.table[:2])
    m.leaf.data[0] *= 2
    return torch.tanh(m.leaf * x)


@row(table_and_leaf, (2, 4))
def data_assigned(m, x):
    m.leaf.data = m.table[:2] * 1.5
    return torch.tanh(m.leaf * x)
