"""OpenAI's format of requests, answers and errors, for chat and for the continuation of texts.

The fields of a request are those of `Fields`, with their types, ranges and defaults. A wrong value is an `ApiError`
with the name of its field, as is an unknown field, unless it or its value changes no answer.
"""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

from models_torch.ranges import Range
from train_jax.errors import UserError, brief
from train_jax.language.biases import Bias, JointBias, TokenBias
from train_jax.language.chat.calculator import Functions, answer_ends
from train_jax.language.chat.messages import read_messages, render_chat
from train_jax.language.chat.schemas import schema_bias
from train_jax.language.chat.text_stream import Piece, TextStream, TokenText, answer_stream, joined
from train_jax.language.engine import Request
from train_jax.language.generation import encode_prompts
from train_jax.language.sampling import MOST_PROBABLE, Sampling
from train_jax.language.tokenizer import Tokenizer
from train_jax.serve.limits import ApiError, read_fields, refuse_others

_Kind = TypeVar("_Kind", bound="Fields")
_STOP_STRINGS = 4
_STOP_CHARACTERS = 256
_BIASED_TOKENS = 1024


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
    presence_penalty: Annotated[float, Range(-2, 2)] = 0.0
    """Is subtracted from the logits of tokens that the answer has."""
    frequency_penalty: Annotated[float, Range(-2, 2)] = 0.0
    """Is subtracted once for each time that the answer has a token."""

    OTHERS: ClassVar[tuple[str, ...]] = ("model", "stop", "stream_options", "logit_bias", "response_format")
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
    max_tokens: Annotated[int | None, Range(0, 2**20)] = 16
    echo: bool = False
    """Also return the prompt, with the log-probabilities of its tokens."""
    logprobs: Annotated[int | None, Range(0, MOST_PROBABLE)] = None
    best_of: Annotated[int, Range(1, 1, expected="1 (n is the number of choices)")] = 1

    OTHERS: ClassVar = (*Fields.OTHERS, "prompt")


_NEUTRAL: dict[str, Sequence[Any]] = {
    # of OpenAI
    "tools": ([],), "functions": ([],), "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"), "modalities": (["text"],),
    "suffix": ("",), "echo": (False,),
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
    echo: bool = False
    """The text of a choice begins with `Request.given`, and has the log-probability of the token that ended it."""
    first_tokens: Sequence[int | None] = ()
    """With `echo`, the token before `Request.given` that the text of each choice begins with; None for none."""
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
    most = fields.max_completion_tokens
    name = "max_completion_tokens"
    if most is None:
        most = fields.max_tokens
        name = "max_tokens"
    most = _room("messages", name, prompt, most, longest, capacity)
    stop = _stop_strings(body.get("stop"))
    ends = answer_ends(tokenizer, functions=functions)
    prompts = [Prompt(prompt, (), most)]
    options = ends | {"most_probable": fields.top_logprobs}
    requests = _requests(prompts, fields, options, _bias_of(body, fields, tokenizer, ends["stop"][0]))
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
    given = body.get("prompt", "")
    prompts = _prompts(given, tokenizer)
    of_texts = isinstance(given, str) or isinstance(given[0], str)  # a token was put before them
    if fields.echo and tokenizer.instructions:
        raise ApiError(400, "echo is true, and this model reads a prompt in both directions; leave it out", "echo")
    if len(prompts) * fields.n > 64:
        raise ApiError(400, f"{len(prompts)} prompts and n {fields.n} are more than 64 choices; use fewer", "prompt")
    stop = _stop_strings(body.get("stop"))
    sized = [_sized(prompt, fields, longest, capacity) for prompt in prompts]
    if fields.echo and stop:
        raise ApiError(400, "stop with echo would also end at the prompt's text; leave one of them out", "stop")
    options = {"stop": (tokenizer.stop,), "most_probable": fields.logprobs or 0}
    requests = _requests(sized, fields, options, _bias_of(body, fields, tokenizer, tokenizer.stop))
    return Call(
        TEXT,
        requests,
        lambda: TextStream(tokenizer, stop=stop),
        fields.stream,
        _include_usage(body),
        logprobs=fields.logprobs is not None,
        echo=fields.echo,
        first_tokens=[None if of_texts else request.prompt[0] for request in requests],
    )


class Prompt(NamedTuple):
    """The tokens before an answer."""

    tokens: tuple[int, ...]
    given: tuple[int, ...]
    """Tokens whose log-probabilities are returned with the answer."""
    most: int
    """The largest number of tokens after `tokens`."""


def _sized(tokens: tuple[int, ...], fields: TextFields, longest: int, capacity: int) -> Prompt:
    if not fields.echo:
        if fields.max_tokens == 0:
            raise ApiError(400, "max_tokens is 0 without echo; use at least 1", "max_tokens")
        return Prompt(tokens, (), _room("prompt", "max_tokens", tokens, fields.max_tokens, longest, capacity))
    # Without the first token, whose probability is not defined, all tokens come after others.
    given = tokens[1:]
    most = fields.max_tokens
    if most == 0:
        _room("prompt", "max_tokens", tokens, 1, longest, capacity + 1)
    else:
        most = _room("prompt", "max_tokens", tokens, most, longest, capacity)
    if not given and most == 0:
        raise ApiError(400, "max_tokens is 0, and the prompt has one token; use at least 1", "max_tokens")
    return Prompt(tokens[:1], given, len(given) + most)


def _bias_of(body: dict[str, Any], fields: Fields, tokenizer: Tokenizer, end: int) -> Callable[[], Bias | None]:
    """Returns a function that makes the bias of a choice, or None. Raises `ApiError` for wrong fields."""
    biases = _logit_bias(body.get("logit_bias"), tokenizer)
    penalties = {"presence": fields.presence_penalty, "frequency": fields.frequency_penalty}
    response_format = body.get("response_format")
    try:
        schema = schema_bias(tokenizer, end, response_format)  # a mistake is reported before anything is computed
    except UserError as error:
        raise ApiError(400, str(error), "response_format") from None

    def make() -> Bias | None:
        tokens = TokenBias(tokenizer.vocab_size, biases, **penalties) if biases or any(penalties.values()) else None
        if schema is None:
            return tokens
        return schema.fresh() if tokens is None else JointBias(schema.fresh(), tokens)

    return make


def _logit_bias(given: Any, tokenizer: Tokenizer) -> dict[int, float]:
    given = {} if given is None else given
    problem = f"logit_bias is {brief(given)}; use an object of tokens from 0 to {tokenizer.vocab_size - 1} and numbers"
    if not isinstance(given, dict) or len(given) > _BIASED_TOKENS:
        raise ApiError(400, f"{problem} from -100 to 100, at most {_BIASED_TOKENS}", "logit_bias")
    biases: dict[int, float] = {}
    for name, value in given.items():
        is_token = re.fullmatch(r"[0-9]{1,9}", name) and int(name) < tokenizer.vocab_size
        if not is_token or isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
            raise ApiError(400, f"{problem} from -100 to 100", "logit_bias")
        biases[int(name)] = float(value)
    return biases


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


def read_tokens(body: dict[str, Any], tokenizer: Tokenizer) -> list[int]:
    """Returns the tokens of `prompt` or `content`, a text, or of `messages`. Raises `ApiError` for another body."""
    special = body.get("add_special_tokens")
    if not isinstance(special, bool | None):
        raise ApiError(400, f"add_special_tokens is {brief(special)}; use true or false", "add_special_tokens")
    try:
        if body.get("messages") is not None:
            return list(render_chat(tokenizer, read_messages(body["messages"])))
        text = body.get("prompt") if body.get("content") is None else body["content"]
        if not isinstance(text, str):
            raise ApiError(400, f"prompt is {brief(text)}; use a text", "prompt")
        # llama.cpp's `content` is without a first token.
        with_first = special if special is not None else body.get("content") is None
        return list(encode_prompts(tokenizer, [text])[0]) if with_first else tokenizer.encode(text)
    except (ValueError, UserError) as error:
        raise ApiError(400, f"{error}", "messages" if "messages" in body else "prompt") from None


def token_list(tokens: Any, tokenizer: Tokenizer) -> list[int]:
    """Returns a list of tokens. Raises `ApiError` if it is none."""
    if not isinstance(tokens, list) or not _are_tokens(tokens, tokenizer):
        expected = f"a list of tokens from 0 to {tokenizer.vocab_size - 1}"
        raise ApiError(400, f"tokens is {brief(tokens)}; use {expected}", "tokens")
    return tokens


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


def _requests(
    prompts: Sequence[Prompt], fields: Fields, options: dict[str, Any], new_bias: Callable[[], Bias | None]
) -> list[Request]:
    seed = secrets.randbits(64) if fields.seed is None else fields.seed % 2**64
    sampling = Sampling(temperature=fields.temperature, top_k=fields.top_k, top_p=fields.top_p)
    return [
        Request(
            prompt=prompt.tokens,
            given=prompt.given,
            max_tokens=prompt.most,
            sampling=sampling,
            seed=seed,
            sample=sample,
            bias=new_bias(),
            **options,
        )
        for prompt in prompts
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
    def record(token: bytes, log_prob: float | None) -> dict[str, Any]:
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
        "top_logprobs": [
            {_shown(each): other for each, other in reversed(token.most_probable)} or None for token in tokens
        ]
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
