"""Problems in files: the layouts of the Hugging Face hub and .jsonl, made here.

`NANOCHAT_DIR=/path/to/nanochat` compares with the classes of a checkout at 92d63d4.
"""

import gzip
import importlib
import json
import sys

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from train_jax.errors import UserError
from train_jax.tasks.language.chat.conversations import Part, parse_conversation, to_json
from train_jax.tasks.language.chat.problems import multiple_choice
from train_jax.tasks.language.chat.task_names import task_name


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=3)
    else:
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def gsm8k(number):
    answer = (
        f"It is {number}+2=<<{number}+2={number + 2}>>{number + 2}.\nThen <<{number + 2}*1000>>!\n#### {number + 2},000"
    )
    return {"question": f"How much is {number}?", "answer": answer}


def arc(number):
    labels = [["A", "B", "C", "D"], ["1", "2", "3"]][number % 2]
    choices = {"text": [f"choice {label}" for label in labels], "label": labels}
    return {"id": f"{number}", "question": f"Why {number}?", "choices": choices, "answerKey": labels[number % 3]}


def mmlu(number):
    choices = [f"choice {n}" for n in range(4)]
    return {"question": f"Which {number}?", "subject": "anatomy", "choices": choices, "answer": number % 4}


def humaneval(number):
    prompt = f"from typing import List\n\n\ndef f{number}(x: int) -> int:\n    '''Adds.'''\n"
    test = f"def check(candidate):\n    assert candidate(1) == {number + 1}\n"
    solution = f"    return x + {number}\n"
    return {"task_id": f"HumanEval/{number}", "prompt": prompt, "canonical_solution": solution, "test": test,
            "entry_point": f"f{number}"}  # fmt: skip


def smoltalk(number):
    talk = [{"content": f"Hi {number}", "role": "user"}, {"content": "Hello", "role": "assistant"}]
    system = [{"content": "Be short.", "role": "system"}] if number % 2 else []
    return {"messages": system + talk, "source": "made"}


def in_hub_layout(folder):
    """The files of five data sets, as they are on the hub; items 0 to 3 of the test split are training items too."""
    for split, numbers in (("train", range(20)), ("test", [*range(4), *range(20, 28)])):
        write(folder / f"gsm8k/main/{split}-00000-of-00001.parquet", list(map(gsm8k, numbers)))
        write(folder / f"gsm8k/socratic/{split}-00000-of-00001.parquet", [gsm8k(1000)])
        write(folder / f"arc/ARC-Easy/{split}-00000-of-00001.parquet", list(map(arc, numbers)))
        write(folder / f"arc/ARC-Challenge/{split}-00000-of-00001.parquet", [arc(500), arc(501)])
        write(folder / f"smoltalk/data/{split}-00000-of-00001.parquet", list(map(smoltalk, numbers)))
        name = "auxiliary_train" if split == "train" else "test"
        write(folder / f"mmlu/all/{name}-00000-of-00001.parquet", list(map(mmlu, numbers)))
    write(folder / "mmlu/all/validation-00000-of-00001.parquet", [mmlu(700)])
    write(folder / "mmlu/anatomy/test-00000-of-00001.parquet", [mmlu(701)])
    write(folder / "humaneval/openai_humaneval/test-00000-of-00001.parquet", list(map(humaneval, range(12))))
    return folder


@pytest.fixture(scope="module")
def hub(made_once):
    return made_once("hub", in_hub_layout)


FOLDERS = {"gsm8k": "gsm8k", "arc-easy": "arc", "mmlu": "mmlu", "smoltalk": "smoltalk"}


@pytest.mark.parametrize("name", FOLDERS)
def test_the_hubs_files_are_read_and_splits_share_no_item(hub, name):
    train, test = (task_name(f"{name}@{hub / FOLDERS[name]}").open(split) for split in ("train", "test"))
    assert len(test) == 12 and len(train) == 16, "without the items that are also held out"
    texts = [{each.conversation(index)[0].text for index in range(len(each))} for each in (train, test)]
    assert not texts[0] & texts[1] and len(texts[0] | texts[1]) == 28
    for problems in (train, test):
        assert problems.kind == "dialogue" or all(
            problems.is_right(index, problems.conversation(index)[-1].text) for index in range(len(problems))
        )


def test_the_calls_of_an_answer_are_parts(tmp_path):
    write(tmp_path / "test.jsonl", [gsm8k(3)])
    problems = task_name(f"gsm8k@{tmp_path}").open("test")
    assert problems.conversation(0)[1].parts == (
        Part("text", "It is 3+2="), Part("python", "3+2"), Part("python_output", "5"), Part("text", "5.\nThen "),
        Part("python", "5*1000"), Part("python_output", ""), Part("text", "!\n#### 5,000"),
    )  # fmt: skip
    assert (
        problems.is_right(0, "so #### 5000 or #### 6")
        and not problems.is_right(0, "#### 5")
        and not problems.is_right(0, "5000")
    )


def test_choices_have_the_letters_of_their_row(hub):
    problems = task_name(f"arc-easy@{hub / 'arc'}").open("test")
    letters = {problems.problem(index).letters for index in range(len(problems))}
    assert letters == {("A", "B", "C", "D"), ("1", "2", "3")} and problems.baseline == 0.25
    assert len(task_name(f"arc-challenge@{hub / 'arc'}").open("test")) == 2


def test_rows_that_are_nested_are_read(tmp_path):
    write(tmp_path / "auxiliary_train/train-00000-of-00001.parquet", [{"train": mmlu(n)} for n in range(5)])
    write(tmp_path / "test/test-00000-of-00001.parquet", [mmlu(n) for n in range(1, 3)])
    assert len(task_name(f"mmlu@{tmp_path}").open("train")) == 3


def test_without_a_test_file_the_content_decides(tmp_path):
    for order, name in ((range(400), "some.jsonl"), (reversed(range(400)), "train.jsonl")):
        write(tmp_path / name, [smoltalk(number) for number in order])
    texts = {}
    for split in ("train", "test"):
        for name in ("some", "train"):
            problems = task_name(f"messages@{tmp_path / name}.jsonl").open(split, seed=len(name))
            texts[split, name] = {problems.conversation(index)[0].text for index in range(len(problems))}
    assert texts["train", "some"] == texts["train", "train"] and texts["test", "some"] == texts["test", "train"]
    assert not texts["train", "some"] & texts["test", "some"] and len(texts["test", "some"]) > 30


def test_the_packages_file_of_humaneval_is_read(tmp_path):
    write(tmp_path / "HumanEval.jsonl.gz", list(map(humaneval, range(3))))
    name = task_name(f"humaneval@{tmp_path / 'HumanEval.jsonl.gz'}")
    problems = name.open("test")
    assert len(problems) == 3 and problems.runs_code
    assert "def f" in problems.conversation(0)[0].text and "return x" in problems.conversation(0)[1].text
    with pytest.raises(UserError, match="has no problem in the train split"):
        name.open("train")


MISTAKES = {
    "gsm8k": ({"question": "a"}, "line 1 is no row of gsm8k (it has no 'answer')"),
    "gsm8k ": ({"question": "a", "answer": "5"}, "the answer has no number after ####"),
    "mmlu": (mmlu(0) | {"answer": 4}, "line 1 is no row of mmlu"),
    "arc-easy": (arc(0) | {"answerKey": "E"}, "the answer is 'E', expected one of A, B, C, D"),
    "messages": ({"messages": [{"role": "assistant", "content": "a"}]}, "message 1 is from 'assistant'"),
    "smoltalk": ([1], "1 is no message"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_row_that_is_wrong_is_named(tmp_path, name):
    row, message = MISTAKES[name]
    write(tmp_path / "train.jsonl", [row])
    with pytest.raises(UserError) as error:
        task_name(f"{name.strip()}@{tmp_path / 'train.jsonl'}").open("train").conversation(0)
    assert "train.jsonl" in str(error.value) and message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "content"), [("a.jsonl", b"{"), ("a.jsonl", b"\xff\xfe"), ("a.parquet", b"PAR1"), ("a.jsonl.gz", b"x")]
)
def test_a_file_that_cannot_be_read_is_one_line(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=r"a\.\S+ cannot be read \(.*\); give \.jsonl or \.parquet files"):
        task_name(f"messages@{tmp_path / name}").open("train")


def test_rows_are_read_in_groups_and_shuffled_as_published(tmp_path):
    """These are the cases of nanochat's tests at 92d63d4."""
    write(tmp_path / "test-00000-of-00001.parquet", [smoltalk(number) for number in range(100)])
    problems = task_name(f"smoltalk@{tmp_path}").open("test")
    numbers = np.random.default_rng(42).permutation(100)
    assert [problems.conversation(n)[0].text.split()[-1] for n in range(100)] == [str(n) for n in numbers]
    asked = multiple_choice("What is 1+1?", "AB", ["1", "2"])
    assert asked.startswith("Multiple Choice question: What is 1+1?\n- 1=A\n- 2=B\n\nRespond only with the letter")


PUBLISHED = {
    "gsm8k": ("openai/gsm8k", "main", "gsm8k", "GSM8K", {"subset": "main"}),
    "arc-easy": ("allenai/ai2_arc", "ARC-Easy", "arc", "ARC", {"subset": "ARC-Easy"}),
    "mmlu": ("cais/mmlu", "all", "mmlu", "MMLU", {"subset": "all"}),
    "humaneval": ("openai/openai_humaneval", "openai_humaneval", "humaneval", "HumanEval", {}),
    "smoltalk": ("HuggingFaceTB/smol-smoltalk", "default", "smoltalk", "SmolTalk", {}),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_conversations_are_the_published_ones_in_the_published_order(hub, name, nanochat, tmp_path, monkeypatch):
    repository, subset, module, published, options = PUBLISHED[name]
    folder = FOLDERS.get(name, name)
    shards = [path for path in (hub / folder).rglob("test-*.parquet") if path.parent.name in (subset, "data")]
    cache = tmp_path / "task_data" / repository.replace("/", "--") / subset / "test"
    cache.mkdir(parents=True)
    (cache / "manifest.json").write_text(json.dumps([str(path) for path in shards]))
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    split = {} if name == "humaneval" else {"split": "test"}
    try:
        task = getattr(importlib.import_module(f"tasks.{module}"), published)(**options, **split)
    finally:
        for loaded in [loaded for loaded in sys.modules if loaded.partition(".")[0] == "tasks"]:
            del sys.modules[loaded]
    problems = task_name(f"{name}@{hub / folder}").open("test")
    assert len(problems) == len(task) == 12
    for index in range(len(task)):
        conversation, expected = problems.conversation(index), task[index]
        assert _texts(to_json(conversation)) == _texts(to_json(parse_conversation(expected)))
        if problems.kind == "categorical":
            assert problems.problem(index).letters == tuple(expected["letters"])
        if name == "gsm8k":
            for answer in (conversation[-1].text, "#### 7", "#### 22,000.", "22000"):
                assert problems.is_right(index, answer) == task.evaluate(expected, answer)


def _texts(record):
    """Returns roles and parts, without empty parts, which have no tokens."""
    empty = {"type": "text", "text": ""}
    return [(message["role"], [part for part in message["content"] if part != empty]) for message in record["messages"]]
