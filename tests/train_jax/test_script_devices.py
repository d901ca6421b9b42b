"""Training scripts on several devices and processes, beside one device and PyTorch's DistributedDataParallel."""

import json
import subprocess

import pytest
import torch
from support.script_runs import trained_by_ddp, trained_on
from support.sums_of_squares import DATA_AND_LOSS

pytestmark = pytest.mark.slow

SCRIPT = f"""
import torch
from torch import nn


def model():
    return nn.Sequential(nn.Linear(6, 16), NORM, nn.Tanh(), nn.Linear(16, 1))

{DATA_AND_LOSS}

def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
"""
EXACT = SCRIPT.replace("NORM", "nn.LayerNorm(16)").replace("LOSS", "error.sum(), len(x)")
MEAN = SCRIPT.replace("NORM", "nn.BatchNorm1d(16)").replace("LOSS", "error.mean()")


def loss_of(run):
    return json.loads((run / "FINISHED").read_text())["loss"]


def test_a_sum_and_a_count_give_the_same_run_on_1_and_8_devices_and_2_processes_of_4(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(EXACT)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    one = trained_on(tmp_path, path, "one", steps=10, devices=1)
    for run, launch, devices in (("eight", (), 8), ("two", ("launch", "--rehearse", "2x4", "--"), None)):
        weights = trained_on(tmp_path, path, run, *launch, steps=10, devices=devices)
        assert loss_of(tmp_path / run) == pytest.approx(loss_of(tmp_path / "one"), rel=1e-5)
        for name, tensor in one.items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-6)


def test_a_mean_gives_the_parameters_of_distributed_data_parallel(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MEAN)
    expected = trained_by_ddp(tmp_path, path, steps=10)
    weights = trained_on(tmp_path, path, "two", steps=10, devices=2)
    for name, parameter in expected.items():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-4, atol=1e-6)
