"""`trm compile-pod NAME`: compiles a step of a run for a TPU topology, on a machine without a TPU."""

import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro

from models_torch.ranges import Range
from train_jax.command_line import parse
from train_jax.errors import UserError
from train_jax.pods.compile import (
    DEFAULT_TOPOLOGY,
    Compiled,
    compile_eval_step,
    compile_program,
    compile_train_step,
    topology,
    training_for,
    use_host_backend,
)
from train_jax.pods.results import figures_of, lines_of
from train_jax.pods.unbuilt import task_of
from train_jax.report.commands import commands_of
from train_jax.run.arguments import parse_run, split_arguments
from train_jax.run.choices import with_file_read
from train_jax.run.config import RunConfig
from train_jax.run.folder import write_text
from train_jax.runtime.compilation import entries_apart, save_program, ship
from train_jax.storage.storage import path_of
from train_jax.trainer.start import Training


@dataclasses.dataclass(frozen=True)
class CompilePod:
    """Compile a step of a run for a TPU topology, on a machine without a TPU, and print what it costs: memory,
    FLOPs, estimated cycles, bytes to and from memory, collectives. Needs libtpu (`source ./environment.sh pod`).

    NAME is a preset or an experiment; every field of `trm train NAME` can follow."""

    name: Annotated[str, tyro.conf.Positional]
    """Preset or experiment, such as sudoku-extreme or exp01a."""
    topology: str = DEFAULT_TOPOLOGY
    """Chip and axes of the slice: v4:2x4x4 is a v4-64; v5e:4x8, v5p:2x4x4 and v6e:4x8 have as many chips."""
    step: Literal["train", "evaluate", "decode"] = "train"
    """The train step, the step of evaluations during training, or that of generation: one token of every row."""
    rows: Annotated[int, Range(1, 10**6)] = 32
    """Rows of --step decode on all devices together; at least one on each."""
    capacity: Annotated[int, Range(1, 10**6)] = 2048
    """Tokens in the cache of each row of --step decode."""
    kind: str = ""
    """Kind of puzzles, such as sudoku-9x9, maze-30 or arc, if the data set is not built and its folder has another
    name."""
    puzzle_identifiers: Annotated[int, Range(1, 2**31 - 1)] = 1
    """Rows of the puzzle table for each data set, if it is not built; 1 for Sudokus and mazes."""
    json: str = ""
    """File for all figures as JSON; - for standard output instead of the table."""
    save: str = ""
    """File, or gs://bucket/file, for the compiled train step, which `trm train --compute.load` uses. Needs
    --compute.runner shard_map."""
    fill_cache: str = ""
    """Folder, or gs://bucket/folder, for the step as an entry of JAX's compilation cache: a run with the folder in
    JAX_COMPILATION_CACHE_DIR finds it, as does `trm launch --compiled`."""
    text: str = ""
    """File for the text of the compiled program."""


def main(options: CompilePod, config: RunConfig) -> None:
    if options.save and (options.step != "train" or config.compute.runner != "shard_map"):
        raise UserError("--save is for the train step; use --compute.runner shard_map, and leave out --step")
    use_host_backend()
    config = with_file_read(config)
    pod = topology(options.topology)
    _say(f"compiling for {pod} …")
    training = training_for(config, task_of(config, options.kind, options.puzzle_identifiers), pod)
    with entries_apart() if options.fill_cache else contextlib.nullcontext() as entries:
        compiled = _compiled(options, training)
        if entries is not None:
            folder = path_of(options.fill_cache)
            _say(f"{folder / ship(entries, folder, compiled.lowered, pod.devices)}")
    if options.text:
        write_text(Path(options.text), compiled.executable.as_text())
    if options.save:
        save_program(path_of(options.save), compiled.lowered, compiled.executable, pod.devices)
    rows = options.rows if options.step == "decode" else 0
    figures = figures_of(options.name, options.step, training, pod, compiled, rows)
    text = json.dumps(figures, indent=1)
    if options.json == "-":
        print(text)
        return
    if options.json:
        write_text(Path(options.json), text)
    print("\n".join(lines_of(figures)))


def _compiled(options: CompilePod, training: Training) -> Compiled:
    if options.step == "train":
        return compile_train_step(training)
    if options.step == "evaluate":
        return compile_eval_step(training)
    commands = commands_of(training.config.task)
    try:
        program, arguments = commands.decode_program(training, options.rows, options.capacity)
    except ValueError as error:
        raise UserError(f"--step decode: {error}") from None
    return compile_program(program, arguments)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def cli(argv: list[str]) -> None:
    own, rest = split_arguments(argv, CompilePod, prog="trm compile-pod")
    options = parse(CompilePod, own, prog="trm compile-pod")
    main(options, parse_run(rest, prog="trm compile-pod", description="")[1])
