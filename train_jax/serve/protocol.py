"""OpenAI's format of requests, answers and errors, for chat and for the continuation of texts.

The fields of a request are those of `Fields`, with their types, ranges and defaults. A wrong value is an `ApiError`
with the name of its field, as is an unknown field, unless it or its value changes no answer.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, TypeVar

from models_torch.ranges import Range
from train_jax.errors import UserError, brief
from train_jax.language.chat.calculator import Functions, answer_ends
from train_jax.language.chat.messages import read_messages, render_chat
from train_jax.language.chat.text_stream import Piece, TextStream, TokenText, answer_stream, joined
from train_jax.language.engine import Request
from train_jax.language.generation import encode_prompts
from train_jax.language.sampling import MOST_PROBABLE, Sampling
from train_jax.language.tokenizer import Tokenizer
from train_jax.serve.limits import ApiError, read_fields, refuse_others

_Kind = TypeVar("_Kind", bound="Fields")
_STOP_STRINGS, _STOP_CHARACTERS = 4, 256


@dataclass(frozen=True, kw_only=True)
class Fields:
    """The fields of a request that have a range; null is the default."""

    max_tokens: Annotated[int | None, Range(1, 2**20)] = None
    """Maximum number of tokens of an answer; by default as many as there is room for."""
    temperature: Annotated[float, Range(0, 2)] = 1.0
    top_p: Annotated[float, Range(0, 1, low_excluded=True)] = 1.0
    top_k: Annotated[int, Range(0, 2**24)] = 0
    """Number of most probable tokens to draw from; 0 for all. OpenAI has no such field."""
    seed: Annotated[int | None, Range(-(2**63), 2**63 - 1)] = None
    """Seed of the draws; by default another one for each request."""
    n: Annotated[int, Range(1, 16)] = 1
    stream: bool = False
    presence_penalty: Annotated[float, Range(0, 0, expected="0 (there are no penalties)")] = 0.0
    frequency_penalty: Annotated[float, Range(0, 0, expected="0 (there are no penalties)")] = 0.0

    OTHERS: ClassVar[tuple[str, ...]] = ("model", "stop", "stream_options")
    """Fields without a range."""


@dataclass(frozen=True, kw_only=True)
class ChatFields(Fields):
    max_completion_tokens: Annotated[int | None, Range(1, 2**20)] = None
    """The newer name of `max_tokens`."""
    logprobs: bool = False
    top_logprobs: Annotated[int, Range(0, MOST_PROBABLE)] = 0
    parts: bool = False
    """Also return the answer's parts: text, calls of tools and their outputs. OpenAI has no such field."""

    OTHERS: ClassVar = (*Fields.OTHERS, "messages", "continue_final_message", "add_generation_prompt")


@dataclass(frozen=True, kw_only=True)
class TextFields(Fields):
    max_tokens: Annotated[int | None, Range(1, 2**20)] = 16
    logprobs: Annotated[int | None, Range(0, MOST_PROBABLE)] = None
    best_of: Annotated[int, Range(1, 1, expected="1 (n is the number of choices)")] = 1

    OTHERS: ClassVar = (*Fields.OTHERS, "prompt")


_NEUTRAL: dict[str, Sequence[Any]] = {
    # of OpenAI
    "logit_bias": ({},), "tools": ([],), "functions": ([],), "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"), "response_format": ({"type": "text"},), "modalities": (["text"],),
    "echo": (False,), "suffix": ("",),
    # of vLLM, llama.cpp and others
    "min_p": (0,), "typical_p": (1,), "repetition_penalty": (1,), "repeat_penalty": (1,), "length_penalty": (1,),
    "min_tokens": (0,), "stop_token_ids": ([],), "bad_words": ([],), "ignore_eos": (False,),
    "include_stop_str_in_output": (False,), "skip_special_tokens": (True,), "use_beam_search": (False,),
}  # fmt: skip
"""Values of unsupported fields that change nothing; clients send them."""


@dataclass(frozen=True)
class Call:
    """A request that was read."""

    form: Form
    requests: Sequence[Request]
    """One for each choice."""
    new_text: Callable[[], TextStream]
    """Returns the text of a choice."""
    stream: bool
    include_usage: bool
    logprobs: bool
    parts: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    number: str = field(default_factory=lambda: secrets.token_hex(12))


# ---- requests


def read_chat(
    body: dict[str, Any], tokenizer: Tokenizer, *, longest: int, capacity: int, functions: Functions | None = None
) -> Call:
    """Reads a request for the next message of a conversation, whose calls may be of `functions`.

    Raises `ApiError` for wrong fields, a prompt of more than `longest` tokens, and for more than `capacity` tokens with
    the answer.
    """
    fields = _fields(ChatFields, body)
    if fields.top_logprobs and not fields.logprobs:
        raise ApiError(
            400, f"top_logprobs is {fields.top_logprobs} without logprobs; set logprobs to true", "top_logprobs"
        )
    try:
        messages = read_messages(body.get("messages"))
        prompt = render_chat(tokenizer, messages)
    except (ValueError, UserError) as error:
        raise ApiError(400, f"messages: {error}", "messages") from None
    _check_continuation(body, continues=messages.begun is not None)
    most, name = fields.max_completion_tokens, "max_completion_tokens"
    if most is None:
        most, name = fields.max_tokens, "max_tokens"
    most = _room("messages", name, prompt, most, longest, capacity)
    stop = _stop_strings(body.get("stop"))
    ends = answer_ends(tokenizer, functions=functions)
    requests = _requests([(prompt, most)], fields, ends | {"most_probable": fields.top_logprobs})
    return Call(
        CHAT,
        requests,
        lambda: answer_stream(tokenizer, stop),
        fields.stream,
        _include_usage(body),
        fields.logprobs,
        fields.parts,
    )


def _check_continuation(body: dict[str, Any], *, continues: bool) -> None:
    """Raises `ApiError` if fields of vLLM ask for another beginning of the answer than the messages have."""
    for name, continuing in (("continue_final_message", True), ("add_generation_prompt", False)):
        value = body.get(name)
        if value is not None and value != (continuing if continues else not continuing):
            last = "the assistant, whose answer is continued" if continues else "the user, and a new answer begins"
            raise ApiError(400, f"{name} is {brief(value)}, and the last message is from {last}; leave it out", name)


def read_completion(body: dict[str, Any], tokenizer: Tokenizer, *, longest: int, capacity: int) -> Call:
    """Reads a request to continue texts, or lists of tokens. Raises `ApiError` as `read_chat` does."""
    fields = _fields(TextFields, body)
    prompts = _prompts(body.get("prompt", ""), tokenizer)
    if len(prompts) * fields.n > 64:
        raise ApiError(400, f"{len(prompts)} prompts and n {fields.n} are more than 64 choices; use fewer", "prompt")
    sized = [(p, _room("prompt", "max_tokens", p, fields.max_tokens, longest, capacity)) for p in prompts]
    stop = _stop_strings(body.get("stop"))
    requests = _requests(sized, fields, {"stop": (tokenizer.stop,), "most_probable": fields.logprobs or 0})
    logprobs = fields.logprobs is not None
    return Call(TEXT, requests, lambda: TextStream(tokenizer, stop=stop), fields.stream, _include_usage(body), logprobs)


def _prompts(prompt: Any, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    if not isinstance(prompt, list):
        prompt = [prompt]
    elif prompt and _are_tokens(prompt, tokenizer):
        return [tuple(prompt)]
    if prompt and all(isinstance(each, str) for each in prompt):
        try:
            return encode_prompts(tokenizer, prompt)
        except UserError as error:
            raise ApiError(400, f"prompt: {error}", "prompt") from None
    if prompt and all(isinstance(each, list) and each and _are_tokens(each, tokenizer) for each in prompt):
        return [tuple(each) for each in prompt]
    raise ApiError(
        400, f"prompt is {brief(prompt)}; use a text, tokens from 0 to {tokenizer.vocab_size - 1}, or a list", "prompt"
    )


def _are_tokens(values: list[Any], tokenizer: Tokenizer) -> bool:
    return all(type(value) is int and 0 <= value < tokenizer.vocab_size for value in values)


def _fields(kind: type[_Kind], body: dict[str, Any]) -> _Kind:
    """Reads the fields with a range. Raises `ApiError` for a wrong one, and for one that is not supported."""
    refuse_others(body, {*kind.OTHERS, *(each.name for each in dataclasses.fields(kind))}, _NEUTRAL)
    return read_fields(kind, body)


def _room(field: str, name: str, prompt: tuple[int, ...], most: int | None, longest: int, capacity: int) -> int:
    """Returns the largest number of tokens of an answer. Raises `ApiError` if the prompt or the answer is too long."""
    longest = min(longest, capacity)
    if len(prompt) > longest:
        message = f"the prompt has {len(prompt)} tokens; use at most {longest}"
        raise ApiError(400, message, field, "context_length_exceeded")
    room = capacity + 1 - len(prompt)
    if most is not None and most > room:
        message = f"{name} is {most}, and the prompt has {len(prompt)} tokens; use at most {room}"
        raise ApiError(400, message, name, "context_length_exceeded")
    return most or room


def _stop_strings(stop: Any) -> tuple[str, ...]:
    stop = [] if stop is None else [stop] if isinstance(stop, str) else stop
    known = isinstance(stop, list) and len(stop) <= _STOP_STRINGS
    if not known or not all(isinstance(each, str) and 0 < len(each) <= _STOP_CHARACTERS for each in stop):
        expected = f"a text, or at most {_STOP_STRINGS}, each of 1 to {_STOP_CHARACTERS} characters"
        raise ApiError(400, f"stop is {brief(stop)}; use {expected}", "stop")
    return tuple(stop)


def _include_usage(body: dict[str, Any]) -> bool:
    options = body.get("stream_options")
    include = options.get("include_usage") if isinstance(options, dict) else options
    if not isinstance(include, bool | None):
        raise ApiError(400, 'stream_options is wrong; use {"include_usage": true}', "stream_options")
    return bool(include)


def _requests(sized: Sequence[tuple[tuple[int, ...], int]], fields: Fields, options: dict[str, Any]) -> list[Request]:
    seed = secrets.randbits(64) if fields.seed is None else fields.seed % 2**64
    sampling = Sampling(temperature=fields.temperature, top_k=fields.top_k, top_p=fields.top_p)
    return [
        Request(prompt=prompt, max_tokens=most, sampling=sampling, seed=seed, sample=sample, **options)
        for prompt, most in sized
        for sample in range(fields.n)
    ]


# ---- answers


@dataclass(frozen=True)
class Form:
    """The names and fields in which the two kinds of answers differ."""

    prefix: str
    name: str
    chunk_name: str
    choice: Callable[[str], dict[str, Any]]
    """The text of a whole choice."""
    delta: Callable[[str], dict[str, Any]]
    """The text of a piece."""
    first: dict[str, Any] | None
    """The first piece of a choice."""
    log_probs: Callable[[Sequence[TokenText]], dict[str, Any]]


def _chat_log_probs(tokens: Sequence[TokenText]) -> dict[str, Any]:
    def record(token: bytes, log_prob: float) -> dict[str, Any]:
        return {"token": _shown(token), "logprob": log_prob, "bytes": list(token)}

    return {
        "content": [
            record(each.bytes, each.log_prob) | {"top_logprobs": [record(*other) for other in each.most_probable]}
            for each in tokens
        ],
        "refusal": None,
    }


def _text_log_probs(tokens: Sequence[TokenText]) -> dict[str, Any]:
    return {
        "tokens": [_shown(each.bytes) for each in tokens],
        "token_logprobs": [each.log_prob for each in tokens],
        # If several tokens have the same text, the dictionary has the most probable one.
        "top_logprobs": [{_shown(each): other for each, other in reversed(token.most_probable)} for token in tokens]
        if any(each.most_probable for each in tokens)
        else None,
        "text_offset": [each.start for each in tokens],
    }


def _shown(token: bytes) -> str:
    return token.decode("utf-8", errors="replace")


CHAT = Form(
    prefix="chatcmpl",
    name="chat.completion",
    chunk_name="chat.completion.chunk",
    choice=lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
    delta=lambda text: {"delta": {"content": text} if text else {}},
    first={"delta": {"role": "assistant", "content": ""}},
    log_probs=_chat_log_probs,
)
TEXT = Form(
    prefix="cmpl",
    name="text_completion",
    chunk_name="text_completion",
    choice=lambda text: {"text": text},
    delta=lambda text: {"text": text},
    first=None,
    log_probs=_text_log_probs,
)


def _answer(call: Call, model: str, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    number = f"{call.form.prefix}-{call.number}"
    return {"id": number, "object": name, "created": call.created, "model": model, "choices": choices}


def _choice(call: Call, index: int, content: dict[str, Any], tokens: Sequence[TokenText], finish: str | None) -> dict:
    log_probs = call.form.log_probs(tokens) if call.logprobs and (tokens or finish is None) else None
    return {"index": index, **content, "logprobs": log_probs, "finish_reason": finish}


def whole(
    call: Call, model: str, pieces: Sequence[Sequence[Piece]], finishes: Sequence[str], usage: dict[str, int]
) -> dict[str, Any]:
    """Returns the answer that is not streamed, of the pieces of each choice."""
    choices = []
    for index, (parts, finish) in enumerate(zip(pieces, finishes, strict=True)):
        piece = joined(parts)
        content = call.form.choice(piece.text)
        if call.parts:
            content["message"]["parts"] = _parts(piece)
        choices.append(_choice(call, index, content, piece.tokens, finish))
    return _answer(call, model, call.form.name, choices) | {"usage": usage}


def _parts(piece: Piece) -> list[dict[str, str]]:
    return [{"type": part.type, "text": part.text} for part in piece.parts]


def first_chunks(call: Call, model: str) -> list[str]:
    """Returns what a stream begins with."""
    if call.form.first is None:
        return []
    return [_chunk(call, model, [_choice(call, n, call.form.first, (), None)]) for n in range(len(call.requests))]


def chunk(call: Call, model: str, index: int, piece: Piece, finish: str | None) -> str:
    """Returns a piece of a stream, as JSON."""
    content = call.form.delta(piece.text)
    if call.parts and piece.parts:
        content["delta"]["parts"] = _parts(piece)
    return _chunk(call, model, [_choice(call, index, content, piece.tokens, finish)])


def usage_chunk(call: Call, model: str, usage: dict[str, int]) -> str:
    """Returns the last piece of a stream with `include_usage`."""
    return json.dumps(_answer(call, model, call.form.chunk_name, []) | {"usage": usage})


def _chunk(call: Call, model: str, choices: list[dict[str, Any]]) -> str:
    answer = _answer(call, model, call.form.chunk_name, choices) | ({"usage": None} if call.include_usage else {})
    return json.dumps(answer)
