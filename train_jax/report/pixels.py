"""Draws the ACT steps of a puzzle as an animated GIF: the grid on a light background with a caption."""

from functools import cache
from io import BytesIO
from typing import Any

from PIL import Image, ImageColor, ImageDraw, ImageFont

from train_jax.report import theme
from train_jax.tasks.puzzles.kind import Drawing
from train_jax.tasks.puzzles.kinds import Trace, halting_probability

LONGER_SIDE = 300
"""Approximate size in pixels; the size of a cell is an integer."""
SMALLEST_WIDTH = 220
"""Least width in pixels, so that the caption fits."""
MARGIN, CAPTION = 10, 22
STEP_MS, LAST_MS = 600, 2400

COLOURS = {name: colour.light for name, colour in theme.COLOURS.items()}
COLOUR_OF = {name: number for number, name in enumerate(COLOURS)}
"""Indices into the palette, which all frames share so that no colour is approximated."""


def animation(trace: Trace) -> bytes:
    """Returns a looping GIF of the input and the grid after every ACT step; the last one is shown longer."""
    first, *others = (frame(trace, step) for step in range(trace.act_steps + 1))
    durations = [STEP_MS] * trace.act_steps + [LAST_MS]
    file = BytesIO()
    first.save(file, "GIF", save_all=True, append_images=others, duration=durations, loop=0, optimize=False)
    return file.getvalue()


def frame(trace: Trace, step: int) -> Image.Image:
    """Draws one frame of the animation; its pixels are indices into the palette."""
    drawing = trace.kind.drawing
    cell = max(6, LONGER_SIDE // max(drawing.rows, drawing.cols))
    width, height = drawing.cols * cell + 1, drawing.rows * cell + 1
    picture = Image.new("P", (max(width + 2 * MARGIN, SMALLEST_WIDTH), height + 2 * MARGIN + CAPTION))
    picture.putpalette([channel for code in COLOURS.values() for channel in ImageColor.getrgb(code)])
    draw = ImageDraw.Draw(picture)
    for i in range(len(trace.inputs)):
        row, col = divmod(i, drawing.cols)
        _cell(draw, trace, step, i, (MARGIN + col * cell, MARGIN + row * cell, cell))
    _rules(draw, drawing, cell)
    place = (MARGIN, height + 2 * MARGIN + CAPTION // 2 - 4)
    draw.text(place, caption(trace, step), COLOUR_OF["soft"], _font(13), anchor="lm")
    return picture


def caption(trace: Trace, step: int) -> str:
    if step == 0:
        return "input"
    wrong = f", {trace.wrong(step).sum()} wrong" if trace.wrong(step).any() else ""
    return f"ACT step {step}{wrong}, halt {halting_probability(trace.q_halt_logits[step - 1]):.2f}"


def _cell(draw: ImageDraw.ImageDraw, trace: Trace, step: int, i: int, place: tuple[int, int, int]) -> None:
    """Draws one cell; `place` is its left, top and side."""
    drawing, value = trace.kind.drawing, int(trace.grid(step)[i])
    fixed, wrong, changed = (bool(mask[i]) for mask in (trace.given_cells, trace.wrong(step), trace.changed(step)))
    left, top, side = place
    inside = (left, top, left + side - 1, top + side - 1)
    tint = "wrong-tint" if wrong else "changed-tint" if changed else "paper"
    draw.rectangle(inside, COLOUR_OF[tint if drawing.box else drawing.colour(value) or "paper"])
    if drawing.colour(value) == "path" and not fixed:
        draw.circle((left + side // 2, top + side // 2), side * 0.17, COLOUR_OF["paper"])
    if changed and drawing.box:
        draw.line((left + 4, top + side - 4, left + side - 4, top + side - 4), COLOUR_OF["answer"], 2)
    if wrong:
        for colour, inset, width in (("paper", 1, 4), ("wrong", 2, 2)):
            corners = (left + inset, top + inset, left + side - 1 - inset, top + side - 1 - inset)
            draw.rectangle(corners, outline=COLOUR_OF[colour], width=width)
    if fixed or (drawing.box is not None and (value or wrong)):
        ink = COLOUR_OF["wrong" if wrong else "ink" if fixed else "answer"]
        middle = (left + side // 2 + 1, top + side // 2 + 1)
        draw.text(middle, drawing.character(value), ink, _font(max(7, round(side * 0.62))), anchor="mm")


def _rules(draw: ImageDraw.ImageDraw, drawing: Drawing, cell: int) -> None:
    """Draws dark lines around the grid and its boxes and, with boxes, thin lines between cells."""
    rows, cols = drawing.rows, drawing.cols
    box = drawing.box or (rows, cols)
    right, bottom = MARGIN + cols * cell, MARGIN + rows * cell
    across = [(i % box[0] == 0, (MARGIN, MARGIN + i * cell, right, MARGIN + i * cell)) for i in range(rows + 1)]
    down = [(i % box[1] == 0, (MARGIN + i * cell, MARGIN, MARGIN + i * cell, bottom)) for i in range(cols + 1)]
    for dark, line in sorted(across + down):
        if dark or drawing.box:
            draw.line(line, COLOUR_OF["ink" if dark else "rule"])


@cache
def _font(size: int) -> Any:
    """Returns Pillow's bundled font, so that pictures do not depend on the system."""
    return ImageFont.load_default(size)
