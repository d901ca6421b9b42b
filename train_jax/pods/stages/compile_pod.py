"""`trm compile-pod NAME`: compiles a step of a run for TPUs or GPUs, on a machine without them."""

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
from train_jax.pods.bundles import Schedules, folder_of_process, read_schedules
from train_jax.pods.compile import Compiled, compile_eval_step, compile_program, compile_train_step, training_for
from train_jax.pods.results import figures_of, lines_of
from train_jax.pods.topologies import DEFAULT_TOPOLOGY, Topology, topology, use_host_backend
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
    """Compile a step of a run for TPUs or GPUs, on a machine without them, and print what it costs: memory, bundles or
    kernels, bytes to and from memory, FLOPs, collectives. Needs libtpu (`source ./environment.sh pod`), or for GPUs
    JAX's CUDA plugin (`source ./environment.sh gpu-aot`).

    NAME is a preset or an experiment; every field of `trm train NAME` can follow."""

    name: Annotated[str, tyro.conf.Positional]
    """Preset or experiment, such as sudoku-extreme or exp01a."""
    topology: str = DEFAULT_TOPOLOGY
    """Chip and axes of a TPU slice: v4:2x4x4 is a v4-64; v5e:4x8, v5p:2x4x4 and v6e:4x8 have as many chips. Or a GPU:
    gpu:h100, gpu:h100:8 for eight, gpu:h100:2x8 for two hosts; a100, a6000, h200, b200, rtx6000pro."""
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
    keeps = bool(options.save or options.fill_cache)
    if keeps and options.topology.startswith("gpu:"):
        raise UserError("--save and --fill-cache are for TPUs; XLA tunes the kernels of a GPU on the GPU itself")
    use_host_backend()
    config = with_file_read(config)
    # libtpu reads what it writes when it is loaded. The key of an entry in JAX's cache has these options, too.
    bundles = folder_of_process() if options.topology.startswith("v4:") and not keeps else None
    pod = topology(options.topology)
    _say(f"compiling for {pod} …")
    with contextlib.ExitStack() as stack:
        stack.enter_context(pod.tracing())
        entries = stack.enter_context(entries_apart()) if options.fill_cache else None
        training = training_for(config, task_of(config, options.kind, options.puzzle_identifiers), pod)
        compiled = _compiled(options, training, pod)
        if entries is not None:
            folder = path_of(options.fill_cache)
            _say(f"{folder / ship(entries, folder, compiled.lowered, pod.devices)}")
    if options.text:
        write_text(Path(options.text), compiled.executable.as_text())
    if options.save:
        save_program(path_of(options.save), compiled.lowered, compiled.executable, pod.devices)
    rows = options.rows if options.step == "decode" else 0
    schedules = _schedules(bundles, compiled)
    figures = figures_of(options.name, options.step, training, pod, compiled, schedules=schedules, rows=rows)
    text = json.dumps(figures, indent=1)
    if options.json == "-":
        print(text)
        return
    if options.json:
        write_text(Path(options.json), text)
    print("\n".join(lines_of(figures)))


def _compiled(options: CompilePod, training: Training, pod: Topology) -> Compiled:
    if options.step == "train":
        return compile_train_step(training, pod.compiler_options)
    if options.step == "evaluate":
        return compile_eval_step(training, pod.compiler_options)
    commands = commands_of(training.config.task)
    try:
        program, arguments = commands.decode_program(training, options.rows, options.capacity)
    except ValueError as error:
        raise UserError(f"--step decode: {error}") from None
    return compile_program(program, arguments, pod.compiler_options)


def _schedules(folder: Path | None, compiled: Compiled) -> Schedules | None:
    try:
        return read_schedules(folder, compiled.program) if folder else None
    except UserError:  # another version of libtpu, or one that this process loaded before
        return None


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def cli(argv: list[str]) -> None:
    own, rest = split_arguments(argv, CompilePod, prog="trm compile-pod")
    options = parse(CompilePod, own, prog="trm compile-pod")
    main(options, parse_run(rest, prog="trm compile-pod", description="")[1])
