"""Windowed attention equals full attention with a mask, with fewer operations."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from models_torch.layers import Attention
from models_torch.local_attention import LocalAttention
from models_torch.registry import ARCHITECTURES, build

HIDDEN, HEADS = 12, 3


def local(window, side, puzzle_positions):
    torch.manual_seed(0)
    sizes = {"window": window, "side": side, "puzzle_positions": puzzle_positions}
    return LocalAttention(HIDDEN, HIDDEN // HEADS, HEADS, **sizes)


def masked_attention(module, x, mask):
    """The reference: attention of every query to every key under a dense mask."""
    query, key, value = (
        part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in F.linear(x, module.qkv_proj.weight).chunk(3, dim=-1)
    )
    scores = query @ key.mT / (HIDDEN // HEADS) ** 0.5
    weights = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1)
    return F.linear((weights @ value).transpose(1, 2).flatten(2), module.o_proj.weight)


def window_mask(window, side, puzzle_positions):
    """Which position attends to which, decided pair by pair."""
    count = puzzle_positions + side**2
    mask = torch.zeros(count, count, dtype=torch.bool)
    for i in range(count):
        for j in range(count):
            if min(i, j) < puzzle_positions:
                mask[i, j] = True
                continue
            (row, col), (other_row, other_col) = (divmod(n - puzzle_positions, side) for n in (i, j))
            mask[i, j] = max(abs(row - other_row), abs(col - other_col)) <= window // 2
    return mask


@pytest.mark.parametrize(("window", "side", "puzzle_positions"), [(3, 5, 2), (1, 3, 1), (7, 4, 0), (5, 6, 3)])
def test_the_window_equals_a_mask(window, side, puzzle_positions):
    module = local(window, side, puzzle_positions)
    x = torch.randn(2, puzzle_positions + side**2, HIDDEN, requires_grad=True)
    actual, expected = module(x, None), masked_attention(module, x, window_mask(window, side, puzzle_positions))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
    cotangent = torch.randn_like(actual)
    for own, reference in zip(
        *(torch.autograd.grad(y, (x, *module.parameters()), cotangent) for y in (actual, expected)), strict=True
    ):
        torch.testing.assert_close(own, reference, rtol=0, atol=1e-5)


def test_a_window_over_the_whole_grid_is_full_attention():
    module, full = local(7, 4, 2), Attention(HIDDEN, HIDDEN // HEADS, HEADS, HEADS)
    full.load_state_dict(module.state_dict(), strict=True)
    x = torch.randn(2, 18, HIDDEN)
    torch.testing.assert_close(module(x, None), full(x, None), rtol=0, atol=1e-6)


def test_it_takes_fewer_operations():
    """For 16 puzzle positions and a 30x30 grid, without the projections, which cost the same."""
    x, flops = torch.randn(1, 916, HIDDEN, device="meta"), []
    for module in (Attention(HIDDEN, HIDDEN // HEADS, HEADS, HEADS), local(7, 30, 16)):
        with FlopCounterMode(display=False) as counter:
            module.to("meta")(x, None)
        flops.append(counter.get_total_flops() - 2 * 916 * HIDDEN * HIDDEN * 4)
    cells, puzzle = 900 * (7 * 30 + 16), 16 * 916
    assert flops[1] / flops[0] == pytest.approx((cells + puzzle) / 916**2)
    assert flops[0] / flops[1] > 3.8


def test_weights_of_full_attention_load():
    config = ARCHITECTURES["trm"].tiny_config
    full, narrow = (build("trm", dataclasses.replace(config, attention_window=window)) for window in (0, 3))
    narrow.load_state_dict(full.state_dict(), strict=True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention_window": 4}, "attention_window is 4; use an odd number"),
        ({"attention_window": -3}, "attention_window is -3; use an odd number"),
        ({"attention_window": 3, "mlp_t": True}, "use mlp_t False, or attention_window 0"),
        (
            {"attention_window": 3, "seq_len": 15},
            "needs a square grid, but 15 is not a square; use attention_window 0",
        ),
        ({"cycle_penalty": -1.0}, "cycle_penalty is -1.0; use at least 0"),
    ],
)
def test_the_message_says_what_to_use_instead(fields, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(ARCHITECTURES["trm"].tiny_config, **fields)
