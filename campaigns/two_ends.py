"""Two sets of releases run each other's programs and continue each other's runs.

    python -m campaigns.two_ends .venv/bin/python .venv-newest/bin/python [--runs puzzles] [--work FOLDER]

Each interpreter has one set, and the packages of the project. Each set writes programs of `jax.export`: the modules of
`python -m bridge doctor` with their gradients, the train step of runs, and the file that serves the model of a script.
Both sets run all of them. Each set trains each run for `STEPS` steps, and both continue a copy for as many. A number is
the largest difference between the two sets, relative to the largest entry of the array. Exit status 1 if one is above
`TOLERANCE`, or if a program or a run fails in one set. `--work FOLDER` is continued where it ends.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
STEPS = 20
TOLERANCE = 1e-5
DATA = (
    "build-data sudoku --size 4 --num-train 200 --num-test 50 --output-dir sudoku",
    f"build-data text --source {ROOT}/docs --test-share 0.2 --vocab-size 512 --output-dir text",
)
_SMALL = "--arch.n-layer 2 --arch.n-embd 64 --arch.n-head 2 --arch.n-kv-head 2"
SCRIPT = ROOT / "examples/lstm.py"
RUNS = {
    "puzzles": "tiny --data-dir sudoku --eval-every-steps 0 --checkpoint-every-steps 20",
    "language": f"chat-tiny --data-dir text --eval-every-steps 0 --checkpoint-every-steps 20 {_SMALL}",
    "script": f"{SCRIPT} --checkpoint-every-steps 20",
}
"""Name -> the arguments of `trm train`."""
EXPORTS = {"puzzles": "--train-step", "language": "--train-step", "script": f"--format program --plugin {SCRIPT}"}
"""Name -> the arguments of `trm export`."""
EXPORTED = {"puzzles": "train-step", "language": "train-step", "script": "model.npz"}
"""Name -> what that writes into the folder of the run."""


class Failures:
    """What failed: a program that one set wrote and the other does not run, a difference, a command."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def judge(self, what: str, difference: float) -> None:
        is_small = difference <= TOLERANCE
        print(f"{what:<60} {difference:.1e}{'' if is_small else '   above the tolerance'}", flush=True)
        if not is_small:
            self.lines.append(what)


# ---- in a process of one set


def write_programs(folder: Path) -> None:
    """Writes the programs of the doctor's modules into a folder, with their arguments."""
    import jax
    import torch
    from jax import export

    import bridge
    from bridge.doctor import CHECKS

    folder.mkdir(parents=True)
    for name, make in CHECKS.items():
        torch.manual_seed(0)
        module, x = make()
        fn = bridge.export(module)

        def loss(params: Any, buffers: Any, x: Any, fn: Any = fn) -> tuple[Any, Any]:
            outputs, buffers = fn(params, buffers, x, rng=jax.random.key(0), train=True)
            total = sum((array**2).sum() for array in jax.tree.leaves(outputs))
            return total, (outputs, buffers)

        program = jax.jit(jax.value_and_grad(loss, has_aux=True))
        arguments = fn.params, fn.buffers, jax.numpy.asarray(x.numpy())
        (folder / f"{name}.program").write_bytes(export.export(program)(*arguments).serialize())
        write_arrays(folder / f"{name}.npz", arguments)


def run_programs(work: Path, results: Path) -> None:
    """Runs the programs that each set wrote; writes the outputs, or why there are none."""
    results.mkdir(parents=True, exist_ok=True)
    for wrote in ("first", "second"):
        for path in sorted((work / wrote / "modules").glob("*.program")):
            attempt(results / f"{wrote}, {path.stem}", run_module, path)
        for name in [path.name for path in (work / wrote / "runs").iterdir()]:
            run = run_step if EXPORTED[name] == "train-step" else run_served
            attempt(results / f"{wrote}, exported {name}", run, work / wrote / "runs" / name)


def attempt(result: Path, run: Callable[[Path], Any], path: Path) -> None:
    try:
        write_arrays(result.with_name(f"{result.name}.npz"), run(path))
    except Exception:
        result.with_name(f"{result.name}.failed").write_text(traceback.format_exc())


def run_module(path: Path) -> Any:
    import jax
    from jax import export

    program = export.deserialize(bytearray(path.read_bytes()))
    arguments, _ = jax.tree.unflatten(program.in_tree, read_arrays(path.with_suffix(".npz")))
    return jax.jit(program.call)(*arguments)


def run_step(path: Path) -> Any:
    """Returns the state after one exported step on a batch of small numbers."""
    import jax
    from jax import export

    folder = path / "train-step"
    program = export.deserialize(bytearray((folder / "step.cpu.program").read_bytes()))
    shapes = json.loads((folder / "convention.json").read_text())["batch"]
    draws = np.random.default_rng(0)
    batch = {name: draws.integers(1, 4, shape).astype(dtype) for name, (dtype, shape) in shapes.items()}
    with np.load(folder / "state.npz") as stored:
        arrays = {name: stored[name] for name in stored.files}
    for name, array in arrays.items():
        if array.dtype.kind == "V":  # NumPy reads bfloat16 as two bytes
            arrays[name] = array.view(jax.numpy.bfloat16)
    return jax.jit(program.call)(arrays, batch, arrays.pop("key"))


def run_served(path: Path) -> Any:
    from train_jax.script.program import Program

    program = Program(path / "model.npz")
    draws = np.random.default_rng(0)
    return program({name: draws.normal(size=shape).astype(t) for name, (t, shape, _) in program.inputs.items()})


def write_arrays(path: Path, tree: Any) -> None:
    import jax

    arrays = map(np.asarray, jax.tree.leaves(tree))
    np.savez(path, *(a.astype(np.float32) if a.dtype == jax.numpy.bfloat16 else a for a in arrays))


def read_arrays(path: Path) -> list[np.ndarray]:
    with np.load(path) as stored:
        return [stored[name] for name in stored.files]


# ---- in the process that compares


def weights_of(run: Path) -> list[np.ndarray]:
    """Returns the weights, and the averaged ones, of the last checkpoint."""
    import orbax.checkpoint as ocp

    newest = run / "checkpoints" / str(2 * STEPS)
    arrays: dict[str, Any] = {}
    for item in ("model", "optimizer"):
        arrays |= ocp.PyTreeCheckpointer().restore((newest / item).absolute())
    return [np.asarray(arrays[n]) for n in sorted(arrays) if n.startswith(("state.params.", "state.ema."))]


def largest_difference(one: list[np.ndarray], other: list[np.ndarray]) -> float:
    """Returns the largest difference of two lists of arrays, relative to the largest entry of each array."""
    differences = [0.0]
    for a, b in zip(one, other, strict=True):
        if not a.size:
            continue
        a, b = np.float64(a), np.float64(b)
        scale = np.abs(a).max()
        differences.append(np.abs(a - b).max() / (scale or 1.0))
    return float(np.max(differences))  # nan where one side is not finite


class End:
    """One set of releases."""

    def __init__(self, python: str, work: Path):
        self.python = python
        self.folder = work

    def run(self, module: str, *arguments: object, folder: Path | None = None) -> None:
        variables = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "TRM_CACHE_DIR": str(self.folder / "cache")}
        command = [self.python, "-m", module, *map(str, arguments)]
        working = folder or self.folder
        working.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(command, cwd=working, env=os.environ | variables, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")

    def trm(self, line: str, folder: Path) -> None:
        self.run("train_jax", *line.split(), folder=folder)

    def write(self, names: list[str], work: Path) -> None:
        """Trains each run for `STEPS` steps, and writes all programs."""
        if not (self.folder / "modules").exists():
            self.run("campaigns.two_ends", "--write", self.folder / "modules")
        for name in names:
            run = self.folder / "runs" / name
            if not (run / "FINISHED").exists():
                self.trm(f"train {RUNS[name]} --wandb disabled --steps {STEPS} --run-dir {run}", work)
            if not (run / EXPORTED[name]).exists():
                self.trm(f"export {run} {EXPORTS[name]} --no-check", work)

    def continued(self, run: Path, work: Path) -> Path:
        """Returns a copy of a run that this set has continued."""
        copy = self.folder / "continued" / run.parents[1].name / run.name
        if not (copy / "checkpoints" / str(2 * STEPS)).exists():
            shutil.copytree(run, copy, dirs_exist_ok=True)
            continues = f"--wandb disabled --steps {2 * STEPS} --run-dir {copy} --resume must"
            self.trm(f"train {RUNS[run.name]} {continues}", work)
        return copy


def compare(first: End, second: End, names: list[str], work: Path) -> int:
    failures = Failures()
    for line in DATA:
        if not (work / line.split()[-1]).exists():
            first.trm(line, work)
    for end in (first, second):
        end.write(names, work)
    for end in (first, second):
        end.run("campaigns.two_ends", "--run", work, end.folder / "results")
    results = {path.name for end in (first, second) for path in (end.folder / "results").iterdir()}
    for name in sorted(results):
        paths = [end.folder / "results" / name for end in (first, second)]
        if name.endswith(".failed"):
            failures.lines.append(name)
            print(
                *(f"{path.parents[1].name} does not run {path.read_text()[-2000:]}" for path in paths if path.exists())
            )
        elif all(path.exists() for path in paths):
            failures.judge(f"written by {name.removesuffix('.npz')}", largest_difference(*map(read_arrays, paths)))
    for end in (first, second):
        for name in names:
            run = end.folder / "runs" / name
            both = [weights_of(by.continued(run, work)) for by in (first, second)]
            failures.judge(f"{STEPS} steps of {end.folder.name}, continued, {name}", largest_difference(*both))
    print(f"{len(failures.lines)} differ or fail" if failures.lines else "both sets agree")
    return 1 if failures.lines else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", nargs="*", metavar="PYTHON", help="two interpreters")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=[*RUNS], help="default: all")
    parser.add_argument("--work", type=Path, help="a folder, continued where it ends; default: a temporary one")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--run", type=Path, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:
        write_programs(options.write)
        return 0
    if options.run:
        run_programs(*options.run)
        return 0
    if len(options.python) != 2:
        parser.error("give two interpreters")
    with tempfile.TemporaryDirectory() as scratch:
        work = (options.work or Path(scratch)).absolute()
        first, second = (str(Path(python).absolute()) for python in options.python)
        return compare(End(first, work / "first"), End(second, work / "second"), options.runs, work)


if __name__ == "__main__":
    sys.exit(main())
