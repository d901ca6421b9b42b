"""Records what the bridge computes for a corpus of modules, and names what another commit changes.

    python -m campaigns.bridge_corpus record before.json [--jobs N] [--only REGEX]
    python -m campaigns.bridge_corpus compare before.json        runs the corpus again
    python -m campaigns.bridge_corpus compare before.json after.json

A case is a module and three calls with different inputs. Outputs, gradients of parameters and of inputs, buffers and
written parameters are computed by a loop in plain PyTorch and by `bridge.export` under `jit`. A case is `right` if each
leaf agrees to 1e-4 of its largest entry, or to 8 times what PyTorch's own float32 differs from its float64. A gradient,
which jumps at the corner of a ReLU, may also differ by 0.1 if both sides agree in float64 to 1e-8. The others are
`wrong`. `refused` is a `BridgeError`, `crash` any other exception or the end of the process, `slow` a case beyond the
time limit, `unusable` one that PyTorch itself does not run. The record has the SHA-256 of JAX's numbers, two numbers
for each leaf, and the SHA-256 of the lowered programs. `compare` exits with 1 if a case that was right is not right.

Cases: the rows of semantics in both modes, every puzzle architecture, the two language models, and a train step of
every preset in a tiny size (`step/…`, without a PyTorch side: only the hashes and the numbers of one step).

`--zoo FOLDER` has the models of a folder instead, whose `build.py` has `builders()`: name -> (family, function that
returns a module, args and kwargs); each as called, and with `use_cache=False`. They need an environment of their own:

    python3.11 -m venv zoo && zoo/bin/pip install -c constraints.txt torch
    zoo/bin/pip install -c constraints.txt jax numpy torchax jaxtyping transformers x-transformers
    zoo/bin/pip install --no-deps torchvision==0.28.0 timm diffusers segmentation-models-pytorch vit-pytorch
    zoo/bin/pip install -c constraints.txt torch_geometric pillow importlib_metadata requests

Only `--no-deps` keeps PyTorch as it is. If torchvision's operators do not fit, only their names are defined.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROUNDING = 1e-5
"""Relative difference up to which two summaries of a leaf are the same but for rounding."""
KINDS = ("right", "wrong", "refused", "crash", "slow", "unusable")
Record = dict[str, Any]


# ---- one case


def outcome(case: Any, texts: Path | None = None) -> Record:
    """Runs a case in this process."""
    import bridge
    from campaigns import bridge_corpus_sides as sides
    from campaigns.bridge_corpus_numbers import summary

    if not isinstance(case, sides.Case):
        text, leaves = case.run()
        if texts:
            texts.write_text(text)
        program = hashlib.sha256(text.encode()).hexdigest()
        return {"status": "right", "why": "", "program": program, "numbers": summary([leaves])}
    try:
        reference = sides.in_pytorch(case)
    except Exception as error:
        return {"status": "unusable", "why": words(error)}
    try:
        translated = sides.in_jax(case, reference.draws)
    except bridge.BridgeError as error:
        return {"status": "refused", "why": words(error)}
    except Exception as error:
        return {"status": "crash", "why": words(error)}
    if texts:
        texts.write_text("\n".join(translated.texts))
    right, error, share, leaf = sides.compared(case, reference, translated)
    status = "right" if right else "wrong"
    why = leaf if share > 1 else ""
    entry = {"status": status, "why": why, "error": float(f"{error:.3g}"), "share": share}
    return entry | {"program": translated.program, "numbers": summary(translated.leaves)}


def words(error: BaseException) -> str:
    text = " ".join(str(error).split()) or "no message"
    text = re.sub(r"0x[0-9a-f]+", "0x…", f"{type(error).__name__}: {text}")
    return re.sub(r"(/[^\s:]*)?/([^\s/:]+\.py):\d+", r"\2", text)[:200]  # another checkout, other lines


def serve(zoo: Path | None, texts: Path | None) -> None:
    """Runs the cases whose names come by standard input; writes one line of JSON for each."""
    out = os.fdopen(os.dup(1), "w")
    sys.stdout = sys.stderr
    os.dup2(2, 1)  # what a library prints goes elsewhere
    import jax
    import torch

    from campaigns.bridge_corpus_cases import all_cases

    torch.set_num_threads(1)  # its tensors are tiny, and threads that wait for a busy core cost tenfold
    jax.config.update("jax_disable_most_optimizations", True)  # compiles in a part of the time
    cases = all_cases(zoo)
    for line in sys.stdin:
        name = line.strip()
        file = texts / f"{re.sub('[^A-Za-z0-9_.-]', '_', name)}.mlir" if texts else None
        child = os.fork() if zoo else 0  # a call that fails may leave the state of a library changed
        if child:
            status = os.waitpid(child, 0)[1]
            if status:
                print(json.dumps({"status": "crash", "why": f"the process ended with {status}"}), file=out, flush=True)
            continue
        try:
            entry = outcome(cases[name](), file)
        except Exception as error:
            entry = {"status": "unusable", "why": words(error)}
        print(json.dumps(entry), file=out, flush=True)
        if zoo:
            os._exit(0)
        jax.clear_caches()


# ---- all cases


class Worker:
    """A process that runs one case after another; a new one replaces it after a crash."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.process = None

    def run(self, name: str) -> Record:
        begun = time.monotonic()
        if self.process is None:
            command = [sys.executable, "-m", "campaigns.bridge_corpus", "serve"]
            for option in ("zoo", "texts"):
                if getattr(self.options, option):
                    command += [f"--{option}", str(getattr(self.options, option).resolve())]
            pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            self.process = subprocess.Popen(command, text=True, start_new_session=True, **pipes)
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(f"{name}\n")
        self.process.stdin.flush()
        ready, _, _ = select.select([self.process.stdout], [], [], self.options.limit)
        line = self.process.stdout.readline() if ready else ""
        if line:
            entry = json.loads(line)
        else:
            why = f"the process ended with {self.process.wait()}" if ready else f"more than {self.options.limit} s"
            entry = {"status": "crash" if ready else "slow", "why": why}
            self.close()
        return entry | {"seconds": round(time.monotonic() - begun, 2)}

    def close(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # with its fork
            self.process.communicate()
            self.process = None


def record(options: argparse.Namespace) -> dict[str, Record]:
    """Runs the chosen cases; what `options.output` has already is kept."""
    from campaigns.bridge_corpus_cases import all_cases

    kept = options.output if options.resume and options.output and options.output.exists() else None
    results: dict[str, Record] = json.loads(kept.read_text()) if kept else {}
    names = iter([n for n in all_cases(options.zoo) if re.search(options.only, n) and n not in results])
    lock = threading.Lock()

    def work() -> None:
        worker = Worker(options)
        while True:
            with lock:
                name = next((n for n in names if not needs_no_help(n, results)), None)
            if name is None:
                return worker.close()
            entry = worker.run(name)
            with lock:
                results[name] = entry
                print(f"{entry['status']:8} {name} {entry['why']}", flush=True)
                if options.output:
                    write(options.output, results)

    threads = [threading.Thread(target=work) for _ in range(options.jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(counts(results))
    return results


def needs_no_help(name: str, results: dict[str, Record]) -> bool:
    """Returns True for a case of a model with help if the model is right as called."""
    called = name.replace("/with help", "/as called")
    return called != name and results.get(called, {}).get("status") == "right"


def write(path: Path, results: dict[str, Record]) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps(dict(sorted(results.items())), indent=0))
    new.replace(path)


def counts(results: dict[str, Record]) -> str:
    number = Counter(entry["status"] for entry in results.values())
    return f"{len(results)} cases: " + ", ".join(f"{number[kind]} {kind}" for kind in KINDS if number[kind])


# ---- comparison


def compare(before: dict[str, Record], after: dict[str, Record]) -> int:
    """Prints the differences; returns the number of cases that were right before and no longer are."""
    lost = []
    programs = []
    changed = []
    rounding = []
    for name in sorted(before.keys() & after.keys()):
        old = before[name]
        new = after[name]
        if old["status"] != new["status"]:
            print(f"{name}: {old['status']} -> {new['status']} {new['why'] or old['why']}")
            lost += [name] * (old["status"] == "right")
        elif "numbers" in old:
            if old["program"] != new["program"]:
                programs.append(name)
            if old["numbers"]["sha256"] != new["numbers"]["sha256"]:
                leaf, gap = difference(old["numbers"]["leaves"], new["numbers"]["leaves"])
                (rounding if gap <= ROUNDING else changed).append(name)
                if gap > ROUNDING:
                    print(f"{name}: other numbers, {leaf} by {gap:.1e}")
        elif old["why"] != new["why"]:
            print(f"{name}: still {old['status']}, {old['why']}\n    -> {new['why']}")
    for title, names in (("other programs", programs), ("other numbers, by rounding", rounding)):
        if names:
            print(f"{title}: {', '.join(names)}")
    missing = before.keys() - after.keys()
    print(f"before: {counts(before)}\nafter:  {counts(after)}")
    print(
        f"{len(lost)} no longer right, {len(programs)} other programs, {len(changed)} other numbers, "
        f"{len(rounding)} other by rounding, {len(missing)} not run, {len(after.keys() - before.keys())} new"
    )
    return len(lost)


def difference(old: dict[str, list[float]], new: dict[str, list[float]]) -> tuple[str, float]:
    """Returns the leaf whose summary differs most, relative to its norm, and by how much."""
    worst = "", 0.0
    for name in old.keys() | new.keys():
        if name not in old or name not in new:
            return name, float("inf")
        scale = max(old[name][0], new[name][0], 1e-3)
        gap = max(abs(a - b) for a, b in zip(old[name], new[name], strict=True)) / scale
        if gap > worst[1]:
            worst = name, gap
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recorder, comparer, server = (commands.add_parser(name) for name in ("record", "compare", "serve"))
    recorder.add_argument("output", type=Path)
    comparer.add_argument("before", type=Path)
    comparer.add_argument("after", type=Path, nargs="?")
    for each in (recorder, comparer, server):
        each.add_argument("--zoo", type=Path, help="folder with build.py, in place of the project's own cases")
        each.add_argument("--texts", type=Path, help="folder for the texts of the programs")
    for each in (recorder, comparer):
        each.add_argument("--jobs", type=int, default=1, help="processes")
        each.add_argument("--only", default="", help="regular expression over names")
        each.add_argument("--limit", type=float, default=300, help="seconds for a case")
        each.add_argument("--resume", action="store_true", help="keep the cases that the output has")
    options = parser.parse_args()
    if options.command == "serve":
        return serve(options.zoo, options.texts)
    if options.texts:
        options.texts.mkdir(parents=True, exist_ok=True)
    if options.command == "record":
        record(options)
        return
    before = json.loads(options.before.read_text())
    options.output = None
    after = json.loads(options.after.read_text()) if options.after else record(options)
    sys.exit(bool(compare({n: r for n, r in before.items() if re.search(options.only, n)}, after)))


if __name__ == "__main__":
    main()
