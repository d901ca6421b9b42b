"""Runs models that nobody here wrote as people call them, against PyTorch, and writes a page by family.

    python -m campaigns.atlas atlas.jsonl [--every 20 --seed 0] [--zoo FOLDER] [--train] [--page docs/atlas.md]

Every model is built with random numbers, its weights are perturbed, and `bridge.verify` compares outputs, gradients and
buffers of two calls. Each model has a process and a limit of CPU time, so that the load of the machine decides nothing.
A file of results is continued where it ends.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import logging
import multiprocessing
import os
import re
import resource
import signal
import textwrap
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

import bridge
from campaigns.atlas_help import HELP, Help
from campaigns.atlas_models import Entry, entries, import_torchvision, names_of
from campaigns.potentials import atlas_rows

NOISE = 0.05
"""Size of the noise added to all weights, so that none is zero."""
OUTPUT = 1e-4
GRADIENT = 1e-3
"""Tolerances."""
MEMORY = 10 * 2**30
"""Bytes that a model may take."""
WALL = 10
"""Seconds of wall time for each CPU second of the limit, on a machine that other work shares."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Models against PyTorch."""

    results: Annotated[Path, tyro.conf.Positional]
    """A file of JSON lines: one for each model and mode. Models that are in it are not run again."""
    every: int = 20
    """Try every n-th name in the registries of transformers, timm and diffusers. 0: none of them."""
    seed: int = 0
    """Decides the first one."""
    zoo: Path | None = None
    """A folder with `build.py`, whose `builders()` maps names to (family, function that makes a model)."""
    names: str = ""
    """A regular expression: try these alone."""
    train: bool = False
    """Run the models in training mode, with PyTorch's draws replayed."""
    with_help: bool = False
    """Try those again that were refused and have help in `atlas_help.py`."""
    limit: int = 300
    """CPU seconds for each model; one that sleeps is ended after `WALL` times as many."""
    page: Path | None = None
    """Write the page, and run nothing."""


def attempt(entry: Entry, train: bool, help_with: Help | None = None) -> dict[str, Any]:
    """Returns what came of one model."""
    torch.manual_seed(0)
    try:
        module, args, kwargs = entry.build()
    except Exception as error:
        return {"status": "not built", "cause": _short(error)}
    generator = torch.Generator().manual_seed(1)
    help_with = help_with or Help()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point():
                parameter.add_(NOISE * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
        module.train(train)
        module = help_with.applied(module, args, kwargs)
    try:
        report = bridge.verify(module, *args, tolerance=OUTPUT, **help_with.options, **kwargs)
    except bridge.BridgeError as error:
        of_pytorch = str(error).startswith("PyTorch itself fails")
        return {"status": "fails in PyTorch" if of_pytorch else "refused", "cause": str(error)}
    except MemoryError:
        return {"status": "over the limit", "cause": f"{MEMORY / 2**30:g} GiB of memory"}
    except Exception as error:
        return {"status": "raised", "cause": _short(error)}
    beyond = [row for row in report.rows if row.verdict == "beyond tolerance"]
    wrong = [row for row in beyond if not row.error <= (GRADIENT if "gradient" in row.kind else OUTPUT)]
    return {
        "status": _status([row.note for row in wrong]),
        "cause": str(wrong[0]).strip() if wrong else "",
        "ok": report.ok, "leaves": len(report.rows), "worst": report.worst.error, "beyond": len(beyond),
        "unproved": report.count("unproved"),
    }  # fmt: skip


def _status(notes: list[str]) -> str:
    """Returns the status that follows from the arbiter's notes on the leaves that differ."""
    if not notes or (any("rounding:" in note for note in notes) and not any(" is off:" in note for note in notes)):
        return "right"
    off = [any(f"{side} is off:" in note for note in notes) for side in ("PyTorch", "JAX")]
    return "PyTorch is off" if off == [True, False] else "different"


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:300]


def in_process(function: Callable[[], dict[str, Any]], limit: int) -> dict[str, Any]:
    """Returns the result of a function in a process of its own: `limit` CPU seconds, and what is imported here."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def send() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 1))  # of the process alone: a fork starts at 0
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sender.send(function())

    process = context.Process(target=send)
    process.start()
    sender.close()
    try:
        if not receiver.poll(WALL * limit):
            return {"status": "over the limit", "cause": f"{WALL * limit} s of wall time"}
        return receiver.recv()
    except EOFError:
        process.join()
        if process.exitcode == -signal.SIGXCPU:
            return {"status": "over the limit", "cause": f"{limit} s of CPU time"}
        return {"status": "crashed", "cause": f"exit status {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run(options: Options) -> None:
    """Appends a line for each model that has none."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    import_torchvision()
    chosen = entries(options.every, options.seed, options.zoo)
    chosen = {name: entry for name, entry in chosen.items() if re.search(options.names, name)}
    known = {(row["name"], row["train"], row["help"]): row["status"] for row in read(options.results)}
    done = {name for name, train, helped in known if train == options.train and helped == options.with_help}
    for name in names_of(chosen, done):
        if options.with_help and (name not in HELP or known.get((name, options.train, False)) != "refused"):
            continue
        start = time.monotonic()
        help_with = HELP[name] if options.with_help else None
        result = in_process(lambda n=name, h=help_with: attempt(chosen[n], options.train, h), options.limit)
        row = {"name": name, "family": chosen[name].family, "train": options.train, "help": options.with_help}
        seconds = round(time.monotonic() - start, 1)
        with options.results.open("a") as file:
            file.write(json.dumps(row | result | {"seconds": seconds}) + "\n")
        print(f"{name}: {result['status']}, {seconds} s", flush=True)


# ---- the page


_OUT = ("not built", "fails in PyTorch")
"""Outcomes that do not count as tried."""
_RIGHT = ("right", "PyTorch is off")
"""Counted as right."""


_MODES = {False: "evaluation", True: "training"}


def page(rows: list[dict[str, Any]]) -> str:
    """The results as Markdown: a table by family, and every model that is not right with its cause."""
    lines = ["", "## By family", "", *_table(rows), "", *_not_tried(rows)]
    lines += ["", "## Interatomic potentials", "", *_potentials()]
    lines += ["", "## Models that are not right as called", "", *_failures(rows)]
    return "\n".join(lines) + "\n"


def _table(rows: list[dict[str, Any]]) -> list[str]:
    """A row for each family: how many of the tried models are right, in each mode, as called and with help."""
    families = {family for row in rows for family in _families_of(row)}
    lines = ["| family | evaluation | with help | training | with help |", "|---|---|---|---|---|"]
    for family in sorted(families, key=lambda family: (family == "all", family)):
        members = [row for row in rows if family in _families_of(row)]
        cells = [cell for train in _MODES for cell in _shares([row for row in members if row["train"] == train])]
        lines.append(f"| {family} | {' | '.join(cells)} |")
    return lines


def _families_of(row: dict[str, Any]) -> set[str]:
    return {row["family"], row["family"].partition(",")[0], "all"}


def _shares(rows: list[dict[str, Any]]) -> tuple[str, str]:
    """Two cells: how many models of one mode are right as called, and with help."""
    helped = {row["name"] for row in rows if row["help"] and row["status"] in _RIGHT}
    tried = [row for row in rows if not row["help"] and row["status"] not in _OUT]
    right = sum(row["status"] in _RIGHT for row in tried)
    right_with_help = sum(row["status"] in _RIGHT or row["name"] in helped for row in tried)
    return _share(right, len(tried)), _share(right_with_help, len(tried))


def _not_tried(rows: list[dict[str, Any]]) -> list[str]:
    out = collections.Counter(_MODES[row["train"]] for row in rows if not row["help"] and row["status"] in _OUT)
    counts = " and ".join(f"{number} in {mode}" for mode, number in out.items())
    return [f"Models that do not build, or fail in PyTorch itself, are not counted: {counts}."] if out else []


def _potentials() -> list[str]:
    """A row for each potential, with what differentiates its forces again: these have a campaign of their own."""
    cells = "package, training | energy | forces | stress | gradients of a loss on forces | products with the Hessian"
    note = "Errors in float32, relative to the largest entry. [More, and the help](potentials.md#what-is-measured)."
    lines = [note, "", f"| {cells} | `verify` |", "|---|---|---|---|---|---|---|"]
    return lines + [f"| {' | '.join(row)} |" for row in atlas_rows()]


def _share(part: int, whole: int) -> str:
    return f"{part}/{whole} ({100 * part / whole:.0f} %)" if whole else ""


def _failures(rows: list[dict[str, Any]]) -> list[str]:
    """A row for each model that was tried and is not right, and a line with those that fail in PyTorch itself.

    Equal results in both modes have one row, with the cause in the first.
    """
    helped = {(row["name"], row["train"]): row["status"] for row in rows if row["help"]}
    causes: dict[tuple[str, ...], str] = {}
    modes: dict[tuple[str, ...], list[str]] = {}
    failed: dict[str, None] = {}
    for row in sorted(rows, key=lambda row: (row["family"], row["name"], row["train"])):
        if row["help"] or row["status"] in ("right", "not built"):
            continue
        if row["status"] in _OUT:
            failed[row["name"]] = None
            continue
        with_help = helped.get((row["name"], row["train"]))
        known = f"`{HELP[row['name']]}`: {with_help}".replace("|", " or ") if with_help else ""
        key = (row["name"], row["status"], known)
        causes.setdefault(key, _cell(row["cause"]))
        modes.setdefault(key, []).append(_MODES[row["train"]])
    lines = ["| model | mode | result | cause | help |", "|---|---|---|---|---|"]
    for (name, status, known), cause in causes.items():
        mode = modes[name, status, known]
        lines.append(f"| {name} | {mode[0] if len(mode) == 1 else 'both'} | {status} | {cause} | {known} |")
    if failed:
        lines += ["", f"These fail in PyTorch itself in at least one mode: {', '.join(failed)}."]
    return lines


_SHORTER = (
    (r", at (?:\S*/)?([\w.]+\.py:\d+)", r", \1"),
    (r"Python code asks for the value of a traced tensor \(.*?\) in .*?, (\S+:\d+)", r"value of a traced tensor, \1"),
    (
        r"`x\[mask\]` makes a shape that .*?, (\S+:\d+: `.*?`).*",
        r"shape that depends on data, \1",
    ),
    (r"^(\S+?)!?\s+\S+\s+\S+\s+\d+\s+((?:gradient|output|buffer) \S+).*", r"error \1 in \2"),
)
"""Patterns and their replacements: paths of files, the text that all messages of a cause share, columns of a report."""


def _cell(text: str) -> str:
    """The first sentence of a cause, without places in files; the file of results has the whole text."""
    for pattern, shorter in _SHORTER:
        text = re.sub(pattern, shorter, text)
    words = text.partition(". Remedy")[0].replace("|", "/").replace("<", "")
    return textwrap.shorten(words, 100, placeholder=" …")


def main(argv: list[str] | None = None) -> None:
    options = tyro.cli(Options, args=argv, description=__doc__)
    if options.page is None:
        return run(options)
    text = options.page.read_text() if options.page.exists() else ""
    head = text.partition("\n## By family")[0].rstrip("\n")
    options.page.write_text(head + "\n" + page(read(options.results)))


if __name__ == "__main__":
    main()
