"""`trm launch`: no name, folder, argument or secret has a meaning in a shell; a dry run can be pasted."""

import hashlib
import shlex
import subprocess
from pathlib import Path

import pytest
from support.launching import NEW, TPU, TRAIN, TRM, said

from train_jax.__main__ import main
from train_jax.pod.launch.record import read_record, state_folder

NASTY = "a b'\"$(touch pwned)`touch pwned`;touch pwned|&*?[x]\\ #~\n-x é"


@pytest.mark.slow
def test_no_character_has_a_meaning(cloud, launch, tmp_path):
    train = ("train", "tiny", "--run-dir", f"gs://bucket/{NASTY}")
    (cloud.folder / "hosts").write_text("1")
    trm = Path("bin/trm")
    reports = 'printf "%s\\0" "$@" "$NASTY" > "$SHARED/arguments"\n'
    trm.write_text(TRM.replace('exit "${LAST:-0}"\n', "") + reports)
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-qam", "x"], check=True)
    status, _ = launch(*NEW, launch.shared, f"--env=NASTY={NASTY}", "--env=STEPS=2", "--", *train)
    assert status == 0
    assert (tmp_path / "shared" / "arguments").read_text().split("\0")[:-1] == [*train, NASTY]
    assert not list(tmp_path.rglob("pwned"))


MISTAKES = [
    ([], "either --rehearse HOSTSxDEVICES or --tpu NAME"),
    (["--tpu", "$(touch pwned)", "--zone", "us-central2-b"], "--tpu '$(touch pwned)': expected a name"),
    (["--tpu=--help", "--zone", "us-central2-b"], "--tpu '--help': expected a name"),
    (["--tpu", "mine", "--zone", "a;b"], "--zone 'a;b': expected a zone"),
    ([*NEW, "--project", "../x"], "--project '../x': expected the id"),
    ([*NEW, "--env", "1x=y"], "--env 1x: expected NAME=VALUE"),
    ([*NEW, "--env", "WANDB_API_KEY=abc"], "--env WANDB_API_KEY would be in command lines"),
    ([*NEW, "--worker-env-file", "open"], "--worker-env-file open can be read by others; run `chmod 600`"),
    ([*NEW, "--worker-env-file", "no"], "--worker-env-file no: No such file"),
    ([*NEW, "--compiled", "no"], "--compiled no has no program; write one with `trm compile-pod --fill-cache no`"),
    (["--rehearse", "2x1", "--compiled", "no"], "--compiled no is for --tpu; leave it out with --rehearse"),
    ([*NEW, "--", "train", "tiny"], "is on one host only; give --run-dir gs://bucket/folder"),
    (["logs", "nobody"], "no launch nobody is known"),
    (["stop", "a b"], "--tpu 'a b': expected a name"),
]


def test_mistakes_are_one_line_and_nothing_is_called(cloud, capsys):
    Path("open").touch(mode=0o644)
    for argv, message in MISTAKES:
        command = [] if "--" in argv or argv[:1] in (["logs"], ["stop"]) else ["--", *TRAIN]
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


@pytest.mark.slow
def test_a_local_run_folder_of_one_host_is_collected(cloud, launch):
    (cloud.folder / "hosts").write_text("1")
    Path("work").mkdir()
    trm = Path("bin/trm")
    trm.write_text(TRM.replace('exit "${LAST', 'mkdir -p "$4"; echo done > "$4/FINISHED"; exit "${LAST'))
    name = "runs/it's; $(touch pwned)"
    status, lines = launch(*TPU, "--type", "v4-8", launch.shared, "--", "train", "tiny", "--run-dir", name)
    assert status == 0 and (Path(name) / "FINISHED").read_text() == "done\n" and f"results: {name}" in said(lines)
    assert cloud.node("mine") is None and not list(Path().rglob("pwned"))


@pytest.mark.slow
def test_the_commands_of_a_dry_run_can_be_pasted(cloud, launch):
    options = (*NEW, launch.shared, f"--env=NASTY={NASTY}", "--env=STEPS=3", "--dry-run")
    status, lines = launch(*options, "--", *TRAIN, "--wandb", "disabled")
    assert status == 0 and cloud.calls() == [] and read_record("mine") is None
    text = "\n".join(line for line in lines if not line.startswith("launch | "))
    assert len(shlex.split(text)) > 50 and text.startswith("gcloud compute tpus tpu-vm describe mine")
    archive = state_folder() / "mine" / "code.tar.gz"
    archive.parent.mkdir(parents=True)
    subprocess.run(["git", "archive", "--format=tar.gz", f"--output={archive}", "HEAD"], check=True)
    commands = text.replace("ADDRESS_OF_WORKER_0", "127.0.0.1")
    done = subprocess.run(["bash", "-c", commands], capture_output=True, text=True, timeout=60)
    assert done.stdout.count(": train tiny ") == 2 and done.stdout.count("ended 0") == 2, done.stderr
    assert "step 3/3" in done.stdout
    assert cloud.node("mine") is None and not list(Path().rglob("pwned"))
