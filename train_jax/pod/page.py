"""One self-contained HTML page with the figures of a compiled step, or of a search."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from train_jax.pod.results import Result
from train_jax.pod.search import Tried, best
from train_jax.pod.topology import Topology
from train_jax.pod.yardsticks import Cost
from train_jax.report.render import percent, render_document

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
    total, topology = result.yardsticks.total, result.topology
    rows, shares = [], []
    for part, cost in costs.items():
        shares.append(cost.cycles / total.cycles if total.cycles else 0.0)
        bundles = (f"{cost.bundles / 1e6:.2f}", _share(cost.bundles, total.bundles)) if total.scheduled else ()
        hbm = f"{cost.hbm_bytes / 1e9:.2f}", f"{cost.hbm_bytes / topology.hbm_bandwidth * 1e3:.2f}"
        peak = f"{cost.product_flops / 1e12:.3f}", f"{cost.product_flops / topology.peak_flops * 1e3:.2f}"
        cells = (
            *(part or "(no module)", f"{cost.cycles / 1e6:.2f}", percent(shares[-1]), *bundles),
            *(*hbm, _share(cost.hbm_bytes, total.hbm_bytes), *peak, _share(cost.product_flops, total.product_flops)),
        )
        rows.append((*cells, f"{cost.instructions:,}"))
    return name, rows, shares


def _share(part: float, total: float) -> str:
    return percent(part / total if total else 0.0)


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
