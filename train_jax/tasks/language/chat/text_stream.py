"""The text of a row as its tokens come: complete characters, up to the first of some strings."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from train_jax.tasks.language.chat.conversations import special_tokens
from train_jax.tasks.language.tokenizer import Tokenizer


class TokenText(NamedTuple):
    """A token of a text."""

    start: int
    """The number of characters before it."""
    bytes: bytes
    log_prob: float


class Piece(NamedTuple):
    """What a text grows by."""

    text: str
    tokens: list[TokenText]
    """The tokens that begin in it."""


class TextStream:
    """Decodes tokens to text. Text that may be the beginning of a stop string is held back until it is known."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        hidden: Mapping[int, int] | None = None,
        shown_as: Mapping[int, str] | None = None,
    ):
        """The text has no part of a stop string.

        Args:
          hidden: tokens that begin a part without text, with those that end it.
          shown_as: the text of some tokens, such as special ones; these are not among the tokens of a piece.
        """
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._hidden, self._shown_as = hidden or {}, shown_as or {}
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._text, self._sent = "", 0
        self._tokens: deque[TokenText] = deque()
        self._until: int | None = None
        self.stopped = False
        """Whether a stop string was found; what follows has no text."""

    def feed(self, tokens: Sequence[int], log_probs: Sequence[float]) -> Piece:
        """Returns the text that is known after further tokens."""
        for token, log_prob in zip(tokens, log_probs, strict=True):
            if not self.stopped and not self._hides(token):
                self._add(token, log_prob)
        return self._piece(len(self._text) - (0 if self.stopped else self._held()))

    def finish(self) -> Piece:
        """Returns the rest of the text."""
        if not self.stopped:
            self._end_character()
        return self._piece(len(self._text))

    def _hides(self, token: int) -> bool:
        if self._until is None:
            self._until = self._hidden.get(token)
            if self._until is None:
                return False
            self._end_character()
        elif token == self._until:
            self._until = None
        return True

    def _add(self, token: int, log_prob: float) -> None:
        shown = self._shown_as.get(token)
        if shown is not None:
            self._end_character()
            self._extend(shown)
            return
        content = self._tokenizer.bytes_of(token)
        self._tokens.append(TokenText(len(self._text), content, log_prob))
        self._extend(self._decoder.decode(content))

    def _end_character(self) -> None:
        self._extend(self._decoder.decode(b"", final=True))

    def _extend(self, text: str) -> None:
        before = len(self._text)
        self._text += text
        searched = max(0, before - max(map(len, self._stop), default=0) + 1)
        found = [place for stop in self._stop if (place := self._text.find(stop, searched)) >= 0]
        if found:
            self._text, self.stopped = self._text[: min(found)], True
            while self._tokens and self._tokens[-1].start >= len(self._text):
                self._tokens.pop()

    def _held(self) -> int:
        """Returns how many of the last characters may begin a stop string."""
        longest = max(map(len, self._stop), default=1) - 1
        ends = (self._text[-length:] for length in range(min(longest, len(self._text) - self._sent), 0, -1))
        return next((len(end) for end in ends if any(stop.startswith(end) for stop in self._stop)), 0)

    def _piece(self, end: int) -> Piece:
        text, self._sent, tokens = self._text[self._sent : end], max(end, self._sent), []
        while self._tokens and (self._tokens[0].start < end or self.stopped):
            tokens.append(self._tokens.popleft())
        return Piece(text, tokens)


def answer_stream(tokenizer: Tokenizer, stop: Sequence[str] = ()) -> TextStream:
    """Returns the stream of an assistant's message, without calls of tools, their outputs and special tokens."""
    special = special_tokens(tokenizer)
    hidden = {special[f"<|{name}_start|>"]: special[f"<|{name}_end|>"] for name in ("python", "output")}
    return TextStream(tokenizer, stop=stop, hidden=hidden, shown_as=dict.fromkeys(special.values(), ""))
