"""PyTorch's own op database through the bridge: values and gradients of the ops that models of this field use.

    python -m benchmarks.op_survey [--op NAME] [--samples-per-op N] [--markdown docs/op_survey.md]

Every sample input of `torch.testing`'s database runs in PyTorch eager and, under `jax.jit`, through the bridge. Outputs
and the gradient of every float input are compared at 1e-5 of the leaf's largest entry, or 8 times what PyTorch's own
float32 differs from its float64 where that is more. Random draws are PyTorch's, replayed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import platform
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import torch
import tyro
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

import bridge
from benchmarks.op_list import GAPS, OPS, not_listed
from bridge.parity import Row

TOLERANCE = 1e-5
SETTINGS: Any = {"tolerance": TOLERANCE, "input_gradients": False, "int64": "wrap"}
"""Of `verify`: what takes a gradient is a parameter here, and the samples' integers are small."""


class Call(nn.Module):
    """The op as a module: its differentiable inputs are parameters, its other tensors the arguments of `forward`.

    `process` is the database's own: it takes from the outputs what is well defined (of eigenvectors, not the sign).
    """

    def __init__(self, op: Callable, args: tuple, kwargs: dict, process: Callable = lambda out: out):
        super().__init__()
        self.op, self.process = op, process
        leaves, self.structure = tree_flatten((args, kwargs))
        self.inputs: list[torch.Tensor] = []
        self.recipe: list[tuple[str, Any]] = []
        self.leaves = nn.ParameterList()
        placed: dict[int, tuple[str, Any]] = {}
        for leaf in leaves:
            if not torch.is_tensor(leaf):
                self.recipe.append(("constant", leaf))
                continue
            if id(leaf) not in placed:
                if leaf.requires_grad:
                    placed[id(leaf)] = ("parameter", len(self.leaves))
                    self.leaves.append(nn.Parameter(leaf.detach().clone()))
                else:
                    placed[id(leaf)] = ("input", len(self.inputs))
                    self.inputs.append(leaf.detach().clone())
            self.recipe.append(placed[id(leaf)])

    def forward(self, *inputs: torch.Tensor) -> Any:
        homes = {"parameter": self.leaves, "input": inputs}
        leaves = [value if kind == "constant" else homes[kind][value] for kind, value in self.recipe]
        args, kwargs = tree_unflatten(leaves, self.structure)
        out = self.process(self.op(*args, **kwargs))
        # A result that is an input itself, or a list subclass, comes back as a plain tensor or tuple.
        return tuple(out) if isinstance(out, (tuple, list)) else out


@dataclasses.dataclass
class Outcome:
    """What the samples of one op (or one variant of it) came to."""

    name: str
    kind: str
    total: int = 0
    passed: int = 0
    without_jit: int = 0
    """Of those passed: samples whose shapes depend on values, which pass outside `jit` only."""
    failures: list[str] = dataclasses.field(default_factory=list)


def database() -> list[Any]:
    module: Any = importlib.import_module("torch.testing._internal.common_methods_invocations")
    # Its own version saves the state of every accelerator's generator, and torchax declares one that has none.
    module.wrapper_set_seed = seeded
    return module.op_db


def entries(wanted: str | None = None, rest: bool = False) -> Iterator[tuple[str, str, Any]]:
    """(kind, name with variant, database entry) of every listed op, with `rest` of all others, or of `wanted` alone."""
    kinds = {name: kind for kind, names in OPS.items() for name in names.split()}
    for entry in database():
        if (wanted is None and (entry.name in kinds) != rest) or wanted in (entry.name, full_name(entry)):
            yield kinds.get(entry.name, "other"), full_name(entry), entry


def seeded(op: Callable, *args: Any, **kwargs: Any) -> Any:
    torch.manual_seed(42)
    return op(*args, **kwargs)


def full_name(entry: Any) -> str:
    return f"{entry.name}.{entry.variant_test_name}" if entry.variant_test_name else entry.name


def samples(entry: Any, limit: int) -> Iterator[tuple[tuple, dict, Callable]]:
    """Up to `limit` float32 samples spread over the database's, two of int64, two of bool where the op takes them."""
    for dtype, count in ((torch.float32, limit), (torch.int64, 2), (torch.bool, 2)):
        if dtype not in entry.dtypes:
            continue
        torch.manual_seed(0)
        differentiable = dtype.is_floating_point and entry.supports_autograd
        found = list(entry.sample_inputs("cpu", dtype, requires_grad=differentiable))
        for i in range(min(count, len(found))):
            sample = found[i * len(found) // min(count, len(found))]
            yield (sample.input, *sample.args), sample.kwargs, sample.output_process_fn_grad


def widened(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The same sample in float64."""

    def widen(t: torch.Tensor) -> torch.Tensor:
        return t.detach().double().requires_grad_(t.requires_grad) if t.dtype == torch.float32 else t

    return tree_map_only(torch.Tensor, widen, (args, kwargs))


def within(row: Row) -> bool:
    """Inputs and cotangents are of order 1 and float32 rounds that to 1e-7: no leaf is judged as smaller than 1e-2."""
    return row.error * row.scale <= row.tolerance * max(row.scale, 1e-2)


def reason(op: Callable, args: tuple, kwargs: dict, process: Callable) -> tuple[str | None, bool]:
    """(why this sample fails, or `None`; whether it ran under `jit`)."""
    module = Call(op, args, kwargs, process)
    jit = True
    try:
        try:
            report = bridge.verify(module, *module.inputs, **SETTINGS)
        except bridge.BridgeError as error:
            if "traced tensor" not in str(error) and "depends on data" not in str(error):
                raise
            jit = False
            report = bridge.verify(module, *module.inputs, **SETTINGS, jit=False)
        if not all(map(within, report.rows)):
            wide = Call(op, *widened(args, kwargs), process)
            with contextlib.suppress(RuntimeError):  # the op refuses one of the widened inputs
                report = bridge.verify(module, *module.inputs, **SETTINGS, jit=jit, double=wide)
    except Exception as error:
        return f"{type(error).__name__}: {error}".split(" in the module", 1)[0].split("\n", 1)[0][:240], jit
    row = next((r for r in report.rows if not within(r)), None)
    if row is None:
        return None, jit
    return f"{row.kind} {row.name} is off by {row.error:.1e} of {row.scale:.1e}", jit


def survey(wanted: str | None, limit: int, rest: bool = False) -> Iterator[Outcome]:
    for kind, name, entry in entries(wanted, rest):
        outcome = Outcome(name, kind)
        for args, kwargs, process in samples(entry, limit):
            if any(torch.is_tensor(t) and t.is_complex() for t in tree_flatten((args, kwargs))[0]):
                continue
            try:
                with torch.no_grad():
                    entry.op(*args, **kwargs)
            except Exception:  # PyTorch itself refuses the sample
                continue
            why, jit = reason(entry.op, args, kwargs, process)
            outcome.total += 1
            outcome.passed += why is None
            outcome.without_jit += why is None and not jit
            if why is not None:
                outcome.failures.append(why)
        yield outcome


@dataclasses.dataclass(frozen=True)
class Options:
    """Survey the bridge with PyTorch's own op database."""

    op: str | None = None
    """One op of the database, with or without its variant; every listed op if not given."""
    rest: bool = False
    """The ops that are not listed instead of those that are."""
    samples_per_op: int = 6
    """Float32 samples of each op (or variant)."""
    markdown: Path | None = None
    """Write the table as Markdown to this file."""


def summary(outcomes: list[Outcome]) -> str:
    passed, total = sum(o.passed for o in outcomes), sum(o.total for o in outcomes)
    whole = sum(o.passed == o.total for o in outcomes)
    return (
        f"{passed} of {total} samples pass ({passed / max(total, 1):.1%}); "
        f"{whole} of {len(outcomes)} ops pass whole ({whole / max(len(outcomes), 1):.1%})"
    )


def main(options: Options) -> int:
    warnings.simplefilter("ignore")
    jax.config.update("jax_disable_most_optimizations", True)  # compiling is nearly all of the time
    start, outcomes = time.perf_counter(), []
    for outcome in survey(options.op, options.samples_per_op, options.rest):
        outcomes.append(outcome)
        print(
            f"{outcome.passed:3d}/{outcome.total:<3d} {outcome.name:<50} {next(iter(outcome.failures), '')}", flush=True
        )
        if options.op is not None:
            for failure in outcome.failures[1:]:
                print(f"        {failure}")
    print(summary(outcomes))
    print(f"{time.perf_counter() - start:.0f} s")
    if options.markdown is not None:
        options.markdown.write_text(markdown(outcomes, options))
    return 0 if all(o.passed == o.total or gap(o.name) for o in outcomes) else 1


def gap(name: str) -> str | None:
    return GAPS.get(name) or GAPS.get(name.rsplit(".", 1)[0])


def not_run() -> list[str]:
    """What of the database is not among the figures, and why."""
    everything = database()
    absent = not_listed(dict.fromkeys(entry.name for entry in everything))
    names = {name for group in absent.values() for name in group}
    count = sum(entry.name in names for entry in everything)
    lines = [
        "## Not run",
        "",
        f"The database has {len(everything)} entries (a name with variants counts for each). The figures are of "
        f"{len(everything) - count} that models of this field use; {count} are in none of them, and no statement is "
        "made about those. `python -m benchmarks.op_survey --rest` runs them.",
        "",
        "| why not | entries |",
        "|---|---|",
    ]
    return [*lines, *(f"| {why} | {', '.join(f'`{n}`' for n in group)} |" for why, group in absent.items()), ""]


def markdown(outcomes: list[Outcome], options: Options) -> str:
    lines = [
        "# Op survey",
        "",
        "PyTorch's own op database (`torch.testing._internal.common_methods_invocations.op_db`) through the bridge:",
        "outputs and the gradient of every float input, float32, with some int64 and bool samples, under `jax.jit`,",
        "compared at 1e-5 of the leaf's largest entry (or 8 times PyTorch's own float32-to-float64 difference, where",
        "that is more).",
        "",
        "```bash",
        f"python -m benchmarks.op_survey --markdown {options.markdown}",
        "```",
        "",
        f"{time.strftime('%Y-%m-%d')}, {platform.machine()} CPU, torch {torch.__version__}, jax {jax.__version__}: "
        f"**{summary(outcomes)}**.",
        "",
    ]
    short = [o for o in outcomes if o.passed < o.total]
    if short:
        lines += ["## Known gaps", "", "| op | passed | reason |", "|---|---|---|"]
        lines += [f"| `{o.name}` | {o.passed}/{o.total} | {gap(o.name) or o.failures[0]} |" for o in short]
        lines += [""]
    loose = [o for o in outcomes if o.without_jit]
    if loose:
        names = ", ".join(f"`{o.name}` ({o.without_jit})" for o in loose)
        lines += [
            "## Outside `jit` only",
            "",
            "The shape of the result depends on the values of an input, which `jit` does not know. Samples that pass",
            f"with concrete inputs: {names}.",
            "",
        ]
    lines += not_run()
    lines += ["## By kind", "", "| kind | samples passed | ops passed whole |", "|---|---|---|"]
    for kind in dict.fromkeys(o.kind for o in outcomes):
        own = [o for o in outcomes if o.kind == kind]
        whole = sum(o.passed == o.total for o in own)
        lines.append(f"| {kind} | {sum(o.passed for o in own)}/{sum(o.total for o in own)} | {whole}/{len(own)} |")
    lines += ["", "## Every op", ""]
    for kind in dict.fromkeys(o.kind for o in outcomes):
        marks = [f"{o.name} {o.passed}/{o.total}" for o in outcomes if o.kind == kind]
        lines += [f"**{kind}**: {', '.join(marks)}", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(Options, description=__doc__)))
