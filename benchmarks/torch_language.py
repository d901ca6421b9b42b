"""Trains a language model of November 2025 in plain PyTorch, on the batches and from the weights of a run in JAX.

As a script: `python -m benchmarks.torch_language RUN OUT.json` trains as long as the run did, and evaluates as it does.
"""

import dataclasses
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch

import bridge
from benchmarks.nanochat_optimizers import Muon2025, momentum, warmdown
from train_jax.language.batches import count_rows, eval_batches
from train_jax.language.task import figures_of
from train_jax.run.folder import read_run
from train_jax.run.model import build_module
from train_jax.runtime.devices import Devices
from train_jax.trainer.start import start


@dataclasses.dataclass(frozen=True)
class Rates:
    """Peaks of the learning rates, and the share of the steps in which they fall to 0."""

    blocks: float
    wte: float
    lm_head: float
    decay_share: float = 0.2


def train(training, rates, steps, *, report=lambda step, loss: None):
    """Returns the trained module and the loss of every step; AdamW for embedding and head, Muon for the blocks."""
    model = initial_module(training)
    muon = Muon2025(torch.float32)
    adamw = torch.optim.AdamW(
        [
            {"params": [model.get_parameter("transformer.wte.weight")], "lr": rates.wte},
            {"params": [model.get_parameter("lm_head.weight")], "lr": rates.lm_head},
        ],
        betas=(0.8, 0.95),
        eps=1e-10,
        weight_decay=0.0,
    )
    peaks, losses = [group["lr"] for group in adamw.param_groups], []
    for step in range(steps):
        model.zero_grad()
        loss = model(*on_host(training.task.batch(step, (0, 1))))
        loss.backward()
        losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rate = warmdown(step, 0, rates.decay_share, 0.0, steps)
        now = momentum(step, 0.85, 300, 0.95, 0.95, rates.decay_share, steps)
        for group, peak in zip(adamw.param_groups, peaks, strict=True):
            group["lr"] = peak * rate
        adamw.step()
        with torch.no_grad():
            for name, p in model.named_parameters():
                if ".h." in name:
                    muon.step(name, p, rates.blocks * rate, now)
        report(step, losses[-1])
    return model, np.array(losses)


def initial_module(training):
    """Returns the module with the weights that the run in JAX starts from."""
    fn = training.objective.fn
    model = build_module(training.config, training.task, training.config.global_batch_size)
    model.load_state_dict(bridge.state_dict(fn, fn.params, fn.buffers), strict=True)
    return model


def on_host(batch):
    """Inputs and targets as PyTorch tensors."""
    return tuple(torch.from_numpy(batch[name].astype(np.int64)) for name in ("inputs", "targets"))


@torch.inference_mode()
def evaluate(model, task, rows):
    """Returns the figures of `trm evaluate` on all held-out tokens, in float64 sums."""
    model.eval()
    stream, sizes = task.test_stream, torch.from_numpy(task.token_bytes.astype(np.int64))
    seq_len = model.config.seq_len
    sums: dict[str, float] = dict.fromkeys(("loss", "tokens", "nats", "bytes"), 0.0)
    for batch in eval_batches(stream, rows=rows, seq_len=seq_len, limit=count_rows(stream, seq_len), shard=(0, 1)):
        tokens, targets = on_host(batch)
        losses = model(tokens, targets, loss_reduction="none").reshape(-1).double()
        targets = targets.reshape(-1)
        counts = targets >= 0
        of_bytes = sizes[targets.clamp(0)] * counts
        sums["loss"] += losses[counts].sum().item()
        sums["tokens"] += counts.sum().item()
        sums["nats"] += losses[of_bytes > 0].sum().item()
        sums["bytes"] += of_bytes.sum().item()
    return figures_of(sums)


def rates_of(optim):
    """The rates of a run whose groups are blocks, embedding and head; everything else has to be as published."""
    blocks, wte, lm_head = optim.groups
    published = dataclasses.replace(optim, groups=(), decay_share=0.2, lr=0.0)
    expected = {"optimizer": "adamw", "beta1": 0.8, "beta2": 0.95, "eps": 1e-10, "weight_decay": 0.0}
    expected |= {"clip_norm": 1.0, "ema_decay": 0.0, "warmup_steps": 0, "decay": "warmdown", "lr_min_ratio": 0.0}
    expected |= {"newton_schulz_dtype": "float32"}
    assert {name: getattr(published, name) for name in expected} == expected
    assert (blocks.optimizer, blocks.momentum_start, blocks.momentum_warmup_steps) == ("muon_2025", 0.85, 300)
    return Rates(blocks.lr, wte.lr, lm_head.lr, optim.decay_share)


def main(run_dir, out):
    _, config = read_run(run_dir)
    training = start(config, devices=Devices(1))
    begun = time.perf_counter()

    def report(step, loss):
        if (step + 1) % config.log_every_steps == 0:
            seconds = time.perf_counter() - begun
            print(f"step {step + 1}/{training.total_steps}  loss {loss:.4f}  {seconds:.0f} s", flush=True)

    model, losses = train(training, rates_of(config.optim), training.total_steps, report=report)
    seconds = time.perf_counter() - begun
    figures = evaluate(model, training.task, config.eval_batch_size)
    Path(out).write_text(json.dumps({"figures": figures, "losses": losses.tolist(), "seconds": seconds}))


if __name__ == "__main__":
    main(*sys.argv[1:])
