"""The report of a comparison: one row for each leaf and step, a verdict, and where it was made."""

from __future__ import annotations

import dataclasses
import html
import importlib.metadata
import json
import math
import string
from collections.abc import Iterable
from typing import Any, Literal

import jax
import torch

from bridge.dispatch.compute import matmul_precision

Verdict = Literal["equal", "beyond tolerance", "unproved"]


@dataclasses.dataclass(frozen=True)
class Row:
    """One compared leaf at one step."""

    kind: str
    """`output`, `gradient`, `input gradient`, `buffer`; `parameter` only where one was written and the sides differ,
    `.grad` only where the call itself leaves one."""
    name: str
    step: int
    error: float
    """max |JAX - PyTorch|, relative to `scale`; infinite where nothing can be subtracted, which `note` explains."""
    scale: float
    """The leaf's largest magnitude in PyTorch; not below 1e-3 of the largest gradient (or of 1, for outputs)."""
    tolerance: float
    """The tolerance given, or a larger one where PyTorch's own float32 differs from float64 by more."""
    zero: bool = False
    """Zero on both sides at every step, and nothing says that it has to be: equal, but no proof."""
    note: str = ""
    """A remark: a missing leaf, another dtype, why a leaf is zero."""

    @property
    def verdict(self) -> Verdict:
        if not self.error <= self.tolerance:
            return "beyond tolerance"
        return "unproved" if self.zero else "equal"


@dataclasses.dataclass(frozen=True)
class Environment:
    """Where the JAX side ran. The PyTorch side always runs on the host."""

    platform: str
    device: str
    matmul_precision: str
    """Of float32 products, in JAX's words; see `bridge.dispatch.compute`."""
    x64: bool
    """True if JAX has 64-bit types; without them they are compared as the 32-bit ones they are stored as."""
    versions: dict[str, str]

    @classmethod
    def here(cls) -> Environment:
        device = jax.devices()[0]
        packages = {"torch": torch.__version__, "jax": jax.__version__}
        packages["torchax"] = importlib.metadata.version("torchax")
        return cls(device.platform, device.device_kind, matmul_precision(), jax.config.read("jax_enable_x64"), packages)

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        wide = "kept" if self.x64 else "stored as 32-bit types"
        return (
            f"JAX on {self.platform} ({self.device}), float32 products {self.matmul_precision}, 64-bit types {wide}, "
            f"beside PyTorch on the host; {versions}"
        )


UNPROVED = (
    "unproved: zero on both sides, where a lost value would not be seen; `jitter` (--jitter 0.1) perturbs all "
    "parameters, and `known_zero` names what is zero in truth"
)


@dataclasses.dataclass(frozen=True)
class ParityReport:
    """The result of `verify`. `str()` is the table, worst leaf first; `to_json` and `to_html` are for programs."""

    rows: tuple[Row, ...]
    environment: Environment = dataclasses.field(default_factory=Environment.here)

    @classmethod
    def of(cls, rows: Iterable[Row]) -> ParityReport:
        """Sorted, worst first. A leaf that is zero at one step is proved by another step where it is not."""
        rows = list(rows)
        silent = {(r.kind, r.name) for r in rows} - {(r.kind, r.name) for r in rows if not r.zero}
        rows = [dataclasses.replace(r, zero=r.zero and (r.kind, r.name) in silent) for r in rows]
        order: list[Verdict] = ["beyond tolerance", "unproved", "equal"]
        return cls(tuple(sorted(rows, key=lambda r: (order.index(r.verdict), r.tolerance - r.error))))

    @property
    def ok(self) -> bool:
        """True if something was compared, and every leaf is equal and proved."""
        return bool(self.rows) and all(row.verdict == "equal" for row in self.rows)

    @property
    def worst(self) -> Row:
        return self.rows[0]

    def count(self, verdict: Verdict) -> int:
        return sum(row.verdict == verdict for row in self.rows)

    @property
    def summary(self) -> str:
        if not self.rows:
            return "nothing compared: the module has no state, and its outputs hold no number"
        beyond, unproved = self.count("beyond tolerance"), self.count("unproved")
        return f"{len(self.rows)} leaves compared, {beyond} beyond tolerance, {unproved} unproved"

    def __str__(self) -> str:
        lines = [str(self.environment), f"{'error':>9}  {'tolerance':>9}  {'scale':>9}  step  leaf"]
        for row in self.rows:
            mark = {"equal": " ", "beyond tolerance": "!", "unproved": "?"}[row.verdict]
            note = f" ({row.note})" if row.note else ""
            lines.append(
                f"{row.error:9.1e}{mark} {row.tolerance:9.1e}  {row.scale:9.1e}  {row.step:4d}  "
                f"{row.kind} {row.name}{note}"
            )
        if self.count("unproved"):
            lines.append(UNPROVED)
        return "\n".join([*lines, self.summary])

    def to_json(self) -> str:
        """`ok`, the counts, the environment and all rows; a number that is infinite is `null`."""
        counts = {v: self.count(v) for v in ("equal", "beyond tolerance", "unproved")}
        rows = [{k: _finite(v) for k, v in dataclasses.asdict(r).items()} | {"verdict": r.verdict} for r in self.rows]
        whole = {"ok": self.ok, "leaves": counts, "environment": dataclasses.asdict(self.environment), "rows": rows}
        return json.dumps(whole, indent=1, allow_nan=False)

    def to_html(self, title: str = "Parity with PyTorch") -> str:
        """One page that needs nothing else."""
        return _page(self, title)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


_PAGE = string.Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>$title</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; width: 100%; }
th, td { border-bottom: 1px solid #ddd; padding: .25rem .75rem; text-align: left; }
td.number, th.number { font-variant-numeric: tabular-nums; text-align: right; }
.beyond { background: #fbe3e0; font-weight: 600; }
.unproved { background: #fdf3d7; }
code { font: 13px/1.5 ui-monospace, monospace; overflow-wrap: anywhere; }
</style>
</head>
<body>
<h1>$title</h1>
<p><strong>$verdict.</strong> $summary.</p>
<p>$environment.</p>
$remark
<table>
<thead><tr><th>verdict</th><th>kind</th><th>leaf</th><th class="number">step</th><th class="number">error</th>
<th class="number">tolerance</th><th class="number">scale</th><th>note</th></tr></thead>
<tbody>
$rows
</tbody>
</table>
</body>
</html>
""")


def _page(report: ParityReport, title: str) -> str:
    remark = f"<p>{html.escape(UNPROVED)}.</p>" if report.count("unproved") else ""
    return _PAGE.substitute(
        title=html.escape(title),
        verdict="Equal" if report.ok else "Not equal" if report.count("beyond tolerance") else "Unproved",
        summary=html.escape(report.summary),
        environment=html.escape(str(report.environment)),
        remark=remark,
        rows="\n".join(map(_row, report.rows)),
    )


def _row(row: Row) -> str:
    numbers = (str(row.step), f"{row.error:.1e}", f"{row.tolerance:.1e}", f"{row.scale:.1e}")
    cells = [f"<td>{row.verdict}</td><td>{row.kind}</td><td><code>{html.escape(row.name)}</code></td>"]
    cells += [f'<td class="number">{number}</td>' for number in numbers]
    return f'<tr class="{row.verdict.split()[0]}">{"".join(cells)}<td>{html.escape(row.note)}</td></tr>'
