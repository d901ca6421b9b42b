"""Private names of PyTorch, torchax and JAX are in one file, and a release that lacks one is refused by name."""

import re
import warnings
from pathlib import Path

import pytest
import torch

import bridge
from bridge import internals

_PRIVATE = re.compile(
    r"torch\._[A-Za-z]|torch\.(\w+\.)+_[a-z]|^import torchax|^from torchax|jax\._src|jax\.core|from torch.* import _"
    r"|\._cdata|\._schema|\._overloadname|\._backward_hooks|_make_wrapper_subclass|\._is_param|__dynamo"
)


def private_names(source: str) -> list[str]:
    return [line.strip() for line in source.splitlines() if _PRIVATE.search(line)]


def test_no_other_file_of_the_bridge_names_one():
    files = [p for p in Path(bridge.__file__).parent.rglob("*.py") if p.name != "internals.py"]
    named = {p.name: lines for p in files if (lines := private_names(p.read_text()))}
    assert not named


def test_the_search_finds_one():
    assert private_names("with torch._C._DisableTorchDispatch():") and private_names("x = op._schema.name")
    assert not private_names("with torch.no_grad():\n    aten._unsafe_view.default")


def test_a_missing_name_is_refused(monkeypatch):
    monkeypatch.setitem(internals._NAMES, torch, ("_C._not_there_any_more",))
    with pytest.raises(bridge.BridgeError, match=r"_C\._not_there_any_more.*constraints"):
        internals.check()


def test_an_untested_release_is_announced(monkeypatch):
    monkeypatch.setattr(internals, "TESTED", internals.TESTED | {"torch": ((1, 0), (1, 13))})
    with pytest.warns(bridge.BridgeWarning, match="tested with 1.0 to 1.13"):
        internals.check()


def test_the_installed_release_is_tested():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        internals.check()
