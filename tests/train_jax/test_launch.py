"""`trm launch` against a stand-in for gcloud that runs what a worker would run."""

import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support.gcloud_stand_in import FLAGS
from support.launching import NEW, TPU, TRAIN, listed, said, verbs
from support.scripts import ENVIRONMENT

from train_jax.__main__ import main
from train_jax.errors import UserError
from train_jax.pod.launch.record import Record, read_record, watching, write_record
from train_jax.pod.launch.tpu import Tpu
from train_jax.stages import launch as stage

LAUNCH = """
import sys
from train_jax.__main__ import main
from train_jax.pod.launch import tpu
tpu.POLL_SECONDS = 0.02
sys.exit(main(sys.argv[1:]))
"""


def test_a_run_on_a_node_that_is_created_and_deleted(cloud, launch, monkeypatch):
    over, delete = [], Tpu.delete
    monkeypatch.setattr(Tpu, "delete", lambda node: (over.append(read_record("mine").over), delete(node)))
    status, lines = launch(*NEW, launch.shared, "--env=STEPS=3", "--", *TRAIN)
    assert status == 0 and cloud.node("mine") is None and "host 0 | step 3/3" in lines
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


def test_every_host_gets_the_compiled_programs(cloud, launch, tmp_path):
    """They come with the code, or as the name of their folder in storage."""
    trm, folder = Path("bin/trm"), tmp_path / "programs"
    shown = 'cat "$JAX_COMPILATION_CACHE_DIR/jit_step-1-cache" 2>/dev/null || echo "$JAX_COMPILATION_CACHE_DIR"\n'
    trm.write_text(f"#!/usr/bin/env bash\n{shown}exit 0\n")
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-qam", "x"], check=True)
    folder.mkdir()
    (folder / "jit_step-1-cache").write_text("a program\n")
    (folder / "shipped.json").write_text("{}")
    status, lines = launch(*NEW, launch.shared, "--compiled", folder, "--", *TRAIN)
    assert status == 0 and {"host 0 | a program", "host 1 | a program"} <= set(lines)
    status, lines = launch(*NEW, launch.shared, "--compiled", "gs://bucket/programs", "--", *TRAIN)
    assert status == 0 and {"host 0 | gs://bucket/programs", "host 1 | gs://bucket/programs"} <= set(lines)


@pytest.mark.slow
def test_the_life_of_a_run_with_two_preemptions(cloud, launch, tmp_path):
    """Created, installed, started, preempted twice, created again each time, finished, deleted."""
    status, lines = launch(
        *NEW, "--capacity", "spot", "--price-per-hour", "32", launch.shared, "--env=HOLD=4 12", "--", *TRAIN,
        on={"host 0 | step 4/": lambda: cloud.preempt("mine"), "host 0 | step 12/": lambda: cloud.preempt("mine")},
    )  # fmt: skip
    assert status == 0, lines
    assert verbs(cloud).count("queued-resources create") == verbs(cloud).count("queued-resources delete") == 3
    assert all("--spot" in call for call in cloud.calls() if call[3] == "create") and cloud.node("mine") is None
    messages = said(lines)
    assert [line for line in messages if "restart" in line] == [
        "2 of 2 gone; restart 1 of 10",
        "2 of 2 gone; restart 2 of 10",
    ]
    assert messages.count("mine is PREEMPTED: deleting it") == 2 and messages[-2] == "deleted mine"
    assert messages[-1].startswith("done: 0.0") and messages[-1].endswith(" at 32 an hour")
    starts = (tmp_path / "shared" / "starts").read_text().splitlines()
    for host in range(2):
        own = [line for line in starts if line.startswith(f"process {host} of 2 at step ")]
        assert len(own) == 3 and own[0].startswith(f"process {host} of 2 at step 0: ")
        assert all(line.endswith(f": {' '.join(TRAIN)}") for line in own)
        assert f"host {host} | step 20/20" in lines
    record = read_record("mine")
    assert (record.phase, record.status, record.starts) == ("done", 0, 3) and record.ready_since is None
    assert "host 1 | step 20/20" in launch("logs", "mine")[1], "from the local copies"


# ---- connections, limits, mistakes


@pytest.mark.slow
def test_a_lost_connection_ends_nothing_and_no_line_is_shown_twice(cloud, launch):
    (cloud.folder / "drop").write_text("3")

    def drop_again():
        (cloud.folder / "drop").write_text("5")

    status, lines = launch(*NEW, launch.shared, "--", *TRAIN, on={"step 8/": drop_again})
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
            if "step 5/100" in line:
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


def test_a_reader_that_is_gone_ends_the_watching(monkeypatch):
    """Ctrl-C has the same effect. An error in a host's thread would look like a lost host, and restart the run."""
    ends = os.pipe()
    os.close(ends[0])
    with contextlib.suppress(BrokenPipeError), os.fdopen(ends[1], "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        with pytest.raises(KeyboardInterrupt):
            thread = threading.Thread(target=stage._show, args=("a line",))
            thread.start()
            thread.join()
            time.sleep(1)
        stage._show("another line")


@pytest.mark.slow
def test_a_request_that_fails_after_a_preemption_is_repeated(cloud, launch):
    def preempt():
        (cloud.folder / "refuse").write_text("queued-resources create")
        cloud.preempt("mine")

    status, lines = launch(*NEW, launch.shared, "--env=HOLD=4", "--", *TRAIN, on={"host 0 | step 4/": preempt})
    assert status == 0 and any(
        line.startswith("no node yet: ERROR: (gcloud) RESOURCE_EXHAUSTED") for line in said(lines)
    )


@pytest.mark.slow
def test_a_failed_start_leaves_no_node(cloud, launch, capsys):
    (cloud.folder / "refuse").write_text("unpack")
    assert launch(*NEW, launch.shared, "--", *TRAIN)[0] == 1
    assert cloud.node("mine") is None and "RESOURCE_EXHAUSTED" in capsys.readouterr().err
    assert launch(*NEW, launch.shared, "--", *TRAIN)[0] == 0, "again"


# ---- nodes


@pytest.mark.slow
@pytest.mark.parametrize("option", [None, "--delete-when-done"])
def test_a_node_that_was_there_is_used_and_kept(cloud, launch, option):
    cloud.create("mine", "us-central2-b")
    status, lines = launch(*TPU, *filter(None, [option]), launch.shared, "--", *TRAIN)
    assert status == 0 and "queued-resources create" not in verbs(cloud)
    assert (cloud.node("mine") is None) == (option is not None)
    if option is None:
        assert "mine is still there" in said(lines)[-2]
        assert "  idle: the run is over; it was there before" in listed(launch)


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


@pytest.mark.slow
def test_the_stand_in_knows_only_flags_of_gcloud():
    """Against the table of commands in an installed gcloud, which needs no account and no network."""
    program = shutil.which("gcloud")
    tables = [] if program is None else [Path(program).resolve().parents[1] / "data" / "cli" / "gcloud_completions.py"]
    if not tables or not tables[0].is_file():
        pytest.skip("gcloud is not installed")
    known = {"__name__": "completions"}
    exec(compile(tables[0].read_text(), "completions", "exec"), known)
    commands = known["STATIC_COMPLETION_CLI_TREE"]["commands"]["compute"]["commands"]["tpus"]["commands"]
    everywhere = {"--project", "--format", "--quiet", "--version"}  # `--version` of create is missing in the table
    for name, flags in FLAGS.items():
        group, verb = name.split()
        assert flags - everywhere <= set(commands[group]["commands"][verb]["flags"]), name
