"""Scripts in bfloat16 and float16: their steps agree with PyTorch's, and faults in them are found."""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.markers import slow_or_campaign

import bridge
from train_jax.__main__ import main
from train_jax.core import guard
from train_jax.plugin import use_file
from train_jax.run.presets import preset
from train_jax.script import check, task

HEAD = """
import torch
from torch import nn


def train_data():
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    return x, (x[:, :4].prod(1) > 0).long()


def test_data():
    return train_data()


def schedule(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
"""
ADAMW = "torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)"
SGD = "torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)"
ADAM = "torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-4, weight_decay=0.1)"
MLP = "nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 2))"
CONVOLUTION = (
    "nn.Sequential(nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 6, 3), nn.BatchNorm1d(6), nn.ReLU(), nn.Flatten(),"
    " nn.Linear(36, 2))"
)
CLASSES = """

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(2, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.layer(self.up(x.unflatten(1, (4, 2)))).mean(1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRU(2, 8, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.cell(x.unflatten(1, (4, 2)))[1][-1])


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 16)).bfloat16()
        self.head = nn.Linear(16, 2)

    def forward(self, x):
        return self.head(self.body(x.bfloat16()).float())


class Region(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.scale = nn.Linear(16, 16)
        self.head = nn.Linear(16, 2)

    def forward(self, x):
        x = self.body(x)
        with torch.autocast("cpu", enabled=False):
            x = x.float() * torch.sigmoid(self.scale(x.float()))
        return self.head(x)
"""


def script(model, optimizer, logits):
    return f"""{HEAD}{CLASSES}

def model():
    return {model}


def optimizer(model):
    return {optimizer}


def loss(model, batch):
    x, y = batch
    {logits}
    return nn.functional.cross_entropy(logits.float(), y)
"""


AUTOCAST = 'with torch.autocast("cpu", torch.bfloat16):\n        logits = model(x)'
PLAIN = "logits = model(x)"
SCRIPTS: dict[str, tuple[str, dict[str, Any]]] = {
    "an autocast region in bfloat16": (script(MLP, ADAMW, AUTOCAST), {}),
    "an autocast region in float16": (script(MLP, ADAM, AUTOCAST.replace("bfloat16", "float16")), {"scaled": True}),
    "an MLP in bfloat16": (script(f"{MLP}.bfloat16()", SGD, "logits = model(x.bfloat16())"), {}),
    "an MLP in float16": (script(f"{MLP}.half()", ADAM, "logits = model(x.half())"), {"scaled": True}),
    "a convolution under --bf16": (script(CONVOLUTION, SGD, PLAIN), {"bf16": True}),
    "attention with dropout under --bf16": (script("Attention()", ADAMW, PLAIN), {"bf16": True}),
    "attention in bfloat16": (script("Attention().bfloat16()", ADAMW, "logits = model(x.bfloat16())"), {}),
    "a body in bfloat16 and a head in float32": (script("Mixed()", ADAMW, PLAIN), {}),
    "a recurrent model in float16": (script("Recurrent().half()", SGD, "logits = model(x.half())"), {"scaled": True}),
    "a region without autocast under --bf16": (script("Region()", SGD, PLAIN), {"bf16": True}),
}


def wrong_loss(monkeypatch):
    right = task.ScriptTask._loss_of_arrays

    def faulty(self, dtype):
        method = right(self, dtype)

        def script_loss(self, arrays):
            total, count = method(self, arrays)["loss"]
            return {"loss": (total + 0.01 * next(self.parameters()).float().square().sum(), count)}

        return script_loss

    monkeypatch.setattr(task.ScriptTask, "_loss_of_arrays", faulty)


def wrong_model(monkeypatch):
    """The model of the JAX side has outputs that are 1 % larger."""
    right = check._JaxLoop.__init__

    def faulty(self, *arguments):
        module = check._module

        def larger(*arguments):
            made = module(*arguments)
            made.register_forward_hook(lambda _, __, output: output * 1.01)
            return made

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(check, "_module", larger)
            right(self, *arguments)

    monkeypatch.setattr(check._JaxLoop, "__init__", faulty)


def wrong_optimizer(monkeypatch):
    right = task.translate

    def faulty(optimizer, *arguments, **options):
        optimizer.param_groups[0]["weight_decay"] = 0.101
        return right(optimizer, *arguments, **options)

    monkeypatch.setattr(task, "translate", faulty)


def wrong_schedule(monkeypatch):
    right = task.translate

    def faulty(optimizer, model, schedule, *arguments, **options):
        schedule.gamma = 0.909
        return right(optimizer, model, schedule, *arguments, **options)

    monkeypatch.setattr(task, "translate", faulty)


FAULTS = {None: "", wrong_loss: "loss", wrong_model: "model", wrong_optimizer: "optimizer", wrong_schedule: "schedule"}
CASES = [(name, fault) for name in SCRIPTS for fault in FAULTS]
SLOW = [case for case in CASES if case[0] == "an MLP in float16"]
CAMPAIGN = [case for case in CASES if case not in SLOW]


def checked(name, fault, monkeypatch):
    text, options = SCRIPTS[name]
    Path("mine.py").write_text(text)
    use_file("mine.py")
    config = dataclasses.replace(preset("mine"), steps=20)
    if options.get("bf16"):
        config = dataclasses.replace(config, arch=dataclasses.replace(config.arch, forward_dtype="bfloat16"))
    if options.get("scaled"):
        config = dataclasses.replace(config, task_config=dataclasses.replace(config.task_config, loss_scale="dynamic"))
    if fault is not None:
        fault(monkeypatch)
    return check.check_steps(config, 3)


@pytest.mark.parametrize(
    "case", slow_or_campaign(SLOW, CAMPAIGN), ids=lambda case: f"{case[0]}-{FAULTS[case[1]] or 'as it is'}"
)
def test_a_script_in_16_bits_is_checked(case, tmp_path, monkeypatch, forgotten, capsys):
    name, fault = case
    monkeypatch.chdir(tmp_path)
    found = checked(name, fault, monkeypatch)
    with capsys.disabled():
        print(f"\n| {name} | {FAULTS[fault] or '-'} | {found} |")
    assert found.ok == (fault is None), [leaf for leaf in found.leaves if not leaf.agrees]


OVERFLOWING = f"""{HEAD.partition("def schedule")[0]}
def model():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))


def optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=0.01)


def loss(model, batch):
    x, y = batch
    with torch.autocast("cpu", torch.float16):
        logits = model(x)
    return 8 * nn.functional.cross_entropy(logits.float(), y)
"""
GROWTH_STEPS = 3


def scaled_by_pytorch(config, steps):
    """Trains the script with PyTorch's GradScaler; returns the scales, the skipped steps and the parameters."""
    own = task.ScriptTask(config)
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        model = own.script.model()
    assert own.script.optimizer is not None
    optimizer = own.script.optimizer(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=guard.FIRST_SCALE, growth_interval=GROWTH_STEPS)
    scales, skipped = [], []
    for step in range(steps):
        scales.append(scaler.get_scale())
        optimizer.zero_grad()
        batch = own.train_data.batch(step, config.global_batch_size, (0, 1), config.seed)
        scaler.scale(own.script.loss(model, batch)).backward()
        scaler.unscale_(optimizer)
        skipped.append(not all(bool(p.grad.isfinite().all()) for p in model.parameters()))
        scaler.step(optimizer)
        scaler.update()
    return scales, skipped, dict(model.named_parameters())


def test_a_step_that_overflows_in_float16_is_skipped_as_by_gradscaler(tmp_path, monkeypatch, forgotten):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(OVERFLOWING)
    steps = 12
    options = ["--loss-scale=dynamic", f"--optim.loss-scale-growth-steps={GROWTH_STEPS}", "--log-every-steps=1"]
    assert main(["train", "mine.py", f"--steps={steps}", *options, "--wandb=disabled", "--no-verify"]) == 0
    scales, skipped, parameters = scaled_by_pytorch(dataclasses.replace(preset("mine"), steps=steps), steps)
    assert 2 <= sum(skipped) < steps / 2 and any(later > earlier for earlier, later in itertools.pairwise(scales))
    logged = [json.loads(line) for line in Path("runs/mine/metrics.jsonl").read_text().splitlines()]
    trained = [line for line in logged if "train/loss_scale" in line]
    assert [line["train/loss_scale"] for line in trained] == scales
    assert [line["train/skipped_steps"] for line in trained] == skipped
    assert main(["export", "runs/mine", "--plugin", "mine.py", "--no-check"]) == 0
    weights = bridge.load_weights(Path("runs/mine/weights.safetensors"))
    for name, parameter in parameters.items():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=0, atol=2e-3)
