"""`trm launch` against a stand-in for gcloud that runs what a worker would run."""

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.launching import NEW, TPU, TRAIN, TRM, listed, said, verbs
from support.scripts import ENVIRONMENT

from train_jax.__main__ import main
from train_jax.errors import UserError
from train_jax.pods.launch import tpu
from train_jax.pods.launch.accelerators import check_type, worker_count
from train_jax.pods.launch.gcloud import QUEUED, DryRun, Gcloud, GcloudError, create, ssh
from train_jax.pods.launch.record import Record, read_record, state_folder, watching, write_record
from train_jax.pods.launch.tpu import Tpu

LAUNCH = """
import sys
from train_jax.__main__ import main
from train_jax.pods.launch import tpu
tpu.POLL_SECONDS = 0.02
sys.exit(main(sys.argv[1:]))
"""


def test_a_run_on_a_node_that_is_created_and_deleted(cloud, launch, monkeypatch, tmp_path):
    """Every host gets the compiled programs, with the code or as the name of their folder in storage."""
    trm = Path("bin/trm")
    folder = tmp_path / "programs"
    shown = 'cat "$JAX_COMPILATION_CACHE_DIR/jit_step-1-cache" 2>/dev/null || echo "$JAX_COMPILATION_CACHE_DIR"'
    trm.write_text(TRM.replace("\n", f"\n{shown}\n", 1))
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-qam", "x"], check=True)
    folder.mkdir()
    (folder / "jit_step-1-cache").write_text("a program\n")
    (folder / "shipped.json").write_text("{}")
    over = []
    delete = Tpu.delete
    monkeypatch.setattr(Tpu, "delete", lambda node: (over.append(read_record("mine").over), delete(node)))
    status, lines = launch(*NEW, launch.shared, "--env=STEPS=3", "--compiled", folder, "--", *TRAIN)
    assert status == 0 and cloud.node("mine") is None
    assert {"host 0 | step 3/3", "host 0 | a program", "host 1 | a program"} <= set(lines)
    assert [line.partition(":")[0] for line in said(lines)] == [
        "code",
        "creating mine, v4-16, on-demand",
        "mine is CREATING",
        "copying and installing on 2 hosts",
        f"started on 2 hosts as {read_record('mine').id}",
        "2 of 2 finished",
        "deleted mine",
        "done",
    ]
    assert over == [False], "another launch of this name would lose its node"
    status, lines = launch(*NEW, launch.shared, "--compiled", "gs://bucket/programs", "--", *TRAIN)
    assert status == 0 and {"host 0 | gs://bucket/programs", "host 1 | gs://bucket/programs"} <= set(lines)


@pytest.mark.slow
def test_the_life_of_a_run_with_a_preemption(cloud, launch, tmp_path):
    options = [*NEW, "--capacity", "spot", "--price-per-hour", "32", launch.shared, "--env=HOLD=4"]
    status, lines = launch(*options, "--", *TRAIN, on={"host 0 | step 4/": lambda: cloud.preempt("mine")})
    assert status == 0, lines
    assert verbs(cloud).count("queued-resources create") == verbs(cloud).count("queued-resources delete") == 2
    assert all("--spot" in call for call in cloud.calls() if call[3] == "create") and cloud.node("mine") is None
    messages = said(lines)
    assert {"2 of 2 gone; restart 1 of 10", "mine is PREEMPTED: deleting it"} <= set(messages)
    assert messages[-2] == "deleted mine"
    assert messages[-1].startswith("done: 0.0") and messages[-1].endswith(" at 32 an hour")
    starts = (tmp_path / "shared" / "starts").read_text().splitlines()
    for host in range(2):
        own = [line for line in starts if line.startswith(f"process {host} of 2 at step ")]
        assert len(own) == 2 and own[0].startswith(f"process {host} of 2 at step 0: ")
        assert all(line.endswith(f": {' '.join(TRAIN)}") for line in own)
        assert f"host {host} | step 20/20" in lines
    record = read_record("mine")
    assert (record.phase, record.status, record.starts) == ("done", 0, 2) and record.ready_since is None
    assert "host 1 | step 20/20" in launch("logs", "mine")[1], "from the local copies"


@pytest.mark.slow
def test_a_lost_connection_ends_nothing_and_no_line_is_shown_twice(cloud, launch):
    drop = cloud.folder / "drop"
    drop.write_text("3")
    status, lines = launch(*NEW, launch.shared, "--", *TRAIN, on={"step 8/": lambda: drop.write_text("5")})
    assert status == 0 and read_record("mine").starts == 1
    assert verbs(cloud).count("tpu-vm ssh") > 10, "followed again"
    for host in range(2):
        steps = [int(line.split()[-1].split("/")[0]) for line in lines if line.startswith(f"host {host} | step ")]
        assert steps == list(range(steps[0], 21)), "a host that starts late begins at the step of the others"
    assert "host 0 | step 1/20" in lines


@pytest.mark.slow
@pytest.mark.parametrize(("again", "status", "phase"), [("watch", 0, "done"), ("stop", 0, "stopped")])
def test_a_run_outlives_its_launcher(cloud, launch, tmp_path, again, status, phase):
    """The launcher is killed: the node is listed as orphaned, and another process watches the run to its end."""
    command = [sys.executable, "-c", LAUNCH, "launch", *NEW, launch.shared, "--env=STEPS=100", "--", *TRAIN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | ENVIRONMENT) as process:
        for line in process.stdout:
            if "host 0 | step 5/100" in line:
                process.kill()
                break
    time.sleep(0.3)
    before = int((tmp_path / "shared" / "step").read_text())
    assert "orphaned: nobody would start it again or delete it" in "\n".join(listed(launch))
    assert "host 0 | step 1/100" in launch("logs", "mine")[1], "the copies end where the launcher did"
    found, lines = launch(again, "mine")
    assert found == status and before >= 5 and read_record("mine").starts == 1
    assert ("host 0 | step 100/100" in lines) == (phase == "done")
    assert cloud.node("mine") is None and said(lines)[-1].startswith(f"{phase}: ")


def test_one_process_watches_a_launch(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    write_record(Record("mine", "us-central2-b", type="v4-16", command=TRAIN))
    with pytest.raises(BlockingIOError, match="of the run"), watching("mine"):
        assert read_record("mine").is_watched()
        with pytest.raises(UserError, match="another process watches mine"), watching("mine"):
            pass
        raise BlockingIOError("of the run")
    assert not read_record("mine").is_watched()


@pytest.mark.slow
def test_a_failed_start_leaves_no_node(cloud, launch, capsys):
    (cloud.folder / "refuse").write_text("unpack")
    assert launch(*NEW, launch.shared, "--", *TRAIN)[0] == 1
    assert cloud.node("mine") is None and "RESOURCE_EXHAUSTED" in capsys.readouterr().err
    assert launch(*NEW, launch.shared, "--", *TRAIN)[0] == 0, "again"


@pytest.mark.slow
def test_a_node_that_was_there_is_used_and_kept_unless_told_otherwise(cloud, launch):
    cloud.create("mine", "us-central2-b")
    status, lines = launch(*TPU, launch.shared, "--env=STEPS=3", "--", *TRAIN)
    assert status == 0 and "queued-resources create" not in verbs(cloud) and cloud.node("mine")
    assert "mine is still there" in said(lines)[-2]
    assert "  idle: the run is over; it was there before" in listed(launch)
    assert launch(*TPU, "--delete-when-done", launch.shared, "--env=STEPS=3", "--", *TRAIN)[0] == 0
    assert cloud.node("mine") is None


@pytest.mark.slow
def test_a_node_is_requested_and_listed_while_nobody_needs_it(cloud, launch):
    assert launch(*NEW, "--capacity", "spot", "--keep", launch.shared, "--", *TRAIN)[0] == 0
    (create,) = [call for call in cloud.calls() if call[3] == "create"]
    assert create[2] == "queued-resources" and {"--node-id=mine", "--spot", "--accelerator-type=v4-16"} <= set(create)
    lines = listed(launch)
    assert lines[1].split()[:4] == ["mine", "us-central2-b", "v4-16", "READY"]
    assert lines[2] == "  idle: the run is over; `trm launch delete mine`"
    assert launch("delete", "mine")[0] == 0 and cloud.node("mine") is None
    (delete,) = [call for call in cloud.calls() if call[3] == "delete"]
    assert delete[2] == "queued-resources" and "--force" in delete
    assert "mine" in listed(launch)[1] and "none" in listed(launch)[1]


@pytest.mark.slow
def test_stop_saves_and_delete_is_refused_before(cloud, launch, capsys):
    refused = []

    def end():
        refused.append(main(["launch", "delete", "mine"]))
        main(["launch", "stop", "mine"])

    status, lines = launch(*NEW, launch.shared, "--env=STEPS=100000", "--", *TRAIN, on={"step 4/": end})
    assert status == 75 and refused == [2] and "a run is going on mine" in capsys.readouterr().err
    assert any("saved after step" in line for line in lines) and cloud.node("mine") is None
    assert (read_record("mine").phase, read_record("mine").starts) == ("stopped", 1)


class Cloud(Gcloud):
    """Answers `describe` with one state after the other, the last one for ever; records the other verbs.

    A request is granted, unless the state is one that only a request has.
    """

    def __init__(self, *states):
        self.states = list(states)
        self.verbs = []

    def run(self, argv):
        self.verbs.append(argv[4])
        return ""

    def json(self, argv):
        state = self.states[0]
        if argv[3] == QUEUED and state not in ("WAITING_FOR_RESOURCES", "FAILED", "SUSPENDED"):
            return {"state": {"state": "ACTIVE"}}
        if len(self.states) > 1:
            self.states.pop(0)
        return {"state": {"state": state} if argv[3] == QUEUED else state} if state else {}


@pytest.fixture
def node(tmp_path, monkeypatch):
    """`node(cloud, field=value, …)`: the node of a launch."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(tpu, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(tpu, "READY_SECONDS", 1.0)

    def make(cloud, **fields):
        fields = {"type": "v4-16", "command": ("train", "tiny"), "token": "t", "created": True} | fields
        write_record(Record("mine", "us-central2-b", **fields))
        return Tpu(cloud, read_record("mine"), lambda text: None)

    return make


RUNNING = {"begun": 1.0, "ready_since": 1.0, "starts": 1}


@pytest.mark.parametrize(
    ("states", "fields", "verbs"),
    [
        (["READY"], RUNNING, []),
        (["", "", "CREATING", "READY"], {"created": False}, ["create"]),
        (["STOPPING", "STOPPING", "PREEMPTED", "CREATING", "READY"], RUNNING, ["delete", "create"]),
        (["DELETING", "DELETING", "", "CREATING", "READY"], RUNNING, ["delete", "create"]),
        (["", "", "SUSPENDED", "CREATING", "READY"], RUNNING, ["delete", "create"] * 2),
    ],
)
def test_a_node_is_made_ready(node, states, fields, verbs):
    cloud = Cloud(*states)
    fresh = node(cloud, **fields).make_ready()
    assert cloud.verbs == verbs and fresh == (states != ["READY"])
    assert read_record("mine").ready_since is not None


@pytest.mark.parametrize(
    ("states", "fields", "message"),
    [
        (["", "", "CREATING", "PREEMPTED"], {"created": False}, "mine is PREEMPTED, expected READY"),
        (["STOPPED"], {"created": False}, "mine is STOPPED and was not created by a launch; delete it"),
        (["", ""], {"type": ""}, "give --type"),
        (["CREATING"], {}, "mine is CREATING, expected READY"),
        (["CREATING"], {"stop_asked": True}, "was stopped before the run was started"),
        (["CREATING"], {**RUNNING, "max_hours": 1.0}, "--max-hours of mine passed before the run was started again"),
    ],
)
def test_a_node_that_cannot_be_ready_is_an_error(node, states, fields, message):
    with pytest.raises(Exception, match=message):
        node(Cloud(*states), **fields).make_ready()


def test_a_request_that_fails_is_repeated_only_after_a_preemption(node):
    class Exhausted(Cloud):
        def run(self, argv):
            super().run(argv)
            if argv[4] == "create" and self.verbs.count("create") < 3:
                raise GcloudError("RESOURCE_EXHAUSTED")
            return ""

    cloud = Exhausted("", "", "CREATING", "READY")
    assert node(cloud, **RUNNING).make_ready() and cloud.verbs == ["delete", *["create"] * 3]
    with pytest.raises(GcloudError, match="RESOURCE_EXHAUSTED"):
        node(Exhausted("", "", "READY"), created=False).make_ready()


NASTY = "a b'\"$(touch pwned)`touch pwned`;touch pwned|&*?[x]\\ #~\n-x é"


@pytest.mark.slow
def test_no_character_has_a_meaning_and_the_run_folder_of_one_host_is_collected(cloud, launch, tmp_path):
    (cloud.folder / "hosts").write_text("1")
    name = f"runs/{NASTY}"
    trm = Path("bin/trm")
    reports = 'printf "%s\\0" "$@" "$NASTY" > "$SHARED/arguments"; mkdir -p "$4"; echo done > "$4/FINISHED"\n'
    trm.write_text(TRM.replace('exit "${LAST:-0}"\n', "") + reports)
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-qam", "x"], check=True)
    train = ("train", "tiny", "--run-dir", name)
    options = (*TPU, "--type", "v4-8", launch.shared, f"--env=NASTY={NASTY}", "--env=STEPS=2")
    status, lines = launch(*options, "--", *train)
    assert status == 0 and (tmp_path / "shared" / "arguments").read_text().split("\0")[:-1] == [*train, NASTY]
    assert (Path(name) / "FINISHED").read_text() == "done\n" and f"results: {name}" in said(lines)
    assert cloud.node("mine") is None and not list(tmp_path.rglob("pwned"))


HOSTS = {  # by the pages of Cloud TPU
    "tpu-ubuntu2204-base": {"v2-8": 1, "v3-32": 4, "v4-8": 1, "v4-64": 8, "v4-384": 48},
    "v2-alpha-tpuv5-lite": {"v5litepod-1": 1, "v5litepod-8": 1, "v5litepod-16": 4, "v5litepod-256": 64},
    "v2-alpha-tpuv5": {"v5p-8": 1, "v5p-16": 2, "v5p-12288": 1536},
    "v2-alpha-tpuv6e": {"v6e-4": 1, "v6e-8": 1, "v6e-32": 8},
}
"""The hosts of a type by its software version."""


@pytest.mark.parametrize("runtime", HOSTS)
def test_a_type_has_its_software_and_its_hosts(runtime):
    for type, hosts in HOSTS[runtime].items():
        check_type(type)
        assert f"--runtime-version={runtime}" in create(Record("mine", "zone", type=type))
        assert worker_count(type) == hosts


UNKNOWN_TYPES = {
    "v5e-16": "--type v5e-16: this type is called v5litepod-16; use this name",
    "v4-48": "a v4 slice has 8, 16, 32, 64 or a multiple of 128 cores; use v4-32",
    "v5litepod-2": "a v5litepod slice has 1, 4, 8, 16, 32, 64, 128 or 256 chips; use v5litepod-1",
    "v6e-512": "use v6e-256",
    "v7x-16": "the TPU v7x is not known; use v6e-16, v5p-16, v5litepod-16, v4-16, v3-8, v2-8, or also",
}


@pytest.mark.parametrize("type", UNKNOWN_TYPES)
def test_a_type_that_is_not_known_needs_a_software_version(type):
    with pytest.raises(UserError) as error:
        check_type(type)
    assert UNKNOWN_TYPES[type] in str(error.value)
    if type == "v5e-16":
        with pytest.raises(UserError):
            check_type(type, "v2-alpha-tpuv5-lite")
    else:
        check_type(type, "v2-alpha-tpu-new")
        assert "--runtime-version=v2-new" in create(Record("mine", "zone", type=type, runtime_version="v2-new"))
        assert worker_count("v7x-16") == 4


MISTAKES = [
    (["--tpu", "mine", "--zone", "us-west4-a", "--type", "v5e-16"], "this type is called v5litepod-16"),
    ([], "either --rehearse HOSTSxDEVICES or --tpu NAME"),
    (["--tpu", "$(touch pwned)", "--zone", "us-central2-b"], "--tpu '$(touch pwned)': expected a name"),
    (["--tpu", "mine", "--zone", "a;b"], "--zone 'a;b': expected a zone"),
    ([*NEW, "--project", "../x"], "--project '../x': expected the id"),
    ([*NEW, "--env", "WANDB_API_KEY=abc"], "--env WANDB_API_KEY would be in command lines"),
    ([*NEW, "--worker-env-file", "open"], "--worker-env-file open can be read by others; run `chmod 600`"),
    ([*NEW, "--compiled", "no"], "--compiled no has no program; write one with `trm compile-pod --fill-cache no`"),
    ([*NEW, "--", "train", "tiny"], "is on one host only; give --run-dir gs://bucket/folder"),
    (["logs", "nobody"], "no launch nobody is known"),
    (["--rehearse", "8x4", "--"], "needs the command of the hosts behind --, such as `trm launch --rehearse 8x4"),
    (["--rehearse", "8", "--", "status"], "--rehearse 8: expected hosts x devices of each, such as 8x4"),
    (["--rehearse", "2x2", "--preempt", "2@5", "--", "status"], "--preempt 2@5: expected HOST@STEP with a host"),
    (["--rehearse", "2x2", "--", "trian", "tiny"], "'trian' is not a command for hosts"),
    (["--rehearse", "2x2", "--", "sweep", "exp01"], "a sweep trains each run in processes of one host"),
]


def test_mistakes_are_one_line_and_nothing_is_called(cloud, capsys):
    Path("open").touch(mode=0o644)
    for argv, message in MISTAKES:
        command = [] if "--" in argv or argv[:1] == ["logs"] else ["--", *TRAIN]
        assert main(["launch", *argv, *command]) == 2, argv
        error = capsys.readouterr().err
        assert message in error and len(error.strip().splitlines()) == 1 and "abc" not in error, error
    assert cloud.calls() == [] and not state_folder().exists()


@pytest.mark.slow
def test_secrets_reach_the_run_and_no_command_line(cloud, launch, tmp_path):
    secrets = tmp_path / "secrets"
    secrets.touch(mode=0o600)
    secrets.write_text("# wandb\nWANDB_API_KEY=se cret$(touch pwned)\n")
    work = Path("work.sh")
    work.write_text('echo "$WANDB_API_KEY" | sha256sum; stat -c %a ~/trm-launches/mine; ls ~/trm-launches/mine\n')
    subprocess.run(["git", "add", "work.sh"], check=True)  # not committed: git knows it
    status, lines = launch(*NEW, "--worker-env-file", secrets, "--", "bash", "work.sh")
    expected = hashlib.sha256(b"se cret$(touch pwned)\n").hexdigest()
    assert status == 0 and sorted(line for line in lines if expected in line) == [
        f"host {n} | {expected}  -" for n in (0, 1)
    ]
    assert "host 0 | 700" in lines and "host 0 | environment" not in lines
    kept = [path for path in tmp_path.rglob("*") if path.is_file() and "se cret" in path.read_text(errors="replace")]
    assert kept == [secrets]
    assert said(lines)[0].endswith("-dirty")


def test_a_dry_run_shows_the_commands_of_one_worker():
    """Those of eight hosts were sixty lines that differ by a number."""
    shown = []
    dry = DryRun(shown.append, "v4-64")
    record = Record(tpu="mine", zone="z", type="v4-64", command=("train", "tiny"))
    for worker in range(8):
        assert dry.run(ssh(record, worker, ["true"])) == "ended 0"
        dry.stream(ssh(record, worker, ["follow"]), lambda line: True)
    dry.json(["gcloud", "compute", "tpus", "tpu-vm", "describe", "mine"])
    assert shown[0] == "# commands on worker 0 are shown; those on workers 1 to 7 are the same"
    assert ["--worker=0" in each for each in shown[1:]] == [True, True, False]
