"""Prompts of a generation: read from files, encoded, with the sizes of the programs that continue them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from train_jax.errors import UserError, brief
from train_jax.run.storage import path_of
from train_jax.run.untrusted import DamagedError, read_whole
from train_jax.tasks.language.generation import Row, Sizes
from train_jax.tasks.language.tokenizer import Tokenizer

_LARGEST_BYTES = 2**30
_PADDED_TO = 16
"""Prompts are padded to a multiple of this many tokens, so that similar commands use the same compiled programs."""


@dataclass(frozen=True)
class Prompts:
    """Texts, and the rows of all their samples: the samples of the first text, then those of the second."""

    texts: list[str]
    rows: list[Row]

    def sizes(self, *, max_tokens: int, batch_size: int, devices: int, positions: int) -> Sizes:
        """Returns the sizes of the programs for `max_tokens` tokens after each prompt.

        A batch has at most `batch_size` rows, but at least one on every device. Raises `UserError` if a model of so
        many positions is too short.
        """
        longest = max(len(row.prompt) for row in self.rows)
        if longest + max_tokens > positions + 1:  # the last token is no input
            raise UserError(
                f"a prompt of {longest} tokens and --max-tokens {max_tokens} need {longest + max_tokens - 1} "
                f"positions, the model has {positions}; use {_remedy(positions + 1 - longest)}"
            )
        rows = min(len(self.rows), max(batch_size, devices))
        padded = min(-(-longest // _PADDED_TO) * _PADDED_TO, positions)
        return Sizes(-(-rows // devices) * devices, padded, max_tokens, min(padded + max_tokens, positions))


def _remedy(most: int) -> str:
    return f"at most --max-tokens {most}" if most > 0 else "a shorter prompt"


def encode_prompts(tokenizer: Tokenizer, texts: list[str], num_samples: int) -> Prompts:
    """Returns the rows of `num_samples` samples of each text, which follows <|bos|>.

    Raises `UserError` for a text that is not valid UTF-8.
    """
    try:
        encoded = tokenizer.encode_batch(texts)
    except UnicodeEncodeError:
        raise UserError("a prompt is not valid UTF-8; correct it") from None
    prompts = [(tokenizer.bos, *tokens) for tokens in encoded]
    return Prompts(texts, [Row(prompt, sample) for prompt in prompts for sample in range(num_samples)])


def read_prompts(where: str) -> Sequence[str]:
    """Reads a file: a prompt on each line that is not empty, or in .jsonl, the field "prompt" of each object.

    Raises `UserError` if it cannot be read.
    """
    path = path_of(where)
    try:
        lines = read_whole(path, largest_bytes=_LARGEST_BYTES).decode("utf-8-sig").replace("\r\n", "\n").split("\n")
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; give a text or .jsonl file with prompts") from None
    except (DamagedError, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}); give a text or .jsonl file in UTF-8") from None
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if path.suffix != ".jsonl":
        return [line for _, line in numbered]
    return [_prompt_of(line, f"{path} line {number}") for number, line in numbered]


def _prompt_of(line: str, place: str) -> str:
    try:
        record: Any = json.loads(line)
        prompt = record["prompt"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f'{place} is {brief(line)}; expected an object such as {{"prompt": "text"}}') from None
    if not isinstance(prompt, str):
        raise UserError(f"{place} has the prompt {brief(prompt)}; expected text")
    return prompt
