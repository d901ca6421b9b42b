"""The permitted imports between folders, checked against the source; chains of imports are followed to the end."""

import ast
import graphlib
from pathlib import Path

import pytest
from support.imports import ImportGraph, direct_imports, dotted, packages, parsed

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[1]
ROOMS = ("bridge", "models_torch", "train_jax")
JAX = {"jax", "jaxlib", "optax", "orbax", "torchax", "bridge", "train_jax"}
IO = {"wandb", "orbax", "os", "time", "sys", "pathlib", "subprocess", "logging", "shutil"}
TORCH_ALLOWED = {
    "pod/prove/foreign.py",
    "run/kernels.py",
    "run/model.py",
    "run/restore.py",
    "tasks/puzzles/export_check.py",
    "tasks/language/export_check.py",
}
FREE_OF_TASKS = ("core", "optim", "runtime", "run", "loop.py", "start.py")
"""Parts of train_jax that must not import a task."""
TASKS = ("train_jax.tasks.puzzles", "train_jax.tasks.language")


def files(folder):
    return sorted((ROOT / folder).rglob("*.py"))


def train_jax_files_that(knows):
    return [str(path.relative_to(ROOT / "train_jax")) for path in files("train_jax") if knows(path)]


def chains_to_tasks(root):
    """Chains of imports from the parts that must be free of tasks to a task, as `a -> b -> c`."""
    graph = ImportGraph(root, "train_jax")
    paths = [path for part in FREE_OF_TASKS for path in (root / "train_jax").glob(part)]
    sources = [source for path in paths for source in ([path] if path.suffix else sorted(path.rglob("*.py")))]
    chains = [graph.chain(dotted(root, source), task) for source in sources for task in TASKS]
    return [" -> ".join(chain) for chain in chains if chain]


def test_core_loop_and_run_reach_no_task():
    assert chains_to_tasks(ROOT) == []


def test_a_chain_of_imports_to_a_task_is_found(tmp_path):
    texts = {
        "__init__": "",
        "core/state": "from train_jax.first import something\n",
        "core/step": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import train_jax.second\n",
        "first": "def later():\n    import train_jax.second\n",
        "second": "from train_jax.tasks.puzzles import task\n",
        "tasks/puzzles/task": "",
    }
    for name, text in texts.items():
        path = tmp_path / "train_jax" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    chain = ["train_jax.core.state", "train_jax.first", "train_jax.second", "train_jax.tasks.puzzles.task"]
    assert chains_to_tasks(tmp_path) == [" -> ".join(chain)]


@pytest.mark.parametrize("path", files("models_torch"), ids=lambda p: p.name)
def test_models_torch_imports_nothing_of_jax(path):
    assert not packages(path) & JAX


@pytest.mark.parametrize("path", files("bridge"), ids=lambda p: p.name)
def test_bridge_imports_no_model_and_no_training(path):
    assert not packages(path) & {"models_torch", "train_jax", "optax", "orbax", "wandb"}


def test_train_jax_imports_torch_only_where_a_model_is_built_or_read():
    assert not train_jax_files_that(lambda path: "torchax" in packages(path))
    assert set(train_jax_files_that(lambda path: "torch" in packages(path))) <= TORCH_ALLOWED


@pytest.mark.parametrize("path", files("train_jax/core") + files("train_jax/optim"), ids=lambda p: p.name)
def test_core_and_optim_do_no_input_or_output(path):
    assert not packages(path) & IO
    names = {node.id for node in ast.walk(parsed(path.read_text())) if isinstance(node, ast.Name)}
    assert not names & {"print", "open"}


@pytest.mark.parametrize(
    ("package", "owner"),
    [
        ("wandb", "run/tracking.py"),
        ("orbax", "run/checkpoint.py"),
        *((package, "run/storage.py") for package in ("etils", "fsspec", "google", "google_crc32c")),
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


def test_one_file_knows_pmap_and_shard_map():
    def knows(path):
        nodes = ast.walk(parsed(path.read_text()))
        used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        imported = {name.split(".")[-1] for name in direct_imports(path)}
        return bool((used | imported) & {"pmap", "shard_map"})

    assert train_jax_files_that(knows) == ["runtime/devices.py"]


def test_one_file_knows_private_names_of_jax():
    def knows(path):
        return any(name.startswith(("jax._src", "jaxlib")) for name in direct_imports(path))

    assert train_jax_files_that(knows) == ["runtime/coordination.py"]


def test_nothing_imports_a_stage():
    stages = {path: [n for n in direct_imports(path) if n.startswith("train_jax.stages")] for path in
              (path for room in ROOMS for path in files(room))}  # fmt: skip
    assert not {str(path): names for path, names in stages.items() if names}


def test_no_file_has_a_catch_all_name():
    names = {path.stem for folder in (*ROOMS, "tests", "benchmarks") for path in files(folder)}
    assert not names & {"utils", "common", "helpers", "misc"}


def test_no_file_is_too_long():
    lengths = {
        path: path.read_text().count("\n") for folder in (*ROOMS, "tests", "benchmarks") for path in files(folder)
    }
    assert not {str(path): length for path, length in lengths.items() if length > 600}


BRIDGE_FLOORS = (
    "__init__ __main__", "parity blocks sharding", "export weights", "module", "dispatch", "autograd", "lowerings",
    "symbolic", "tensor", "_compat", "errors", "context",
)  # fmt: skip
"""Rooms of the bridge, each of which imports from the floors below its own only."""


def upward_imports():
    floor = {room: i for i, rooms in enumerate(BRIDGE_FLOORS) for room in rooms.split()}
    upward = []
    for path in sorted((ROOT / "bridge").rglob("*.py")):
        room = path.relative_to(ROOT / "bridge").with_suffix("").parts[0]
        for node in ast.walk(parsed(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "bridge":
                names = [a.name for a in node.names] if node.module == "bridge" else [node.module.split(".")[1]]
                upward += [f"{path.relative_to(ROOT)} imports {name}" for name in names if floor[name] < floor[room]]
    return upward


def test_imports_of_the_bridge_run_downwards():
    assert not upward_imports()


def test_the_files_of_the_bridge_import_each_other_in_no_circle():
    paths = {dotted(ROOT, path): path for path in (ROOT / "bridge").rglob("*.py") if path.name != "__init__.py"}
    imported = {
        name: {other for each in direct_imports(path) for other in paths if f"{each}.".startswith(f"{other}.")}
        for name, path in paths.items()
    }
    graphlib.TopologicalSorter(imported).prepare()  # raises CycleError
