"""`trm chat`: a conversation from a pipe, its commands and its calls of tools."""

import io
import signal

import pytest
from support.scripted_model import BYTES, Scripted
from support.small_gpt import engine_of
from test_served_puzzles import write_sudokus

from train_jax.__main__ import main as trm
from train_jax.errors import UserError
from train_jax.runtime.devices import Devices
from train_jax.stages import chat
from train_jax.stages.chat import Chat, Session


@pytest.fixture
def say(monkeypatch, capsys):
    """Runs `trm chat` with these lines; returns the status, the output and the errors."""

    def run(*arguments, lines=""):
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        status = trm(["chat", *arguments])
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


class ScriptedModel:
    """Stands for a `TextModel`, with the model that answers by a call of the calculator; it has one engine."""

    tokenizer, positions = BYTES, 64

    def __init__(self):
        self.engine = engine_of(Scripted(), Devices(1), slots=1, capacity=self.positions, tokens_per_dispatch=2)

    def engine_of(self, rows, capacity):
        assert (rows, capacity) == (1, self.positions)
        return self.engine


@pytest.fixture(scope="module")
def model():
    return ScriptedModel()


@pytest.mark.slow
def test_a_run_answers(language_run, say):
    status, out, err = say(language_run, "--temperature", "0", "--max-tokens", "3", lines="hi\nhow?\n")
    assert (status, out, err) == (0, "\0\0\0\n" * 2, ""), "all logits are 0, so the token is the byte 0"


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


def test_a_run_of_puzzles_is_one_line(made_once, say):
    path = str(made_once("sudokus", write_sudokus) / "run")
    status, _, err = say(path)
    assert (status, err) == (2, f"trm: {path} is a run of task puzzles, expected language; give a language run\n")


def test_a_conversation_that_is_too_long_and_a_message_that_is(model):
    session = Session(model, Chat("run", temperature=0.0))
    assert "".join(session.answer("hi")) == "[6*7][= 42]OK."
    with pytest.raises(UserError, match="begin another by /clear"):
        next(session.answer("a" * 50))
    session.clear()
    with pytest.raises(UserError, match="use a shorter message"):
        next(session.answer("a" * 90))


def test_calls_are_shown_and_a_turn_computes_only_what_is_new(model):
    session = Session(model, Chat("run", temperature=0.0))
    assert "".join(session.answer("hi")) == "[6*7][= 42]OK."
    before, length = model.engine.counts.prefilled, len(session.tokens)
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
    session, before = Session(model, Chat("run", temperature=0.0)), signal.getsignal(signal.SIGINT)
    step, steps = model.engine.step, []

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
