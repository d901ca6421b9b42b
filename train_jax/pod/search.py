"""Compiles the train step of a run in several variants, to find those that fit and the one estimated fastest."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from train_jax.errors import UserError
from train_jax.pod.compile import Topology, compile_train_step, training_for
from train_jax.pod.results import Result
from train_jax.report.render import render_document
from train_jax.run.config import RunConfig
from train_jax.task import Task

PARTS = (1, 2, 4)
"""Values of `compute.accumulation_steps` that are tried; more if nothing fits."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """What a search varies."""

    global_batch_size: int
    remat: str
    accumulation_steps: int

    def of(self, config: RunConfig) -> RunConfig:
        compute = dataclasses.replace(config.compute, remat=self.remat, accumulation_steps=self.accumulation_steps)
        return dataclasses.replace(config, global_batch_size=self.global_batch_size, compute=compute)

    def needs_less_than(self, other: Variant) -> bool:
        """True if it needs no more memory than `other` in any case.

        Two parts need not be less than one: between parts, the sum of their gradients takes memory.
        """
        parts, of_other = self.accumulation_steps, other.accumulation_steps
        return (
            self.global_batch_size <= other.global_batch_size
            and other.remat in (self.remat, "")
            and (parts == of_other or parts > of_other > 1)
        )

    def __str__(self) -> str:
        remat = f" --compute.remat {self.remat}" if self.remat else ""
        parts = f" --compute.accumulation-steps {self.accumulation_steps}" if self.accumulation_steps > 1 else ""
        return f"--global-batch-size {self.global_batch_size}{remat}{parts}"


@dataclasses.dataclass(frozen=True)
class Tried:
    """A variant and what compiling it gave."""

    variant: Variant
    result: Result | None
    """None if the compiler or the run refuses the variant."""
    refusal: str = ""

    @property
    def fits(self) -> bool:
        return self.result is not None and self.result.fits

    @property
    def is_too_large(self) -> bool:
        """True if it was compiled, or the compiler refused it, and a device has not enough memory."""
        return "RESOURCE_EXHAUSTED" in self.refusal if self.result is None else not self.result.fits

    @property
    def cycles_per_example(self) -> float:
        """Estimated cycles of a device for each of its examples."""
        if self.result is None:
            return float("inf")
        local = self.variant.global_batch_size / len(self.result.topology.devices)
        return self.result.yardsticks.total.cycles / local

    @property
    def cells(self) -> tuple[str, str, str]:
        """GiB, millions of cycles, and thousands of cycles for an example; empty for a refused variant."""
        if self.result is None:
            return "", "", ""
        memory, cycles = self.result.compiled.memory.peak / 2**30, self.result.yardsticks.total.cycles / 1e6
        return f"{memory:.2f}", f"{cycles:.1f}", f"{self.cycles_per_example / 1e3:.1f}"

    def to_json(self) -> dict[str, Any]:
        figures = {} if self.result is None else self.result.to_json()
        figures |= dataclasses.asdict(self.variant) | {"fits": self.fits}
        return figures | ({"refusal": self.refusal} if self.result is None else {})


def variants(config: RunConfig, devices: int, batch_sizes: Sequence[int] = ()) -> list[Variant]:
    """Returns the variants of a run: every batch size, with and without recomputation, in one part or several."""
    remats = dict.fromkeys((config.compute.remat, "", "blocks"))
    return [
        Variant(size, remat, parts)
        for size in dict.fromkeys(batch_sizes or (config.global_batch_size,))
        for remat in remats
        for parts in sorted({*PARTS, config.compute.accumulation_steps})
        if size % (devices * parts) == 0
    ]


def search(
    name: str,
    config: RunConfig,
    task_of: Callable[[RunConfig], Task],
    topology: Topology,
    batch_sizes: Sequence[int],
    progress: Callable[[str], None],
) -> list[Tried]:
    """Compiles the variants one after the other, those that need the least memory first.

    A variant is not compiled if one that needs less memory does not fit. While none fits, the smallest batch is
    compiled with recomputation in twice as many parts. `progress` is called with what is compiled and with what came
    of it. Raises `UserError` if no batch size divides by the devices.
    """
    chosen = variants(config, len(topology.devices), batch_sizes)
    if not chosen:
        sizes = ", ".join(map(str, batch_sizes or (config.global_batch_size,)))
        raise UserError(f"no batch size of {sizes} is a multiple of {len(topology.devices)} devices")

    def compiled(variant: Variant) -> Tried:
        try:
            training = training_for(variant.of(config), task_of(variant.of(config)), topology)
            step = compile_train_step(training)
        except UserError as error:
            return Tried(variant, None, str(error))
        step = dataclasses.replace(step, executable=None, lowered=None)  # frees its memory
        return Tried(variant, Result.of(name, "train", training, topology, step))

    tried = compile_all(chosen, compiled, progress)
    while (more := smaller_parts(tried, len(topology.devices))) is not None:
        tried += compile_all([more], compiled, progress)
    return tried


def smaller_parts(tried: Sequence[Tried], devices: int) -> Variant | None:
    """Returns the next variant to compile while nothing fits: that with the least memory, in twice as many parts.

    None if one fits, if another reason than memory refuses that variant, or if its parts cannot be divided.
    """
    least = min(tried, key=lambda each: _memory_first(each.variant))
    parts = 2 * least.variant.accumulation_steps
    divides = least.variant.global_batch_size % (devices * parts) == 0
    if any(each.fits for each in tried) or not least.is_too_large or not divides:
        return None
    return dataclasses.replace(least.variant, accumulation_steps=parts)


def compile_all(
    chosen: Sequence[Variant], compiled: Callable[[Variant], Tried], progress: Callable[[str], None]
) -> list[Tried]:
    """Returns what `compiled` gives for each variant, in their order, without those that cannot fit."""
    tried: dict[Variant, Tried] = {}
    for number, variant in enumerate(sorted(chosen, key=_memory_first), 1):
        too_large = next(
            (each for each in tried.values() if each.is_too_large and each.variant.needs_less_than(variant)), None
        )
        if too_large is None:
            progress(f"{number} of {len(chosen)}: {variant} …")
            tried[variant] = compiled(variant)
        else:
            reason = f"not compiled, because {too_large.variant} needs less memory and does not fit"
            tried[variant] = Tried(variant, None, reason)
        memory, cycles, _ = tried[variant].cells
        fits = "fits" if tried[variant].fits else "does not fit"
        came_of_it = tried[variant].refusal or f"{memory} GiB, {fits}, {cycles} million estimated cycles"
        progress(f"{number} of {len(chosen)}: {variant}: {came_of_it}")
    return [tried[variant] for variant in chosen]


def _memory_first(variant: Variant) -> tuple:
    return variant.global_batch_size, not variant.remat, -variant.accumulation_steps


def best(tried: Sequence[Tried]) -> Tried | None:
    """Returns the variant with the fewest estimated cycles for an example among those that fit, None if none fits."""
    return min((each for each in tried if each.fits), key=lambda each: each.cycles_per_example, default=None)


def _best_first(tried: Sequence[Tried]) -> list[Tried]:
    return sorted(tried, key=lambda each: (not each.fits, each.cycles_per_example))


def lines(tried: Sequence[Tried], topology: Topology) -> Iterator[str]:
    """Yields the table for the terminal."""
    chosen = best(tried)
    yield f"{topology}"
    yield "one step on one device; compiled or estimated, never measured:"
    yield f"  {'GiB':>6} {'fits':>5} {'Mcycles':>8} {'per example':>12}  variant"
    for each in _best_first(tried):
        memory, cycles, per_example = each.cells
        refusal = f": {each.refusal}" if each.result is None else ""
        unit = " k" if per_example else ""
        fits = "yes" if each.fits else "no"
        yield f"  {memory:>6} {fits:>5} {cycles:>8} {per_example + unit:>12}  {each.variant}{refusal}"
    available = f"{topology.hbm_bytes / 2**30:.2f} GiB of a device"
    yield (
        f"no variant fits the {available}; use a smaller --search-batch-sizes or more chips"
        if chosen is None
        else f"estimated fastest in the {available}: {chosen.variant}"
    )


def search_page(name: str, tried: Sequence[Tried], topology: Topology) -> str:
    """Returns the HTML page of a search: every variant, the best one first, and what the compiler refused."""
    chosen = best(tried)
    rows = []
    for each in _best_first(tried):
        fits = "refused" if each.result is None else "yes" if each.fits else "no"
        rows.append((str(each.variant), fits, *each.cells))
    return render_document(
        "pod.html.j2",
        title=f"{name}, variants of the train step on {topology.name}",
        topology=topology,
        result=None,
        variants=rows,
        refused=[(each.variant, each.refusal) for each in tried if each.result is None],
        best=None if chosen is None else chosen.variant,
    )


def to_json(tried: Sequence[Tried]) -> dict[str, Any]:
    """Returns every figure of every variant, and which one is estimated fastest."""
    chosen = best(tried)
    return {
        "variants": [each.to_json() for each in tried],
        "best": None if chosen is None else dataclasses.asdict(chosen.variant),
    }
