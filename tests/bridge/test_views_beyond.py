"""Views that show memory beyond the tensor they are taken of, or read it as other types, against PyTorch eager."""

import pytest
import torch
from eager import Call, compare, randn

import bridge

X = randn(3, 4)


def strided_beyond(x, write):
    """A view by strides of all rows, taken of one row."""
    whole = x * 1
    row = whole[1]
    view = row.as_strided((2, 4), (4, 1), 0)
    write(whole, row, view)
    return whole.sin(), view.cos()


WRITES_BEYOND = {
    "nothing": lambda whole, row, view: None,
    "the whole": lambda whole, row, view: whole.mul_(3),
    "the row": lambda whole, row, view: row.exp_(),
    "the view": lambda whole, row, view: view.mul_(4).sin_(),
    "a part of the view": lambda whole, row, view: view[:, 1:3].mul_(4),
    "a copy": lambda whole, row, view: view.copy_(whole[1:3] * 2),
}


@pytest.mark.parametrize("name", WRITES_BEYOND)
def test_gradients_of_a_view_that_shows_more_than_it_was_taken_of(name):
    """PyTorch takes it of the base once something was written."""
    compare(Call(lambda x: strided_beyond(x, WRITES_BEYOND[name])), [X])


def test_bits_of_bits_under_jit():
    def forward(x):
        bits = x.clone()
        bits.view(torch.uint8)[:, 3::4] ^= 0x80
        return bits.view(torch.int16), bits.view(torch.uint8).view(torch.int32)

    assert bridge.verify(Call(forward), X).ok


def test_view_copy_of_a_transpose():
    compare(Call(lambda x: torch.view_copy(x.t(), (-1,))), [X])
