"""A block that mixes the cells of a grid by a convolution."""

import dataclasses

import pytest
import torch

from models_torch.grid_convolution import GridConvolution
from models_torch.registry import ARCHITECTURES, build
from train_jax.tasks.puzzles.presets import MAZE_UNIQUE

HIDDEN = 4


def by_cells(module, x, window):
    """The reference: each cell adds a product of every cell around it, pair by pair."""
    first, side = module.puzzle_positions, module.side
    mean = module.mean_proj(x.mean(1))
    rows = [mean.clone() for _ in range(x.shape[1])]
    for i in range(side**2):
        for j in range(side**2):
            (row, col), (other_row, other_col) = divmod(i, side), divmod(j, side)
            down, right = other_row - row + window // 2, other_col - col + window // 2
            if 0 <= down < window and 0 <= right < window:
                rows[first + i] = rows[first + i] + x[:, first + j] @ module.weight[:, :, down, right].T
    return torch.stack(rows, 1)


@pytest.mark.parametrize(("window", "side", "puzzle_positions"), [(3, 4, 1), (1, 3, 2), (5, 3, 0)])
def test_it_equals_a_sum_over_pairs_of_cells(window, side, puzzle_positions):
    torch.manual_seed(0)
    module = GridConvolution(HIDDEN, window=window, side=side, puzzle_positions=puzzle_positions)
    x = torch.randn(2, puzzle_positions + side**2, HIDDEN, requires_grad=True)
    actual, expected = module(x, None), by_cells(module, x, window)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    cotangent = torch.randn_like(actual)
    for own, reference in zip(
        *(torch.autograd.grad(y, (x, *module.parameters()), cotangent) for y in (actual, expected)), strict=True
    ):
        torch.testing.assert_close(own, reference, rtol=0, atol=1e-5)


def test_attention_has_no_part_in_it():
    """No weights of attention, no rotary table, and the number of heads need not divide."""
    fields = {"convolution_window": 3, "num_heads": 4096, "pos_encodings": "rope"}
    module = build("trm", dataclasses.replace(ARCHITECTURES["trm"].tiny_config, **fields))
    names = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    assert not [name for name in names if "attn" in name or "rotary" in name]
    assert [name for name in names if ".conv." in name]


def test_the_maze_preset_has_at_most_42_000_parameters_in_its_block():
    arch = dataclasses.replace(MAZE_UNIQUE.arch, seq_len=81, vocab_size=6)
    block = build("trm", arch).get_submodule("model.inner.L_level")
    assert sum(each.numel() for each in block.parameters()) == 36_864


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"convolution_window": 4}, "convolution_window is 4; use an odd number"),
        ({"convolution_window": 3, "mlp_t": True}, "use mlp_t False, or convolution_window 0"),
        ({"convolution_window": 3, "attention_window": 3}, "set one of them to 0"),
        (
            {"convolution_window": 3, "seq_len": 15},
            "needs a square grid, but 15 is not a square; use convolution_window 0",
        ),
    ],
)
def test_the_message_says_what_to_use_instead(fields, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(ARCHITECTURES["trm"].tiny_config, **fields)
