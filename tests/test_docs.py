"""The documentation is true: every page is reachable, every code block is run or parsed, every path in it exists.

`mkdocs build --strict` checks that every page is in the navigation.

How a block is checked follows from its language:

- `python` is run in a fresh namespace, in an empty folder.
- `bash` is not run: every line is a command of this project that exists, with arguments that its own parser accepts.
- `diff` applies to the tree, as `git apply --check` sees it.
- `text` is what something prints or draws.

A block with `<!-- not run: REASON -->` on the line above is not checked. Pages in `RUN_ELSEWHERE` have their own test.
"""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from torch import nn

import bridge
from bridge.__main__ import parse as parse_bridge_command
from campaigns.readiness import ROWS
from train_jax import errors
from train_jax.command_line import run_stage
from train_jax.plugin import entries, load_object, take_files, use_file
from train_jax.pods.check.parts import PARTS
from train_jax.pods.check.runs import RUNS
from train_jax.script.stages import check as script_check

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
    "docs/potentials.md": "tests/bridge/test_tutorial.py",
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
    fences = [number for number, line in enumerate(lines) if line.lstrip().startswith("```")]
    assert len(fences) % 2 == 0, f"{page}: the block at line {fences[-1] + 1} has no end"
    for opened, closed in zip(fences[::2], fences[1::2], strict=True):
        marked = bool(NOT_RUN.fullmatch(lines[opened - 1].strip())) if opened else False
        code = "\n".join(lines[opened + 1 : closed]) + "\n"
        yield Block(page, opened + 1, lines[opened].strip("` "), marked, code)


def relative(path):
    return str(path.relative_to(ROOT))


BLOCKS = [b for path in PAGES for b in blocks_of(relative(path), path.read_text()) if not b.marked]
BLOCKS = [b for b in BLOCKS if b.page not in RUN_ELSEWHERE]


def in_language(language):
    return pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == language], ids=str)


def links(page):
    """Returns the files that a page links to; a page that is read on GitHub has no navigation beside it."""
    return {(page.parent / each).resolve() for each in re.findall(r"\]\(([^)\s#:]+)(?:#[^)]*)?\)", page.read_text())}


def test_every_page_is_two_clicks_from_the_readme():
    first = links(ROOT / "README.md")
    second = {target for page in first if page.suffix == ".md" for target in links(page)}
    assert not [relative(page) for page in PAGES if page not in first | second | {ROOT / "README.md"}]


PATH = re.compile(r"(?:bridge|models_torch|train_jax|tests|benchmarks|campaigns|docs|\.ci)/[\w./-]*\w|\w+\.sh")


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_paths_and_links_exist(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    named = {each for each in re.findall(r"`([^`\n]+)`", text) if PATH.fullmatch(each)}
    missing = [each for each in named if not (ROOT / each).exists()]
    linked = re.findall(r"\]\(([^)\s#:]+)(?:#[^)]*)?\)", text)
    missing += [each for each in linked if not (page.parent / each).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_estimated_cycles_of_a_tpu_stand_beside_its_bundles_alone(page):
    """They are different units: the estimate for attention is more than twice the bundles of the same kernels."""
    lines = [line for line in page.read_text().splitlines() if "Mcycles" in line]
    assert all("Mbundles" in line for line in lines), lines


def test_the_map_names_every_module_once():
    page = (ROOT / "docs/dev/architecture.md").read_text()
    listed = []
    for folder, table in re.findall(r"^### `(.*?)`\n(.*?)(?=^#|\Z)", page, re.DOTALL | re.MULTILINE):
        for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE):
            listed += [f"{folder}/{name}" for name in re.findall(r"`(.*?)`", row)]
    assert len(listed) == len(set(listed))
    assert not [name for name in listed if not (ROOT / name).exists()]
    folders = tuple(name for name in listed if name.endswith("/"))
    modules = {relative(path) for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert not [name for name in modules.difference(listed) if not name.startswith(folders)]


def test_no_module_hides_a_public_name():
    """The page of the API takes a module of the package for an object of the same name, and leaves the object out."""
    assert not {path.stem for path in (ROOT / "bridge").iterdir()} & {*bridge.__all__}


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
    for words in commands_of(block.code):
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
        case ["python", "-m", "bridge", *arguments]:
            parse_bridge_command(arguments)
        case ["python", "-m", "pytest", *arguments] | ["bash", "tests/run.sh", *arguments]:
            assert all((ROOT / each.partition("::")[0]).exists() for each in arguments if each.startswith("tests/"))
        case ["python", script] if any(each.code.startswith(f"# {script}\n") for each in BLOCKS):
            pass  # a file that a page shows
        case ["df", *_]:
            pass
        case ["python", "-m", module, *arguments] if module.startswith(("benchmarks.", "campaigns.")):
            check_benchmark(module, arguments)
        case ["bash" | "source", script, *_]:
            assert (ROOT / script).is_file()
        case ["pip", "install", *_] | ["git", "clone", *_] | ["mkdocs", ("build" | "serve"), *_] | ["cd", _]:
            pass
        case _:
            pytest.fail(f"not a command that is checked here: {shlex.join(words)}")


def check_stage(name, arguments, monkeypatch):
    """Lets the stage read its arguments, and stops before it does anything."""
    assert name in entries("stages"), f"no stage {name}"
    files, (_, *arguments) = take_files([name, *arguments])
    for path in files:
        use_file(str(ROOT / path))
    target = load_object(entries("stages")[name].target, "stage")
    for each in arguments:
        if re.fullmatch(r"[\w.]+:\w+", each):  # somebody's class, as `--model` takes it
            module, _, class_name = each.partition(":")
            monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{class_name: Stranger}))
    read = []
    module = script_check if name == "check" else sys.modules[target.__module__]
    monkeypatch.setattr(module, "main", lambda *configuration, **_: read.append(configuration))
    if {"--help", "-h"} & set(arguments):
        with pytest.raises(SystemExit):
            run_stage(name, target, arguments)
    else:
        run_stage(name, target, arguments)
        assert len(read) == 1, f"trm {name} read no configuration"


class Stranger(nn.Module):
    """Stands for any class that a command of the documentation names."""

    def forward(self, inputs):
        return inputs


def check_benchmark(module, arguments):
    """The options are looked up in the source: a benchmark imports what it measures, which takes seconds."""
    source = (ROOT / f"{module.replace('.', '/')}.py").read_text()
    for option in (each.partition("=")[0] for each in arguments if each.startswith("--")):
        assert option in source or option.removeprefix("--").replace("-", "_") in source, option


# ---- docs/dev/readiness.md names tests and parts of a proof that exist


@pytest.mark.parametrize("test", sorted({test for row in ROWS for test in row.tests}))
def test_every_test_of_a_row_exists(test):
    path, _, name = test.partition("::")
    name, _, case = name.partition("[")
    text = (ROOT / "tests" / path).read_text()
    functions = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    assert name in functions or not name
    if case:
        words = [node for each in functions[name].decorator_list for node in ast.walk(each)]
        assert case.removesuffix("]") in {word.value for word in words if isinstance(word, ast.Constant)}


def test_every_part_and_row_of_a_proof_exists():
    """A row by the beginning of its name, which is written in the code of its part."""
    pod = ROOT / "train_jax" / "pods"
    code = "".join(path.read_text() for path in pod.glob("check/*.py"))
    parts = {part.name for part in PARTS} | {*RUNS}
    for each in [each for row in ROWS for each in row.proved_by.split("; ") if each]:
        part, _, name = each.partition(" / ")
        assert part in parts, each
        assert all(f'"{word}' in code for word in name.split(", ")), each


# ---- docs/troubleshooting.md and docs/at_night.md quote what the code says

TROUBLES = (ROOT / "docs" / "troubleshooting.md").read_text()
NIGHT = (ROOT / "docs" / "at_night.md").read_text()
QUOTES = [
    (quote := re.match(r"\| (``?)(.*?)\1 \|", line)) and quote[2].strip()
    for line in (TROUBLES + NIGHT).splitlines()
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
    """All strings of the code, one a line; parts of one message are joined."""
    trees = [ast.parse(path.read_text()) for path in sorted((ROOT / "train_jax").rglob("*.py"))]
    return "\n".join(text for tree in trees for node in ast.walk(tree) if (text := texts(node)))


@pytest.mark.parametrize("quote", QUOTES)
def test_the_page_quotes_the_code(everything, quote):
    """Every part between two `…` is in one text of the code, in that order."""
    parts = [re.escape(part) for part in quote.split("…")]
    assert re.search(".*?".join(parts), everything), quote


def test_the_page_has_every_exit_status():
    rows = {int(number) for number in re.findall(r"^\| (\d+) \|", TROUBLES, re.MULTILINE)}
    statuses = {each.STATUS for each in vars(errors).values() if isinstance(each, type) and hasattr(each, "STATUS")}
    assert statuses <= rows


# ---- the notebook for Colab and Kaggle: its code cells run on a CPU, in one process, as a kernel would run them

KERNEL = '''
import json, subprocess, sys

def shell(command):
    """Runs the command as `!command` does, but a failure ends the notebook."""
    done = subprocess.run(command, shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout)
    assert done.returncode == 0, command

names = {"shell": shell}
for cell in json.load(sys.stdin):
    exec(compile(cell, "cell", "exec"), names)
'''


def as_python(cell):
    """Returns the cell with each `!command {name}` as a call, as IPython runs it."""
    return re.sub(r"^(\s*)!(.*)$", lambda line: f"{line[1]}shell(f{line[2]!r})", cell, flags=re.MULTILINE)


def test_the_cells_of_the_notebook_run(tmp_path):
    """The cells run in a folder with the files that the installation looks for; the packages are installed already."""
    notebook = json.loads((ROOT / "docs" / "notebooks" / "first-run.ipynb").read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook)
    (tmp_path / "constraints.txt").touch()
    (tmp_path / "bin").mkdir()
    trm = tmp_path / "bin" / "trm"
    trm.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m train_jax "$@"\n')
    trm.chmod(0o755)
    paths = os.pathsep.join([str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": paths, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    environment |= {"MPLBACKEND": "agg", "STEPS": "60"}
    code = json.dumps([as_python("".join(cell["source"])) for cell in notebook if cell["cell_type"] == "code"])
    command = [sys.executable, "-c", KERNEL]
    done = subprocess.run(command, input=code, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for expected in ("CpuDevice", "held-out exact accuracy", "the last of step 60", "PyTorch agrees", "_proj.weight"):
        assert expected in done.stdout, done.stdout
