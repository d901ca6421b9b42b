"""Plugins of the user: the example of the documentation, entry points, what a run records and refuses; imports."""

import importlib
import json
import subprocess
import sys
import tarfile
import types
from pathlib import Path

import pytest

import train_jax
from train_jax import plugin
from train_jax.__main__ import main
from train_jax.errors import UserError
from train_jax.pods.launch.record import Source

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "plugins.md"


@pytest.fixture
def example(tmp_path, monkeypatch, forgotten):
    """The file of the page, in an empty folder that is the current one."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "sums.py"
    path.write_text(PAGE.read_text().split("```python\n")[1].split("```")[0])
    return path


def test_the_example_trains_and_its_run_needs_the_file(example, capsys, forgotten):
    assert main(["train", "sums", "--plugin", "sums.py", "--steps=40", "--wandb=disabled"]) == 0
    assert "40 steps" in capsys.readouterr().out
    recorded = json.loads(Path("runs/sums/config.json").read_text())["plugins"]
    assert [each["name"] for each in recorded] == ["sums.py"] and len(recorded[0]["sha256"]) == 64
    assert main(["evaluate", "runs/sums", "--plugin=sums.py"]) == 0
    shown = capsys.readouterr()
    assert "loss" in shown.out and "another content" not in shown.err
    example.write_text(example.read_text() + "\n# changed\n")
    forgotten.files.clear()
    del sys.modules["sums"]
    assert main(["evaluate", "runs/sums", "--plugin=sums.py"]) == 0
    assert "trm: sums.py has another content than when runs/sums was trained" in capsys.readouterr().err
    forgotten.files.clear()
    del sys.modules["sums"]
    assert main(["evaluate", "runs/sums"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "trained with the plugin sums.py" in line and "give --plugin and its path if you trust it" in line
    assert "sums" not in sys.modules, "it was not imported"
    assert main(["status", "runs/sums"]) == 0, "its files can be read without the code"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("mine.py", "PLUGIN = 1", "expected a train_jax.Plugin in PLUGIN, found int"),
        ("mine.py", "raise ValueError('no')", "cannot be imported (ValueError: no)"),
        ("json.py", "", "there is another module json; rename the file"),
        ("my-file.py", "", "expected a Python file whose name is an identifier"),
        ("absent.py", None, "No such file or directory; give an existing file"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path, capsys, forgotten, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    assert main(["train", "tiny", f"--plugin={tmp_path / name}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert main(["train", "tiny", "--plugin"]) == 2


def test_words_of_the_command_of_a_launch_are_left():
    words = ["launch", "--plugin", "a.py", "--tpu=x", "--", "train", "--plugin=b.py"]
    assert plugin.take_files(words) == (["a.py"], ["launch", "--tpu=x", "--", "train", "--plugin=b.py"])


def test_an_installed_plugin_adds_a_stage_and_replaces_nothing(monkeypatch, capsys, forgotten):
    module = types.ModuleType("other")
    module.greet = lambda argv: print("hello", *argv)
    stages = {name: plugin.Stage("other:greet", "mine", "greet") for name in ("hello", "status")}
    module.PLUGIN = plugin.Plugin(name="other", stages=stages)
    monkeypatch.setitem(sys.modules, "other", module)
    found = [types.SimpleNamespace(name="other", value="other:PLUGIN")]
    monkeypatch.setattr(plugin, "_entry_points", lambda: found)
    assert main(["hello", "you"]) == 0 and capsys.readouterr().out == "hello you\n"
    assert main(["--help"]) == 0 and "\nmine:" not in capsys.readouterr().out
    assert main(["--help", "--all"]) == 0 and "\nmine:\n  hello           greet" in capsys.readouterr().out
    assert plugin.find("stages", "status").target.startswith("train_jax.")
    with pytest.raises(UserError, match=r"runs/a was trained with the plugin absent, which is not installed"):
        plugin.require([{"name": "absent", "sha256": ""}], "runs/a")


def test_every_part_of_this_package_exists():
    targets = [target for each in plugin.own_plugins() for target in _targets(each)]
    assert len(targets) > 40
    for target in targets:
        plugin.load_object(target, "part")


def _targets(each):
    yield from (*each.tasks.values(), *each.reports.values(), *each.presets, *each.derivations.values())
    yield from (stage.target for stage in each.stages.values())
    yield from (text for data in each.data.values() for text in (data.builder, data.kind) if text)
    yield from [each.recipes] * bool(each.recipes)


def test_public_names():
    for name in train_jax.__all__:
        assert getattr(train_jax, name).__name__ == name


def test_a_public_module_that_has_moved_is_named():
    for old in ("train_jax.optim.config", "train_jax.tasks.puzzles.task"):
        with pytest.raises(ModuleNotFoundError, match=r"has moved; import train_jax\."):
            importlib.import_module(old)


UNUSED = (
    "language", "research", "serve", "pods", "report", "cluster", "peers", "relay", "gpt", "gpt_2026", "hrm_text",
)  # fmt: skip
"""Folders and files that a tiny run does not need."""


def test_a_tiny_run_imports_no_other_part(tmp_path):
    sizes = ["--size", "4", "--num-train", "8", "--num-test", "4"]
    assert main(["build-data", "sudoku", "--output-dir", str(tmp_path / "data/sudoku-4x4"), *sizes]) == 0
    code = (
        "import sys; from train_jax.__main__ import main; assert main(['train', 'tiny', '--dry-run']) == 0; "
        "print(*sys.modules, file=sys.stderr)"
    )
    shown = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True)
    names = [name for name in shown.stderr.split() if name.startswith(("train_jax", "models_torch"))]
    naming = [name for name in names if f"{name}.plugin" in names or name.endswith(".plugin")]
    assert not [name for name in names if set(name.split(".")[1:]) & set(UNUSED) and name not in naming]
    counts = {package: sum(name.startswith(package) for name in names) for package in ("train_jax", "models_torch")}
    assert counts["train_jax"] <= 60 and counts["models_torch"] <= 16, (counts, names)


def test_a_launch_copies_a_file_that_git_does_not_know(tmp_path, monkeypatch):
    author = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for name in ("known.py", "new.py"):
        (tmp_path / "mine").mkdir(exist_ok=True)
        (tmp_path / "mine" / name).write_text("PLUGIN = None\n")
    for words in (["init"], ["add", "mine/known.py"], ["commit", "-m", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *author, *words], check=True, capture_output=True)
    monkeypatch.chdir(tmp_path)
    source = Source(tmp_path, "HEAD", "first", 1)
    source.archive(tmp_path / "code.tar.gz", added=source.unknown_files(["mine/known.py", "mine/new.py"]))
    with tarfile.open(tmp_path / "code.tar.gz") as archive:
        assert sorted(name for name in archive.getnames() if name.endswith(".py")) == ["mine/known.py", "mine/new.py"]
    with pytest.raises(UserError, match="hosts have the checkout alone"):
        source.unknown_files(["/elsewhere.py"])


def test_a_dry_run_refuses_a_file_that_hosts_would_not_find(tmp_path, capsys):
    file = tmp_path / "elsewhere.py"
    file.write_text("import train_jax\nPLUGIN = train_jax.Plugin(name='elsewhere')\n")
    node = ["--tpu", "mine", "--zone", "us-central2-b", "--type", "v4-8", "--dry-run"]
    command = ["train", "tiny", "--plugin", str(file), "--run-dir", "gs://bucket/run"]
    assert main(["launch", *node, "--", *command]) == 2
    assert "hosts have the checkout alone; give a relative path" in capsys.readouterr().err
