"""Measures a language model on problems: texts that it writes, and letters that it chooses."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import jax.numpy as jnp

from train_jax.errors import UserError
from train_jax.language.chat.calculator import answer_ends
from train_jax.language.chat.conversations import render_prompt
from train_jax.language.chat.problems import Problems
from train_jax.language.chat.text_stream import answer_stream
from train_jax.language.core_evaluation import Scorer
from train_jax.language.engine import Generation, Request
from train_jax.language.sampling import GREEDY, Sampling
from train_jax.language.tokenizer import Tokenizer
from train_jax.run.folder import write_text
from train_jax.run.restore import Restored


@dataclass(frozen=True, kw_only=True)
class Answering:
    """Settings by which a model answers generative problems."""

    num_samples: int = 1
    """Answers to each problem."""
    sampling: Sampling = field(default_factory=lambda: GREEDY)
    max_tokens: int = 256
    """Maximum number of tokens of an answer, including calls of the calculator and their outputs."""
    seed: int = 0


@dataclass(frozen=True)
class Score:
    """The verdicts on the answers to problems."""

    baseline: float
    """The accuracy of a random answer."""
    verdicts: Sequence[Sequence[bool]]
    """True for each right answer, by problem."""

    @property
    def accuracy(self) -> float:
        """The share of right answers."""
        return self.pass_at(1)

    @property
    def centered(self) -> float:
        """The accuracy on a scale on which a random answer has 0."""
        return (self.accuracy - self.baseline) / (1 - self.baseline)

    def pass_at(self, k: int) -> float:
        """Returns the probability that one of k answers is right, which are drawn from those of a problem.

        References:
          Chen et al., "Evaluating Large Language Models Trained on Code", 2021, https://arxiv.org/abs/2107.03374
        """
        wrong = [(len(each), len(each) - sum(each)) for each in self.verdicts]
        return sum(1 - math.comb(w, k) / math.comb(n, k) for n, w in wrong) / len(wrong)


def chat_core(scores: Iterable[Score]) -> float:
    """Returns the mean of the centered accuracies."""
    return mean(score.centered for score in scores)


# ---- texts


def answer_request(tokenizer: Tokenizer, problems: Problems, index: int, how: Answering, sample: int = 0) -> Request:
    """Returns the request for an answer, which ends with the message, or with a call if there is no calculator."""
    return Request(
        prompt=render_prompt(tokenizer, problems.conversation(index)[:-1]),
        max_tokens=how.max_tokens,
        sampling=how.sampling,
        seed=how.seed,
        sample=sample,
        **answer_ends(tokenizer, has_tool=problems.has_tool, functions=problems.functions),
    )


def answer_requests(tokenizer: Tokenizer, problems: Problems, how: Answering) -> list[Request]:
    """Returns the requests for all answers to the first problem, then for those to the second."""
    numbered = ((index, sample) for index in range(len(problems)) for sample in range(how.num_samples))
    return [answer_request(tokenizer, problems, index, how, sample) for index, sample in numbered]


def written_text(tokenizer: Tokenizer, tokens: Iterable[int]) -> str:
    """Returns the text of an assistant's message, without calls of tools, their outputs and special tokens."""
    stream = answer_stream(tokenizer)
    tokens = list(tokens)
    return stream.feed(tokens, [0.0] * len(tokens)).text + stream.finish().text


def generative_score(
    tokenizer: Tokenizer, problems: Problems, rows: Iterable[Generation], num_samples: int = 1
) -> Score:
    """Returns the verdicts on answers; those to a problem, `num_samples` of them, follow each other."""
    right = [
        problems.is_right(number // num_samples, written_text(tokenizer, row.tokens)) for number, row in enumerate(rows)
    ]
    return Score(problems.baseline, [right[first : first + num_samples] for first in range(0, len(right), num_samples)])


# ---- letters


def letter_tokens(tokenizer: Tokenizer, problems: Iterable[Problems]) -> dict[str, int]:
    """Returns the tokens of all letters that are answers, each with its place among the outputs of a scorer."""
    letters = {x for each in problems for index in range(len(each)) for x in each.problem(index).letters}
    tokens = {letter: tokenizer.encode(letter) for letter in sorted(letters)}
    for letter, ids in tokens.items():
        if len(ids) != 1:
            raise UserError(f"the answer {letter!r} has {len(ids)} tokens, expected one; use another tokenizer")
    return {letter: ids[0] for letter, ids in tokens.items()}


def logits_of(tokens: Sequence[int]) -> Callable[[Any, Any], tuple[Any, ...]]:
    """Returns the `outputs` of a `DeviceScorer` that are the logits of these tokens at each position."""

    def outputs(logits: Any, _: Any) -> tuple[Any, ...]:
        return (logits[..., jnp.asarray(tokens)].astype(jnp.float32),)

    return outputs


def categorical_score(
    scorer: Scorer, tokenizer: Tokenizer, problems: Problems, letters: Sequence[str], *, positions: int
) -> Score:
    """Lets the model choose a letter: the one with the largest logit after the question, among those of the problem.

    `scorer` returns the logits of `letters`. Longer questions are cut to their last `positions` tokens.
    """
    questions = (problems.conversation(index)[:-1] for index in range(len(problems)))
    prompts = [list(render_prompt(tokenizer, asked))[-positions:] for asked in questions]
    verdicts = []
    for index, (logits,) in enumerate(scorer(prompts)):
        possible = problems.problem(index).letters
        chosen = max(possible, key=lambda letter: logits[-1, letters.index(letter)])
        verdicts.append([problems.is_right(index, chosen)])
    return Score(problems.baseline, verdicts)


# ---- a run


def save_scores(run: Restored, scores: dict[str, Score]) -> None:
    """Writes the accuracies of a run, and their mean."""
    content = {"step": run.step, "chat_core": chat_core(scores.values()), "tasks": figures_of(scores)}
    write_text(run.folder.evaluation("chat"), json.dumps(content, indent=1))


def figures_of(scores: dict[str, Score]) -> dict[str, dict[str, float]]:
    """Returns the number of items, the accuracy, the centered accuracy and pass@k of each task."""

    def figures(score: Score) -> dict[str, float]:
        samples = len(score.verdicts[0])
        more = {
            f"pass@{k}": score.pass_at(k) for k in sorted({2**n for n in range(1, samples.bit_length())} | {samples})
        }
        values = {"items": len(score.verdicts), "accuracy": score.accuracy, "centered": score.centered}
        return values | ({} if samples == 1 else more)

    return {name: figures(score) for name, score in scores.items()}
