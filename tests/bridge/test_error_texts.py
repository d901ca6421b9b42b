"""Shapes that do not fit: the text of the error is that of PyTorch's kernel, on which code may decide."""

import jax
import pytest
import torch
import torch.nn.functional as F
from eager import Call, compare, randn
from torch import nn

import bridge
from bridge.dispatch import values

X = randn(3, 7)
ones = torch.ones

REFUSED = {
    "matmul": lambda x: x @ ones(8, 2),
    "matmul of float16": lambda x: x.half() @ ones(8, 2).half(),
    "linear": lambda x: F.linear(x, ones(2, 8), ones(2)),
    "linear, bias": lambda x: F.linear(x, ones(2, 7), ones(3)),
    "linear of three dimensions": lambda x: F.linear(x[None], ones(2, 8)),
    "linear, large": lambda x: x.repeat(300, 100) @ ones(800, 800),
    "addmm": lambda x: torch.addmm(ones(3, 3), x, ones(7, 2)),
    "bmm": lambda x: torch.bmm(x[None], x[None]),
    "add": lambda x: x + ones(3, 8),
    "where": lambda x: torch.where(x > 0, x, ones(8)),
    "maximum": lambda x: torch.maximum(x, ones(4)),
    "addcmul": lambda x: torch.addcmul(x, ones(9), x),
    "added in place": lambda x: (x * 1).add_(ones(3, 8)),
    "larger, in place": lambda x: (x * 1).add_(ones(2, 3, 7)),
    "masked": lambda x: x.masked_fill(ones(8) > 0, 0.0),
    "cat": lambda x: torch.cat([x, ones(2, 2)]),
    "cat of dimensions": lambda x: torch.cat([x, ones(2)]),
    "stack": lambda x: torch.stack([x, ones(2, 2)]),
    "conv1d": lambda x: F.conv1d(x[None], ones(2, 5, 3)),
    "conv2d": lambda x: F.conv2d(x[None, None], ones(2, 5, 3, 3)),
    "conv, groups": lambda x: F.conv1d(x[None], ones(2, 3, 3), groups=2),
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "embedding": lambda x: F.embedding(torch.tensor([0]), x[0]),
    "kl_div": lambda x: F.kl_div(x, ones(3, 8)),
    "strides": lambda x: x.t().view(21),
    "for each row": lambda x: torch.vmap(lambda row: row + ones(8))(x),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_text_is_that_of_the_kernel(name):
    with pytest.raises(Exception) as expected:
        REFUSED[name](X)
    fn = bridge.export(Call(REFUSED[name]))
    with pytest.raises(type(expected.value)) as ours:
        jax.eval_shape(lambda x: fn({}, {}, x)[0], X.numpy())
    assert str(ours.value) == str(expected.value)
    assert sum("in the module itself (Call)" in note for note in ours.value.__notes__) == 1


def test_code_that_reads_the_text():
    def function(layer, x):
        try:
            return layer(x)
        except RuntimeError as error:
            return layer(x.mT) if "shapes cannot be multiplied" in str(error) else x

    compare(Call(function, nn.Linear(3, 2)), [X])


def test_kernels_are_not_asked_with_arguments_that_are_too_large(monkeypatch):
    monkeypatch.setattr(values, "AFFORDABLE", 20)
    fn = bridge.export(Call(REFUSED["matmul"]))
    with pytest.raises(RuntimeError, match="same reduction dim"):
        jax.eval_shape(lambda x: fn({}, {}, x)[0], X.numpy())
