"""The HTTP server of `trm serve`, with a limit on the time in which the head of a request has to arrive."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from train_jax.serve.limits import Limits


class Connection(H11Protocol):
    """An HTTP connection that is closed if the head of a request does not arrive in time; uvicorn has no such limit."""

    def __init__(self, *args: Any, head_seconds: float, **options: Any):
        super().__init__(*args, **options)
        self._head_seconds = head_seconds
        self._timer = None

    @property
    def _waits(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._limit()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._limit()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop()

    def _limit(self) -> None:
        if not self._waits:
            self._stop()
        elif self._timer is None:
            self._timer = self.loop.call_later(self._head_seconds, self._end)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self) -> None:
        self._timer = None
        if self._waits:
            self.transport.close()


def server_of(app: Any, limits: Limits, **options: Any) -> uvicorn.Server:
    """Returns the server of an application. It answers mistakes of clients and does not log them."""
    # Proxy headers are off, since a client could choose its address with them.
    common: dict[str, Any] = {"log_level": "error", "access_log": False, "proxy_headers": False, "ws": "none"}
    common["log_config"] = (
        None  # uvicorn's own would close the handlers of this process, and with absl's one its stream
    )
    protocol: Any = partial(Connection, head_seconds=limits.body_seconds)
    return uvicorn.Server(uvicorn.Config(app, http=protocol, **(common | options)))


@contextlib.contextmanager
def answering(app: Any, limits: Limits, listening: socket.socket) -> Iterator[None]:
    """Serves an application in a thread until the block ends; what then waits at the socket is for the next server."""
    server = server_of(app, limits, lifespan="off", timeout_graceful_shutdown=1)
    copy = listening.dup()  # the server closes its socket
    thread = threading.Thread(target=server.run, kwargs={"sockets": [copy]}, name="starting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()
