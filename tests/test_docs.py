"""The documentation is true: every page is reachable, every code block is run or parsed, every path named in it exists.

How a block is checked follows from its language:

- `python` is run in a fresh namespace, in an empty folder.
- `bash` is not run: every line is a command of this project that exists, with arguments that its own parser accepts.
- `diff` applies to the tree, as `git apply --check` sees it.
- `text` is what something prints or draws.

A block with `<!-- not run: REASON -->` on the line above is not checked. Pages in `RUN_ELSEWHERE` have their own test.
"""

import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import yaml
from torch import nn

from train_jax.__main__ import STAGES
from train_jax.command_line import run_stage

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PACKAGES = ("bridge", "models_torch", "train_jax")
RUN_ELSEWHERE = {
    "docs/bridge.md": "tests/bridge/test_tutorial.py",
    "docs/bridge_call.md": "tests/bridge/test_tutorial.py",
    "docs/bridge_semantics.md": "tests/bridge/test_tutorial.py",
    "docs/dev/bridge_internals.md": "tests/bridge/test_tutorial.py",
    "docs/from_pytorch.md": "tests/bridge/test_tutorial.py",
    "docs/deploy-v4-64.md": "tests/train_jax/test_deploy_page.py",
    "docs/jax.md": "tests/bridge/jax_page_process.py",
}
NOT_RUN = re.compile(r"<!-- not run: \S.*-->")


class Block(NamedTuple):
    page: str
    line: int
    """The line of the fence, from 1."""
    language: str
    marked: bool
    code: str

    def __str__(self):
        return f"{self.page}:{self.line}"


def blocks_of(page, text):
    lines = text.splitlines()
    opened = None
    for number, line in enumerate(lines):
        if not line.lstrip().startswith("```"):
            continue
        if opened is None:
            opened = number
            continue
        above = lines[opened - 1] if opened else ""
        code = "\n".join(lines[opened + 1 : number]) + "\n"
        yield Block(page, opened + 1, lines[opened].strip("` "), bool(NOT_RUN.fullmatch(above.strip())), code)
        opened = None
    assert opened is None, f"{page}: the block at line {opened + 1} has no end"


def relative(path):
    return str(path.relative_to(ROOT))


BLOCKS = [
    block
    for path in PAGES
    for block in blocks_of(relative(path), path.read_text())
    if not block.marked and block.page not in RUN_ELSEWHERE
]


def in_language(language):
    return pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == language], ids=str)


# ---- pages


def test_every_page_is_in_the_navigation():
    def leaves(entry):
        children = entry.values() if isinstance(entry, dict) else entry
        return [entry] if isinstance(entry, str) else [leaf for child in children for leaf in leaves(child)]

    linked = set(leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    written = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    from_root = {"index.md"} | {path.name.lower() for path in ROOT.glob("*.md") if path.name != "README.md"}
    assert linked == written | from_root


def links(page):
    """Returns the files that a page links to; a page that is read on GitHub has no navigation beside it."""
    return {(page.parent / each).resolve() for each in re.findall(r"\]\(([^)\s#:]+)(?:#[^)]*)?\)", page.read_text())}


def test_every_page_is_two_clicks_from_the_readme():
    first = links(ROOT / "README.md")
    second = {target for page in first if page.suffix == ".md" for target in links(page)}
    assert not [relative(page) for page in PAGES if page not in first | second | {ROOT / "README.md"}]


def test_the_readme_is_short_and_users_have_few_pages():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
    assert len(list((ROOT / "docs").glob("*.md"))) <= 24, "what authors alone read is in docs/dev"


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_code_is_fenced(page):
    """An indented block has no language, so nothing could check it."""
    outside = re.sub(r"^( *)```.*?^ *```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert not re.findall(r"(?<=\n\n)    (?![-*]|\s).*", outside)


def test_pages_that_are_run_elsewhere_are():
    for page, test in RUN_ELSEWHERE.items():
        assert Path(page).name in (ROOT / test).read_text()


# ---- paths


PATH = re.compile(r"(?:bridge|models_torch|train_jax|tests|benchmarks|docs|\.ci)/[\w./-]*\w|\w+\.sh")


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_paths_and_links_exist(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    named = {each for each in re.findall(r"`([^`\n]+)`", text) if PATH.fullmatch(each)}
    missing = [each for each in named if not (ROOT / each).exists()]
    linked = re.findall(r"\]\(([^)\s#:]+)(?:#[^)]*)?\)", text)
    missing += [each for each in linked if not (page.parent / each).exists()]
    assert not missing


def test_the_map_names_every_module_once():
    page = (ROOT / "docs/dev/architecture.md").read_text()
    listed = []
    for folder, table in re.findall(r"^### `(.*?)`\n(.*?)(?=^#|\Z)", page, re.DOTALL | re.MULTILINE):
        for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE):
            listed += [f"{folder}/{name}" for name in re.findall(r"`(.*?)`", row)]
    assert len(listed) == len(set(listed))
    assert not [name for name in listed if not (ROOT / name).exists()]
    tasks = "train_jax/tasks/"  # only puzzles have a table of files
    folders = tuple(name for name in listed if name.endswith("/") and name != tasks)
    modules = {relative(path) for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    modules -= {name for name in modules if name.startswith(tasks) and not name.startswith(f"{tasks}puzzles/")}
    assert not [name for name in modules.difference(listed) if not name.startswith(folders)]


# ---- blocks


def test_every_block_has_a_known_language():
    assert not [str(b) for b in BLOCKS if b.language not in ("python", "bash", "diff", "text")]


@in_language("python")
def test_python_blocks_run(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(block.code, str(block), "exec"), {"__name__": "documentation"})


@in_language("diff")
def test_diffs_apply(block):
    command = ["git", "apply", "--check", "--recount", "-"]
    done = subprocess.run(command, input=block.code, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@in_language("bash")
def test_commands_are_accepted(block, monkeypatch):
    commands = list(commands_of(block.code))
    assert commands
    for words in commands:
        check_command(words, monkeypatch)


def commands_of(code):
    """The words of each command, without variables set in front; quotes and backslashes may span lines."""
    pending = ""
    for line in code.splitlines():
        pending += line.removesuffix("\\") if line.endswith("\\") else f"{line}\n"
        if line.endswith("\\"):
            continue
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:  # a quote is still open
            continue
        pending = ""
        while words and re.fullmatch(r"\w+=.*", words[0]):
            words.pop(0)
        if words:
            yield words
    assert not pending


def check_command(words, monkeypatch):
    match words:
        case ["trm", ("--help" | "--version")]:
            pass
        case ["trm", stage, *arguments]:
            check_stage(stage, arguments, monkeypatch)
        case ["python", "-m", "bridge", ("verify" | "inspect"), *_]:
            pass  # the page of the bridge runs both
        case ["python", "-m", "pytest", *arguments] | ["bash", "tests/run.sh", *arguments]:
            check_tests(arguments)
        case ["python", "-m", module, *arguments] if module.startswith("benchmarks."):
            check_benchmark(module, arguments)
        case ["bash" | "source", script, *_]:
            assert (ROOT / script).is_file()
        case ["pip", "install", *_] | ["git", "clone", *_] | ["mkdocs", ("build" | "serve"), *_] | ["cd", _]:
            pass
        case _:
            pytest.fail(f"not a command that is checked here: {shlex.join(words)}")


def check_stage(name, arguments, monkeypatch):
    """Lets the stage read its arguments, and stops before it does anything."""
    assert name in STAGES, f"no stage {name}"
    stage = importlib.import_module(f"train_jax.stages.{name.replace('-', '_')}")
    for each in arguments:
        if re.fullmatch(r"[\w.]+:\w+", each):  # somebody's class, as `--model` takes it
            module, _, class_name = each.partition(":")
            monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{class_name: Stranger}))
    read = []
    monkeypatch.setattr(stage, "main", lambda *configuration, **_: read.append(configuration))
    if {"--help", "-h"} & set(arguments):
        with pytest.raises(SystemExit):
            run_stage(name, stage, arguments)
    else:
        run_stage(name, stage, arguments)
        assert len(read) == 1, f"trm {name} read no configuration"


class Stranger(nn.Module):
    """Stands for any class that a command of the documentation names."""

    def forward(self, inputs):
        return inputs


def check_tests(arguments):
    for each in arguments:
        if each.startswith("tests/"):
            assert (ROOT / each.partition("::")[0]).exists(), each


def check_benchmark(module, arguments):
    """The options are looked up in the source: a benchmark imports what it measures, which takes seconds."""
    source = (ROOT / f"{module.replace('.', '/')}.py").read_text()
    for option in (each.partition("=")[0] for each in arguments if each.startswith("--")):
        assert option in source or option.removeprefix("--").replace("-", "_") in source, option


# ---- the checks themselves


@pytest.mark.parametrize(
    "command",
    [
        "trm trian tiny",
        "trm train tiny --stpes 3",
        "python -m benchmarks.gradient_trap --nonsense",
        "python -m pytest tests/test_none.py",
        "rm -r data",
    ],
)
def test_a_wrong_command_is_noticed(command, monkeypatch):
    with pytest.raises((Exception, pytest.fail.Exception)):
        check_command(shlex.split(command), monkeypatch)


def test_marks_and_fences_are_read():
    text = "a\n\n<!-- not run: needs a TPU -->\n```bash\nx\n```\n\n```python\ny\n```\n"
    assert [(b.line, b.language, b.marked, b.code) for b in blocks_of("p", text)] == [
        (4, "bash", True, "x\n"),
        (8, "python", False, "y\n"),
    ]
