"""What is added to the logits of a row before its next token is chosen, computed on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from jaxtyping import Float

FORBIDDEN = -np.inf


class Bias(Protocol):
    """A function of the tokens that a row has written.

    The host computes it before each token if it `changes`, so that such a row has one token in a dispatch, beside rows
    that have several.
    """

    @property
    def changes(self) -> bool: ...

    def logits_after(self, tokens: Sequence[int]) -> Float[np.ndarray, " vocab_size"]:
        """Returns what is added to the logits of the token after these; called for longer and longer lists."""
        ...

    def forced_after(self, tokens: Sequence[int]) -> Sequence[int]:
        """Returns the tokens that follow whatever the model says; they cost no dispatch of their own."""
        ...


class TokenBias:
    """A bias of some tokens, and penalties for those that were written; the form of OpenAI."""

    def __init__(self, vocab_size: int, biases: Mapping[int, float], *, presence: float = 0.0, frequency: float = 0.0):
        """`presence` is subtracted once for a token that was written, `frequency` for each time."""
        self._fixed = np.zeros(vocab_size, np.float32)
        for token, bias in biases.items():
            self._fixed[token] = bias
        self._presence = presence
        self._frequency = frequency

    @property
    def changes(self) -> bool:
        return self._presence != 0 or self._frequency != 0

    def logits_after(self, tokens: Sequence[int]) -> Float[np.ndarray, " vocab_size"]:
        if not self.changes:
            return self._fixed
        counts = np.bincount(np.asarray(tokens, np.int64), minlength=len(self._fixed))
        return (self._fixed - self._presence * (counts > 0) - self._frequency * counts).astype(np.float32)

    def forced_after(self, tokens: Sequence[int]) -> Sequence[int]:
        return ()


class JointBias:
    """The sum of several biases; the first one decides which tokens are forced."""

    changes = True

    def __init__(self, first: Bias, *others: Bias):
        self._first = first
        self._others = others

    def logits_after(self, tokens: Sequence[int]) -> Float[np.ndarray, " vocab_size"]:
        total = self._first.logits_after(tokens)
        for other in self._others:
            total = total + other.logits_after(tokens)
        return total

    def forced_after(self, tokens: Sequence[int]) -> Sequence[int]:
        return self._first.forced_after(tokens)
