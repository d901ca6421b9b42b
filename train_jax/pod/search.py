"""Compiles the train step of a run in several variants, to find those that fit and the one estimated fastest."""

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


@dataclasses.dataclass(frozen=True)
class Variant:
    """A train step with other fields than the run, and what compiling it gave."""

    config: RunConfig
    figures: dict[str, Any] | None = None
    """None if the compiler or the run refuses the variant."""
    refusal: str = ""

    @property
    def fits(self) -> bool:
        return self.figures is not None and self.figures["fits"]

    @property
    def cycles_per_example(self) -> float:
        """Estimated cycles of a device for each of its examples."""
        if self.figures is None:
            return float("inf")
        return self.figures["estimated_cycles"] * self.figures["devices"] / self.config.global_batch_size

    @property
    def fields(self) -> dict[str, Any]:
        """What distinguishes a variant."""
        compute = self.config.compute
        parts = {"remat": compute.remat, "accumulation_steps": compute.accumulation_steps}
        return {"global_batch_size": self.config.global_batch_size} | parts

    def to_json(self) -> dict[str, Any]:
        return (self.figures or {"refusal": self.refusal}) | self.fields | {"fits": self.fits}

    def __str__(self) -> str:
        compute = self.config.compute
        remat = f" --compute.remat {compute.remat}" if compute.remat else ""
        parts = f" --compute.accumulation-steps {compute.accumulation_steps}" if compute.accumulation_steps > 1 else ""
        return f"--global-batch-size {self.config.global_batch_size}{remat}{parts}"

    def line(self) -> str:
        """Returns its line of the table: GiB, millions of cycles, thousands of cycles for an example."""
        if self.figures is None:
            return f"  {'':>6} {'no':>5} {'':>8} {'':>12}  {self}: {self.refusal}"
        memory, cycles = self.figures["memory"]["peak"] / 2**30, self.figures["estimated_cycles"] / 1e6
        fits, each = "yes" if self.fits else "no", self.cycles_per_example / 1e3
        return f"  {memory:>6.2f} {fits:>5} {cycles:>8.1f} {each:>10.1f} k  {self}"


def variants(config: RunConfig, devices: int, batch_sizes: Sequence[int] = ()) -> list[Variant]:
    """Returns the variants of a run: every batch size, with and without recomputation, in one part or several.

    Raises `UserError` if no batch size divides by the devices.
    """
    sizes = list(dict.fromkeys(batch_sizes or (config.global_batch_size,)))
    remats = dict.fromkeys((config.compute.remat, *REMAT))
    parts = sorted({*PARTS, config.compute.accumulation_steps})
    if not any(size % devices == 0 for size in sizes):
        raise UserError(f"no batch size of {', '.join(map(str, sizes))} is a multiple of {devices} devices")
    return [
        Variant(dataclasses.replace(
            config, global_batch_size=size,
            compute=dataclasses.replace(config.compute, remat=remat, accumulation_steps=count),
        ))
        for size, remat, count in itertools.product(sizes, remats, parts)
        if size % (devices * count) == 0
    ]  # fmt: skip


def compile_all(
    chosen: Sequence[Variant], compiled: Callable[[RunConfig], dict[str, Any]], progress: Callable[[str], None]
) -> list[Variant]:
    """Returns the variants with their figures, which `compiled` gives, the best first. What it refuses stays among
    them. `progress` is called before and after each."""
    tried = []
    for number, variant in enumerate(chosen, 1):
        progress(f"{number} of {len(chosen)}: {variant} …")
        try:
            tried.append(dataclasses.replace(variant, figures=compiled(variant.config)))
        except UserError as error:
            tried.append(dataclasses.replace(variant, refusal=str(error)))
        progress(tried[-1].line().strip())
    return sorted(tried, key=lambda each: (not each.fits, each.cycles_per_example))


def lines(tried: Sequence[Variant], topology: Topology) -> Iterator[str]:
    """Yields the table for the terminal; `tried` has the best variant first."""
    yield f"{topology}"
    yield "one step on one device; compiled or estimated, never measured:"
    yield f"  {'GiB':>6} {'fits':>5} {'Mcycles':>8} {'per example':>12}  variant"
    yield from (each.line() for each in tried)
    available = f"{topology.hbm_bytes / 2**30:.2f} GiB of a device"
    if tried[0].fits:
        yield f"estimated fastest in the {available}: {tried[0]}"
    else:
        yield (
            f"no variant fits the {available}; use a smaller --search-batch-sizes, a larger "
            "--compute.accumulation-steps, or more chips"
        )


def to_json(tried: Sequence[Variant]) -> dict[str, Any]:
    """Returns every figure of every variant, and the fields of the one that fits and is estimated fastest."""
    return {
        "variants": [each.to_json() for each in tried],
        "best": tried[0].fields if tried[0].fits else None,
    }
