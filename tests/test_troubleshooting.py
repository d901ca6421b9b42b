"""docs/troubleshooting.md quotes what the code says; an error of a device without memory is one line."""

import ast
import re
from pathlib import Path

import jax
import pytest

from train_jax import __main__, errors
from train_jax.__main__ import main

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
QUOTES = [
    (quote := re.match(r"\| (``?)(.*?)\1 \|", line)) and quote[2].strip()
    for line in PAGE.splitlines()
    if line.startswith("| `")
]


def texts(node):
    """Returns the text of a string or f-string, with `…` for its values."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
    return ""


@pytest.fixture(scope="module")
def everything():
    """Returns all strings of the code, one a line; parts of one message are joined."""
    trees = [ast.parse(path.read_text()) for path in sorted((ROOT / "train_jax").rglob("*.py"))]
    return "\n".join(text for tree in trees for node in ast.walk(tree) if (text := texts(node)))


@pytest.mark.docs
@pytest.mark.parametrize("quote", QUOTES)
def test_the_page_quotes_the_code(everything, quote):
    """Every part between two `…` is in one text of the code, in that order."""
    parts = [re.escape(part) for part in quote.split("…")]
    assert re.search(".*?".join(parts), everything), quote


@pytest.mark.docs
def test_the_page_has_every_exit_status():
    rows = {int(number) for number in re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)}
    statuses = {each.STATUS for each in vars(errors).values() if isinstance(each, type) and hasattr(each, "STATUS")}
    assert statuses <= rows


@pytest.mark.parametrize("name", ["JaxRuntimeError", "another error"])
def test_a_device_out_of_memory_is_one_line(monkeypatch, capsys, name):
    def fail(argv):
        if name == "JaxRuntimeError":
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 99 bytes.\nmore")
        raise RuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(__main__, "_run", fail)
    if name != "JaxRuntimeError":
        with pytest.raises(RuntimeError):
            main(["train"])
        return
    assert main(["train"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "trm: a device is out of memory (RESOURCE_EXHAUSTED: Out of memory allocating 99 bytes.); use"
    )
