"""What one file alone may import or use, and the rooms of the bridge; `test_imports.py` has the folders."""

import ast
import graphlib
from pathlib import Path

import pytest
from support.imports import direct_imports, modules, packages, parsed

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[1]
ROOMS = ("bridge", "models_torch", "train_jax")
IO = {"wandb", "orbax", "os", "time", "sys", "pathlib", "subprocess", "logging", "shutil"}
TORCH_ALLOWED = {
    "pods/check/foreign.py",
    "run/kernels.py",
    "run/model.py",
    "run/restore.py",
    "puzzles/export_check.py",
    "research/levers/head.py",
    "research/levers/inner.py",
    "language/export_check.py",
    "script/check.py",
    "script/data.py",
    "script/export_check.py",
    "script/fit.py",
    "script/models.py",
    "script/optimizers.py",
    "script/preview.py",
    "script/results.py",
    "script/rules.py",
    "script/schedules.py",
    "script/structure.py",
    "script/task.py",
    "script/workers.py",
}


def files(folder):
    return sorted((ROOT / folder).rglob("*.py"))


def train_jax_files_that(knows):
    return [str(path.relative_to(ROOT / "train_jax")) for path in files("train_jax") if knows(path)]


def test_train_jax_imports_torch_only_where_a_model_is_built_or_read():
    assert not train_jax_files_that(lambda path: "torchax" in packages(path))
    assert set(train_jax_files_that(lambda path: "torch" in packages(path))) <= TORCH_ALLOWED


@pytest.mark.parametrize("path", files("train_jax/core"), ids=lambda p: p.name)
def test_core_and_optim_do_no_input_or_output(path):
    assert not packages(path) & IO
    names = {node.id for node in ast.walk(parsed(path.read_text())) if isinstance(node, ast.Name)}
    assert not names & {"print", "open"}


@pytest.mark.parametrize(
    ("package", "owner"),
    [
        ("wandb", "run/tracking.py"),
        ("orbax", "run/checkpoint.py"),
        *((package, "storage/storage.py") for package in ("etils", "fsspec", "google", "google_crc32c")),
    ],
)
def test_one_file_knows_the_package(package, owner):
    assert train_jax_files_that(lambda path: package in packages(path)) == [owner]
    assert package == "etils" or not any(package in packages(path) for room in ROOMS[:2] for path in files(room))


def test_paths_of_runs_and_data_come_from_storage():
    """`pathlib` would make `gs://bucket/run` the local folder `gs:`."""

    def makes_a_path(path):
        calls = [node for node in ast.walk(parsed(path.read_text())) if isinstance(node, ast.Call)]
        texts = [ast.unparse(call) for call in calls if ast.unparse(call.func) == "Path"]
        return any("dir" in text for text in texts)

    assert train_jax_files_that(makes_a_path) == []


def test_one_file_knows_pmap_and_one_knows_private_names_of_jax():
    def knows_pmap(path):
        nodes = ast.walk(parsed(path.read_text()))
        used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        imported = {name.split(".")[-1] for name in direct_imports(path)}
        return bool((used | imported) & {"pmap", "shard_map"})

    def knows_private_names(path):
        return any(name.startswith(("jax._src", "jaxlib")) for name in direct_imports(path))

    assert train_jax_files_that(knows_pmap) == ["runtime/devices.py"]
    assert train_jax_files_that(knows_private_names) == ["runtime/coordination.py"]


BRIDGE_FLOORS = (
    "__init__ __main__", "doctor", "parity blocks sharding graphs", "functional weights", "module", "dispatch",
    "autograd", "lowerings", "symbolic", "tensor", "generators", "context", "_compat", "errors",
)  # fmt: skip
"""Rooms of the bridge, each of which imports from the floors below its own only."""


def test_imports_of_the_bridge_run_downwards():
    floor = {room: i for i, rooms in enumerate(BRIDGE_FLOORS) for room in rooms.split()}
    upward = []
    for path in sorted((ROOT / "bridge").rglob("*.py")):
        room = path.relative_to(ROOT / "bridge").with_suffix("").parts[0]
        for node in ast.walk(parsed(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "bridge":
                names = [a.name for a in node.names] if node.module == "bridge" else [node.module.split(".")[1]]
                upward += [f"{path.relative_to(ROOT)} imports {name}" for name in names if floor[name] < floor[room]]
    assert not upward


def test_the_files_of_the_bridge_import_each_other_in_no_circle():
    paths = {name: path for name, path in modules(ROOT, "bridge").items() if path.name != "__init__.py"}
    imported = {
        name: {other for each in direct_imports(path) for other in paths if f"{each}.".startswith(f"{other}.")}
        for name, path in paths.items()
    }
    graphlib.TopologicalSorter(imported).prepare()  # raises CycleError
