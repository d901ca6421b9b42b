"""What `trm launch` does with a launch: watch it to its end, follow its logs, stop it, delete its node."""

from __future__ import annotations

import platform
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path

from train_jax.errors import UserError
from train_jax.pod.launch.gcloud import Gcloud, GcloudError
from train_jax.pod.launch.life import follow_to_end, run_to_end
from train_jax.pod.launch.node import TpuNode
from train_jax.pod.launch.record import Record, local_folder, read_record, update, watching, write_record
from train_jax.pod.launch.source import Source
from train_jax.pod.launch.view import View
from train_jax.pod.launch.workers import Workers, new_token
from train_jax.run.storage import is_remote


def known(name: str) -> Record:
    """A launch by name. Raises `UserError` if there is none."""
    record = read_record(name)
    if record is None:
        raise UserError(f"no launch {name} is known on this machine; see `trm launch list`")
    return record


def prepare(record: Record, commands: Gcloud, view: View) -> Record:
    """Writes the record of a new launch, and the archive of the code. Raises `UserError` if one is going on."""
    source, before = Source.here(), read_record(record.tpu)
    if before is not None and not before.over:
        raise UserError(
            f"a launch {record.tpu} is {before.phase}; watch it with `trm launch watch {record.tpu}`, or end it with "
            f"`trm launch stop {record.tpu}` or `trm launch delete {record.tpu}`"
        )
    inherits = before is not None and before.created and before.node == record.node
    record = record.replaced(token=new_token(), code=source.name, created=inherits)
    view.say(f"code: {source.name}" + (f", without {source.untracked} files unknown to git" * (source.untracked > 0)))
    if not commands.dry:
        source.archive(local_folder(record.tpu) / "code.tar.gz")
        write_record(record)
    return record


def watch(record: Record, commands: Gcloud, view: View) -> int:
    """Runs a launch to its end, collects its results and deletes its node; returns the exit status of the run."""
    if commands.dry:
        return _watch(record, commands, view)
    if record.over:
        raise UserError(f"the launch {record.tpu} is over ({record.phase}); start another one with trm launch --tpu")
    with watching(record.tpu):
        return _watch(known(record.tpu), commands, view)


def _watch(record: Record, commands: Gcloud, view: View) -> int:
    node = TpuNode(commands, record, view.say)
    workers = Workers(commands, node, view.say)
    try:
        status = run_to_end(workers, view, record.restarts)
    except UserError:
        if node.record.starts == 0 or node.stops():  # nothing runs, so nothing is lost
            finish(node, workers, view, 1)
        raise
    finish(node, workers, view, status)
    return status


def finish(node: TpuNode, workers: Workers, view: View, status: int) -> None:
    """Collects the results and deletes the node, if the launch created it or was told to delete it.

    The launch is over only after that, so that a later launch of the same name does not lose its node to this one.
    """
    phase = "done" if status == 0 else "stopped" if node.stops() else "failed"
    try:
        collected = node.record.starts == 0 or _collect(node.record, workers, view)
        deletes = (node.record.created or node.record.delete_when_done) and not node.record.keep
        if deletes and collected:
            node.delete()
            view.say(f"deleted {node.record.tpu}")
        else:
            view.say(f"{node.record.tpu} is still there; delete it with `trm launch delete {node.record.tpu}`")
    finally:
        node.change(phase=phase, status=status)
    view.say(f"{phase}: {node.record.cost()}")


def _collect(record: Record, workers: Workers, view: View) -> bool:
    """Copies the run folder of the first worker, unless it is in storage; returns whether nothing is left there."""
    if not record.collect:
        return True
    try:
        archive = local_folder(record.tpu) / "results.tar"
        workers.collect(record.collect, archive)
        target = Path(record.collect).parent
        if not workers.dry:
            target.mkdir(parents=True, exist_ok=True)
            with tarfile.open(archive) as files:
                files.extractall(target, filter="data")
            archive.unlink()
        view.say(f"results: {record.collect}")
        return True
    except (GcloudError, OSError, tarfile.TarError) as error:
        view.say(f"{record.collect} could not be copied from {record.tpu}: {error}")
        return workers.node.is_gone()


def run_folder_of(command: Sequence[str]) -> str:
    """The local run folder of a command that trains, to collect; empty if it is in storage, or for another command."""
    if command[0] != "train":
        return ""
    from train_jax.run_arguments import parse_run

    _, config = parse_run(_without_restarts(command[1:]), prog="trm train", description="")
    return "" if is_remote(config.run_dir) else str(config.run_dir)


def _without_restarts(argv: Sequence[str]) -> list[str]:
    from train_jax.runtime.supervisor import restarts_option

    return restarts_option(argv)[1]


def logs(name: str, commands: Gcloud, view: View) -> None:
    """Follows the logs of all hosts, or shows the local copies of a launch that is over."""
    record = known(name)
    node = TpuNode(commands, record, view.say)
    workers = Workers(commands, node, view.say, keeps_logs=False)
    if record.phase == "running" and not node.is_gone():
        workers.count = len(node.addresses())
        view.say(follow_to_end(workers, view).text)
        return
    for path in sorted(local_folder(name).glob("*/host-*.log")):
        for line in path.read_text(errors="backslashreplace").splitlines():
            view.line(int(path.stem.removeprefix("host-")), line)
    view.say(f"{record.phase}: {record.cost()}")


def stop(name: str, commands: Gcloud, view: View) -> None:
    """Stops a run, which saves; whoever watches it, otherwise this process, then collects and deletes."""
    record = known(name)
    if record.over:
        raise UserError(f"the launch {name} is over ({record.phase})")
    watched = record.is_watched()
    record = update(name, stop_asked=True)
    node = TpuNode(commands, record, view.say)
    workers = Workers(commands, node, view.say)
    if record.phase == "running" and not node.is_gone():
        workers.count = len(node.addresses())
        workers.stop()
        view.say(f"SIGTERM to {workers.count} hosts")
    if watched:
        view.say("the process that watches the run ends the launch")
        return
    with watching(name):
        ending = follow_to_end(workers, view)
        view.say(ending.text)
        finish(node, workers, view, ending.status)


def delete(name: str, commands: Gcloud, view: View, *, force: bool) -> None:
    """Deletes the node of a launch. Without `force`, raises `UserError` if it runs, or if no launch created it."""
    record = known(name)
    node = TpuNode(commands, record, view.say)
    if not force:
        if not record.created:
            raise UserError(f"{name} was not created by trm launch; --force deletes it all the same")
        if record.phase == "running" and node.state() == "READY":
            workers = Workers(commands, node, view.say)
            if "running" in workers.states():
                raise UserError(f"a run is going on {name}; end it with `trm launch stop {name}`, or give --force")
    node.change(stop_asked=True)  # before, so that nobody creates it again
    node.delete()
    node.change(phase=node.record.phase if node.record.over else "stopped")
    view.say(f"deleted {name}: {node.record.cost()}")


def watch_in_background(name: str) -> Path:
    """Starts `trm launch watch` in a process that outlives this terminal; returns its log once it watches.

    Raises `UserError` if the process ends with an error before it watches.
    """
    import subprocess

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
    while known(name).watcher != (platform.node(), watcher.pid) and watcher.poll() is None:
        time.sleep(0.05)
    if watcher.returncode:
        raise UserError(f"`trm launch watch {name}` ended with status {watcher.returncode}; see {log}")
    return log
