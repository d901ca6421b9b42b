"""Blocks that mix the cells of a grid: attention in a window, and a convolution, each beside a slow reference."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from models_torch.grid_convolution import GridConvolution
from models_torch.local_attention import LocalAttention
from models_torch.registry import ARCHITECTURES, build
from train_jax.puzzles.presets import MAZE_UNIQUE

HIDDEN = 12
HEADS = 3
TINY = ARCHITECTURES["trm"].tiny_config


def local(window, side, puzzle_positions):
    torch.manual_seed(0)
    return LocalAttention(HIDDEN, HIDDEN // HEADS, HEADS, window=window, side=side, puzzle_positions=puzzle_positions)


def masked_attention(module, x, mask):
    """Returns the reference: attention of every query to every key under a dense mask."""
    query, key, value = (
        part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in F.linear(x, module.qkv_proj.weight).chunk(3, dim=-1)
    )
    scores = query @ key.mT / (HIDDEN // HEADS) ** 0.5
    weights = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1)
    return F.linear((weights @ value).transpose(1, 2).flatten(2), module.o_proj.weight)


def window_mask(window, side, puzzle_positions):
    """Returns which position attends to which, decided pair by pair."""
    count = puzzle_positions + side**2
    mask = torch.zeros(count, count, dtype=torch.bool)
    for i in range(count):
        for j in range(count):
            (row, col), (other_row, other_col) = (divmod(n - puzzle_positions, side) for n in (i, j))
            near = max(abs(row - other_row), abs(col - other_col)) <= window // 2
            mask[i, j] = near or min(i, j) < puzzle_positions
    return mask


def check_equal(module, x, expected):
    """The output of the module and all gradients are those of the reference."""
    actual = module(x, None)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
    cotangent = torch.randn_like(actual)
    leaves = (x, *module.parameters())
    for own, reference in zip(*(torch.autograd.grad(y, leaves, cotangent) for y in (actual, expected)), strict=True):
        torch.testing.assert_close(own, reference, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("window", "side", "puzzle_positions"), [(3, 5, 2), (1, 3, 1), (7, 4, 0)])
def test_the_window_equals_a_mask(window, side, puzzle_positions):
    module = local(window, side, puzzle_positions)
    x = torch.randn(2, puzzle_positions + side**2, HIDDEN, requires_grad=True)
    check_equal(module, x, masked_attention(module, x, window_mask(window, side, puzzle_positions)))


def by_cells(module, x, window):
    """Returns the reference: each cell adds a product of every cell around it, pair by pair."""
    first = module.puzzle_positions
    side = module.side
    mean = module.mean_proj(x.mean(1))
    rows = [mean.clone() for _ in range(x.shape[1])]
    for i in range(side**2):
        for j in range(side**2):
            (row, col), (other_row, other_col) = divmod(i, side), divmod(j, side)
            down = other_row - row + window // 2
            right = other_col - col + window // 2
            if 0 <= down < window and 0 <= right < window:
                rows[first + i] = rows[first + i] + x[:, first + j] @ module.weight[:, :, down, right].T
    return torch.stack(rows, 1)


@pytest.mark.parametrize(("window", "side", "puzzle_positions"), [(3, 4, 1), (1, 3, 2), (5, 3, 0)])
def test_it_equals_a_sum_over_pairs_of_cells(window, side, puzzle_positions):
    torch.manual_seed(0)
    module = GridConvolution(4, window=window, side=side, puzzle_positions=puzzle_positions)
    x = torch.randn(2, puzzle_positions + side**2, 4, requires_grad=True)
    check_equal(module, x, by_cells(module, x, window))


def test_the_maze_preset_has_at_most_42_000_parameters_in_its_block():
    head = build("trm", dataclasses.replace(MAZE_UNIQUE.arch, seq_len=81, vocab_size=6))
    assert sum(each.numel() for each in head.get_submodule("model.inner.L_level").parameters()) == 36_864
