"""`trm chat`: a conversation from a pipe, its commands and its calls of tools; `trm chat-eval`: verdicts and scores."""

import io
import json
import shutil
import signal

import numpy as np
import pytest
from support.made_wordnet import make_wordnet
from support.scripted_model import BYTES, Scripted
from support.small_gpt import engine_of

from train_jax.__main__ import main as trm
from train_jax.errors import UserError
from train_jax.language.chat.conversations import assistant, render, render_prompt
from train_jax.language.chat.evaluation import (
    Answering,
    Score,
    answer_requests,
    categorical_score,
    chat_core,
    generative_score,
    letter_tokens,
)
from train_jax.language.chat.task_names import task_name
from train_jax.language.engine import Generation
from train_jax.language.sampling import Sampling
from train_jax.language.stages import chat
from train_jax.language.stages.chat import Chat, Session
from train_jax.runtime.devices import Devices

# ---- chat


@pytest.fixture
def say(monkeypatch, capsys):

    def run(*arguments, lines=""):
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        status = trm(["chat", *arguments])
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


class ScriptedModel:
    """Stands for a `TextModel`, with the model that answers by a call of the calculator; it has one engine."""

    tokenizer = BYTES
    positions = 64

    def __init__(self):
        self.engine = engine_of(Scripted(), Devices(1), slots=1, capacity=self.positions, tokens_per_dispatch=2)

    def engine_of(self, rows, capacity):
        assert (rows, capacity) == (1, self.positions)
        return self.engine


@pytest.fixture(scope="module")
def model():
    return ScriptedModel()


def test_lines_of_a_pipe_are_answered(model, say, monkeypatch):
    monkeypatch.setattr(chat, "restore", lambda *_, **options: None)
    monkeypatch.setattr(chat, "TextModel", lambda *_: model)
    lines = "hi\n\n/clear\n/what now\n" + "a" * 62 + "\n\ud800\na" + " " * 600_000 + "a\nagain\n/exit\nnever\n"
    status, out, err = say("run", "--temperature", "0", lines=lines)
    assert (status, out) == (0, "[6*7][= 42]OK.\n" * 2)
    command, length, text, blank = err.splitlines()
    assert command == "trm: unknown command '/what now'; /clear begins a new conversation, /exit ends"
    assert length == "trm: the conversation has 66 tokens, the model reads 64; use a shorter message"
    assert text == "trm: '\\ud800' is not valid UTF-8; correct it"
    assert blank == "trm: a text has more than 500,000 blank characters in a row; remove some"


def test_calls_are_shown_and_a_turn_computes_only_what_is_new(model):
    session = Session(model, Chat("run", temperature=0.0))
    assert "".join(session.answer("hi")) == "[6*7][= 42]OK."
    with pytest.raises(UserError, match="begin another by /clear"):
        next(session.answer("a" * 50))
    before = model.engine.counts.prefilled
    length = len(session.tokens)
    assert "".join(session.answer("more")) == "[6*7][= 42]OK."
    assert model.engine.counts.prefilled == before and len(session.tokens) > length
    session.clear()
    assert "".join(session.answer("hi")) == "[6*7][= 42]OK." and len(session.tokens) == length
    assert model.engine.counts.prefilled == before + 1


def test_a_terminal_gets_no_control_characters(model, capsys, monkeypatch):
    session = Session(model, Chat("run", temperature=0.0))
    monkeypatch.setattr(session, "answer", lambda text: (piece for piece in ("\x1b[31mé", "\ta\n\x9b1m\r")))
    chat._print_answer(session, "hi")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    chat._print_answer(session, "hi")
    assert capsys.readouterr().out == "\x1b[31mé\ta\n\x9b1m\r\n\ufffd[31mé\ta\n\ufffd1m\ufffd\n"


def test_ctrl_c_ends_an_answer_and_not_the_conversation(model, capsys, monkeypatch):
    session = Session(model, Chat("run", temperature=0.0))
    before = signal.getsignal(signal.SIGINT)
    step = model.engine.step
    steps = []

    def interrupted():
        steps.append(1)
        if len(steps) == 3:
            signal.raise_signal(signal.SIGINT)
        return step()

    monkeypatch.setattr(model.engine, "step", interrupted)
    chat._print_answer(session, "hi")
    assert capsys.readouterr().out == "[6*7]\n" and len(steps) == 3 and model.engine.idle
    assert session.tokens[-1] == BYTES.specials["<|assistant_end|>"]
    assert signal.getsignal(signal.SIGINT) is before
    assert "".join(session.answer("hi")) == "[6*7][= 42]OK."


# ---- scores


def test_pass_at_k_is_the_share_of_the_draws_with_a_right_answer():
    """One right answer of four is in 3 of 6 pairs; three are in every pair; none is in none."""
    score = Score(0.0, [[True, False, False, False], [True, True, True, False], [False] * 4])
    assert score.accuracy == pytest.approx(4 / 12)
    assert [score.pass_at(k) for k in (2, 4)] == pytest.approx([(1 / 2 + 1 + 0) / 3, 2 / 3])
    half = [[True], [False]]
    assert chat_core([Score(0.0, half), Score(0.25, half)]) == pytest.approx((0.5 + 1 / 3) / 2)


# ---- texts


def scripted(problems, wrong):
    """Stands for a model with the right answer, and with another one for the samples with a number in `wrong`."""

    def complete(requests):
        for number, request in enumerate(requests):
            index = number // 3
            talk = problems.conversation(index)
            assert list(request.prompt) == [*render(BYTES, talk[:-1]).tokens, BYTES.specials["<|assistant_start|>"]]
            answer = assistant("I do not know") if number in wrong else talk[-1]
            tokens = render(BYTES, (*talk[:-1], answer)).tokens[len(request.prompt) :]
            yield Generation(request, tokens, finish="stop")

    return complete


@pytest.mark.parametrize("text", ["arithmetic,operations=2", "calculator", "spelling", "counting", "identity"])
def test_each_answer_has_a_verdict(text):
    problems = task_name(f"{text}:5").open("test")
    how = Answering(num_samples=3, sampling=Sampling(top_k=5), max_tokens=20, seed=7)
    requests = answer_requests(BYTES, problems, how)
    score = generative_score(BYTES, problems, scripted(problems, {1, 6, 7, 8})(requests), 3)
    assert score.verdicts == [[True, False, True], [True] * 3, [False] * 3, [True] * 3, [True] * 3]
    assert [request.sample for request in requests[:4]] == [0, 1, 2, 0] and len(requests) == 15
    assert {(r.max_tokens, r.sampling, r.seed) for r in requests} == {(20, how.sampling, 7)}


def test_the_calculator_answers_and_the_message_ends():
    request = answer_requests(BYTES, task_name("calculator:1").open("test"), Answering())[0]
    special = BYTES.specials
    assert request.respond is not None and special["<|assistant_end|>"] in request.stop
    alone = answer_requests(BYTES, task_name("arithmetic:1").open("test"), Answering())[0]
    assert alone.respond is None and special["<|python_end|>"] in alone.stop, "a call ends the answer"


# ---- letters


@pytest.fixture(scope="module")
def choices(tmp_path_factory):
    folder = make_wordnet(tmp_path_factory.mktemp("wordnet") / "dict")
    return task_name(f"glosses@{folder}").open("train")


def test_the_letter_with_the_largest_logit_is_the_answer(choices):
    """Only letters of the problem count, and only the position after the question."""
    letters = letter_tokens(BYTES, [choices])
    assert letters == {letter: ord(letter) for letter in "ABCD"}
    order = ["X", *letters]
    talks = [choices.conversation(index) for index in range(len(choices))]
    right = [talk[-1].text for talk in talks]

    def scorer(prompts):
        assert prompts == [list(render_prompt(BYTES, talk[:-1]))[-40:] for talk in talks]
        for index, prompt in enumerate(prompts):
            logits = np.random.default_rng(index).normal(size=(len(prompt), 5))
            logits[-1] = [9, 0, 0, 0, 0]
            logits[-1, order.index(right[index] if index % 2 else "A")] = 1
            yield (logits,)

    score = categorical_score(scorer, BYTES, choices, order, positions=40)
    assert score.verdicts == [[index % 2 == 1 or letter == "A"] for index, letter in enumerate(right)]
    assert score.baseline == 0.25


@pytest.mark.slow
def test_a_run_is_scored_on_texts_and_letters(language_run, capsys, tmp_path):
    run_dir = shutil.copytree(language_run, tmp_path / "run")
    folder = make_wordnet(tmp_path / "dict")
    tasks = ["arithmetic:3", f"glosses@{folder}", "humaneval"]
    options = ["--max-tokens", "4", "--num-samples", "2", "--temperature", "1"]
    results = tmp_path / "results.json"
    assert trm(["chat-eval", str(run_dir), "--tasks", *tasks, *options, "--results", str(results)]) == 0
    said = capsys.readouterr().out
    assert "humaneval is left out: it runs programs" in said and "ChatCORE" in said.splitlines()[-1]
    verdicts = json.loads(results.read_text())["verdicts"]
    assert np.shape(verdicts["arithmetic:3"]) == (3, 2) and set(verdicts) == set(tasks[:2])
    kept = json.loads((run_dir / "evaluation" / "chat.json").read_text())
    assert kept["step"] == 3 and set(kept["tasks"]["arithmetic:3"]) == {"items", "accuracy", "centered", "pass@2"}
