"""Runs the models of the work list as people call them, against PyTorch.

    python -m campaigns.new_kinds_run campaigns/new_kinds.jsonl [--names REGEX] [--seconds 300]

`new_kinds_models.py` has a function for each model. Its packages need an environment of their own; a model whose
package is missing is left out. A file of results is continued where it ends.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

import bridge
from campaigns.new_kinds import LISTS
from campaigns.new_kinds_calls import Model, import_without_operators
from campaigns.new_kinds_models import EDITS, HELP, MODELS

_WORK = Path(__file__).parent / LISTS[0]


@dataclasses.dataclass(frozen=True)
class Options:
    """Models of new kinds against PyTorch."""

    results: Annotated[Path, tyro.conf.Positional]
    """A file of JSON lines, one for each model."""
    names: str = ""
    """A regular expression: run these alone, again if they are in the file."""
    seconds: float = 300
    """Limit for one model."""


def run(name: str) -> dict[str, Any]:
    """Returns the result for a model: as called, with named help, refused, wrong, or an error of another kind."""
    outcome = _compared(name, {})
    if outcome["result"] == "refused" and (name in HELP or name in EDITS):
        helped = _compared(name, HELP.get(name, {}), EDITS.get(name, _unchanged))
        if helped["result"] == "as called":
            used = [*sorted(HELP.get(name, {})), *([EDITS[name].__name__.replace("_", " ")] if name in EDITS else [])]
            return helped | {"result": "with named help", "help": used, "message": outcome["message"]}
    return outcome


def _unchanged(model: Model) -> Model:
    return model


def _compared(name: str, settings: dict[str, Any], edit: Callable[[Model], Model] = _unchanged) -> dict[str, Any]:
    torch.manual_seed(0)
    try:
        model = edit(MODELS[name]())
    except ImportError as error:
        return {"result": "not installed", "message": str(error)}
    except Exception as error:
        return {"result": "error", "message": f"it is not built: {type(error).__name__}: {error}"[:400]}
    try:
        report = bridge.verify(model.module, *model.args, **model.settings, **settings)
    except bridge.BridgeError as error:
        kind = "error" if "PyTorch itself fails" in str(error) else "refused"
        return {"result": kind, "message": str(error)}
    except Exception as error:
        return {"result": "error", "message": f"{type(error).__name__}: {error}"[:400]}
    if report.ok:
        return {"result": "as called", "message": ""}
    return {"result": "wrong", "message": str(report)[:400]}


def _in_process(name: str, pipe: Any) -> None:
    warnings.simplefilter("ignore")
    import_without_operators()
    pipe.send(run(name))


def _limited(name: str, seconds: float) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_in_process, args=(name, sender))
    process.start()
    sender.close()
    try:
        if receiver.poll(seconds):
            return receiver.recv()
        return {"result": "error", "message": f"no result after {seconds:.0f} s"}
    except EOFError:
        return {"result": "error", "message": "the process ended without a result"}
    finally:
        process.kill()
        process.join()


def main(options: Options) -> None:
    lines = options.results.read_text().splitlines() if options.results.exists() else []
    known = {row["model"]: row for row in map(json.loads, lines)}
    for line in _WORK.read_text().splitlines():
        name, package, _ = line.split("\t")
        wanted = re.search(options.names, name) if options.names else name not in known
        if name not in MODELS or not wanted:
            continue
        known[name] = {"model": name, "package": package, **_limited(name, options.seconds)}
        print(f"{known[name]['result']:16} {name}: {known[name]['message'][:200]}", flush=True)
        text = "".join(f"{json.dumps(row)}\n" for row in known.values())
        options.results.write_text(text)


if __name__ == "__main__":
    main(tyro.cli(Options))
