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
def results(tmp_path_factory):
    out = tmp_path_factory.mktemp("replicas") / "replicas.json"
    subprocess.run([sys.executable, str(PROCESS), str(out)], check=True)
    return json.loads(out.read_text())


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("name", ROWS)
def test_row(results, name, mode):
    """Each device's outputs, buffers and gradients are those of PyTorch with its shard."""
    report = results["meanings"][f"{name}-{mode}"]
    assert report["ok"], f"\n{report['table']}"
    assert report["leaves"] >= 8


def test_draws_belong_to_rows_not_to_replicas(results):
    draws = {name: [np.array(a) for a in arrays] for name, arrays in results["draws"].items()}
    rows, own, integers, counts = draws["sharded"]
    np.testing.assert_array_equal(rows.reshape(16, 3), draws["whole"][0])
    np.testing.assert_array_equal(integers.reshape(16, 3), draws["whole"][2])
    np.testing.assert_array_equal(counts.reshape(16, 3), draws["whole"][3])
    assert len(np.unique(own, axis=0)) == 8, "a draw of no rows is the replica's own"
    assert len(np.unique(rows)) == rows.size


def test_a_key_gives_the_same_numbers_again_and_another_key_others(results):
    draws = results["draws"]
    assert draws["again"] == draws["sharded"]
    for ours, others in zip(draws["sharded"], draws["other key"], strict=True):
        assert (np.array(ours) != np.array(others)).mean() > 0.9


def test_one_key_for_each_replica(results):
    """A key folded with the replica's index: no two replicas draw the same."""
    for array in results["draws"]["one key each"]:
        assert len(np.unique(np.array(array).reshape(8, -1), axis=0)) == 8
