"""`trm prove PRESET`: measures the claims of the project on the present devices, and writes a file to publish."""

import dataclasses
import datetime
import hashlib
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import jax
import tyro

from models_torch.ranges import Range
from train_jax.command_line import parse
from train_jax.errors import PreemptedError, UserError
from train_jax.plugin import file_options
from train_jax.pods.check.context import Context
from train_jax.pods.check.parts import CHOOSE, KERNELS, PARTS, STEP, Part
from train_jax.pods.check.record import Record
from train_jax.pods.check.rows import named
from train_jax.pods.check.runs import COMMAND, RUNS, Runs
from train_jax.pods.check.worker import close, supervise, work
from train_jax.pods.unbuilt import lacks_data
from train_jax.run.arguments import parse_run, split_arguments
from train_jax.run.choices import with_file_read
from train_jax.run.config import RunConfig, to_json
from train_jax.run.machine import hash_of_all, processor, source_hashes, versions_of_packages
from train_jax.runtime import backend
from train_jax.runtime.clock import process_start
from train_jax.runtime.cluster import this_cluster
from train_jax.runtime.compilation import use_compile_cache
from train_jax.runtime.coordination import exchange, place
from train_jax.runtime.processes import join_processes
from train_jax.storage.storage import is_remote
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
    """Minutes after which it ends, whatever happens."""
    part_seconds: Annotated[float, Range(1, 1e5)] = 240.0
    """Time limit of a part, at most a third of the minutes; a part that hangs is reported, and the others run."""
    choose: bool = False
    """Only compare and time the kernels at the run's shapes, and write choices.json for --compute.choices."""
    only: Literal["all", "kernels", "step"] = "all"
    """Measure the kernels alone, or the model and its step alone, anew each time."""
    output: str = ""
    """Folder of the files, which all hosts share; by default runs/prove/NAME."""
    worker: bool = False
    """Used by the command itself: run the parts on the devices in this process."""

    @property
    def parts(self) -> tuple[Part, ...]:
        if self.choose:
            return tuple(part for part in PARTS if part.name == CHOOSE)
        return {"all": PARTS, "kernels": KERNELS, "step": STEP}[self.only]

    @property
    def is_whole(self) -> bool:
        return self.parts == PARTS


def main(options: Prove, config: RunConfig, arguments: list[str]) -> None:
    deadline = time.monotonic() - (time.time() - process_start()) + 60 * options.minutes
    options = dataclasses.replace(options, part_seconds=min(options.part_seconds, 20 * options.minutes))
    folder = Path(options.output or f"runs/prove/{options.name}").absolute()
    config = dataclasses.replace(config, run_dir=str(folder / "runs" / "preflight"), wandb="disabled")
    parts = options.parts
    if options.worker:
        _work(options, config, folder, parts)
        return
    signal.signal(signal.SIGTERM, _stopped)
    cluster = this_cluster(backend.choose(config.platform).platform, 60)
    first = cluster is None or cluster.index == 0
    if first:
        _measure_again(Record(folder), options)
    runs = RUNS if options.is_whole else ()
    for_runs = 60 * options.minutes * _SHARE_OF_RUNS if runs else 0.0
    status = supervise(_worker(options, arguments), deadline - for_runs, len(parts) + 1)
    if status == 2:
        raise SystemExit(2)
    record = Record(folder)  # the worker has checked whether it is of these devices
    if first and status:
        where = record.running or _START
        record.end(where, [named(where, f"the worker ended with status {status}", fail=True)])
    _run(Runs(_context(options, config, folder, arguments), deadline, options.part_seconds, first), record, runs)
    if first:
        close(record, [part.name for part in parts] + list(runs))
        print(f"{record.summary()}; {folder / 'prove.html'}")
        if record.failed:
            raise SystemExit(1)


def _stopped(*_: object) -> None:
    """Handles SIGTERM: exits, which kills the processes that were started."""
    print("trm: stopped by SIGTERM; the same command goes on where it was", file=sys.stderr)
    raise SystemExit(PreemptedError.STATUS)


def _measure_again(record: Record, options: Prove) -> None:
    """Removes rows that this call of the command measures anew."""
    again = [] if options.is_whole else [part.name for part in options.parts]
    removed = [record.parts.pop(part, None) for part in (_START, *again)]
    if any(removed):  # nothing is written before the worker has read the data
        record.write()


def _run(runs: Runs, record: Record, names: Sequence[str]) -> None:
    """Makes the runs that are not in the record. Every host does; the first one writes."""
    for name in [name for name in names if not record.has(name)]:
        rows = runs.rows(name)
        if runs.first:
            record.end(name, rows)
            print(record.lines(name), end="", flush=True)


_START = "start"
"""The part whose row says that the parts on the devices did not begin, or did not end."""
_SHARE_OF_RUNS = 0.3
"""Share of the time that is kept for the training runs; the parts on the devices have the rest."""


def _worker(options: Prove, arguments: list[str]) -> list[str]:
    """Returns the command of the worker: that of this process."""
    names = ("part_seconds", "output", "only")
    fields = [f"--{name.replace('_', '-')}={value}" for name in names if (value := getattr(options, name)) != ""]
    return [
        *COMMAND,
        *file_options(),
        "prove",
        options.name,
        *fields,
        *(["--choose"] * options.choose),
        *arguments,
        "--worker",
    ]


def _work(options: Prove, config: RunConfig, folder: Path, parts: Sequence[Part]) -> None:
    with join_processes(config.platform, cpu_devices=config.virtual_devices):
        use_compile_cache(config.compute.compile_cache)
        context = _context(options, with_file_read(config), folder, [])
        has_data = exchange("prove data", json.dumps(context.has_data))
        if len(set(has_data)) > 1:
            one, other = (has_data.index(json.dumps(there)) for there in (True, False))
            raise UserError(
                f"--data-dir {config.data_dir} is there for process {one} and not for process {other}; "
                "copy it to every host, or to none"
            )
        record = Record(folder, _facts(context.config))
        if record.begins and place()[0] == 0:
            context.choices.unlink(missing_ok=True)
            context.program.unlink(missing_ok=True)
        work(context, record, parts, options.part_seconds)


def _context(options: Prove, config: RunConfig, folder: Path, arguments: list[str]) -> Context:
    has_data = not lacks_data(config)
    return Context(options.name, config, backend.choose(config.platform), folder, arguments, has_data)


def _facts(config: RunConfig) -> dict[str, str]:
    """Returns the facts of the machine. Collective: the first question for devices waits for all processes."""
    devices = jax.devices()
    flags = {name: os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")}
    machine = {
        "devices": f"{len(devices)} x {devices[0].device_kind}, {jax.process_count()} processes",
        "host": f"{processor()}, {backend.cores()} cores, python {platform.python_version()}",
        "versions": ", ".join(f"{name} {version}" for name, version in versions_of_packages().items()),
        "flags": ", ".join(f"{name}={value}" for name, value in flags.items() if value) or "none",
    }
    return {
        "identity": _identity(config, machine),
        "run": f"{config.model}, batch {config.global_batch_size}, {config.data_dir}",
        "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        "commit": commit(installed_version(DISTRIBUTION)),
        **machine,
    }


def _identity(config: RunConfig, machine: dict[str, str]) -> str:
    """Returns the hash of configuration, code and machine; a proof with another one begins anew."""
    parts = (to_json(config), hash_of_all(source_hashes(config)), json.dumps(machine))
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:12]


def cli(argv: list[str]) -> None:
    own, rest = split_arguments(argv, Prove, prog="trm prove")
    options = parse(Prove, own, prog="trm prove")
    if is_remote(options.output):
        raise UserError(f"--output {options.output}: a proof needs a folder on a disk that all hosts share; give one")
    main(options, parse_run(rest, prog="trm prove", description="")[1], rest[1:])
