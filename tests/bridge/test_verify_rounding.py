"""Where a leaf is beyond the tolerance, PyTorch's own distance from float64 decides, and hides no fault."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bridge

X = torch.linspace(-1, 2, 12).reshape(4, 3)


class Applied(nn.Module):
    """A function of the input and one weight."""

    def __init__(self, function, weight=None):
        super().__init__()
        self.function = function
        self.w = nn.Parameter(torch.linspace(0.5, 1.5, 3) if weight is None else weight)

    def forward(self, x):
        return self.function(x, self.w)


def rows(report, kind):
    return {row.name: row for row in report.rows if row.kind == kind}


def test_rounding_of_a_gradient_that_is_zero():
    """By PyTorch's own float64, run where a leaf is beyond the tolerance."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
    report = bridge.verify(module, torch.randn(16, 4), train=True, tolerance=1e-9)
    row = rows(report, "gradient")["0.bias"]
    assert row.verdict == "equal" and row.note == "zero in float64" and row.tolerance < 0.01, f"\n{report}"


def test_rounding_of_long_sums():
    x = torch.randn(50_000, 8, generator=torch.Generator().manual_seed(0))
    x += 2e-4 - x.double().mean(0).float()
    report = bridge.verify(Applied(lambda x, w: (x * w).sum(0), torch.ones(8)), x, tolerance=1e-6)
    assert report.ok and any("float64 differs from PyTorch's own" in row.note for row in report.rows), f"\n{report}"


def rounding_only(x, w):
    return x * w * (1 + 1e-3 * isinstance(x, bridge.tensors.BridgeTensor))


def of_another_type(x, w):
    """Computes something else in float64, and in the bridge the same."""
    return x * w * (2 if isinstance(x, bridge.tensors.BridgeTensor) or x.dtype == torch.float64 else 1)


def with_state(x, w, calls=[0]):  # noqa: B006
    """Computes something else in each call, in float64 by less than any rounding is."""
    calls[0] += 1
    return x * w * (1 + 1e-3 * calls[0])


def in_float32_only(x, w):
    return F.linear(x * (1 + isinstance(x, bridge.tensors.BridgeTensor)), torch.eye(3)) * w


@pytest.mark.parametrize(
    ("forward", "note"),
    [
        (rounding_only, "float64 differs from PyTorch's own by"),
        (of_another_type, "float64 differs from PyTorch's own by 1.0e+00, which is taken for more than rounding"),
        (with_state, "PyTorch itself computes something else when it is called again"),
        (in_float32_only, "PyTorch fails in float64, by which it could be judged: RuntimeError: "),
    ],
)
@pytest.mark.filterwarnings("ignore::bridge.BridgeWarning")
def test_float64_hides_no_fault(forward, note):
    try:
        report = bridge.verify(Applied(forward), X, steps=1)
    except bridge.BridgeError as error:  # hidden state, by its name
        assert "calls" in str(error)
        return
    row = report.worst
    assert row.verdict == "beyond tolerance" and row.note.startswith(note) and row.tolerance < 0.1, f"\n{report}"


class SharedBuffers(nn.Module):
    """A buffer that is a view of another one, which a module in float64 has no more."""

    def __init__(self):
        super().__init__()
        self.w, self.whole = nn.Parameter(torch.ones(2)), nn.Buffer(torch.zeros(2, 2))
        self.part = nn.Buffer(self.whole[0])

    def forward(self, x):
        if not isinstance(x, bridge.tensors.BridgeTensor):  # so that the bridge computes what the copy in float64 does
            self.whole += 1.0
        return x * self.w * (1 + self.part)


def test_a_module_in_float64_that_shares_less_memory_is_no_judge():
    report = bridge.verify(SharedBuffers(), torch.ones(2), steps=1)
    outputs = rows(report, "output")["value"]
    assert outputs.verdict == "beyond tolerance" and "when it is called again" in outputs.note, f"\n{report}"
