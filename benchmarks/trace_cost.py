"""Measures how long the bridge takes to trace GPT-2, and counts its Python calls in one small call.

    python -m benchmarks.trace_cost [--against ../old] [--rounds 9]

GPT-2 of transformers with 6 layers of 64 channels and 64 tokens: value and gradient, traced anew in each round. `noted`
is the same module, which also sets two attributes: `self.seen = tuple(ids.shape)` and `self.last = loss.detach()`. With
`--against`, the bridge of another checkout is measured in a process of its own, in alternation. The last table counts
what `sys.setprofile` sees of `bridge/` in one traced call of a linear layer, a tanh and a counter in a buffer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

VARIANTS = ("plain", "noted")


def trace_seconds() -> Callable[[str], float]:
    """Returns a function that traces a variant once and returns the seconds."""
    import jax
    import jax.numpy as jnp
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    import bridge

    class Loss(torch.nn.Module):
        def __init__(self, noted: bool):
            super().__init__()
            torch.manual_seed(0)
            sizes: dict[str, Any] = {"n_embd": 64, "n_layer": 6, "n_head": 4, "vocab_size": 256, "n_positions": 64}
            self.model = GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False))
            self.noted = noted
            self.seen = ()
            self.last = torch.zeros(())

        def forward(self, ids):
            loss = self.model(ids, labels=ids).loss
            if self.noted:
                self.seen = tuple(ids.shape)
                self.last = loss.detach()
            return loss

    ids = jnp.zeros((2, 64), jnp.int32)
    exported = {variant: bridge.export(Loss(variant == "noted").eval()) for variant in VARIANTS}

    def seconds(variant: str) -> float:
        fn = exported[variant]
        begun = time.perf_counter()
        jax.jit(jax.value_and_grad(lambda p, b, i: fn(p, b, i)[0])).trace(fn.params, fn.buffers, ids)
        return time.perf_counter() - begun

    return seconds


def calls() -> dict[str, int]:
    """Returns the Python calls inside `bridge/` of one traced call, the second one of its module."""
    import jax
    import jax.numpy as jnp
    import torch

    import bridge

    class Counting(torch.nn.Module):
        count: torch.Tensor

        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)
            self.register_buffer("count", torch.zeros((), dtype=torch.int32))

        def forward(self, x):
            self.count.add_(1)
            return torch.tanh(self.linear(x))

    fn = bridge.export(Counting())
    x = jnp.ones((2, 4))
    folder = str(Path(bridge.__file__).parent)
    seen = []

    def profile(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(folder):
            seen.append(frame.f_code)

    for _ in range(2):
        seen.clear()
        sys.setprofile(profile)
        try:
            jax.jit(lambda p, b, x: fn(p, b, x)).trace(fn.params, fn.buffers, x)
        finally:
            sys.setprofile(None)
    return {"calls": len(seen), "functions": len(set(seen)), "files": len({code.co_filename for code in seen})}


def serve() -> None:
    """Answers one line of standard input after the other: the seconds of a variant, or the counts."""
    out = sys.stdout
    sys.stdout = sys.stderr
    seconds = trace_seconds()
    for line in sys.stdin:
        print(json.dumps(calls() if line.strip() == "calls" else seconds(line.strip())), file=out, flush=True)


class Tree:
    """A process with the bridge of a checkout."""

    def __init__(self, root: Path):
        command = [sys.executable, "-P", str(Path(__file__).resolve()), "--serve"]
        environment = os.environ | {"PYTHONPATH": str(root.resolve()), "JAX_PLATFORMS": "cpu"}
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def ask(self, what: str) -> Any:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"the process of a checkout ended with {self.process.wait()}")
        return json.loads(answer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve()
    trees = {"here": Tree(Path.cwd())} | ({"against": Tree(options.against)} if options.against else {})
    measured: dict[tuple[str, str], list[float]] = {(name, variant): [] for name in trees for variant in VARIANTS}
    for number in range(options.rounds + 1):
        for (name, variant), seconds in measured.items():
            taken = trees[name].ask(variant)
            if number:  # the first round imports and fills caches
                seconds.append(taken)
    medians = {each: statistics.median(seconds) for each, seconds in measured.items()}
    print("| checkout | plain, ms | noted, ms | noted / plain |\n|---|---|---|---|")
    for name in trees:
        plain, noted = (medians[name, variant] for variant in VARIANTS)
        print(f"| {name} | {1000 * plain:.0f} | {1000 * noted:.0f} | {noted / plain:.2f} |")
    if options.against:
        print(f"\nhere / against: {medians['here', 'plain'] / medians['against', 'plain']:.2f}")
    print("\n| checkout | Python calls | functions | files |\n|---|---|---|---|")
    for name, tree in trees.items():
        count = tree.ask("calls")
        print(f"| {name} | {count['calls']} | {count['functions']} | {count['files']} |")
        tree.process.kill()


if __name__ == "__main__":
    main()
