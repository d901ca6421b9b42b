"""Runs PyTorch's op database through the bridge: values and gradients of every entry.

    python -m benchmarks.op_survey [--op NAME] [--samples-per-op N] [--results FILE] [--markdown docs/dev/op_survey.md]

Every sample input of the database in `torch.testing` runs in PyTorch eager and, under `jax.jit`, through the bridge.
Outputs and the gradient of every float input are compared. The tolerance is 1e-5 of the largest entry of the leaf, or 8
times the difference of PyTorch's float32 and float64 results if that is larger. PyTorch's random numbers are replayed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import platform
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import torch
import tyro
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

import bridge
from benchmarks.op_list import GAPS, kind_of, out_of_scope
from bridge.parity import Row

TOLERANCE = 1e-5
SETTINGS: Any = {"steps": 1, "tolerance": TOLERANCE, "input_gradients": False, "int64": "wrap"}
"""Options of `verify`: inputs with gradients are parameters here, and the integers in the samples are small."""


class Call(nn.Module):
    """An op as a module: differentiable inputs are parameters, other tensors are arguments of `forward`.

    `process` is a function of the database that removes undefined parts of the outputs, such as signs of eigenvectors.
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
        # A result that is an input itself, or a subclass of list, is returned as a plain tensor or tuple.
        return tuple(out) if isinstance(out, (tuple, list)) else out


@dataclasses.dataclass
class Outcome:
    """The results of the samples of one op, or of one variant of it."""

    name: str
    kind: str
    total: int = 0
    passed: int = 0
    without_jit: int = 0
    """Passed samples whose shapes depend on values; they pass only outside `jit`."""
    failures: list[str] = dataclasses.field(default_factory=list)

    @property
    def verdict(self) -> str:
        """`right`, `refused` with an error, `wrong`, or `out of scope`."""
        if out_of_scope(self.name):
            return "out of scope"
        if self.passed == self.total:
            return "right" if self.total else "out of scope"
        return "refused" if all(why.startswith(_ERRORS) for why in self.failures) else "wrong"


_ERRORS = ("BridgeError", "NotImplementedError")


def database() -> list[Any]:
    module: Any = importlib.import_module("torch.testing._internal.common_methods_invocations")
    # The original version seeds in the call, which makes the draws constants; `verify` replays PyTorch's instead.
    module.wrapper_set_seed = unseeded
    return module.op_db


def entries(wanted: str | None = None) -> Iterator[tuple[str, str, Any]]:
    """Yields (kind, name with variant, database entry) of every op; `wanted`: of one."""
    for entry in database():
        if wanted in (None, entry.name, full_name(entry)):
            yield kind_of(entry.name), full_name(entry), entry


def unseeded(op: Callable, *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


def full_name(entry: Any) -> str:
    return f"{entry.name}.{entry.variant_test_name}" if entry.variant_test_name else entry.name


def samples(entry: Any, limit: int) -> Iterator[tuple[tuple, dict, Callable]]:
    """Yields up to `limit` evenly spaced float32 samples and, if the op supports them, two of int64 and two of bool."""
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
    """Returns the same sample in float64."""

    def widen(t: torch.Tensor) -> torch.Tensor:
        return t.detach().double().requires_grad_(t.requires_grad) if t.dtype == torch.float32 else t

    return tree_map_only(torch.Tensor, widen, (args, kwargs))


def within(row: Row) -> bool:
    """Returns True if the error is within the tolerance. Inputs and cotangents are of order 1, which float32 rounds to
    1e-7, so the scale of a leaf is at least 1e-2.
    """
    return row.error * row.scale <= row.tolerance * max(row.scale, 1e-2)


def reason(op: Callable, args: tuple, kwargs: dict, process: Callable) -> tuple[str | None, bool]:
    """Returns (reason of the failure or `None`, whether the sample ran under `jit`)."""
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
            with contextlib.suppress(RuntimeError):  # the op does not accept one of the float64 inputs
                report = bridge.verify(module, *module.inputs, **SETTINGS, jit=jit, double=wide)
    except Exception as error:
        return f"{type(error).__name__}: {error}".split(" in the module", 1)[0].split("\n", 1)[0][:240], jit
    row = next((r for r in report.rows if not within(r)), None)
    if row is None:
        return None, jit
    return f"{row.kind} {row.name} is off by {row.error:.1e} of {row.scale:.1e}", jit


def survey(wanted: str | None, limit: int, known: dict[str, Outcome] | None = None) -> Iterator[Outcome]:
    """Runs the entries, except those with a known outcome."""
    for kind, name, entry in entries(wanted):
        outcome = Outcome(name, kind)
        if out_of_scope(name) or name in (known or {}):
            yield (known or {}).get(name, outcome)
            continue
        for args, kwargs, process in samples(entry, limit):
            if any(torch.is_tensor(t) and t.is_complex() for t in tree_flatten((args, kwargs))[0]):
                continue
            try:
                with torch.no_grad():
                    entry.op(*args, **kwargs)
            except Exception:  # PyTorch itself raises an error
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
    """One op of the database, with or without its variant; by default all."""
    samples_per_op: int = 6
    """Float32 samples of each op (or variant)."""
    markdown: Path | None = None
    """Write the table as Markdown to this file."""
    results: Path | None = None
    """Keep the outcomes in this file, one line of JSON each, and continue from the outcomes that are already in it."""


def summary(outcomes: list[Outcome]) -> str:
    passed, total = sum(o.passed for o in outcomes), sum(o.total for o in outcomes)
    count = Counter(o.verdict for o in outcomes)
    whole = count["right"] / max(len(outcomes) - count["out of scope"], 1)
    return (
        f"{passed} of {total} samples pass ({passed / max(total, 1):.1%}); of {len(outcomes)} entries, "
        f"{count['right']} are right ({whole:.1%} of those in scope), {count['refused']} refused, "
        f"{count['wrong']} wrong, {count['out of scope']} out of scope"
    )


def main(options: Options) -> int:
    warnings.simplefilter("ignore")
    jax.config.update("jax_disable_most_optimizations", True)  # compiling is nearly all of the time
    start, outcomes = time.perf_counter(), []
    lines = options.results.read_text().splitlines() if options.results and options.results.exists() else []
    known = {outcome.name: outcome for outcome in (Outcome(**json.loads(line)) for line in lines)}
    for outcome in survey(options.op, options.samples_per_op, known):
        outcomes.append(outcome)
        if options.results and outcome.name not in known:
            with options.results.open("a") as file:
                file.write(json.dumps(dataclasses.asdict(outcome)) + "\n")
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
    return 0 if all(o.verdict != "wrong" or gap(o.name) for o in outcomes) else 1


def gap(name: str) -> str | None:
    return GAPS.get(name) or GAPS.get(name.rsplit(".", 1)[0])


def refusal(outcome: Outcome) -> str:
    """Returns the first error, without characters that would break a table."""
    text = outcome.failures[0].removeprefix("BridgeError: ")
    return text.replace("the exported call fails where PyTorch does not, in step 0: ", "").replace("|", "/")


def table(title: str, text: list[str], rows: Iterable[tuple[Outcome, str | None]]) -> list[str]:
    """Returns a section with each outcome and its reason; empty without rows."""
    lines = [f"| `{o.name}` | {o.passed}/{o.total} | {why} |" for o, why in rows]
    return [f"## {title}", "", *text, "| op | passed | reason |", "|---|---|---|", *lines, ""] if lines else []


def markdown(outcomes: list[Outcome], options: Options) -> str:
    lines = [
        "# Op survey",
        "",
        "PyTorch's op database (`torch.testing._internal.common_methods_invocations.op_db`) was run through the bridge",
        "under `jax.jit`: every entry, in float32, with some int64 and bool samples. Outputs and the gradient of every",
        "float input were compared with PyTorch eager. The tolerance is 1e-5 of the largest entry of the leaf, or 8",
        "times the difference of PyTorch's float32 and float64 results if that is larger.",
        "",
        "```bash",
        f"python -m benchmarks.op_survey --markdown {options.markdown}",
        "```",
        "",
        f"{time.strftime('%Y-%m-%d')}, {platform.machine()} CPU, torch {torch.__version__}, jax {jax.__version__}: "
        f"**{summary(outcomes)}**.",
        "",
    ]
    by_verdict = {v: [o for o in outcomes if o.verdict == v] for v in ("wrong", "refused", "out of scope")}
    lines += table("Known gaps", [], ((o, gap(o.name) or o.failures[0]) for o in by_verdict["wrong"]))
    text = ["Some or all samples end in an error; none of these has a wrong value.", ""]
    lines += table("Refused", text, ((o, gap(o.name) or refusal(o)) for o in by_verdict["refused"]))
    nothing = "PyTorch has no sample of float32, int64 or bool, or raises an error for it"
    lines += table("Out of scope", [], ((o, out_of_scope(o.name) or nothing) for o in by_verdict["out of scope"]))
    loose = [o for o in outcomes if o.without_jit]
    if loose:
        names = ", ".join(f"`{o.name}` ({o.without_jit})" for o in loose)
        lines += [
            "## Outside `jit` only",
            "",
            "The shape of the result depends on the values of an input, which are unknown under `jit`. These samples",
            f"pass with concrete inputs: {names}.",
            "",
        ]
    lines += ["## By kind", "", "| kind | samples passed | ops with every sample passed |", "|---|---|---|"]
    for kind in dict.fromkeys(o.kind for o in outcomes):
        own = [o for o in outcomes if o.kind == kind]
        own = [o for o in own if o.verdict != "out of scope"]
        whole = sum(o.verdict == "right" for o in own)
        lines.append(f"| {kind} | {sum(o.passed for o in own)}/{sum(o.total for o in own)} | {whole}/{len(own)} |")
    lines += ["", "## Every op", ""]
    for kind in dict.fromkeys(o.kind for o in outcomes):
        marks = [f"{o.name} {o.passed}/{o.total}" for o in outcomes if o.kind == kind]
        lines += [f"**{kind}**: {', '.join(marks)}", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(Options, description=__doc__)))
