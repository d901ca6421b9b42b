"""A byte-level BPE tokenizer: encoding by tiktoken, stored as `tokenizer.json` and as text ranks.

Special tokens have ids after those of the merges. `encode` never returns one, whatever the text contains; a program
adds them by id. Training does not import tiktoken: it needs only the number of bytes of each token.
"""

from __future__ import annotations

import codecs
import hashlib
import importlib
import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from train_jax.errors import UserError
from train_jax.run.files import write_text
from train_jax.run.storage import path_of
from train_jax.run.untrusted import DamagedError, read_whole
from train_jax.tasks.language.byte_level import (
    Ranks,
    check_ranks,
    from_characters,
    merges_of,
    ranks_to_text,
    to_characters,
)

BOS = "<|bos|>"
SPECIAL_TOKENS = (
    BOS, "<|user_start|>", "<|user_end|>", "<|assistant_start|>", "<|assistant_end|>", "<|python_start|>",
    "<|python_end|>", "<|output_start|>", "<|output_end|>",
)  # fmt: skip
"""The special tokens of nanochat, in the order of their ids."""

SPLIT_PATTERN = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"""
)
"""The pattern of GPT-4 with at most two digits in a piece, as in nanochat. Merges do not cross pieces."""

JSON_NAME = "tokenizer.json"
RANKS_NAME = "tokenizer.tiktoken"
_LARGEST_BYTES = 2**28


def text_package(name: str) -> Any:
    """Imports a package of the extra `text`. Raises `UserError` if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise UserError(
            f"this command needs the package {package}; install it with `pip install 'trm-bridge[text]'`"
        ) from None


class Tokenizer:
    """Converts text to token ids and back."""

    def __init__(self, ranks: Ranks, pattern: str = SPLIT_PATTERN, specials: Sequence[str] = SPECIAL_TOKENS):
        """Raises ValueError if the ids are not 0, 1, 2, … with a token for every byte."""
        check_ranks(ranks)
        self.ranks, self.pattern = ranks, pattern
        self.specials = {name: len(ranks) + number for number, name in enumerate(specials)}

    @property
    def vocab_size(self) -> int:
        """Number of tokens, including special ones."""
        return len(self.ranks) + len(self.specials)

    @property
    def bos(self) -> int:
        """The id of the token that begins every document."""
        return self.specials[BOS]

    @cached_property
    def token_bytes(self) -> np.ndarray:
        """The number of bytes of each token, int32; 0 for special tokens."""
        sizes = np.zeros(self.vocab_size, np.int32)
        for token, rank in self.ranks.items():
            sizes[rank] = len(token)
        return sizes

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without special tokens. Raises ValueError for a text that UTF-8 cannot encode."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str], threads: int = 1) -> list[list[int]]:
        """Encodes several texts in parallel."""
        for text in texts:
            text.encode()  # tiktoken replaces lone surrogates without an error
        return self._encoding.encode_ordinary_batch(list(texts), num_threads=threads)

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of the ids; special tokens appear as their names, incomplete characters as U+FFFD."""
        return b"".join(self._tokens[number] for number in ids).decode("utf-8", errors="replace")

    def bytes_of(self, number: int) -> bytes:
        """Returns the bytes of one token, which may be a part of a character."""
        return self._tokens[number]

    def decode_stream(self, ids: Iterable[int]) -> Iterator[str]:
        """Yields the text of the ids as they come; a character appears when its last byte is there."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for number in ids:
            yield decoder.decode(self._tokens[number])
        yield decoder.decode(b"", final=True)

    @cached_property
    def _tokens(self) -> list[bytes]:
        return [*sorted(self.ranks, key=self.ranks.__getitem__), *(name.encode() for name in self.specials)]

    @cached_property
    def _encoding(self) -> Any:
        tiktoken = text_package("tiktoken")
        return tiktoken.Encoding("trm", pat_str=self.pattern, mergeable_ranks=self.ranks, special_tokens={})

    # ---- files

    def to_json(self) -> str:
        """Returns the content of `tokenizer.json`, in the format of the library `tokenizers`."""
        return json.dumps(_json_of(self), ensure_ascii=False, indent=1)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def save(self, folder: Path) -> None:
        """Writes `tokenizer.json`, which `load` reads, and the text ranks for programs that use tiktoken."""
        write_text(folder / JSON_NAME, self.to_json())
        write_text(folder / RANKS_NAME, ranks_to_text(self.ranks))

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Reads the tokenizer of a folder. Raises `UserError` if there is none, or none of this kind."""
        path = path_of(folder) / JSON_NAME
        try:
            content = json.loads(read_whole(path, largest_bytes=_LARGEST_BYTES))
            return _from_json(content)
        except FileNotFoundError:
            raise UserError(f"{path} does not exist; write it with `trm tokenizer train`") from None
        except (DamagedError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            reason = " ".join(f"{error}".split())[:100]
            raise UserError(
                f"{path} is not a byte-level BPE tokenizer of `trm tokenizer train` ({reason}); write it again"
            ) from None


def _json_of(tokenizer: Tokenizer) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    split = {"type": "Split", "pattern": {"Regex": tokenizer.pattern}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    by_rank = sorted(tokenizer.ranks.items(), key=lambda item: item[1])
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": number, "content": name, **flags} for name, number in tokenizer.specials.items()],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {to_characters(token): rank for token, rank in by_rank},
            "merges": [[to_characters(part) for part in pair] for pair in merges_of(tokenizer.ranks)],
        },
    }


def _from_json(content: Any) -> Tokenizer:
    """Raises ValueError, KeyError, TypeError or AttributeError for another kind of tokenizer."""
    split = content["pre_tokenizer"]["pretokenizers"][0]
    ranks = {from_characters(text): rank for text, rank in content["model"]["vocab"].items()}
    specials = sorted(content["added_tokens"], key=lambda token: token["id"])
    tokenizer = Tokenizer(ranks, str(split["pattern"]["Regex"]), [str(token["content"]) for token in specials])
    if _json_of(tokenizer) != content:
        raise ValueError("its merges, ids or options differ")
    if BOS not in tokenizer.specials:
        raise ValueError(f"it has no {BOS}")
    return tokenizer
