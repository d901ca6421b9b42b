"""The curves of `campaigns.trajectory` as one SVG."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from markupsafe import Markup

from campaigns.trajectory import SMOOTHED_STEPS, Curves, pairs, relative_distance, smoothed
from train_jax.puzzles.page import card
from train_jax.report.plots import Band, Series, plot

WIDTH = 430
HEIGHT = 230
MARGIN = 24
TITLE = 58
"""Sizes of a panel, of the space between panels and of the space above them, in pixels."""


def picture(curves_by_case: Mapping[str, Curves]) -> str:
    """Returns a standalone SVG with one row per architecture: losses of the first seed, and distances of all seeds."""
    panels = [
        (MARGIN + column * (WIDTH + MARGIN), TITLE + row * (HEIGHT + MARGIN), "", panel)
        for row, (case, curves) in enumerate(curves_by_case.items())
        for column, panel in enumerate((losses_panel(case, curves), distances_panel(curves)))
    ]
    headline = f"A hundred steps in bfloat16, running means of {SMOOTHED_STEPS}"
    return card(headline, panels, 3 * MARGIN + 2 * WIDTH, TITLE + len(curves_by_case) * (HEIGHT + MARGIN))


def losses_panel(case: str, curves: Curves) -> Markup:
    jax = smoothed(curves.jax)
    torch = smoothed(curves.torch)
    low = torch.min(0).tolist()
    high = torch.max(0).tolist()
    return plot(
        [_series("PyTorch, one seed", torch[0], 1), _series("JAX, the same seed", jax[0], 2)],
        band=Band(f"PyTorch, {len(torch)} seeds", list(zip(_steps(torch[0]), low, high, strict=True))),
        title=f"{case}: loss per example",
        x_label="steps",
        width=WIDTH,
        height=HEIGHT,
    )


def distances_panel(curves: Curves) -> Markup:
    return plot(
        [
            _series("another seed", 100 * relative_distance(*pairs(curves.torch)).mean(0), 1),
            _series("JAX, same seed", 100 * relative_distance(curves.jax, curves.torch).mean(0), 2),
            _series("float32, same seed", 100 * relative_distance(curves.torch_float32, curves.torch).mean(0), 3),
        ],
        title="distance from PyTorch, % of the loss, mean over seeds",
        x_label="steps",
        log_y=True,
        width=WIDTH,
        height=HEIGHT,
    )


def _steps(values: np.ndarray) -> range:
    return range(SMOOTHED_STEPS, SMOOTHED_STEPS + len(values))


def _series(name: str, values: np.ndarray, colour: int) -> Series:
    return Series(name, list(zip(_steps(values), values.tolist(), strict=True)), colour)
