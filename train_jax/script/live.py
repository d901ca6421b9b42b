"""A progress bar and the curves of a run below the cell of a notebook, while `train_jax.fit` trains."""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from train_jax.report.plots import COLOUR, Series, plot
from train_jax.run.folder import RunFolder
from train_jax.storage.lines import read_lines

SECONDS = 1.0
"""Time between two pictures."""
CURVES = 3
"""Largest number of plots: the loss and the first metrics of the script."""
Show = Callable[[str], None]
"""Shows HTML in the place of what it showed before."""


def notebook() -> Show | None:
    """Returns what shows HTML below the current cell of a notebook; None outside of one."""
    if "ipykernel" not in sys.modules:
        return None
    display: Any = importlib.import_module("IPython.display")
    handle = display.display(display.HTML(""), display_id=True)
    return lambda html: handle.update(display.HTML(html))


@contextlib.contextmanager
def live(folder: RunFolder, steps: int, show: Show | None) -> Iterator[None]:
    """Shows the progress of the run in `folder` while the block runs, and its last state after it."""
    if show is None:
        yield
        return
    ended = threading.Event()

    def work() -> None:
        while not ended.wait(SECONDS):
            show(picture(folder, steps))

    thread = threading.Thread(target=work, name="live", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        show(picture(folder, steps))


def picture(folder: RunFolder, steps: int) -> str:
    """Returns the progress and the curves of the run as HTML."""
    records = read_lines(folder.metrics)
    step = max((record["step"] for record in records), default=0)
    names = [name.removeprefix("train/") for name in dict.fromkeys(n for record in records for n in record)]
    tested = [name for name in names if f"eval/{name}" in names]
    shown = list(dict.fromkeys(["loss", *tested]))[:CURVES]
    plots = []
    for name in shown:
        train, test = (
            [(record["step"], record[key]) for record in records if key in record]
            for key in (f"train/{name}", f"eval/{name}")
        )
        series = [Series("training", train)]
        if test:
            series.append(Series("test", test, 2, marks=True))
        plots.append(str(plot(series, title=name, x_label="steps")))
    colours = ";".join(f"--{name}:{colour}" for name, colour in COLOUR.items())
    bar = f'<progress value="{step}" max="{steps}"></progress> step {step:,} of {steps:,}'
    return f'<div style="{colours}">{bar}<br>{"".join(plots)}</div>'
