"""Runs of training scripts in processes of their own: on devices and processes, and by DistributedDataParallel."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import torch

import bridge
from support.scripts import ENVIRONMENT

BATCH = 16


def trm(folder, *words):
    command = [sys.executable, "-m", "train_jax", *map(str, words)]
    done = subprocess.run(command, cwd=folder, env=os.environ | ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def trained_on(folder, path, run, *launch, steps, devices):
    """Trains the script on this number of devices; returns its weights. None for those that `launch` has."""
    options = [f"--steps={steps}", f"--global-batch-size={BATCH}", f"--eval-batch-size={BATCH}", "--wandb=disabled"]
    count = [] if devices is None else [f"--compute.cpu-devices={devices}"]
    trm(folder, *launch, "train", Path(path).name, *options, "--no-verify", f"--run-dir={folder / run}", *count)
    trm(folder, "export", run, "--plugin", Path(path).name, "--no-check")
    return bridge.load_weights(folder / run / "weights.safetensors")


def trained_by_ddp(folder, path, steps):
    """Trains the script in two processes of PyTorch with gloo; returns its parameters."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, str(Path(__file__).with_name("ddp_loop.py")), str(path), str(steps), str(BATCH), "2"]
    out = folder / "ddp.pt"
    ranks = [
        subprocess.Popen([*words, str(rank), str(port), str(out)], env=os.environ | ENVIRONMENT) for rank in range(2)
    ]
    assert [rank.wait(600) for rank in ranks] == [0, 0]
    return torch.load(out, weights_only=True)
