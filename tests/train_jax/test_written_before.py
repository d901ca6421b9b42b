"""What the commit b7781048 wrote is read by this one: data sets, runs, checkpoints and an exported train step.

`support/written_by_b7781048.zip` has a run of puzzles and one of text, of a few steps, their data sets, and the train
step of the first one after step 2 as a program; its README.txt has the commands that wrote it.
"""

import json
import zipfile
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax import export

from train_jax.__main__ import main as trm
from train_jax.run.restore import restore

ARCHIVE = Path(__file__).parents[1] / "support" / "written_by_b7781048.zip"
TOLERANCE = 1e-5
"""For another processor, whose products are rounded otherwise."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder in which the commands were run, as the current one."""
    with zipfile.ZipFile(ARCHIVE) as archive:
        archive.extractall(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(folder, beginning):
    """Returns the arguments of the command that begins like this."""
    lines = (folder / "README.txt").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"trm {beginning} ")]
    return line.split()[1:]


def saved(run_dir, step):
    """Returns the arrays of a checkpoint by name, as Orbax reads them."""
    checkpoint = (run_dir / "checkpoints" / str(step)).absolute()
    arrays = {}
    for item in ("model", "optimizer", "carry"):
        arrays |= ocp.PyTreeCheckpointer().restore(checkpoint / item)
    return arrays


def by_the_program(folder, steps):
    """Returns the state after each of the steps that the exported program takes, from step 2 on."""
    program = export.deserialize(bytearray((folder / "program" / "step.cpu.program").read_bytes()))
    with np.load(folder / "program" / "state.npz") as state:
        arrays = {name: state[name] for name in state.files}
    with np.load(folder / "program" / "batches.npz") as batches:
        columns = {name: batches[name] for name in batches.files}
    key = arrays.pop("key")
    after = []
    for number in range(steps):
        arrays, _ = program.call(arrays, {name: column[number] for name, column in columns.items()}, key)
        after.append({name: np.asarray(array) for name, array in arrays.items() if name.startswith("state.")})
    return after


def assert_equal_states(checkpoint, expected):
    names = expected.keys() - {"state.step"}  # the folder's name
    assert names <= checkpoint.keys()
    for name in names:
        np.testing.assert_allclose(checkpoint[name], expected[name], TOLERANCE, TOLERANCE, err_msg=name)


def evaluated(run_dir):
    return json.loads((run_dir / "evaluation" / "test.json").read_text())


def test_runs_are_restored_and_a_data_set_is_kept(folder, capsys):
    assert trm(command(folder, "build-data sudoku")) == 0
    assert "sudokus already exists" in capsys.readouterr().out
    arrays = saved(folder / "puzzles", 4)
    for name, tensor in restore("puzzles").state_dict().items():
        if f"state.ema.{name}" in arrays:
            np.testing.assert_array_equal(tensor.numpy(), arrays[f"state.ema.{name}"])
    assert restore("text").step == 2


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
def test_a_run_is_evaluated_and_continued_as_by_its_exported_step(folder):
    expected = evaluated(folder / "puzzles")
    (folder / "puzzles" / "evaluation" / "test.json").unlink()
    assert trm(["evaluate", "puzzles"]) == 0
    assert evaluated(folder / "puzzles") == pytest.approx(expected, rel=TOLERANCE)
    states = by_the_program(folder, 4)
    assert_equal_states(saved(folder / "puzzles", 4), states[1])
    assert trm([*command(folder, "train tiny"), "--steps", "6"]) == 0
    assert_equal_states(saved(folder / "puzzles", 6), states[3])


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
def test_a_language_run_is_evaluated_and_continued(folder, capsys):
    expected = evaluated(folder / "text")
    (folder / "text" / "evaluation" / "test.json").unlink()
    assert trm(["evaluate", "text"]) == 0
    found = evaluated(folder / "text")
    assert {name: found[name] for name in ("loss", "bits_per_byte", "tokens", "compressed")} == {
        name: pytest.approx(expected[name], rel=TOLERANCE) for name in ("loss", "bits_per_byte", "tokens", "compressed")
    }
    assert trm([*command(folder, "train chat-tiny"), "--steps", "4"]) == 0
    assert "continuing at step 2" in capsys.readouterr().out
