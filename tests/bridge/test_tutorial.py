"""The code of tutorials, run from top to bottom in one namespace for each.

The text under a block is what it printed.
"""

import re
import shlex
from pathlib import Path

import pytest
from rows import ROWS, in_words

from bridge.__main__ import main

pytestmark = pytest.mark.docs

DOCS = Path(__file__).parents[2] / "docs"
TUTORIALS = {
    ("bridge.md", "bridge_call.md", "bridge_semantics.md", "dev/bridge_internals.md"): 16,
    ("from_pytorch.md",): 4,
    ("potentials.md",): 4,
}
"""Pages that are one program, with the least number of outputs that they show."""


def blocks_of(pages):
    text = "".join((DOCS / page).read_text() for page in pages)
    text = re.sub(r"^<!-- not run: [^\n]*-->\n```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"^```(\w+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def pattern(text):
    """`…` alone on a line stands for any lines, within a line for anything on it."""
    lines = [r"[\s\S]*" if line == "…" else re.escape(line).replace("…", ".*") for line in text.strip().split("\n")]
    return re.compile("\n".join(lines))


def run(kind, code, namespace):
    if kind == "python":
        named = re.match(r"# (\w+\.py)\n", code)
        path = Path(named[1] if named else f"block{len(list(Path().iterdir()))}.py")
        path.write_text(code)
        exec(compile(code, str(path.absolute()), "exec"), namespace)
    else:
        command = shlex.split(code)
        assert command[:3] == ["python", "-m", "bridge"], f"not a command of these pages: {code}"
        assert main(command[3:]) == 0


@pytest.mark.parametrize(("pages", "shown"), TUTORIALS.items(), ids=lambda each: str(each))
def test_the_pages_are_true(tmp_path, monkeypatch, capsys, pages, shown):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    namespace = {"__name__": "tutorial"}
    blocks = blocks_of(pages)
    compared = 0
    for (kind, code), (next_kind, text) in zip(blocks, [*blocks[1:], ("", "")], strict=True):
        if kind == "text":
            continue
        run(kind, code, namespace)
        printed = capsys.readouterr().out.strip()
        if next_kind == "text":
            assert pattern(text).fullmatch(printed), f"{code}\nprinted\n{printed}\n\nand the page says\n{text}"
            compared += 1
        else:
            assert not printed, f"{code}\nprinted\n{printed}\n\nwhich the page does not show"
    assert compared >= shown


def test_text_is_compared():
    equal = ("a\n…\nb", "a\n1\n2\nb"), ("a …", "a 3 (x)")
    other = ("a", "b"), ("a\n…\nb", "a\n1\n2\nc"), ("a … c", "a b\nc")
    assert all(pattern(text).fullmatch(printed) for text, printed in equal)
    assert not any(pattern(text).fullmatch(printed) for text, printed in other)


def test_the_table_of_meanings_has_every_row():
    """Each row of the tests is in one cell of the table, with its error or without one."""
    table = (DOCS / "bridge_semantics.md").read_text().partition("| torchax alone |")[2].partition("\n\n")[0]
    names = [name for cell in re.findall(r"\| ([^|]*) \|$", table, re.MULTILINE) for name in cell.split(", ")]
    assert sorted(re.sub(r" [\d.]+$", "", name) for name in names) == sorted(map(in_words, ROWS))
