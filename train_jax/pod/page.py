"""One self-contained HTML page with the figures of a compiled step, or of a search."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from train_jax.pod.results import Result
from train_jax.pod.search import Tried, best
from train_jax.pod.topology import Topology
from train_jax.pod.yardsticks import Cost
from train_jax.report.figures import percent
from train_jax.report.render import render_document

Table = tuple[str, list[tuple[str, ...]], list[float]]
"""What the first column names, the rows, and the share of each row in the estimated cycles."""


def page(result: Result) -> str:
    """Returns the page of one compiled step. Figures are compiled or estimated, and the page says so."""
    sums, topology = result.yardsticks, result.topology
    return render_document(
        "pod.html.j2",
        title=f"{result.name}, {result.step} step on {topology.name}",
        topology=topology,
        result=result,
        tables=[_table(name, costs, result) for name, costs in sums.splits.items()],
        memory=_memory(result),
        collectives=_collectives(result),
    )


def search_page(name: str, tried: Sequence[Tried], topology: Topology) -> str:
    """Returns the page of a search: every variant, the best one first, and what the compiler refused."""
    chosen = best(tried)
    rows = [_variant(each) for each in sorted(tried, key=lambda each: (not each.fits, each.cycles_per_example))]
    return render_document(
        "pod.html.j2",
        title=f"{name}, variants of the train step on {topology.name}",
        topology=topology,
        result=None,
        variants=rows,
        refused=[(each.variant, each.refusal) for each in tried if each.result is None],
        best=None if chosen is None else chosen.variant,
    )


def _table(name: str, costs: Mapping[str, Cost], result: Result) -> Table:
    total, bandwidth = result.yardsticks.total, result.topology.hbm_bandwidth
    rows, shares = [], []
    scheduled = total.scheduled > 0
    for part, cost in costs.items():
        shares.append(cost.cycles / total.cycles if total.cycles else 0.0)
        hbm = f"{cost.hbm_bytes / 1e9:.2f}", f"{cost.hbm_bytes / bandwidth * 1e3:.2f}"
        bundles = (f"{cost.bundles / 1e6:.2f}", percent(cost.bundles / total.bundles)) if scheduled else ()
        cells = part or "(no module)", f"{cost.cycles / 1e6:.2f}", percent(shares[-1]), *bundles, *hbm
        rows.append((*cells, f"{cost.instructions:,}"))
    return name, rows, shares


def _memory(result: Result) -> list[tuple[str, ...]]:
    memory, capacity = result.compiled.memory, result.topology.hbm_bytes
    parts = {
        "arguments": memory.arguments,
        "temporaries": memory.temporaries,
        "outputs that reuse no argument": memory.outputs,
        "code": memory.code,
        "all": memory.peak,
    }
    return [(name, f"{size / 2**30:.3f}", percent(size / capacity)) for name, size in parts.items()]


def _collectives(result: Result) -> list[tuple[str, ...]]:
    counted = Counter((each.kind, each.bytes, each.asynchronous) for each in result.yardsticks.collectives)
    return [
        (kind, f"{count:,}", f"{size / 1e6:.2f}", "yes" if beside else "no")
        for (kind, size, beside), count in counted.items()
    ]


def _variant(tried: Tried) -> tuple[Any, ...]:
    name, result = str(tried.variant), tried.result
    if result is None:
        return name, "refused", "", "", ""
    return (
        name,
        "yes" if tried.fits else "no",
        f"{result.compiled.memory.peak / 2**30:.2f}",
        f"{result.yardsticks.total.cycles / 1e6:.1f}",
        f"{tried.cycles_per_example / 1e3:.1f}",
    )
