"""Every row of the table of meanings, and random numbers, under `pmap` on eight devices in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rows import ROWS

pytestmark = pytest.mark.slow
PROCESS = Path(__file__).with_name("replicas_process.py")


@pytest.fixture(scope="module")
def results(made_once):
    def run(folder):
        subprocess.run([sys.executable, str(PROCESS), str(folder / "replicas.json")], check=True)

    return json.loads((made_once("replicas", run) / "replicas.json").read_text())


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("name", ROWS)
def test_row(results, name, mode):
    """Each device's outputs, buffers and gradients are those of PyTorch with its shard."""
    report = results["meanings"][f"{name}-{mode}"]
    assert report["ok"], f"\n{report['table']}"
    assert report["leaves"] >= 8


def test_draws_belong_to_rows_not_to_replicas(results):
    draws = {name: [np.array(a) for a in arrays] for name, arrays in results["draws"].items()}
    rows, own, *_ = draws["sharded"]
    for i in (0, 2, 3):
        np.testing.assert_array_equal(draws["sharded"][i].reshape(16, 3), draws["whole"][i])
    assert len(np.unique(own, axis=0)) == 8, "a draw of no rows is the replica's own"
    assert len(np.unique(rows)) == rows.size
