"""Training scripts: plain PyTorch files that `trm train` trains, and what is checked of them."""

import base64
import dataclasses
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from support.classified_points import POINTS
from support.markers import slow_unless
from torch import nn

import bridge
import train_jax
from train_jax.__main__ import main
from train_jax.core.optim.config import OptimConfig
from train_jax.errors import UserError
from train_jax.plugin import use_file
from train_jax.run.presets import preset
from train_jax.script import check, padding, task
from train_jax.script.data import seed_generators
from train_jax.script.program import Program
from train_jax.script.structure import Form

SCRIPT = (
    '''
"""Classifies points in two classes."""

import torch
from torch import nn


def model():
    return nn.Sequential(nn.Linear(2, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2))


'''
    + POINTS
)

LENGTHS = """
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence


class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, ids):
        mask = (ids > 0).float()
        return self.head((self.embed(ids) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))[:, 0]


def model():
    return Mean()


def train_data():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, 11, (length,), generator=generator) for length in [3, 5, 8, 9, 12] * 16]


def test_data():
    return train_data()[:21]


def collate(examples):
    return {"ids": pad_sequence(examples, batch_first=True), "y": torch.stack([e.float().mean() for e in examples])}


def loss(model, batch):
    error = (model(batch["ids"]) - batch["y"]) ** 2
    return error.sum(), len(error)
"""
OPTIONS = ["--wandb=disabled", "--no-verify"]


OPTIMIZER = """

def optimizer(model):
    first, rest = [*model[0].parameters()], [*model[1].parameters(), model[4].bias]
    groups = [{"params": first, "weight_decay": 0.1}, {"params": rest}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def schedule(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 5)
"""
"""An optimizer that does not have model[4].weight."""


@pytest.fixture
def script(tmp_path, monkeypatch, forgotten):
    """`script(text, name)`: a script in an empty folder, which is the current one."""
    monkeypatch.chdir(tmp_path)

    def written(text=SCRIPT, name="mine"):
        (tmp_path / f"{name}.py").write_text(text)
        return f"{name}.py"

    return written


def config_of(path, **fields):
    """The run of a script."""
    use_file(path)
    return dataclasses.replace(preset(Path(path).stem), **fields)


def test_a_script_trains_and_its_run_is_evaluated(script, capsys):
    path = script()
    assert (
        main(["train", path, "--steps=20", "--eval-every-steps=10", "--optim.ema-decay=0.9", "--wandb=disabled"]) == 0
    )
    shown = capsys.readouterr().out
    assert "mine.py: 2 steps agree with PyTorch" in shown
    assert "100 examples, 37 to test on" in shown and "20 steps" in shown
    assert main(["evaluate", "runs/mine", "--plugin", path]) == 0
    assert "accuracy" in capsys.readouterr().out
    assert main(["export", "runs/mine", "--plugin", path]) == 0
    assert "PyTorch agrees: loss" in capsys.readouterr().out
    weights = bridge.load_weights(Path("runs/mine/weights.safetensors"))
    plain = nn.Sequential(nn.Linear(2, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2))
    plain.load_state_dict(weights, strict=True)
    x = torch.randn(37, 2, generator=torch.Generator().manual_seed(1))
    right = (plain.eval()(x).argmax(-1) == (x.prod(1) > 0)).float().mean()
    metrics = json.loads(Path("runs/mine/FINISHED").read_text())
    assert metrics["accuracy"] == pytest.approx(float(right), abs=1e-6)


def test_the_steps_of_a_script_are_pytorchs(script):
    found = check.check_steps(config_of(script()), 3)
    assert found.ok and found.steps == 3


COUNTED = SCRIPT.replace("def model():\n", "calls = []\n\n\ndef model():\n    calls.append(1)\n", 1)


def test_the_model_is_made_once(script):
    path = script(COUNTED)
    assert main(["train", path, "--steps=2", "--wandb=disabled"]) == 0
    assert len(sys.modules["mine"].calls) == 1


def weights_of(run):
    """The exported weights of a run."""
    assert (
        main(["export", run, "--no-check", *[word for path in Path().glob("*.py") for word in ("--plugin", str(path))]])
        == 0
    )
    return bridge.load_weights(Path(run) / "weights.safetensors")


def test_an_optimizer_and_a_schedule_of_the_script_are_used_and_continue_exactly(script):
    path = script(SCRIPT + OPTIMIZER)
    assert check.check_steps(config_of(path), 7).ok
    options = ["--steps=20", "--checkpoint-every-steps=10", *OPTIONS]
    assert main(["train", path, *options]) == 0
    whole = weights_of("runs/mine")
    shutil.copytree("runs/mine", "runs/again")
    shutil.rmtree("runs/again/checkpoints/20")
    Path("runs/again/FINISHED").unlink()
    assert main(["train", path, *options, "--run-dir=runs/again"]) == 0
    again = weights_of("runs/again")
    assert whole.keys() == again.keys() and all(torch.equal(whole[name], again[name]) for name in whole)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first = sys.modules["mine"].model()
    assert torch.equal(first[4].weight, whole["4.weight"]) and not torch.equal(first[4].bias, whole["4.bias"])


def test_the_gradient_of_a_scripts_own_optimizer_is_clipped(script):
    config = config_of(script(SCRIPT + OPTIMIZER))
    clipped = dataclasses.replace(config, optim=dataclasses.replace(config.optim, clip_norm=0.01))
    assert check.check_steps(clipped, 2).ok


@pytest.mark.parametrize("option", ["lr=0.5", "optimizer=lion", "weight-decay=0.5", "lr=0.001", "no-cautious-decay"])
def test_a_field_that_the_scripts_own_optimizer_replaces_is_refused(script, option, capsys):
    assert main(["train", script(SCRIPT + OPTIMIZER), "--steps=3", f"--optim.{option}", *OPTIONS]) == 2
    err = capsys.readouterr().err
    name = option.partition("=")[0].removeprefix("no-").replace("-", "_")
    assert re.search(rf"mine.py:\d+: optim.{name} is .*, but the optimizer is that of the script", err), err
    assert err.count("\n") == 1 and not Path("runs").exists()


def test_frozen_parameters_of_the_scripts_own_optimizer_are_pytorchs(script):
    config = config_of(script(SCRIPT + OPTIMIZER))
    frozen = dataclasses.replace(config, optim=dataclasses.replace(config.optim, freeze=r"1\..*"))
    assert check.check_steps(frozen, 2).ok


UNREACHED = SCRIPT.replace("    return nn.Sequential(", "    made = nn.Sequential(").replace(
    "nn.Linear(8, 2))\n",
    "nn.Linear(8, 2))\n    made[4].register_parameter('spare', nn.Parameter(torch.ones(3)))\n    return made\n",
)
DECAYING = """

def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.5)
"""


@pytest.mark.parametrize(
    "text, decay", [(UNREACHED, 50.0), (UNREACHED + DECAYING, 0.01)], ids=["AdamW of the run", "SGD of the script"]
)
def test_a_parameter_that_the_loss_does_not_reach_has_no_weight_decay_as_in_pytorch(script, text, decay):
    config = config_of(script(text))
    decaying = dataclasses.replace(config, optim=dataclasses.replace(config.optim, weight_decay=decay))
    assert check.check_steps(decaying, 2).ok


def test_it_has_none_with_parts_of_a_batch_either(script):
    path = script(UNREACHED + DECAYING)
    assert main(["train", path, "--steps=2", "--compute.accumulation-steps=2", *OPTIONS]) == 0
    assert weights_of("runs/mine")["4.spare"].tolist() == [1, 1, 1]


ZERO_BIAS = (
    SCRIPT.replace("bias=False)", "bias=True)")
    .replace("    return nn.Sequential(", "    made = nn.Sequential(")
    .replace("nn.Linear(8, 2))\n", "nn.Linear(8, 2))\n    nn.init.zeros_(made[0].bias)\n    return made\n")
)


def test_a_bias_at_zero_whose_gradient_is_rounding_is_no_difference(script):
    found = check.check_steps(config_of(script(ZERO_BIAS)), 2)
    assert found.ok and "0.bias" in {leaf.name for leaf in found.rounded}
    assert "rounding in" in str(found)


ATTENTION = """

class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(1, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        x = self.up(x[..., None])
        return self.head(self.attention(x, x, x)[0].mean(1))


def optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=0.05, eps=1e-16)
"""


@pytest.mark.slow
def test_a_bias_of_keys_whose_gradient_is_rounding_hides_no_fault_in_its_leaf(script, monkeypatch):
    text = SCRIPT.replace("return nn.Sequential(", "return Attending()\n    return (") + ATTENTION
    config = config_of(script(text))
    found = check.check_steps(config, 3, always_in_float64=True)
    (leaf,) = (leaf for leaf in found.leaves if leaf.name == "attention.in_proj_bias")
    assert found.ok and leaf.entries_without_gradient == 8

    right = check._JaxLoop.result

    def faulty(self):
        steps = right(self)
        steps.leaves["attention.in_proj_bias"] = steps.leaves["attention.in_proj_bias"] * (1 + 1e-8)
        return steps

    monkeypatch.setattr(check._JaxLoop, "result", faulty)
    assert not check.check_steps(config, 3, always_in_float64=True).ok


BATCH_NORM = (
    ZERO_BIAS
    + """

def optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-16)
"""
)


def test_running_statistics_that_follow_a_gradient_of_rounding_agree_in_float64(script):
    found = check.check_steps(config_of(script(BATCH_NORM)), 4)
    wide = {leaf.name: leaf.wide_difference for leaf in found.leaves}
    assert found.ok and wide["1.running_mean"] < 1e-12


BOTTLENECK = SCRIPT.replace("nn.ReLU(),", "nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(),")


def test_a_running_mean_that_is_zero_but_for_rounding_is_no_difference(script):
    """As in each inverted residual of MobileNet and EfficientNet: a BatchNorm of a linear function of a BatchNorm."""
    found = check.check_steps(config_of(script(BOTTLENECK)), 2)
    assert found.ok and "3.running_mean" in {leaf.name for leaf in found.rounded}


def test_a_small_leaf_that_differs_is_a_difference():
    def steps(small):
        leaves = {"weight": np.ones(3), "mask": np.array([-1e38]), "small": np.array([small]), "spare": np.ones(2)}
        return check.Steps({}, leaves)

    (leaf,) = check._differences(steps(1e-6), steps(1e-6 * (1 + 1e-6)), check.ROUNDING_OF_LEAVES)[2:3]
    assert leaf.name == "small" and leaf.difference > check.WIDE_TOLERANCE


def test_a_leaf_that_differs_in_float32_agrees_only_to_rounding_of_float64():
    assert check.Leaf("weight", 1e-2, check.TOLERANCE, 1e-10).agrees
    assert not check.Leaf("weight", 1e-2, check.TOLERANCE, 5e-9).agrees


@pytest.mark.slow
def test_the_command_finds_a_fault_that_float32_hides(script, monkeypatch, capsys):
    path = script(SCRIPT + DECAYING)
    assert main(["check", path]) == 0
    assert "3 steps agree with PyTorch" in capsys.readouterr().out
    right = task.translate

    def faulty(optimizer, *arguments, **options):
        optimizer.param_groups[0]["weight_decay"] = 0.5001
        return right(optimizer, *arguments, **options)

    monkeypatch.setattr(task, "translate", faulty)
    assert check.check_steps(config_of(path), 3).ok  # 1e-4 is allowed in float32
    with pytest.raises(SystemExit):
        main(["check", path])
    assert "in float64" in capsys.readouterr().out


def test_a_module_dict_is_one_model_and_a_loader_of_a_stream_a_stream(script):
    text = SCRIPT.replace("return points(0, 100)", "return torch.utils.data.DataLoader(Stream(), batch_size=8)")
    text = text.replace("return nn.Sequential(", "return nn.ModuleDict({'all': nn.Sequential(").replace(
        "(8, 2))", "(8, 2))})"
    )
    text = (
        text.replace("logits = model(x)", "logits = model['all'](x)")
        + """

class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from zip(*points(0, 64))


def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)
"""
    )
    config = config_of(script(text), steps=3, global_batch_size=8)
    assert check.check_steps(config, 2).ok


def _faulty_loss(monkeypatch):
    right = task.ScriptTask._loss_of_arrays

    def faulty(self, dtype):
        method = right(self, dtype)

        def script_loss(self, arrays):
            sums = method(self, arrays)
            return sums | {"loss": (sums["loss"][0] + 0.02 * self[0].weight.square().sum(), None)}

        return script_loss

    monkeypatch.setattr(task.ScriptTask, "_loss_of_arrays", faulty)


def _faulty_optimizer(monkeypatch):
    right = task.translate

    def faulty(optimizer, *arguments, **options):
        optimizer.param_groups[0]["weight_decay"] = 0.09
        return right(optimizer, *arguments, **options)

    monkeypatch.setattr(task, "translate", faulty)


def _faulty_schedule(monkeypatch):
    right = task.translate

    def faulty(optimizer, model, schedule, *arguments, **options):
        schedule.step_size = 2
        return right(optimizer, model, schedule, *arguments, **options)

    monkeypatch.setattr(task, "translate", faulty)


def _faulty_data(monkeypatch):
    right = Form.arrays

    def faulty(self, batch, where):
        arrays = right(self, batch, where)
        return arrays | {"1": 1 - arrays["1"]}

    monkeypatch.setattr(Form, "arrays", faulty)


FAULTS = [_faulty_loss, _faulty_optimizer, _faulty_schedule, _faulty_data]


@pytest.mark.parametrize("fault", slow_unless(lambda fault: fault is _faulty_optimizer, FAULTS))
def test_a_fault_in_a_step_is_found(script, monkeypatch, fault):
    config = config_of(script(SCRIPT + OPTIMIZER))
    fault(monkeypatch)
    found = check.check_steps(config, 4)
    assert not found.ok and "differ from PyTorch" in str(found)


def test_in_16_bits_the_steps_are_compared_in_float64_and_the_gradient_by_verify(script):
    config = config_of(script(), steps=3)  # the data are read by the check
    config = dataclasses.replace(config, arch=dataclasses.replace(config.arch, forward_dtype="bfloat16"))
    found = check.check_steps(config, 1)
    assert found.ok, [leaf for leaf in found.leaves if not leaf.agrees]


def test_batches_of_different_lengths_have_few_shapes_and_the_values_of_collate(script):
    config = config_of(script(LENGTHS, "lengths"), global_batch_size=4)
    own = task.ScriptTask(config)
    whole = [own.batch(step, (0, 1)) for step in range(40)]
    assert len({batch["ids"].shape for batch in whole}) <= padding.SHAPES
    for step in (0, 7):
        parts = [own.batch(step, (part, 4)) for part in range(4)]
        assert {part["ids"].shape[1] for part in parts} == {whole[step]["ids"].shape[1]}
        for name, array in whole[step].items():
            np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), array)
    row = whole[0]["ids"][0]
    assert row.any() and (row[np.count_nonzero(row) :] == 0).all()


@pytest.mark.slow
def test_a_run_on_batches_of_different_lengths_equals_one_that_pads_to_the_longest(script, capsys):
    path = script(LENGTHS, "lengths")
    longest = script(
        LENGTHS.replace(
            "pad_sequence(examples, batch_first=True)",
            "pad_sequence([*examples, torch.zeros(12).long()], batch_first=True)[:-1]",
        ),
        "longest",
    )
    options = ["--steps=12", "--global-batch-size=4", "--eval-batch-size=8", *OPTIONS]
    assert main(["train", path, *options]) == 0
    assert main(["train", longest, *options]) == 0
    ours, theirs = (json.loads(Path(f"runs/{name}/FINISHED").read_text()) for name in ("lengths", "longest"))
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)


def test_a_form_keeps_the_structure_of_a_batch():
    batch = {"x": torch.ones(2, 3), "meta": ("name", 4), "parts": [np.zeros(2), torch.tensor(1.5)]}
    form = Form(batch)
    arrays = form.arrays(batch, "collate()")
    assert {name: array.shape for name, array in arrays.items()} == {"x": (2, 3), "parts.0": (2,), "parts.1": (1,)}
    again = form.batch({name: torch.as_tensor(array) for name, array in arrays.items()})
    assert again["meta"] == ("name", 4) and again["parts"][1].shape == ()
    with pytest.raises(UserError, match=r"meta.0 is 'name' and 'other', which cannot change unless it is a tensor"):
        form.arrays(batch | {"meta": ("other", 4)}, "collate()")
    pair = Form([torch.ones(2), 1]).arrays((torch.zeros(2), 1), "collate()")  # as of a Dataset and of arrays
    assert pair["0"].tolist() == [0, 0]
    with pytest.raises(UserError, match="beyond 32 bits"):
        Form(torch.tensor([2**40])).arrays(torch.tensor([2**40]), "collate()")


def changed(old, new):
    assert old in SCRIPT
    return SCRIPT.replace(old, new)


MISTAKES = {
    "no loss": (SCRIPT.replace("def loss(", "def other("), "expected a train_jax.Plugin"),
    "no model": (SCRIPT.replace("def model(", "def other("), r"mine.py does not define model; add `def model\(\)`"),
    "arguments of loss": (
        changed("def loss(model, batch)", "def loss(batch)"),
        r"mine.py:\d+: loss\(batch\) cannot be",
    ),
    "no module": (changed("return nn.Sequential(", "return ("), r"model\(\) returns tuple, expected an nn.Module"),
    "model raises": (changed("nn.Linear(8, 2)", "nn.Linear(8, '2')"), r"mine.py:\d+: model\(\) raised TypeError"),
    "model is a module": (
        changed("def points", "model = nn.Linear(2, 2)\n\n\ndef points"),
        "number of|raised|cannot be",
    ),
    "no examples": (changed("points(0, 100)", "points(0, 0)"), r"train_data\(\) has no examples"),
    "no data": (changed("return points(0, 100)", "return 3"), r"train_data\(\) returns int, expected a Dataset"),
    "rows": (changed("points(0, 100)", "torch.ones(3), torch.ones(4)"), r"have .* rows; return arrays with the same"),
    "data raises": (
        changed("return points(0, 100)", "raise KeyError(3)"),
        r"mine.py:\d+: train_data\(\) raised KeyErr",
    ),
    "loss of rows": (
        changed("logits, y), {", "logits, y, reduction='none'), {"),
        r"loss has shape \(32,\), expected a sc",
    ),
    "loss is a dict": (
        changed("return nn.functional.cross_entropy(logits, y), {", "return {'a': logits.sum()}, {"),
        "loss is of type dict",
    ),
    "metric of rows": (changed(".float().mean()}", ".float()}"), r"the metric accuracy has shape \(32,\)"),
    "metric named loss": (changed('"accuracy"', '"loss"'), "metric called loss"),
    "three values": (changed("return nn.functional", "return 1.0, 2, nn.functional"), "3 values, expected a scalar"),
    "constant loss": (
        changed("nn.functional.cross_entropy(logits, y), {", "logits.sum().detach(), {"),
        "does not depend",
    ),
    "loss raises": (
        changed("logits = model(x)", "logits = model(x[:, :1])"),
        r"mine.py:\d+: loss\(\) raised RuntimeError",
    ),
    "text in a batch": (
        changed("return points(0, 100)", "return [(torch.ones(2), str(n)) for n in range(9)]").replace("test_", "no_"),
        r"mine.py:\d+: loss\(\) raised",
    ),
    "example raises": (
        changed("return points(0, 100)", "return Bad()")
        + """

class Bad:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        raise IndexError("no such file")
""",
        r"mine.py:\d+: example \d+ of train_data\(\) raised IndexError: no such file",
    ),
    "different sizes": (
        changed("return points(0, 100)", "return [(torch.ones(n % 3 + 1), 1) for n in range(64)]"),
        r"collate\(\) raised RuntimeError: .*equal size",
    ),
    "integers": (changed("(x.prod(1) > 0).long()", "(x.prod(1) > 0).long() + 2**40"), "beyond 32 bits"),
    "syntax": (SCRIPT + "\ndef broken(:\n", "cannot be imported"),
    "no optimizer": (SCRIPT + "\n\ndef optimizer(model):\n    return 3\n", r"returns int, expected a torch.optim"),
    "optimizer raises": (SCRIPT + "\n\ndef optimizer(model):\n    return torch.optim.SGD([])\n", "raised"),
    "a sampler": (
        changed(
            "return points(0, 100)",
            """x, y = points(0, 100)
    data = torch.utils.data.TensorDataset(x, y)
    return torch.utils.data.DataLoader(data, 8, sampler=torch.utils.data.WeightedRandomSampler(y + 0.1, 100))""",
        ),
        "DataLoader with a WeightedRandomSampler, whose order is not used",
    ),
    "a number": (changed("y), {", "y).item(), {"), "loss is a number of Python, which has no gradient"),
    "stream without a length": (changed("return points(0, 100)", "yield points(0, 32)"), "no length; give --steps"),
}
"""Scripts with a mistake, and the line that says so."""


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_a_script_is_one_line(name, script, capsys):
    text, expected = MISTAKES[name]
    steps = [] if name == "stream without a length" else ["--steps=3"]
    assert main(["train", script(text), *steps, "--wandb=disabled"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1, err
    assert re.search(expected, err), err
    assert not Path("runs").exists()


STREAM = (
    SCRIPT.replace("    return points(0, 100)", "    yield from batches()")
    + """

def batches():
    for number in range(5):
        yield points(number, 32)
    WHAT
"""
)
LATE = {
    "another form": ("yield {'x': points(5, 32)}", r"batches of different forms: batch is tuple and dict"),
    "an exception": (
        "raise OSError('the disk is gone')",
        r"mine.py:\d+: train_data\(\) raised OSError: the disk is gone",
    ),
    "fewer rows": ("yield points(5, 31)", r"a batch with 0 of shape \(31, 2\), expected 32 rows"),
    "not finite": ("\n    while True: yield points(5, 32)[0] * float('nan'), points(5, 32)[1]", "consecutive steps"),
}


@pytest.mark.parametrize("name", slow_unless(lambda name: name == "an exception", LATE))
def test_a_fault_in_the_middle_is_one_line_and_keeps_the_checkpoint(name, script, capsys):
    what, expected = LATE[name]
    path = script(STREAM.replace("WHAT", what))
    options = [
        "--steps=12",
        "--checkpoint-every-steps=2",
        "--log-every-steps=1",
        "--optim.max-skipped-steps=3",
        *OPTIONS,
    ]
    assert main(["train", path, *options]) == 2
    err = capsys.readouterr().err
    assert re.search(expected, err) and err.count("\n") == 1, err
    assert max(int(folder.name) for folder in Path("runs/mine/checkpoints").iterdir() if folder.name.isdigit()) >= 4


def test_an_example_of_a_padded_batch_is_read_once_for_all_parts(script):
    counting = (
        LENGTHS.replace("    return [torch.randint", "    return Counting(torch.randint").replace("* 16]", "* 16)")
        + """

READ = []


class Counting(list):
    def __getitem__(self, index):
        if isinstance(index, int):
            READ.append(index)
        return super().__getitem__(index)
"""
    )
    own = task.ScriptTask(config_of(script(counting, "counting"), global_batch_size=8))
    assert own.form.names
    read = sys.modules["counting"].READ
    read.clear()
    parts = [own.batch(3, (part, 8)) for part in range(8)]
    assert len(parts) == len(read) == 8


RANDOM = """
import random

import numpy as np
import torch
from torch import nn


class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return 50

    def __getitem__(self, index):
        if index == 49 and WORKER_RAISES and torch.utils.data.get_worker_info():
            raise OSError("no such file")
        return index + torch.randn(3), np.float32(np.random.rand() + random.random())


def collate(examples):
    batch = torch.utils.data.default_collate(examples)
    return [batch[0] + torch.randn(3), batch[1]]


def model():
    return nn.Linear(3, 1)


def train_data():
    return Noisy()


def loss(model, batch):
    x, y = batch
    error = (model(x)[:, 0] - y) ** 2
    return error.sum(), len(x)
"""
WORKER_RAISES = RANDOM.replace("WORKER_RAISES", "True")
RANDOM = RANDOM.replace("WORKER_RAISES", "False")


@pytest.mark.slow
def test_worker_processes_change_nothing_also_in_a_run_that_continues(script):
    path = script(RANDOM)
    options = ["--global-batch-size=8", "--checkpoint-every-steps=5", "--log-every-steps=1", *OPTIONS]
    assert main(["train", path, "--steps=10", *options]) == 0
    assert main(["train", path, "--steps=5", "--workers=3", "--run-dir=runs/workers", *options]) == 0
    assert main(["train", path, "--steps=10", "--workers=2", "--run-dir=runs/workers", *options]) == 0
    plain = weights_of("runs/mine")
    workers = weights_of("runs/workers")
    assert all(torch.equal(plain[name], workers[name]) for name in plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text, expected",
    [
        (WORKER_RAISES, r"mine.py:15: example 49 of train_data\(\) raised OSError: no such file"),
        (
            RANDOM.replace("    return Noisy()", "    noisy = Noisy()\n    noisy.map = lambda x: x\n    return noisy"),
            r"mine.py:\d+: the data cannot be sent to worker processes \(.*lambda.*; define classes",
        ),
    ],
    ids=["raises", "does not pickle"],
)
def test_a_mistake_in_a_worker_is_one_line(script, text, expected, capsys):
    assert main(["train", script(text), "--steps=9", "--global-batch-size=8", "--workers=1", *OPTIONS]) == 2
    err = capsys.readouterr().err
    assert re.search(expected, err) and err.count("\n") == 1, err


def test_an_iterable_has_no_workers_and_says_that_it_is_read_again(script, capsys):
    path = script(STREAM.replace("WHAT", ""))
    assert main(["train", path, "--steps=2", "--workers=2", *OPTIONS]) == 2
    assert "is an iterable, which is read in its order by one process" in capsys.readouterr().err
    assert "a run that continues reads again" in task.ScriptTask(config_of(path, steps=2)).description


def test_draws_of_the_data_follow_from_the_seed(script):
    text = RANDOM.replace("return Noisy()", "return torch.randn(4, 3), torch.randn(4)")
    config = config_of(script(text, "drawn"), global_batch_size=4)
    first, again = (task.ScriptTask(config).batch(0, (0, 1)) for _ in range(2))
    np.testing.assert_array_equal(first["0"], again["0"])
    stream = RANDOM.replace("return Noisy()", "while True: yield torch.randn(4, 3), torch.randn(4)")
    config = config_of(script(stream, "stream"), global_batch_size=4, steps=3)
    own = task.ScriptTask(config)
    batches = [own.batch(step, (0, 1))["0"] for step in (0, 1, 2)]
    torch.randn(3)
    assert not np.array_equal(batches[0], batches[1])
    for step, batch in enumerate(batches):
        np.testing.assert_array_equal(own.batch(step, (0, 1))["0"], batch)
        np.testing.assert_array_equal(task.ScriptTask(config).batch(step, (0, 1))["0"], batch)


def test_a_seed_of_an_example_gives_the_draws_of_manual_seed_and_costs_no_traceback(monkeypatch):
    torch.manual_seed(7)
    expected = torch.randn(3)

    def format_stack(*_):
        raise AssertionError("torch.manual_seed formats the stack where CUDA has not started, 0.3 ms for each example")

    monkeypatch.setattr("traceback.format_stack", format_stack)
    seed_generators(7)
    assert torch.equal(torch.randn(3), expected)


def test_a_program_serves_the_model_without_pytorch(script, capsys):
    path = script()
    assert main(["train", path, "--steps=3", *OPTIONS]) == 0
    assert main(["export", "runs/mine", "--plugin", path, "--format=program", "--batch-sizes=2,5"]) == 0
    assert "PyTorch agrees" in capsys.readouterr().out
    code = """
import sys
sys.modules["torch"] = None
import numpy as np
from train_jax.script.program import Program
program = Program("runs/mine/model.npz")
x = np.arange(16, dtype=np.float32).reshape(8, 2) / 9
np.save("served.npy", program({"input": x})["batch"])
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    plain = sys.modules["mine"].model()
    plain.load_state_dict(weights_of("runs/mine"))
    x = torch.arange(16).reshape(8, 2) / 9
    np.testing.assert_allclose(np.load("served.npy"), plain.eval()(x).detach(), rtol=1e-5, atol=1e-6)


def test_a_program_that_jax_cannot_read_names_the_release_that_wrote_it(tmp_path):
    layout = json.dumps({"sizes": [1], "inputs": {}, "dtypes": {}, "jax": "99.1"}).encode()
    np.savez(tmp_path / "model.npz", layout=np.frombuffer(layout, np.uint8), **{"program.1": np.full(64, 7, np.uint8)})
    with pytest.raises(ValueError, match=f"written with JAX 99.1, and JAX {jax.__version__} cannot read it"):
        Program(tmp_path / "model.npz")


def test_a_report_of_a_run_imports_no_file_and_an_export_asks_for_it(script, forgotten, monkeypatch, capsys):
    path = script()
    assert main(["train", path, "--steps=2", "--log-every-steps=1", *OPTIONS]) == 0
    monkeypatch.setattr(forgotten, "files", [])
    del sys.modules["mine"]
    assert main(["report", "runs/mine"]) == 0
    assert "mine" not in sys.modules and Path("runs/mine/report/index.html").exists()
    assert main(["export", "runs/mine"]) == 2
    err = capsys.readouterr().err
    assert "not imported unasked; give --plugin and its path" in err and err.count("\n") == 1


PRETRAINED = (
    SCRIPT.replace("    return nn.Sequential(", "    return Saved(")
    + """

class Saved(nn.Sequential):
    def save_pretrained(self, folder):
        pathlib.Path(folder).mkdir(exist_ok=True)
        torch.save([type(self) is Saved, self.state_dict()], pathlib.Path(folder, "model.pt"))
"""
)


def test_a_folder_is_written_by_save_pretrained(script):
    path = script(PRETRAINED.replace("import torch\n", "import pathlib\n\nimport torch\n", 1))
    assert main(["train", path, "--steps=2", *OPTIONS]) == 0
    assert main(["export", "runs/mine", "--plugin", path, "--format=huggingface"]) == 0
    is_own, weights = torch.load("runs/mine/huggingface/model.pt", weights_only=True)
    trained = weights_of("runs/mine")
    assert is_own and all(torch.equal(weights[name], trained[name]) for name in trained)


LLAMA = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM


def model():
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    return LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes))


def train_data():
    return [{"input_ids": torch.arange(8) % 5 + n % 7} for n in range(32)]


def loss(model, batch):
    return model(**batch, labels=batch["input_ids"]).loss
"""


@pytest.mark.slow
def test_a_llama_is_exported_for_from_pretrained_and_as_a_program(script, capsys):
    transformers = pytest.importorskip("transformers")
    path = script(LLAMA)
    assert main(["train", path, "--steps=2", *OPTIONS]) == 0
    assert main(["export", "runs/mine", "--plugin", path, "--format=huggingface"]) == 0
    again = transformers.AutoModelForCausalLM.from_pretrained("runs/mine/huggingface")
    trained = weights_of("runs/mine")
    assert all(torch.equal(again.state_dict()[name], trained[name]) for name in trained)
    assert main(["export", "runs/mine", "--plugin", path, "--format=program"]) == 0
    assert "PyTorch agrees: logits" in capsys.readouterr().out
    assert list(Program("runs/mine/model.npz").inputs) == ["input_ids"]  # not the labels


def test_fit_trains_as_the_script_does_and_shows_its_progress_in_a_notebook(script, monkeypatch):
    path = script(SCRIPT + OPTIMIZER)
    assert main(["train", path, "--steps=4", "--log-every-steps=2", *OPTIONS]) == 0
    mine = sys.modules["mine"]
    shown = []
    monkeypatch.setattr("train_jax.script.fit.notebook", lambda: shown.append)
    torch.manual_seed(0)  # of the run of the script
    functions = {"optimizer": mine.optimizer, "schedule": mine.schedule, "test_data": mine.test_data()}
    options: dict[str, Any] = {"steps": 4, "log_every_steps": 2, "run_dir": "runs/fit", "verify": False}
    fitted = train_jax.fit(mine.model(), mine.train_data(), mine.loss, **functions, **options)
    assert (
        fitted.metrics["train_steps"] == 4
        and fitted.metrics["loss"] == json.loads(Path("runs/mine/FINISHED").read_text())["loss"]
    )
    expected = weights_of("runs/mine")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in fitted.run.state_dict().items())
    assert "step 4 of 4" in shown[-1] and "<svg" in shown[-1] and 'max="4"' in shown[-1]
    with pytest.raises(UserError, match=r"optim\.lr is 0\.3, but the optimizer is that of the script"):
        lr = OptimConfig(lr=0.3)
        train_jax.fit(mine.model(), mine.train_data(), mine.loss, **functions, **options | {"run_dir": "a"}, optim=lr)


PREVIEW = """

def preview(outputs, batch):
    x, y = batch
    seen.append((outputs, len(x)))
    return {
        "logits": outputs.sigmoid(),
        "colours": [torch.ones(3, 4, 3) * torch.tensor([1.0, 0.5, -1.0]), np.full((2, 2), 300)],
        "text": f"<{len(x)} points & {y.tolist()}>",
    }
"""
PREVIEWED = SCRIPT.replace("import torch\n", "import numpy as np\nimport torch\n", 1) + "\n\nseen = []\n" + PREVIEW


def pixels_of(png):
    image = pytest.importorskip("PIL.Image")
    return np.asarray(image.open(io.BytesIO(base64.b64decode(png))))


def test_a_preview_is_in_the_report(script, capsys):
    path = script(PREVIEWED)
    assert main(["train", path, "--steps=4", "--eval-every-steps=2", "--optim.ema-decay=0.9", "--wandb=disabled"]) == 0
    assert not re.search("rounding in .*num_batches", capsys.readouterr().out)  # the check is in training mode
    outputs, count = sys.modules["mine"].seen[-1]
    assert count == 8 and len(sys.modules["mine"].seen) == 3  # at the start, after 2 steps and at the end
    plain = sys.modules["mine"].model()
    plain.load_state_dict(weights_of("runs/mine"))
    torch.testing.assert_close(outputs, plain.eval()(sys.modules["mine"].test_data()[0][:8]))
    logits, first, second, text = json.loads(Path("runs/mine/evaluation/previews.json").read_text())["items"]
    assert [logits["name"], first["name"], second["name"]] == ["logits", "colours 1", "colours 2"]
    np.testing.assert_array_equal(pixels_of(logits["png"]), (outputs.sigmoid() * 255).round().numpy())
    np.testing.assert_array_equal(pixels_of(first["png"]), np.broadcast_to([255, 128, 0], (3, 4, 3)))
    np.testing.assert_array_equal(pixels_of(second["png"]), np.full((2, 2), 255))
    assert main(["report", "runs/mine"]) == 0
    page = Path("runs/mine/report/index.html").read_text()
    assert page.count("data:image/png;base64,") == 3 and logits["png"] in page
    assert "&lt;8 points &amp; [" in page and text["text"].startswith("<8 points & [")


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ("torch.ones(3)", r"mine.py:\d+: preview\(\) returns an array of shape \(3,\), expected H x W or H x W x 3"),
        ("{'a': 3}", r"mine.py:\d+: preview\(\) returns int, expected arrays"),
        ("outputs.missing", r"mine.py:\d+: preview\(\) raised AttributeError"),
    ],
)
def test_a_mistake_in_a_preview_is_one_line_before_work(script, made, message, capsys):
    path = script(f"{SCRIPT}\n\ndef preview(outputs, batch):\n    return {made}\n")
    assert main(["train", path, "--steps=2", *OPTIONS]) == 2
    err = capsys.readouterr().err
    assert re.search(message, err) and err.count("\n") == 1 and not Path("runs").exists()


def test_a_mistake_in_a_preview_ends_no_run(script):
    later = "\n\ndef preview(outputs, batch):\n    seen.append(1)\n    return 'text' if len(seen) < 2 else 3\n"
    assert main(["train", script(f"{SCRIPT}\n\nseen = []\n{later}"), "--steps=2", *OPTIONS]) == 0
    (item,) = json.loads(Path("runs/mine/evaluation/previews.json").read_text())["items"]
    assert item["name"] == "error" and "preview() returns int" in item["text"]
