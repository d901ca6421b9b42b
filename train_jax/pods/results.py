"""The figures of a compiled step in JSON, and their lines for the terminal."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from train_jax.pods.bundles import Schedules
from train_jax.pods.compile import Compiled
from train_jax.pods.hlo import Instruction
from train_jax.pods.topologies import Topology
from train_jax.pods.yardsticks import SPLITS, Yardsticks, tables, yardsticks
from train_jax.run.performance import model_flops
from train_jax.trainer.start import Training


def figures_of(
    name: str,
    step: str,
    training: Training,
    topology: Topology,
    compiled: Compiled,
    *,
    schedules: Schedules | None = None,
    rows: int = 0,
) -> dict[str, Any]:
    """Returns every figure of a step, in bytes, FLOPs, bundles and cycles, of one device.

    None is measured. `step` is `train`, `evaluate` or `decode`; `rows` are those of `decode`. `schedules` are those of
    the kernels for a TPU v4.
    """
    sums = _sums(compiled, topology)
    scheduled = _scheduled(compiled, schedules) if schedules else None
    return {
        **_identity(name, step, training, topology, rows),
        **_memory_and_flops(training, topology, compiled, is_train=step == "train"),
        "bundles": scheduled.total.cycles if scheduled else None,
        "estimated_cycles": sums.total.cycles,
        "instructions": sums.total.instructions,
        "kernels": sums.total.kernels,
        "is_gpu": topology.is_gpu,
        "hbm_bytes": sums.total.hbm_bytes,
        "prefetched_bytes": sums.prefetched_bytes,
        **{f"by_{split}": _parts(sums, scheduled, split) for split in SPLITS},
        "collectives": [dataclasses.asdict(each) for each in sums.collectives],
    }


def _identity(name: str, step: str, training: Training, topology: Topology, rows: int) -> dict[str, Any]:
    config = training.config
    batch_size = config.global_batch_size if step == "train" else config.eval_batch_size
    return {
        "name": name,
        "step": step,
        "model": config.model,
        "topology": topology.name,
        "slice": str(topology),
        "devices": len(topology.devices),
        "hosts": topology.hosts,
        "batch_size": rows or batch_size,
        "runner": config.compute.runner,
        "remat": config.compute.remat,
        "accumulation_steps": config.compute.accumulation_steps,
        "attention": config.compute.attention,
    }


def _memory_and_flops(training: Training, topology: Topology, compiled: Compiled, *, is_train: bool) -> dict[str, Any]:
    config = training.config
    memory = compiled.memory
    products = compiled.products
    return {
        "lower_seconds": compiled.lower_seconds,
        "compile_seconds": compiled.compile_seconds,
        "memory": dataclasses.asdict(memory) | {"peak": memory.peak},
        "hbm_capacity": topology.hbm_bytes,
        "fits": memory.peak <= topology.hbm_bytes,
        "flops": compiled.flops,
        "product_flops": products.total,
        "model_flops": products.of_model,
        "recomputed_flops": products.recomputed,
        "flops_outside_of_the_model": products.outside,
        "analytic_flops": model_flops(config, training.task, training.devices.count) if is_train else None,
        "peak_flops": topology.peak_flops,
        "roofline_seconds": products.total / topology.peak_flops,
        "dispatches": training.total_steps / config.compute.steps_per_dispatch if is_train else None,
    }


def _sums(compiled: Compiled, topology: Topology) -> Yardsticks:
    products = compiled.products.by_name
    if topology.is_gpu:
        return yardsticks(compiled.program, products, counts=lambda each: each.launches)
    return yardsticks(compiled.program, products)


def _scheduled(compiled: Compiled, schedules: Schedules) -> Yardsticks:
    def bundles(each: Instruction) -> int:
        return schedules.of(each) or 0

    return yardsticks(compiled.program, cycles=bundles)


def _parts(sums: Yardsticks, scheduled: Yardsticks | None, split: str) -> dict[str, dict[str, float]]:
    """Returns the costs of every part of a split, with its bundles if they are known; the largest first."""
    known = scheduled.splits[split] if scheduled else {}
    parts = {name: dataclasses.asdict(cost) for name, cost in sums.splits[split].items()}
    for name, part in parts.items():
        part["bundles"] = known[name].cycles if name in known else 0
    return dict(sorted(parts.items(), key=lambda item: -item[1]["bundles"])) if known else parts


def lines_of(figures: dict[str, Any]) -> Iterator[str]:
    """Yields the lines of these figures for the terminal."""
    memory = figures["memory"]
    size = figures["batch_size"]
    step = f"{figures['name']}, {figures['step']} step: {figures['model']}"
    local = size // figures["devices"]
    yield f"{step}, {size} examples ({local} on a device)"
    yield figures["slice"]
    yield f"traced and lowered in {figures['lower_seconds']:.1f} s, compiled in {figures['compile_seconds']:.1f} s"
    yield ""
    yield "one step on one device; compiled, never measured:"
    parts = ", ".join(f"{part} {_size(memory[part])}" for part in ("arguments", "temporaries", "code"))
    verdict = "fits" if figures["fits"] else "DOES NOT FIT"
    yield f"  memory           {_size(memory['peak'])} of {_gib(figures['hbm_capacity'])} GiB: {verdict} ({parts})"
    if not figures["fits"] and figures["step"] == "train":
        yield "                   --compute.remat blocks and --compute.accumulation-steps 2 need less memory"
    if figures["bundles"] is not None:
        yield f"  bundles          {_in_units(figures['bundles'], 1).strip()}, at most one in a cycle of a core"
    if figures["is_gpu"]:
        yield f"  kernels          {figures['instructions']}"
    yield f"  HBM bytes        {_in_units(figures['hbm_bytes'], 2)}B"
    if figures["prefetched_bytes"]:
        yield f"                   and {_in_units(figures['prefetched_bytes'], 2)}B in copies beside other work"
    everything = f"; XLA counts {_flops(figures['flops'])} in all, a loop once" if figures["flops"] else ""
    yield f"  FLOPs            {_flops(figures['product_flops'])} in matrix products{everything}"
    if figures["analytic_flops"]:
        yield (
            f"                   forward and backward {_flops(figures['model_flops'])}, the analytic count "
            f"{_flops(figures['analytic_flops'])}; recomputed {_flops(figures['recomputed_flops'])}, optimizer "
            f"{_flops(figures['flops_outside_of_the_model'])}"
        )
    yield from _least_time(figures)
    for each, count in Counter(tuple(each.values()) for each in figures["collectives"]).items():
        kind, size, asynchronous = each
        beside = "beside other work" if asynchronous else "nothing else runs meanwhile"
        yield f"  collective       {count} x {kind}, {_in_units(size, 2)}B, {beside}"
    yield from tables({split: figures[f"by_{split}"] for split in SPLITS}, _columns(figures))


def _least_time(figures: dict[str, Any]) -> Iterator[str]:
    """Yields the time below which no program with these products can be, for a step and for a run."""
    least = figures["roofline_seconds"]
    yield f"  at peak FLOP/s   {_milliseconds(least)}, a bound and not an estimate"
    if figures["dispatches"]:
        steps = figures["dispatches"]
        run = least * steps / 60
        yield f"                   x {steps:.0f} steps: {run:.1f} minutes at the peak, {run / 0.2:.0f} at 20 % of it"


def _columns(figures: dict[str, Any]) -> dict[str, Callable[[dict[str, float]], float]]:
    """Returns the columns of the tables: bundles of a TPU v4, or kernels of a GPU, then bytes and FLOPs.

    Each has the unit that suits its sum, such as TFLOP.
    """
    columns: dict[str, Callable[[dict[str, float]], float]] = {}
    if figures["bundles"] is not None:
        columns |= _column("{}bundles", "bundles", figures["bundles"])
    if figures["is_gpu"]:
        columns["kernels"] = lambda part: part["instructions"]
    columns |= _column("HBM {}B", "hbm_bytes", figures["hbm_bytes"])
    columns |= _column("{}FLOP", "product_flops", figures["product_flops"])
    return columns


def _column(title: str, key: str, total: float) -> dict[str, Callable[[dict[str, float]], float]]:
    prefix = _prefix(total)
    return {title.format(prefix): lambda part: part[key] / _PREFIXES[prefix]}


_PREFIXES = {"T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "": 1.0}


def _prefix(largest: float) -> str:
    """Returns the prefix of the unit in which the largest of some numbers is at least 1, and "" for 0."""
    return next((prefix for prefix, factor in _PREFIXES.items() if largest >= factor), "")


def _in_units(number: float, digits: int) -> str:
    """Returns a number with its prefix, such as `7.038 T`, to which a unit can be added."""
    prefix = _prefix(number)
    return f"{number / _PREFIXES[prefix]:.{digits}f} {prefix}" if number else "0 "


def _flops(number: float) -> str:
    return _in_units(number, 3).strip()


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f}"


def _size(size: float) -> str:
    """Returns a size in GiB without its unit, or in MiB or KiB with it if it is less than a hundredth of a GiB."""
    if size >= 2**30 / 100 or not size:
        return _gib(size)
    return f"{size / 2**20:.2f} MiB" if size >= 2**20 / 100 else f"{size / 2**10:.2f} KiB"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-4 or not seconds else f"{seconds * 1e6:.3g} µs"
