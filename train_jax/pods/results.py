"""The figures of a compiled step in JSON, and their lines for the terminal."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any

from train_jax.pods.compile import Compiled, Topology
from train_jax.pods.yardsticks import SPLITS, tables, yardsticks
from train_jax.run.performance import model_flops
from train_jax.trainer.start import Training


def figures_of(
    name: str, step: str, training: Training, topology: Topology, compiled: Compiled, rows: int = 0
) -> dict[str, Any]:
    """Returns every figure of a step, in bytes, FLOPs, cycles and seconds, of one device.

    None is measured on a TPU. `step` is `train`, `evaluate` or `decode`; `rows` are those of `decode`.
    """
    config, memory, products = training.config, compiled.memory, compiled.products
    sums = yardsticks(compiled.program, products.by_name)
    splits = {
        f"by_{split}": {
            part: dataclasses.asdict(cost)
            | {
                "hbm_seconds": cost.hbm_bytes / topology.hbm_bandwidth,
                "roofline_seconds": cost.product_flops / topology.peak_flops,
            }
            for part, cost in parts.items()
        }
        for split, parts in sums.splits.items()
    }
    return {
        "name": name,
        "step": step,
        "model": config.model,
        "topology": topology.name,
        "slice": str(topology),
        "devices": len(topology.devices),
        "hosts": topology.hosts,
        "batch_size": rows or (config.global_batch_size if step == "train" else config.eval_batch_size),
        "runner": config.compute.runner,
        "remat": config.compute.remat,
        "accumulation_steps": config.compute.accumulation_steps,
        "attention": config.compute.attention,
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
        "analytic_flops": model_flops(config, training.task, training.devices.count) if step == "train" else None,
        "roofline_seconds": products.total / topology.peak_flops,
        "estimated_cycles": sums.total.cycles,
        "estimated_seconds": None if topology.clock is None else sums.total.cycles / topology.clock,
        "kernels": sums.total.kernels,
        "hbm_bytes": sums.total.hbm_bytes,
        "prefetched_bytes": sums.prefetched_bytes,
        "hbm_seconds": sums.total.hbm_bytes / topology.hbm_bandwidth,
        **splits,
        "collectives": [dataclasses.asdict(each) for each in sums.collectives],
    }


def lines_of(figures: dict[str, Any]) -> Iterator[str]:
    """Yields the lines of these figures for the terminal."""
    memory, size = figures["memory"], figures["batch_size"]
    step, local = f"{figures['name']}, {figures['step']} step: {figures['model']}", size // figures["devices"]
    yield f"{step}, {size} examples ({local} on a device)"
    yield figures["slice"]
    yield f"traced and lowered in {figures['lower_seconds']:.1f} s, compiled in {figures['compile_seconds']:.1f} s"
    yield ""
    yield "one step on one device; compiled or estimated, never measured:"
    parts = ", ".join(f"{part} {_gib(memory[part])}" for part in ("arguments", "temporaries", "code"))
    verdict = "fits" if figures["fits"] else "DOES NOT FIT"
    yield f"  memory           {_gib(memory['peak'])} of {_gib(figures['hbm_capacity'])} GiB: {verdict} ({parts})"
    if not figures["fits"] and figures["step"] == "train":
        yield "                   --compute.remat blocks and --compute.accumulation-steps 2 need less memory"
    products, everything = _tera(figures["product_flops"]), _tera(figures["flops"])
    yield f"  FLOPs            {products} in matrix products; XLA counts {everything} in all, a loop once"
    if figures["analytic_flops"]:
        yield (
            f"                   forward and backward {_tera(figures['model_flops'])}, the analytic count "
            f"{_tera(figures['analytic_flops'])}; recomputed {_tera(figures['recomputed_flops'])}, optimizer "
            f"{_tera(figures['flops_outside_of_the_model'])}"
        )
    yield f"  at peak FLOP/s   {_ms(figures['roofline_seconds'])}"
    yield f"  HBM bytes        {figures['hbm_bytes'] / 1e9:.2f} GB, {_ms(figures['hbm_seconds'])} at peak bandwidth"
    yield f"                   and {figures['prefetched_bytes'] / 1e9:.2f} GB in copies beside other work"
    seconds = figures["estimated_seconds"]
    clock = "" if seconds is None else f", {_ms(seconds)} at the clock of the chip"
    yield f"  estimated cycles {figures['estimated_cycles'] / 1e6:.1f} M{clock}"
    if figures["kernels"]:
        yield f"                   without {figures['kernels']} Pallas kernels, which the compiler does not estimate"
    for each, count in Counter(tuple(each.values()) for each in figures["collectives"]).items():
        kind, size, asynchronous = each
        beside = "beside other work" if asynchronous else "nothing else runs meanwhile"
        yield f"  collective       {count} x {kind}, {size / 1e6:.2f} MB, {beside}"
    columns = {
        "Mcycles": lambda part: part["cycles"] / 1e6,
        "HBM ms": lambda part: part["hbm_seconds"] * 1e3,
        "peak ms": lambda part: part["roofline_seconds"] * 1e3,
    }
    yield from tables({split: figures[f"by_{split}"] for split in SPLITS}, columns)


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f}"


def _tera(flops: float) -> str:
    return f"{flops / 1e12:.3f} T"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
