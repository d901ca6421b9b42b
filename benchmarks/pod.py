"""The train step of the published TRM compiled for a TPU slice: the bridge beside hand-written JAX.

    python -m benchmarks.pod [--variants attention mixer] [--sides bridge-fused by-hand-fused …] [--json FILE]

Nothing runs on a TPU. Bundles are the scheduled instructions of all kernels. `by-hand` is the program that
`benchmarks.overhead` measures, `by-hand-tuned` has all that makes the bridge's program fast, and `-fused` the Pallas
kernels of `--compute.mlp fused --compute.attention fused`. Each program is compiled in a process of its own, in one to
two minutes on two cores. A second table has the same by kind of work, by pass and, of the bridge, by PyTorch class.
`trm compile-pod` shows one program in detail.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

import tyro

from benchmarks import tables

Side = Literal["by-hand", "by-hand-tuned", "by-hand-fused", "bridge", "bridge-fused"]
SIDES: tuple[Side, ...] = ("by-hand", "by-hand-tuned", "by-hand-fused", "bridge", "bridge-fused")
Variant = Literal["attention", "mixer"]
_IN_OVERHEAD: dict[Variant, str] = {"attention": "attention", "mixer": "MLP mixer"}
TITLES = ("variant", "side", "Mbundles", "HBM GB", "temporaries GB", "compiled in, s")
PARTS = ("variant", "by", "of", "side", "Mbundles", "HBM GB")


@dataclasses.dataclass(frozen=True)
class Options(tables.Files):
    """Compile the published train step for a TPU slice, by the bridge and by hand."""

    variants: tuple[Variant, ...] = ("attention", "mixer")
    """Modules that mix positions."""
    sides: tuple[Side, ...] = SIDES
    """Programs to compile."""
    topology: str = "v4:2x4x4"
    """Chip and axes of the slice."""
    global_batch_size: int = 6144
    """Examples of a step on all devices."""
    bundles: bool = True
    """Also count scheduled bundles, which libtpu writes for v4."""
    here: bool = False
    """Compile the only variant and side in this process, and write only the JSON file."""


def main() -> int:
    options = tyro.cli(Options, description=__doc__)
    if options.here:
        _compile(options)
        return 0
    before = tables.figures_before(options)
    print(tables.header(TITLES), flush=True)
    figures: dict[str, float] = {}
    parts: dict[tuple[str, str], dict[str, dict[str, tuple[str, ...]]]] = {}
    for variant in options.variants:
        for side in options.sides:
            compiled = _in_a_process(options, variant, side)
            bundles, size = compiled["total"]
            figures |= {f"{variant}, {side}, Mbundles": bundles, f"{variant}, {side}, HBM GB": size}
            rest = f"{compiled['temporaries']:.2f}", f"{compiled['seconds']:.0f}"
            print(tables.row((variant, side, *_cells(compiled["total"]), *rest)), flush=True)
            for split, costs in compiled["splits"].items():
                for name, cost in costs.items():
                    parts.setdefault((variant, split), {}).setdefault(name, {})[side] = _cells(cost)
    rows = [
        (*key, name, side, *cells)
        for key, names in parts.items()
        for name, sides in names.items()
        for side, cells in sides.items()
    ]
    print("\n".join(["", tables.header(PARTS), *map(tables.row, rows)]))
    return tables.finish(options, figures, before, options.topology, parts=rows)


def _cells(cost: list[float]) -> tuple[str, ...]:
    """Formats Mbundles and gigabytes."""
    bundles, size = cost
    return f"{bundles:.1f}" if bundles else "-", f"{size:.2f}"


def _in_a_process(options: Options, variant: Variant, side: Side) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "figures.json")
        arguments = ["--here", "--variants", variant, "--sides", side, "--json", str(result)]
        arguments += ["--topology", options.topology, "--global-batch-size", str(options.global_batch_size)]
        arguments += [] if options.bundles else ["--no-bundles"]
        subprocess.run([sys.executable, "-m", "benchmarks.pod", *arguments], check=True)
        return json.loads(result.read_text())


def _published_config(variant: Any, side: str, global_batch_size: int) -> Any:
    """Returns the published preset with the network of `variant` and the kernels of `side`."""
    from benchmarks.overhead import VARIANTS
    from train_jax.run.presets import preset

    config = preset("sudoku-extreme")
    arch = dataclasses.replace(config.arch, **VARIANTS[_IN_OVERHEAD[variant]])
    kernels = "fused" if side == "bridge-fused" else "plain"
    compute = dataclasses.replace(config.compute, mlp=kernels, attention=kernels)
    return dataclasses.replace(config, arch=arch, compute=compute, global_batch_size=global_batch_size)


def _compile(options: Options) -> None:
    # Imported here: libtpu and JAX are for the processes that compile.
    from benchmarks import trm_jnp, trm_tuned
    from benchmarks.overhead import by_hand
    from train_jax.pods.bundles import read_schedules, write_schedules
    from train_jax.pods.compile import compile_train_step, training_for
    from train_jax.pods.topologies import topology, use_host_backend
    from train_jax.pods.yardsticks import yardsticks
    from train_jax.puzzles.task import UnbuiltPuzzles

    (variant,), (side,), file = options.variants, options.sides, options.json
    assert file is not None
    use_host_backend()
    with tempfile.TemporaryDirectory() as folder:
        if options.bundles:
            write_schedules(Path(folder))
        pod = topology(options.topology)
        config = _published_config(variant, side, options.global_batch_size)
        training: Any = training_for(config, UnbuiltPuzzles(config), pod)
        if side.startswith("by-hand"):
            network = trm_jnp.level if side == "by-hand" else trm_tuned.network(fused=side == "by-hand-fused")
            training = by_hand(training, training.objective.fn.module.model.config, network)
        compiled = compile_train_step(training)
        schedules = read_schedules(Path(folder), compiled.program) if options.bundles else None

    def bundles(each: Any) -> float:
        return (schedules.of(each) or 0) if schedules else 0

    estimated = yardsticks(compiled.program)
    scheduled = yardsticks(compiled.program, cycles=bundles)

    def of(cost: Any, known: Any) -> list[float]:
        return [known.cycles / 1e6 if known else 0, cost.hbm_bytes / 1e9]

    splits = {
        split: {
            name: cells
            for name, cost in parts.items()
            if name and max(cells := of(cost, scheduled.splits[split].get(name))) >= 0.05
        }
        for split, parts in estimated.splits.items()
        if split != "module"
    }
    memory = compiled.memory.temporaries / 1e9
    seconds = compiled.compile_seconds
    facts = {"total": of(estimated.total, scheduled.total), "temporaries": memory, "seconds": seconds, "splits": splits}
    file.write_text(json.dumps(facts))


if __name__ == "__main__":
    sys.exit(main())
