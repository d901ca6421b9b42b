"""Problems that are generated: their answers, their splits, and their names on a command line."""

import hashlib
import inspect
import json
import sys

import pytest
from support import made_gym
from support.made_wordnet import MEANINGS, make_wordnet

from train_jax.errors import UserError
from train_jax.tasks.language.chat.calculator import calculate
from train_jax.tasks.language.chat.conversations import to_json
from train_jax.tasks.language.chat.problems import words
from train_jax.tasks.language.chat.sudoku import Sudoku, solve, solved_grids
from train_jax.tasks.language.chat.task_names import TASKS, task_name

GENERATED = (
    "arithmetic",
    "arithmetic,operations=3,digits=1",
    "calculator",
    "sudoku",
    "spelling",
    "counting",
    "identity",
)


def conversations(text, split, **fields):
    problems = task_name(text).open(split, **fields)
    return [problems.conversation(index) for index in range(len(problems))]


def questions(text, split, **fields):
    return {conversation[0].text for conversation in conversations(text, split, **fields)}


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
    digests = {}
    for text in ("arithmetic", "arithmetic,operations=3", "calculator", "identity"):
        records = [to_json(talk) for split in ("train", "test") for talk in conversations(f"{text}:50", split)]
        digests[text] = hashlib.sha256(json.dumps(records).encode()).hexdigest()[:8]
    assert digests == {
        "arithmetic": "fa96e85f",
        "arithmetic,operations=3": "1ea0b939",
        "calculator": "ca0b9f42",
        "identity": "7ca272ec",
    }


@pytest.mark.parametrize("text", ["arithmetic,digits=1:200", "calculator,digits=1:200", "arithmetic,operations=2:400"])
def test_train_and_test_share_no_expression_in_any_order(text):
    """This holds with other seeds, other words around it, and the other of the two tasks."""
    other = text.replace("calculator", "arithmetic")

    def contents(name, split, seed):
        problems = task_name(name).open(split, seed=seed)
        terms = [item.split() for item in problems._items]
        return {tuple(each if "-" in each or len(each) > 3 else sorted(each)) for each in terms}

    train, test = contents(text, "train", 0), contents(other, "test", 1)
    assert len(train) > 100 and len(test) > 20 and not train & test


def test_train_and_test_share_no_word(wordnet):
    for first, second in (("spelling", "counting"), ("counting", "spelling"), ("spelling", "spelling")):
        train = {talk[-1].text.partition(":")[0] for talk in conversations(first, "train")}
        test = {talk[-1].text.partition(":")[0] for talk in conversations(second, "test", seed=5)}
        assert train | test == set(words()) and not train & test
    assert not questions("identity", "train") & questions("identity,name=Ada", "test", seed=2)
    meanings = [
        {talk[0].text.splitlines()[0] for talk in conversations(f"glosses@{wordnet}", split)}
        for split in ("train", "test")
    ]
    assert not meanings[0] & meanings[1] and len(meanings[0] | meanings[1]) == sum(map(len, MEANINGS.values()))


def test_held_out_problems_come_once():
    """There are 25 expressions or so; training items come again."""
    test = task_name("arithmetic,digits=1:5000").open("test")
    assert len(set(test._items)) == len(test) < 60
    train = task_name("arithmetic,digits=1,operators=+:500").open("train")
    assert len(train) == 500 > len(set(train._items)) > 70
    assert len(task_name("identity:5000").open("train")) == 5000 > 50 > len(task_name("identity:5000").open("test"))


def test_each_step_of_an_expression_has_its_value():
    for talk in conversations("arithmetic,operations=4:50", "train"):
        steps = talk[1].text.split(" = ")
        assert len(steps) == 4 and len({calculate(step) for step in steps}) == 1, talk


@pytest.mark.parametrize("empty", [9, 1])
def test_a_sudoku_has_one_solution_which_its_call_has_and_splits_share_none(empty):
    assert len({*solved_grids()}) == 288
    asked = {}
    for split in ("train", "test"):
        talks = conversations(f"sudoku,empty={empty}:100", split)
        calls = [next(part.text for part in talk[1].parts if part.type == "python") for talk in talks]
        for talk, call in zip(talks, calls, strict=True):
            givens, answer = call.removeprefix('sudoku("').removesuffix('")'), talk[1].text
            assert givens in talk[0].text and givens.count(".") == empty and calculate(call, Sudoku.functions) == answer
            agreeing = [a == b for a, b in zip(givens, answer, strict=True) if a != "."]
            assert all(agreeing) and answer.replace("|", "") in solved_grids()
        asked[split] = {*calls}
    assert len(asked["train"]) == len(asked["test"]) == 100 and not asked["train"] & asked["test"]
    assert solve("." * 16) is solve("1") is solve("11" + "." * 14) is None


def test_a_share_of_the_answers_is_the_result_alone():
    """The questions are the same with steps and without."""
    name = "arithmetic,operations=3,digits=1"
    whole, half = (conversations(f"{name}{option}:200", "train") for option in ("", ",steps=50"))
    assert [talk[0] for talk in whole] == [talk[0] for talk in half]
    ends = [talk[1].text.split(" = ")[-1] for talk in whole]
    alone = [talk[1].text == end for talk, end in zip(half, ends, strict=True)]
    assert 70 < sum(alone) < 130
    assert all(talk[1].text in (full[1].text, end) for talk, full, end in zip(half, whole, ends, strict=True))


def test_the_calculator_says_what_the_answer_is():
    for talk in conversations("calculator,operations=2:50", "train") + conversations("counting:50", "test"):
        call, output = (next(p.text for p in talk[1].parts if p.type == kind) for kind in ("python", "python_output"))
        assert calculate(call) == output and talk[1].text.endswith(output)


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


def test_small_talk_ends_with_an_answer(tmp_path):
    talks = [["Hi", "Hello", "How are you?"], ["alone"], ["1", 2], *([f"q {n}", f"a {n}"] for n in range(50))]
    (tmp_path / "talk.yml").write_text(json.dumps({"conversations": talks}))
    found = conversations(f"smalltalk@{tmp_path}", "train") + conversations(f"smalltalk@{tmp_path}", "test")
    assert (
        sorted(tuple(m.text for m in talk) for talk in found)[:2] == [("1", "2"), ("Hi", "Hello")] and len(found) == 52
    )
    (tmp_path / "worse.yml").write_text("- 1")
    with pytest.raises(UserError, match=r"worse\.yml is not a file of chatterbot-corpus"):
        task_name(f"smalltalk@{tmp_path}").open("train")


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
    verdicts = {text: train.is_right(3, text) for text in (right, f" {right}.0\n", "fail", "", f"{right}1")}
    assert list(verdicts.values()) == [True, True, False, False, False]
    # a verifier that may execute what the model wrote is not asked
    monkeypatch.setattr(inspect, "getsource", lambda module: "x = eval(answer)" if module is made_gym else "")
    train = task_name(f"{GYM}:100").open("train", seed=2)
    assert train.is_right(3, right) and not train.is_right(3, f"{right}.0")


def test_options_of_the_package_are_true_false_numbers_or_texts():
    options = task_name(f"{GYM},negation=False,signs=True,limit=-40,share=0.5,small=1e-3,name=False1").options
    assert options == {"set": "sums", "negation": False, "signs": True, "limit": -40, "share": 0.5, "small": 1e-3,
                       "name": "False1"}  # fmt: skip
    assert [type(value) for value in options.values()] == [str, bool, bool, int, float, float, str]


@pytest.mark.usefixtures("gym")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("reasoning-gym", "reasoning-gym,set=chain_sum cannot be made (Dataset 'chain_sum' not registered); correct"),
        (f"{GYM},limit=0", "cannot be made (limit must be positive)"),
        (f"{GYM},limit=a", "cannot be made ('>' not supported"),
        (f"{GYM},more=1", "cannot be made (Sums.__init__() got an unexpected keyword argument 'more')"),
        (f"{GYM},more", "unknown option 'more'"),
    ],
)
def test_an_option_that_the_package_refuses_is_one_line(text, message):
    with pytest.raises(UserError) as error:
        task_name(text).open("train")
    assert message in str(error.value) and "\n" not in str(error.value)


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
    "spelling,digits=2": "unknown option 'digits'; the task has no options",
    "arithmetic,digits=two": "digits=two, expected a value such as digits=2",
    "arithmetic,digits=7": "the task arithmetic has the option digits=7; use 1 to 6",
    "arithmetic,steps=101": "the task arithmetic has the option steps=101; use 0 to 100",
    "arithmetic,operators=/": "the task arithmetic has the option operators=/; use some of +-*",
    "sudoku,empty=11": "the task sudoku has the option empty=11; use 1 to 10",
    "arithmetic:0": "expected at least one problem",
    "identity,name": "name=, expected a value such as name=Tiny",
    "glosses@/nowhere": "/nowhere has no file index.noun; run `pip install",
    "gsm8k": "gsm8k needs files; give gsm8k@FOLDER, a folder or hf://OWNER/NAME",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_a_wrong_name_is_one_line(text):
    with pytest.raises(UserError) as error:
        task_name(text).open("train")
    assert MISTAKES[text] in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "package"),
    [("glosses", "lexical-server"), ("smalltalk", "trm-bridge[chat]"), ("reasoning-gym", "trm-bridge[reasoning]")],
)
def test_a_task_without_its_package_says_what_to_install(text, package, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError) as error:
        task_name(text).open("train")
    assert "pip install" in str(error.value) and package in str(error.value)


def test_a_folder_and_a_count_may_contain_what_separates():
    name = task_name("gsm8k@gs://bucket/a,b@c:20")
    assert (name.problems, name.folder, name.count) == (TASKS["gsm8k"], "gs://bucket/a,b@c", 20)
    assert task_name("gsm8k@hf://openai/gsm8k").folder == "hf://openai/gsm8k"
