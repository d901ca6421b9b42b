"""A task without carry, halting and tables goes through the same loop: trained, evaluated, saved, continued."""

import json

import numpy as np
import pytest
from support.scripts import run_script
from support.toy_language import write_tokens

pytestmark = pytest.mark.slow
RUNS = {"whole 1": (1,), "continued 1": (1, 10), "whole 8": (8,), "continued 8": (8, 10)}


@pytest.fixture(scope="module")
def trained(made_once):
    """`trained("whole 8")`: the last state of that run, and its lines of metrics."""

    def train(folder):
        write_tokens(folder)
        words = [(devices, folder / name, folder / f"{name}.npz", *stops) for name, (devices, *stops) in RUNS.items()]
        run_script("toy_language_process", folder, *[word for run in words for word in ("--", *run)])

    folder = made_once("toy_language", train)

    def result(name):
        records = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
        return dict(np.load(folder / f"{name}.npz")), records

    return result


@pytest.mark.parametrize("devices", [1, 8])
def test_trains_evaluates_and_continues_bit_for_bit(trained, devices):
    (arrays, records), (resumed, again) = trained(f"whole {devices}"), trained(f"continued {devices}")
    assert arrays.keys() == resumed.keys()
    for name, array in arrays.items():
        assert array.tobytes() == resumed[name].tobytes(), name
    losses = [record["train/loss"] for record in records if "train/loss" in record]
    assert losses == [record["train/loss"] for record in again if "train/loss" in record]
    assert losses[-1] < losses[0] and float(arrays["__loss"]) < np.log(11)
    assert [record["step"] for record in records if "eval/loss" in record] == [5, 10, 15, 20]


def test_one_device_equals_eight(trained):
    """Weights differ between the devices' shares, so a mean of means would not do."""
    (one, _), (eight, _) = trained("whole 1"), trained("whole 8")
    for name, array in one.items():
        np.testing.assert_allclose(eight[name], array, rtol=0, atol=1e-5, err_msg=name)
