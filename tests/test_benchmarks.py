"""The benchmarks: their tables and comparisons, good and bad ends of a soak, and that all sides compute the same."""

import contextlib
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import compile as compilation
from benchmarks import dispatch, inference, scaling, tables, trm_jnp, trm_tuned
from benchmarks.faults_runs import EndedError
from benchmarks.soak import Disturbed, Soaking, judge, read
from benchmarks.soak import tables as soak_tables
from benchmarks.step import Result, cells, check_losses
from models_torch.trm import TRMConfig

ROOT = Path(__file__).parents[1]


# ---- tables


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
    file.write_text("[]")
    with pytest.raises(SystemExit) as error:
        tables.figures_before(tables.Files(compare=file))
    assert error.value.code == 2 and capsys.readouterr().err.count("\n") == 1


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


def test_the_stub_and_the_grouped_arrays_keep_every_element():
    state = {"a": jnp.ones((2, 3)), "b": [jnp.zeros(4), jnp.arange(5)]}
    arrays = dispatch.grouped(state)
    assert {name: array.size for name, array in arrays.items()} == {"float32": 10, "int32": 5}
    after, carried, metrics = jax.jit(dispatch.stub())(state, jnp.ones(2, bool), jnp.zeros(5), jnp.zeros(2))
    assert (after["a"] == 1).all() and carried.all() and set(metrics) == set(dispatch.METRICS)


def test_efficiency_counts_what_devices_repeat():
    alone = {"collectives": 0, "collective bytes": 0.0, "arguments": 1e6, "temporaries": 2e6, "flops": 8e9, "ms": 90.0}
    result = alone | {"collectives": 2, "collective bytes": 4096.0, "flops": 2.5e9, "ms": 120.0}
    row = " ".join(scaling.cells(2, 2, result, alone))
    assert row == "2 x 2 2 4,096 1.00 2.00 2.500 0.800 120.0 0.75"


def test_useful_steps_are_those_until_a_puzzle_halts():
    rows = {"halting": {"puzzles": 8, "steps": 2.0, "computed": 3.0, "seconds": 0.5}}
    row = inference.cells({"model": "m", "batch": 4, "rows": rows}, "halting")
    assert row[-5:] == ["0.50", "16.0", "48", "32", f"{32 / 3600:.3f}"]


SHORT = {
    "dispatch": ("--devices 2 --layers 1 --hidden-size 64 --rounds 1 --calls 1", 8),
    "scaling": ("--devices 2 --no-processes --preset tiny --rounds 0", 4),
    "compile": ("--presets tiny --rounds 1 --starts 0", 2),
    "inference": ("--sizes sudoku9 --batch-size 2 --batches 1 --rounds 1", 3),
}


@pytest.mark.campaign
@pytest.mark.parametrize("name", SHORT)
def test_the_command_writes_its_figures(tmp_path, name):
    arguments, figures = SHORT[name]
    file = tmp_path / "now.json"
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments.split(), "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(file.read_text())["figures"]) == figures
    assert done.stdout.startswith("| ")


# ---- the soak, which takes hours


@pytest.mark.parametrize(
    ("kind", "statuses", "problems"),
    [
        ("SIGKILL", [69, -9, 69], []),
        ("SIGSTOP", [69, None, 69], []),
        ("SIGTERM", [75, 75, 75], []),
        ("SIGTERM", [0, 0, 0], []),
        ("SIGKILL", [None, -9, 69], ["hosts [0] had not ended after 180 s"]),
        ("SIGTERM", [75, None, 75], ["hosts [1] had not ended after 180 s"]),
        ("SIGKILL", [1, -9, 69], ["a launch would not start the run again"]),
    ],
)
def test_how_the_hosts_may_end(kind, statuses, problems):
    fault = Disturbed("fault 0", "training", 3, 1, kind, statuses)
    judge(fault)
    assert fault.problems == problems


@pytest.mark.parametrize(("statuses", "again"), [([69, -6, 69], True), ([1, -6, 1], False)])
def test_a_run_that_ends_on_its_own_is_started_again_as_by_a_launch(tmp_path, statuses, again):
    soaking = object.__new__(Soaking)
    soaking._run, soaking._results = SimpleNamespace(wait=lambda *_, **__: statuses, kill=lambda: None), tmp_path / "s"
    soaking.finishes, soaking.ends = [], []
    with contextlib.nullcontext() if again else pytest.raises(EndedError):
        soaking._ended(EndedError())
    assert len(read(tmp_path / "s")[2]) == len(soaking.ends) == again


def test_only_a_finished_equal_run_counts_as_exact(tmp_path):
    rows = [Disturbed(f"fault {n}", "saving", 8, 0, "SIGKILL", run=n, stop_seconds=n, lost_steps=n) for n in range(4)]
    rows[1].problems = ["hosts [0] had not ended after 180 s"]
    assert "| kill | saving | 4 | 1 | 2 | 1 | 0.0 to 3.0 | 0 to 3 |" in soak_tables(
        rows, [[], [], ["model: other arrays"]]
    )
    last = soak_tables(rows, [[], [], ["other"]], ["1 of 8 aborted"]).splitlines()[-1]
    assert last.startswith("1 of 4 faults; 2 of 3 finished runs bit for bit; 1 ends without a fault")
    lines = [dataclasses.asdict(rows[0]), {"finished": 0, "problems": []}, {"ended": 1, "ending": "1 of 8 aborted"}]
    (tmp_path / "soak.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read(tmp_path / "soak.jsonl") == (rows[:1], [[]], ["1 of 8 aborted"])
    assert read(tmp_path / "absent") == ([], [], [])


# ---- the training step

FACTS = {"device": "two threads", "flops": 0.0, "peak_flops": 0.0, "first_loss": 2.0, "first_step_s": 1.0}


def results():
    eager = Result("mixer", "train", "eager", FACTS, [0.2, 0.4, 0.3], [1.0, 0.9, 0.8], 10**9)
    bridged = FACTS | {"flops": 3e9, "peak_flops": 1e11}
    return [eager, Result("mixer", "train", "bridge", bridged, [0.1, 0.1, 0.3], [1.0, 0.9, 0.8005], 2 * 10**9)]


def test_ratios_are_medians_over_rounds_and_all_sides_have_the_same_flops():
    eager, bridged = (tables.row(cells(result, results())) for result in results())
    assert "| 300.0 | 200.0 to 400.0 | 1.00 | 3.0 | 10 | - | 1.00 |" in eager
    assert "| 100.0 | 100.0 to 300.0 | 0.50 | 3.0 | 30 | 30 % | 2.00 |" in bridged


def test_a_side_that_computes_something_else_is_named():
    check_losses(results(), 1e-5, 1e-3)
    with pytest.raises(SystemExit, match=r"mixer train bridge: loss 0\.8005, eager has 0\.8"):
        check_losses(results(), 1e-5, 1e-4)


@pytest.mark.slow
def test_the_sides_agree_on_the_model_of_the_speedrun(tmp_path):
    """`torch.compile` is left out, because it needs a C++ compiler."""
    command = [sys.executable, "-m", "benchmarks.step", "--sizes", "sudoku9", "--sides", "eager", "by hand", "bridge",
               "--batch-size", "2", "--cpu-examples", "1", "--rounds", "1", "--round-seconds", "0.01",
               "--json", str(tmp_path / "step.json")]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    names = json.loads((tmp_path / "step.json").read_text())["figures"]
    assert list(names) == [*(f"sudoku9 train {side}, ms" for side in ("eager", "by hand", "bridge")),
                           "sudoku9 evaluate eager, ms", "sudoku9 evaluate bridge, ms"]  # fmt: skip


HIDDEN, EXPANDED, POSITIONS = 64, 128, 9


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("mlp_t", [False, True])
def test_the_tuned_rival_is_the_same_network(mlp_t, fused):
    """It has everything that makes the bridge fast; its kernels leave float32 to operations of JAX."""
    config = TRMConfig(
        seq_len=9, hidden_size=HIDDEN, num_heads=4, puzzle_emb_ndim=0, puzzle_emb_len=0, L_layers=2, mlp_t=mlp_t,
        pos_encodings="none" if mlp_t else "rope", forward_dtype="float32",
    )  # fmt: skip
    rng = np.random.default_rng(0)
    sizes = {"mlp": (HIDDEN, EXPANDED)} | ({"mlp_t": (POSITIONS, EXPANDED)} if mlp_t else {})
    params = {}
    for layer in range(2):
        name = f"{trm_jnp.INNER}L_level.layers.{layer}"
        for mlp, (size, width) in sizes.items():
            params[f"{name}.{mlp}.gate_up_proj.weight"] = rng.normal(size=(2 * width, size)) * size**-0.5
            params[f"{name}.{mlp}.down_proj.weight"] = rng.normal(size=(size, width)) * width**-0.5
        if not mlp_t:
            params[f"{name}.self_attn.qkv_proj.weight"] = rng.normal(size=(3 * HIDDEN, HIDDEN)) * HIDDEN**-0.5
            params[f"{name}.self_attn.o_proj.weight"] = rng.normal(size=(HIDDEN, HIDDEN)) * HIDDEN**-0.5
    params = jax.tree.map(np.float32, params)
    z, injection = (np.float32(rng.normal(size=(2, POSITIONS, HIDDEN))) for _ in range(2))

    def loss(network):
        return lambda params: (network(z, injection, params, config) * injection).sum()

    expected = jax.value_and_grad(loss(trm_jnp.level))(params)
    for ours, theirs in zip(
        jax.tree.leaves(jax.value_and_grad(loss(trm_tuned.network(fused=fused)))(params)),
        jax.tree.leaves(expected),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4 * np.abs(theirs).max())
