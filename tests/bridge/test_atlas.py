"""`campaigns.atlas`: models of registries in processes of their own, the file of results and the page."""

import importlib.util
import itertools
import json
import os
import time

import pytest
import torch
from torch import nn

from campaigns import atlas, atlas_models


def result(status="right", **fields):
    return {"name": "a", "family": "f", "train": False, "help": False, "status": status, "cause": "", **fields}


def built(module, *args):
    return atlas_models.Entry("f", lambda: (module, args, {}))


class Asking(nn.Module):
    def forward(self, x):
        return x.new_ones(int(x.sum())) * x.sum()


def test_what_came_of_a_model():
    def fails():
        raise ValueError("no such size")

    x = torch.linspace(-1, 1, 6).view(2, 3)
    assert atlas.attempt(built(nn.Linear(3, 2), x), True)["status"] == "right"
    assert "asks for the value" in atlas.attempt(built(Asking(), x), False)["cause"]
    assert atlas.attempt(built(nn.Linear(4, 2), x), False)["status"] == "fails in PyTorch"
    unbuilt = atlas.attempt(atlas_models.Entry("f", fails), False)
    assert unbuilt == {"status": "not built", "cause": "ValueError: no such size"}


@pytest.mark.parametrize(
    ("notes", "status"),
    [
        ([], "right"),
        (["rounding: noise of 1e-06", ""], "right"),
        (["rounding: noise of 1e-06", "PyTorch is off: finite difference 1"], "PyTorch is off"),
        (["PyTorch is off: finite difference 1", "JAX is off: finite difference 1"], "different"),
        (["rounding: noise of 1e-06", "JAX is off: finite difference 1"], "different"),
        (["undecided: finite difference 1", ""], "different"),
    ],
)
def test_the_arbiter_decides_about_a_leaf_that_differs(notes, status):
    assert atlas._status(notes) == status


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_process_that_ends_early_or_takes_too_long(monkeypatch):
    monkeypatch.setattr(atlas, "WALL", 300)  # under much other work, a process has less than a tenth of a core
    assert atlas.in_process(lambda: {"status": "right"}, 30) == {"status": "right"}
    assert atlas.in_process(lambda: os._exit(3), 30)["status"] == "crashed"
    assert atlas.in_process(lambda: time.sleep(60) or {}, 0)["cause"] == "0 s of wall time"
    assert atlas.in_process(lambda: {"never": all(itertools.count(1))}, 1)["cause"] == "1 s of CPU time"


def test_a_page_by_family(tmp_path):
    rows = [
        result(name="right"),
        result("refused", name="pyg/GCN", cause="a branch in the module, at /x/y/loop.py:7: `if a | b`. Remedy: none."),
        result("right", name="pyg/GCN", help=True),
        result("PyTorch is off", name="off", family="g"),
        result("not built", name="unbuilt", family="g"),
        result("refused", name="trained", train=True),
        result("refused", name="twice", cause="a branch"),
        result("refused", name="twice", cause="a branch", train=True),
    ]
    path = tmp_path / "atlas.jsonl"
    page = tmp_path / "atlas.md"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    page.write_text("# The atlas\n\ntext\n\n## By family\n\nold\n")
    atlas.main([str(path), "--page", str(page)])
    text = page.read_text()
    assert text.startswith("# The atlas\n\ntext\n\n## By family\n") and "old" not in text
    assert "| all | 2/4 (50 %) | 3/4 (75 %) | 0/2 (0 %) | 0/2 (0 %) |" in text
    assert "fail in PyTorch itself, are not counted: 1 in evaluation." in text
    assert "| pyg/GCN | evaluation | refused | a branch in the module, loop.py:7: `if a / b` | " in text
    assert '`known_inputs="1"`: right |' in text and "unbuilt" not in text
    assert text.count("| both | refused | a branch") == 1, "a model with one result in both modes"
    potentials = text.partition("## Interatomic potentials")[2].partition("## Models that are not right")[0]
    assert "gradients of a loss on forces" in potentials and "| PaiNN (schnetpack" in potentials


def test_families_take_turns_and_what_is_done_is_left_out():
    chosen = dict.fromkeys(("x/1", "x/2"), built(nn.Identity()))
    chosen |= {"y/1": atlas_models.Entry("y, text", lambda: (nn.Identity(), (), {}))}
    assert [*atlas_models.names_of(chosen, {"x/1"})] == ["x/2", "y/1"]


SAMPLE = {
    "transformers": ["GPT2LMHeadModel", "Qwen2ForSequenceClassification", "BertForMaskedLM"],
    "timm": ["test_vit", "test_convnext"],
    "diffusers": ["DiTTransformer2DModel"],
}


@pytest.mark.slow
@pytest.mark.parametrize(("package", "name"), [(package, n) for package, names in SAMPLE.items() for n in names])
def test_a_sample(package, name, monkeypatch):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if package != "transformers":
        atlas_models.import_torchvision()
    entries = getattr(atlas_models, f"_{package}")()
    came = atlas.attempt(entries[f"{package}/{name}"], False)
    assert came["status"] == "right", came
