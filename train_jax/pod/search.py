"""Compiles the train step of a run in several variants, to find those that fit and the one with the lowest estimate."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from train_jax.errors import UserError
from train_jax.pod.compile import Topology
from train_jax.run.config import RunConfig

PARTS = (1, 2, 4)
"""Values of `compute.accumulation_steps` that are tried, besides that of the run."""
REMAT = ("", "blocks")
"""Values of `compute.remat` that are tried, besides that of the run."""
Figures = dict[str, Any]
"""The result of `figures_of` for a variant; if refused, only `fits`, `refusal` and the options that distinguish it."""


def variants(config: RunConfig, devices: int, batch_sizes: Sequence[int] = ()) -> list[RunConfig]:
    """Returns the variants of a run: every batch size, with and without recomputation, in one or several parts.

    Raises `UserError` if no batch size divides by the devices.
    """
    sizes = dict.fromkeys(batch_sizes or (config.global_batch_size,))
    remats = dict.fromkeys((config.compute.remat, *REMAT))
    parts = sorted({*PARTS, config.compute.accumulation_steps})
    chosen = []
    for size, remat, count in itertools.product(sizes, remats, parts):
        if size % (devices * count) == 0:
            compute = dataclasses.replace(config.compute, remat=remat, accumulation_steps=count)
            chosen.append(dataclasses.replace(config, global_batch_size=size, compute=compute))
    if not chosen:
        raise UserError(f"no batch size of {', '.join(map(str, sizes))} is a multiple of {devices} devices")
    return chosen


def compile_all(
    chosen: Sequence[RunConfig], compiled: Callable[[RunConfig], Figures], progress: Callable[[str], None]
) -> list[Figures]:
    """Returns the figures of the variants, which `compiled` gives, the best first.

    A variant that it refuses with `UserError` stays among them. `progress` is called before and after each.
    """
    tried = []
    for number, config in enumerate(chosen, 1):
        compute = config.compute
        figures: Figures = {"batch_size": config.global_batch_size, "remat": compute.remat}
        figures["accumulation_steps"] = compute.accumulation_steps
        progress(f"{number} of {len(chosen)}: {_options(figures)} …")
        try:
            figures |= compiled(config)
        except UserError as error:
            figures |= {"fits": False, "refusal": str(error)}
        tried.append(figures)
        progress(_line(figures).strip())
    return sorted(tried, key=lambda figures: (not figures["fits"], _cycles_per_example(figures)))


def _cycles_per_example(figures: Figures) -> float:
    """Returns the estimated cycles of a device for each of its examples."""
    if "refusal" in figures:
        return float("inf")
    return figures["estimated_cycles"] * figures["devices"] / figures["batch_size"]


def _options(figures: Figures) -> str:
    """Returns the options that make a run this variant."""
    remat = f" --compute.remat {figures['remat']}" if figures["remat"] else ""
    count = figures["accumulation_steps"]
    parts = f" --compute.accumulation-steps {count}" if count > 1 else ""
    return f"--global-batch-size {figures['batch_size']}{remat}{parts}"


def _line(figures: Figures) -> str:
    """Returns the line of the table: GiB, millions of cycles, thousands of cycles for an example."""
    if "refusal" in figures:
        return f"  {'':>6} {'no':>5} {'':>8} {'':>12}  {_options(figures)}: {figures['refusal']}"
    memory, cycles = figures["memory"]["peak"] / 2**30, figures["estimated_cycles"] / 1e6
    fits, each = "yes" if figures["fits"] else "no", _cycles_per_example(figures) / 1e3
    return f"  {memory:>6.2f} {fits:>5} {cycles:>8.1f} {each:>10.1f} k  {_options(figures)}"


def lines(tried: Sequence[Figures], topology: Topology) -> Iterator[str]:
    """Yields the table for the terminal; `tried` has the best variant first."""
    yield f"{topology}"
    yield "one step on one device; compiled or estimated, never measured:"
    yield f"  {'GiB':>6} {'fits':>5} {'Mcycles':>8} {'per example':>12}  variant"
    yield from map(_line, tried)
    available = f"{topology.hbm_bytes / 2**30:.2f} GiB of a device"
    if tried[0]["fits"]:
        yield f"estimated fastest in the {available}: {_options(tried[0])}"
    else:
        yield (
            f"no variant fits the {available}; use a smaller --search-batch-sizes, a larger "
            "--compute.accumulation-steps, or more chips"
        )
