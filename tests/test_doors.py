"""The doors between the rooms, read off the imports."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
JAX = {"jax", "jaxlib", "optax", "orbax", "torchax", "bridge", "train_jax"}
IO = {"wandb", "orbax", "os", "time", "sys", "pathlib", "subprocess", "logging", "shutil"}
TORCH_ALLOWED = {"run/model.py", "run/restore.py", "tasks/puzzles/export_check.py"}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield node.module


def rooms(room):
    return [p for p in (ROOT / room).rglob("*.py")]


def tops(path):
    return {name.split(".")[0] for name in imports(path)}


@pytest.mark.parametrize("path", rooms("models_torch"), ids=lambda p: p.name)
def test_models_know_nothing_of_jax(path):
    assert not tops(path) & JAX


@pytest.mark.parametrize("path", rooms("bridge"), ids=lambda p: p.name)
def test_bridge_knows_no_model_and_no_training(path):
    assert not tops(path) & {"models_torch", "train_jax", "optax", "orbax", "wandb"}


@pytest.mark.parametrize("path", rooms("train_jax"), ids=lambda p: p.name)
def test_torch_enters_training_only_where_a_model_is_built_or_exported(path):
    assert "torchax" not in tops(path)
    if str(path.relative_to(ROOT / "train_jax")) not in TORCH_ALLOWED:
        assert "torch" not in tops(path)


@pytest.mark.parametrize("name", sorted(p.stem for p in (ROOT / "train_jax" / "core").glob("[a-z]*.py")))
def test_the_step_does_no_input_or_output(name):
    tree = ast.parse((ROOT / "train_jax" / "core" / f"{name}.py").read_text())
    assert not tops(ROOT / "train_jax" / "core" / f"{name}.py") & IO
    assert not [n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id in ("print", "open")]


@pytest.mark.parametrize(("module", "owner"), [("wandb", "tracking.py"), ("orbax", "checkpoint.py")], ids=lambda v: v)
def test_one_file_knows(module, owner):
    assert [p.name for p in rooms("train_jax") if module in tops(p)] == [owner]


def test_only_devices_knows_pmap():
    assert [p.name for p in rooms("train_jax") if "jax.pmap" in p.read_text()] == ["devices.py"]


def test_nothing_imports_a_stage():
    for room in ("bridge", "models_torch", "train_jax"):
        for path in rooms(room):
            assert not [n for n in imports(path) if n.startswith("train_jax.stages")], path


def test_everything_has_a_name():
    names = {p.name for room in ("bridge", "models_torch", "train_jax", "benchmarks") for p in rooms(room)}
    assert not names & {"utils.py", "common.py", "helpers.py", "misc.py"}
