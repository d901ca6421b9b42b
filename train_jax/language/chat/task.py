"""A chat run: a language model that is asked problems while it is trained on conversations."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from functools import cached_property
from statistics import mean
from typing import Annotated, Any

from models_torch.ranges import Range
from train_jax.core.objective import Objective
from train_jax.core.state import Arrays, TrainState
from train_jax.errors import UserError
from train_jax.language.chat.conversations import render_prompt, special_tokens
from train_jax.language.chat.evaluation import Answering, Score, answer_requests, chat_core, generative_score
from train_jax.language.chat.problems import Problems
from train_jax.language.chat.task_names import task_name
from train_jax.language.engine import Engine, Generation, Request
from train_jax.language.generation import cache_positions
from train_jax.language.sampling import Sampling
from train_jax.language.task import LanguageConfig, LanguageTask
from train_jax.run.config import RunConfig
from train_jax.run.model import build_module
from train_jax.runtime.devices import Devices
from train_jax.task import Evaluation, Periodic


@dataclasses.dataclass(frozen=True)
class ChatConfig(LanguageConfig):
    """Problems that are asked during training."""

    eval_problems: str = ""
    """Problems of the test split that the model is asked during training, named as for `trm chat-eval --tasks` and
    separated by spaces."""
    problems_every_steps: Annotated[int, Range(0, 10**9)] = 20
    """Steps between these evaluations; 0 for the one at the end alone."""
    problems_limit: Annotated[int, Range(1, 10**9)] = 256
    """Problems of each name in these evaluations; the one at the end has all."""
    problems_samples: Annotated[int, Range(1, 10**4)] = 1
    """Answers to each problem in these evaluations. Several are drawn at temperature 1, and there is also pass@k."""
    max_tokens: Annotated[int, Range(1, 10**6)] = 64
    """Tokens of an answer, at most."""


class ChatTask(LanguageTask):
    """Conversations, and problems that the model is asked."""

    config_class = ChatConfig
    evaluated = (*LanguageTask.evaluated, "problems/accuracy")

    def __init__(self, config: RunConfig, facts: dict[str, Any] | None = None):
        super().__init__(config, facts)
        self.fields: ChatConfig = config.task_config  # pyright: ignore[reportAttributeAccessIssue]
        self._is_compiled = False

    @property
    def asked(self) -> tuple[str, ...]:
        """The names of the problems that are asked during training."""
        return tuple(self.fields.eval_problems.split())

    @property
    def slots(self) -> int:
        """The number of answers that are written at the same time."""
        return self.config.eval_batch_size

    def check(self, config: RunConfig, devices: Devices) -> None:
        super().check(config, devices)
        self.check_problems()

    def check_problems(self) -> None:
        """Raises `UserError` for problems that cannot be asked."""
        for text in self.asked:
            problems = task_name(text).problems
            if problems.kind == "dialogue" or problems.runs_code:
                reason = "runs programs that the model writes" if problems.runs_code else "has no right answers"
                raise UserError(f"{text} {reason} and is not asked during training; name other problems")
        if self.asked:
            _ = self.engine

    # ---- answers

    @cached_property
    def tokenizer(self) -> Any:
        return self.data.tokenizer()

    def opened(self) -> list[Problems]:
        """Returns all problems that can be asked, of every split."""
        return [self.test_problems(text) for text in self.asked]

    def test_problems(self, text: str, count: int | None = None) -> Problems:
        return task_name(text).open("test", seed=self.config.seed, count=count)

    @cached_property
    def question_lengths(self) -> set[int]:
        """The numbers of tokens of all questions."""
        special_tokens(self.tokenizer)
        questions = (each.conversation(index)[:-1] for each in self.opened() for index in range(len(each)))
        return {len(render_prompt(self.tokenizer, each)) for each in questions}

    @cached_property
    def answer_capacity(self) -> int:
        """The positions of the longest question with an answer, at most those of a row; the last token is no input.

        Raises `UserError` for a question that is longer than a row.
        """
        longest = max(self.question_lengths)
        length = self.config.arch.seq_len
        if longest > length:
            raise UserError(f"a problem has {longest} tokens and arch.seq_len is {length}; use a longer one")
        return min(length, longest + self.fields.max_tokens - 1)

    @cached_property
    def engine(self) -> Engine:
        """Raises `UserError` for a model without a cache."""
        module = build_module(self.config, self, 1)
        capacity = min(self.answer_capacity, cache_positions(module, self.config.model))
        return Engine(module, Devices(runner=self.config.compute.runner), slots=self.slots, capacity=capacity)

    def load(self, params: Arrays, buffers: Arrays) -> None:
        """Gives the engine its weights; the first time, compiles its programs for all questions."""
        self.engine.load(params, buffers)
        if not self._is_compiled:
            self._is_compiled = True
            self.engine.warm_up(self.question_lengths)
            self.engine.load(params, buffers)  # forgets the prompts

    def answers(self, requests: Iterable[Request]) -> Iterator[Generation]:
        """Yields the answers to requests, with at most as many tokens as the engine holds."""
        capacity = self.answer_capacity

        def within(request: Request) -> Request:
            room = capacity + 1 - len(request.prompt)
            return dataclasses.replace(request, max_tokens=min(request.max_tokens, room))

        return self.engine.complete(map(within, requests))

    # ---- evaluation

    @property
    def eval_sampling(self) -> Sampling:
        """Settings of an evaluation: greedy, if there is one answer to each problem."""
        return Sampling(temperature=0.0 if self.fields.problems_samples == 1 else 1.0)

    def evaluate_problems(self, state: TrainState, *, limit: int = 0, metrics_only: bool = False) -> Evaluation:
        """Returns the share of right answers to the problems of the test split, and ChatCORE.

        With several names, `accuracy` and pass@k are their means. Every answer is a text, also if it is a letter.
        """
        self.load(state.eval_params, state.buffers)
        samples = self.fields.problems_samples
        how = Answering(num_samples=samples, sampling=self.eval_sampling, max_tokens=self.fields.max_tokens)
        scores: dict[str, Score] = {}
        for text in self.asked:
            problems = self.test_problems(text, limit or None)
            rows = self.answers(answer_requests(self.tokenizer, problems, how))
            scores[text] = generative_score(self.tokenizer, problems, rows, samples)
        each = scores.values()
        metrics = {"accuracy": mean(score.accuracy for score in each), "chat_core": chat_core(each)}
        metrics |= {f"pass@{samples}": mean(score.pass_at(samples) for score in each)} if samples > 1 else {}
        metrics["count"] = float(sum(len(score.verdicts) for score in each))
        names = {name: score.accuracy for name, score in scores.items()}
        return Evaluation(metrics | (names if len(names) > 1 else {}))

    def evaluations(self, objective: Objective, devices: Devices) -> list[Periodic]:
        """Returns the evaluation of the text, and of the problems."""
        text = list(super().evaluations(objective, devices))
        fields = self.fields
        asked = Periodic(self.evaluate_problems, fields.problems_every_steps, "problems", fields.problems_limit)
        return [*text, asked] if self.asked else text
