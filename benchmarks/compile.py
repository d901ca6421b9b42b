"""Measures what happens before the first step: tracing, lowering, compiling, and reading a compiled program again.

    python -m benchmarks.compile [--presets tiny sudoku9 baseline] [--rounds 5] [--json FILE] [--compare FILE]

For each preset, in a process of its own, with one device and random examples: `first trace` is the first one of the
process, `trace` and `lower` are medians of later ones, with other steps of the same module. The program is compiled
into an empty cache, and then read from it (`cached`). The baseline is the attention variant of the published model
with 192 examples on the device; it is traced and lowered only. Finally, `trm train tiny` starts once with an empty
cache and then with a warm one: seconds from the start of the process to the first step, by what the main thread did.
Use a quiet machine.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro

from benchmarks import tables

TRACED_ONLY = ("baseline",)
"""Presets whose step is too large to be compiled for a CPU in reasonable time."""
TITLES = ("preset", "equations", "leaves", "first trace, s", "trace, s", "lower, s", "trace and lower, s", "compile, s",
          "cached, s")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Options(tables.Files):
    """Measure tracing, lowering and compilation of train steps, and two starts of a run."""

    presets: tuple[str, ...] = ("tiny", "sudoku9", "baseline")
    """Presets of puzzle runs, and `baseline`, the published model with attention in bfloat16."""
    rounds: int = 5
    """Number of measured traces, after the first one."""
    starts: int = 3
    """Starts of `trm train tiny` with a warm cache, after one with an empty cache; 0 leaves them out."""
    here: bool = False
    """Measure one preset in this process and print JSON."""


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Returns the seconds of every stage for a preset, and the size of its step."""
    import jax

    from train_jax.pods.compile import train_step_arguments
    from train_jax.runtime.compilation import counted_cache_use

    training = _training(name)
    arguments = train_step_arguments(training)

    def trace() -> tuple[float, Any]:
        step = training.parallel_step()
        begun = time.perf_counter()
        traced = jax.jit(lambda *a: step(*a)).trace(*arguments)
        return time.perf_counter() - begun, traced

    first, traced = trace()
    traces = []
    lowerings = []
    for _ in range(rounds):
        seconds, traced = trace()
        begun = time.perf_counter()
        traced.lower()
        traces.append(seconds)
        lowerings.append(time.perf_counter() - begun)
    result = {
        "equations": _equations(traced.jaxpr.jaxpr),
        "leaves": len(jax.tree.leaves(arguments)),
        "first trace": first,
        "trace": statistics.median(traces),
        "lower": statistics.median(lowerings),
        "trace and lower": statistics.median(a + b for a, b in zip(traces, lowerings, strict=True)),
    }
    if name in TRACED_ONLY:
        return result
    with tempfile.TemporaryDirectory() as folder:
        config: Any = jax.config
        config.update("jax_compilation_cache_dir", folder)
        config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        config.update("jax_persistent_cache_min_entry_size_bytes", 0)
        for stage, hits in (("compile", False), ("cached", True)):
            lowered = traced.lower()
            begun = time.perf_counter()
            with counted_cache_use() as use:
                lowered.compile()
            result[stage] = time.perf_counter() - begun
            if bool(use.hits) != hits:
                raise SystemExit(f"{stage} of {name}: {use.hits} hits of the compilation cache, {use.misses} misses")
            jax.clear_caches()
    return result


def _training(name: str) -> Any:
    from benchmarks.example_puzzles import ExamplePuzzles, example_run
    from models_torch.trm import TRMConfig
    from train_jax.run.presets import preset
    from train_jax.runtime.devices import Devices
    from train_jax.trainer.start import start

    if name == "baseline":
        arch: Any = TRMConfig(batch_size=192, seq_len=81, vocab_size=11, mlp_t=False, pos_encodings="rope")
        run = example_run("trm", arch, steps=1000)
    else:
        config = preset(name)
        sizes = {"batch_size": config.global_batch_size, "seq_len": 81, "vocab_size": 11, "num_puzzle_identifiers": 1}
        arch = dataclasses.replace(config.arch, **sizes)
        run = example_run(config.model, arch, optim=config.optim, steps=1000)
    return start(run, ExamplePuzzles(run), Devices(1))


def _equations(jaxpr: Any) -> int:
    """Returns the number of equations of a program, with those in the bodies of loops and functions."""
    import jax

    inner = [p for e in jaxpr.eqns for v in e.params.values() for p in jax.tree.leaves(v, is_leaf=_has_equations)]
    return len(jaxpr.eqns) + sum(_equations(getattr(p, "jaxpr", p)) for p in inner if _has_equations(p))


def _has_equations(value: Any) -> bool:
    return hasattr(getattr(value, "jaxpr", value), "eqns")


def start_seconds(folder: Path) -> dict[str, float]:
    """Starts `trm train tiny` and returns the seconds before its first step by kind; the cache stays in `folder`."""
    run = folder / "run"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"JAX_COMPILATION_CACHE_DIR": str(folder / "cache")}
    command = [sys.executable, "-m", "train_jax"]
    data = ["build-data", "sudoku", "--size", "4", "--num-train", "200", "--num-test", "50"]
    train = ["train", "tiny", "--data-dir", str(folder / "data"), "--run-dir", str(run), "--wandb", "disabled"]
    train += ["--steps", "5"]
    shutil.rmtree(run, ignore_errors=True)
    for arguments in ([*data, "--output-dir", str(folder / "data")], train):
        subprocess.run([*command, *arguments], check=True, env=environment, stdout=subprocess.DEVNULL)
    return before_first_step([json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()])


def before_first_step(events: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Sums the seconds of the last session in `events.jsonl` up to the event with its first step, by kind."""
    begin = max(number for number, event in enumerate(events) if event["event"] == "start")
    result: dict[str, float] = {}
    for event in events[begin:]:
        seconds = event.get("seconds", {})
        for kind, value in seconds.items():
            if kind != "steps":
                result[kind] = result.get(kind, 0.0) + value
        if "steps" in seconds:
            break
    return result


def main(options: Options) -> int:
    if options.here:
        print(json.dumps(measure(options.presets[0], options.rounds)))
        return 0
    before = tables.figures_before(options)
    figures = {}
    details = {}
    print(tables.header(TITLES), flush=True)
    for name in options.presets:
        command = [sys.executable, "-m", "benchmarks.compile", "--here", "--presets", name]
        command += ["--rounds", str(options.rounds)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        result = details[name] = json.loads(done.stdout.splitlines()[-1])
        stages = [result.get(title.removesuffix(", s")) for title in TITLES[3:]]
        print(tables.row([name, result["equations"], result["leaves"], *map(_seconds, stages)]), flush=True)
        figures |= {f"{name} {stage}, s": result[stage] for stage in ("trace and lower", "cached") if stage in result}
    if options.starts:
        with tempfile.TemporaryDirectory() as folder:
            starts = [start_seconds(Path(folder)) for _ in range(options.starts + 1)]
        kinds = ("start", "compile", "data", "restore")
        print(f"\n{tables.header(['start of tiny', 'until the first step, s', *kinds])}")
        warm = sorted(starts[1:], key=lambda each: sum(each.values()))[len(starts[1:]) // 2]
        for title, each in (("empty cache", starts[0]), (f"warm cache, median of {options.starts}", warm)):
            print(tables.row([title, _seconds(sum(each.values())), *(_seconds(each.get(kind, 0)) for kind in kinds)]))
        figures["warm start of tiny, s"] = sum(warm.values())
        details["starts"] = starts
    return tables.finish(options, figures, before, "CPU", results=details)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
