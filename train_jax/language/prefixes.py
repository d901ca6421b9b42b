"""Prompts that begin with tokens whose keys and values are in a slot already: whose to use, and for which row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

BLOCK = 64
"""Tokens that are compared, and computed after a known beginning, at once.

A shorter beginning is not worth a copy: `prefill` computes short prompts together. As many tokens after a beginning are
computed by `decode`, beside the other rows.
"""


class Held(NamedTuple):
    """What a slot holds."""

    number: int
    device: int
    tokens: Sequence[int]
    """The tokens whose keys and values are in the cache."""
    is_free: bool
    has_logits: bool
    """True if the logits are those after the last of these tokens."""


class Beginning(NamedTuple):
    """The beginning of a prompt, which is copied from one slot to another, or used in place."""

    source: int
    target: int
    length: int
    has_logits: bool
    """True if nothing is left to compute before the tokens after it: neither a copy nor a shorter beginning."""


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Returns the number of equal tokens at the beginning of two lists."""
    most = min(len(first), len(second))
    start = 0
    while start < most and first[start : start + BLOCK] == second[start : start + BLOCK]:
        start += BLOCK
    while start < most and first[start] == second[start]:
        start += 1
    return min(start, most)


def find_beginning(
    prompt: Sequence[int], slots: Sequence[Held], *, may_copy: bool, may_extend: bool
) -> Beginning | None:
    """Returns the longest beginning of a prompt that saves work; None if all of it is computed.

    Args:
      slots: the free ones first, in the order in which they may be overwritten.
      may_copy: if false, only a free slot whose tokens all are the beginning is used.
      may_extend: if false, at most `BLOCK` tokens may follow the beginning; otherwise also as many as it has.
    """
    best = None
    best_length = 0
    for held in slots:
        length = common_length(held.tokens, prompt)
        if length > best_length:
            best = held
            best_length = length
    if best is None:
        return None
    is_whole = best_length == len(best.tokens) and best.has_logits and best.is_free
    if is_whole and len(prompt) - best_length <= BLOCK:
        return Beginning(best.number, best.number, best_length, has_logits=True)
    length = min(best_length, len(prompt) - 1)
    new = len(prompt) - length
    if not may_copy or length < BLOCK or new > (max(BLOCK, length) if may_extend else BLOCK):
        return None
    others = [held.number for held in slots if held.is_free and held.device == best.device and held is not best]
    # Most of another conversation is not thrown away for a common beginning.
    if best.is_free and (2 * length >= len(best.tokens) or not others):
        return Beginning(best.number, best.number, length, has_logits=is_whole)
    if not others:
        return None
    return Beginning(best.number, others[0], length, has_logits=False)
