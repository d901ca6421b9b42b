"""CORE: bundles, prompts and verdicts on items made here; beside the published harness on the same model.

`NANOCHAT_DIR=/path/to/nanochat` compares with `core_eval` of a checkout at 4a87a0d or at 92d63d4.
"""

import csv
import dataclasses
import json
import random

import numpy as np
import pytest
import torch
import yaml

from models_torch.gpt import GPT, GPTConfig
from train_jax.core.state import TrainState
from train_jax.errors import UserError
from train_jax.language.core_evaluation import CoreTask, DeviceScorer, ask, is_right, read_bundle, task_verdicts
from train_jax.language.task import LanguageTask
from train_jax.run.model import build_objective
from train_jax.run.presets import preset
from train_jax.runtime.devices import Devices

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "then", "it", "slept", "well"]
FEWSHOT = {"multiple_choice": 2, "schema": 0, "language_modeling": 3}
BASELINES = {"multiple_choice": 25.0, "schema": 50.0, "language_modeling": 0.0}
BOS = 256


def encode(texts):
    """A byte is a token."""
    return [[BOS, *text.encode()] for text in texts]


def made_items(kind, count):
    rng = random.Random(f"{kind} 0")

    def words(most):
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, most)))

    def item():
        match kind:
            case "multiple_choice":
                choices = [words(4) for _ in range(4)]
                return {"query": words(8), "choices": choices, "gold": rng.randrange(4)}
            case "schema":
                return {"context_options": [words(6), words(6)], "continuation": words(5), "gold": rng.randrange(2)}
            case _:
                return {"context": words(8) + rng.choice(["", " ", "\n"]), "continuation": words(1)}

    return [item() for _ in range(count)]


def made_bundle(folder):
    (folder / "eval_data" / "part").mkdir(parents=True)
    tasks = []
    for kind, fewshot in FEWSHOT.items():
        lines = [json.dumps(item) for item in made_items(kind, 12)]
        (folder / "eval_data" / "part" / f"{kind}.jsonl").write_text("\n".join(lines) + "\n")
        entry = {"label": kind, "dataset_uri": f"part/{kind}.jsonl", "num_fewshot": [fewshot], "icl_task_type": kind}
        tasks.append(entry | ({"continuation_delimiter": "\nAnswer: "} if kind == "multiple_choice" else {}))
    (folder / "core.yaml").write_text(yaml.safe_dump({"icl_tasks": tasks}))
    with (folder / "eval_meta_data.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["Eval Task", "Random baseline"], *BASELINES.items()])
    return folder


# ---- bundles and prompts


def test_a_bundle_is_read_in_the_published_order(tmp_path):
    tasks = read_bundle(made_bundle(tmp_path))
    assert [(task.label, task.fewshot, task.delimiter) for task in tasks] == [
        ("multiple_choice", 2, "\nAnswer: "), ("schema", 0, " "), ("language_modeling", 3, " ")
    ]  # fmt: skip
    for task in tasks:
        items = made_items(task.kind, 12)
        random.Random(1337).shuffle(items)
        assert list(task.items) == items and task.baseline == BASELINES[task.label] / 100
        assert list(task.first(4).items) == items[:4] and task.first(0) == task


CHANGES = {
    "no folder": (lambda folder: (folder / "core.yaml").unlink(), r"core\.yaml does not exist; give the unpacked"),
    "python": (lambda folder: (folder / "core.yaml").write_text("!!python/name:os.system"), "is not a CORE bundle"),
    "outside": (lambda folder: entry(folder, dataset_uri="../../a"), r"dataset_uri \.\./\.\./a leaves the folder"),
    "kind": (lambda folder: entry(folder, icl_task_type="poem"), "icl_task_type 'poem' is not one of"),
    "few": (lambda folder: entry(folder, num_fewshot=[12]), "has 12 items for 12 examples and a question"),
    "gold": (lambda folder: line(folder, gold=4), "line 12: gold 4 or an option is not valid"),
}


def entry(folder, **fields):
    content = yaml.safe_load((folder / "core.yaml").read_text())
    content["icl_tasks"][0] |= fields
    (folder / "core.yaml").write_text(yaml.safe_dump(content))


def line(folder, **fields):
    path = folder / "eval_data" / "part" / "multiple_choice.jsonl"
    *lines, last = path.read_text().splitlines()
    path.write_text("\n".join([*lines, json.dumps(json.loads(last) | fields)]))


@pytest.mark.parametrize("change", CHANGES)
def test_a_bundle_that_cannot_be_read_is_one_line(tmp_path, change):
    edit, message = CHANGES[change]
    edit(made_bundle(tmp_path))
    with pytest.raises(UserError, match=message) as caught:
        read_bundle(tmp_path)
    assert "\n" not in str(caught.value)


def asked(kind, item, *, limit=10**6, fewshot=0, others=()):
    task = CoreTask("made", kind, fewshot, ": ", 0.0, (item, *others))
    return ask(task, 0, encode, limit)


def deciding(each):
    spans = zip(each.rows, each.starts, each.ends, strict=True)
    return [bytes(row[start:end]).decode() for row, start, end in spans]


def test_the_tokens_that_differ_decide():
    choice = asked("multiple_choice", {"query": "Sky", "choices": ["blue", "black"], "gold": 1})
    assert deciding(choice) == ["ue", "ack"], "the first letters of both answers are tokens that they share"
    schema = asked("schema", {"context_options": ["She ran", "He ran"], "continuation": "home", "gold": 0})
    assert deciding(schema) == ["e ran: home", "e ran: home"] and schema.starts == [3, 2]
    text = asked("language_modeling", {"context": " one two\n", "continuation": "three"})
    assert deciding(text) == [" three"] and text.gold is None
    assert bytes(text.rows[0][1:]).decode() == "one two: three"


def test_examples_come_first_and_never_repeat_the_question():
    others = tuple({"query": f"q{n}", "choices": ["x", "y"], "gold": n % 2} for n in range(5))
    each = asked("multiple_choice", {"query": "Q", "choices": ["x", "y"], "gold": 0}, fewshot=3, others=others)
    picked = [others[n - 1] for n in random.Random(1234).sample([1, 2, 3, 4, 5], 3)]
    front = "".join(f"{item['query']}: {item['choices'][item['gold']]}\n\n" for item in picked)
    assert [bytes(row[1:]).decode() for row in each.rows] == [front + "Q: x", front + "Q: y"]


def test_long_prompts_lose_their_beginning():
    item = {"query": "a long question", "choices": ["yes", "no"], "gold": 0}
    whole = asked("multiple_choice", item)
    cut = asked("multiple_choice", item, limit=8)
    assert deciding(cut) == deciding(whole) == ["yes", "no"] and [len(row) for row in cut.rows] == [8, 8]
    with pytest.raises(UserError, match="an answer is longer than the 2 positions of the model"):
        asked("multiple_choice", item, limit=2)


def test_known_losses_give_known_verdicts():
    item = {"query": "Q", "choices": ["aaaa", "b"], "gold": 1}
    each = asked("multiple_choice", item)
    start = each.starts[0] - 1
    predictions = [np.zeros(len(row), int) for row in each.rows]

    def losses(first, second):
        rows = [np.full(len(row), 100.0) for row in each.rows]  # rows that do not decide must not count
        rows[0][start : start + 4], rows[1][start : start + 1] = first, second
        return rows

    assert is_right(each, losses(2.0, 1.9), predictions), "the mean counts, not the sum"
    assert not is_right(each, losses(1.0, 1.1), predictions)
    assert not is_right(each, losses(1.0, 1.0), predictions), "of equal ones the first"
    text = asked("language_modeling", {"context": "one", "continuation": "ab"})
    right = np.array([*text.rows[0][1:], 0])
    assert is_right(text, [], [right])
    assert not is_right(text, [], [np.where(np.arange(len(right)) == len(right) - 2, 0, right)]), "all tokens count"
    assert CoreTask("made", "schema", 0, " ", 0.5, ()).centered(0.75) == 0.5


# ---- models

ARCH = GPTConfig(seq_len=64, vocab_size=257, n_layer=2, n_head=2, n_kv_head=2, n_embd=32, forward_dtype="float32")


@pytest.fixture(scope="module")
def model():
    config = dataclasses.replace(preset("chat-tiny"), arch=ARCH)
    objective = build_objective(config, LanguageTask(config, {"vocab_size": 257}), 1)
    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=array.shape).astype(np.float32) * 0.3 for name, array in objective.params.items()}
    module = GPT(ARCH)
    module.load_state_dict({name: torch.tensor(array) for name, array in params.items()}, strict=True)
    state = TrainState(np.int32(0), params, params, (), objective.buffers, None)
    return module, DeviceScorer(objective, state, Devices(1), positions=640, tokens_at_once=1024)


def test_losses_and_predictions_are_those_of_pytorch(model):
    module, scorer = model
    sequences = [row for texts in (["a", "a longer text", "b" * 100]) for row in encode([texts])]
    for row, (losses, predictions) in zip(sequences, scorer(sequences), strict=True):
        with torch.no_grad():
            logits = module(torch.tensor([row]))
            expected = torch.nn.functional.cross_entropy(logits[0, :-1], torch.tensor(row[1:]), reduction="none")
        np.testing.assert_allclose(losses[:-1], expected, rtol=0, atol=1e-4)
        np.testing.assert_array_equal(predictions, logits[0].argmax(-1))


class ByteTokenizer:
    def get_bos_token_id(self):
        return BOS

    def __call__(self, texts, prepend):
        assert prepend == BOS
        return encode(texts)


@pytest.mark.usefixtures("nanochat")
@pytest.mark.parametrize("kind", FEWSHOT)
def test_verdicts_on_three_hundred_items_equal_the_published_ones(kind, model):
    from nanochat import core_eval as published

    module, scorer = model
    items = made_items(kind, 300)
    delimiter = " "
    if kind == "language_modeling":  # otherwise no answer of a model with random weights is right
        items = answerable(module, items)
        delimiter = ""
    task = CoreTask(kind, kind, FEWSHOT[kind], delimiter, 0.0, tuple(items))
    meta = {"task_type": kind, "num_fewshot": FEWSHOT[kind], "continuation_delimiter": delimiter}
    arguments = module, ByteTokenizer(), items, "cpu", meta
    expected = [published.evaluate_example(number, *arguments) for number in range(300)]
    assert task_verdicts(task, scorer, encode, positions=640) == expected
    assert 20 < sum(expected) < 280


def answerable(module, items):
    changed = []
    for item in items:
        row = encode([item["context"].strip()])
        with torch.no_grad():
            answer = module(torch.tensor(row))[0, -1, :128].argmax().item()
        changed.append(item | {"continuation": chr(answer)})
    return changed
