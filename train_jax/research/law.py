"""The law of a sweep over language models: bits per byte against the FLOPs of training."""

from __future__ import annotations

from train_jax.errors import UserError
from train_jax.report.render import number
from train_jax.research.answers import power_law
from train_jax.research.records import Study

METRIC = "bits_per_byte"
_HEADINGS = ("run", "parameters", "tokens", "FLOP", "bits per byte", "by the law")


def law(study: Study) -> str:
    """Returns the finished runs of a study as a Markdown table, in the order of their FLOPs, and the power law.

    Raises `UserError` if there is no law: fewer than three finished language runs, or all of the same size.
    """
    points = sorted(
        (run.train_flops, run.final, run) for run in study.runs if run.train_flops is not None and run.final is not None
    )
    fit = power_law([flops for flops, _, _ in points], [final for _, final, _ in points])
    if fit is None:
        raise UserError(
            f"{study.root} has {len(points)} finished language runs, expected three or more of different sizes; train "
            "them with a sweep such as `trm sweep chat-d2 chat-d3 chat-d4`"
        )
    rows = [_HEADINGS, ("---",) * len(_HEADINGS)]
    for flops, final, run in points:
        tokens = run.train_steps * run.config["global_batch_size"] * run.config["arch.seq_len"]
        sizes = ("-" if run.parameters is None else f"{run.parameters:,}", f"{tokens:,}", f"{flops:.3g}")
        rows.append((f"{run.experiment}, seed {run.seed}", *sizes, f"{final:.4f}", f"{fit.at(flops):.4f}"))
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return (
        f"{table}\n\nBits per byte are {number(fit.coefficient)} x FLOP^{fit.exponent:.4f} (95 % interval of the "
        f"exponent {fit.low:.4f} to {fit.high:.4f}, r² {fit.r_squared:.3f}, {fit.count} runs), fitted by least squares "
        f"of the logarithms between {points[0][0]:.3g} and {points[-1][0]:.3g} FLOP."
    )
