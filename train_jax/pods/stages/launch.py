"""`trm launch`: runs a command on every host of a TPU slice, or rehearses that on this machine."""

import _thread
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

import tyro

from train_jax.command_line import HelpPage, parse
from train_jax.errors import UserError
from train_jax.plugin import find, take_files, use_file
from train_jax.pods.launch import manage
from train_jax.pods.launch.accelerators import check_type, worker_count
from train_jax.pods.launch.gcloud import DryRun, Gcloud, check_names
from train_jax.pods.launch.life import View, rehearsal, run_to_end
from train_jax.pods.launch.record import Record, Request, known
from train_jax.pods.launch.tpu import not_shared
from train_jax.runtime.supervisor import restarts_option
from train_jax.storage.storage import is_remote


@dataclasses.dataclass(frozen=True)
class Launch(Request):
    """Options of a launch; what follows `--` is the command of every host."""

    rehearse: str = ""
    """Rehearse on this machine with virtual devices, as HOSTSxDEVICES, such as 8x4."""
    preempt: str = ""
    """Send SIGTERM to a host when the run reaches a step, as HOST@STEP, such as 3@20; in a rehearsal."""
    kill: str = ""
    """Send SIGKILL to a host, as HOST@STEP; in a rehearsal."""
    dry_run: bool = False
    """Show every command, but run none."""
    detach: bool = False
    """Watch the run in the background; `trm launch logs NAME` follows it."""

    HELP_PAGES: ClassVar[dict[str, HelpPage]] = {
        "node": HelpPage("what is created", ("type", "runtime_version", "capacity", "internal_ip", "project")),
        "hosts": HelpPage("what the hosts get", ("extras", "env", "worker_env_file", "compiled")),
        "end": HelpPage(
            "results, costs, and what is deleted at the end", ("collect", "price_per_hour", "delete_when_done", "keep")
        ),
    }

    def run(self, view: View) -> int:
        if self.rehearse:
            with rehearsal(self.rehearse, self.command, view, preempt=self.preempt, kill=self.kill) as hosts:
                status = run_to_end(hosts, view, self.restarts)
            if hosts.faults:
                raise UserError("the run ended before the step of --preempt or --kill")
            return status
        commands = DryRun(_show, self.type) if self.dry_run else Gcloud()
        record = manage.prepare(self.record(), commands, view)
        if self.detach and not self.dry_run:
            view.say(f"watched in the background, log in {manage.watch_in_background(self.tpu)}")
            return 0
        return _watched(record, commands, view)

    def record(self) -> Record:
        """Returns the record of the launch before it begins."""
        fields: dict[str, Any] = {field.name: getattr(self, field.name) for field in dataclasses.fields(Request)}
        fields["collect"] = self.collect or _local_run(self.command)
        if is_remote(self.compiled):
            fields["env"] = (*self.env, f"JAX_COMPILATION_CACHE_DIR={self.compiled}")
        return Record(**fields)

    def check(self) -> None:
        """Raises `UserError` for options that contradict each other, and for a command that hosts cannot run."""
        if bool(self.rehearse) == bool(self.tpu):
            raise UserError("trm launch needs either --rehearse HOSTSxDEVICES or --tpu NAME --zone ZONE; see --help")
        if self.tpu:
            check_names(**{name: getattr(self, name) for name in ("tpu", "zone", "project", "type", "runtime_version")})
            check_type(self.type, self.runtime_version)
        _check_assignments(self.env)
        _check_compiled(self.compiled, self.rehearse)
        if self.worker_env_file:
            _check_environment_file(self.worker_env_file)
        _check_command(self.command)
        folder = _local_run(self.command)
        if folder and self.tpu and worker_count(self.type) > 1:
            raise not_shared(folder)


def _check_command(command: Sequence[str]) -> None:
    """Raises `UserError` for a command that could not run on the hosts."""
    if not command:
        raise UserError(
            "trm launch needs the command of the hosts behind --, such as `trm launch --rehearse 8x4 -- train tiny`"
        )
    if command[0] == "bash" and len(command) > 1:
        return
    _, command = take_files(command)
    if not command or find("stages", command[0]) is None or command[0] == "launch":
        raise UserError(
            f"{' '.join(command[:1])!r} is not a command for hosts; give a stage of trm, such as train, or bash and a "
            "script"
        )
    if command[0] == "sweep":
        raise UserError(
            "a sweep trains each run in processes of one host, and would claim another run on every host of a launch; "
            "give `train ID`, or start `trm sweep` on single hosts with one --runs-root"
        )


def _local_run(command: Sequence[str]) -> str:
    """Returns the run folder of a command that trains; empty if it is in storage, or for another command.

    Raises `UserError` for arguments that `trm train` refuses.
    """
    files, command = take_files(command)
    if command[:1] != ["train"]:
        return ""
    for path in files:
        use_file(path)
    from train_jax.run.arguments import FLAGS, parse_run  # imports torch and JAX

    words = [word for word in restarts_option(command[1:])[1] if word not in FLAGS]
    _, config = parse_run(words, prog="trm train", description="")
    return "" if is_remote(config.run_dir) else config.run_dir


def _check_compiled(folder: str, rehearse: str) -> None:
    """Raises `UserError` for a folder without programs, and for a rehearsal, whose CPU has no program of a TPU."""
    if folder and rehearse:
        raise UserError(f"--compiled {folder} is for --tpu; leave it out with --rehearse")
    if folder and not is_remote(folder) and not any(Path(folder).glob("*-cache")):
        raise UserError(f"--compiled {folder} has no program; write one with `trm compile-pod --fill-cache {folder}`")


def _check_assignments(texts: Sequence[str]) -> None:
    """Raises `UserError` for values of `--env` that are not NAME=VALUE, or that look like secrets."""
    for text in texts:
        name = text.partition("=")[0]
        if not _is_assignment(text):
            raise UserError(f"--env {name}: expected NAME=VALUE")
        if any(word in name.upper() for word in ("KEY", "TOKEN", "SECRET", "PASSWORD")):
            raise UserError(f"--env {name} would be in command lines and logs; put it into --worker-env-file")


def _is_assignment(text: str) -> bool:
    """Returns whether a text is NAME=VALUE, with a name that a shell accepts."""
    name, equals, _ = text.partition("=")
    return bool(equals) and name.isidentifier() and name.isascii()


def _check_environment_file(path: str) -> None:
    """Raises `UserError` for a file with secrets that others can read, or whose lines are not NAME=VALUE."""
    try:
        mode = os.stat(path).st_mode
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        raise UserError(f"--worker-env-file {path}: {error.strerror}") from None
    if mode & 0o077:
        raise UserError(f"--worker-env-file {path} can be read by others; run `chmod 600` on it")
    for number, text in enumerate(lines, 1):
        if text and not text.startswith("#") and not _is_assignment(text):
            raise UserError(f"--worker-env-file {path}: line {number} is not NAME=VALUE")


@dataclasses.dataclass(frozen=True)
class List:
    """List the launches of this machine: node, state, hours, cost at the stated price; idle and orphaned ones are
    marked."""


@dataclasses.dataclass(frozen=True)
class _Named:
    tpu: Annotated[str, tyro.conf.Positional]
    """Name of the TPU."""


class Logs(_Named):
    """Show the logs of all hosts, and follow them while the launch is watched. Ctrl-C ends nothing but this view."""


class Watch(_Named):
    """Watch a launch whose terminal was closed: follow, start again after preemptions, collect, delete the node."""


class Stop(_Named):
    """Stop a run with SIGTERM, so that it saves; then collect its results, and delete the node if it was created."""


@dataclasses.dataclass(frozen=True)
class Delete(_Named):
    """Delete the node of a launch."""

    force: bool = False
    """Delete the node even if it is in use by a run, or if no launch created it."""


COMMANDS = {"list": List, "logs": Logs, "watch": Watch, "stop": Stop, "delete": Delete}


def _watched(record: Record, commands: Gcloud, view: View) -> int:
    try:
        return manage.watch(record, commands, view)
    except KeyboardInterrupt:
        view.say(f"no longer watched; the run goes on: `trm launch watch {record.tpu}` watches it again")
        return 130


def _show(line: str) -> None:
    """Writes a line in one call, because several threads show lines. A reader that is gone ends the watching."""
    try:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (until the process ends)
        _thread.interrupt_main()  # like Ctrl-C; a host whose thread failed here would count as lost


def main(config: Launch | List | Logs | Watch | Stop | Delete) -> None:
    view = View(_show)
    status = 0
    match config:
        case Launch():
            status = config.run(view)
        case List():
            print("\n".join(manage.overview(Gcloud())))
        case Logs():
            manage.logs(config.tpu, view)
        case Watch():
            status = _watched(known(config.tpu), Gcloud(), view)
        case Stop():
            manage.stop(config.tpu, Gcloud(), view)
        case Delete():
            manage.delete(config.tpu, Gcloud(), view, force=config.force)
    if status:
        sys.exit(status)


def cli(argv: list[str]) -> None:
    if argv and argv[0] in COMMANDS:
        config = parse(COMMANDS[argv[0]], argv[1:], prog=f"trm launch {argv[0]}")
        check_names(**({} if isinstance(config, List) else {"tpu": config.tpu}))
        main(config)
        return
    own = argv
    command = []
    if "--" in argv:
        own = argv[: argv.index("--")]
        command = argv[argv.index("--") + 1 :]
    description = (
        "Run a command on every host: `trm launch --tpu NAME --zone ZONE --type v4-64 -- train NAME …` on a TPU slice, "
        "`trm launch --rehearse 8x4 -- train NAME …` on this machine. The command is a stage of trm, or bash with a "
        f"script. Also: trm launch {', '.join(COMMANDS)}."
    )
    parsed = parse(Launch, own, prog="trm launch", default=Launch(), description=description)
    launch = dataclasses.replace(parsed, command=tuple(command))
    launch.check()
    main(launch)
