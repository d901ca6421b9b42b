"""A puzzle's ACT steps as frames of pixels for a GIF: the board on light paper and a line of what the step is."""

import numpy as np
from jaxtyping import UInt8

from train_jax.report.gif import Colour, gif
from train_jax.report.look import CELLS
from train_jax.report.trace import Trace, halting_probability

LONGER_SIDE = 300
"""Pixels, about: cells have whole ones."""
MARGIN, CAPTION = 10, 22
STEP_MS, LAST_MS = 600, 2400

INK = ("paper", "ink", "soft", "rule", "found", "wrong", "wrong-tint", "changed-tint")
HEX = ("#ffffff", "#1d2025", "#62676f", "#dcdcd6", "#2563c9", "#b3261e", "#fbdfdc", "#e3ecfb")
COLOUR_OF = {name: number for number, name in enumerate([*INK, *CELLS])}

GLYPHS = {
    "0": 0o75557, "1": 0o26227, "2": 0o71747, "3": 0o71717, "4": 0o55711, "5": 0o74717, "6": 0o74757, "7": 0o71122,
    "8": 0o75757, "9": 0o75717, "A": 0o25755, "C": 0o34443, "E": 0o74647, "G": 0o34553, "H": 0o55755, "I": 0o72227,
    "L": 0o44447, "N": 0o65555, "O": 0o25552, "P": 0o65644, "Q": 0o25563, "R": 0o65655, "S": 0o34216, "T": 0o72222,
    "U": 0o55557, "W": 0o55575, ".": 0o00002, "?": 0o71202,
}  # fmt: skip
"""Letters of 3 by 5 pixels, five rows of an octal digit each."""


def animation(trace: Trace) -> bytes:
    """The question and the grid after every ACT step, the last one longer, as a GIF."""
    palette: list[Colour] = [
        (int(code[1:3], 16), int(code[3:5], 16), int(code[5:7], 16))
        for code in (*HEX, *(colour.light for colour in CELLS.values()))
    ]
    steps = range(trace.act_steps + 1)
    durations = [STEP_MS] * trace.act_steps + [LAST_MS]
    return gif([frame(trace, step) for step in steps], palette, durations)


def frame(trace: Trace, step: int) -> UInt8[np.ndarray, "height width"]:
    """Pixels as numbers in the palette."""
    look = trace.look
    cell = max(6, LONGER_SIDE // max(look.rows, look.cols))
    scale = max(1, (cell - 4) // 5)
    picture = np.zeros((look.rows * cell + 2 * MARGIN + CAPTION, max(look.cols * cell + 2 * MARGIN, 220)), np.uint8)
    board = picture[MARGIN : MARGIN + look.rows * cell + 1, MARGIN : MARGIN + look.cols * cell + 1]
    grid, fixed, wrong, changed = trace.grid(step), trace.fixed, trace.wrong(step), trace.changed(step)
    for i, value in enumerate(grid.tolist()):
        row, col = divmod(i, look.cols)
        inside = board[row * cell : (row + 1) * cell, col * cell : (col + 1) * cell]
        colour = look.colour(value)
        if colour:
            inside[:] = COLOUR_OF[colour]
        if look.box is not None:
            inside[:] = COLOUR_OF["wrong-tint" if wrong[i] else "changed-tint" if changed[i] else "paper"]
        elif wrong[i]:
            for edge in (inside[:2], inside[-2:], inside[:, :2], inside[:, -2:]):
                edge[:] = COLOUR_OF["wrong"]
        if fixed[i] or (look.box is not None and (value or wrong[i])):
            ink = "ink" if fixed[i] and not wrong[i] else "wrong" if wrong[i] else "found"
            write(inside, look.character(value), (cell - 5 * scale) // 2, (cell - 3 * scale) // 2, scale, ink)
    _rules(board, look.box or (look.rows, look.cols), cell, thin=look.box is not None)
    write(picture, caption(trace, step), picture.shape[0] - CAPTION + 4, MARGIN, 2, "soft")
    return picture


def caption(trace: Trace, step: int) -> str:
    """In the letters that there are."""
    if step == 0:
        return "QUESTION"
    wrong = f"  {trace.wrong(step).sum()} WRONG" if trace.wrong(step).any() else ""
    return f"STEP {step}{wrong}  HALT {halting_probability(trace.q_halt_logits[step - 1]):.2f}"


def write(picture: UInt8[np.ndarray, "height width"], text: str, top: int, left: int, scale: int, ink: str) -> None:
    """Letters of `scale` pixels to a dot, from this corner; what does not fit is cut off."""
    for character in text:
        rows = GLYPHS.get(character, 0)
        for dot in range(15):
            if rows >> (14 - dot) & 1:
                y, x = top + dot // 3 * scale, left + dot % 3 * scale
                picture[max(y, 0) : y + scale, max(x, 0) : x + scale] = COLOUR_OF[ink]
        left += 4 * scale


def _rules(board: UInt8[np.ndarray, "height width"], box: tuple[int, int], cell: int, *, thin: bool) -> None:
    for lines, each in ((board, box[0]), (board.T, box[1])):
        count = (len(lines) - 1) // cell
        for i in range(count + 1):
            if i % each and thin:
                lines[i * cell] = COLOUR_OF["rule"]
        for i in range(0, count + 1, each):
            lines[i * cell] = COLOUR_OF["ink"]
