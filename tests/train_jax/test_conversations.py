"""Conversations as tokens, data sets of them, and the calculator.

`NANOCHAT_DIR=/path/to/nanochat` compares with the tokenizer of a checkout at 92d63d4, too.
"""

import hashlib
import json
import os

import numpy as np
import pytest
from support.made_conversations import made_conversations
from support.scripted_model import BYTES
from support.scripts import run_script

from train_jax.__main__ import main as trm
from train_jax.errors import UserError
from train_jax.language.chat.building import ChatData, question_of
from train_jax.language.chat.calculator import calculate, tool_of
from train_jax.language.chat.conversations import (
    Part,
    assistant,
    parse_conversation,
    render,
    render_prompt,
    to_json,
    user,
)
from train_jax.language.chat.task_names import task_name
from train_jax.language.text_set import TextSet
from train_jax.language.tokenizer import SPECIAL_TOKENS, Tokenizer

# ---- tokens

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
    with pytest.raises(UserError, match=r"no token <\|user_start\|>"):
        render(Tokenizer(BYTES.ranks, specials=SPECIAL_TOKENS[:1]), (user("a"),))


def test_made_conversations_are_rendered_as_published_and_come_back_from_json():
    """The hash is that of the published rendering, which `test_the_published_tests_pass` compares."""
    digest = hashlib.sha256()
    for record in made_conversations(200):
        conversation = parse_conversation(record)
        digest.update(json.dumps(list(render(BYTES, conversation))).encode())
        assert parse_conversation(json.loads(json.dumps(to_json(conversation)))) == conversation
    assert digest.hexdigest()[:16] == "b7bc38e8aca33479"


@pytest.mark.slow
@pytest.mark.skipif("NANOCHAT_DIR" not in os.environ, reason="set NANOCHAT_DIR to a checkout of nanochat at 92d63d4")
def test_the_published_tests_pass():
    """2 000 conversations are rendered alike, and nanochat's own tests pass on an adapter."""
    said = run_script("nanochat_tokenizer")
    assert "2000 conversations" in said and "10 passed" in said and "skipped" not in said, said


MISTAKES = {
    "a list of numbers": ("[1]", "1 is no message; expected a role"),
    "two users": ('[{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]', "message 2 is from 'user'"),
    "a system alone": ('[{"role": "system", "content": "a"}]', "has no message of the user after it"),
    "parts of the user": ('[{"role": "user", "content": [{"type": "text", "text": "a"}]}]', "from user is not text"),
    "an image": (
        '[{"role": "user", "content": "a"}, {"role": "assistant", "content": [{"type": "image", "text": "a"}]}]',
        "is no part; expected a type (text, python or python_output)",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_is_no_conversation_is_named(name):
    content, message = MISTAKES[name]
    with pytest.raises(ValueError) as error:
        parse_conversation(json.loads(content))
    assert message in str(error.value)


# ---- the calculator

EXPRESSIONS = {
    "1 + 2": "3",
    "1,234 * 2": "2468",
    "-(3 - 5) / 4": "0.5",
    "0.2*50": "10",
    "100/5": "20",
    "70*.01*90": "63",
    "6*0.10": "0.6",
    "0.1+0.2-0.3": "0",
    "7.5//2": "3",
    "-7 % 2.5": "0.5",
    "1/3": "0.3333333333333333",
    "9" * 30 + "+1": "1" + "0" * 30,
    "7 // 2 % 2": "1",
    "'strawberry'.count('r')": "3",
    "2 ** 9": None,
    "1 / 0": None,
    "'a' * 9": None,
    "__import__('os')": None,
    "True + 1": None,
    "1e400": None,
    "1e300*1e300": None,
    "2j + 1": None,
    "(" * 150 + "1": None,
    "9" * 201: None,
}


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_the_calculator_computes_sums_products_and_counts_alone(expression):
    assert calculate(expression) == EXPRESSIONS[expression]


def test_the_output_of_a_call_follows_it():
    respond = tool_of(BYTES)
    special = BYTES.specials

    def call(text):
        return [special["<|python_start|>"], *text.encode(), special["<|python_end|>"]]

    earlier = [*b"so ", *call("1+1"), *b" and "]
    assert text_of(respond([*earlier, *call("3*4")])) == "[output_start]12[output_end]"
    assert respond([*earlier, *call("x")]) == respond([special["<|python_end|>"]]) == []
    assert respond([*earlier, special["<|assistant_end|>"]]) is None


# ---- data sets

TASKS = ("arithmetic,digits=1:100", "calculator:50", "identity,name=Ada:150")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    BYTES.save(folder)
    return str(folder)


@pytest.fixture
def source(tmp_path):
    """Returns 100 conversations, of which the first 50 repeat text of others."""
    path = tmp_path / "talk.jsonl"
    talks = [[("user", f"q {n % 50}"), ("assistant", f"a {n}")] for n in range(100)]
    records = [{"messages": [{"role": role, "content": text} for role, text in talk]} for talk in talks]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def build(output_dir, tokenizer, **fields):
    return ChatData(output_dir=output_dir, tokenizer=tokenizer, **fields).build(lambda *_: None)


def documents(data, split):
    """Returns the texts of each document, and those of weight 1."""
    stream = data.stream(split)
    tokens = stream.take(0, len(stream))
    weights = stream.weights.take(0, len(stream))
    starts = np.flatnonzero(tokens == data.tokenizer().bos)
    parts = zip(np.split(tokens, starts)[1:], np.split(weights, starts)[1:], strict=True)
    return [(text_of(part), text_of(part[mask == 1])) for part, mask in parts]


def test_conversations_and_problems_are_documents_with_weights(tmp_path, tokenizer, source):
    assert build(tmp_path / "chat", tokenizer, source=(source,), tasks=TASKS, license="CC0-1.0")
    data = TextSet(tmp_path / "chat")
    train, test = (documents(data, split) for split in ("train", "test"))
    for whole, learned in train + test:
        assert whole.startswith("[bos][user_start]") and learned.endswith("[assistant_end]")
    calls = [learned for whole, learned in train if "[output_start]" in whole]
    assert len(calls) == 50 and all("[python_start]" in call and "output" not in call for call in calls)
    assert 300 < len(train) <= 300 + 100 and data.splits["train"].documents == len(train)
    assert sum("Ada" in whole for whole, _ in train) == 150
    kinds = ["Ada" in whole for whole, _ in train]
    assert 20 < sum(kinds[:100]) < 80, "they are mixed"
    licenses = {f"messages@{source}": "CC0-1.0", **dict.fromkeys(TASKS, "generated")}
    assert data.record["recipe"]["licenses"] == licenses
    assert not build(tmp_path / "chat", tokenizer, source=(source,), tasks=TASKS, license="CC0-1.0"), "it is kept"


def test_no_question_of_the_test_split_is_in_the_train_split(tmp_path, tokenizer, source):
    """Here the file has the held-out questions of the task, with other answers."""
    held_out = task_name("identity:50").open("test")
    questions = {held_out.conversation(index)[0].text for index in range(len(held_out))}
    with open(source, "a") as lines:
        for asked in sorted(questions):
            messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": "I do not say"}]
            lines.write(json.dumps({"messages": messages}) + "\n")
    build(tmp_path / "chat", tokenizer, source=(source,), tasks=("identity:50",), test_share=0.5)
    data = TextSet(tmp_path / "chat")
    train, test = (
        {whole.partition("[user_end]")[0].removeprefix("[bos][user_start]") for whole, _ in documents(data, split)}
        for split in ("train", "test")
    )
    assert questions <= test and not train & test and question_of(held_out.conversation(0)) in test


def test_the_command_builds(tmp_path, tokenizer, source, capsys):
    options = ["--tokenizer", tokenizer, "--output-dir", str(tmp_path / "chat")]
    assert trm(["build-data", "chat", "--source", source, "--tasks", *TASKS, *options]) == 0
    said = capsys.readouterr().out
    assert "chat built in" in said and "licenses: " in said and "generated" in said
