"""`bridge.verify` of right modules in 16 bits, and of the same with a gradient that is 2 % too large."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from support.markers import slow_unless
from torch import nn

import bridge
from bridge.tensor.tensor import BridgeTensor


class Off(torch.autograd.Function):
    """The identity; its gradient is 2 % too large in JAX."""

    @staticmethod
    def forward(ctx, x):
        ctx.factor = 1.02 if isinstance(x, BridgeTensor) else 1.0
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor


class OffBy2Percent(nn.Module):
    """A parametrization of the weight on which the fault is planted."""

    def forward(self, weight):
        return Off.apply(weight)


class Autocast(nn.Module):
    def __init__(self, module, dtype=torch.bfloat16):
        super().__init__()
        self.module = module
        self.dtype = dtype

    def forward(self, *args):
        with torch.autocast("cpu", self.dtype):
            return self.module(*args).float()


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(2, 64)
        self.norm = nn.BatchNorm1d(64)
        self.hidden = nn.Linear(64, 64)
        self.head = nn.Linear(64, 2)

    def forward(self, x):
        x = torch.relu(self.norm(self.encode(x)))
        return self.head(torch.relu(self.hidden(x)))


class MastersOfFloat32(nn.Module):
    """Casts its weights where it uses them."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(16, 32)
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        x = F.linear(x.bfloat16(), self.encode.weight.bfloat16(), self.encode.bias.to(torch.bfloat16))
        return F.linear(F.relu(x).square(), self.head.weight.to(x.dtype)).float()


class HalfOfIt(nn.Module):
    """One layer in float32, and one in bfloat16, which takes no other type."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(16, 32)
        self.head = nn.Linear(32, 4).bfloat16()

    def forward(self, x):
        return self.head(torch.tanh(self.encode(x)).bfloat16()).float().log_softmax(-1)


class Adapted(nn.Module):
    """A frozen layer in bfloat16 with an adapter in float32 that starts at zero."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(16, 16).bfloat16().requires_grad_(False)
        self.down = nn.Linear(16, 4, bias=False)
        self.head = nn.Linear(4, 16, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, x):
        return self.base(x) + self.head(self.down(x.float())).to(x.dtype)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(8, 16, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.layer(x)[0][:, -1])


def images():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3),
        nn.GroupNorm(4, 16), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5),
    )  # fmt: skip


def block():
    return nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True)


@dataclasses.dataclass(frozen=True)
class Case:
    module: Callable[[], nn.Module]
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    faulty: str = "head"
    """The layer on whose weight the fault is planted."""


CASES = {
    "autocast": Case(lambda: Autocast(Classifier()), (64, 2), faulty="module.hidden"),
    "bfloat16": Case(lambda: block().bfloat16(), (2, 7, 32), torch.bfloat16, "linear2"),
    "float16": Case(lambda: Classifier().half(), (64, 2), torch.float16),
    "casts": Case(MastersOfFloat32, (8, 16)),
    "two types": Case(HalfOfIt, (8, 16)),
    "adapter": Case(Adapted, (8, 16), torch.bfloat16),
    "classifier in bfloat16": Case(lambda: Classifier().bfloat16(), (64, 2), torch.bfloat16),
    "autocast to float16": Case(lambda: Autocast(images(), torch.float16), (4, 3, 8, 8), faulty="module.4"),
    "images in bfloat16": Case(lambda: images().bfloat16(), (4, 3, 8, 8), torch.bfloat16, "4"),
    "recurrent": Case(lambda: Recurrent().bfloat16(), (3, 6, 8), torch.bfloat16),
    "block under autocast": Case(lambda: Autocast(block()), (2, 7, 32), faulty="module.linear1"),
}
FAST = {"float16", "casts", "adapter"}


@pytest.mark.parametrize("train", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", slow_unless(FAST.__contains__, CASES))
def test_a_right_module_is_ok_and_one_with_a_wrong_gradient_is_not(name, train):
    torch.manual_seed(0)
    case = CASES[name]
    module = case.module()
    x = torch.randn(case.shape).to(case.dtype)
    report = bridge.verify(module, x, train=train)
    assert report.ok, report
    assert any("rounding: both sides agree in float64" in row.note for row in report.rows)
    nn.utils.parametrize.register_parametrization(module.get_submodule(case.faulty), "weight", OffBy2Percent())
    report = bridge.verify(module, x, train=train)
    assert [row.name for row in report.rows if row.verdict == "beyond tolerance"] == [
        f"{case.faulty}.parametrizations.weight.original"
    ] * 2  # in both steps


def test_a_result_that_is_wrong_in_16_bits_alone_is_not_ok():
    class Sum(nn.Module):
        def forward(self, x):
            off = 0.5 if isinstance(x, BridgeTensor) and x.dtype == torch.bfloat16 else 0.0
            return x.sum(0) + off

    report = bridge.verify(Sum(), torch.rand(8, 3).bfloat16(), steps=1)
    assert report.worst.kind == "output" and report.worst.note.startswith("JAX is off: both in float64 ")
