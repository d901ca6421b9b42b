"""A puzzle's ACT steps as an HTML page that plays them one after the other, without a script, and shows all below."""

from html import escape

from train_jax.report.boards import board_at, strip
from train_jax.report.theme import COLOURS, DRAWINGS, PAGE
from train_jax.tasks.puzzles.trace import Trace, halting_probability

STEP_SECONDS = 0.6
LAST_STEPS = 4
"""The last grid stays as long as so many."""

_PLAYER = """
.player { display: grid; margin-top: 1.4rem; }
.player figure { grid-area: 1 / 1; visibility: hidden; animation: shown var(--whole) step-end infinite; }
.player:hover figure { animation-play-state: paused; }
.player figcaption { font-size: .95rem; }
@media (prefers-reduced-motion: reduce) {
  .player figure { animation: none; }
  .player figure:last-child { visibility: visible; }
}
"""


def player(trace: Trace, *, title: str, verdict: str) -> str:
    """The whole document. The animation stops where the pointer is on it, or where the reader wants no motion."""
    count = trace.act_steps + 1
    whole = (count - 1 + LAST_STEPS) * STEP_SECONDS
    share = 100 * STEP_SECONDS / whole
    figures = []
    for step in range(count):
        name = "last" if step == count - 1 else "shown"
        style = f"animation-name: {name}; animation-delay: {step * STEP_SECONDS - whole:.2f}s"
        drawing = board_at(trace, step, label=_caption(trace, step), side=420)
        figures.append(
            f'<figure style="{style}">{drawing}<figcaption>{escape(_caption(trace, step))}</figcaption></figure>'
        )
    moves = (
        f"@keyframes shown {{ 0% {{ visibility: visible; }} {share:.3f}% {{ visibility: hidden; }} }}\n"
        f"@keyframes last {{ 0% {{ visibility: visible; }} {LAST_STEPS * share:.3f}% {{ visibility: hidden; }} }}\n"
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{COLOURS}{PAGE}{DRAWINGS}{_PLAYER}{moves}</style>\n</head>\n"
        f'<body>\n<main>\n<h1>{escape(title)}</h1>\n<p class="sub">{escape(verdict)}</p>\n'
        f'<div class="player" style="--whole: {whole:.2f}s">{"".join(figures)}</div>\n'
        f"<h2>Every grid that was written</h2>\n{strip(trace)}\n</main>\n</body>\n</html>\n"
    )


def _caption(trace: Trace, step: int) -> str:
    if step == 0:
        return "the question"
    wrong = int(trace.wrong(step).sum())
    told = [f"ACT step {step} of {trace.act_steps}", f"halt {halting_probability(trace.q_halt_logits[step - 1]):.2f}"]
    return ", ".join([told[0], *([f"{wrong} cells wrong"] if wrong else []), told[1]])
