"""Language models behind OpenAI's interface: chat and the continuation of texts.

A request is data: it is read by `protocol` and computed by the `EngineThread` of its model; nothing is written to disk.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from train_jax.core.state import Arrays
from train_jax.language.chat.calculator import Functions
from train_jax.language.chat.text_stream import Piece
from train_jax.language.engine import Engine
from train_jax.language.tokenizer import Tokenizer
from train_jax.serve.app import Metric
from train_jax.serve.engine_thread import Answer, EngineThread
from train_jax.serve.gate import Gate, event_stream, unless_gone
from train_jax.serve.limits import ApiError, Limits, find_model, read_json, refuse_others
from train_jax.serve.protocol import (
    Call,
    chunk,
    first_chunks,
    read_chat,
    read_completion,
    read_tokens,
    token_list,
    usage_chunk,
    whole,
)

_STEP = "@"
"""Separates the name of a model from the step of a checkpoint."""


class Model:
    """A language model that is served, with the checkpoints of its run."""

    def __init__(
        self,
        name: str,
        engine: Engine,
        tokenizer: Tokenizer,
        *,
        limits: Limits,
        step: int = 0,
        checkpoints: Mapping[int, Callable[[], tuple[Arrays, Arrays]]] | None = None,
        card: Mapping[str, str | int] | None = None,
    ):
        """`engine` has the weights of checkpoint `step`.

        `checkpoints` read the weights of each step that requests may name, this one included. `card` is what the page
        says about the model.
        """
        self.card = dict(card or {})
        self.name = name
        self.tokenizer = tokenizer
        self.step = step
        checkpoints = checkpoints or {}
        self.steps = sorted({step, *checkpoints})
        self.thread = EngineThread(
            engine,
            most_rows=engine.slots + limits.queue,
            unread=limits.unread,
            step=step,
            weights=lambda step: checkpoints[step](),
        )

    def counts(self) -> dict[str, int]:
        counts = self.thread.engine.counts
        return {
            "trm_rows": self.thread.rows,
            "trm_rows_waiting": self.thread.engine.waiting,
            "trm_slots": self.thread.engine.slots,
            "trm_tokens_total": counts.tokens,
            "trm_prompts_total": counts.prefilled,
            "trm_prompt_tokens_reused_total": counts.reused,
            "trm_dispatches_total": counts.decodes,
            "trm_slot_tokens_total": counts.places,
        }


_METRICS = {
    "trm_rows": ("gauge", "rows that are computed or wait"),
    "trm_rows_waiting": ("gauge", "rows without a slot"),
    "trm_slots": ("gauge", "rows at the same time, at most"),
    "trm_tokens_total": ("counter", "tokens that were chosen or forced"),
    "trm_prompts_total": ("counter", "prompts that were computed from their beginning"),
    "trm_prompt_tokens_reused_total": ("counter", "tokens of prompts that were in a slot"),
    "trm_dispatches_total": ("counter", "calls of the decoding program"),
    "trm_slot_tokens_total": ("counter", "tokens that there was time for"),
}


class TextService:
    """Language models by their names; the first one answers requests that name none."""

    def __init__(self, gate: Gate, models: Iterable[Model], functions: Functions | None = None):
        """`functions` are what models may call in a chat besides arithmetic."""
        self._functions = functions
        self.models = {model.name: model for model in models}
        self._gate = gate
        self._created = int(time.time())

    @property
    def routes(self) -> Sequence[Route]:
        gate = self._gate
        read = partial(read_chat, functions=self._functions)
        return [
            Route("/v1/models", gate.open(self._list)),
            Route("/v1/models/{name:path}", gate.open(self._describe)),
            Route("/v1/chat/completions", gate.counted(partial(self._answer, read)), methods=["POST"]),
            Route("/v1/responses", gate.counted(_no_responses), methods=["POST"]),
            Route("/tokenizer_info", gate.open(self._tokenizer)),
            Route("/tokenize", gate.counted(self._tokenize), methods=["POST"]),
            Route("/detokenize", gate.counted(self._detokenize), methods=["POST"]),
            Route("/v1/completions", gate.counted(partial(self._answer, read_completion)), methods=["POST"]),
        ]

    @property
    def metrics(self) -> dict[str, Metric]:
        samples = {f'{{model="{name}"}}': model.counts() for name, model in self.models.items()}
        return {
            name: (*description, {labels: counts[name] for labels, counts in samples.items()})
            for name, description in _METRICS.items()
        }

    @property
    def failed(self) -> bool:
        return any(model.thread.failed for model in self.models.values())

    def close(self) -> None:
        for model in self.models.values():
            model.thread.close()

    def _find(self, named: Any) -> tuple[Model, int]:
        """Returns the model and the step of `NAME` or `NAME@STEP`. Raises `ApiError` if it is not served."""
        if isinstance(named, str) and named not in self.models:
            name, _, step = named.rpartition(_STEP)
            model = self.models.get(name)
            if model is not None and step in map(str, model.steps):
                return model, int(step)
        model = find_model(self.models, named)
        return model, model.step

    def _described(self, model: Model) -> dict[str, Any]:
        served = {"id": model.name, "object": "model", "created": self._created, "owned_by": "trm"}
        context = {"context_tokens": model.thread.engine.capacity, "card": model.card}
        return served | {"step": model.step, "steps": model.steps} | context

    def _list(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._described(model) for model in self.models.values()]})

    def _describe(self, request: Request) -> Response:
        name = request.path_params["name"]
        return JSONResponse(self._described(self._find(name)[0]) | {"id": name})

    def _tokenizer(self, request: Request) -> Response:
        """The tokenizer of the first model, in the form of vLLM."""
        model, _ = self._find(None)
        tokenizer = model.tokenizer
        names = {number: name for name, number in tokenizer.specials.items()}
        end = names.get(tokenizer.stop)
        sizes = {"vocab_size": tokenizer.vocab_size, "model_max_length": model.thread.engine.capacity}
        return JSONResponse(sizes | {"bos_token": end, "eos_token": end, "pad_token": None})

    async def _tokenize(self, request: Request, content: bytes) -> Response:
        body = read_json(content)
        refuse_others(body, ("model", "prompt", "content", "messages", "add_special_tokens"), {})
        model, _ = self._find(body.get("model"))
        tokens = await asyncio.to_thread(read_tokens, body, model.tokenizer)
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": model.thread.engine.capacity})

    async def _detokenize(self, request: Request, content: bytes) -> Response:
        body = read_json(content)
        refuse_others(body, ("model", "tokens"), {})
        model, _ = self._find(body.get("model"))
        text = model.tokenizer.decode(token_list(body.get("tokens"), model.tokenizer))
        return JSONResponse({"prompt": text, "content": text})

    async def _answer(self, read: Callable[..., Call], request: Request, content: bytes) -> Response:
        body = read_json(content)
        model, step = self._find(body.get("model"))
        sizes = {"longest": self._gate.limits.prompt_tokens, "capacity": model.thread.engine.capacity}
        # Text is encoded apart, since a long one takes a while.
        call = await asyncio.to_thread(lambda: read(body, model.tokenizer, **sizes))
        answer = model.thread.submit(call, step)
        name = body.get("model") or model.name
        if call.stream:
            return event_stream(_events(model, name, answer), gone=lambda: model.thread.cancel(answer))
        return await unless_gone(request, _whole(model, name, answer))


async def _no_responses(request: Request, content: bytes) -> Response:
    raise ApiError(404, "responses are not served here; use /v1/chat/completions")


async def _whole(model: Model, name: str, answer: Answer) -> Response:
    pieces: list[list[Piece]] = [[] for _ in answer.texts]
    try:
        async for part in answer.parts():
            pieces[part.choice].append(part.piece)
    finally:
        model.thread.cancel(answer)
    finishes = [finish or "stop" for finish in answer.finishes]
    return JSONResponse(whole(answer.call, name, pieces, finishes, answer.usage))


async def _events(model: Model, name: str, answer: Answer) -> AsyncGenerator[str]:
    call = answer.call
    try:
        for each in first_chunks(call, name):
            yield each
        async for choice, piece, finish in answer.parts():
            yield chunk(call, name, choice, piece, finish)
        if call.include_usage:
            yield usage_chunk(call, name, answer.usage)
        yield "[DONE]"
    except ApiError as error:
        yield json.dumps(error.body())
    finally:
        model.thread.cancel(answer)
