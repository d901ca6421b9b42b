"""Runs PyTorch's op database through the bridge and through torchax: values and derivatives of every entry.

    python -m campaigns.op_survey [--op NAME] [--columns NAME ...] [--samples-per-op N] [--results F] [--markdown F]

Each column is described in `campaigns.op_columns`. A run takes hours; with `--results` it continues where it ended.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import platform
import time
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import torch
import tyro

from campaigns.op_columns import COLUMNS, PYTORCH_FAILS, RANDOM, database, lacking, reason, samples, time_limit
from campaigns.op_list import GAPS, kind_of, out_of_scope


@dataclasses.dataclass
class Outcome:
    """The results of the samples of one op, or of one variant of it, in one column."""

    name: str
    kind: str
    column: str = "float32"
    total: int = 0
    passed: int = 0
    without_jit: int = 0
    """Passed samples whose shapes depend on values; they pass only outside `jit`."""
    failures: list[str] = dataclasses.field(default_factory=list)
    scope: str | None = None
    """The reason why there is nothing to compare."""

    @property
    def verdict(self) -> str:
        """`right`, `refused` with an error, `wrong`, or `out of scope`."""
        if not self.total:
            return "out of scope"
        if self.passed == self.total:
            return "right"
        errors = () if self.column == "torchax" else _ERRORS
        refused = all(" is off by " not in why and (not errors or why.startswith(errors)) for why in self.failures)
        return "refused" if refused else "wrong"


_ERRORS = ("BridgeError", "NotImplementedError", "TimeoutError")


def entries(wanted: str | None = None) -> Iterator[tuple[str, str, Any]]:
    """Yields (kind, name with variant, database entry) of every op; `wanted`: of one."""
    for entry in database():
        if wanted in (None, entry.name, full_name(entry)):
            yield kind_of(entry.name), full_name(entry), entry


def full_name(entry: Any) -> str:
    return f"{entry.name}.{entry.variant_test_name}" if entry.variant_test_name else entry.name


def survey(
    wanted: str | None,
    limit: int,
    columns: Iterable[str] = ("float32",),
    known: Collection[tuple[str, str]] = (),
    limit_seconds: float = 120.0,
) -> Iterator[Outcome]:
    """Runs the entries in each column, except the known pairs of column and name."""
    for column in columns:
        for kind, name, entry in entries(wanted):
            if (column, name) not in known:
                yield outcome_of(Outcome(name, kind, column), entry, limit, limit_seconds)


def outcome_of(outcome: Outcome, entry: Any, limit: int, limit_seconds: float) -> Outcome:
    """Fills in the results of up to `limit` samples of an entry."""
    outcome.scope = out_of_scope(outcome.name) or lacking(entry, outcome.column)
    if outcome.scope:
        return outcome
    scope = "PyTorch has no sample of this type, or raises an error for it"
    nothing = {RANDOM: RANDOM, PYTORCH_FAILS: "PyTorch raises an error for its derivatives"}
    # PyTorch's forward formulas may assume a symmetric tangent; its own tests then use this form of the op.
    op = functools.partial(entry.gradcheck_wrapper, entry.op) if outcome.column == "forward mode" else entry.op
    for args, kwargs, process in samples(entry, outcome.column, limit):
        try:
            with torch.no_grad():
                op(*args, **kwargs)
        except Exception:  # PyTorch itself raises an error
            continue
        try:
            with time_limit(limit_seconds):
                why, jit = reason(outcome.column, op, args, kwargs, process)
        except TimeoutError as error:
            why = f"TimeoutError: {error}"
            jit = True
        if any(text in (why or "") for text in nothing):
            scope = next(nothing[text] for text in nothing if text in (why or ""))
            continue
        outcome.total += 1
        outcome.passed += why is None
        outcome.without_jit += why is None and not jit
        if why is not None:
            outcome.failures.append(why)
    outcome.scope = None if outcome.total else scope
    return outcome


@dataclasses.dataclass(frozen=True)
class Options:
    """Survey the bridge with PyTorch's own op database."""

    op: str | None = None
    """One op of the database, with or without its variant; by default all."""
    columns: tuple[str, ...] = COLUMNS
    """The columns to run."""
    samples_per_op: int = 6
    """Samples of each op (or variant) in each column."""
    limit_seconds: float = 120.0
    """A sample that takes longer is refused."""
    markdown: Path | None = None
    """Write the table as Markdown to this file."""
    results: Path | None = None
    """Keep the outcomes in this file, one line of JSON each, and continue from the outcomes that are already in it."""


def main(options: Options) -> int:
    warnings.simplefilter("ignore")
    jax.config.update("jax_disable_most_optimizations", True)  # compiling is nearly all of the time
    start = time.perf_counter()
    lines = options.results.read_text().splitlines() if options.results and options.results.exists() else []
    outcomes = [Outcome(**json.loads(line)) for line in lines]
    known = {(outcome.column, outcome.name) for outcome in outcomes}
    columns = [column for column in COLUMNS if column in options.columns]
    for outcome in survey(options.op, options.samples_per_op, columns, known, options.limit_seconds):
        outcomes.append(outcome)
        if options.results:
            with options.results.open("a") as file:
                file.write(json.dumps(dataclasses.asdict(outcome)) + "\n")
        shown = outcome.failures if options.op else outcome.failures[:1]
        mark = f"{outcome.passed:3d}/{outcome.total:<3d} {outcome.column:<12} {outcome.name:<50} "
        print(mark + "\n        ".join(shown), flush=True)
    print(f"{time.perf_counter() - start:.0f} s")
    for column in columns:
        print(column, *Counter(o.verdict for o in outcomes if o.column == column).items())
    if options.markdown is not None:
        options.markdown.write_text(markdown(outcomes, options))
    return 0 if all(o.verdict != "wrong" or o.column == "torchax" or gap(o) for o in outcomes) else 1


def gap(outcome: Outcome) -> str | None:
    """Returns the known reason why samples of the op fail in this column, or in every column of the bridge."""
    return next((GAPS[key] for key in gap_keys(outcome) if key in GAPS), None)


def gap_keys(outcome: Outcome) -> list[str]:
    names = outcome.name, outcome.name.rsplit(".", 1)[0]
    own = (f"{outcome.column}: {{}}",) if outcome.column == "torchax" else (f"{outcome.column}: {{}}", "{}")
    return [key.format(name) for name in names for key in own]


ABOUT = """# Op survey

PyTorch's op database (`torch.testing._internal.common_methods_invocations.op_db`) was run under `jax.jit`, with inputs
that PyTorch generates for its own tests, and compared with PyTorch eager, which also gives the random numbers.

- **float32**: values, and gradients of every float input (reverse mode), through the bridge; also int64 and bool.
- **bfloat16**, **complex64**: the same with inputs of these types.
- **forward mode**: values and one directional derivative, `torch.autograd.forward_ad` beside `jax.jvp`.
- **torchax**: the float32 samples through torchax alone (`interop.jax_view`), values and gradients by `jax.grad`. Ops
  that draw random numbers are out of scope here.

The tolerance is 1e-5 of the largest entry of the leaf (bfloat16: 4 eps), or 8 times the difference of PyTorch's own
result from its float64 result if that is larger. An op is *right* if all of its samples are, *refused* if some end in
an error and none is wrong, and *out of scope* where PyTorch has nothing to compare with.
"""


def markdown(outcomes: list[Outcome], options: Options) -> str:
    outcomes = sorted(outcomes, key=lambda o: COLUMNS.index(o.column))
    columns = list(dict.fromkeys(o.column for o in outcomes))
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "jax", "torchax"))
    settings = f"--samples-per-op {options.samples_per_op} --results survey.jsonl --markdown {options.markdown}"
    lines = [ABOUT, "```bash", f"python -m campaigns.op_survey {settings}", "```", ""]
    lines += [f"{time.strftime('%Y-%m-%d')}, {platform.machine()} CPU, {versions}:", ""]
    lines += [
        "| column | in scope | right | refused (torchax: error) | wrong | of these explained | out of scope |",
        "|---|---|---|---|---|---|---|",
    ]
    for column in columns:
        own = [o for o in outcomes if o.column == column]
        count = Counter(o.verdict for o in own)
        known = sum(o.verdict == "wrong" and gap(o) is not None for o in own)
        inside = len(own) - count["out of scope"]
        share = f"{count['right']} ({count['right'] / max(inside, 1):.1%})"
        marks = inside, share, count["refused"], count["wrong"], known, count["out of scope"]
        lines.append(f"| {column} | {' | '.join(map(str, marks))} |")
    narrow = {full_name(e) for e in database() if e.supports_autograd and torch.float32 in e.dtypes}
    found = [o.verdict for o in outcomes if o.column == "float32" and o.name in narrow and o.verdict != "out of scope"]
    right = found.count("right")
    share = f"{right} ({right / max(len(found), 1):.1%})"
    lines += ["", f"Of the {len(found)} float32 entries with gradients, {share} are right with all samples."]
    ours = [o for o in outcomes if o.column != "torchax"]
    torchax = [o for o in outcomes if o.column == "torchax"]
    for title, chosen, verdict in (
        ("Wrong in the bridge", ours, "wrong"),
        ("Refused by the bridge", ours, "refused"),
        ("Wrong in torchax", torchax, "wrong"),
        ("Errors of torchax", torchax, "refused"),
    ):
        lines += ["", *table(title, [o for o in chosen if o.verdict == verdict])]
    unmet = GAPS.keys() - {key for o in outcomes if o.failures for key in gap_keys(o)}
    lines += ["", "## Gaps that these samples did not meet", "", *(f"- `{key}`: {GAPS[key]}" for key in sorted(unmet))]
    lines += ["", "## Out of scope", ""]
    return "\n".join([*lines, *nothing_to_compare(outcomes, columns), "", *every_op(outcomes, columns), ""])


def nothing_to_compare(outcomes: list[Outcome], columns: list[str]) -> Iterator[str]:
    """Yields a line for each reason why entries are out of scope, with the columns that share it."""
    where: dict[tuple[str, str], list[str]] = {}
    for o in outcomes:
        if o.scope:
            where.setdefault((o.name, o.scope), []).append(o.column)
    reasons: dict[str, list[str]] = {}
    for (name, why), own in where.items():
        place = "all columns" if len(own) == len(columns) else ", ".join(own)
        reasons.setdefault(f"{place}: {why}", []).append(f"`{name}`")
    yield from (f"- {why}: {', '.join(names)}" for why, names in sorted(reasons.items()))


def refusal(outcome: Outcome) -> str:
    """Returns the known reason, or the first error without characters that would break a table."""
    text = gap(outcome) or outcome.failures[0].removeprefix("BridgeError: ")
    return text.replace("the exported call fails where PyTorch does not, in step 0: ", "").replace("|", "/")


def table(title: str, outcomes: list[Outcome]) -> list[str]:
    """Returns a section with each op's reason and the columns that share it."""
    columns: dict[tuple[str, str], list[str]] = {}
    for o in outcomes:
        columns.setdefault((o.name, refusal(o)), []).append(f"{o.column} {o.passed}/{o.total}")
    lines = [f"| `{name}` | {', '.join(own)} | {why} |" for (name, why), own in columns.items()]
    return [f"## {title}", "", "| op | samples right | reason |", "|---|---|---|", *lines] if lines else []


def every_op(outcomes: list[Outcome], columns: list[str]) -> list[str]:
    """Returns a table of all ops by kind."""
    verdicts = {
        (o.name, o.column): "error"
        if o.column == "torchax" and o.verdict == "refused"
        else o.verdict + (" (jit)" if o.without_jit else "")
        for o in outcomes
    }
    lines = [
        "## Every op",
        "",
        "`(jit)`: shapes of some results depend on values, so the op is right outside of `jit` only.",
        "",
    ]
    lines += [f"| op | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    kinds = {o.name: o.kind for o in outcomes}
    for kind in dict.fromkeys(kinds.values()):
        lines.append(f"| **{kind}** |" + " |" * len(columns))
        for name in (name for name, own in kinds.items() if own == kind):
            marks = (verdicts.get((name, column), "not run").replace("out of scope", "-") for column in columns)
            lines.append(f"| `{name}` | {' | '.join(marks)} |")
    return lines


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(Options, description=__doc__)))
