"""`copy.copy` and `copy.deepcopy` in `forward`: what the copies share, and what they carry."""

import copy

import pytest
import torch
from eager import compare, randn
from torch import nn

import bridge

X = randn(2, 3)


class Memory(nn.Module):
    """Two buffers over one memory, a plain view of it, a note on a buffer, and a parameter."""

    def __init__(self):
        super().__init__()
        self.register_buffer("rows", torch.arange(6.0).view(2, 3))
        self.register_buffer("flat", self.rows.view(-1), persistent=False)
        self.register_buffer("code", torch.tensor([[3, -2, 5]], dtype=torch.int8))
        vars(self.code)["scale"] = 0.25
        self.column = self.rows[:, 0]
        self.w = nn.Parameter(torch.ones(3))
        vars(self.w)["note"] = 3.0


class Copies(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.memory, self.function = Memory(), function

    def forward(self, x):
        return self.function(self.memory, x)


def writes(memory, x):
    trial = copy.deepcopy(memory)
    trial.rows.lerp_(x.detach(), 0.5)
    trial.flat.mul_(0.9)
    return trial.rows * memory.w * x, trial.flat.clone(), memory.flat.clone()


def a_dict(memory, x):
    copied = copy.deepcopy({"a": memory.rows, "b": memory.rows[1], "c": memory.rows.detach()})
    copied["b"].fill_(9.0)
    copied["c"][0, 0] = 7.0
    return copied["a"] * x, memory.rows.clone()


def results(memory, x):
    y = (x * memory.w).detach()
    first, second = copy.deepcopy((y, y.t()))
    second.mul_(2)
    return first * x, y


def attributes(memory, x):
    trial = copy.deepcopy(memory)
    trial.code.clamp_(-3, 3)
    z = x.detach()
    z.note = [memory.rows, 2.0]
    noted = copy.deepcopy(z)
    noted.note[0].add_(1)
    return trial.code.float() * trial.code.scale, noted.note[0] * noted.note[1], memory.rows.clone(), x * memory.w


def plain_view(memory, x):
    trial = copy.deepcopy(memory)
    trial.rows.mul_(2)
    return trial.column + x[:, 0], memory.column.clone()


def shallow(memory, x):
    weight, code = copy.copy(memory.w), copy.copy(memory.code)
    factor = 2.0 if isinstance(weight, nn.Parameter) and weight.requires_grad else 0.0
    rows = memory.rows.clone()
    copy.copy(rows).add_(1)
    return x * weight * factor * weight.note, code.float() * code.scale, rows


def deep_parameter(memory, x):
    weight = copy.deepcopy(memory.w)
    return x * memory.w * (1.0 if hasattr(weight, "note") else 5.0)


FUNCTIONS = [writes, a_dict, results, attributes, plain_view, shallow, deep_parameter]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_copies_are_pytorch_s(function):
    compare(Copies(function), [X])


def test_deepcopy_of_a_result_is_pytorch_s_error():
    def call(memory, x):
        return copy.deepcopy(x * memory.w)

    with pytest.raises(RuntimeError, match="Only Tensors created explicitly by the user") as expected:
        Copies(call)(X)
    fn = bridge.export(Copies(call))
    with pytest.raises(RuntimeError, match="Only Tensors created explicitly by the user") as ours:
        fn(fn.params, fn.buffers, X.numpy())
    assert str(expected.value).split(".")[0] in str(ours.value)
