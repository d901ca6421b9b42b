"""The messages of a request for an answer, in the forms that OpenAI's clients send.

Roles come in any order, and a system message anywhere. A model was trained on messages of the user and the assistant in
turn, so that messages of one side that follow each other become one, with an empty line between them; a system message
is put before the next message of the user. A last message of the assistant is the beginning of the answer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from train_jax.errors import brief
from train_jax.language.chat.conversations import (
    Conversation,
    Message,
    Part,
    parse_parts,
    render,
    special_tokens,
)
from train_jax.language.chat.conversations import render_prompt as render_turns
from train_jax.language.tokenizer import Tokenizer

_SYSTEM_ROLES = ("system", "developer")
_GAP = "\n\n"


class ChatPrompt(NamedTuple):
    """What a model reads before it answers."""

    turns: Conversation
    """The messages in turn; the last one is the user's unless there is none."""
    begun: Message | None
    """The beginning of the answer, if the request has one."""


def read_messages(messages: Any) -> ChatPrompt:
    """Reads the messages of a request. Raises ValueError with the reason if they are wrong."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(f'{brief(messages)} is no conversation; expected [{{"role": …, "content": …}}]')
    turns: list[Message] = []
    instructions: list[str] = []
    for message in map(_read_message, messages):
        if message.role == "system":
            instructions.append(message.text)
            continue
        if message.role == "user" and instructions:
            message = Message("user", (Part("text", _GAP.join([*instructions, message.text])),))
            instructions = []
        _append(turns, message)
    if instructions:
        _append(turns, Message("user", (Part("text", _GAP.join(instructions)),)))
    begun = turns.pop() if turns[-1].role == "assistant" else None
    return ChatPrompt(tuple(turns), begun)


def _append(turns: list[Message], message: Message) -> None:
    """Adds a message; to the last one if that is of the same side."""
    if turns and turns[-1].role == message.role:
        parts = (*turns.pop().parts, Part("text", _GAP), *message.parts)
        if message.role == "user":
            parts = (Part("text", "".join(part.text for part in parts)),)  # one text is encoded at once
        message = Message(message.role, parts)
    turns.append(message)


def _read_message(message: Any) -> Message:
    role = message.get("role") if isinstance(message, dict) else None
    if role in _SYSTEM_ROLES:
        role = "system"
    if role not in ("system", "user", "assistant"):
        raise ValueError(
            f"{brief(message)} is no message that is served here; expected a role (system, developer, user or "
            "assistant) and content"
        )
    for name in ("tool_calls", "function_call", "audio"):
        if message.get(name):
            raise ValueError(f"{name} of a message is not supported here; leave it out")
    content = message.get("content")
    if content is None:
        content = ""
    if isinstance(content, list) and content and all(map(_is_text, content)):
        content = "".join(part["text"] for part in content)
    return Message(role, parse_parts(role, content))


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def render_chat(tokenizer: Tokenizer, prompt: ChatPrompt) -> tuple[int, ...]:
    """Returns the tokens after which the answer follows. Raises `UserError` for a text that is not valid UTF-8.

    Raises ValueError for an answer that was begun, if the model was trained on instructions: it reads these tokens in
    both directions.
    """
    if prompt.begun is None:
        return render_turns(tokenizer, prompt.turns)
    if tokenizer.instructions:
        raise ValueError("the last message is from the assistant, whose answer this model cannot continue; remove it")
    end = special_tokens(tokenizer)["<|assistant_end|>"]
    tokens = render(tokenizer, (*prompt.turns, prompt.begun)).tokens
    assert tokens[-1] == end
    return tuple(tokens[:-1])
