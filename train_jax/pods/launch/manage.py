"""The operations of `trm launch`: watch a launch to its end, follow its logs, stop it, delete its node, list all."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import subprocess
import sys
import tarfile
import time
from collections import Counter
from pathlib import Path

from train_jax.errors import UserError
from train_jax.plugin import take_files
from train_jax.pods.launch.gcloud import Gcloud, GcloudError
from train_jax.pods.launch.life import View, run_to_end
from train_jax.pods.launch.record import (
    Record,
    Source,
    known,
    local_folder,
    read_record,
    records,
    update,
    watching,
    write_record,
)
from train_jax.pods.launch.tpu import Tpu
from train_jax.storage.storage import is_remote

LOGS_SECONDS = 0.5
"""Seconds between two reads of the copies of the logs."""


def prepare(record: Record, commands: Gcloud, view: View) -> Record:
    """Writes the record of a new launch, and the archive of the code. Raises `UserError` if an earlier one runs."""
    source = Source.here()
    before = read_record(record.tpu)
    if before is not None and not before.over:
        raise UserError(
            f"a launch {record.tpu} is {before.phase}; watch it with `trm launch watch {record.tpu}`, or end it with "
            f"`trm launch stop {record.tpu}` or `trm launch delete {record.tpu}`"
        )
    same_place = before is not None and (before.zone, before.project) == (record.zone, record.project)
    inherits = before is not None and before.created and same_place
    # The token is a part of the ids of its starts.
    record = dataclasses.replace(record, token=secrets.token_hex(4), code=source.name, created=inherits)
    view.say(f"code: {source.name}" + (f", without {source.untracked} files unknown to git" * (source.untracked > 0)))
    plugins, _ = take_files(() if record.command[0] == "bash" else record.command)
    added = source.unknown_files(plugins)  # raises for a file that hosts would not find, in a dry run, too
    if not commands.dry:
        local = record.compiled and not is_remote(record.compiled)
        compiled = sorted(Path(record.compiled).iterdir()) if local else ()
        source.archive(local_folder(record.tpu) / "code.tar.gz", compiled, added)
        write_record(record)
    return record


def watch(record: Record, commands: Gcloud, view: View) -> int:
    """Runs a launch to its end, collects its results and deletes its node; returns the exit status of the run."""
    if record.over:
        raise UserError(f"the launch {record.tpu} is over ({record.phase}); start another one with trm launch --tpu")
    with contextlib.nullcontext() if commands.dry else watching(record.tpu):
        workers = Tpu(commands, record if commands.dry else known(record.tpu), view.say)
        try:
            status = run_to_end(workers, view, record.restarts)
        except UserError:
            if workers.record.starts == 0 or workers.stops() or workers.is_late():  # nothing runs, so nothing is lost
                _finish(workers, view, 1)
            raise
        _finish(workers, view, status)
        return status


def _finish(workers: Tpu, view: View, status: int) -> None:
    """Collects the results and deletes the node, if the launch created it or was told to delete it.

    The launch is over only after that, so that a later launch of the same name does not lose its node to this one.
    """
    phase = "done" if status == 0 else "stopped" if workers.stops() else "failed"
    name = workers.record.tpu
    try:
        collected = workers.record.starts == 0 or _collect(workers, view)
        deletes = (workers.record.created or workers.record.delete_when_done) and not workers.record.keep
        if deletes and collected:
            workers.delete()
            view.say(f"deleted {name}")
        else:
            view.say(f"{name} is still there; delete it with `trm launch delete {name}`")
    finally:
        workers.change(phase=phase, status=status)
    view.say(f"{phase}: {workers.record.cost()}")


def _collect(workers: Tpu, view: View) -> bool:
    """Copies the run folder of the first worker, unless it is in storage; returns True if nothing is left there."""
    record = workers.record
    if not record.collect:
        return True
    try:
        archive = local_folder(record.tpu) / "results.tar"
        workers.collect(record.collect, archive)
        target = Path(record.collect).parent
        if not workers.gcloud.dry:
            target.mkdir(parents=True, exist_ok=True)
            with tarfile.open(archive) as files:
                files.extractall(target, filter="data")
            archive.unlink()
        view.say(f"results: {record.collect}")
        return True
    except (GcloudError, OSError, tarfile.TarError) as error:
        view.say(f"{record.collect} could not be copied from {record.tpu}: {error}")
        return workers.is_gone()


def logs(name: str, view: View) -> None:
    """Shows the logs of all hosts while a process watches the launch and copies them to this machine."""
    shown = Counter[Path]()
    while True:
        record = known(name)
        goes_on = not record.over and record.is_watched()
        files = local_folder(name).glob(f"{record.token}-*/host-*.log")
        for path in sorted(files, key=lambda path: (path.stat().st_mtime, path)):
            with path.open("rb") as file:
                file.seek(shown[path])
                for raw in iter(file.readline, b""):
                    if raw.endswith(b"\n"):
                        shown[path] += len(raw)
                        text = raw.decode(errors="backslashreplace").rstrip("\r\n")
                        view.line(int(path.stem.removeprefix("host-")), text)
        if not goes_on:
            break
        time.sleep(LOGS_SECONDS)
    view.say(f"{record.phase}: {record.cost()}")


def stop(name: str, commands: Gcloud, view: View) -> None:
    """Stops a run, which saves. The process that watches it, or this one, collects results and deletes the node."""
    record = known(name)
    if record.over:
        raise UserError(f"the launch {name} is over ({record.phase})")
    watched = record.is_watched()
    workers = Tpu(commands, update(name, stop_asked=True), view.say)
    if record.phase == "running" and not workers.is_gone():
        workers.stop()
        view.say(f"SIGTERM to {workers.count} hosts")
    if watched:
        view.say("the process that watches the run ends the launch")
    else:
        watch(workers.record, commands, view)


def delete(name: str, commands: Gcloud, view: View, *, force: bool) -> None:
    """Deletes the node of a launch. Raises `UserError` without `force` if a run uses it, or if no launch created it."""
    record = known(name)
    workers = Tpu(commands, record, view.say)
    if not force:
        if not record.created:
            raise UserError(f"{name} was not created by trm launch; --force deletes it all the same")
        if record.phase == "running" and workers.state() == "READY":
            raise UserError(f"a run is going on {name}; end it with `trm launch stop {name}`, or give --force")
    workers.change(stop_asked=True)  # first, so that nobody creates the node again
    workers.delete()
    workers.change(phase=workers.record.phase if workers.record.over else "stopped")
    view.say(f"deleted {name}: {workers.record.cost()}")


def watch_in_background(name: str) -> Path:
    """Starts `trm launch watch` in a process that outlives this terminal; returns its log once it watches.

    Raises `UserError` if the process ends with an error before it watches.
    """
    log = local_folder(name) / "watch.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        watcher = subprocess.Popen(
            [sys.executable, "-m", "train_jax", "launch", "watch", name],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    while not known(name).is_watched() and watcher.poll() is None:
        time.sleep(0.05)
    if watcher.returncode:
        raise UserError(f"`trm launch watch {name}` ended with status {watcher.returncode}; see {log}")
    return log


def overview(commands: Gcloud) -> list[str]:
    """Returns a table of the launches of this machine with the states of their nodes, and their problems below it."""
    rows = [("tpu", "zone", "type", "node", "launch", "hours")]
    remarks = [""]
    for record in records():
        needed = not record.over or record.ready_since is not None
        state = Tpu(commands, record, lambda text: None).state() if needed else ""
        phase = record.phase if record.status is None else f"{record.phase} ({record.status})"
        rows.append((record.tpu, record.zone, record.type, state or "none", phase, record.cost()))
        remarks.append(_remark(record, state))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row, remark in zip(rows, remarks, strict=True):
        lines.append("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
        lines += [f"  {remark}"] if remark else []
    return lines


def _remark(record: Record, state: str) -> str:
    """Returns the problem of a launch: a node that nobody uses, or a run that nobody watches."""
    if not record.over and not record.is_watched():
        return f"orphaned: nobody would start it again or delete its node; `trm launch watch {record.tpu}`"
    if record.over and state not in ("", "PREEMPTED", "TERMINATED"):
        remedy = f"`trm launch delete {record.tpu}`" if record.created else "it was there before"
        return f"idle: the run is over; {remedy}"
    return ""
