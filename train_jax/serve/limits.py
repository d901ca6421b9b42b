"""The requests that a server accepts, the refusal of others, and the JSON of a request."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from models_torch.ranges import Range, check_ranges
from train_jax.errors import brief

_Kind = TypeVar("_Kind")
_SHOWN_NAMES = 5
HARMLESS = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "parallel_tool_calls", "prediction", "request_id", "priority",
)  # fmt: skip
"""Fields of OpenAI and vLLM that change no answer, but names, accounts, caches or speed."""


@dataclass
class ApiError(Exception):
    """A request is refused."""

    status: int
    message: str
    param: str | None = None
    """The name of the field."""
    code: str | None = None
    retry_after: int | None = None
    """Seconds after which the request may be repeated."""

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status, kind)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of a server on requests."""

    body_bytes: Annotated[int, Range(1, 2**30)] = 256 * 1024
    """Maximum bytes of a request."""
    body_seconds: Annotated[float, Range(0, 3600, low_excluded=True)] = 10.0
    """Seconds for the head of a request to arrive, and for its body."""
    prompt_tokens: Annotated[int, Range(1, 2**24)] = 8192
    """Maximum tokens of a prompt."""
    queue: Annotated[int, Range(0, 10**6)] = 64
    """Maximum number of answers that wait for a slot, and of puzzles solved at the same time."""
    requests_per_minute: Annotated[int | None, Range(1, 10**9)] = None
    """Maximum requests per minute from one client address; by default 60, and as many as it likes from this machine."""
    unread: Annotated[int, Range(1, 10**6)] = 1024
    """Parts of a streamed answer that wait for the client; an answer with more is cancelled."""


def read_json(content: bytes) -> dict[str, Any]:
    """Reads the body of a request. Raises `ApiError` if it is not a JSON object."""
    try:
        body = json.loads(content, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON ({str(error)[:100]})") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is {brief(body)}; expected a JSON object")
    return body


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def read_fields(kind: type[_Kind], body: Mapping[str, Any]) -> _Kind:
    """Reads the fields of a dataclass; null is the default. Raises `ApiError` for a value out of its range."""
    names = [each.name for each in dataclasses.fields(kind)]  # pyright: ignore[reportArgumentType]
    given = {name: body[name] for name in names if body.get(name) is not None}
    fields = kind(**given)
    try:
        check_ranges(fields)
    except ValueError as error:
        message = str(error)
        name = message.partition(" ")[0]
        raise ApiError(400, f"{name} is {brief(given[name])}; use{message.rpartition('; use')[2]}", name) from None
    return fields


def refuse_others(body: Mapping[str, Any], known: Collection[str], neutral: Mapping[str, Sequence[Any]]) -> None:
    """Raises `ApiError` for fields that might change the answer: neither known nor harmless, nor null.

    `neutral` are values of unknown fields that change nothing, such as the defaults of other servers.
    """
    others = [
        name
        for name, value in body.items()
        if value is not None and name not in known and name not in HARMLESS and value not in neutral.get(name, ())
    ]
    if not others:
        return
    shown = [name if re.fullmatch(r"\w{1,40}", name, re.ASCII) else brief(name) for name in others[:_SHOWN_NAMES]]
    verb, them = ("is", "it") if len(others) == 1 else ("are", "them")
    names = shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
    raise ApiError(400, f"{names} {verb} not supported here; leave {them} out", shown[0])


def find_model(served: Mapping[str, Any], name: Any) -> Any:
    """Returns the model or service of a name, by default the first one. Raises `ApiError` for an unknown name."""
    if name is None and served:
        return next(iter(served.values()))
    if isinstance(name, str) and name in served:
        return served[name]
    if not served:
        raise ApiError(404, "no model of this kind is served; give its run to `trm serve`", "model", "model_not_found")
    names = ", ".join(map(repr, served))
    raise ApiError(404, f"the model {brief(name)} is not here; use {names}", "model", "model_not_found")
