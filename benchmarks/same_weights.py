"""Checks whether two commits train to the same weights, bit for bit; only uses the command line of both.

    python -m benchmarks.same_weights record after.json                     this checkout
    python -m benchmarks.same_weights record before.json --checkout ../old  another checkout, same interpreter
    python -m benchmarks.same_weights compare before.json after.json

Every preset that a CPU can train, a small maze, a small ARC set, the two small language models, and every architecture,
with attention and with the MLP mixer, is trained for a few steps on 1 and on 8 virtual devices and exported. Half of
the puzzle cases export the averaged weights, the other half the raw weights (`--optim.ema-decay 0`). The file contains
the SHA-256 of every tensor.
"""

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from safetensors.numpy import load_file

STEPS = 12
ARCHITECTURES = ("trm", "trm_singlez", "trm_hier6", "hrm", "transformer")
DATA = {
    "tiny": ["sudoku", "--size", "4", "--num-train", "200", "--num-test", "40"],
    "sudoku6": ["sudoku", "--size", "6", "--num-test", "40"],
    "sudoku9": ["sudoku", "--size", "9", "--num-test", "40"],
    "maze": ["maze", "--size", "9", "--kind", "perfect", "--min-path", "12", "--num-train", "100", "--num-test", "20"],
    "arc": ["arc", "--source", "{sources}/arc", "--num-aug", "3"],
    "text": ["text", "--source", "{sources}/text", "--vocab-size", "280", "--test-share", "0.2"],
}
"""Maps data sets to arguments of `trm build-data`."""
SMALL_TEXT = ["--arch.seq-len", "24", "--arch.n-layer", "2", "--arch.n-embd", "48", "--global-batch-size", "8"]
COMMON = [
    "--eval-every-steps",
    "0",
    "--eval-batch-size",
    "40",
    "--wandb",
    "disabled",
    "--checkpoint-every-steps",
    "1000",
]


def cases() -> Iterator[tuple[str, str, str, list[str]]]:
    """Yields (name, data set, preset, arguments)."""
    raw = ["--optim.ema-decay", "0"]
    for preset in ("tiny", "sudoku6", "sudoku9"):
        yield f"{preset}, EMA", preset, preset, []
        yield f"{preset}, raw weights", preset, preset, raw
    for number, model in enumerate(ARCHITECTURES):
        for mixer in ("--arch.mlp-t", "--arch.no-mlp-t"):
            options = ["--model", model, mixer, *(raw if number % 2 else [])]
            yield f"{model} {mixer.removeprefix('--arch.')}", "tiny", "tiny", options
    yield "maze-unique", "maze", "maze-unique", []
    yield "arc", "arc", "tiny", ["--global-batch-size", "8"]
    for preset in ("chat-tiny", "chat-tiny-2026"):
        yield preset, "text", preset, SMALL_TEXT


def write_sources(folder: Path) -> None:
    """Writes ARC files in the official format and some text, the same in each call."""
    draws = random.Random(0)

    def grid() -> list[list[int]]:
        width = draws.randint(2, 6)
        return [[draws.randrange(10) for _ in range(width)] for _ in range(draws.randint(2, 6))]

    for subset in ("training", "evaluation", "concept"):
        (folder / "arc").mkdir(parents=True, exist_ok=True)
        challenges, solutions = {}, {}
        for name in (f"{subset}{number}" for number in range(5)):
            shown = [{"input": grid(), "output": grid()} for _ in range(3)]
            challenges[name], solutions[name] = {"train": shown, "test": [{"input": grid()}]}, [grid()]
        for kind, content in (("challenges", challenges), ("solutions", solutions)):
            (folder / "arc" / f"arc-agi_{subset}_{kind}.json").write_text(json.dumps(content))
    (folder / "text").mkdir()
    for number in range(40):
        (folder / "text" / f"{number}.txt").write_text(f"{number} + {number} = {2 * number}\n" * 20)


def record(checkout: Path, only: str, output: Path) -> None:
    """Trains all cases; writes case -> tensor -> hash after each."""
    hashes: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        write_sources(Path(scratch, "sources"))
        built = set()
        for name, data, preset, options in cases():
            for devices in (1, 8):
                case = f"{name}, {devices} device{'s' * (devices > 1)}"
                if only not in case:
                    continue
                if data not in built:
                    sources = [option.format(sources=f"{scratch}/sources") for option in DATA[data]]
                    trm(checkout, ["build-data", *sources, "--output-dir", f"{scratch}/{data}"])
                    built.add(data)
                run, weights = f"{scratch}/run-{len(hashes)}", Path(scratch, "weights.safetensors")
                where = ["--data-dir", f"{scratch}/{data}", "--run-dir", run, "--steps", str(STEPS)]
                trm(checkout, ["train", preset, *options, *where, *COMMON], devices)
                trm(checkout, ["export", run, "--no-check", "--output", str(weights)])
                hashes[case] = {
                    tensor: hashlib.sha256(array.tobytes()).hexdigest() for tensor, array in load_file(weights).items()
                }
                output.write_text(json.dumps(hashes, indent=1))
                print(f"{case}: {len(hashes[case])} tensors", flush=True)


def trm(checkout: Path, arguments: list[str], devices: int = 1) -> None:
    flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", "JAX_PLATFORMS": "cpu"}
    environment = os.environ | flags | {"PYTHONPATH": str(checkout)}
    command = [sys.executable, "-m", "train_jax", *arguments]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed in {checkout}:\n{done.stdout}{done.stderr}")


def compare(before: dict, after: dict) -> int:
    """Prints every case that differs; returns their number."""
    different = 0
    for case in sorted(before.keys() | after.keys()):
        old, new = before.get(case, {}), after.get(case, {})
        tensors = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
        different += bool(tensors)
        if tensors:
            print(f"{case}: {len(tensors)} of {len(old)} tensors differ, first {tensors[0]}")
    print(f"{len(before)} cases, {different} differ")
    return different


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recorder = commands.add_parser("record")
    recorder.add_argument("output", type=Path)
    recorder.add_argument("--checkout", type=Path, default=Path.cwd())
    recorder.add_argument("--only", default="", help="record cases whose name contains this")
    comparer = commands.add_parser("compare")
    comparer.add_argument("before", type=Path)
    comparer.add_argument("after", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "compare":
        sys.exit(bool(compare(*(json.loads(path.read_text()) for path in (arguments.before, arguments.after)))))
    record(arguments.checkout.resolve(), arguments.only, arguments.output)


if __name__ == "__main__":
    main()
