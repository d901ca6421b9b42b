"""Texts that a language model writes: prompts, the model of a run, and the samples of an evaluation."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from models_torch.hrm_text import HRMTextConfig
from models_torch.kv_cache import positions_of
from train_jax.core.objective import Objective
from train_jax.core.state import TrainState
from train_jax.errors import UserError, brief
from train_jax.language.commands import Sample, write_samples
from train_jax.language.engine import Engine, Generation, Request
from train_jax.language.instructions.prompts import instruction_tokenizer
from train_jax.language.instructions.task import InstructionTask
from train_jax.language.sampling import Sampling
from train_jax.language.task import language_task
from train_jax.language.text_set import TextSet, TokenStream
from train_jax.language.tokenizer import Tokenizer
from train_jax.run.folder import RunFolder
from train_jax.run.mixing import data_dirs
from train_jax.run.restore import Restored
from train_jax.runtime.devices import Devices
from train_jax.storage.storage import path_of
from train_jax.storage.untrusted import DamagedError, read_whole
from train_jax.task import Evaluation

_LARGEST_BYTES = 2**30
_CAPACITY_MULTIPLE = 16
"""Capacities are multiples of this number, so that similar commands use the same compiled programs."""
_DOCUMENTS = 4
_WITHOUT_PROMPT = 2
_PROMPT_TOKENS = 32
_NEW_TOKENS = 96
_SEARCHED_TOKENS = 2**22
"""Largest number of tokens that are searched for the samples of an evaluation."""


# ---- prompts


def encode_prompts(tokenizer: Tokenizer, texts: Sequence[str]) -> list[tuple[int, ...]]:
    """Returns the tokens of each text, after <|bos|> or as an instruction. Raises `UserError` if it is not UTF-8."""
    try:
        encoded = tokenizer.encode_batch(list(texts))
    except UnicodeEncodeError:
        raise UserError("a prompt is not valid UTF-8; correct it") from None
    if tokenizer.instructions:
        return [tokenizer.instructions.prompt(tokens) for tokens in encoded]
    return [(tokenizer.bos, *tokens) for tokens in encoded]


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


# ---- a run


class TextModel:
    """The model of a run with its averaged weights, and the tokenizer of its data; see `train_jax.load_run`."""

    def __init__(self, run: Restored, data_dir: str | None = None, devices: Devices | None = None):
        """`data_dir` has the tokenizer, by default the data of the run.

        Raises `UserError` for a run that is not of a language model, and for another tokenizer.
        """
        self._run = run
        self._devices = devices or Devices(1)
        own = data_dirs(run.config.data_dir)[0]
        data_dir = data_dir or own
        if isinstance(run.task, InstructionTask):
            vocab_size = run.task.sizes["vocab_size"]
            is_data_set = (path_of(data_dir) / "metadata.json").is_file()
            self.tokenizer = instruction_tokenizer(data_dir if is_data_set else own, data_dir)
        else:
            vocab_size = language_task(run).sizes["vocab_size"]
            self.tokenizer = Tokenizer.load(data_dir)
        if self.tokenizer.vocab_size != vocab_size:
            raise UserError(
                f"the tokenizer of {data_dir} has {self.tokenizer.vocab_size:,} tokens, the model {vocab_size:,}; give "
                "the --data-dir of the training"
            )

    @property
    def step(self) -> int:
        """The optimizer step of the checkpoint."""
        return self._run.step

    def generate(
        self,
        prompts: Sequence[str],
        *,
        max_tokens: int = 64,
        num_samples: int = 1,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> list[list[str]]:
        """Returns the texts that follow each prompt, `num_samples` of them. Raises `UserError` for too long a text."""
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
        requests = self.requests(prompts, num_samples=num_samples, max_tokens=max_tokens, sampling=sampling, seed=seed)
        texts = [self.tokenizer.decode(row.content) for row in self.complete(requests)]
        return [texts[first : first + num_samples] for first in range(0, len(texts), num_samples)]

    def requests(self, prompts: Sequence[str], *, num_samples: int, **fields: Any) -> list[Request]:
        """Returns the requests for all samples of the first prompt, then for those of the second.

        A row ends before <|bos|>, a response at its end. Raises `UserError` for a text that is not valid UTF-8.
        """
        return [
            Request(prompt=prompt, sample=sample, stop=(self.tokenizer.stop,), **fields)
            for prompt in encode_prompts(self.tokenizer, prompts)
            for sample in range(num_samples)
        ]

    def complete(self, requests: Sequence[Request], *, batch_size: int = 32) -> Iterator[Generation]:
        """Yields the tokens after each prompt. Raises `UserError` for more tokens than the model has positions."""
        return self.engine(requests, batch_size=batch_size).complete(requests)

    def engine(self, requests: Sequence[Request], *, batch_size: int = 32) -> Engine:
        """Returns an engine for these requests, with `batch_size` rows or fewer, rounded up to the devices.

        Raises `UserError` for more tokens than the model has positions.
        """
        for prompt, tokens in ((len(each.prompt), each.max_tokens) for each in requests):
            if prompt + tokens > self.positions + 1:  # the last token is no input
                raise UserError(
                    f"a prompt of {prompt} tokens and --max-tokens {tokens} need {prompt + tokens - 1} positions, the "
                    f"model has {self.positions}; use {_remedy(self.positions + 1 - prompt)}"
                )
        longest = max(len(each.prompt) + each.max_tokens for each in requests)
        capacity = min(-(-longest // _CAPACITY_MULTIPLE) * _CAPACITY_MULTIPLE, self.positions)
        return self.engine_of(min(len(requests), batch_size), capacity)

    def engine_of(self, rows: int, capacity: int) -> Engine:
        """Returns an engine for at least this many rows of `capacity` tokens, the same number on every device."""
        both_ways = self.tokenizer.instructions is not None
        return Engine.of_run(self._run, self._devices, rows=rows, capacity=capacity, both_ways=both_ways)

    @property
    def positions(self) -> int:
        """The largest number of tokens that the model reads. Raises `UserError` for a model without a cache."""
        return cache_positions(self._run.objective.fn.module, self._run.config.model)


def with_cycles(run: Restored, cycles: int) -> Restored:
    """Returns a run with another number of cycles and the same weights; 0 for as many as in training.

    Raises `UserError` for a model without cycles.
    """
    if not cycles:
        return run
    if not isinstance(run.config.arch, HRMTextConfig):
        raise UserError(f"--cycles {cycles} is an option of HRM-Text, not of --model {run.config.model}; omit it")
    try:
        return run.with_arch(run.config.arch.with_cycles(cycles))
    except ValueError as error:
        raise UserError(f"--cycles {cycles}: {error}") from None


def cache_positions(module: Any, model: str) -> int:
    """Returns the largest number of tokens that a module reads. Raises `UserError` for a `--model` without a cache."""
    try:
        return positions_of(module)
    except ValueError as error:
        raise UserError(f"--model {model}: {error}") from None


def _remedy(most: int) -> str:
    return f"at most --max-tokens {most}" if most > 0 else "a shorter prompt"


@dataclasses.dataclass(frozen=True)
class Samples(Evaluation):
    """Texts that a model wrote."""

    samples: Sequence[Sample] = ()

    @property
    def summary(self) -> str:
        return f"{len(self.samples)} texts"

    @property
    def details(self) -> Sequence[str]:
        return [each.shown for each in self.samples]

    def record(self, folder: RunFolder, step: int) -> None:
        for path in (folder.samples_at(step), folder.samples):
            write_samples(path, step, self.samples)

    def save(self, folder: RunFolder, split: str) -> None:
        """Writes nothing: `record` wrote the samples."""


class Sampler:
    """Continues the beginnings of held-out documents, at equal distances, and writes texts without a prompt.

    The random numbers belong to the seed 0, so that a run has the same samples each time.
    """

    def __init__(self, objective: Objective, data: TextSet, devices: Devices):
        """Raises `ValueError` for a model without a cache of keys and values, or with too few positions."""
        self._objective = objective
        self._tokenizer = data.tokenizer()
        positions = positions_of(objective.fn.module)
        self._new_tokens = min(_NEW_TOKENS, positions + 1 - _PROMPT_TOKENS)
        if self._new_tokens < 1:
            raise ValueError(f"the model has {positions} positions; samples need {_PROMPT_TOKENS}")
        self._prompts = _prompts(data.stream("test"), self._tokenizer.bos)
        capacity = _PROMPT_TOKENS + self._new_tokens
        self._engine = Engine.of_objective(objective, devices, rows=len(self._prompts), capacity=capacity)

    def __call__(self, state: TrainState, *, limit: int = 0, metrics_only: bool = False) -> Samples:
        self._engine.load_state(self._objective, state)
        sampling = Sampling(temperature=0.8, top_k=50)
        stop = (self._tokenizer.bos,)
        requests = [
            Request(prompt=prompt, sample=number, max_tokens=self._new_tokens, sampling=sampling, stop=stop)
            for number, (_, prompt) in enumerate(self._prompts)
        ]
        texts = [self._tokenizer.decode(row.content) for row in self._engine.complete(requests)]
        samples = [
            Sample(name, self._tokenizer.decode(prompt[1:]), text)
            for (name, prompt), text in zip(self._prompts, texts, strict=True)
        ]
        return Samples({}, samples)


def sample_texts(run: Restored, data: TextSet, devices: Devices) -> Sequence[Sample]:
    """Returns the samples of a run; none for a model that cannot write any."""
    try:
        sampler = Sampler(run.objective, data, devices)
    except ValueError:
        return ()
    return sampler(run.state).samples


def _prompts(stream: TokenStream, bos: int) -> list[tuple[str, tuple[int, ...]]]:
    """Returns names and tokens, which begin with <|bos|>, of the prompts."""
    tokens = stream.take(0, min(len(stream), _SEARCHED_TOKENS))
    starts = np.flatnonzero(tokens == bos)
    lengths = np.diff(np.append(starts, len(tokens)))
    long = np.flatnonzero(lengths >= _PROMPT_TOKENS)
    chosen = long[np.unique(np.linspace(0, len(long) - 1, _DOCUMENTS).astype(int))] if len(long) else []
    prompts = [
        (f"test document {number}", tuple(tokens[starts[number] :][:_PROMPT_TOKENS].tolist())) for number in chosen
    ]
    return prompts + [("without a prompt", (bos,))] * _WITHOUT_PROMPT
