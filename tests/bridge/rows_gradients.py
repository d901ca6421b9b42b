"""Rows of the table of meanings: gradient mode in all its forms, and in-place writes."""

import torch
from rows_registry import Weighted, meaning
from torch import nn

# ---- gradient mode in all its forms


@meaning((3, 4))
class NoGrad(Weighted):
    def forward(self, x):
        with torch.no_grad():
            h = torch.tanh(x @ self.a)
        return h @ self.b + x @ self.a


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


@meaning((3, 4))
class SetGradEnabled(Weighted):
    def forward(self, x):
        with torch.set_grad_enabled(False):
            h = x @ self.a
            torch.set_grad_enabled(True)
            k = x @ self.b
            torch.set_grad_enabled(False)
        return h @ self.b + k


@meaning((3, 4))
class InferenceMode(Weighted):
    def forward(self, x):
        with torch.inference_mode():
            h = x @ self.a
        return h.clone() + x @ self.b


@meaning((3, 4))
class NestedEnableGrad(Weighted):
    def forward(self, x):
        with torch.no_grad():
            h = x @ self.a
            with torch.enable_grad():
                k = h @ self.b
            m = k @ self.a
        return k + m


@meaning((3, 4))
class Detach(Weighted):
    def forward(self, x):
        h = x @ self.a
        return h.detach() @ self.b + torch.detach(h[0]) * self.a[0] + h.data * self.b[1]


@meaning((3, 4))
class DetachInPlace(Weighted):
    def forward(self, x):
        h = x @ self.a
        h.detach_()
        return h @ self.b


@meaning((3, 4))
class ParameterData(Weighted):
    def forward(self, x):
        return x @ self.a.data + x @ self.b + self.a.detach().sum()


@meaning((3, 4))
class ViewMadeWithoutGrad(Weighted):
    def forward(self, x):
        h = x @ self.a
        with torch.no_grad():
            row = h[1]
            flat = h.view(-1)
        return h * row + flat[:4]


@meaning((3, 4))
class DetachedViewSharesMemory(Weighted):
    def forward(self, x):
        h = x @ self.a
        d = h.detach()
        d.mul_(2)
        h.data[0] = 7.0
        return h @ self.b


@meaning((3, 4))
class RequiresGradIsVisible(Weighted):
    def forward(self, x):
        with torch.no_grad():
            h = x @ self.a
        k = x @ self.b
        return k * (2.0 if h.requires_grad else 3.0) * (5.0 if k.requires_grad else 7.0)


@meaning((3, 4))
class LeafMadeInside(Weighted):
    """A tensor that becomes a leaf on the way: gradients stop there, and the code sees that it requires them."""

    def forward(self, x):
        h = (x @ self.a).detach().requires_grad_()
        with torch.no_grad():
            k = x @ self.b
        k.requires_grad = True
        m = (x @ self.a).requires_grad_()
        n = torch.ones(3, 4, requires_grad=True)
        frozen = (x @ self.a).detach().requires_grad_().requires_grad_(False)
        seen = [t.requires_grad for t in (h, k, m, n, h * 1, frozen)]
        return (h @ self.b + k + m * n + frozen) * (2.0 if seen == [True] * 5 + [False] else 3.0)


# ---- in-place writes


@meaning((3, 4))
class SetItem(Weighted):
    def forward(self, x):
        y = x @ self.a
        y[0] = y[1] * 2
        y[:, 1:3] = self.b[:3, :2]
        y[1:, ::2] += 1
        return y @ self.b


@meaning((3, 4))
class SetItemWithoutGrad(Weighted):
    def forward(self, x):
        y = x @ self.a
        with torch.no_grad():
            y[0] = 5.0
            y[1:, 2] = x[1:, 0]
        return y * y.detach() + y @ self.b


@meaning((3, 4))
class WriteThroughChainOfViews(Weighted):
    def forward(self, x):
        y = (x @ self.a).clone()
        v = y.t()[1:3].reshape(2, 3)
        v[0, :].mul_(self.b[0, :3])
        y.view(-1)[3:6].add_(x.reshape(-1)[:3])
        z = y.unsqueeze(0).expand(2, 3, 4)
        y.transpose(0, 1).unsqueeze(-1).squeeze(-1)[2].copy_(self.b[1, :3])
        return y.sum(0) + z.sum((0, 1))


@meaning((3, 4))
class ViewsSeeLaterWrites(Weighted):
    def forward(self, x):
        y = (x @ self.a).clone()
        first, rest = y[0], y[1:]
        y.mul_(self.b[:3])
        return first + rest.sum(0) + y.unbind(0)[2] + y.chunk(2, dim=1)[0].sum() + y.split([1, 2])[1].mean(0)


@meaning((3, 4))
class InPlaceArithmetic(Weighted):
    def forward(self, x):
        y = (x @ self.a).clone()
        y.add_(1).mul_(self.b[:3]).sub_(x).div_(2.0).clamp_(-1, 1).sigmoid_()
        y = y * 2
        y.exp_()
        z = (x @ self.b).relu_()
        w = torch.ones(3, 4)
        w.zero_().add_(self.b[:3]).square_()
        return y + z + w


@meaning((3, 4))
class InPlaceArithmeticWithoutGrad(Weighted):
    def forward(self, x):
        y = (x @ self.a).clone()
        with torch.no_grad():
            y.add_(1).mul_(self.b[:3])
            y += x
            y[1] -= 2
            y.t()[0].exp_()
        return y * y.detach() + y @ self.b


@meaning((3, 4), input_gradients=False)
class InputWritten(Weighted):
    def forward(self, x):
        x.mul_(2)
        x[0] = 1.0
        return x @ self.a @ self.b


@meaning((3, 4))
class CopyFromOutside(Weighted):
    def forward(self, x):
        buffer = torch.zeros(3, 4)
        with torch.no_grad():
            buffer.copy_(x @ self.a)
        other = torch.empty(3, 4)
        other.copy_(x @ self.b)
        return buffer @ self.b + other


@meaning((3, 4))
class CopyIntoTracked(Weighted):
    """`copy_` over a tensor that has a gradient: without grad it keeps it, with grad it takes the source's."""

    def forward(self, x):
        y = (x @ self.a).clone()
        with torch.no_grad():
            y.copy_(x)
            y[1:].copy_(self.b[:2])
        y[:, 2:].copy_(self.b[:3, :2])
        return y @ self.b


@meaning((3, 4))
class MaskedIndexedScattered(Weighted):
    def forward(self, x):
        y = (x @ self.a).clone()
        y.masked_fill_(x > 0.5, 2.0)
        y.index_put_((torch.tensor([0, 2]), torch.tensor([1, 3])), self.b[0, :2])
        y.index_put_((torch.tensor([0, 0]),), self.b[:2], accumulate=True)
        y.scatter_(1, torch.tensor([[0], [1], [2]]), self.b[:3, 3:])
        y.scatter_add_(0, torch.tensor([[0, 0, 0, 0], [0, 1, 2, 0]]), self.b[:2])
        y.index_add_(0, torch.tensor([1, 1]), self.a[:2])
        y.index_copy_(0, torch.tensor([2]), self.a[:1])
        y[x < -0.5] = 0.25
        return y


@meaning((3, 4))
class MaskedWithoutGrad(Weighted):
    def forward(self, x):
        y = (x @ self.a).clone()
        with torch.no_grad():
            y.masked_fill_(x > 0.5, 2.0)
            y.scatter_(1, torch.tensor([[0], [1], [2]]), 9.0)
            y.index_put_((torch.tensor([0]),), x[1])
        return y * 3 + self.b[:3]


@meaning((3, 4))
class OutArgument(Weighted):
    def forward(self, x):
        with torch.no_grad():
            out = torch.empty(3, 4)
            torch.mul(x, 2.0, out=out)
            torch.add(out, self.a[:3], out=out)
        return out @ self.b


@meaning((2, 4))
class LeafFilledWithoutGrad(nn.Module):
    """The puzzle rows of the Tiny Recursive Model: the leaf gets the value and keeps the gradient."""

    def __init__(self):
        super().__init__()
        self.table = nn.Buffer(torch.randn(5, 4))
        self.leaf = nn.Buffer(torch.zeros(2, 4, requires_grad=True), persistent=False)
        self.ids = nn.Buffer(torch.zeros(2, dtype=torch.int32), persistent=False)

    def forward(self, x):
        with torch.no_grad():
            self.leaf.copy_(self.table[torch.tensor([3, 1])])
            self.ids.copy_(torch.tensor([3, 1]))
        return torch.tanh(self.leaf * x)


@meaning((2, 4))
class LeafFilledThroughData(LeafFilledWithoutGrad):
    def forward(self, x):
        self.leaf.data.copy_(self.table[:2])
        self.leaf.data[0] *= 2
        return torch.tanh(self.leaf * x)


@meaning((2, 4))
class DataAssigned(LeafFilledWithoutGrad):
    def forward(self, x):
        self.leaf.data = self.table[:2] * 1.5
        return torch.tanh(self.leaf * x)
