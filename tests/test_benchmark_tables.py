"""What the benchmarks print and write: tables, JSON, the comparison with an earlier run, and the rows."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import compile as compilation
from benchmarks import dispatch, inference, scaling, tables
from train_jax.run.machine import processor


def test_only_what_became_larger_is_named(tmp_path, capsys):
    file = tmp_path / "before.json"
    figures = {"a, ms": 100.0, "b, ms": 100.0, "new, ms": 1.0}
    files = tables.Files(json=file)
    assert tables.finish(files, figures, {}, "two threads", results=[1]) == 0
    assert json.loads(file.read_text())["results"] == [1] and "two threads" in capsys.readouterr().out
    before = tables.figures_before(tables.Files(compare=file))
    assert before == figures
    assert tables.finish(tables.Files(), {"a, ms": 109.0, "b, ms": 111.0, "c, ms": 1.0}, before, "two threads") == 1
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("larger")] == [
        "larger: b, ms: 111, before 100"
    ]


@pytest.mark.parametrize("text", ["{", "[]", '{"figures": {}}', '{"figures": {"a": []}, "machine": ""}', "another"])
def test_a_file_that_cannot_be_compared_is_one_line_and_status_2(tmp_path, capsys, text):
    file = tmp_path / "before.json"
    if text == "another":
        text = json.dumps({"figures": {}, "machine": f"not {processor()}"})
    file.write_text(text)
    with pytest.raises(SystemExit) as error:
        tables.figures_before(tables.Files(compare=file))
    assert error.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_table_has_as_many_columns_in_each_line():
    lines = [*tables.header(("a", "b, ms")).splitlines(), tables.row([1, "2.0"])]
    assert lines == ["| a | b, ms |", "|---|---|", "| 1 | 2.0 |"]


def test_the_time_before_the_first_step_is_that_of_the_last_session():
    events = [
        {"event": "start"},
        {"event": "progress", "seconds": {"steps": 1.0, "compile": 9.0}},
        {"event": "start"},
        {"event": "continue", "seconds": {"start": 3.0, "restore": 0.5}},
        {"event": "progress", "seconds": {"steps": 0.25, "start": 0.25, "compile": 2.0}},
        {"event": "progress", "seconds": {"steps": 1.0, "saving": 5.0}},
    ]
    assert compilation.before_first_step(events) == {"start": 3.25, "restore": 0.5, "compile": 2.0}


def test_equations_inside_of_loops_and_functions_count_once():
    def function(x):
        return jax.lax.fori_loop(0, 3, lambda _, y: jnp.sin(y) * 2, x) + 1

    inner = compilation._equations(jax.make_jaxpr(lambda x: jnp.sin(x) * 2)(1.0).jaxpr)
    assert inner == 2
    assert compilation._equations(jax.make_jaxpr(jax.jit(function))(1.0).jaxpr) > inner + 2


def test_grouped_arrays_keep_every_element():
    state = {"a": jnp.ones((2, 3)), "b": [jnp.zeros(4), jnp.arange(5)]}
    arrays = dispatch.grouped(state)
    assert {name: array.size for name, array in arrays.items()} == {"float32": 10, "int32": 5}
    assert arrays["float32"].sum() == 6


def test_the_stub_hands_everything_on():
    step = jax.jit(dispatch.stub())
    state, carry = {"a": jnp.arange(3.0)}, jnp.ones(2, bool)
    after, carried, metrics = step(state, carry, jnp.zeros(5), jnp.zeros(2))
    assert (after["a"] == state["a"]).all() and carried.all() and set(metrics) == set(dispatch.METRICS)


def test_efficiency_counts_what_devices_repeat():
    alone = {"collectives": 0, "collective bytes": 0.0, "arguments": 1e6, "temporaries": 2e6, "flops": 8e9, "ms": 90.0}
    result = alone | {"collectives": 2, "collective bytes": 4096.0, "flops": 2.5e9, "ms": 120.0}
    row = scaling.cells(2, 2, result, alone)
    assert len(row) == len(scaling.TITLES)
    assert row == ["2 x 2", "2", "4,096", "1.00", "2.00", "2.500", "0.800", "120.0", "0.75"]
    assert scaling.cells(1, 1, {name: value for name, value in alone.items() if name != "ms"}, alone)[-2:] == ["-"] * 2


def test_useful_steps_are_those_until_a_puzzle_halts():
    result = {
        "model": "m",
        "batch": 4,
        "rows": {"halting": {"puzzles": 8, "steps": 2.0, "computed": 3.0, "seconds": 0.5}},
    }
    row = inference.cells(result, "halting")
    assert len(row) == len(inference.TITLES)
    assert row[-5:] == ["0.50", "16.0", "48", "32", f"{32 / 3600:.3f}"]


def test_random_puzzles_are_the_examples_of_a_set():
    from models_torch.trm import TRMConfig

    puzzles = inference.random_puzzles(TRMConfig(batch_size=2, seq_len=9, vocab_size=5), 6)
    assert puzzles.num_examples == 6 and np.asarray(puzzles.inputs).max() < 5


@pytest.mark.parametrize(
    ("name", "arguments", "figures"),
    [
        pytest.param(
            *(
                "dispatch",
                ["--devices", "2", "--layers", "1", "--hidden-size", "64", "--rounds", "1", "--calls", "1"],
                8,
            ),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("scaling", ["--devices", "2", "--no-processes", "--preset", "tiny", "--rounds", "0"], 4),
            marks=pytest.mark.campaign,
        ),
        pytest.param(
            *("compile", ["--presets", "tiny", "--rounds", "1", "--starts", "0"], 2), marks=pytest.mark.campaign
        ),
        pytest.param(
            *("inference", ["--sizes", "sudoku9", "--batch-size", "2", "--batches", "1", "--rounds", "1"], 3),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_command_writes_its_figures(tmp_path, name, arguments, figures):
    file = tmp_path / "now.json"
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments, "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr
    assert len(json.loads(file.read_text())["figures"]) == figures
    assert done.stdout.startswith("| ")
