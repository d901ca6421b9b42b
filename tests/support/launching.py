"""A checkout, a stand-in for gcloud, and `trm launch` with both, for the tests of launches."""

import contextlib
import io
import os
import shutil
import subprocess
import sys
import threading

import pytest

from support import gcloud_stand_in
from support.gcloud_stand_in import StandIn
from support.scripts import ROOT

TRM = """#!/usr/bin/env bash
# Stands for a training: one step in 50 ms, in a folder that all hosts share, once all of them are there. At the steps
# in HOLD the first one waits, once, to be stopped.
trap 'echo "saved after step $(cat "$SHARED/step")"; exit 75' TERM
step=$(cat "$SHARED/step" 2>/dev/null || echo 0)
echo "process $JAX_PROCESS_ID of $JAX_NUM_PROCESSES at step $step: $*" | tee -a "$SHARED/starts"
started() { grep -c "^process $1 " "$SHARED/starts" || true; }
for other in $(seq 0 $((JAX_NUM_PROCESSES - 1))); do
    until [ "$(started "$other")" = "$(started "$JAX_PROCESS_ID")" ]; do sleep 0.02; done
done
while [ "$step" -lt "${STEPS:-20}" ]; do
    step=$((step + 1))
    [ "$JAX_PROCESS_ID" != 0 ] || { echo "$step" > "$SHARED/new" && mv "$SHARED/new" "$SHARED/step"; }
    echo "step $step/${STEPS:-20}"
    case "$JAX_PROCESS_ID  ${HOLD:-} " in
        "0 "*" $step "*) mkdir "$SHARED/$step" 2>/dev/null && { sleep 60 & wait; } ;;
    esac
    sleep 0.05
done
exit "${LAST:-0}"
"""
TPU = ("--tpu", "mine", "--zone", "us-central2-b")
NEW = (*TPU, "--type", "v4-16")
TRAIN = ("train", "tiny", "--run-dir", "gs://bucket/run")


@pytest.fixture
def cloud(tmp_path, monkeypatch):
    """The stand-in; the working folder is a checkout whose `trm` is the script above."""
    from train_jax.pods.launch import life, tpu
    from train_jax.pods.launch.record import WORKER_SCRIPT

    repository = tmp_path / "checkout"
    binaries = tmp_path / "bin"
    folder = tmp_path / "cloud"
    for path in (repository / "bin", (repository / WORKER_SCRIPT).parent, binaries, folder, tmp_path / "shared"):
        path.mkdir(parents=True)
    shutil.copy(ROOT / WORKER_SCRIPT, repository / WORKER_SCRIPT)
    (repository / "environment.sh").write_text('PATH="$PWD/bin:$PATH"; echo "extras: $*" >> ../installed\n')
    (repository / "bin" / "trm").write_text(TRM)
    (repository / "bin" / "trm").chmod(0o755)
    git = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *words], check=True)
    program = binaries / "gcloud"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {gcloud_stand_in.__file__} "$@"\n')
    program.chmod(0o755)
    (folder / "hosts").write_text("2")
    monkeypatch.setenv("PATH", f"{binaries}:{os.environ['PATH']}")
    monkeypatch.setenv("TRM_STAND_IN", str(folder))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(repository)
    monkeypatch.setattr(life, "WAIT_SECONDS", 0.0)
    monkeypatch.setattr(tpu, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(tpu, "AGAIN_SECONDS", 0.02)
    yield StandIn(folder)
    for name in ("mine", "other"):
        StandIn(folder).remove_machines(name)


@pytest.fixture
def launch(cloud, tmp_path, monkeypatch):
    """`launch(argument, …, on={line: act})`: exit status and lines; `act()` is called at the first such line."""

    from train_jax.__main__ import main
    from train_jax.pods.stages import launch as stage

    def run(*argv, on=None):
        lines = []
        waiting = dict(on or {})

        def show(line):
            lines.append(line)
            for text in [text for text in waiting if text in line]:
                threading.Thread(target=waiting.pop(text), daemon=True).start()

        monkeypatch.setattr(stage, "_show", show)
        status = 0
        try:
            status = main(["launch", *map(str, argv)])
        except SystemExit as end:
            status = end.code
        assert not waiting, lines
        return status, lines

    run.shared = f"--env=SHARED={tmp_path / 'shared'}"
    return run


def said(lines):
    return [line.removeprefix("launch | ") for line in lines if line.startswith("launch | ")]


def verbs(cloud):
    return [" ".join(call[2:4]) for call in cloud.calls()]


def listed(launch):
    """Returns the lines of `trm launch list`, which prints for itself."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert launch("list")[0] == 0
    return out.getvalue().splitlines()
