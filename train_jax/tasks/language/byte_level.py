"""Byte-level byte-pair encoding in the terms of its file formats: byte alphabets, merges, text ranks."""

from __future__ import annotations

import base64
import binascii
import itertools
from collections.abc import Mapping

Ranks = dict[bytes, int]
"""Maps the bytes of a token to its id; a pair of tokens merges before another if the id of the result is lower."""


def _byte_alphabet() -> dict[int, str]:
    """Returns the character of each byte in `tokenizer.json`: printable ones stand for themselves, others follow."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


_CHARACTERS = _byte_alphabet()
_BYTES = {character: byte for byte, character in _CHARACTERS.items()}


def to_characters(token: bytes) -> str:
    """Writes the bytes of a token in the alphabet of `tokenizer.json`."""
    return "".join(_CHARACTERS[byte] for byte in token)


def from_characters(text: str) -> bytes:
    """Reads the bytes of a token. Raises ValueError for a character outside the alphabet."""
    try:
        return bytes(_BYTES[character] for character in text)
    except KeyError as error:
        raise ValueError(f"{error.args[0]!r} stands for no byte") from None


def merges_of(ranks: Ranks) -> list[tuple[bytes, bytes]]:
    """Returns the pair of tokens that each token of several bytes consists of, in the order of the merges.

    Raises ValueError for a token that no merge of two earlier tokens gives.
    """
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            parts = _merged(token, ranks, rank)
            if len(parts) != 2:
                raise ValueError(f"token {rank} ({token!r}) is not a merge of two earlier tokens")
            merges.append((parts[0], parts[1]))
    return merges


def _merged(token: bytes, ranks: Ranks, limit: int) -> list[bytes]:
    """Merges the bytes of a token, lowest rank first, with ranks below `limit`."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 1:
        pairs = [ranks.get(a + b, limit) for a, b in itertools.pairwise(parts)]
        lowest = min(pairs)
        if lowest >= limit:
            break
        i = pairs.index(lowest)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


def check_ranks(ranks: Mapping[bytes, int]) -> None:
    """Raises ValueError unless all 256 bytes are tokens and the ids are 0, 1, 2, …"""
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise ValueError(f"byte {missing[0]} is not a token")
    if any(type(rank) is not int for rank in ranks.values()) or sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(f"the ids of {len(ranks)} tokens are not 0 to {len(ranks) - 1}")


def ranks_to_text(ranks: Ranks) -> str:
    """Writes one line for each token, base64 and id, as tiktoken reads it."""
    lines = (
        f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in sorted(ranks.items(), key=lambda i: i[1])
    )
    return "".join(lines)


def ranks_from_text(text: str) -> Ranks:
    """Reads text ranks. Raises ValueError for a line that is not base64 and an id."""
    ranks = {}
    for number, line in enumerate(text.splitlines(), 1):
        token, _, rank = line.partition(" ")
        try:
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (binascii.Error, ValueError):
            raise ValueError(f"line {number} is not base64 and an id") from None
    return ranks
