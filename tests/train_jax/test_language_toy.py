"""A task from outside the project trains, evaluates, checkpoints and continues through the same loop as the puzzles."""

import json

import numpy as np
import pytest
from support.scripts import run_script


@pytest.fixture(scope="module")
def runs(made_once):
    """The folder of the runs, and their arrays by name."""
    folder = made_once("language", lambda folder: run_script("train_language_toy", folder))
    return folder, {path.stem: dict(np.load(path)) for path in folder.glob("*.npz")}


@pytest.mark.parametrize("name", ["one", "eight"])
def test_it_learns_and_logs(runs, name):
    records = [json.loads(line) for line in (runs[0] / name / "metrics.jsonl").open()]
    losses = {record["step"]: record["train/loss"] for record in records if "train/loss" in record}
    accuracies = [record["eval/accuracy"] for record in records if "eval/accuracy" in record]
    assert list(losses) == [10, 20, 30, 40] and losses[40] < 0.3 * losses[10]
    assert len(accuracies) == 2 and accuracies[1] > 0.9


@pytest.mark.parametrize("name", ["one", "eight"])
def test_continued_is_the_same_run_bit_for_bit(runs, name):
    whole, continued = runs[1][name], runs[1][f"continued-{name}"]
    assert whole.keys() == continued.keys()
    for key, array in whole.items():
        np.testing.assert_array_equal(continued[key], array, err_msg=key)


def test_eight_devices_learn_the_same_as_one(runs):
    """The loss is divided by the number of targets in the global batch, which differs from device to device."""
    one, eight = runs[1]["one"], runs[1]["eight"]
    for key, array in one.items():
        atol = 1e-5 * max(np.abs(array).max(initial=0), 1e-3)
        np.testing.assert_allclose(eight[key], array, rtol=0, atol=atol, err_msg=key)
