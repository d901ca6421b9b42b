"""A task without carry, halting and tables goes through the same loop: trained, evaluated, saved, continued."""

import json

import numpy as np
import pytest
from support.scripts import run_script


@pytest.fixture(scope="module")
def data_dir(made_once):
    return made_once("toy_language", write_tokens)


def write_tokens(folder):
    """The next token is a function of the last one, most of the time."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 256), ("test", 32)):
        tokens = [rng.integers(11, size=count)]
        for _ in range(12):
            noise = rng.random(count) < 0.1
            tokens.append(np.where(noise, rng.integers(11, size=count), (3 * tokens[-1] + 1) % 11))
        np.save(folder / f"{split}.npy", np.stack(tokens, axis=1).astype(np.int32))


def trained(data_dir, folder, devices, *kill_at):
    folder.mkdir(exist_ok=True)
    out, run = folder / "out.npz", folder / "run"
    run_script("toy_language_process", data_dir, devices, run, out, *kill_at)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return dict(np.load(out)), records


@pytest.mark.parametrize("devices", [1, 8])
def test_trains_evaluates_and_continues_bit_for_bit(data_dir, tmp_path, devices):
    arrays, records = trained(data_dir, tmp_path, devices)
    resumed, again = trained(data_dir, tmp_path / "again", devices, 10)
    assert arrays.keys() == resumed.keys()
    for name, array in arrays.items():
        assert array.tobytes() == resumed[name].tobytes(), name
    losses = [record["train/loss"] for record in records if "train/loss" in record]
    assert losses == [record["train/loss"] for record in again if "train/loss" in record]
    assert losses[-1] < losses[0] and float(arrays["__loss"]) < np.log(11)
    assert [record["step"] for record in records if "eval/loss" in record] == [5, 10, 15, 20]


def test_one_device_equals_eight(data_dir, tmp_path):
    """Weights differ between the devices' shares, so a mean of means would not do."""
    one, _ = trained(data_dir, tmp_path / "one", 1)
    eight, _ = trained(data_dir, tmp_path / "eight", 8)
    for name, array in one.items():
        np.testing.assert_allclose(eight[name], array, rtol=0, atol=1e-5, err_msg=name)
