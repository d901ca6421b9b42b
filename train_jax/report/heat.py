"""A grid of shares as SVG: the darker a cell, the higher its share; small grids have the numbers in their cells."""

from html import escape

import numpy as np
from jaxtyping import Float, Integer

from train_jax.report.figures import percent
from train_jax.tasks.puzzles.kind import Kind

NUMBERED_COLS = 9
"""So many columns leave room for numbers."""


def heat(
    kind: Kind,
    shares: Float[np.ndarray, "cells"],
    counts: Integer[np.ndarray, "cells"],
    *,
    label: str,
    side: float = 320,
) -> str:
    """An `<svg>`; a share is of `counts` and NaN where there are none."""
    cell = (side - 2) / max(kind.rows, kind.cols)
    width, height = kind.cols * cell + 2, kind.rows * cell + 2
    highest = float(np.nanmax(shares)) if np.isfinite(shares).any() else 0.0
    parts = []
    for i in np.flatnonzero(np.isfinite(shares)).tolist():
        row, col = divmod(i, kind.cols)
        x, y = 1 + col * cell, 1 + row * cell
        depth = shares[i] / highest if highest else 0.0
        told = f"row {row + 1}, column {col + 1}: {percent(shares[i])} of {counts[i]:,}"
        parts.append(
            f'<rect class="heat" fill-opacity="{depth:.3f}" x="{x:.1f}" y="{y:.1f}" width="{cell:.1f}" '
            f'height="{cell:.1f}"><title>{told}</title></rect>'
        )
        if kind.cols <= NUMBERED_COLS:
            parts.append(
                f'<text class="share" x="{x + cell / 2:.1f}" y="{y + cell * 0.6:.1f}" text-anchor="middle" '
                f'font-size="{min(cell * 0.3, 14):.1f}">{100 * shares[i]:.{_digits(highest)}f}</text>'
            )
    return (
        f'<svg class="board" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.4g} {height:.4g}" '
        f'width="{width:.4g}" height="{height:.4g}" role="img" aria-label="{escape(label)}">{"".join(parts)}'
        f'{_lines(kind, cell)}<rect class="frame" x="0.5" y="0.5" width="{width - 1:.1f}" height="{height - 1:.1f}"/>'
        "</svg>"
    )


def _digits(highest: float) -> int:
    return 0 if highest >= 0.2 else 1 if highest >= 0.02 else 2


def _lines(kind: Kind, cell: float) -> str:
    """Between boxes."""
    if kind.box is None:
        return ""
    rows = [f"M1 {1 + i * cell:.1f}H{1 + kind.cols * cell:.1f}" for i in range(0, kind.rows + 1, kind.box[0])]
    cols = [f"M{1 + i * cell:.1f} 1V{1 + kind.rows * cell:.1f}" for i in range(0, kind.cols + 1, kind.box[1])]
    return f'<path class="thick" d="{"".join(rows + cols)}"/>'
