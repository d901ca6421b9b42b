"""Modules with branches on traced values, each with inputs that take each side.

A case is a module and a list of inputs; `drawn` names the modules whose draws differ between PyTorch and JAX.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

CASES: dict[str, tuple[type[nn.Module], tuple[torch.Tensor, ...]]] = {}
UP = torch.tensor([[0.5, 1.0, -0.25], [2.0, 0.75, 0.1]])
"""An input whose sum is positive."""
DOWN = -UP


def case(*inputs: torch.Tensor):
    """Enters a module into the table; without inputs it gets `UP` and `DOWN`."""

    def enter(cls: type[nn.Module]) -> type[nn.Module]:
        CASES[cls.__name__] = cls, inputs or (UP, DOWN)
        return cls

    return enter


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3)


@case()
class OneSided(Base):
    def forward(self, x):
        h = self.a(x)
        if x.sum() > 0:
            h = torch.clamp(h, -0.5, 0.5)
        return h


@case()
class TwoSided(Base):
    def forward(self, x):
        if x.sum() > 0:
            h = self.a(x)
        else:
            h = self.b(x).sin()
        return h


@case(UP, DOWN, UP * 10, DOWN * 10)
class Chain(Base):
    def forward(self, x):
        total = x.sum()
        if total > 10:
            h = self.a(x)
        elif total > 0:
            h = self.b(x)
        elif total < -10:
            h = x * 2
        else:
            h = x.exp()
        return h


@case(UP, DOWN, UP * 10, DOWN * 10)
class Nested(Base):
    def forward(self, x):
        h = x
        if x.sum() > 0:
            h = self.a(h)
            if x.max() > 5:
                h = h * 0.1
            h = h + 1
        else:
            if x.min() < -5:
                h = self.b(h)
        return h * 2


@case()
class EarlyReturn(Base):
    def forward(self, x):
        h = self.a(x)
        if x.sum() > 0:
            return h
        h = self.b(h)
        return h.tanh()


@case(UP, DOWN, UP * 10)
class SeveralReturns(Base):
    def forward(self, x):
        if x.sum() > 10:
            return self.a(x)
        h = self.b(x)
        if x.sum() > 0:
            h = h + 1
            if h.sum() > 0:
                return h
            h = h * 3
        return h.sin()


@case()
class ConditionalExpression(Base):
    def forward(self, x):
        return self.a(x) if x.sum() > 0 else self.b(x)


@case(UP, DOWN, UP * 10)
class AndOrNot(Base):
    def forward(self, x):
        if (x.sum() > 0 and not x.max() > 5) or x.min() > 100:
            return self.a(x)
        return self.b(x)


@case()
class AndOfAPythonValue(Base):
    def forward(self, x):
        skip = self.training and x.sum() > 0
        if not skip:
            x = self.a(x)
        if skip:
            x = x * 2
        return x


@case()
class BoolCall(Base):
    def forward(self, x):
        positive = bool(x.sum() > 0)
        if positive:
            x = self.a(x)
        return self.b(x)


@case(UP, DOWN, UP * 10)
class ForWithBreak(Base):
    def forward(self, x):
        for i in range(4):
            x = self.a(x) + i
            if x.sum() > 3:
                break
            x = x * 0.5
        return x + i


@case()
class ForWithContinue(Base):
    def forward(self, x):
        for layer in (self.a, self.b, self.a):
            if x.sum() > 0:
                continue
            x = layer(x) + 0.1
        return x


@case(UP, DOWN, UP * 10)
class ForWithReturn(Base):
    def forward(self, x):
        for i in range(3):
            x = self.a(x)
            if x.sum() > 1:
                return x * i
        return self.b(x)


@case(UP, DOWN)
class ForWithElse(Base):
    def forward(self, x):
        for _ in range(3):
            if x.sum() > 2:
                break
            x = x + 0.25
        else:
            x = self.a(x)
        return x


@case()
class InLoop(Base):
    def forward(self, x):
        best = x.sum() * 0 - 100
        kept = x
        for layer in (self.a, self.b, self.a):
            x = layer(x)
            if x.sum() > best:
                best = x.sum()
                kept = x
        return kept, best


@case()
class WriteInPlace(Base):
    def forward(self, x):
        h = self.a(x)
        if x.sum() > 0:
            h[0] = 0.0
        else:
            h.mul_(2)
        return h


@case()
class WriteThroughView(Base):
    def forward(self, x):
        h = self.a(x)
        row = h[1]
        if x.sum() > 0:
            row.add_(x[0])
        return h, row * 2


@case()
class WriteIntoConstant(Base):
    def forward(self, x):
        mask = torch.zeros(2, 3)
        if x.sum() > 0:
            mask[0] = 1.0
        return self.a(x) * mask + mask.sum()


@case()
class BufferOnOneSide(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("best", torch.full((), -1.0))

    def forward(self, x):
        loss = self.a(x).square().mean()
        if x.sum() > 0:
            self.count += 1
        if loss > self.best:
            self.best.copy_(loss.detach())
        return loss * self.count


@case()
class BufferAssigned(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x):
        if x.sum() > 0:
            self.scale = self.scale * 0.5
        return self.a(x) * self.scale


@case()
class BatchNormOnOneSide(Base):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        h = self.a(x)
        if x.sum() > 0:
            h = self.norm(h)
        return h


@case()
class DropoutOnOneSide(Base):
    def forward(self, x):
        h = self.a(x)
        if x.sum() > 0:
            h = F.dropout(h, 0.5, self.training)
        return F.dropout(self.b(h), 0.5, self.training)


@case()
class DrawOnEachSide(Base):
    def forward(self, x):
        if x.sum() > 0:
            h = self.a(x) + torch.rand(2, 3)
        else:
            h = self.b(x) + torch.randn(2, 3) + torch.rand(())
        return h + torch.randn(3)


@case()
class LayerDrop(Base):
    def forward(self, x):
        for layer in (self.a, self.b, self.a, self.b):
            dropped = self.training and torch.rand([]) < 0.5
            if not dropped or False:
                out = (layer(x), None)
                x = out[0]
            if dropped:
                out = (None, None)
        return x


@case()
class RaiseOnOneSide(Base):
    def forward(self, x):
        if x.sum() > 1000:
            message = f"{x.shape} is odd"
            for _ in range(2):
                message += "!"
            raise ValueError(message)
        return self.a(x)


@case()
class RaiseInElse(Base):
    def forward(self, x):
        if x.sum() < 1000:
            h = self.a(x)
        else:
            raise ValueError("too large")
        return h


@case()
class NanOnOtherSide(Base):
    def forward(self, x):
        y = self.a(x) * 0 + x.sum()
        if y.min() > 0:
            h = y.sqrt()
        else:
            h = y * 2
        return h


@case(UP, DOWN, UP * 0)
class NanGradientAtZero(Base):
    def forward(self, x):
        norm = x.square().sum()
        if norm > 0:
            x = x / norm.sqrt()
        return self.a(x)


@case()
class FirstStep(Base):
    def forward(self, x):
        n = torch.zeros_like(x)
        for _ in range(3):
            a = self.a(x)
            n = a if torch.all(n == 0.0) else torch.max(a, n)
        return n


@case()
class TupleResults(Base):
    def forward(self, x):
        if x.sum() > 0:
            out = (self.a(x), {"h": x.sum()})
        else:
            out = (self.b(x), {"h": x.mean()})
        return out


@case()
class NumbersOnSides(Base):
    def forward(self, x):
        scale = 1
        shift = 0.0
        if x.sum() > 0:
            scale = 3
            shift = x.mean()
        return self.a(x) * scale + shift


@case()
class NameOfOneSide(Base):
    def forward(self, x):
        positive = x.sum() > 0
        if positive:
            extra = self.a(x)
        h = self.b(x)
        if positive:
            h = h + extra
        return h


@case()
class SameTruthTwice(Base):
    def forward(self, x):
        positive = x.sum() > 0
        if positive:
            h = self.a(x)
            if positive:
                h = h + 1
            else:
                h = h.reshape(7)
        else:
            h = self.b(x)
        return h


@case()
class ListOfBoth(Base):
    def forward(self, x):
        outs = [x, x]
        if x.sum() > 0:
            outs[1] = self.a(x)
        return torch.cat(outs)


@case()
class NewListOnEachSide(Base):
    def forward(self, x):
        if x.sum() > 0:
            outs = [self.a(x)]
            outs.append(x)
        else:
            outs = []
            for layer in (self.a, self.b):
                outs.append(layer(x))
        return torch.cat(outs)


@case()
class HelperFunction(Base):
    def forward(self, x):
        return self.a(_bounded(x))


def _bounded(x):
    if x.max() > 1:
        x = x / x.max()
    return x


@case()
class ClosureAndSuper(Base):
    def forward(self, x):
        factor = 1.0

        def scaled(y):
            nonlocal factor
            factor = factor * 2
            if y.sum() > 0:
                return y * factor
            return y

        if x.sum() > 0:
            super().train(self.training)
            x = self.a(x)
        return scaled(x) + scaled(x * 0.5)


@case()
class WithNoGrad(Base):
    def forward(self, x):
        h = self.a(x)
        with torch.no_grad():
            if h.sum() > 0:
                scale = h.abs().max()
            else:
                scale = h.abs().mean()
        return h / scale


@case()
class ReturnInWith(Base):
    def forward(self, x):
        h = self.a(x)
        with torch.enable_grad():
            if h.sum() > 0:
                return h * 2
            return h.sin()


@case()
class InTry(Base):
    def forward(self, x):
        try:
            if x.sum() > 0:
                h = self.a(x)
            else:
                h = self.b(x)
        finally:
            self.last = None
        return h


@case()
class Checkpointed(Base):
    def forward(self, x):
        def run(y):
            if y.sum() > 0:
                y = self.a(y)
            return self.b(y).tanh()

        return checkpoint(run, x, use_reentrant=False)


@case()
class CheckpointOnOneSide(Base):
    def forward(self, x):
        if x.sum() > 0:
            x = checkpoint(self.a, x, use_reentrant=False)
        return self.b(x)


@case()
class CustomFunctionOnOneSide(Base):
    def forward(self, x):
        h = self.a(x)
        if x.sum() > 0:
            h = _Doubled.apply(h)
        return h


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 3


@case()
class StraightThrough(Base):
    def forward(self, x):
        h = self.a(x)
        if h.sum() > 0:
            h = h + (h.round() - h).detach()
        return h


@case()
class Detached(Base):
    def forward(self, x):
        h = self.a(x)
        if x.sum() > 0:
            h = h.detach()
        return self.b(h)


@case()
class Halves(Base):
    def forward(self, x):
        x = x.to(torch.bfloat16)
        if torch.isinf(x).any() or torch.isnan(x).any():
            limit = torch.finfo(x.dtype).max - 1000
            x = torch.clamp(x, min=-limit, max=limit)
        return self.a(x.float())


@case()
class Integers(Base):
    def forward(self, x):
        index = x.argmax(-1)
        if x.sum() > 0:
            index = index * 0 + 1
        return self.a(x).gather(1, index[:, None])


@case(UP, DOWN, UP * 10)
class ReturnInNestedLoops(Base):
    def forward(self, x):
        for i in range(2):
            for layer in (self.a, self.b):
                x = layer(x) + i
                if x.sum() > 2:
                    return x * 2
            x = x * 0.5
        return x


@case()
class ConditionalInArguments(Base):
    def forward(self, x):
        positive = x.sum() > 0
        return self.a(x * (2 if positive else 3)) + (1.0 if positive and x.max() > 1.5 else 0.0)


@case()
class CounterInAttribute(Base):
    def forward(self, x):
        state = {"count": 0, "sum": x.sum()}
        if x.sum() > 0:
            state["count"] += 1
            state["sum"] = self.a(x).sum()
        return state


@case()
class WhileOfNumbers(Base):
    def forward(self, x):
        i = 0
        while i < 3:
            i += 1
            if x.sum() > 3:
                x = x * 0.5
        return self.a(x)


@case()
class AdaptiveTime(Base):
    """Steps until all rows have halted, or a number of Python's says so."""

    def forward(self, x):
        halted = x.new_zeros(len(x))
        total = torch.zeros_like(x)
        steps = 0
        while steps < 3 and not (halted >= 0.9).all():
            x = torch.tanh(self.a(x))
            share = torch.minimum(torch.sigmoid(3 * x.sum(1)), 1 - halted)
            total = total + share[:, None] * x
            halted = halted + share
            steps += 1
        return total, halted, total * steps


@case()
class HalvedWhileLarge(Base):
    def forward(self, x):
        turns = 0
        while x.abs().sum() > 8 and turns < 4:
            if x.sum() > 0:
                x = self.a(x) * 0.5
            else:
                x = x * 0.25
            turns += 1
        return x + turns


@case()
class Annotated(Base):
    def forward(self, x):
        if x.sum() > 0:
            h: torch.Tensor = self.a(x)
        else:
            h: torch.Tensor = x
        return h


@case()
class Walrus(Base):
    def forward(self, x):
        if (total := x.sum()) > 0:
            x = x / total
        return self.a(x) + total


@case()
class ComprehensionOnOneSide(Base):
    def forward(self, x):
        i = 2
        if x.sum() > 0:
            x = sum(layer(x) * i for i, layer in enumerate((self.a, self.b)))
        return x * i


@case()
class InSubmodules(Base):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(OneSided(), EarlyReturn())

    def forward(self, x):
        return self.inner(x) + self.a(x)


@case()
class SoftLoss(Base):
    def forward(self, x):
        loss = self.a(x).square().mean()
        if torch.isnan(loss) or torch.isinf(loss):
            loss = torch.zeros_like(loss)
        return loss
