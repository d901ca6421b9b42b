"""The figures of a compiled step: as JSON, as text for the terminal, and as one self-contained HTML page."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from train_jax.pod.compile import Compiled, Topology
from train_jax.pod.hlo import Schedules
from train_jax.pod.yardsticks import Cost, Yardsticks, yardsticks
from train_jax.report.render import percent, render_document
from train_jax.run.performance import model_flops
from train_jax.start import Training

MODULES_SHOWN = 12
"""Rows of a table on the terminal."""


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
        return self.compiled.products.total / self.topology.peak_flops

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
        compiled, sums, total, config = self.compiled, self.yardsticks, self.yardsticks.total, self.training.config
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
            "product_flops": compiled.products.total,
            "recomputed_flops": compiled.products.recomputed,
            "flops_outside_of_the_model": compiled.products.outside,
            "analytic_flops": self.analytic_flops,
            "estimated_cycles": total.cycles,
            "estimated_seconds": self.estimated_seconds,
            "kernels": total.kernels,
            "kernel_bundles": total.kernel_bundles,
            "attention": config.compute.attention,
            "scheduled_bundles": total.bundles if total.scheduled else None,
            "scheduled_seconds": self.scheduled_seconds,
            "scheduled_instructions": total.scheduled,
            "hbm_bytes": total.hbm_bytes,
            "hbm_seconds": self.hbm_seconds,
            "prefetched_bytes": sums.prefetched_bytes,
            "roofline_seconds": self.roofline_seconds,
            **{name: self._to_json(getattr(sums, name)) for name in ("by_kind", "by_pass", "by_module", "by_class")},
            "collectives": [dataclasses.asdict(each) for each in sums.collectives],
        }

    def _to_json(self, costs: Mapping[str, Cost]) -> dict[str, dict[str, float]]:
        return {
            name: dataclasses.asdict(cost)
            | {
                "hbm_seconds": cost.hbm_bytes / self.topology.hbm_bandwidth,
                "roofline_seconds": cost.product_flops / self.topology.peak_flops,
            }
            for name, cost in costs.items()
        }

    # ---- text

    def lines(self) -> Iterator[str]:
        """Yields the lines for the terminal."""
        compiled, memory, products = self.compiled, self.compiled.memory, self.compiled.products
        total, hbm_bytes = self.yardsticks.total, self.topology.hbm_bytes
        local = self.batch_size // len(self.topology.devices)
        model = self.training.config.model
        yield f"{self.name}, {self.step} step: {model}, {self.batch_size} examples ({local} on a device)"
        yield f"{self.topology}"
        yield f"traced and lowered in {compiled.lower_seconds:.1f} s, compiled in {compiled.compile_seconds:.1f} s"
        yield ""
        yield "one step on one device; compiled or estimated, never measured:"
        parts = f"arguments {_gib(memory.arguments)}, temporaries {_gib(memory.temporaries)}, code {_gib(memory.code)}"
        verdict = "fits" if self.fits else "DOES NOT FIT"
        yield f"  memory           {_gib(memory.peak)} of {_gib(hbm_bytes)} GiB: {verdict} ({parts})"
        if not self.fits and self.step == "train":
            yield "                   --search compiles variants that need less memory"
        yield (
            f"  FLOPs            {products.total / 1e12:.3f} T in matrix products; XLA counts "
            f"{compiled.flops / 1e12:.3f} T in all, a loop once"
        )
        if self.analytic_flops:
            yield (
                f"                   forward and backward {products.of_model / 1e12:.3f} T, the analytic count "
                f"{self.analytic_flops / 1e12:.3f} T; recomputed {products.recomputed / 1e12:.3f} T, optimizer "
                f"{products.outside / 1e12:.3f} T"
            )
        yield f"  at peak FLOP/s   {_ms(self.roofline_seconds)}"
        yield f"  HBM bytes        {total.hbm_bytes / 1e9:.2f} GB, {_ms(self.hbm_seconds)} at peak bandwidth"
        yield f"  estimated cycles {total.cycles / 1e6:.1f} M{_at_the_clock(self.estimated_seconds)}"
        if total.kernels:
            kernels = f"{total.kernels} Pallas kernels, which the compiler does not estimate"
            known = f"with {total.kernel_bundles / 1e6:.1f} M bundles of {kernels}"
            text = known if total.kernel_bundles else f"without {kernels}; --bundles adds theirs"
            yield f"                   {text}"
        if total.scheduled:
            yield (
                f"  bundles          {total.bundles / 1e6:.1f} M{_at_the_clock(self.scheduled_seconds)}; of "
                f"{total.scheduled} of {total.instructions} instructions"
            )
        for each, count in Counter(self.yardsticks.collectives).items():
            beside = "beside other work" if each.asynchronous else "nothing else runs meanwhile"
            yield f"  collective       {count} x {each.kind}, {each.bytes / 1e6:.2f} MB, {beside}"
        yield from self._tables()

    def _tables(self) -> Iterator[str]:
        """Yields each yardstick of the parts of the step, with its share of the total."""
        total, topology = self.yardsticks.total, self.topology
        columns = {
            "Mcycles": ("cycles", 1e6),
            "Mbundles": ("bundles", 1e6),
            "HBM ms": ("hbm_bytes", topology.hbm_bandwidth / 1e3),
            "peak ms": ("product_flops", topology.peak_flops / 1e3),
        }
        if not total.scheduled:
            del columns["Mbundles"]
        headings = " ".join(f"{heading:>8} {'share':>6}" for heading in columns)
        for title, costs in self.yardsticks.splits.items():
            yield ""
            yield f"  {headings}  by {title}"
            for name, cost in list(costs.items())[:MODULES_SHOWN]:
                cells = (
                    f"{getattr(cost, field) / unit:8.2f} {getattr(cost, field) / (getattr(total, field) or 1):6.1%}"
                    for field, unit in columns.values()
                )
                yield f"  {' '.join(cells)}  {name or '(no module)'}"


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def _at_the_clock(seconds: float | None) -> str:
    return "" if seconds is None else f", {_ms(seconds)} at the clock of the chip"


# ---- HTML


def page(result: Result) -> str:
    """Returns the page of one compiled step. Figures are compiled or estimated, and the page says so."""
    memory, topology = result.compiled.memory, result.topology
    parts = {
        "arguments": memory.arguments,
        "temporaries": memory.temporaries,
        "outputs that reuse no argument": memory.outputs,
        "code": memory.code,
        "all": memory.peak,
    }
    return render_document(
        "pod.html.j2",
        title=f"{result.name}, {result.step} step on {topology.name}",
        topology=topology,
        result=result,
        tables=[(name, *_table(costs, result)) for name, costs in result.yardsticks.splits.items()],
        memory=[(name, f"{size / 2**30:.3f}", percent(size / topology.hbm_bytes)) for name, size in parts.items()],
        collectives=[
            (each.kind, f"{count:,}", f"{each.bytes / 1e6:.2f}", "yes" if each.asynchronous else "no")
            for each, count in Counter(result.yardsticks.collectives).items()
        ],
    )


def _table(costs: Mapping[str, Cost], result: Result) -> tuple[list[tuple[str, ...]], list[float]]:
    """Returns the rows, and the share of each row in the estimated cycles."""
    total, topology = result.yardsticks.total, result.topology

    def share(cost: Cost, field: str) -> float:
        return getattr(cost, field) / (getattr(total, field) or 1)

    rows = []
    for part, cost in costs.items():
        cells = [part or "(no module)", f"{cost.cycles / 1e6:.2f}", percent(share(cost, "cycles"))]
        if total.scheduled:
            cells += [f"{cost.bundles / 1e6:.2f}", percent(share(cost, "bundles"))]
        cells += [f"{cost.hbm_bytes / 1e9:.2f}", f"{cost.hbm_bytes / topology.hbm_bandwidth * 1e3:.2f}"]
        cells += [percent(share(cost, "hbm_bytes"))]
        cells += [f"{cost.product_flops / 1e12:.3f}", f"{cost.product_flops / topology.peak_flops * 1e3:.2f}"]
        cells += [percent(share(cost, "product_flops"))]
        rows.append((*cells, f"{cost.instructions:,}"))
    return rows, [share(cost, "cycles") for cost in costs.values()]
