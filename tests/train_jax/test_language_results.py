"""`trm evaluate`, `export`, `report`, `summary` and `status` for runs of language models, and of tasks of the user."""

import dataclasses
import json
import re

import pytest
from support.documents import Balanced, words
from support.untrained_run import write_language_run

from train_jax.__main__ import main as trm
from train_jax.run.config import to_json
from train_jax.run.folder import RunFolder
from train_jax.run.presets import preset
from train_jax.run.status import read_status
from train_jax.task import TASKS, commands_of
from train_jax.tasks.commands import Commands
from train_jax.tasks.language.commands import ExportCheck, Sample, write_samples

PUZZLE_WORDS = ("puzzle", "ACT ", "halt", "exact", "cell", "Sudoku", "maze", "trajector")
HOSTILE = "<script>\x1b[2Jü"


@pytest.fixture
def folder(tmp_path):
    """A finished run whose every figure is known."""
    folder = RunFolder(tmp_path / "run")
    folder.evaluation("test").parent.mkdir(parents=True)
    config = dataclasses.replace(preset("chat-tiny"), data_dir=str(tmp_path / "text"), run_dir=str(folder.path))
    folder.config.write_text(to_json(config))
    records = []
    for step in range(10, 60, 10):
        train = {"loss": 6 / step, "bits_per_byte": 4 / step, "lr": 1e-3, "grad_norm": 0.5}
        record = {"step": step, "train_seconds": step / 10, "step_seconds": 0.5}
        records.append(record | {f"train/{name}": value for name, value in train.items()})
    records.append({"step": 50, "train_seconds": 5.0, "eval/bits_per_byte": 2.25, "eval/loss": 4.0})
    folder.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    test = {"loss": 2.0, "bits_per_byte": 1.9012, "tokens": 5000.0, "count": 20.0}
    compressed = {"gzip -9": 1.934, "xz -9e": 1.6208}
    folder.evaluation("test").write_text(json.dumps(test | {"compressed": compressed}))
    finished = {"train_seconds": 125.4, "train_steps": 50, "summary": "1.9012 bits per byte, loss 2.0000"}
    folder.finished.write_text(json.dumps(test | finished))
    core = {"tasks": {"copa": {"items": 100, "accuracy": 0.55, "centered": 0.1}}, "core": 0.1, "step": 50}
    folder.evaluation("core").write_text(json.dumps(core))
    folder.export_check.write_text(json.dumps(dataclasses.asdict(ExportCheck(4096, 2.0, 2.000001, 3e-6))))
    write_samples(folder.samples, 50, [Sample("test document 3", f"import {HOSTILE}", f"os\n{HOSTILE}")])
    return folder


def test_the_report_of_a_language_run(folder, capsys):
    assert trm(["report", str(folder.path)]) == 0
    document = folder.report.read_text(encoding="utf-8")
    text = words(document)
    for figure in (
        "bits per byte, held out 1.9012 the whole held-out text",
        "perplexity, held out 7.39 of a token",
        "5,000",
        "CORE 0.1000",
        "50 of 4,096 tokens",
        "tokens seen 204,800",
        "8,192 median over training",
        "xz -9e 1.6208 this model 1.9012 gzip -9 1.9340",
        "copa 100 0.5500 0.1000",
        "PyTorch agrees : the exported weights",
        "import <script>\ufffd[2Jü",
    ):
        assert figure in text, figure
    assert not [word for word in PUZZLE_WORDS if word in text]
    assert "script" not in Balanced(document).tags
    picture = folder.path / "card.svg"
    assert trm(["report", str(folder.path), "--picture", str(picture)]) == 2
    assert "--picture" in capsys.readouterr().err and not picture.exists()


def test_the_report_says_what_is_missing(folder):
    for path in (folder.evaluation("test"), folder.samples, folder.finished, folder.export_check):
        path.unlink()
    assert trm(["report", str(folder.path)]) == 0
    text = words(folder.report.read_text(encoding="utf-8"))
    assert "2.2500 the last evaluation during training" in text and "not finished" in text
    assert text.count("Not shown") == 2 and "trm evaluate" in text


def test_summary_and_status_of_a_language_run(folder, finished_run, capsys):
    assert trm(["summary", str(folder.path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1.9012 bits per byte, loss 2.0000, raw weights" and "perplexity 7.39" in lines[1]
    assert (
        lines[2] == "CORE 0.1000" and "training time 2:05" in lines[3] and "PyTorch agrees: loss 2.000000" in lines[4]
    )
    assert read_status(folder).figure == 2.25
    assert trm(["status", str(folder.path), str(finished_run)]) == 0
    head, ours, theirs = capsys.readouterr().out.splitlines()[:3]
    columns = head.split()
    assert columns[3:5] == ["bits/byte", "exact"]
    assert ours.split()[3:5] == ["2.2500", "-"] and theirs.split()[3] == "-"
    assert trm(["status", str(folder.path)]) == 0
    assert "exact" not in capsys.readouterr().out


def test_damaged_results_are_one_line(folder, capsys):
    for path, command in ((folder.samples, "report"), (folder.evaluation("core"), "summary")):
        path.write_text('{"samples": [{"name": 1}], "core": "x"}')
        assert trm([command, str(folder.path)]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_an_export_check_agrees_up_to_rounding():
    assert ExportCheck(10, 2.0, 2.00001, 1e-3).agrees and not ExportCheck(10, 2.0, 2.01, 1e-3).agrees
    assert "DISAGREES" in str(ExportCheck(10, 2.0, 2.01, 1e-3))


def test_a_task_of_the_user_has_the_default_commands():
    assert type(commands_of("support.toy_language:ToyLanguage")) is Commands
    assert all(isinstance(commands_of(name), Commands) for name in TASKS)


@pytest.fixture(scope="module")
def run_dir(made_once):
    """An untrained run, which at initialization gives every token the same probability."""
    return str(made_once("results", write_language_run) / "run")


@pytest.mark.slow
def test_a_language_run_is_evaluated_exported_and_reported(run_dir, capsys):
    assert trm(["evaluate", run_dir]) == 0
    output = capsys.readouterr().out
    assert "bits_per_byte" in output and "gzip -9" in output
    assert float(re.search(r"perplexity +(\S+)", output)[1]) == pytest.approx(280, rel=1e-5)
    assert output.count("--- test document") == 4 and output.count("--- without a prompt\n|") == 2
    assert trm(["export", run_dir]) == 0
    assert "PyTorch agrees: loss 5.6347" in capsys.readouterr().out  # ln 280
    assert trm(["evaluate", run_dir, "--split", "train", "--limit", "4", "--no-samples"]) == 0
    assert "count            4" in capsys.readouterr().out
    assert trm(["report", run_dir]) == 0
    assert trm(["evaluate", run_dir, "--halt-early"]) == 2
    assert "--halt-early is not for runs of task language" in capsys.readouterr().err
