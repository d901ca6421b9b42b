"""Conversations, their tokens, and which of these a model learns to write.

A conversation begins with <|bos|>. A user's message stands between <|user_start|> and <|user_end|>, an assistant's
between <|assistant_start|> and <|assistant_end|>, with calls of Python and their outputs between tokens of their own.
The assistant writes its text, its calls and the end of its message; the output comes from Python.

A file of conversations has one JSON object on each line, such as

    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}

or the list of messages alone. The content of an assistant's message may be a list of parts, such as
`{"type": "python", "text": "1 + 2"}`; the types are `text`, `python` and `python_output`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from train_jax.errors import UserError, brief
from train_jax.language.tokenizer import SPECIAL_TOKENS, Tokenizer

PartType = Literal["text", "python", "python_output"]


@dataclass(frozen=True)
class Part:
    """A part of an assistant's message."""

    type: PartType
    text: str


@dataclass(frozen=True)
class Message:
    """The message of one side."""

    role: Literal["user", "assistant", "system"]
    """A conversation to train on has no system message; its text stands before that of the user."""
    parts: tuple[Part, ...]

    @property
    def text(self) -> str:
        """The text without calls and their outputs."""
        return "".join(part.text for part in self.parts if part.type == "text")


Conversation = tuple[Message, ...]
"""Messages of the user and the assistant in turn; the user begins."""


def user(text: str) -> Message:
    return Message("user", (Part("text", text),))


def assistant(*parts: str | Part) -> Message:
    """Returns a message of these parts; a string is a part of text."""
    return Message("assistant", tuple(Part("text", part) if isinstance(part, str) else part for part in parts))


class Rendered(NamedTuple):
    """The tokens of a conversation."""

    tokens: list[int]
    weights: list[int]
    """1 for each token that the assistant writes, 0 for the others."""


def render(tokenizer: Tokenizer, conversation: Conversation) -> Rendered:
    """Returns the tokens of a conversation. Raises `UserError` for a text that is not valid UTF-8."""
    special = special_tokens(tokenizer)
    tokens = [tokenizer.bos]
    weights = [0]

    def add(ids: Sequence[int], weight: int) -> None:
        tokens.extend(ids)
        weights.extend([weight] * len(ids))

    for message in conversation:
        writes = int(message.role == "assistant")
        add([special[f"<|{message.role}_start|>"]], 0)
        for part, ids in zip(message.parts, _encoded(tokenizer, message.parts), strict=True):
            if part.type == "text":
                add(ids, writes)
            elif part.type == "python":
                add([special["<|python_start|>"], *ids, special["<|python_end|>"]], 1)
            else:
                add([special["<|output_start|>"], *ids, special["<|output_end|>"]], 0)
        add([special[f"<|{message.role}_end|>"]], writes)
    return Rendered(tokens, weights)


def render_prompt(tokenizer: Tokenizer, conversation: Conversation) -> tuple[int, ...]:
    """Returns the tokens after which the assistant answers; the last message is the user's.

    A model that was trained on instructions reads the messages as the lines of one.
    """
    if tokenizer.instructions:
        text = "\n".join(message.text for message in conversation)
        return tokenizer.instructions.prompt(_encoded(tokenizer, (Part("text", text),))[0])
    return (*render(tokenizer, conversation).tokens, special_tokens(tokenizer)["<|assistant_start|>"])


def _encoded(tokenizer: Tokenizer, parts: Sequence[Part]) -> list[list[int]]:
    try:
        return tokenizer.encode_batch([part.text for part in parts])
    except UnicodeEncodeError:
        raise UserError(f"{brief(parts[0].text)} is not valid UTF-8; correct it") from None


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Returns the ids of the tokens of conversations. Raises `UserError` if the tokenizer has not all of them."""
    missing = [name for name in SPECIAL_TOKENS if name not in tokenizer.specials]
    if missing:
        raise UserError(
            f"the tokenizer has no token {missing[0]}, which conversations need; build one with `trm tokenizer train`"
        )
    return tokenizer.specials


# ---- JSON


def parse_conversation(record: Any) -> Conversation:
    """Reads `{"messages": […]}` or a list of messages; raises ValueError with the reason if it is neither.

    A first message of the role `system` is put before the first one of the user, with an empty line between them.
    """
    messages = record.get("messages") if isinstance(record, dict) else record
    if not isinstance(messages, list) or not messages:
        raise ValueError(f'{brief(record)} is no conversation; expected {{"messages": [{{"role": …, "content": …}}]}}')
    fields = [_fields(message) for message in messages]
    if fields[0][0] == "system":
        if len(fields) < 2 or fields[1][0] != "user":
            raise ValueError("a system message has no message of the user after it; add one")
        texts = [fields[number][1][0].text for number in (0, 1)]
        fields[:2] = [("user", (Part("text", "\n\n".join(texts)),))]
    for number, (role, _) in enumerate(fields):
        expected = "assistant" if number % 2 else "user"
        if role != expected:
            raise ValueError(f"message {number + 1} is from {role!r}; expected one from {expected}")
    return tuple(Message(role, parts) for role, parts in fields)  # pyright: ignore[reportArgumentType]


def _fields(message: Any) -> tuple[str, tuple[Part, ...]]:
    role, content = (message.get(name) for name in ("role", "content")) if isinstance(message, dict) else (None, None)
    if role not in ("system", "user", "assistant"):
        raise ValueError(f"{brief(message)} is no message; expected a role (system, user or assistant) and content")
    return role, parse_parts(role, content)


def parse_parts(role: str, content: Any) -> tuple[Part, ...]:
    """Reads the content of a message: a text, or the parts of an assistant's. Raises ValueError for another one."""
    if isinstance(content, str):
        return (Part("text", content),)
    if role != "assistant" or not isinstance(content, list) or not content:
        raise ValueError(f"the content {brief(content)} of a message from {role} is not text")
    return tuple(map(_part, content))


def _part(part: Any) -> Part:
    kind, text = (part.get(name) for name in ("type", "text")) if isinstance(part, dict) else (None, None)
    if kind not in ("text", "python", "python_output") or not isinstance(text, str):
        raise ValueError(f"{brief(part)} is no part; expected a type (text, python or python_output) and a text")
    return Part(kind, text)


def to_json(conversation: Conversation) -> dict[str, Any]:
    """Returns the object that `parse_conversation` reads."""

    def content(message: Message) -> Any:
        plain = [part.type for part in message.parts] == ["text"]
        return message.text if plain else [{"type": part.type, "text": part.text} for part in message.parts]

    return {"messages": [{"role": message.role, "content": content(message)} for message in conversation]}
