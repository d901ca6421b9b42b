"""Whole sweeps at the smallest size: data, training, evaluation, analysis, from one command."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from train_jax.__main__ import main
from train_jax.experiments.table import EXPERIMENTS, GROUPS

SMALL = ["--preset", "tiny", "--platform", "cpu", "--wandb", "disabled", "--continue-on-failure"]


def command(*names, root, data):
    return ["sweep", *names, *SMALL, "--runs-root", str(root), "--data-root", str(data)]


@pytest.mark.slow
def test_a_sweep_that_is_interrupted_continues(tmp_path, capsys):
    """SIGTERM reaches the run, which saves; the same command continues both."""
    words = command("exp02b_01", root=tmp_path / "runs", data=tmp_path / "data")
    run = tmp_path / "runs" / "exp02b" / "exp02b_01" / "seed-0"
    process = subprocess.Popen([sys.executable, "-m", "train_jax", *words], env=os.environ)
    while process.poll() is None and not (run / "metrics.jsonl").exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait() in (0, 75)
    assert main(words) == 0
    figures = json.loads((run / "FINISHED").read_text())
    assert figures["train_steps"] == 40
    assert main(["analyze", str(tmp_path / "runs")]) == 0
    assert "1 of 1 runs are finished." in capsys.readouterr().out


@pytest.mark.campaign
def test_one_experiment_of_each_group(tmp_path, capsys):
    last = {row.group: name for name, row in EXPERIMENTS.items() if not row.starts_from}
    assert list(last) == list(GROUPS)
    words = command(*last.values(), "contrib06_sudoku", "contrib06_transfer", root=tmp_path / "r", data=tmp_path / "d")
    assert main(words) == 0
    results = json.loads((tmp_path / "r" / "batch_results.json").read_text())
    assert results["counts"] == {"finished": len(GROUPS) + 2}
    assert main(["analyze", str(tmp_path / "r")]) == 0
    assert "not analysed" not in capsys.readouterr().out
