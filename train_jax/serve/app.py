"""The application behind `trm serve`: services, their metrics, and the page."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Protocol

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from train_jax.serve.gate import HANDLERS, Gate
from train_jax.serve.limits import ApiError
from train_jax.serve.page import page_routes

Metric = tuple[str, str, Mapping[str, float]]
"""The kind, a description, and the values by labels, such as `{model="run"}`."""


LIVENESS = "/livez"
"""Answers with 200 also while programs are compiled: a server that does not is to be started again."""
READINESS = ("/readyz", "/health")
"""Answer with 200 if requests are answered."""


class Service(Protocol):
    """Models of one kind."""

    @property
    def routes(self) -> Sequence[Route]: ...

    @property
    def metrics(self) -> Mapping[str, Metric]: ...

    @property
    def failed(self) -> bool:
        """Returns True if a model cannot answer any more."""
        ...

    def close(self) -> None: ...


async def starting(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers every request with 503: the application while the programs of the models are compiled."""
    error = ApiError(503, "the models are being compiled; try again later", code="starting")
    # The next request is for another server, so that no connection is kept.
    headers = {"Connection": "close"}
    if scope["path"] == LIVENESS:
        response = JSONResponse({"status": "compiling"}, headers=headers)
    else:
        said = {"status": "compiling"} if scope["path"] in READINESS else error.body()
        response = JSONResponse(said, error.status, headers | {"Retry-After": "5"})
    await response(scope, receive, send)


def create_app(gate: Gate, services: Sequence[Service]) -> Starlette:
    """Returns the application; its services are closed when it ends."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        for service in services:
            await asyncio.to_thread(service.close)

    async def health(_: Request) -> Response:
        failed = any(service.failed for service in services)
        return JSONResponse({"status": "the engine has stopped" if failed else "ok"}, 503 if failed else 200)

    def metrics(_: Request) -> Response:
        return PlainTextResponse(_text(_metrics(gate, services)), media_type="text/plain; version=0.0.4")

    routes = [Route(path, health) for path in (LIVENESS, *READINESS)]
    routes += [Route("/metrics", gate.open(metrics)), *page_routes()]
    routes += [route for service in services for route in service.routes]
    middleware = [_OTHER_SITES] if gate.token else []
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=HANDLERS, middleware=middleware)


_OTHER_SITES = Middleware(
    CORSMiddleware,
    allow_origins=["*"],
    allow_methods=["GET", "POST"],
    allow_headers=["*"],
    expose_headers=["Retry-After"],
)
"""Lets pages of other sites send requests if there is a token, which only those have that the user gave it to."""


def _metrics(gate: Gate, services: Iterable[Service]) -> dict[str, Metric]:
    metrics: dict[str, Metric] = {}
    for service in services:
        metrics |= service.metrics
    statuses = {f'{{status="{status}"}}': count for status, count in sorted(gate.statuses.items())}
    return metrics | {"trm_requests_total": ("counter", "requests for answers by status", statuses)}


def _text(metrics: Mapping[str, Metric]) -> str:
    """Returns metrics in the text format of Prometheus."""
    lines = []
    for name, (kind, text, samples) in metrics.items():
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        lines += [f"{name}{labels} {value}" for labels, value in samples.items()]
    return "\n".join(lines) + "\n"
