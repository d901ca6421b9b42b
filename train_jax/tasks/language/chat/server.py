"""A server for a language model with OpenAI's interface: chat, the continuation of texts, and metrics.

A request is data: it is read by `protocol` and computed by the `EngineThread`; nothing is written to disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from sse_starlette import EventSourceResponse
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from train_jax.tasks.language.chat.engine_thread import Answer, EngineThread
from train_jax.tasks.language.chat.protocol import (
    ApiError,
    Call,
    Limits,
    chunk,
    first_chunks,
    read_chat,
    read_completion,
    read_json,
    usage_chunk,
    whole,
)
from train_jax.tasks.language.chat.text_stream import Piece
from train_jax.tasks.language.engine import Engine
from train_jax.tasks.language.tokenizer import Tokenizer

_SEND_SECONDS = 30
"""A client that takes nothing for so long is gone."""
_REMEMBERED_CLIENTS = 10_000


class Service:
    """What the routes share: the engine and its model, the limits, and counts."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, *, model: str, limits: Limits, token: str):
        """A request needs `token`, unless it is empty; then its host must be this one."""
        self.tokenizer, self.model, self.limits, self.token = tokenizer, model, limits, token
        self.created = int(time.time())
        self.thread = EngineThread(engine, most_rows=engine.slots + limits.queue, unread=limits.unread)
        self.statuses: Counter[int] = Counter()
        self._times: OrderedDict[str, deque[float]] = OrderedDict()

    def check_access(self, request: Request) -> None:
        """Raises `ApiError` without the token, or for pages of other sites while there is none."""
        if self.token:
            given = request.headers.get("authorization", "")
            if not hmac.compare_digest(given.encode("latin-1"), f"Bearer {self.token}".encode()):
                raise ApiError(401, "the token is missing or wrong; send `Authorization: Bearer TOKEN`")
            return
        # A page of another site may send requests to this machine, also under a name of its own.
        host = request.headers.get("host", "")
        if not is_loopback(_name_of(host)):
            raise ApiError(403, "the host is another one; without a token, use 127.0.0.1 or localhost")
        if request.headers.get("origin", f"http://{host}") != f"http://{host}":
            raise ApiError(403, "the page is of another site; use a token")

    def check_rate(self, request: Request) -> None:
        """Raises `ApiError` for more requests in a minute than a client may have."""
        client, now = request.client.host if request.client else "", time.monotonic()
        times = self._times.setdefault(client, deque())
        self._times.move_to_end(client)
        if len(self._times) > _REMEMBERED_CLIENTS:
            self._times.popitem(last=False)
        while times and times[0] <= now - 60:
            times.popleft()
        most = self.limits.requests_per_minute
        if len(times) >= most:
            raise ApiError(429, f"more than {most} requests in a minute; try again later", code="rate_limit_exceeded")
        times.append(now)

    def metrics(self) -> str:
        """Returns the counts in the text format of Prometheus."""
        counts = self.thread.engine.counts
        rows = self.thread.rows
        values = {
            "trm_rows": ("gauge", "rows that are computed or wait", {"": rows}),
            "trm_rows_waiting": ("gauge", "rows without a slot", {"": self.thread.engine.waiting}),
            "trm_slots": ("gauge", "rows at the same time, at most", {"": self.thread.engine.slots}),
            "trm_tokens_total": ("counter", "tokens that were chosen or forced", {"": counts.tokens}),
            "trm_prompts_total": ("counter", "prompts that were computed from their beginning", {"": counts.prefilled}),
            "trm_dispatches_total": ("counter", "calls of the decoding program", {"": counts.decodes}),
            "trm_slot_tokens_total": ("counter", "tokens that there was time for", {"": counts.places}),
            "trm_requests_total": (
                "counter",
                "requests for answers by status",
                {f'{{status="{status}"}}': count for status, count in sorted(self.statuses.items())},
            ),
        }
        lines = []
        for name, (kind, text, samples) in values.items():
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
            lines += [f"{name}{labels} {value}" for labels, value in samples.items()]
        return "\n".join(lines) + "\n"


def _name_of(host: str) -> str:
    """Returns the host without its port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """Returns whether only this machine reaches the host."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def create_app(service: Service) -> Starlette:
    """Returns the application; its engine stops when it does."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.thread.close)

    routes = [
        Route("/health", partial(_health, service)),
        Route("/metrics", partial(_open, service, _metrics)),
        Route("/v1/models", partial(_open, service, _models)),
        Route("/v1/models/{name:path}", partial(_open, service, _model)),
        Route("/v1/chat/completions", partial(_counted, service, read_chat), methods=["POST"]),
        Route("/v1/completions", partial(_counted, service, read_completion), methods=["POST"]),
    ]
    handlers: Any = {ApiError: _api_error, HTTPException: _http_error, Exception: _server_error}
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)


# ---- errors


def _error(error: ApiError) -> JSONResponse:
    headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "5"}}.get(error.status)
    return JSONResponse(error.body(), error.status, headers)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _error(error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = _error(ApiError(error.status_code, f"{error.detail}: see `trm serve --help` for the paths"))
    response.headers.update(error.headers or {})
    return response


async def _server_error(request: Request, error: Exception) -> Response:
    return _error(ApiError(500, "the server failed; its log says why"))


# ---- routes


async def _health(service: Service, request: Request) -> Response:
    failed = service.thread.failed
    return JSONResponse({"status": "the engine has stopped" if failed else "ok"}, 503 if failed else 200)


async def _open(service: Service, answer: Callable[[Service, Request], Response], request: Request) -> Response:
    service.check_access(request)
    return answer(service, request)


def _metrics(service: Service, request: Request) -> Response:
    return PlainTextResponse(service.metrics(), media_type="text/plain; version=0.0.4")


def _described(service: Service) -> dict[str, Any]:
    return {"id": service.model, "object": "model", "created": service.created, "owned_by": "trm"}


def _models(service: Service, request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [_described(service)]})


def _model(service: Service, request: Request) -> Response:
    if request.path_params["name"] != service.model:
        raise ApiError(404, f"no such model; use {service.model!r}", "model", "model_not_found")
    return JSONResponse(_described(service))


async def _counted(service: Service, read: Callable[..., Call], request: Request) -> Response:
    try:
        response = await _answer(service, read, request)
    except ApiError as error:
        response = _error(error)
    except ClientDisconnect:
        response = Response(status_code=499)  # nobody reads it
    service.statuses[response.status_code] += 1
    return response


async def _answer(service: Service, read: Callable[..., Call], request: Request) -> Response:
    service.check_access(request)
    service.check_rate(request)
    content = await _body(request, service.limits)
    longest = service.limits.prompt_tokens
    arguments = {"model": service.model, "longest": longest, "capacity": service.thread.engine.capacity}
    # Text is encoded apart, since a long one takes a while.
    call = await asyncio.to_thread(lambda: read(read_json(content), service.tokenizer, **arguments))
    answer = service.thread.submit(call)
    if call.stream:

        async def gone(_: Any) -> None:  # perhaps before the first event, when `_events` has not begun
            service.thread.cancel(answer)

        return EventSourceResponse(
            _events(service, answer), sep="\n", send_timeout=_SEND_SECONDS, client_close_handler_callable=gone
        )
    return await _unless_gone(request, _whole(service, answer))


async def _body(request: Request, limits: Limits) -> bytes:
    content = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for part in request.stream():
                content += part
                if len(content) > limits.body_bytes:
                    raise ApiError(413, f"the body is longer than {limits.body_bytes} bytes; send a shorter one")
    except TimeoutError:
        raise ApiError(408, f"the body took longer than {limits.body_seconds:g} seconds") from None
    return bytes(content)


async def _unless_gone(request: Request, answer: Awaitable[Response]) -> Response:
    """Returns the response; ends it if the client goes before."""
    computed = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(request.receive())  # after the body, the next message is that the client has gone
    try:
        await asyncio.wait({computed, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not computed.done():
            raise ClientDisconnect
        return computed.result()
    finally:
        for task in (computed, gone):
            task.cancel()
        await asyncio.gather(computed, gone, return_exceptions=True)


async def _whole(service: Service, answer: Answer) -> Response:
    pieces: list[list[Piece]] = [[] for _ in answer.texts]
    try:
        async for part in answer.parts():
            pieces[part.choice].append(part.piece)
    finally:
        service.thread.cancel(answer)
    finishes = [finish or "stop" for finish in answer.finishes]
    return JSONResponse(whole(answer.call, service.model, pieces, finishes, answer.usage))


async def _events(service: Service, answer: Answer) -> AsyncIterator[dict[str, str]]:
    call, model = answer.call, service.model
    try:
        for each in first_chunks(call, model):
            yield {"data": each}
        async for choice, piece, finish in answer.parts():
            yield {"data": chunk(call, model, choice, piece, finish)}
        if call.include_usage:
            yield {"data": usage_chunk(call, model, answer.usage)}
        yield {"data": "[DONE]"}
    except ApiError as error:
        yield {"data": json.dumps(error.body())}
    finally:
        service.thread.cancel(answer)
