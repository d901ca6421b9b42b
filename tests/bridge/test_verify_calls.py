"""The further calls of `verify`, and gradients that a call itself leaves or asks for."""

import warnings

import pytest
import torch
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


# ---- several calls


SEEN = []


def test_a_further_call_gets_other_numbers_of_the_same_kind():
    def forward(inputs, w):
        if not isinstance(inputs["floats"], bridge.tensor.tensor.BridgeTensor):
            SEEN.append(inputs)  # a list that the function encloses would be copied with the module
        return inputs["floats"] * w + inputs["mask"].log()[:, None]

    inputs = {
        "floats": torch.linspace(0.1, 0.9, 12).reshape(4, 3),
        "mask": torch.tensor([1.0, 1, 1, 2]),
        "ids": torch.arange(4),
        "flags": torch.tensor([[True, True, False]]),
        "additive": torch.tensor([0.0, -torch.inf, 0.5]),
        "step": torch.tensor(7),
        "ones": torch.ones(3),
        "complex": torch.complex(X, 2 * X),
        "half": X.bfloat16(),
        "empty": torch.empty(0, 3),
        "number": 2,
    }
    assert bridge.verify(Applied(forward), inputs, steps=3).ok
    first, second, third = SEEN
    assert first["ids"].tolist() == [0, 1, 2, 3] and second["ids"].tolist() == [3, 0, 1, 2]
    assert second["mask"].tolist() == [2, 1, 1, 1] and third["mask"].tolist() == [1, 2, 1, 1]
    assert second["flags"].tolist() == [[False, True, True]], "a batch of one: along the next axis"
    assert second["additive"].tolist() == [0.5, 0, -torch.inf] and second["step"] == 7 and second["number"] == 2
    for name in ("floats", "ones", "complex", "half"):
        assert not torch.equal(first[name], second[name]) and second[name].dtype == first[name].dtype, name
    assert second["floats"].min() >= 0.1 and second["floats"].max() <= 0.9
    assert second["ones"].min() >= 0.5 and second["ones"].max() <= 1


def test_one_tensor_as_two_arguments_stays_one():
    x = torch.rand(3)
    assert bridge.verify(Twice(), x, x).ok


class Twice(nn.Module):
    def forward(self, x, y):
        return x * y * (1 if isinstance(x, bridge.tensor.tensor.BridgeTensor) or torch.equal(x, y) else 2)


def test_a_module_that_cannot_take_other_numbers_says_what_to_do():
    class Sorted(nn.Module):
        def forward(self, x, lengths):
            if not isinstance(x, bridge.tensor.tensor.BridgeTensor) and not torch.equal(lengths, lengths.sort()[0]):
                raise ValueError("lengths have to be sorted")
            return x * 2

    given = X, torch.arange(3)
    with pytest.raises(bridge.BridgeError, match=r"fails, in step 1: ValueError: lengths.*steps=1 compares one call"):
        bridge.verify(Sorted(), *given)
    assert bridge.verify(Sorted(), *given, steps=1).ok
    assert bridge.verify(Sorted(), *given, advance=lambda outputs, args, kwargs: (args, kwargs)).ok


# ---- gradients that the call itself leaves or asks for


def leaving(function):
    class Leaves(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, x):
            function(self.w, x)
            return x * self.w

    return Leaves()


@pytest.mark.parametrize("who", ["parameter", "input"])
def test_a_grad_that_the_call_leaves_is_compared(who):
    def function(w, x):
        if who == "parameter":
            w.grad = torch.ones(3)
        elif not isinstance(x, bridge.tensor.tensor.BridgeTensor):
            (x * 2).sum().backward()

    try:
        report = bridge.verify(leaving(function), X.clone().requires_grad_())
    except bridge.BridgeError as error:
        assert who == "parameter" and ".grad" in str(error)
        return
    row = report.worst
    assert row.kind == ".grad" and row.verdict == "beyond tolerance" and "returns no `.grad`" in row.note, f"\n{report}"
    assert who == "parameter" or bridge.verify(leaving(function), X).ok, "an input that requires none"


def test_a_gradient_that_is_sparse_in_pytorch():
    module = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
    report = bridge.verify(module, torch.tensor([0, 2, 2]))
    assert report.ok and rows(report, "gradient")["0.weight"].scale > 0, f"\n{report}"


class Quantised(nn.Module):
    """Straight through, where an input asks for a gradient."""

    def __init__(self):
        super().__init__()
        self.codes = nn.Parameter(torch.linspace(-1, 2, 5))

    def forward(self, x):
        nearest = self.codes[(x.detach()[..., None] - self.codes).abs().argmin(-1)]
        return x + (nearest - x).detach() + nearest if x.requires_grad else 2 * nearest


def test_a_module_that_asks_an_input_for_requires_grad_is_said():
    x = torch.rand(4, 3)
    with pytest.warns(bridge.BridgeWarning, match=r"calls.py:\d+ asks an input whether it requires grad") as said:
        assert not bridge.verify(Quantised(), x).ok
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert bridge.verify(Quantised(), x, input_gradients=False).ok
