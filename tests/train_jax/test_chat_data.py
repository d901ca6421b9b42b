"""`trm build-data chat`: conversations and problems as a text data set with weights, and its recipe."""

import json

import numpy as np
import pytest

from train_jax.__main__ import main as trm
from train_jax.tasks.language.chat.building import ChatData, mixed, question_of
from train_jax.tasks.language.chat.task_names import task_name
from train_jax.tasks.language.text_set import TextSet
from train_jax.tasks.language.tokenizer import Tokenizer

TASKS = ("arithmetic,digits=1:100", "calculator:50", "identity,name=Ada:150")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    Tokenizer({bytes([number]): number for number in range(256)}).save(folder)
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
    data = ChatData(output_dir=output_dir, tokenizer=tokenizer, **fields)
    return data.build(lambda *_: None)


def documents(data, split):
    """Returns the texts of each document, and those of weight 1."""
    stream = data.stream(split)
    tokens, weights = stream.take(0, len(stream)), stream.weights.take(0, len(stream))
    names = {number: f"[{name[2:-2]}]" for name, number in data.tokenizer().specials.items()}
    starts = np.flatnonzero(tokens == data.tokenizer().bos)

    def text(ids):
        return "".join(names.get(number) or chr(number) for number in ids)

    return [
        (text(part), text(part[mask == 1]))
        for part, mask in zip(np.split(tokens, starts)[1:], np.split(weights, starts)[1:], strict=True)
    ]


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
    assert data.record["recipe"]["licenses"] == {
        f"messages@{source}": "CC0-1.0", **dict.fromkeys(TASKS, "generated")
    }  # fmt: skip
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
    asked = [
        {whole.partition("[user_end]")[0].removeprefix("[bos][user_start]") for whole, _ in documents(data, split)}
        for split in ("train", "test")
    ]
    assert questions <= asked[1] and not asked[0] & asked[1]
    assert question_of(held_out.conversation(0)) in asked[1]


def test_a_mixture_has_each_problem_once_and_is_no_sequence():
    """The cases of nanochat's tests at 92d63d4."""
    tasks = ["abc", "defgh", "abc"]
    places = mixed("train", tasks, seed=0)
    assert sorted(places) == sorted((task, number) for task in tasks for number in range(len(task)))
    assert [task[number] for task, number in places] == list("dchcbbeaagf") and places == mixed("train", tasks, seed=0)
    assert places != mixed("train", tasks, seed=1) and places != mixed("test", tasks, seed=0)


def test_the_build_is_a_function_of_its_options(tmp_path, tokenizer, source):
    for name, fields in (("a", {}), ("b", {}), ("c", {"seed": 1}), ("d", {"tasks": TASKS[:1]})):
        build(tmp_path / name, tokenizer, **({"source": (source,), "tasks": TASKS} | fields))
    prints = {name: TextSet(tmp_path / name).fingerprint for name in "abcd"}
    assert prints["a"] == prints["b"] and len(set(prints.values())) == 3


def test_the_command_builds_and_inspects(tmp_path, tokenizer, source, capsys):
    options = ["--tokenizer", tokenizer, "--output-dir", str(tmp_path / "chat")]
    assert trm(["build-data", "chat", "--source", source, "--tasks", *TASKS, *options]) == 0
    said = capsys.readouterr().out
    assert "chat built in" in said and "licenses: " in said and "generated" in said
    assert trm(["build-data", "inspect", str(tmp_path / "chat")]) == 0
    assert said.splitlines()[1:] == capsys.readouterr().out.splitlines()[1:]
