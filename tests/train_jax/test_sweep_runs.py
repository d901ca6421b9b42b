"""Whole sweeps at the smallest size: data, training, evaluation, analysis, from one command."""

import csv
import json
import signal
import subprocess
import sys
import time

import pytest

from train_jax.__main__ import main
from train_jax.research.table import EXPERIMENTS, GROUPS, data_sets

SMALL = ["--preset", "tiny", "--platform", "cpu", "--wandb", "disabled", "--continue-on-failure"]


def command(*names, root, data):
    return ["sweep", *names, *SMALL, "--runs-root", str(root), "--data-root", str(data)]


@pytest.mark.campaign
def test_a_sweep_that_is_interrupted_continues(tmp_path, capsys):
    """SIGTERM reaches the run, which saves; the same command continues both."""
    words = command("exp02b_01", root=tmp_path / "runs", data=tmp_path / "data")
    run = tmp_path / "runs" / "exp02b" / "exp02b_01" / "seed-0"
    process = subprocess.Popen([sys.executable, "-m", "train_jax", *words])
    while process.poll() is None and not (run / "metrics.jsonl").exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait() in (0, 75)
    assert main(words) == 0
    assert json.loads((run / "FINISHED").read_text())["train_steps"] == 40
    assert main([*words, "--dry-run"]) == 0
    assert "1 runs of 1 experiments: 1 finished" in capsys.readouterr().out


@pytest.mark.slow
def test_an_experiment_by_its_name_and_stage_by_stage(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "exp02b" / "exp02b_01" / "seed-0"
    (data,) = data_sets(EXPERIMENTS["exp02b_01"], "tiny")
    assert main(list(data.command)) == 0
    assert main(["train", "exp02b_01", "--preset", "tiny", "--run-dir", str(run), *SMALL[2:-1]]) == 0
    assert json.loads((run / "config.json").read_text())["arch"]["H_cycles"] == 1, "what the experiment changes"
    for stage in ("evaluate", "export", "report"):
        assert main([stage, str(run)]) == 0, capsys.readouterr().err
    assert json.loads((run / "FINISHED").read_text())["train_steps"] == 40
    scores = json.loads((run / "evaluation" / "test.json").read_text())
    assert (run / "weights.safetensors").exists() and any((run / "report").iterdir())
    assert main(["analyze", str(tmp_path / "runs"), "--output", str(tmp_path / "analysis")]) == 0
    assert "1 of 1 runs are finished." in capsys.readouterr().out
    (row,) = csv.DictReader((tmp_path / "analysis" / "results.csv").open())
    assert (row["experiment"], row["state"], int(row["train_steps"])) == ("exp02b_01", "finished", 40)
    assert float(row["final_exact_accuracy"]) == pytest.approx(scores["exact_accuracy"], abs=1e-6)
    assert float(row["act_steps"]) == scores["steps"]


@pytest.mark.campaign
def test_one_experiment_of_each_group(tmp_path, capsys):
    last = {row.group: name for name, row in EXPERIMENTS.items() if not row.starts_from}
    assert list(last) == list(GROUPS)
    words = command(*last.values(), "contrib06_sudoku", "contrib06_transfer", root=tmp_path / "r", data=tmp_path / "d")
    assert main(words) == 0
    assert main([*words, "--dry-run"]) == 0
    assert f"experiments: {len(GROUPS) + 2} finished" in capsys.readouterr().out
    assert main(["analyze", str(tmp_path / "r")]) == 0
    assert "not analysed" not in capsys.readouterr().out
