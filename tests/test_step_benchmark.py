"""`python -m benchmarks.step`: all sides compute the same."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.step import Result, cells, check_losses, titles
from benchmarks.tables import row

FACTS = {"device": "two threads", "flops": 0.0, "peak_flops": 0.0, "first_loss": 2.0, "first_step_s": 1.0}


def results():
    eager = Result("mixer", "train", "eager", FACTS, [0.2, 0.4, 0.3], [1.0, 0.9, 0.8], 10**9)
    bridged = FACTS | {"flops": 3e9, "peak_flops": 1e11}
    return [eager, Result("mixer", "train", "bridge", bridged, [0.1, 0.1, 0.3], [1.0, 0.9, 0.8005], 2 * 10**9)]


def test_ratios_are_medians_over_rounds_and_all_sides_have_the_same_flops():
    eager, bridged = (row(cells(result, results())) for result in results())
    assert len(titles(("eager",))) == len(cells(results()[0], results()))
    assert titles(("eager", "bridge")).count("x PyTorch") == 1
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
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr
    names = json.loads((tmp_path / "step.json").read_text())["figures"]
    assert list(names) == [*(f"sudoku9 train {side}, ms" for side in ("eager", "by hand", "bridge")),
                           "sudoku9 evaluate eager, ms", "sudoku9 evaluate bridge, ms"]  # fmt: skip
