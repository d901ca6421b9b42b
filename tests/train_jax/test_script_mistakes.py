"""Mistakes in a user's training script: one line each, before a folder is made."""

import re
from pathlib import Path

import pytest
from support.classified_points import POINTS
from support.markers import slow_unless

from train_jax.__main__ import main

SCRIPT = (
    '''
"""Classifies points in two classes."""

import torch
from torch import nn


def model():
    return nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))


'''
    + POINTS
)
DATA = "    return points(0, 100)\n"
LOSS = "    return nn.functional.cross_entropy(logits, y), {"
SGD = "\n\ndef optimizer(model):\n    return torch.optim.SGD(model.parameters(), lr=0.1)\n"
SCHEDULE = SGD + "\n\ndef schedule(optimizer):\n    return "
MODELS = "    return {'a': nn.Linear(2, 2), 'b': nn.Linear(2, 2)}\n"
SGDS = """

def optimizer(model):
    return {name: torch.optim.SGD(each.parameters(), lr=0.1) for name, each in model.items()}
"""
STREAM = """

class Own(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from zip(*points(0, 64))
"""
OWN = """

class Own:
    def __len__(self):
        LENGTH

    def __getitem__(self, index):
        BODY
"""


def changed(*pairs):
    text = SCRIPT
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    return text


def with_data(text, rest=""):
    """The script with another body of `train_data`, and with more lines at its end."""
    return changed((DATA, f"    {text}\n")) + rest


def with_loss(text):
    """The script with lines in front of the result of `loss`."""
    return changed(("    logits = model(x)\n", f"    logits = model(x)\n    {text}\n"))


def with_model(text):
    return changed(("    return nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))\n", text))


def dataset(body, length="return 64"):
    return OWN.replace("LENGTH", length).replace("BODY", body)


MISTAKES = {
    "empty file": ("", "expected a train_jax.Plugin"),
    "missing package": ("import nowhere_to_be_found\n" + SCRIPT, "nowhere_to_be_found"),
    "exit at import": (SCRIPT + "\nraise SystemExit(3)\n", "mine.py.*cannot be imported"),
    "no train_data": (changed(("def train_data(", "def data(")), "does not define train_data; add `def train_data"),
    "argument of model": (changed(("def model()", "def model(size)")), r"model\(size\) cannot be called as model\(\)"),
    "three arguments": (
        changed(("loss(model, batch)", "loss(model, batch, step)")),
        r"cannot be called as loss\(model",
    ),
    "collate without arguments": (SCRIPT + "\n\ndef collate():\n    return 1\n", r"collate\(\) cannot be called"),
    "optimizer without arguments": (SCRIPT + "\n\ndef optimizer():\n    return 1\n", r"optimizer\(\) cannot be called"),
    "async loss": (changed(("def loss", "async def loss")), "loss.*coroutine"),
    "a generator as a loss": (with_loss("yield logits"), "loss is of type generator"),
    "schedule alone": (SCRIPT + SCHEDULE[len(SGD) :] + "None\n", "schedule needs the optimizer of the script"),
    "schedule is None": (SCRIPT + SCHEDULE + "None\n", "the schedule is a NoneType without a method `step`"),
    "plateau": (
        SCRIPT + SCHEDULE + "torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)\n",
        "ReduceLROnPlateau reads",
    ),
    "schedule of another": (
        SCRIPT + SCHEDULE + "torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1)]), 3)\n",
        "belongs to another optimizer",
    ),
    "short schedule": (
        SCRIPT + SCHEDULE + "torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=1)\n",
        "OneCycleLR fails after 2 of 3 steps",
    ),
    "schedule raises": (SCRIPT + SCHEDULE + "1 / 0\n", r"mine.py:\d+: schedule\(\) raised ZeroDivisionError"),
    "another model": (SCRIPT + SGD.replace("model.param", "nn.Linear(2, 2).param"), "is not in the model"),
    "LBFGS": (SCRIPT + SGD.replace("SGD", "LBFGS"), "LBFGS, which has no translation"),
    "own class": (
        SCRIPT + SGD.replace("torch.optim.SGD", "Own") + "\n\nclass Own(torch.optim.SGD):\n    pass\n",
        "mine.Own, which has no translation",
    ),
    "negative rate": (SCRIPT + SGD.replace("0.1", "-0.1"), r"mine.py:\d+: optimizer\(\) raised ValueError"),
    "optimizer of an unknown model": (
        with_model(MODELS) + SGDS.replace("name:", "name + 's':"),
        "returns a dict with as, bs; use keys of model",
    ),
    "losses without names": (with_model(MODELS) + SGDS.replace("y", "y"), r"raised TypeError|no dict of a, b"),
    "class of a model": (with_model("    return nn.Linear\n"), r"model\(\) returns type, expected an nn.Module"),
    "dict of no models": (with_model("    return {'a': 3}\n"), r"model\(\) returns int, expected an nn.Module"),
    "no models": (with_model("    return {}\n"), r"model\(\) has no parameter"),
    "model without parameters": (with_model("    return nn.Identity()\n"), "no parameter"),
    "frozen model": (with_model("    return nn.Linear(2, 2).requires_grad_(False)\n"), "no parameter"),
    "lazy model": (with_model("    return nn.LazyLinear(2)\n"), "uninitialized|not initialized|LazyLinear"),
    "a GPU in the model": (with_model("    return nn.Linear(2, 2).cuda()\n"), r"mine.py:\d+: model\(\) raised"),
    "loss is None": (changed((LOSS, "    return None, {")), "loss is of type NoneType"),
    "loss is text": (changed((LOSS, "    return 'low', {")), "loss is of type str"),
    "a list as a loss": (changed((LOSS, "    return [logits.sum()], {")), "loss is of type list"),
    "metric is text": (
        changed((".float().mean()}", ".float().mean().__str__()}")),
        "the metric accuracy is of type str",
    ),
    "metrics in metrics": (
        changed(('{"accuracy": (logits.argmax(-1) == y).float().mean()}', '{"a": {"b": 1}}')),
        "the metric a is of type dict",
    ),
    "number of right answers": (changed((LOSS, "    return (logits.argmax(-1) == y).sum(), {")), "does not depend on"),
    "key of a batch": (with_loss("batch['x']"), r"mine.py:\d+: loss\(\) raised TypeError"),
    "arguments of forward": (changed(("model(x)", "model(x, y)")), r"mine.py:\d+: loss\(\) raised TypeError"),
    "float indices": (with_model("    return nn.Embedding(2, 2)\n"), r"mine.py:\d+: loss\(\) raised RuntimeError"),
    "backward in the loss": (with_loss("logits.sum().backward()"), "backward"),
    "a GPU in the loss": (with_loss("logits.cuda()"), r"mine.py:\d+: loss\(\) raised"),
    "exit in the loss": (with_loss("raise SystemExit(0)"), r"mine.py:\d+: loss\(\) raised SystemExit"),
    "rows of a dict": (with_data("return {'x': torch.ones(3), 'y': torch.ones(4)}"), "have .* rows"),
    "one number": (with_data("return torch.tensor(3.0)"), r"train_data\(\)"),
    "text as data": (with_data("return 'data.csv'"), r"train_data\(\) returns str, expected a Dataset"),
    "None as data": (with_data("return"), r"train_data\(\) returns NoneType, expected a Dataset"),
    "no batches": (with_data("return iter(())"), r"train_data\(\) has no batches"),
    "examples with None": (with_data("return [(torch.ones(2), None)] * 9"), r"raised TypeError"),
    "own objects": (with_data("return [object()] * 9"), r"mine.py:?\d*: collate\(\) raised TypeError"),
    "objects in arrays": (
        with_data("return torch.ones(9, 2), numpy.array([object()] * 9)").replace(
            "import torch\n", "import numpy\nimport torch\n", 1
        ),
        "array of object, expected numbers|raised TypeError",
    ),
    "length raises": (with_data("return Own()", dataset("return 1", "raise OSError('no disk')")), "OSError: no disk"),
    "keys that vary": (
        with_data("return Own()", dataset("return {'x' if index % 2 else 'y': torch.ones(2)}")),
        r"collate\(\) raised KeyError|different forms",
    ),
    "collate returns None": (
        with_data("return [1] * 9", "\n\ndef collate(examples):\n    return None\n"),
        "without tensors",
    ),
    "collate raises": (
        SCRIPT + "\n\ndef collate(examples):\n    return examples[99]\n",
        r"collate\(\) raised IndexError",
    ),
    "examples of a stream": (
        with_data(
            "return Own()",
            STREAM,
        ),
        "expected 32 rows",
    ),
    "a stream to test on": (
        changed(("    return points(1, 37)", "    yield points(1, 37)")),
        r"test_data\(\) has no length",
    ),
    "nothing to test on": (changed(("points(1, 37)", "points(1, 0)")), r"test_data\(\) has no examples"),
    "another form to test on": (changed(("return points(1, 37)", "return points(1, 37)[:1]")), "different forms"),
    "a list as long as the data say": (
        with_loss("x = [1.0] * int(y.sum())"),
        "asks for the value of a traced tensor",
    ),
    "NumPy in the loss": (with_loss("logits.detach().numpy()"), "numpy"),
    "a random number of Python": (with_loss("import random; x = x * random.random()"), "random"),
    "a random number of NumPy": (with_loss("import numpy; x = x * numpy.random.rand()"), "random"),
    "a shape that the data decide": (
        with_loss("logits = logits[y > 0].sort(0).values.view(-1, 1, 2).squeeze(); y = y[y > 0]"),
        "mine.py",
    ),
    "NaN at the start": (with_loss("logits = logits * float('nan')"), "loss is nan at step 1"),
    "no count": (changed((LOSS, "    return (logits.sum(), 0), {")), "loss is (nan|inf) at step 1"),
}
"""Scripts with a mistake, and the line that says so."""
DEFAULT = {
    "exit at import",
    "schedule alone",
    "schedule is None",
    "no models",
    "backward in the loss",
    "exit in the loss",
    "one number",
    "text as data",
    "objects in arrays",
    "length raises",
    "collate returns None",
    "a stream to test on",
    "another form to test on",
    "NaN at the start",
}


@pytest.mark.parametrize("name", slow_unless(lambda name: name in DEFAULT, MISTAKES))
def test_a_mistake_in_a_script_is_one_line(name, tmp_path, monkeypatch, forgotten, capsys):
    monkeypatch.chdir(tmp_path)
    text, expected = MISTAKES[name]
    Path("mine.py").write_text(text)
    assert main(["train", "mine.py", "--steps=3", "--wandb=disabled"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1, err
    assert re.search(expected, err), err
    assert not Path("runs").exists()
