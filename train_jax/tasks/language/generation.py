"""Continues prompts with a language model: one compiled program for the prompts, one for each further token.

A token is the most probable one, or a draw that belongs to a seed, a prompt, a sample and a position.

The module itself runs in both, with a cache of fixed size. Prompts of different lengths form one batch: their tokens
are padded on the right, where causal attention does not see them, and each row decodes at its own position.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer, UInt32

import bridge
from models_torch.cached_attention import attention_with_cache
from models_torch.kv_cache import Buffers, CachedModel, positions_of
from train_jax.core.state import Arrays
from train_jax.errors import UserError, brief
from train_jax.run.restore import Restored
from train_jax.run.storage import path_of
from train_jax.run.untrusted import DamagedError, read_whole
from train_jax.runtime.devices import Devices
from train_jax.tasks.language.commands import Sample
from train_jax.tasks.language.task import language_task
from train_jax.tasks.language.text_set import TextSet, TokenStream
from train_jax.tasks.language.tokenizer import Tokenizer

_GENERATOR = "threefry2x32"
_LARGEST_BYTES = 2**30
_PADDED_TO = 16
"""Prompts are padded to a multiple of this many tokens, so that similar commands use the same compiled programs."""
_DOCUMENTS, _WITHOUT_PROMPT = 4, 2
_PROMPT_TOKENS, _NEW_TOKENS = 32, 96
_SEARCHED_TOKENS = 2**22
"""Of the samples of an evaluation."""

# The published modules of 2026 call it; without FlashAttention, it asks a tensor for the position.
bridge.register_function("nanochat.flash_attention:flash_attn.flash_attn_with_kvcache", attention_with_cache)


@dataclass(frozen=True)
class PromptSample:
    """One sample of one prompt."""

    prompt: tuple[int, ...]
    """Its tokens, at least one."""
    sample: int = 0


@dataclass(frozen=True)
class Sizes:
    """The shapes of both programs."""

    rows: int
    """Rows of a batch on all devices together."""
    prompt_tokens: int
    """Tokens of the longest prompt."""
    new_tokens: int
    """Tokens after each prompt, at most."""
    capacity: int
    """Tokens in the cache, at least `prompt_tokens`, and at least all of a row but its last one."""


class Generator:
    """A language model that continues prompts; its programs are compiled at the first batch."""

    def __init__(
        self,
        module: Any,
        params: Arrays,
        buffers: Arrays,
        devices: Devices,
        sizes: Sizes,
        *,
        sampling: Sampling,
        seed: int = 0,
        stop: int | None = None,
    ):
        """`module` takes `(idx, kv_cache=…)`; `params` and `buffers` have its names. A row ends before a token `stop`.

        Raises `UserError` if the rows do not divide over the devices.
        """
        devices.local_batch_size(sizes.rows)
        self._fn = bridge.export(CachedModel(module))
        self._devices, self._sizes, self._sampling, self._seed, self._stop = devices, sizes, sampling, seed, stop
        self._state = devices.replicate((_prefixed(params), _prefixed(buffers)))

    @classmethod
    def of_run(cls, run: Restored, devices: Devices, sizes: Sizes, **options: Any) -> Generator:
        """Returns the generator of a run with its averaged weights."""
        params, buffers = run.objective.params | run.state.eval_params, run.objective.buffers | run.state.buffers
        return cls(run.objective.fn.module, params, buffers, devices, sizes, **options)

    @cached_property
    def _prefill(self) -> Any:
        """Maps prompts to their next tokens and to the state of `_decode`."""

        def prefill(params: Arrays, buffers: Arrays, batch: dict[str, jax.Array]) -> dict[str, Any]:
            last = batch["lengths"][:, None] - 1
            (logits, cache), _ = self._fn(
                params,
                buffers,
                batch["prompts"],
                jnp.take_along_axis(batch["prompts"], last, axis=1),
                self._sizes.capacity,
                method="prefill",
                train=False,
            )
            token = self._choose(
                jnp.take_along_axis(logits, last[:, :, None], axis=1)[:, 0], batch["streams"], batch["lengths"]
            )
            state = {"token": token, "position": batch["lengths"], "streams": batch["streams"], "cache": cache}
            return {"token": token, "state": state}

        return self._devices.parallel_map(prefill)

    @cached_property
    def _decode(self) -> Any:
        """Maps the state with the token of every row to the next tokens and to the next state; donates the state."""

        def decode(params: Arrays, buffers: Arrays, state: dict[str, Any]) -> dict[str, Any]:
            def row(token: jax.Array, cache: Buffers, position: jax.Array) -> tuple[jax.Array, Buffers]:
                cache = jax.tree.map(lambda x: x[None], cache)
                (logits, cache), _ = self._fn(
                    params,
                    buffers,
                    token[None, None],
                    cache,
                    position,
                    self._sizes.capacity,
                    method="decode",
                    train=False,
                )
                return logits[0, 0], jax.tree.map(lambda x: x[0], cache)

            logits, cache = jax.vmap(row)(state["token"], state["cache"], state["position"])
            position = state["position"] + 1
            token = self._choose(logits, state["streams"], position)
            next_state = {"token": token, "position": position, "streams": state["streams"], "cache": cache}
            return {"token": token, "state": next_state}

        return self._devices.parallel_map(decode, donate=True)

    def _choose(self, logits: jax.Array, streams: jax.Array, positions: jax.Array) -> jax.Array:
        def choose(logits: jax.Array, stream: jax.Array, position: jax.Array) -> jax.Array:
            return choose_token(logits, stream, position, self._sampling)

        return jax.vmap(choose)(logits, streams, positions)

    def tokens(self, rows: Sequence[PromptSample]) -> Iterator[Integer[np.ndarray, " rows"]]:
        """Yields the next token of every row, until the largest number of tokens.

        Raises `ValueError` for more rows or longer prompts than the generator was made for.
        """
        batch = self._devices.shard(self._devices.split_batch(self._batch(rows)))
        result = self._prefill(*self._state, batch)
        for remaining in reversed(range(self._sizes.new_tokens)):
            token = result["token"]
            if remaining:  # dispatched before the host waits for the token
                result = self._decode(*self._state, result["state"])
            yield self._devices.to_host(token).reshape(-1)[: len(rows)]

    def stream(self, row: PromptSample) -> Iterator[int]:
        """Yields the tokens after one prompt, without the token `stop`."""
        for (token,) in self.tokens([row]):
            if token == self._stop:
                return
            yield int(token)

    def complete(self, rows: Sequence[PromptSample]) -> Iterator[list[int]]:
        """Yields the tokens after each prompt, without the token `stop`; any number of rows, in batches."""
        for first in range(0, len(rows), self._sizes.rows):
            part = rows[first : first + self._sizes.rows]
            completions, ended = [[] for _ in part], np.zeros(len(part), bool)
            for column in self.tokens(part):
                ended |= column == self._stop
                for completion, token, end in zip(completions, column, ended, strict=True):
                    completion += [] if end else [int(token)]
                if ended.all():
                    break
            yield from completions

    def _batch(self, rows: Sequence[PromptSample]) -> dict[str, np.ndarray]:
        """The prompts, padded; rows that are missing repeat the first one."""
        sizes, longest = self._sizes, max(len(row.prompt) for row in rows)
        if len(rows) > sizes.rows or longest > sizes.prompt_tokens:
            raise ValueError(
                f"{len(rows)} prompts of up to {longest} tokens; use at most {sizes.rows} of {sizes.prompt_tokens}"
            )
        filled = [*rows, *[rows[0]] * (sizes.rows - len(rows))]
        prompts = np.zeros((sizes.rows, sizes.prompt_tokens), np.int32)
        for number, row in enumerate(filled):
            prompts[number, : len(row.prompt)] = row.prompt
        return {
            "prompts": prompts,
            "lengths": np.array([len(row.prompt) for row in filled], np.int32),
            "streams": np.stack([stream_key(self._seed, row.prompt, row.sample) for row in filled]),
        }


def _prefixed(arrays: Mapping[str, jax.Array]) -> Arrays:
    """The names that a module has as a part of `CachedModel`."""
    return {f"model.{name}": array for name, array in arrays.items()}


# ---- the choice of a token


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to choose a token. The limits apply in this order: temperature, `top_k`, `top_p`."""

    temperature: float = 1.0
    """Divides the logits; 0 chooses the most probable token."""
    top_k: int = 0
    """Draw from this many of the most probable tokens; 0 for all."""
    top_p: float = 1.0
    """Draw from the most probable tokens that together have this probability."""


def stream_key(seed: int, prompt: Sequence[int], sample: int) -> UInt32[np.ndarray, " 2"]:
    """Returns the key data of a sample of a prompt.

    It depends on the tokens of the prompt and not on its place among others, so that a sample does not depend on the
    batch. Equal prompts have equal samples.
    """
    content = b"".join(number.to_bytes(8, "little") for number in (seed, sample, *prompt))
    return np.frombuffer(hashlib.sha256(content).digest()[:8], "<u4").astype(np.uint32)


def choose_token(
    logits: Float[Array, " vocab_size"],
    stream: UInt32[Array, " 2"],
    position: Integer[Array, ""],
    sampling: Sampling,
) -> Integer[Array, ""]:
    """Returns the token at a position, counted from the beginning of the prompt."""
    logits = logits.astype(jnp.float32)
    if sampling.temperature == 0:
        return jnp.argmax(logits).astype(jnp.int32)
    key = jax.random.fold_in(jax.random.wrap_key_data(stream, impl=_GENERATOR), position)
    logits = logits / sampling.temperature
    if not sampling.top_k and sampling.top_p == 1:
        return jax.random.categorical(key, logits).astype(jnp.int32)
    logits, tokens = jax.lax.top_k(logits, min(sampling.top_k or logits.size, logits.size))
    probabilities = jax.nn.softmax(logits)
    before = jnp.cumsum(probabilities) - probabilities
    logits = jnp.where((before < sampling.top_p) | (jnp.arange(logits.size) == 0), logits, -jnp.inf)
    return tokens[jax.random.categorical(key, logits)].astype(jnp.int32)


# ---- prompts


@dataclass(frozen=True)
class Prompts:
    """Texts, and the rows of all their samples: the samples of the first text, then those of the second."""

    texts: list[str]
    rows: list[PromptSample]

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
    return Prompts(texts, [PromptSample(prompt, sample) for prompt in prompts for sample in range(num_samples)])


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
        """`data_dir` has the tokenizer, by default the data of the run. Raises `UserError` for another tokenizer."""
        self._run, self._devices = run, devices or Devices(1)
        data_dir = data_dir or run.config.data_dir
        self.tokenizer = Tokenizer.load(data_dir)
        vocab_size = language_task(run).sizes["vocab_size"]
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
        encoded = encode_prompts(self.tokenizer, list(prompts), num_samples)
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
        completed = self.generator(encoded, max_tokens, sampling, seed=seed).complete(encoded.rows)
        texts = [self.tokenizer.decode(tokens) for tokens in completed]
        return [texts[first : first + num_samples] for first in range(0, len(texts), num_samples)]

    def generator(
        self, prompts: Prompts, max_tokens: int, sampling: Sampling, *, seed: int = 0, batch_size: int = 32
    ) -> Generator:
        """Returns a generator for these prompts. Raises `UserError` for prompts that the model has no positions for."""
        run = self._run
        try:
            positions = positions_of(run.objective.fn.module)
        except ValueError as error:
            raise UserError(f"--model {run.config.model}: {error}") from None
        sizes = prompts.sizes(
            max_tokens=max_tokens, batch_size=batch_size, devices=self._devices.count, positions=positions
        )
        return Generator.of_run(run, self._devices, sizes, sampling=sampling, seed=seed, stop=self.tokenizer.bos)


def sample_texts(run: Restored, data: TextSet, devices: Devices) -> list[Sample]:
    """Continues the beginnings of held-out documents, at equal distances, and writes texts without a prompt.

    The random numbers belong to the seed 0, so that a run has the same samples each time. Returns none for a model
    without a cache of keys and values, or with too few positions.
    """
    tokenizer = data.tokenizer()
    prompts = _prompts(data.stream("test"), tokenizer.bos)
    try:
        positions = positions_of(run.objective.fn.module)
    except ValueError:
        return []
    new_tokens = min(_NEW_TOKENS, positions + 1 - _PROMPT_TOKENS)
    if new_tokens < 1:
        return []
    rows = -(-len(prompts) // devices.count) * devices.count
    sizes = Sizes(rows, _PROMPT_TOKENS, new_tokens, capacity=_PROMPT_TOKENS + new_tokens)
    sampling = Sampling(temperature=0.8, top_k=50)
    generator = Generator.of_run(run, devices, sizes, sampling=sampling, stop=tokenizer.bos)
    rows = [PromptSample(prompt, number) for number, (_, prompt) in enumerate(prompts)]
    texts = map(tokenizer.decode, generator.complete(rows))
    return [
        Sample(name, tokenizer.decode(prompt[1:]), text) for (name, prompt), text in zip(prompts, texts, strict=True)
    ]


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
