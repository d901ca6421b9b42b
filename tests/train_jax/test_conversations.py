"""Conversations as tokens, their files, and the calculator.

`NANOCHAT_DIR=/path/to/nanochat` compares with the tokenizer of a checkout at 92d63d4, too.
"""

import hashlib
import json
import os

import pytest
from support.made_conversations import made_conversations
from support.scripts import run_script

from train_jax.errors import UserError
from train_jax.tasks.language.chat.calculator import calculate, tool_of
from train_jax.tasks.language.chat.conversations import (
    Part,
    assistant,
    parse_conversation,
    read_conversations,
    render,
    render_prompt,
    to_json,
    user,
)
from train_jax.tasks.language.tokenizer import SPECIAL_TOKENS, Tokenizer

BYTES = Tokenizer({bytes([number]): number for number in range(256)})
"""A token for each byte; the special ones follow in their order."""
NAMES = {number: f"[{name[2:-2]}]" for name, number in BYTES.specials.items()}


def text_of(tokens):
    return "".join(NAMES.get(number) or chr(number) for number in tokens)


def marked(conversation):
    """Returns the text of the tokens that the assistant writes, and all of them."""
    tokens, weights = render(BYTES, conversation)
    return text_of(token for token, weight in zip(tokens, weights, strict=True) if weight), text_of(tokens)


def test_the_assistant_writes_its_text_its_calls_and_the_end():
    call = assistant("sure ", Part("python", "1+1"), Part("python_output", "2"), "it is 2")
    learned, everything = marked((user("add"), call, user("ok")))
    assert everything == (
        "[bos][user_start]add[user_end][assistant_start]sure [python_start]1+1[python_end][output_start]2[output_end]"
        "it is 2[assistant_end][user_start]ok[user_end]"
    )
    assert learned == "sure [python_start]1+1[python_end]it is 2[assistant_end]"
    prompt = render_prompt(BYTES, (user("add"), call, user("ok")))
    assert text_of(prompt) == everything + "[assistant_start]"


def test_made_conversations_are_rendered_as_published():
    """The hash is that of the published rendering, which `test_the_published_tests_pass` compares."""
    digest = hashlib.sha256()
    for record in made_conversations(200):
        digest.update(json.dumps(list(render(BYTES, parse_conversation(record)))).encode())
    assert digest.hexdigest()[:16] == "b7bc38e8aca33479"


def test_a_conversation_comes_back_from_json():
    for record in made_conversations(50):
        conversation = parse_conversation(record)
        assert parse_conversation(json.loads(json.dumps(to_json(conversation)))) == conversation


@pytest.mark.slow
@pytest.mark.skipif("NANOCHAT_DIR" not in os.environ, reason="set NANOCHAT_DIR to a checkout of nanochat at 92d63d4")
def test_the_published_tests_pass():
    """2 000 conversations are rendered alike, and nanochat's own tests pass on an adapter."""
    said = run_script("nanochat_tokenizer")
    assert "2000 conversations" in said and "10 passed" in said and "skipped" not in said, said


MISTAKES = {
    "a list of numbers": ("[1]", "1 is no message; expected a role"),
    "no messages": ('{"prompt": "a"}', "is no conversation; expected"),
    "two users": ('[{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]', "message 2 is from 'user'"),
    "the assistant begins": ('[{"role": "assistant", "content": "a"}]', "message 1 is from 'assistant'"),
    "a system alone": ('[{"role": "system", "content": "a"}]', "has no message of the user after it"),
    "parts of the user": ('[{"role": "user", "content": [{"type": "text", "text": "a"}]}]', "from user is not text"),
    "an image": (
        '[{"role": "user", "content": "a"}, {"role": "assistant", "content": [{"type": "image", "text": "a"}]}]',
        "is no part; expected a type (text, python or python_output)",
    ),
    "no JSON": ("{", "line 2: "),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_line_that_is_no_conversation_is_named(tmp_path, name):
    line, message = MISTAKES[name]
    path = tmp_path / "talk.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "a"}]}\n' + line + "\n")
    with pytest.raises(UserError) as error:
        list(read_conversations(path))
    assert "talk.jsonl line 2" in str(error.value) and message in str(error.value)


def test_a_tokenizer_without_the_special_tokens_is_refused():
    with pytest.raises(UserError, match=r"no token <\|user_start\|>"):
        render(Tokenizer({bytes([n]): n for n in range(256)}, specials=SPECIAL_TOKENS[:1]), (user("a"),))


# ---- the calculator

EXPRESSIONS = {
    "1 + 2": "3",
    "1,234 * 2": "2468",
    "-(3 - 5) / 4": "0.5",
    "7 // 2 % 2": "1",
    "'strawberry'.count('r')": "3",
    '"a,b".count(",")': "1",
    "2 ** 9": None,
    "1 / 0": None,
    "9 * 9 * 9)": None,
    "abs(1)": None,
    "'a' * 9": None,
    "'a'.upper()": None,
    "__import__('os')": None,
    "True + 1": None,
    "1e400": None,
    "(" * 150 + "1": None,
    "9" * 201: None,
    "9" * 80: None,
    "": None,
}


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_the_calculator_computes_sums_products_and_counts_alone(expression):
    assert calculate(expression) == EXPRESSIONS[expression]


def test_the_calculator_calls_its_functions_alone():
    functions = {"half": lambda text: text[: len(text) // 2] or None}
    expected = {"half('abcd')": "ab", ' half("a")': None, "half(1)": None, "half('a', 'b')": None, "whole('a')": None}
    assert {call: calculate(call, functions) for call in expected} == expected
    assert calculate("half('abcd') + 1", functions) is calculate("half('abcd')") is None
    assert calculate("1 + 2", functions) == "3"


def test_the_output_of_a_call_follows_it():
    respond = tool_of(BYTES)
    special = BYTES.specials

    def call(text):
        return [special["<|python_start|>"], *text.encode(), special["<|python_end|>"]]

    earlier = [*b"so ", *call("1+1"), *b" and "]
    assert text_of(respond([*earlier, *call("3*4")])) == "[output_start]12[output_end]"
    assert respond([*earlier, *call("x")]) == respond([special["<|python_end|>"]]) == []
    assert respond([*earlier, special["<|assistant_end|>"]]) is None
