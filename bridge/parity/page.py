"""A parity report as one HTML page, readable without colour, script or network."""

from __future__ import annotations

import html
import string
from typing import TYPE_CHECKING

from bridge.parity.report import UNPROVED

if TYPE_CHECKING:
    from bridge.parity.report import ParityReport, Row

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


def page(report: ParityReport, title: str) -> str:
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
