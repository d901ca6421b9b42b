"""`trm prove PRESET`: measures on the devices at hand what the project claims, and writes a file to publish."""

import dataclasses
import datetime
import hashlib
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import jax
import tyro

from models_torch.ranges import Range
from train_jax.command_line import parse
from train_jax.errors import UserError
from train_jax.pod.prove.context import Context
from train_jax.pod.prove.parts import CHOOSE, PARTS, Part
from train_jax.pod.prove.rows import Record, passed
from train_jax.pod.prove.runner import close, supervise, work
from train_jax.pod.prove.runs import COMMAND, RUNS, Runs
from train_jax.pod.unbuilt import is_built, task_of
from train_jax.run.config import RunConfig, to_json
from train_jax.run.machine import hash_of_all, processor, source_hashes, versions_of_packages
from train_jax.run.storage import is_remote
from train_jax.run_arguments import parse_run, split_arguments
from train_jax.runtime import backend
from train_jax.runtime.clock import process_start
from train_jax.runtime.cluster import this_cluster
from train_jax.runtime.compilation import use_compile_cache
from train_jax.runtime.processes import join_processes
from train_jax.version import DISTRIBUTION, commit, installed_version


@dataclasses.dataclass(frozen=True)
class Prove:
    """Measure on these devices what the project claims: preflight, the model and foreign modules beside PyTorch, every
    kernel beside the plain path, the time and utilization of a step, input, a kill and its continuation, a saved
    program, a profile. Writes prove.json, prove.md and prove.html after each part, ends at its limit, and continues
    when it is started again. Run it on every host of a pod. Status 1 if a row fails.

    NAME is a preset or an experiment; every field of `trm train NAME` can follow."""

    name: Annotated[str, tyro.conf.Positional]
    """Preset or experiment, such as sudoku-extreme or exp01a."""
    minutes: Annotated[float, Range(0.1, 1e4)] = 15.0
    """When it ends, whatever happens."""
    part_seconds: Annotated[float, Range(1, 1e5)] = 240.0
    """The longest that a part may take, at most a third of the minutes; one that hangs is named, and the others run."""
    foreign: Annotated[int, Range(0, 20)] = 5
    """Modules of other people that are compared with PyTorch; from the ninth on they are transformers'."""
    choose: bool = False
    """Only compare and time the kernels at the run's shapes, and write choices.json for --compute.choices."""
    output: str = ""
    """Folder of the files, which all hosts share; by default runs/prove/NAME."""
    worker: bool = False
    """Used by the command itself: run the parts on the devices in this process."""


def main(options: Prove, config: RunConfig, arguments: list[str]) -> None:
    deadline = time.monotonic() - (time.time() - process_start()) + 60 * options.minutes
    options = dataclasses.replace(options, part_seconds=min(options.part_seconds, 20 * options.minutes))
    folder = Path(options.output or f"runs/prove/{options.name}").absolute()
    config = dataclasses.replace(config, run_dir=str(folder / "runs" / "preflight"), wandb="disabled")
    parts = [part for part in PARTS if part.name == CHOOSE] if options.choose else PARTS
    if options.worker:
        _work(options, config, folder, parts)
        return
    identity = {"identity": _identity(config)}
    record = Record(folder, identity)
    todo = [name for name in RUNS if not record.has(name)] * (not options.choose)
    cluster = this_cluster(backend.choose(config.platform).platform, 60)
    first = cluster is None or cluster.index == 0
    if first and options.choose:  # the kernels are compared again each time: this may be another machine
        record.parts.pop(CHOOSE, None)
    if first:
        record.parts.pop(_START, None)
        record.write()
    for_runs = 60 * options.minutes * (len(todo) * _SHARE_OF_A_RUN)
    status = supervise(_worker(options, arguments), deadline - for_runs, len(parts) + 1)
    if status == 2:
        raise SystemExit(2)
    if first and status:
        record = Record(folder, identity)
        where = record.running or _START
        record.end(where, [passed(where, f"the worker ended with status {status}", fail=True)])
    runs = Runs(_context(options, config, folder, arguments), deadline, options.part_seconds, first)
    for name in todo:
        rows = runs.rows(name)
        if first:
            record = Record(folder, identity)
            record.end(name, rows)
            print(record.lines(name), end="", flush=True)
    if first:
        record = Record(folder, identity)
        close(record, [part.name for part in parts] + todo)
        print(f"{record.summary()}; {folder / 'prove.html'}")
        if record.failed:
            raise SystemExit(1)


_START = "start"
"""The part whose row says that the parts on the devices did not begin, or did not end."""
_SHARE_OF_A_RUN = 0.1
"""Of the time, kept for each run while the parts on the devices take the rest."""


def _worker(options: Prove, arguments: list[str]) -> list[str]:
    """Returns the command of the worker: that of this process."""
    names = ("part_seconds", "foreign", "output")
    fields = [f"--{name.replace('_', '-')}={value}" for name in names if (value := getattr(options, name)) != ""]
    return [*COMMAND, "prove", options.name, *fields, *(["--choose"] * options.choose), *arguments, "--worker"]


def _work(options: Prove, config: RunConfig, folder: Path, parts: Sequence[Part]) -> None:
    use_compile_cache(config.compute.compile_cache)
    with join_processes(config.platform, cpu_devices=config.virtual_devices):
        context = _context(options, config, folder, [])
        work(context, Record(folder, _facts(config)), parts, options.part_seconds)


def _context(options: Prove, config: RunConfig, folder: Path, arguments: list[str]) -> Context:
    built = is_built(config) or config.task not in ("puzzles", "language")
    return Context(options.name, config, task_of(config), folder, arguments, options.foreign, built)


def _identity(config: RunConfig) -> str:
    """Returns the hash of configuration and code; a proof with another one begins anew."""
    return hashlib.sha256((to_json(config) + hash_of_all(source_hashes(config))).encode()).hexdigest()[:12]


def _facts(config: RunConfig) -> dict[str, str]:
    """Of the machine. Collective: the first question for devices waits for all processes."""
    devices = jax.devices()
    flags = {name: os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")}
    return {
        "identity": _identity(config),
        "run": f"{config.model}, batch {config.global_batch_size}, {config.data_dir}",
        "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        "commit": commit(installed_version(DISTRIBUTION)),
        "devices": f"{len(devices)} x {devices[0].device_kind}, {jax.process_count()} processes",
        "host": f"{processor()}, {backend.cores()} cores, python {platform.python_version()}",
        "versions": ", ".join(f"{name} {version}" for name, version in versions_of_packages().items()),
        "flags": ", ".join(f"{name}={value}" for name, value in flags.items() if value) or "none",
    }


def cli(argv: list[str]) -> None:
    own, rest = split_arguments(argv, Prove, prog="trm prove")
    options = parse(Prove, own, prog="trm prove")
    if is_remote(options.output):
        raise UserError(f"--output {options.output}: a proof needs a folder on a disk that all hosts share; give one")
    main(options, parse_run(rest, prog="trm prove", description="")[1], rest[1:])
