"""The figures of a compiled step: as JSON, and as text for the terminal."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from train_jax.pod.compile import Compiled
from train_jax.pod.schedule import Schedules
from train_jax.pod.topology import Topology
from train_jax.pod.yardsticks import Cost, Yardsticks, yardsticks
from train_jax.run.performance import model_flops
from train_jax.start import Training

MODULES_SHOWN = 12


@dataclasses.dataclass(frozen=True)
class Result:
    """What compilation tells about a train step. All figures are of one device; none is measured on a TPU."""

    name: str
    step: str
    """`train` or `evaluate`."""
    training: Training
    topology: Topology
    compiled: Compiled
    yardsticks: Yardsticks
    analytic_flops: float | None = None
    """Of one forward and one backward pass, from the sizes of the model; None if they are not known."""

    @classmethod
    def of(
        cls,
        name: str,
        step: str,
        training: Training,
        topology: Topology,
        compiled: Compiled,
        schedules: Schedules | None = None,
    ) -> Result:
        least = model_flops(training.config, training.task, training.devices.count) if step == "train" else None
        sums = yardsticks(compiled.program, schedules, compiled.products.by_name)
        return cls(name, step, training, topology, compiled, sums, least)

    @property
    def batch_size(self) -> int:
        """Examples of a step, on all devices together."""
        config = self.training.config
        return config.global_batch_size if self.step == "train" else config.eval_batch_size

    @property
    def fits(self) -> bool:
        return self.compiled.memory.peak <= self.topology.hbm_bytes

    @property
    def roofline_seconds(self) -> float:
        """The matrix products at the peak of the device."""
        return self.compiled.product_flops / self.topology.peak_flops

    @property
    def hbm_seconds(self) -> float:
        """The bytes to and from memory at its bandwidth."""
        return self.yardsticks.total.hbm_bytes / self.topology.hbm_bandwidth

    @property
    def estimated_seconds(self) -> float | None:
        return self._at_clock(self.yardsticks.total.cycles)

    @property
    def scheduled_seconds(self) -> float | None:
        """The scheduled bundles, one in a cycle. None without schedules, and where the clock is not known."""
        total = self.yardsticks.total
        return self._at_clock(total.bundles) if total.scheduled else None

    def _at_clock(self, cycles: float) -> float | None:
        clock = self.topology.clock
        return None if clock is None else cycles / clock

    def to_json(self) -> dict[str, Any]:
        """Returns every figure, in bytes, FLOPs, cycles and seconds."""
        compiled, sums = self.compiled, self.yardsticks
        config = self.training.config
        return {
            "name": self.name,
            "step": self.step,
            "model": config.model,
            "topology": self.topology.name,
            "megacore": self.topology.megacore,
            "devices": len(self.topology.devices),
            "hosts": self.topology.hosts,
            "batch_size": self.batch_size,
            "runner": config.compute.runner,
            "remat": config.compute.remat,
            "accumulation_steps": config.compute.accumulation_steps,
            "lower_seconds": compiled.lower_seconds,
            "compile_seconds": compiled.compile_seconds,
            "memory": dataclasses.asdict(compiled.memory) | {"peak": compiled.memory.peak},
            "hbm_capacity": self.topology.hbm_bytes,
            "fits": self.fits,
            "flops": compiled.flops,
            "product_flops": compiled.product_flops,
            "recomputed_flops": compiled.products.recomputed,
            "flops_outside_of_the_model": compiled.products.outside,
            "analytic_flops": self.analytic_flops,
            "estimated_cycles": sums.total.cycles,
            "estimated_seconds": self.estimated_seconds,
            "kernels": sums.total.kernels,
            "kernel_bundles": sums.total.kernel_bundles,
            "attention": config.compute.attention,
            "scheduled_bundles": sums.total.bundles if sums.total.scheduled else None,
            "scheduled_seconds": self.scheduled_seconds,
            "scheduled_instructions": sums.total.scheduled,
            "hbm_bytes": sums.total.hbm_bytes,
            "hbm_seconds": self.hbm_seconds,
            "prefetched_bytes": sums.prefetched_bytes,
            "roofline_seconds": self.roofline_seconds,
            "by_kind": self._to_json(sums.by_kind),
            "by_pass": self._to_json(sums.by_pass),
            "by_module": self._to_json(sums.by_module),
            "by_class": self._to_json(sums.by_class),
            "collectives": [dataclasses.asdict(each) for each in sums.collectives],
        }

    def _to_json(self, costs: Mapping[str, Cost]) -> dict[str, dict[str, float]]:
        def times(cost: Cost) -> dict[str, float]:
            return {
                "hbm_seconds": cost.hbm_bytes / self.topology.hbm_bandwidth,
                "roofline_seconds": cost.product_flops / self.topology.peak_flops,
            }

        return {name: dataclasses.asdict(cost) | times(cost) for name, cost in costs.items()}

    def lines(self) -> Iterator[str]:
        """Yields the lines for the terminal."""
        compiled, sums, memory = self.compiled, self.yardsticks, self.compiled.memory
        local = self.batch_size // len(self.topology.devices)
        model = self.training.config.model
        yield f"{self.name}, {self.step} step: {model}, {self.batch_size} examples ({local} on a device)"
        yield f"{self.topology}"
        yield f"traced and lowered in {compiled.lower_seconds:.1f} s, compiled in {compiled.compile_seconds:.1f} s"
        yield ""
        yield "one step on one device; compiled or estimated, never measured:"
        parts = f"arguments {_gib(memory.arguments)}, temporaries {_gib(memory.temporaries)}, code {_gib(memory.code)}"
        verdict = "fits" if self.fits else "DOES NOT FIT"
        yield f"  memory           {_gib(memory.peak)} of {_gib(self.topology.hbm_bytes)} GiB: {verdict} ({parts})"
        if not self.fits and self.step == "train":
            yield "                   --search compiles variants that need less memory"
        yield (
            f"  FLOPs            {compiled.product_flops / 1e12:.3f} T in matrix products; XLA counts "
            f"{compiled.flops / 1e12:.3f} T in all, a loop once"
        )
        if self.analytic_flops:
            products = compiled.products
            yield (
                f"                   forward and backward {products.of_model / 1e12:.3f} T, the analytic count "
                f"{self.analytic_flops / 1e12:.3f} T; recomputed {products.recomputed / 1e12:.3f} T, optimizer "
                f"{products.outside / 1e12:.3f} T"
            )
        yield f"  at peak FLOP/s   {_ms(self.roofline_seconds)}"
        yield f"  HBM bytes        {sums.total.hbm_bytes / 1e9:.2f} GB, {_ms(self.hbm_seconds)} at peak bandwidth"
        yield f"  estimated cycles {sums.total.cycles / 1e6:.1f} M{_seconds(self.estimated_seconds)}"
        if sums.total.kernels:
            yield f"                   {_of_kernels(sums.total)}"
        if sums.total.scheduled:
            yield (
                f"  bundles          {sums.total.bundles / 1e6:.1f} M{_seconds(self.scheduled_seconds)}; of "
                f"{sums.total.scheduled} of {sums.total.instructions} instructions"
            )
        for (kind, asynchronous, size), count in Counter(
            (each.kind, each.asynchronous, each.bytes) for each in sums.collectives
        ).items():
            beside = "beside other work" if asynchronous else "nothing else runs meanwhile"
            yield f"  collective       {count} x {kind}, {size / 1e6:.2f} MB, {beside}"
        for title, costs in sums.splits.items():
            yield ""
            yield f"  {self._cells(None)}  by {title}"
            for name, cost in list(costs.items())[:MODULES_SHOWN]:
                yield f"  {self._cells(cost)}  {name or '(no module)'}"

    def _cells(self, cost: Cost | None) -> str:
        """Each yardstick of a part of the step with its share of the total, or their headings."""
        total, topology = self.yardsticks.total, self.topology
        columns = {
            "Mcycles": ("cycles", 1e6),
            "Mbundles": ("bundles", 1e6),
            "HBM ms": ("hbm_bytes", topology.hbm_bandwidth / 1e3),
            "peak ms": ("product_flops", topology.peak_flops / 1e3),
        }
        if not total.scheduled:
            del columns["Mbundles"]
        if cost is None:
            return " ".join(f"{heading:>8} {'share':>6}" for heading in columns)
        return " ".join(
            f"{getattr(cost, field) / unit:8.2f} {getattr(cost, field) / (getattr(total, field) or 1):6.1%}"
            for field, unit in columns.values()
        )


def _of_kernels(total: Cost) -> str:
    kernels = f"{total.kernels} Pallas kernels, which the compiler does not estimate"
    if not total.kernel_bundles:
        return f"without {kernels}; --bundles adds theirs"
    return f"with {total.kernel_bundles / 1e6:.1f} M bundles of {kernels}"


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f", {_ms(seconds)} at the clock of the chip"
