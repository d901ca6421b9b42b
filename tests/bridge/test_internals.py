"""Private names of PyTorch, torchax and JAX are in one file, and a release that lacks one is refused by name."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import jax
import pytest
import torch

import bridge
from benchmarks.trace_cost import calls
from bridge._compat import torchax as releases
from bridge._compat.torchax import MissingOperation, missing_operations_tolerated
from bridge.doctor import self_test

ROOT = Path(__file__).parents[2]
_PRIVATE = re.compile(
    r"torch\._[A-Za-z]|torch\.(\w+\.)+_[a-z]|^import torchax|^from torchax|jax\._src|jax\.core|from torch.* import _"
    r"|\._cdata|\._schema|\._overloadname|\._backward_hooks|_make_wrapper_subclass|\._is_param|__dynamo"
)


def private_names(source: str) -> list[str]:
    return [line.strip() for line in source.splitlines() if _PRIVATE.search(line)]


def test_no_other_file_of_the_bridge_names_one():
    files = [p for p in Path(bridge.__file__).parent.rglob("*.py") if p.parent.name != "_compat"]
    named = {p.name: lines for p in files if (lines := private_names(p.read_text()))}
    assert not named


def test_the_search_finds_one():
    assert private_names("with torch._C._DisableTorchDispatch():") and private_names("x = op._schema.name")
    assert not private_names("with torch.no_grad():\n    aten._unsafe_view.default")


WIDE = {
    "dispatch/computation.py": "a lowering, whose failure is an error that says it is a defect of the lowering",
    "module/call.py": "what a check raises that fails for trial, which shows that the code does not catch it",
    "module/effects.py": "a state that the code did not expect, which is another program",
    "dispatch/branches.py": "what a side of a branch raises, which is then a check that the other side passes",
    "parity/__init__.py": "the user's module, loss and `advance`",
    "parity/arbiter.py": "the exported module in float64",
    "errors.py": "code of the user's, whose error becomes one that says what failed",
    "module/copying.py": "an object that Python cannot copy",
}
"""Places that catch any exception and do not raise it again, and the code that raises it."""


def test_any_exception_is_caught_only_where_code_of_others_runs():
    folder = Path(bridge.__file__).parent
    sources = {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*.py")}
    wide = {
        name for name, text in sources.items() if "suppress(Exception)" in text or any(map(swallows, handlers(text)))
    }
    assert wide == set(WIDE)


def handlers(source: str) -> list[ast.ExceptHandler]:
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ExceptHandler)]


def swallows(handler: ast.ExceptHandler) -> bool:
    """True if the handler catches everything and does not end by raising it again."""
    names = set() if handler.type is None else {ast.unparse(t) for t in getattr(handler.type, "elts", [handler.type])}
    last = handler.body[-1]
    return (not names or bool(names & {"Exception", "BaseException"})) and not (
        isinstance(last, ast.Raise) and last.exc is None
    )


def test_the_search_finds_a_wide_handler():
    endings = {":\n    pass": True, " (KeyError, Exception):\n    g()": True, " Exception:\n    raise": False}
    for ending, wide in endings.items():
        assert [swallows(h) for h in handlers(f"try:\n    f()\nexcept{ending}")] == [wide]


def test_an_untested_release_is_announced_once(monkeypatch):
    monkeypatch.setattr(releases, "TESTED", releases.TESTED | {"torch": ((1, 0), (1, 13))})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        releases.check_releases()
    (warning,) = caught
    assert "is untested: the bridge is tested with 1.0 to 1.13" in str(warning.message)


def test_the_tested_releases_are_those_of_the_metadata():
    """`torch>=2.13,<2.16` is "2.13 to 2.15"."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name in ("torch", "jax"):
        oldest, newest = releases.TESTED[name]
        (wanted,) = [text for text in project["dependencies"] if re.match(rf"{name}\b(?!ax)", text)]
        lower, upper = re.fullmatch(rf"{name}>=([\d.]+),<([\d.]+)", wanted).groups()
        assert lower.startswith(".".join(map(str, oldest))) and upper == f"{newest[0]}.{newest[1] + 1}"
    pythons = [c.rpartition(" ")[2] for c in project["classifiers"] if "Python ::" in c]
    assert releases.tested_releases("python") == f"{pythons[0]} to {pythons[-1]}"


def test_operations_that_this_release_lacks_are_known():
    assert not releases.MISSING - set(releases.GONE)


def test_an_operation_that_is_gone_stops_nothing():
    missing = set()
    with missing_operations_tolerated(missing):
        assert isinstance(torch.ops.aten.no_such_operation.default, MissingOperation)
        assert isinstance(torch.ops.aten.add.no_such_overload, MissingOperation)
        assert not isinstance(torch.ops.aten.add.Tensor, MissingOperation)
    assert missing == {"aten.no_such_operation", "aten.add.no_such_overload"}
    with pytest.raises(AttributeError):
        _ = torch.ops.aten.no_such_operation


def test_the_replaced_names_of_pytorchs_callers_are_there():
    """The callers' variables that replacements read by name."""
    maker = inspect.getsource(importlib.import_module("torch._library.autograd").make_autograd_impl)
    (body,) = re.findall(r"def autograd_impl\(.*?(?=\n    return)", maker, re.DOTALL)
    assert "_C._any_requires_grad(" in body and re.search(r"\bop\b", body)


NEWER = """
import torch
torch.__version__ = "99.0"
gone = {"_cdist_forward", "i0", "_upsample_bicubic2d_aa"}
for name in gone:
    torch.ops.aten.__dict__.pop(name, None)
original = torch._ops._OpNamespace.__getattr__
def look_up(self, name):
    if name in gone:
        raise AttributeError(name)
    return original(self, name)
torch._ops._OpNamespace.__getattr__ = look_up
import bridge
from benchmarks.trace_cost import calls
assert not {op.name() for op in bridge.LOWERINGS} & {f"aten::{name}" for name in gone} and len(bridge.LOWERINGS) > 150
fn = bridge.export(torch.nn.Linear(2, 3))
fn(fn.params, {}, torch.ones(1, 2).numpy())
"""


@pytest.mark.slow
def test_a_release_without_some_operations_runs():
    said = subprocess.run([sys.executable, "-c", NEWER], capture_output=True, text=True)
    assert not said.returncode and "untested" in said.stderr, said.stderr


def test_a_small_call_makes_few_python_calls():
    """A linear layer, a tanh and a counter; `python -m benchmarks.trace_cost` prints the same figures."""
    counted = calls()
    assert counted["calls"] <= 350 and counted["functions"] <= 126, counted


@pytest.mark.skipif(
    not (torch.__version__.startswith("2.11.") and jax.__version__.startswith("0.11.")),
    reason="needs PyTorch 2.11 and JAX 0.11, the pair of a GPU machine that is older than the tested range",
)
def test_an_older_pair_passes_the_self_test():
    assert {name: wrong for name, wrong in self_test() if wrong} == {}
