"""The contracts of pyproject.toml about imports between folders, also for those in functions and for names in text."""

import ast
import re
import tomllib
from pathlib import Path

import pytest
from importlinter.cli import lint_imports

ROOT = Path(__file__).parents[1]
LAYERS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]["layers"]
FLOOR = {name: floor for floor, row in enumerate(LAYERS) for name in row.split(" | ")}
TARGET = re.compile(r"train_jax\.(\w+)[\w.]*:\w+")


def test_the_contracts_are_kept(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert lint_imports(no_cache=True) == 0, capsys.readouterr().out


def test_a_broken_contract_is_found(tmp_path, monkeypatch):
    """An import inside of a function counts, too."""
    package = tmp_path / "house"
    for name, code in {"__init__": "", "upper": "", "lower": "def f():\n    import house.upper\n"}.items():
        package.mkdir(exist_ok=True)
        (package / f"{name}.py").write_text(code)
    (tmp_path / ".importlinter").write_text(
        "[importlinter]\nroot_package = house\n[importlinter:contract:1]\nname = floors\ntype = layers\n"
        "layers =\n    house.upper\n    house.lower\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert lint_imports(config_filename=".importlinter", no_cache=True) == 1


@pytest.mark.parametrize("folder", [name for name in FLOOR if (ROOT / "train_jax" / name).is_dir()])
def test_names_in_text_point_to_the_same_folder_or_downwards(folder):
    """`package.module:Object` is imported when it is used. Only `cli` names the plugins of all parts."""
    names = {}
    for path in sorted((ROOT / "train_jax" / folder).rglob("*.py")):
        texts = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
        names[path.name] = {match[1] for text in texts for match in TARGET.finditer(str(text))} - {folder}
    assert not {
        path: upward for path, named in names.items() if (upward := [x for x in named if FLOOR[x] <= FLOOR[folder]])
    }
