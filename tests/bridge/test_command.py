"""`python -m bridge verify|inspect`: tables, JSON, exit status."""

import json

import pytest
import torch
from eager import Call
from torch import nn

import bridge
from bridge.__main__ import main


def good():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 2)), (torch.randn(5, 3),)


def unsupported():
    return Call(lambda x: torch.special.airy_ai(x) + x), torch.randn(3)


def gated():
    class Gated(nn.Module):
        """No gradient reaches the trunk, and a perturbed `scale` has no Cholesky factor."""

        def __init__(self):
            super().__init__()
            self.trunk = nn.Linear(3, 3)
            self.gate = nn.Parameter(torch.zeros(()))
            self.scale = nn.Parameter(torch.ones(9, 9) + 1e-5 * torch.eye(9))

        def forward(self, x):
            return x + self.gate * self.trunk(x) + torch.linalg.cholesky(self.scale.detach()).sum()

        def half(self, x):
            return self(x) / 2

    return Gated(), (torch.randn(2, 3),)


def another():
    def differs(m, x):
        """Differs from PyTorch, most in the second call, where a number of the first is not kept."""
        if not isinstance(x, bridge.tensor.tensor.BridgeTensor):
            m.calls = getattr(m, "calls", 0) + 1
            x = x * m.calls
        return x * 2

    return Call(differs, nn.Identity()), torch.ones(2)


def with_keywords():
    class Ported(nn.Module):
        def forward(self, x, train=False, steps=1):
            return x * steps if train else x

    return Ported(), (torch.ones(2),), {"train": True, "steps": 3}


def nonsense():
    return 3


def failing():
    raise ValueError("no such checkpoint\nin two lines")


def misnamed():
    return nn.Linear(3, 3), (torch.ones(2, 3),), ["keywords"]


def too_wide():
    return nn.Linear(3, 3), torch.ones(2, 4)


@pytest.fixture
def here(monkeypatch):
    monkeypatch.syspath_prepend(__file__.rpartition("/")[0])


def test_verify(here, capsys):
    assert main(["verify", "test_command:good", "--train", "True"]) == 0
    shown = capsys.readouterr().out
    assert "12 leaves compared, 0 beyond tolerance, 0 unproved" in shown
    assert "gradient 0.weight" in shown and "float32 products" in shown
    assert main(["verify", "test_command:good", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] and {row["kind"] for row in report["rows"]} == {"output", "gradient", "input gradient"}
    assert report["environment"]["matmul_precision"] == "highest"
    assert main(["verify", "test_command:another"]) == 1
    shown = capsys.readouterr().out
    assert "4 leaves compared, 2 beyond tolerance" in shown and "1  output value" in shown.splitlines()[2]


def test_keywords_with_the_names_of_options(here, capsys):
    for command in (
        ["verify", "test_command:with_keywords", "--steps", "1"],
        ["inspect", "test_command:with_keywords"],
    ):
        assert main(command) == 0
        assert "3.0e+00     0  output" in capsys.readouterr().out or "inspect" in command


def test_unproved_is_not_ok(here, capsys):
    assert main(["verify", "test_command:gated"]) == 1
    shown = capsys.readouterr().out
    assert "0 beyond tolerance, 4 unproved" in shown and "--jitter" in shown, shown
    assert main(["verify", "test_command:gated", "--jitter", "1e-8", "--method", "half", "--steps", "1"]) == 0


def test_inspect(here, capsys):
    assert main(["inspect", "test_command:good", "--train", "True"]) == 0
    shown = capsys.readouterr().out
    for part in ("parameters: 4 arrays, 26 elements", "aten::linear", "ours", "random", "not supported: none", "GFLOP"):
        assert part in shown
    assert "float32 products highest" in shown
    assert main(["inspect", "test_command:unsupported"]) == 1
    assert "aten::special_airy_ai: neither a lowering nor a decomposition" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["test_command"], "names no function"),
        (["no_such_module:x"], "cannot be found"),
        (["test_command:nonsense"], "returned 3; it must return (module, inputs)"),
        (["test_command:misnamed"], "returned (Linear("),
        (["test_command:failing"], "test_command:failing failed: ValueError: no such checkpoint"),
        (["test_command:too_wide"], "PyTorch itself fails, in step 0: RuntimeError: "),
        (["test_command:good", "--tolerance", "small"], "--tolerance"),
        (["test_command:good", "--tolerance", "-1"], "tolerance is -1.0; it must be a number above 0"),
        (["test_command:good", "--steps", "0"], "steps is 0; it must be at least 1"),
        (["test_command:good", "--jitter", "inf"], "jitter is inf"),
        (["test_command:gated", "--method", "halve"], "the module has no method halve; close to it: half"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_one_line(arguments, said, here, capsys):
    assert main(["verify", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.strip().splitlines()) == 1
