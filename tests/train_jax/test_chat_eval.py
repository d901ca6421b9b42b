"""`trm chat-eval`: verdicts on the texts and letters of a model, and their scores."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from support.made_wordnet import make_wordnet
from support.presets import with_fields
from support.untrained_run import write_run_of

from models_torch.gpt import GPT, GPTConfig
from train_jax.__main__ import main as trm
from train_jax.core.state import TrainState
from train_jax.run.model import build_objective
from train_jax.run.presets import preset
from train_jax.runtime.devices import Devices
from train_jax.tasks.language.chat.building import ChatData
from train_jax.tasks.language.chat.calculator import calculate, tool_of
from train_jax.tasks.language.chat.conversations import Part, assistant, render, render_prompt, user
from train_jax.tasks.language.chat.evaluation import (
    Answering,
    Score,
    answer_requests,
    categorical_score,
    chat_core,
    figures_of,
    generative_score,
    letter_tokens,
    logits_of,
    written_text,
)
from train_jax.tasks.language.chat.task_names import task_name
from train_jax.tasks.language.core_evaluation import DeviceScorer
from train_jax.tasks.language.engine import Generation
from train_jax.tasks.language.sampling import Sampling
from train_jax.tasks.language.task import LanguageTask
from train_jax.tasks.language.tokenizer import Tokenizer

BYTES = Tokenizer({bytes([number]): number for number in range(256)})
ARCH = GPTConfig(seq_len=64, vocab_size=265, n_layer=1, n_head=2, n_kv_head=2, n_embd=16, forward_dtype="float32")


# ---- scores


def test_pass_at_k_is_the_share_of_the_draws_with_a_right_answer():
    """One right answer of four is in 3 of 6 pairs; three are in every pair; none is in none."""
    score = Score(0.0, [[True, False, False, False], [True, True, True, False], [False] * 4])
    assert score.accuracy == pytest.approx(4 / 12)
    assert [score.pass_at(k) for k in (2, 4)] == pytest.approx([(1 / 2 + 1 + 0) / 3, 2 / 3])
    assert set(figures_of({"a": score})["a"]) == {"items", "accuracy", "centered", "pass@2", "pass@4"}
    assert set(figures_of({"a": Score(0.25, [[True]])})["a"]) == {"items", "accuracy", "centered"}


def test_chat_core_is_the_mean_above_a_random_answer():
    half = [[True], [False]]
    assert chat_core([Score(0.0, half), Score(0.25, half)]) == pytest.approx((0.5 + 1 / 3) / 2)


# ---- texts


def test_the_text_is_what_the_assistant_wrote():
    call = assistant("so ", Part("python", "1+1"), Part("python_output", "2"), "it is é 2")
    tokens = render(BYTES, (user("add"), call)).tokens
    after = tokens[tokens.index(BYTES.specials["<|assistant_start|>"]) + 1 :]
    assert written_text(BYTES, after) == "so it is é 2"
    assert written_text(BYTES, after[:6]) == "so ", "a call that does not end"
    assert written_text(BYTES, [BYTES.specials["<|output_end|>"], 65]) == "A"


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
    call = [special["<|python_start|>"], *b"2*3", special["<|python_end|>"]]
    assert list(request.respond(call)) == [special["<|output_start|>"], *b"6", special["<|output_end|>"]]
    assert request.respond([*b"6", special["<|assistant_end|>"]]) is None
    alone = answer_requests(BYTES, task_name("arithmetic:1").open("test"), Answering())[0]
    assert alone.respond is None and special["<|python_end|>"] in alone.stop, "a call ends the answer"


def test_a_function_that_fails_has_no_output(caplog):
    """An error in the engine's thread would end it; the calculator itself hides no error of a function."""

    def broken(text):
        raise KeyError(text)

    special, tokens = BYTES.specials, [*b'f("x")']
    respond = tool_of(BYTES, {"f": broken})
    assert respond([special["<|python_start|>"], *tokens, special["<|python_end|>"]]) == []
    assert "the call 'f(\"x\")' failed" in caplog.text and "KeyError: 'x'" in caplog.text
    with pytest.raises(KeyError):
        calculate('f("x")', {"f": broken})


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
    right = [choices.conversation(index)[-1].text for index in range(len(choices))]

    def scorer(prompts):
        assert prompts == [
            list(render_prompt(BYTES, choices.conversation(index)[:-1]))[-40:] for index in range(len(choices))
        ]
        for index, prompt in enumerate(prompts):
            logits = np.random.default_rng(index).normal(size=(len(prompt), 5))
            logits[-1] = [9, 0, 0, 0, 0]
            logits[-1, order.index(right[index] if index % 2 else "A")] = 1
            yield (logits,)

    score = categorical_score(scorer, BYTES, choices, order, positions=40)
    assert score.verdicts == [[index % 2 == 1 or letter == "A"] for index, letter in enumerate(right)]
    assert score.baseline == 0.25


@pytest.mark.slow
def test_the_letters_are_those_that_pytorch_chooses(choices):
    config = dataclasses.replace(preset("chat-tiny"), arch=ARCH)
    objective = build_objective(config, LanguageTask(config, {"vocab_size": 265}), 1)
    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=array.shape).astype(np.float32) for name, array in objective.params.items()}
    module = GPT(ARCH)
    module.load_state_dict({name: torch.tensor(array) for name, array in params.items()}, strict=True)
    state = TrainState(np.int32(0), params, params, (), objective.buffers, None)
    letters = letter_tokens(BYTES, [choices])
    outputs = logits_of(list(letters.values()))
    scorer = DeviceScorer(objective, state, Devices(1), positions=640, tokens_at_once=1024, outputs=outputs)
    score = categorical_score(scorer, BYTES, choices, list(letters), positions=640)
    expected = []
    for index in range(len(choices)):
        prompt = render_prompt(BYTES, choices.conversation(index)[:-1])
        with torch.no_grad():
            logits = module(torch.tensor([prompt]))[0, -1, list(letters.values())]
        expected.append([list(letters)[logits.argmax()] == choices.conversation(index)[-1].text])
    assert score.verdicts == expected and 0 < score.accuracy < 1


# ---- the command


@pytest.fixture(scope="module")
def run_dir(made_once):
    """An untrained run on a data set of conversations."""

    def make(folder):
        BYTES.save(folder / "tokenizer")
        data = ChatData(tokenizer=str(folder / "tokenizer"), tasks=("identity:80",), output_dir=folder / "set")
        data.build(lambda *_: None)
        config = dataclasses.replace(preset("chat-tiny"), data_dir=str(folder / "set"), run_dir=str(folder / "run"))
        sizes = {"seq_len": 64, "n_layer": 1, "n_head": 2, "n_kv_head": 1, "n_embd": 16, "global_batch_size": 2}
        write_run_of(with_fields(config, sizes), step=3)

    return str(made_once("chat", make) / "run")


@pytest.mark.slow
def test_a_run_is_scored_on_texts_and_letters(run_dir, capsys, tmp_path):
    folder = make_wordnet(tmp_path / "dict")
    tasks = ["arithmetic:3", f"glosses@{folder}", "humaneval"]
    options = ["--max-tokens", "4", "--num-samples", "2", "--temperature", "1"]
    results = tmp_path / "results.json"
    assert trm(["chat-eval", run_dir, "--tasks", *tasks, *options, "--results", str(results)]) == 0
    said = capsys.readouterr().out
    assert "humaneval is left out: it runs programs" in said and "ChatCORE" in said.splitlines()[-1]
    verdicts = json.loads(results.read_text())["verdicts"]
    assert np.shape(verdicts["arithmetic:3"]) == (3, 2) and set(verdicts) == set(tasks[:2])
    kept = json.loads((tmp_path.__class__(run_dir) / "evaluation" / "chat.json").read_text())
    assert kept["step"] == 3 and set(kept["tasks"]["arithmetic:3"]) == {"items", "accuracy", "centered", "pass@2"}
