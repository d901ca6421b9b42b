"""Problems of the package `reasoning-gym`, which generates them and judges answers."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Sequence
from random import Random
from typing import Any, ClassVar

from train_jax.errors import UserError, pip_install
from train_jax.language.chat.problems import Problem, Problems, said, split_of

_EVALUATES = re.compile(r"\b(?:eval|exec|compile|parse_expr)\(|\bsympy\b")
"""Text in the file of a data set whose verifier may execute what the model wrote."""
_MISSES = 1000


class ReasoningGym(Problems):
    """Problems of one data set of the package, whose verifier says what is right.

    Where the file of the data set evaluates expressions, an answer is right only if it is the package's own.
    """

    name = "reasoning-gym"
    license = "reasoning-gym (Apache-2.0)"
    OPTIONS: ClassVar[dict[str, Any]] = {"set": "chain_sum"}
    takes_any_option = True

    def items(self, count: int | None) -> Sequence[dict[str, Any]]:
        wanted = 1000 if count is None else count
        self._data = self._open(16 * wanted + _MISSES)
        self._executes = bool(_EVALUATES.search(inspect.getsource(inspect.getmodule(type(self._data)) or type(self))))
        items: dict[str, dict[str, Any]] = {}
        misses = 0
        for number in range(len(self._data)):
            item = self._data[number]
            asked = item["question"]
            misses = misses + 1 if asked in items or split_of(asked) != self.split else 0
            if len(items) >= wanted or misses > _MISSES:
                break
            if not misses:
                items[asked] = item
        return list(items.values())

    def _open(self, size: int) -> Any:
        """Raises `UserError` without the package, and for what it does not know."""
        try:
            gym = importlib.import_module("reasoning_gym")
        except ImportError:
            raise UserError(f"{self.name} needs its package; run {pip_install('reasoning')}") from None
        options = dict(self.options)
        name = options.pop("set")
        try:
            return gym.create_dataset(name, seed=self.seed % 2**31, size=size, **options)
        except (ValueError, TypeError, AssertionError) as error:
            reason = " ".join(f"{error}".split())[:200]
            raise UserError(f"{self.name},set={name} cannot be made ({reason}); correct its options") from None

    def make(self, item: dict[str, Any], rng: Random) -> Problem:
        return said(item["question"], str(item["answer"]))

    def is_right(self, index: int, answer_text: str) -> bool:
        item = self._items[index % len(self._items)]
        text = answer_text.strip()
        if text == str(item["answer"]).strip() or self._executes:
            return text == str(item["answer"]).strip()
        try:
            return float(self._data.score_answer(text, item)) >= 1
        except Exception:  # a verifier that fails on a text that no answer has
            return False
