"""`bridge.verify` says which side is right where a leaf is beyond tolerance."""

import pytest
import torch
from eager import Call, Calls, randn
from torch import nn

import bridge
from bridge.tensor.tensor import BridgeTensor


def notes(module, *args, **options):
    """Returns the decisions by leaf."""
    report = bridge.verify(module, *args, steps=1, **options)
    assert not report.ok
    return {f"{row.kind} {row.name}": row.note for row in report.rows if row.verdict == "beyond tolerance"}


class Wrong(torch.autograd.Function):
    """A backward that is not the derivative."""

    @staticmethod
    def forward(ctx, x):
        return x.sin()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 7


def wrong_in(side):
    """Returns the sine, whose gradient is wrong on one side."""

    def sine(x):
        if isinstance(x, BridgeTensor):
            return Wrong.apply(x) if side == "JAX" else x.sin()
        y = x.sin()
        if side == "PyTorch":
            y.register_hook(lambda gradient: gradient * 7)
        return y

    return sine


@pytest.mark.parametrize("side", ["PyTorch", "JAX"])
def test_a_gradient_of_an_input_is_decided_by_a_finite_difference(side):
    [note] = notes(Call(wrong_in(side)), randn(5)).values()
    assert note.startswith(f"{side} is off: finite difference ") and "in float64 PyTorch" in note


def test_a_gradient_of_a_parameter_in_a_later_step_with_draws():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.calls = nn.Buffer(torch.zeros(()))

        def forward(self, x):
            x = self.layer(x) + torch.randn_like(x)
            self.calls += 1
            return torch.where(self.calls > 1, wrong_in("PyTorch")(x), x)

    report = bridge.verify(Noisy(), randn(3, 4))
    decided = {(r.name, r.step) for r in report.rows if r.note.startswith("PyTorch is off")}
    assert decided == {("layer.weight", 1), ("layer.bias", 1), ("0", 1)}


@pytest.mark.parametrize("side", ["PyTorch", "JAX"])
def test_an_output_is_decided_where_both_agree_in_float64(side):
    def forward(x):
        off = x.dtype == torch.float32 and isinstance(x, BridgeTensor) == (side == "JAX")
        return x + 0.5 if off else x

    assert notes(Call(forward), randn(5))["output value"].startswith(f"{side} is off: both in float64 ")


def test_a_corner_beside_the_parameters_does_not_decide_against_both_in_float64():
    """The finite difference is across the corner; JAX has a gradient that is 10 % too large, in float32."""

    def forward(x):
        slope = 1.1 if isinstance(x, BridgeTensor) and x.dtype == torch.float32 else 1.0
        return slope * torch.relu(x) + 9 * torch.relu(x - 1e-7)

    [note] = [note for name, note in notes(Call(forward), torch.full((3,), 5e-8)).items() if "gradient" in name]
    assert note.startswith("JAX is off: both in float64 ")


def test_no_decision_where_nothing_agrees():
    module = Call(lambda x: x + 0.5 * isinstance(x, BridgeTensor))
    assert notes(module, randn(5))["output value"].startswith("undecided: both in float64 nan, PyTorch ")
    twice = Call(lambda x: Wrong.apply(x) if isinstance(x, BridgeTensor) else wrong_in("PyTorch")(x) * 2 - x.sin())
    assert notes(twice, randn(5))["input gradient 0"].startswith("undecided: finite difference ")


class Doubled(torch.autograd.Function):
    """A gradient that the module replaces by twice the derivative."""

    @staticmethod
    def forward(ctx, x):
        return x.sin()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


@pytest.mark.parametrize(
    "right",
    [
        lambda x: x.detach() * x,
        lambda x: x + (x.round() - x).detach(),
        lambda x: Doubled.apply(x),
        lambda x: Call(lambda y: x * y)(torch.no_grad()(torch.sin)(x)),
    ],
    ids=["detach", "straight through", "custom backward", "no_grad"],
)
def test_a_finite_difference_does_not_decide_where_the_module_cuts_or_replaces_gradients(right):
    """JAX has half of PyTorch's gradient, which is no derivative."""

    def forward(x):
        y = right(x)
        return (y + y.detach()) / 2 if isinstance(x, BridgeTensor) else y

    assert notes(Call(forward), randn(5))["input gradient 0"].startswith("undecided: both in float64 nan, PyTorch ")


class Corner(nn.Module):
    """A ReLU at 0, where the roundings of either side decide about its gradient."""

    def __init__(self, allowed=(torch.float32, torch.float64)):
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))
        self.allowed = allowed

    def forward(self, x):
        assert x.dtype in self.allowed, "no float64"
        return torch.relu(self.w - 1 + (1e-7 if isinstance(x, BridgeTensor) else -1e-7)) * 5 + x


def test_a_corner_is_rounding_where_noise_moves_what_pytorch_computes():
    assert notes(Corner(), randn(3))["gradient w"].startswith("rounding: noise of 1e-06 in the parameters moves ")
    note = notes(Corner((torch.float32,)), randn(3))["gradient w"]
    assert note.startswith("rounding: ") and "PyTorch fails in float64" in note


def test_what_agrees_in_float64_is_rounding_where_noise_moves_it():
    """The square root beside 0, as in a BatchNorm of two images that are nearly equal; JAX rounds otherwise."""

    def forward(m, x):
        off = 1e-7 if isinstance(x, BridgeTensor) and x.dtype == torch.float32 else 0.0
        return x + ((m.w - 0.5).square() + 1e-14 + off**2).rsqrt().clamp(max=1e8)[0, 0]

    report = bridge.verify(Calls(forward), randn(3), steps=1)
    [note] = [row.note for row in report.rows if row.error > 1e-4]
    assert report.ok and note.startswith("rounding: both sides agree in float64, and noise of 1e-06 in the parameters ")


def test_no_decision_where_pytorch_fails_in_float64():
    def forward(x):
        assert x.dtype == torch.float32, "no float64"
        return wrong_in("PyTorch")(x)

    [note] = notes(Call(forward), randn(5)).values()
    assert note.startswith("PyTorch fails in float64, so the leaf cannot be judged: AssertionError")
