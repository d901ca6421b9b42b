"""`trm check mine.py`: the first training steps of a script in PyTorch and here, side by side."""

from __future__ import annotations

from train_jax.errors import UserError
from train_jax.run.arguments import option_value, parse_run
from train_jax.run.config import RunConfig
from train_jax.runtime.processes import join_processes
from train_jax.script.check import Leaf, StepCheck, check_steps

STEPS = 3
"""Number of steps that are compared by default."""
_SHOWN = 20
"""Number of leaves in the table."""


def cli(argv: list[str]) -> None:
    name, config = parse_run(
        argv,
        prog="trm check",
        description="Run the first training steps of a script in PyTorch and in JAX, on the same batches and with the "
        f"same random draws, and compare losses, parameters and buffers: `trm check mine.py --steps 20`, by default "
        f"{STEPS} steps. Fields are those of `trm train`. Exit status 1 if they differ.",
    )
    if config.task != "script":
        raise UserError(f"{name} is no script; give a file such as mine.py, or use `trm prove {name}`")
    main(config, config.steps if option_value(argv, "--steps") else STEPS)


def main(config: RunConfig, steps: int) -> None:
    with join_processes("cpu"):
        check = check_steps(config, steps, say=lambda line: print(line, flush=True), always_in_float64=True)
    print(_table(check))
    print(check)
    if not check.ok:
        raise SystemExit(1)


def _table(check: StepCheck) -> str:
    shown = [leaf for leaf in check.leaves if leaf.difference or not leaf.agrees][:_SHOWN]
    width = max((len(leaf.name) for leaf in shown), default=0)
    lines = [f"  {leaf.name:<{width}}  {leaf.difference:.1e}  {_verdict(leaf)}" for leaf in shown]
    rest = len(check.leaves) - len(shown)
    return "\n".join([*lines, *([f"  {rest} more leaves, with smaller differences or none"] if rest else [])])


def _verdict(leaf: Leaf) -> str:
    if leaf.wide_difference is None:
        return "ok" if leaf.agrees else "DIFFERS"
    wide = f"{leaf.wide_difference:.0e} in float64"
    if leaf.entries_without_gradient:
        wide += f", where the gradient of {leaf.entries_without_gradient:,} entries is rounding"
    if not leaf.agrees:
        return f"DIFFERS, {wide}"
    return f"{'rounding' if leaf.difference > leaf.tolerance else 'ok'}, {wide}"
