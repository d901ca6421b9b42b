"""An HTML page that animates the ACT steps of a puzzle with CSS, without a script, and shows all steps below."""

from train_jax.report.boards import Figure, board_at, strip
from train_jax.report.render import render_document
from train_jax.tasks.puzzles.kinds import Trace, halting_probability

STEP_SECONDS = 0.6
LAST_STEPS = 4
"""The last grid is shown as long as this number of steps."""


def player(trace: Trace, *, title: str, verdict: str) -> str:
    """Renders the document. The animation pauses under the pointer or focus and respects `prefers-reduced-motion`."""
    whole = (trace.act_steps + LAST_STEPS) * STEP_SECONDS
    share = 100 * STEP_SECONDS / whole
    figures = []
    for step in range(trace.act_steps + 1):
        caption = _caption(trace, step)
        figures.append((step * STEP_SECONDS - whole, Figure(board_at(trace, step, label=caption, side=420), caption)))
    times = {"whole": whole, "share": share, "last_share": LAST_STEPS * share}
    return render_document("player.html.j2", title=title, verdict=verdict, figures=figures, strip=strip(trace), **times)


def _caption(trace: Trace, step: int) -> str:
    if step == 0:
        return "input"
    wrong = int(trace.wrong(step).sum())
    halt = f"halt {halting_probability(trace.q_halt_logits[step - 1]):.2f}"
    return ", ".join([f"ACT step {step} of {trace.act_steps}", *([f"{wrong} cells wrong"] if wrong else []), halt])
