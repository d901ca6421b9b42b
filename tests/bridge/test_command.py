"""`python -m bridge verify|inspect`: tables, JSON, exit status."""

import json

import pytest
import torch
from torch import nn

from bridge.__main__ import main


def good():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 2)), (torch.randn(5, 3),)


def unsupported():
    class Airy(nn.Module):
        def forward(self, x):
            return torch.special.airy_ai(x) + x

    return Airy(), torch.randn(3)


def nonsense():
    return 3


@pytest.fixture
def here(monkeypatch):
    monkeypatch.syspath_prepend(__file__.rpartition("/")[0])


def test_verify(here, capsys):
    assert main(["verify", "test_command:good", "--train", "True", "--steps", "2"]) == 0
    shown = capsys.readouterr().out
    assert "0 beyond tolerance" in shown and "gradient 0.weight" in shown
    assert main(["verify", "test_command:good", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] and {row["kind"] for row in report["rows"]} == {"output", "gradient"}
    assert main(["verify", "test_command:good", "--tolerance", "1e-12"]) == 1


def test_inspect(here, capsys):
    assert main(["inspect", "test_command:good", "--train", "True"]) == 0
    shown = capsys.readouterr().out
    for part in ("parameters: 4 arrays, 26 elements", "aten::linear", "ours", "random", "not supported: none", "GFLOP"):
        assert part in shown
    assert main(["inspect", "test_command:unsupported"]) == 1
    assert "aten::special_airy_ai: neither a lowering nor a decomposition" in capsys.readouterr().out


def test_mistakes_are_one_line(here, capsys):
    for factory, said in (
        ("test_command", "names no function"),
        ("test_command:absent", "cannot be found"),
        ("no_such_module:x", "cannot be found"),
        ("test_command:nonsense", "returned a int; it must return (module, inputs)"),
    ):
        assert main(["verify", factory]) == 2
        error = capsys.readouterr().err
        assert said in error and len(error.strip().splitlines()) == 1
