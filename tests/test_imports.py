"""The contracts of pyproject.toml about imports between folders, also for those in functions and for names in text."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]["layers"]
FLOOR = {name: floor for floor, row in enumerate(LAYERS) for name in row.split(" | ")}
TARGET = re.compile(r"train_jax\.(\w+)[\w.]*:\w+")


def lint(folder):
    """Checks the contracts of the configuration in a folder; import-linter closes the streams of its process."""
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=100)


def test_the_contracts_are_kept():
    found = lint(ROOT)
    assert found.returncode == 0, found.stdout


def test_a_broken_contract_is_found(tmp_path):
    """An import inside of a function counts, too."""
    package = tmp_path / "house"
    for name, code in {"__init__": "", "upper": "", "lower": "def f():\n    import house.upper\n"}.items():
        package.mkdir(exist_ok=True)
        (package / f"{name}.py").write_text(code)
    (tmp_path / ".importlinter").write_text(
        "[importlinter]\nroot_package = house\n[importlinter:contract:1]\nname = floors\ntype = layers\n"
        "layers =\n    house.upper\n    house.lower\n"
    )
    found = lint(tmp_path)
    assert found.returncode == 1 and "house.lower -> house.upper" in found.stdout


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
