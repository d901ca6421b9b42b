"""Trains forty small runs and hashes what they end with: weights, averages, optimizer state, buffers and carry.

    python -m campaigns.same_weights                                        # compares this checkout with the record
    python -m campaigns.same_weights --tree ../old --record old.json        # records another checkout
    python -m campaigns.same_weights "sudoku9" "muon" --against old.json    # compares some runs with another record

A run that cannot be trained has its message in place of hashes. The hashes depend on the processor and on the versions
of JAX and PyTorch, which a record has; on a machine with others, record the old commit anew. Exit status 1 if a run
differs.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORD = Path(__file__).with_name("same_weights.json")
STEPS = 3

DATA = (
    "build-data sudoku --size 4 --num-train 32 --num-test 16 --output-dir sudokus",
    "build-data sudoku --size 4 --num-train 24 --num-test 16 --num-aug 1 --seed 1 --output-dir augmented",
    "build-data maze --size 5 --kind perfect --min-path 3 --num-train 32 --num-test 16 --output-dir mazes",
    "build-data text --source texts --vocab-size 280 --test-share 0.2 --output-dir words",
    "build-data chat --tasks arithmetic:60 --tokenizer words --test-share 0.2 --output-dir talks",
    "build-data instructions --tasks arithmetic:60 --tokenizer words --test-share 0.2 --output-dir instructions",
)
MODULE = '''
import torch
from torch import nn


class Counting(nn.Module):
    """A plain module with running statistics, dropout and a parameter that is not trained."""

    def __init__(self, vocab_size, seq_len):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, 8)
        self.norm = nn.BatchNorm1d(seq_len)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(8, vocab_size)
        self.scale = nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, inputs):
        return self.head(self.drop(torch.tanh(self.norm(self.embed(inputs)) * self.scale)))
'''

EVERY = (
    f"--wandb disabled --steps {STEPS} --eval-every-steps 0 --checkpoint-every-steps {STEPS} --log-every-steps 1 "
    "--optim.warmup-steps 2"
)
PUZZLES = f"{EVERY} --data-dir sudokus --global-batch-size 8 --eval-batch-size 16 --eval-examples 0"
SMALL = "--arch.hidden-size 16 --arch.num-heads 2 --arch.puzzle-emb-ndim 16 --arch.mlp-multiple-of 8"
QUICK = f"{SMALL} --arch.H-cycles 2 --arch.L-cycles 1 --arch.L-layers 1 --arch.halt-max-steps 2"
TINY = f"tiny {PUZZLES} {QUICK}"
ATTENTION = "--arch.no-mlp-t --arch.pos-encodings rope"
TEXT = f"{EVERY} --data-dir words --global-batch-size 4 --eval-batch-size 4"
GPT = "--arch.seq-len 64 --arch.vocab-size 280 --arch.n-layer 2 --arch.n-head 2 --arch.n-kv-head 2 --arch.n-embd 32"
GROUPS = json.dumps([{"pattern": ".*embed.*", "optimizer": "lion"}, {"pattern": ".*head.*", "lr": 0.01}])

CASES: dict[int, dict[str, str]] = {
    1: {
        "tiny": TINY,
        "sudoku-extreme": f"sudoku-extreme {PUZZLES} {QUICK}",
        "sudoku9": f"sudoku9 {PUZZLES} {SMALL}",
        "sudoku6": f"sudoku6 {PUZZLES} {QUICK}",
        "study": f"study {PUZZLES} {QUICK}",
        "maze-unique": f"maze-unique {PUZZLES} {QUICK} --data-dir mazes",
        "attention": f"{TINY} {ATTENTION}",
        "trm_singlez": f"tiny {PUZZLES} --model trm_singlez {QUICK}",
        "trm_hier6": f"tiny {PUZZLES} --model trm_hier6 {QUICK}",
        "hrm": f"tiny {PUZZLES} --model hrm {SMALL} --arch.H-cycles 2 --arch.L-cycles 1 --arch.halt-max-steps 2",
        "transformer": f"tiny {PUZZLES} --model transformer {SMALL} --arch.halt-max-steps 2",
        "module of the user": f"tiny {PUZZLES} --model counting:Counting --no-verify",
        "bfloat16": f"{TINY} --arch.forward-dtype bfloat16",
        "float16": f"{TINY} --arch.forward-dtype float16 --optim.loss-scale-growth-steps 1",
        "adam_atan2": f"{TINY} --optim.optimizer adam_atan2",
        "adam_atan2_published": f"{TINY} --optim.optimizer adam_atan2_published --optim.skip-zero-gradients",
        "lion": f"{TINY} --optim.optimizer lion --optim.momentum-start 0.8 --optim.momentum-warmup-steps 2",
        "muon": f"{TINY} --optim.optimizer muon --optim.clip-norm 0.1",
        "muon_2025": f"{TINY} --optim.optimizer muon_2025 --optim.decay linear --optim.lr-min-ratio 0",
        "muon_2026": f"{TINY} --optim.optimizer muon_2026 --optim.cautious-decay",
        "groups": f"{TINY} --optim.groups {GROUPS.replace(' ', '')} --optim.weight-decay-schedule cosine",
        "freeze": f"{TINY} --optim.freeze .*embed.* --optim.ema-decay 0",
        "parts": f"{TINY} --compute.accumulation-steps 2",
        "steps at once": f"{TINY} --compute.steps-per-dispatch {STEPS} --log-every-steps {STEPS}",
        "shard_map, recomputed": f"{TINY} --compute.runner shard_map --compute.remat blocks",
        "fused MLP": f"{TINY} --compute.mlp fused",
        "two data sets, augmented": f"{TINY} --data-dir sudokus,augmented --data-weights 3,1 --augment",
        "curriculum": f"{TINY} --curriculum-epochs 1 --curriculum-start 1 1 --halt-exploration-end 0.5",
        "initialized": f"{TINY} --init-from runs/tiny --init-optimizer --seed 1",
        "continued": f"{TINY} --run-dir runs/tiny --steps 5",
        "chat-tiny": f"chat-tiny {TEXT} {GPT}",
        "chat-tiny-2026": f"chat-tiny-2026 {TEXT} {GPT}",
        "packed": f"chat-tiny {TEXT} {GPT} --packing bestfit-pad",
        "conversations": f"chat-tiny {TEXT} {GPT} --phase sft --init-from runs/chat-tiny --data-dir talks",
        "hrm-text-tiny": f"hrm-text-tiny {EVERY} --data-dir instructions --global-batch-size 2 --eval-batch-size 2 "
        "--arch.hidden-size 16 --arch.num-heads 2 --arch.n-layers 2 --arch.mlp-multiple-of 8 --arch.seq-len 64",
    },
    2: {
        "two devices": f"{TINY}",
        "two devices, parts": f"{TINY} {ATTENTION} --compute.accumulation-steps 2 --compute.reduction leaves",
        "two devices, sharded": f"{TINY} --compute.shard-optimizer --compute.runner shard_map",
        "two devices, sharded muon": f"{TINY} --compute.shard-optimizer --optim.optimizer muon --optim.clip-norm 0.1",
        "two devices, text": f"chat-tiny-2026 {TEXT} {GPT} --compute.shard-optimizer",
    },
}
"""Command lines of `trm train` by the number of devices and the name of the case, in the order of their runs."""


def train_all(names: Sequence[str], devices: int, tree: Path) -> dict[str, Any]:
    """Trains cases of a number of devices in this process; returns their hashes by name."""
    found = {}
    for name in names:
        folder = Path("runs", name.replace(" ", "-").replace(",", ""))
        if devices > 1:
            folder = Path("runs-of-several", folder.name)
        words = CASES[devices][name].split()
        if "--run-dir" in words:
            folder = Path(words[words.index("--run-dir") + 1])
        else:
            words += ["--run-dir", str(folder)]
        said = run_command(["train", *words])
        found[name] = said or hashes(folder)
        print(f"{name}: {said or 'trained'}", file=sys.stderr, flush=True)
    return found


def run_command(words: Sequence[str]) -> str:
    """Runs one command of `trm` in this process; returns its message if it fails."""
    main = importlib.import_module("train_jax.__main__").main
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            status = main(list(words))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return out.getvalue().strip().splitlines()[-1] if status else ""


def hashes(run_dir: Path) -> dict[str, str]:
    """Returns a hash of each part of the newest checkpoint, such as `state.ema`, read by Orbax alone."""
    import numpy as np
    import orbax.checkpoint as ocp

    newest = max((run_dir / "checkpoints").iterdir(), key=lambda step: int(step.name))
    arrays: dict[str, Any] = {}
    for item in ("model", "optimizer", "carry"):
        if (newest / item).exists():
            arrays |= ocp.PyTreeCheckpointer().restore((newest / item).absolute())
    parts: dict[str, list[str]] = {}
    for name in sorted(arrays):
        array = np.asarray(arrays[name])
        content = f"{array.dtype}{array.shape}".encode() + array.tobytes()
        first, second, *_ = [*name.split("."), ""]
        part = f"state.{second}" if first == "state" else first
        parts.setdefault(part, []).append(f"{name} {hashlib.sha256(content).hexdigest()[:12]}")
    return {part: hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12] for part, lines in parts.items()}


def record(names: Iterable[str], tree: Path) -> dict[str, Any]:
    """Trains cases with the packages of a tree, in one process for each number of devices."""
    wanted = set(names)
    if wanted & {"initialized", "continued"}:
        wanted.add("tiny")
    if "conversations" in wanted:
        wanted.add("chat-tiny")
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "counting.py").write_text(MODULE)
        (work / "texts").mkdir()
        for number in range(20):
            (work / "texts" / f"{number}.txt").write_text(f"{number} + {number} = {2 * number}\n" * 20)
        for devices, cases in CASES.items():
            own = [name for name in cases if name in wanted]
            if own:
                found |= _in_a_process(own, devices, tree, work)
    return found


def _in_a_process(names: Sequence[str], devices: int, tree: Path, work: Path) -> dict[str, Any]:
    variables = {
        "PYTHONPATH": f"{tree}{os.pathsep}{work}",
        "PYTHONSAFEPATH": "1",
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} --xla_cpu_multi_thread_eigen=false",
        "OMP_NUM_THREADS": "1",
        "TRM_CACHE_DIR": str(work / "cache"),
    }
    out = work / "hashes.json"
    command = [sys.executable, str(Path(__file__).resolve()), *names, "--tree", str(tree)]
    command += ["--train", str(out), "--devices", str(devices)]
    done = subprocess.run(command, cwd=work, env=os.environ | variables)
    if done.returncode:
        raise SystemExit(f"the process of {devices} devices ended with {done.returncode}")
    return json.loads(out.read_text())


def build_data() -> None:
    """Builds the data sets of all cases in the working folder, unless they are there."""
    for line in DATA:
        said = run_command(line.split())
        if said:
            raise SystemExit(f"trm {line}: {said}")


def environment() -> dict[str, str]:
    """Returns what the hashes depend on beside the code."""
    processor = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {"processor": processor} | {name: metadata.version(name) for name in ("jax", "jaxlib", "torch")}


def differences(now: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    """Returns a line for each case whose hashes differ."""
    lines = []
    for name, found in now.items():
        expected = before.get(name)
        if found == expected:
            continue
        if isinstance(found, str) or isinstance(expected, str) or expected is None:
            lines.append(f"{name}: {_brief(found)}; recorded: {_brief(expected)}")
            continue
        parts = sorted(part for part in found.keys() | expected.keys() if found.get(part) != expected.get(part))
        lines.append(f"{name}: {', '.join(parts)}")
    return lines


def _brief(found: Any) -> str:
    if found is None:
        return "nothing"
    return found if isinstance(found, str) else "trained"


def main() -> int:
    every = [name for cases in CASES.values() for name in cases]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="names of runs; default: all")
    parser.add_argument("--list", action="store_true", help="print the command line of each run")
    parser.add_argument("--tree", type=Path, default=ROOT, help="checkout of the project")
    parser.add_argument("--record", type=Path, help="write the hashes to this file, in place of a comparison")
    parser.add_argument("--against", type=Path, default=RECORD, help=f"recorded hashes; default: {RECORD.name}")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--devices", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    tree = options.tree.resolve()
    unknown = set(options.cases) - set(every)
    if unknown:
        parser.error(f"unknown run {unknown.pop()!r}; use some of {', '.join(every)}")
    if options.list:
        for devices, cases in CASES.items():
            for name, line in cases.items():
                print(f"{name} ({devices} devices): trm train {line}")
        return 0
    if options.train:
        build_data()
        options.train.write_text(json.dumps(train_all(options.cases, options.devices, tree)))
        return 0
    found = record(options.cases or every, tree)
    if options.record:
        options.record.write_text(json.dumps({"environment": environment(), "runs": found}, indent=1) + "\n")
        return 0
    recorded = json.loads(options.against.read_text())
    if recorded["environment"] != environment():
        print(f"recorded with {recorded['environment']}; here is {environment()}")
    lines = differences(found, recorded["runs"])
    print(*lines, f"{len(lines)} of {len(found)} runs differ", sep="\n")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
