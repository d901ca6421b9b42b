"""Samples of a language model for its evaluation: continuations of held-out documents, and texts without a prompt."""

from __future__ import annotations

from typing import Any

import numpy as np

from models_torch.kv_cache import positions_of
from train_jax.run.restore import Restored
from train_jax.runtime.devices import Devices
from train_jax.tasks.language.generation import Generator, Row, Sizes
from train_jax.tasks.language.sample_file import Sample
from train_jax.tasks.language.sampling import Sampling
from train_jax.tasks.language.text_set import TextSet, TokenStream

SAMPLING = Sampling(temperature=0.8, top_k=50, top_p=1.0)
_DOCUMENTS, _WITHOUT_PROMPT = 4, 2
_PROMPT_TOKENS, _NEW_TOKENS = 32, 96
_SEARCHED_TOKENS = 2**22


def sample_texts(run: Restored, data: TextSet, devices: Devices) -> list[Sample]:
    """Continues the beginnings of held-out documents, at equal distances, and writes texts without a prompt.

    The random numbers belong to the seed 0, so that a run has the same samples each time. Returns none for a model
    without a cache of keys and values, or with too few positions.
    """
    module: Any = run.objective.fn.module
    tokenizer = data.tokenizer()
    prompts = _prompts(data.stream("test"), tokenizer.bos)
    try:
        positions = positions_of(module)
    except ValueError:
        return []
    new_tokens = min(_NEW_TOKENS, positions + 1 - _PROMPT_TOKENS)
    if new_tokens < 1:
        return []
    generator = Generator(
        module,
        run.objective.params | run.state.eval_params,
        run.objective.buffers | run.state.buffers,
        devices,
        Sizes(
            rows=-(-len(prompts) // devices.count) * devices.count,
            prompt_tokens=_PROMPT_TOKENS,
            new_tokens=new_tokens,
            capacity=_PROMPT_TOKENS + new_tokens,
        ),
        sampling=SAMPLING,
        stop=tokenizer.bos,
    )
    rows = [Row(prompt, number) for number, (_, prompt) in enumerate(prompts)]
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
