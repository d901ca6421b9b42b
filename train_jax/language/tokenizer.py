"""A byte-level BPE tokenizer: encoding by tiktoken, training by rustbpe, `tokenizer.json` and text ranks.

Special tokens have ids after those of the merges. `encode` never returns one, whatever the text contains; a program
adds them by id. Training a model does not import tiktoken: it needs only the number of bytes of each token.
"""

from __future__ import annotations

import base64
import codecs
import hashlib
import importlib
import importlib.util
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from train_jax.errors import UserError, pip_install
from train_jax.storage.files import write_text
from train_jax.storage.storage import path_of
from train_jax.storage.untrusted import DamagedError, read_whole

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
_BLANK = re.compile(r"\s+")
_LONGEST_BLANK = 500_000
"""The regular expressions of tiktoken and rustbpe abort at about a million blank characters in a row."""
_LARGEST_BYTES = 2**28
_DOCUMENTS_AT_ONCE = 64

Ranks = dict[bytes, int]
"""Maps the bytes of a token to its id; a pair of tokens merges before another if the id of the result is lower."""


def text_package(name: str) -> Any:
    """Imports a package of the extra `text`. Raises `UserError` if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise UserError(f"this command needs the package {package}; install it with {pip_install('text')}") from None


@dataclass(frozen=True)
class InstructionForm:
    """The special tokens of an instruction and its response."""

    begin: tuple[int, ...]
    end: int
    stop: int
    """Id of the token that ends the response."""

    def prompt(self, tokens: Iterable[int]) -> tuple[int, ...]:
        """Returns the tokens that precede the response."""
        return (*self.begin, *tokens, self.end)


class Tokenizer:
    """Converts text to token ids and back."""

    instructions: InstructionForm | None = None
    """The form of a prompt for a model that was trained on instructions and reads prompts in both directions."""

    def __init__(self, ranks: Ranks, pattern: str = SPLIT_PATTERN, specials: Sequence[str] = SPECIAL_TOKENS):
        """Raises ValueError if the ids are not 0, 1, 2, … with a token for every byte."""
        check_ranks(ranks)
        self.ranks = ranks
        self.pattern = pattern
        self.specials = {name: len(ranks) + number for number, name in enumerate(specials)}

    @property
    def vocab_size(self) -> int:
        """Number of tokens, including special ones."""
        return len(self.ranks) + len(self.specials)

    @property
    def bos(self) -> int:
        """The id of the token that begins every document. Raises `UserError` if there is none."""
        if BOS not in self.specials:
            raise UserError(f"the tokenizer has no token {BOS}; use one of `trm tokenizer train`")
        return self.specials[BOS]

    @property
    def stop(self) -> int:
        """The id of the token that ends a text."""
        return self.instructions.stop if self.instructions else self.bos

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
        """Encodes several texts in parallel. Raises `UserError` for a text that tiktoken cannot split."""
        for text in texts:
            text.encode()  # tiktoken replaces lone surrogates without an error
            _check_blanks(text)
        return self._encoding.encode_ordinary_batch(list(texts), num_threads=threads)

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of the ids; special tokens appear as their names, incomplete characters as U+FFFD."""
        return b"".join(self._tokens[number] for number in ids).decode("utf-8", errors="replace")

    def bytes_of(self, number: int) -> bytes:
        """Returns the bytes of one token, which may be a part of a character."""
        return self._tokens[number]

    def decode_stream(self, ids: Iterable[int]) -> Iterator[str]:
        """Yields the text of the ids as they come; a character appears once its last byte has come."""
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
        """Reads the tokenizer of a folder. Raises `UserError` if there is none, or only one of another kind."""
        path = path_of(folder) / JSON_NAME
        try:
            content = json.loads(read_whole(path, largest_bytes=_LARGEST_BYTES))
            return _from_json(content)
        except FileNotFoundError:
            raise UserError(f"{path} does not exist; give its folder, or write it with `trm tokenizer train`") from None
        except (DamagedError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            reason = " ".join(f"{error}".split())[:100]
            raise UserError(
                f"{path} is not a byte-level BPE tokenizer of `trm tokenizer train` ({reason}); write it again"
            ) from None


def _check_blanks(text: str) -> str:
    """Returns the text. Raises `UserError` for one that tiktoken and rustbpe cannot split."""
    if len(text) > _LONGEST_BLANK and max(map(len, _BLANK.findall(text)), default=0) > _LONGEST_BLANK:
        raise UserError(f"a text has more than {_LONGEST_BLANK:,} blank characters in a row; remove some")
    return text


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
    """Returns the tokenizer. Raises ValueError, KeyError, TypeError or AttributeError for another kind of tokenizer."""
    split = content["pre_tokenizer"]["pretokenizers"][0]
    ranks = {from_characters(text): rank for text, rank in content["model"]["vocab"].items()}
    specials = sorted(content["added_tokens"], key=lambda token: token["id"])
    tokenizer = Tokenizer(ranks, str(split["pattern"]["Regex"]), [str(token["content"]) for token in specials])
    if _json_of(tokenizer) != content:
        raise ValueError("its merges, ids or options differ")
    return tokenizer


# ---- training and evaluation


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Returns a tokenizer with `vocab_size` tokens, including the special ones.

    Raises `UserError` if the texts have too few different pairs for that many tokens.
    """
    smallest = 256 + len(SPECIAL_TOKENS)
    if vocab_size < smallest:
        raise UserError(f"--vocab-size is {vocab_size}; use at least {smallest}")
    trainer = text_package("rustbpe").Tokenizer()
    trainer.train_from_iterator(map(_check_blanks, texts), vocab_size - len(SPECIAL_TOKENS), pattern=SPLIT_PATTERN)
    tokenizer = Tokenizer({bytes(token): rank for token, rank in trainer.get_mergeable_ranks()})
    if tokenizer.vocab_size != vocab_size:
        raise UserError(
            f"the texts give only {tokenizer.vocab_size} tokens, --vocab-size is {vocab_size}; use more text "
            f"(whole documents are held out, and a .txt file is one) or at most --vocab-size {tokenizer.vocab_size}"
        )
    return tokenizer


SAMPLES = {
    "English": "All human beings are born free and equal in dignity and rights. They are endowed with reason and "
    "conscience and should act towards one another in a spirit of brotherhood.",
    "Korean": "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다. 인간은 천부적으로 이성과 "
    "양심을 부여받았으며 서로 형제애의 정신으로 행동하여야 한다.",
    "Python": "def divisors(number: int) -> list[int]:\n    return [n for n in range(1, number + 1) if not number % n]"
    '\n\n\nif __name__ == "__main__":\n    print(divisors(360))\n',
    "LaTeX": r"\begin{theorem} For every $x \in \mathbb{R}$ and $n \ge 1$, \[ \left| \sin(nx) \right| \le n \left| "
    r"\sin x \right|, \qquad \lim_{x \to 0} \frac{\sin(nx)}{\sin x} = n. \] \end{theorem}",
}
"""Short texts of a few kinds; the first two are article 1 of the Universal Declaration of Human Rights."""

Encode = Callable[[str], list[int]]


@dataclass
class TextFigures:
    """Sums over the texts of a split or of another kind."""

    documents: int = 0
    bytes: int = 0
    tokens: int = 0
    not_restored: int = 0
    """Documents that differ from their decoded tokens."""
    not_equal: int = 0
    """Documents with other tokens by `tokenizer.json`."""


def measure(tokenizer: Tokenizer, documents: Iterable[tuple[str, str]]) -> tuple[dict[str, TextFigures], bool]:
    """Returns the figures of each kind of text, and whether `tokenizer.json` was compared."""
    figures: dict[str, TextFigures] = {}
    reference = _reference(tokenizer)
    documents = iter(documents)
    while part := list(itertools.islice(documents, _DOCUMENTS_AT_ONCE)):
        encoded = tokenizer.encode_batch([text for _, text in part])
        for (kind, text), ids in zip(part, encoded, strict=True):
            of_kind = figures.setdefault(kind, TextFigures())
            of_kind.documents += 1
            of_kind.bytes += len(text.encode())
            of_kind.tokens += len(ids)
            of_kind.not_restored += tokenizer.decode(ids) != text
            of_kind.not_equal += reference is not None and reference(text) != ids
    return figures, reference is not None


def _reference(tokenizer: Tokenizer) -> Encode | None:
    if importlib.util.find_spec("tokenizers") is None:
        return None
    other: Any = text_package("tokenizers").Tokenizer.from_str(tokenizer.to_json())
    other.encode_special_tokens = True  # special tokens in a text are text
    return lambda text: other.encode(text, add_special_tokens=False).ids


# ---- bytes, merges and ranks


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


def check_ranks(ranks: Ranks) -> None:
    """Raises ValueError unless all 256 bytes are tokens and the ids are 0, 1, 2, …"""
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise ValueError(f"byte {missing[0]} is not a token")
    if any(type(rank) is not int for rank in ranks.values()) or sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(f"the ids of {len(ranks)} tokens are not 0 to {len(ranks) - 1}")


def ranks_to_text(ranks: Ranks) -> str:
    """Writes one line for each token, base64 and id, as tiktoken reads it."""
    by_rank = sorted(ranks.items(), key=lambda item: item[1])
    return "".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in by_rank)
