"""Training scripts on several devices and processes, beside one device and PyTorch's DistributedDataParallel."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import bridge

pytestmark = pytest.mark.slow

SUPPORT = Path(__file__).parents[1] / "support"
SCRIPT = """
import torch
from torch import nn


def model():
    return nn.Sequential(nn.Linear(6, 16), NORM, nn.Tanh(), nn.Linear(16, 1))


def train_data():
    x = torch.randn(200, 6, generator=torch.Generator().manual_seed(0))
    return x, x.square().sum(1, keepdim=True)


def test_data():
    x, y = train_data()
    return x[:50], y[:50]


def loss(model, batch):
    x, y = batch
    error = (model(x) - y) ** 2
    return LOSS


def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
"""
EXACT = SCRIPT.replace("NORM", "nn.LayerNorm(16)").replace("LOSS", "error.sum(), len(x)")
MEAN = SCRIPT.replace("NORM", "nn.BatchNorm1d(16)").replace("LOSS", "error.mean()")
OPTIONS = ("--steps=10", "--global-batch-size=16", "--eval-batch-size=16", "--wandb=disabled", "--no-verify")


def trm(folder, *words):
    subprocess.run([sys.executable, "-m", "train_jax", *map(str, words)], cwd=folder, check=True, capture_output=True)


def trained(folder, run, *launch, devices):
    """Trains the script; returns its weights and its metrics."""
    trm(folder, *launch, "train", "mine.py", *OPTIONS, f"--run-dir={folder / run}", *devices)
    trm(folder, "export", run, "--plugin", "mine.py", "--no-check")
    metrics = json.loads((folder / run / "FINISHED").read_text())
    return bridge.load_weights(folder / run / "weights.safetensors"), metrics["loss"]


def test_a_sum_and_a_count_give_the_same_run_on_1_and_8_devices_and_2_processes_of_4(tmp_path):
    (tmp_path / "mine.py").write_text(EXACT)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    one, loss = trained(tmp_path, "one", devices=["--compute.cpu-devices=1"])
    for run, launch, devices in (
        ("eight", (), ["--compute.cpu-devices=8"]),
        ("two", ("launch", "--rehearse", "2x4", "--"), []),
    ):
        weights, its_loss = trained(tmp_path, run, *launch, devices=devices)
        assert its_loss == pytest.approx(loss, rel=1e-5)
        for name, tensor in one.items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-6)


def test_a_mean_gives_the_parameters_of_distributed_data_parallel(tmp_path):
    (tmp_path / "mine.py").write_text(MEAN)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, str(SUPPORT / "ddp_loop.py"), str(tmp_path / "mine.py"), "10", "16", "2"]
    ranks = [subprocess.Popen([*words, str(rank), str(port), str(tmp_path / "ddp.pt")]) for rank in range(2)]
    assert [rank.wait(300) for rank in ranks] == [0, 0]
    expected = torch.load(tmp_path / "ddp.pt", weights_only=True)
    weights, _ = trained(tmp_path, "two", devices=["--compute.cpu-devices=2"])
    for name, parameter in expected.items():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-4, atol=1e-6)
