"""`--profile` and `trm profile`: which steps are traced, and the sums over their operations."""

import contextlib
import dataclasses
import gzip
import json
import shutil
from types import SimpleNamespace

import pytest
from support.compiled_program import PROGRAM
from support.scripts import run_script

from train_jax.__main__ import main
from train_jax.pods.hlo import Program
from train_jax.pods.yardsticks import measured
from train_jax.run.folder import PROFILED_PROGRAM, PROFILED_STEP, RunFolder
from train_jax.run.presets import preset
from train_jax.runtime.clock import Clock
from train_jax.trainer.hooks.profiling import MEMORY_AFTER, MEMORY_BEFORE, Profiling
from train_jax.trainer.session import Session


def span(name, begin, duration, thread=0, **args):
    return {"ph": "X", "pid": 1, "tid": thread, "ts": begin, "dur": duration, "name": name, "args": args}


EVENTS = [
    {},
    {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "/host:CPU"}},
    *(span("train", 1000 * number, 10, 9, step_num=str(7 + number)) for number in range(2)),
    *(
        each
        for begin in (100, 1100)
        for each in (
            span("loop", begin, 700),
            *(span("product", begin + 50 + 200 * turn, 150) for turn in range(3)),
            span("end: product", begin + 650, 1),
            span("anything", begin, 50, thread=1, hlo_op="added"),
            span("sum", begin + 800, 100, thread=1),
        )
    ),
]
"""Events of two steps on two devices, in microseconds: a loop with 3 products in it, an addition, a collective."""


def test_sums_of_each_operation_without_those_inside_it():
    figures = measured(EVENTS, Program(PROGRAM))
    assert (figures.steps, figures.wall, figures.busy) == (2, (2000 - 100) / 2 / 1e3, 0.85)
    assert figures.splits["kind"] == pytest.approx(
        {"matrix products": 0.45, "loops and branches": 0.25, "collectives": 0.10, "elementwise, reductions": 0.05}
    )
    assert figures.splits["module"] == pytest.approx({"layers.0.mlp": 0.45, "": 0.40})
    assert figures.splits["class"] == pytest.approx({"Block/SwiGLU": 0.45, "": 0.40})
    assert figures.splits["pass"] == pytest.approx({"backward": 0.45, "made by the compiler": 0.35, "forward": 0.05})
    runs = [("product", 3), ("loop", 1), ("sum", 1), ("added", 1)]
    assert [(each.name, each.runs) for each in figures.operations] == runs


@pytest.fixture
def run(tmp_path):
    """A run folder with a profile of the events above."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    trace = tmp_path / "run/profile/host-00/plugins/profile/2026/perfetto_trace.json.gz"
    trace.parent.mkdir(parents=True)
    trace.write_bytes(gzip.compress(json.dumps({"traceEvents": EVENTS}).encode()))
    (trace.parents[3] / "train-step.txt.gz").write_bytes(gzip.compress(PROGRAM.encode()))
    return tmp_path / "run"


def test_tables_and_json(run, capsys, tmp_path):
    assert main(["profile", str(run), "--operations", "1", "--json", str(tmp_path / "figures.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{run}, process 0: 2 steps, measured; milliseconds for a step"
    assert "       0.450  52.9%  Block/SwiGLU" in lines
    assert lines[-1] == "       0.450  52.9%      3  product: matrix products, layers.0.mlp, dot_general"
    assert json.loads((tmp_path / "figures.json").read_text())["busy"] == 0.85


def test_a_profile_that_cannot_be_read_is_one_line(run, capsys):
    def refused(*options):
        assert main(["profile", str(run), *options]) == 2
        return capsys.readouterr().err

    assert "train with --profile 5, or choose another --host" in refused("--host", "3")
    for content in (b"", b"no gzip", gzip.compress(b"[1]"), gzip.compress(b'{"traceEvents": [{"ph": "X"}]}')):
        next(run.rglob("perfetto*")).write_bytes(content)
        assert "cannot be read" in refused(), content
    shutil.rmtree(run / "profile/host-00/plugins")
    assert "has no trace; train with --profile 5" in refused()


@pytest.mark.parametrize(
    ("first", "dispatch", "profile", "skip", "traced", "said"),
    [
        (0, 1, 3, 4, [5, 6, 7], "profile of steps 5 to 7 in "),
        (6, 1, 2, 3, [10, 11], "profile of steps 10 to 11 in "),
        (0, 4, 2, 2, [8], "profile of steps 5 to 8 in "),
        (0, 1, 2, 12, [], "no step was profiled: the run ended at step 12; lower --profile-skip"),
    ],
)
def test_the_requested_steps_are_traced(monkeypatch, tmp_path, first, dispatch, profile, skip, traced, said):
    """The run has twelve steps, some of them taken before; the profiler's own time is not that of the steps."""
    seen = []
    lines = []
    running = []

    def annotation(name, step_num):
        assert name == PROFILED_STEP and running
        seen.append(step_num)
        return contextlib.nullcontext()

    def start_trace(folder, *, create_perfetto_trace, profiler_options):
        assert create_perfetto_trace and profiler_options.python_tracer_level == 0
        running.append(folder)

    monkeypatch.setattr("jax.profiler.start_trace", start_trace)
    monkeypatch.setattr("jax.profiler.stop_trace", running.clear)
    monkeypatch.setattr("jax.profiler.save_device_memory_profile", lambda path: path.write_bytes(b""))
    monkeypatch.setattr("jax.profiler.StepTraceAnnotation", annotation)
    folder = tmp_path / "profile" / "host-00"
    clock = Clock()
    session = Session(*[SimpleNamespace(text=lambda: "HLO")] * 6, state=0, carry=(), dispatch=range(first, first))
    session.clock = clock
    session.tracker = SimpleNamespace(say=lines.append)
    config = dataclasses.replace(preset("tiny"), profile=profile, profile_skip=skip)
    hook = Profiling(config, RunFolder(tmp_path), first)
    for step in range(first, 12, dispatch):
        session.dispatch = range(step, step + dispatch)
        with hook.around(session):
            pass
        hook.after(session, {})
    hook.end(session)
    assert seen == traced and not running and lines == [said + str(folder) * bool(traced)] * bool(said)
    files = {path.name for path in folder.iterdir()} if folder.exists() else set()
    assert files == ({MEMORY_BEFORE, MEMORY_AFTER, PROFILED_PROGRAM} if traced else set())
    assert ("profile" in clock.spent()[2]) == bool(traced)


@pytest.mark.campaign
def test_steps_of_a_run_are_profiled(data_dir, tmp_path, capsys):
    run = tmp_path / "run"
    fields = "steps=12", "log_every_steps=4", "profile=3", "profile_skip=4"
    out = run_script("train_tiny", data_dir, 2, run, tmp_path / "run.npz", *fields)
    folder = run / "profile" / "host-00"
    assert f"profile of steps 5 to 7 in {folder}" in out
    assert main(["profile", str(run), "--json", "-"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["steps"] == 3 and figures["by_kind"]["matrix products"] > 0
    assert figures["busy"] == pytest.approx(sum(figures["by_module"].values()))
    assert any("SwiGLU" in classes for classes in figures["by_class"])
    assert any(".mlp" in module for module in figures["by_module"])
    assert {"memory-before.prof", "memory-after.prof", "train-step.txt.gz"} <= {path.name for path in folder.iterdir()}
    assert list(folder.glob("plugins/profile/*/*.xplane.pb"))
