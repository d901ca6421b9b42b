"""`python -m benchmarks.step`: all sides compute the same, and what became slower is named."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.step import Result, check_losses, header, row, slower

FACTS = {"device": "two threads", "flops": 0.0, "peak_flops": 0.0, "first_loss": 2.0, "first_step_s": 1.0}


def results():
    eager = Result("mixer", "train", "eager", FACTS, [0.2, 0.4, 0.3], [1.0, 0.9, 0.8], 10**9)
    bridged = FACTS | {"flops": 3e9, "peak_flops": 1e11}
    return [eager, Result("mixer", "train", "bridge", bridged, [0.1, 0.1, 0.3], [1.0, 0.9, 0.8005], 2 * 10**9)]


def test_ratios_are_medians_over_rounds_and_all_sides_have_the_same_flops():
    eager, bridged = (row(result, results()) for result in results())
    assert header(("eager", "bridge")).count("|\n") == 1 and header(("eager",)).count("x PyTorch") == 1
    assert "| 300.0 | 200.0 to 400.0 | 1.00 | 3.0 | 10 | - | 1.00 |" in eager
    assert "| 100.0 | 100.0 to 300.0 | 0.50 | 3.0 | 30 | 30 % | 2.00 |" in bridged


def test_a_side_that_computes_something_else_is_named():
    check_losses(results(), 1e-3)
    with pytest.raises(SystemExit, match=r"mixer train bridge: loss 0\.8005, eager has 0\.8"):
        check_losses(results(), 1e-4)


def test_only_what_became_slower_is_named():
    before = {"mixer train eager": 290.0, "mixer train bridge": 90.0, "mixer evaluate bridge": 1.0}
    assert slower(results(), before) == ["mixer train bridge: 100.0 ms, before 90.0 ms"]


@pytest.mark.slow
def test_the_sides_agree_on_the_model_of_the_speedrun(tmp_path):
    """`torch.compile` is left out, because it needs a C++ compiler."""
    command = [sys.executable, "-m", "benchmarks.step", "--sizes", "sudoku9", "--batch-size", "2", "--rounds", "1"]
    command += [
        "--round-seconds",
        "0.01",
        "--sides",
        "eager",
        "by hand",
        "bridge",
        "--json",
        str(tmp_path / "step.json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr
    names = json.loads((tmp_path / "step.json").read_text())["milliseconds"]
    assert list(names) == [*(f"sudoku9 train {side}" for side in ("eager", "by hand", "bridge")),
                           "sudoku9 evaluate eager", "sudoku9 evaluate bridge"]  # fmt: skip
