"""The text of a row as its tokens come, and parts that are no text, such as the calls of a tool.

Text has complete characters, up to the first of some strings.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from train_jax.language.chat.conversations import Part, PartType, special_tokens
from train_jax.language.tokenizer import Tokenizer


class TokenText(NamedTuple):
    """A token of a text."""

    start: int
    """The number of characters before it."""
    bytes: bytes
    log_prob: float | None
    """None for a first token, which follows no other."""
    most_probable: Sequence[tuple[bytes, float]] = ()
    """The most probable tokens in its place with their log-probabilities."""


class Piece(NamedTuple):
    """A piece by which a text grows."""

    parts: list[Part]
    """The parts in their order; a part that stands apart is whole."""
    tokens: list[TokenText]
    """The tokens of the text that begin in it."""

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if part.type == "text")


def joined(pieces: Iterable[Piece]) -> Piece:
    """Returns pieces that follow each other as one."""
    parts: list[Part] = []
    tokens: list[TokenText] = []
    for piece in pieces:
        tokens += piece.tokens
        for part in piece.parts:
            if parts and parts[-1].type == part.type == "text":
                part = Part("text", parts.pop().text + part.text)
            parts.append(part)
    return Piece(parts, tokens)


class Apart(NamedTuple):
    """Tokens that are not text."""

    end: int
    """The token that ends them."""
    type: PartType


class TextStream:
    """Decodes tokens to text. Text that may be the beginning of a stop string is held back until it is known."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        apart: Mapping[int, Apart] | None = None,
        shown_as: Mapping[int, str] | None = None,
    ):
        """The text has no part of a stop string.

        Args:
          apart: tokens that begin a part that is no text.
          shown_as: the text of some tokens, such as special ones; these are not among the tokens of a piece.
        """
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._kinds = apart or {}
        self._shown_as = shown_as or {}
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._text = ""
        self._sent = 0
        self._tokens: deque[TokenText] = deque()
        self._inside: Apart | None = None
        self._content = b""
        self._apart: deque[tuple[int, Part]] = deque()
        """The parts that are no text, with the number of characters before them."""
        self._ended = False
        self.stopped = False
        """True if a stop string was found; what follows has no text."""

    def feed(
        self,
        tokens: Sequence[int],
        log_probs: Sequence[float | None],
        most_probable: Sequence[Sequence[tuple[int, float]]] = (),
    ) -> Piece:
        """Returns the text that is known after further tokens."""
        for token, log_prob, top in zip(tokens, log_probs, most_probable or [()] * len(tokens), strict=True):
            if not self.stopped and not self._is_apart(token):
                self._add(token, log_prob, top)
        return self._piece(len(self._text) - (0 if self.stopped else self._held()))

    def end_token(self, log_prob: float, top: Sequence[tuple[int, float]]) -> None:
        """Adds the token that ended the text, which has no text."""
        most_probable = [(self._tokenizer.bytes_of(each), other) for each, other in top]
        self._tokens.append(TokenText(len(self._text), b"", log_prob, most_probable))
        self._ended = True

    def finish(self) -> Piece:
        """Returns the rest of the text."""
        if not self.stopped:
            self._end_character()
            self._end_apart()
        return self._piece(len(self._text))

    def _is_apart(self, token: int) -> bool:
        if self._inside is None:
            self._inside = self._kinds.get(token)
            if self._inside is None:
                return False
            self._end_character()
        elif token == self._inside.end:
            self._end_apart()
        else:
            self._content += self._tokenizer.bytes_of(token)
        return True

    def _end_apart(self) -> None:
        if self._inside is not None:
            part = Part(self._inside.type, self._content.decode("utf-8", errors="replace"))
            self._apart.append((len(self._text), part))
            self._inside = None
            self._content = b""

    def _add(self, token: int, log_prob: float | None, top: Sequence[tuple[int, float]]) -> None:
        shown = self._shown_as.get(token)
        if shown is not None:
            self._end_character()
            self._extend(shown)
            return
        content = self._tokenizer.bytes_of(token)
        most_probable = [(self._tokenizer.bytes_of(each), other) for each, other in top]
        self._tokens.append(TokenText(len(self._text), content, log_prob, most_probable))
        self._extend(self._decoder.decode(content))

    def _end_character(self) -> None:
        self._extend(self._decoder.decode(b"", final=True))

    def _extend(self, text: str) -> None:
        before = len(self._text)
        self._text += text
        searched = max(0, before - max(map(len, self._stop), default=0) + 1)
        found = [place for stop in self._stop if (place := self._text.find(stop, searched)) >= 0]
        if found:
            self._text = self._text[: min(found)]
            self.stopped = True
            while self._tokens and self._tokens[-1].start >= len(self._text):
                self._tokens.pop()

    def _held(self) -> int:
        """Returns how many of the last characters may begin a stop string."""
        longest = max(map(len, self._stop), default=1) - 1
        ends = (self._text[-length:] for length in range(min(longest, len(self._text) - self._sent), 0, -1))
        return next((len(end) for end in ends if any(stop.startswith(end) for stop in self._stop)), 0)

    def _piece(self, end: int) -> Piece:
        parts: list[Part] = []
        while self._apart and self._apart[0][0] <= end:
            place, part = self._apart.popleft()
            parts += [*self._text_until(place), part]
        parts += self._text_until(end)
        tokens = []
        while self._tokens and (self._tokens[0].start < end or self.stopped or self._ended):
            tokens.append(self._tokens.popleft())
        return Piece(parts, tokens)

    def _text_until(self, end: int) -> list[Part]:
        text = self._text[self._sent : end]
        self._sent = max(end, self._sent)
        return [Part("text", text)] if text else []


def answer_stream(tokenizer: Tokenizer, stop: Sequence[str] = ()) -> TextStream:
    """Returns the stream of an assistant's message: calls of tools and their outputs stand apart from its text.

    A response to an instruction has none.
    """
    special = tokenizer.specials if tokenizer.instructions else special_tokens(tokenizer)
    names: dict[str, PartType] = {} if tokenizer.instructions else {"python": "python", "output": "python_output"}
    apart = {special[f"<|{name}_start|>"]: Apart(special[f"<|{name}_end|>"], kind) for name, kind in names.items()}
    return TextStream(tokenizer, stop=stop, apart=apart, shown_as=dict.fromkeys(special.values(), ""))
