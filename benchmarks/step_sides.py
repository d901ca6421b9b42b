"""One side of `benchmarks.step`, in its own process: builds a step, then runs it as often as requested.

    python -m benchmarks.step_sides SIDE PHASE FOLDER

It prints a line of JSON with the facts of the side once its first step is done. Then it reads numbers of steps from
standard input and prints, for each, the seconds of a step and the loss of the last one. The PyTorch sides import no
JAX.
"""

from __future__ import annotations

import dataclasses
import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

from models_torch.registry import build, config_class, example_batch
from train_jax.core.optim.config import OptimConfig

Side = Literal["eager", "compiled", "by hand", "bridge"]
Phase = Literal["train", "evaluate"]
Compiled = Literal["module", "blocks"]
START = "start.pt"
"""The state dict from which all sides start."""


@dataclasses.dataclass(frozen=True)
class Case:
    """The case to measure: a model, an optimizer and a batch of random examples."""

    arch: dict[str, Any]
    """Fields of `TRMConfig`."""
    optim: dict[str, Any]
    """Fields of `OptimConfig` that differ from its defaults."""
    batch_size: int
    cpu_examples: int = 0
    """Value of `--compute.cpu-examples` for the JAX sides on a CPU."""
    cpu_devices: int = 0
    """Virtual devices of the JAX sides on a CPU; 0 for one, or with `cpu_examples` one for each core."""
    mlp: Literal["plain", "fused"] = "plain"
    """`--compute.mlp` of the bridge."""
    torch_compile: Compiled = "module"
    """Scope of `torch.compile`."""

    def config(self) -> Any:
        return config_class("trm")(**self.arch)

    def optimizer(self) -> OptimConfig:
        return OptimConfig(**self.optim)


@dataclasses.dataclass
class Running:
    """A step that can be run."""

    dispatch: Callable[[], Any]
    """Starts a step and returns its loss, which may not be computed yet."""
    device: str
    flops: float = 0.0
    """FLOPs of the matrix products of a step; 0 if they were not counted."""
    peak_flops: float = 0.0
    """Peak FLOP/s of the device; 0 if it is not known."""
    memory: Callable[[], int] = lambda: 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    """Returns the peak memory so far in bytes: of the device or, on a CPU, of the process."""

    def run(self, steps: int) -> tuple[float, float]:
        """Returns the seconds of a step and the loss of the last one."""
        began = time.perf_counter()
        loss: Any = None
        for _ in range(steps):
            loss = self.dispatch()
        value = float(loss)  # waits for the device
        return (time.perf_counter() - began) / steps, value


def _module_in_torch(case: Case, folder: Path, phase: Phase, device: torch.device) -> Any:
    """Returns the module of a case on `device`, with the weights that every side starts from."""
    module = build("trm", case.config()).train(phase == "train")
    module.load_state_dict(torch.load(folder / START, weights_only=True))
    return module.to(device)


def _compiled(module: Any, case: Case) -> Any:
    """Compiles the whole module or the blocks of its network, whichever `torch.compile` serves better."""
    if case.torch_compile == "module":
        return torch.compile(module)
    module.model.inner.L_level.compile()
    return module


def in_torch(case: Case, folder: Path, phase: Phase, compiled: bool) -> Running:
    """Builds the PyTorch side: the module, fused AdamW, the EMA and the update of the puzzle rows."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = case.config()
    optim = case.optimizer()
    module = _module_in_torch(case, folder, phase, device)
    batch = {name: tensor.to(device) for name, tensor in example_batch(config, case.batch_size, seed=0).items()}
    forward = _compiled(module, case) if compiled else module
    params = list(module.parameters())
    table = module.model.inner.puzzle_emb
    ema = [parameter.detach().clone() for parameter in params]
    betas = optim.beta1, optim.beta2
    optimizer = torch.optim.AdamW(params, lr=optim.lr, betas=betas, weight_decay=optim.weight_decay, fused=True)
    with device:
        carry = module.initial_carry(batch)

    @torch.no_grad()
    def update_rows() -> None:
        ids, where = table.local_ids.unique(return_inverse=True)
        sums = torch.zeros(len(ids), table.weights.shape[1], device=device)
        sums.index_add_(0, where, table.local_weights.grad)
        decay = 1 - optim.sparse_lr * optim.sparse_weight_decay
        table.weights[ids] = decay * table.weights[ids] - optim.sparse_lr * sums.sign()
        table.local_weights.grad = None

    def train() -> torch.Tensor:
        nonlocal carry
        carry, loss, metrics, *_ = forward(carry=carry, batch=batch)
        (loss / case.batch_size).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch._foreach_lerp_(ema, params, 1 - optim.ema_decay)
        update_rows()
        return metrics["lm_loss"].detach()

    @torch.no_grad()
    def evaluate() -> torch.Tensor:
        with device:
            current = module.initial_carry(batch)
            metrics = {}
        for _ in range(config.halt_max_steps):
            current, _, metrics, *_ = forward(carry=current, batch=batch)
        return metrics["lm_loss"]

    running = Running(train if phase == "train" else evaluate, f"{torch.get_num_threads()} threads of the CPU")
    if device.type == "cuda":
        running.device = torch.cuda.get_device_name(device)
        running.memory = torch.cuda.max_memory_allocated
    return running


def in_jax(case: Case, folder: Path, phase: Phase, bridged: bool) -> Running:
    """Builds the JAX side: the steps of the trainer, with the module through the bridge or `benchmarks.trm_jnp`."""
    import jax

    from benchmarks.example_puzzles import ExamplePuzzles, example_run
    from benchmarks.overhead import by_hand
    from train_jax.pods.flops import products
    from train_jax.puzzles.scan import make_eval_step
    from train_jax.run.config import ComputeConfig
    from train_jax.runtime import backend
    from train_jax.runtime.devices import Devices
    from train_jax.trainer.start import start

    compute = ComputeConfig(
        mlp=case.mlp if bridged else "plain", cpu_examples=case.cpu_examples, cpu_devices=case.cpu_devices
    )
    start_from = {"init_from": str(folder / START), "optim": case.optimizer(), "compute": compute}
    run = example_run("trm", case.config(), steps=1000, eval_batch_size=case.batch_size, **start_from)
    backend.use("auto", several=False, cpu_devices=run.virtual_devices(1))
    count = jax.local_device_count() if jax.default_backend() == "cpu" else 1
    training = start(run, ExamplePuzzles(run), Devices(count))
    training = training if bridged else by_hand(training, case.config())
    devices = training.devices
    batch = training.batches.at(0)
    initial = training.initial_state()
    state, key = devices.replicate(initial), devices.random_key(0)
    if phase == "train":
        carry = devices.shard(training.initial_carry(initial, batch))
        step = training.parallel_step()
        batch = devices.shard(batch)
        jaxpr = jax.make_jaxpr(step)(state, carry, batch, key)

        def dispatch() -> Any:
            nonlocal state, carry
            state, carry, metrics = step(state, carry, batch, key)
            return metrics["lm_loss"]

    else:
        limit = case.config().halt_max_steps
        step = devices.parallel_eval_step(make_eval_step(training.objective, limit, metrics_only=True))
        shares = devices.shard(batch)
        jaxpr = jax.make_jaxpr(step)(state, shares)

        def dispatch() -> Any:
            return step(state, shares)[0]["lm_loss"]

    return _running(dispatch, count, count * products(jaxpr).total)


def _running(dispatch: Callable[[], Any], count: int, flops: float) -> Running:
    import jax

    from train_jax.run.performance import PEAK_BF16_FLOPS

    device = jax.devices()[0]
    kind = device.device_kind if count == 1 else f"{count} devices: {device.device_kind}"
    running = Running(lambda: _Loss(dispatch()), kind, flops)
    running.peak_flops = PEAK_BF16_FLOPS.get(device.device_kind, 0.0)
    if device.platform != "cpu":
        running.memory = lambda: (device.memory_stats() or {})["peak_bytes_in_use"]
    return running


class _Loss:
    """A replicated scalar that is fetched as a float."""

    def __init__(self, array: Any):
        self._array = array

    def __float__(self) -> float:
        return float(self._array.ravel()[0])


def main(side: Side, phase: Phase, folder: Path) -> None:
    case = Case(**json.loads((folder / "case.json").read_text()))
    began = time.perf_counter()
    if side in ("eager", "compiled"):
        running = in_torch(case, folder, phase, compiled=side == "compiled")
    else:
        running = in_jax(case, folder, phase, bridged=side == "bridge")
    _, loss = running.run(1)
    facts = {"device": running.device, "flops": running.flops, "peak_flops": running.peak_flops, "first_loss": loss}
    print(json.dumps(facts | {"first_step_s": time.perf_counter() - began}), flush=True)
    for line in sys.stdin:
        seconds, loss = running.run(int(line))
        print(json.dumps({"seconds": seconds, "loss": loss, "memory": running.memory()}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))  # type: ignore[arg-type]
