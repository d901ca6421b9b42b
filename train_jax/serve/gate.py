"""Requests before they are answered: access, rate and size; and the form of a refusal."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from sse_starlette import EventSourceResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from train_jax.serve.limits import ApiError, Limits

Endpoint = Callable[[Request], Awaitable[Response]]
_SEND_SECONDS = 30
"""Seconds after which a client that reads nothing counts as gone."""
_REMEMBERED_CLIENTS = 10_000
_REQUESTS_PER_MINUTE = 60
_FREE_GUESSES = 5
"""Wrong tokens after which a client has to wait."""
_LONGEST_WAIT = 60.0


class _Failures(NamedTuple):
    """The wrong tokens of a client since its last right one."""

    count: int
    until: float
    """Time at which the next token is compared."""


class Gate:
    """Decides which requests are answered, and counts them."""

    def __init__(self, limits: Limits, token: str = "", clock: Callable[[], float] = time.monotonic):
        """A request needs `token`; if that is empty, the request's host must be this machine."""
        self.limits = limits
        self.token = token
        self.statuses: Counter[int] = Counter()
        self._clock = clock
        self._times: OrderedDict[str, deque[float]] = OrderedDict()
        self._failures: OrderedDict[str, _Failures] = OrderedDict()

    def open(self, answer: Callable[[Request], Response]) -> Endpoint:
        """Returns the endpoint for a request without a body that costs nothing."""

        async def endpoint(request: Request) -> Response:
            self.check_access(request)
            return answer(request)

        return endpoint

    def counted(self, answer: Callable[[Request, bytes], Awaitable[Response]]) -> Endpoint:
        """Returns the endpoint for a request whose body is answered, within the limits."""

        async def endpoint(request: Request) -> Response:
            try:
                self.check_access(request)
                self.check_rate(request)
                response = await answer(request, await self._body(request))
            except ApiError as error:
                response = refusal(error)
            except ClientDisconnect:
                response = Response(status_code=499)  # nobody reads it
            self.statuses[response.status_code] += 1
            return response

        return endpoint

    def check_access(self, request: Request) -> None:
        """Raises `ApiError` if the token is wrong; if there is no token, for pages of other sites."""
        if self.token:
            self._check_token(request)
            return
        # A page of another site may send requests to this machine, also under a name of its own.
        host = request.headers.get("host", "")
        if not is_loopback(_name_of(host)):
            raise ApiError(403, "the host is another one; without a token, use 127.0.0.1 or localhost")
        if request.headers.get("origin", f"http://{host}") != f"http://{host}":
            raise ApiError(403, "the page is of another site; use a token")

    def _check_token(self, request: Request) -> None:
        """Raises `ApiError` without the token, and while a client that guessed has to wait: longer each time."""
        client = _client_of(request)
        now = self._clock()
        failures = self._failures.get(client, _Failures(0, now))
        if now < failures.until:  # even the right token is not compared: the answer would say that it is right
            wait = math.ceil(failures.until - now)
            message = f"too many wrong tokens; try again in {wait} s"
            raise ApiError(429, message, code="rate_limit_exceeded", retry_after=wait)
        given = request.headers.get("authorization", "")
        scheme, _, credentials = given.partition(" ")
        # The name of a scheme has no case (RFC 9110).
        right = hmac.compare_digest(credentials.strip().encode("latin-1"), self.token.encode())
        if right and scheme.lower() == "bearer":
            self._failures.pop(client, None)
            return
        if given:  # the page asks for its models without a token first
            count = failures.count + 1
            wait = min(2.0 ** (count - _FREE_GUESSES), _LONGEST_WAIT) if count >= _FREE_GUESSES else 0.0
            _remember(self._failures, client, _Failures(count, now + wait))
        raise ApiError(401, "the token is missing or wrong; send `Authorization: Bearer TOKEN`")

    def check_rate(self, request: Request) -> None:
        """Raises `ApiError` if a client has made too many requests in a minute."""
        client = _client_of(request)
        now = self._clock()
        most = self.limits.requests_per_minute
        if most is None and is_loopback(client):
            return
        most = most or _REQUESTS_PER_MINUTE
        times = self._times.get(client, deque())
        _remember(self._times, client, times)
        while times and times[0] <= now - 60:
            times.popleft()
        if len(times) >= most:
            wait = math.ceil(times[0] + 60 - now)
            message = f"more than {most} requests in a minute; try again in {wait} s"
            raise ApiError(429, message, code="rate_limit_exceeded", retry_after=wait)
        times.append(now)

    async def _body(self, request: Request) -> bytes:
        content = bytearray()
        limits = self.limits
        try:
            async with asyncio.timeout(limits.body_seconds):
                async for part in request.stream():
                    content += part
                    if len(content) > limits.body_bytes:
                        raise ApiError(413, f"the body is longer than {limits.body_bytes} bytes; send a shorter one")
        except TimeoutError:
            raise ApiError(408, f"the body took longer than {limits.body_seconds:g} seconds") from None
        return bytes(content)


def _remember(clients: OrderedDict[str, Any], client: str, value: Any) -> None:
    """Keeps a value of a client, and forgets the client that was seen longest ago if there are too many."""
    clients[client] = value
    clients.move_to_end(client)
    if len(clients) > _REMEMBERED_CLIENTS:
        clients.popitem(last=False)


def _client_of(request: Request) -> str:
    """Returns the address of the client; of IPv6, that of its network of 64 bits, all of which may be one machine's."""
    host = request.client.host if request.client else ""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    address = getattr(address, "ipv4_mapped", None) or address
    if address.version == 4 or address.is_loopback:
        return str(address)
    return str(ipaddress.ip_network((address, 64), strict=False))


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


# ---- responses


def refusal(error: ApiError) -> JSONResponse:
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    return JSONResponse(error.body(), error.status, headers)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return refusal(error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = refusal(ApiError(error.status_code, f"{error.detail}: see `trm serve --help` for the paths"))
    response.headers.update(error.headers or {})
    return response


async def _server_error(request: Request, error: Exception) -> Response:
    return refusal(ApiError(500, "the server failed; its log says why"))


HANDLERS: Any = {ApiError: _api_error, HTTPException: _http_error, Exception: _server_error}


def event_stream(events: AsyncGenerator[str], *, gone: Callable[[], None] = lambda: None) -> Response:
    """Returns server-sent events. `gone` is called when the client goes, perhaps before the first event."""

    async def lines() -> AsyncIterator[dict[str, str]]:
        async with contextlib.aclosing(events):
            async for each in events:
                yield {"data": each}

    async def closed(_: Any) -> None:
        gone()

    return EventSourceResponse(lines(), sep="\n", send_timeout=_SEND_SECONDS, client_close_handler_callable=closed)


async def unless_gone(request: Request, answer: Awaitable[Response]) -> Response:
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
