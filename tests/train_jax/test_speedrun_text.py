"""`PROFILE=text` and `PROFILE=chat bash speedrun_tpu.sh`: the script's own commands, executed in this process, because
each of them would import JAX again."""

import itertools
import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from support.scripts import ROOT

from train_jax.__main__ import main as trm
from train_jax.language.export_check import check_export
from train_jax.report.commands import Console
from train_jax.report.progress import progress
from train_jax.run.folder import RunFolder
from train_jax.run.restore import restore


def commands_of(profile, tmp_path):
    """The `trm` commands of the script, in their order, with data and run in `tmp_path`."""
    script = tmp_path / "script" / "speedrun_tpu.sh"
    trm = tmp_path / "bin" / "trm"
    for path in (script, trm):
        path.parent.mkdir(exist_ok=True)
    script.write_text((ROOT / "speedrun_tpu.sh").read_text())
    script.with_name("environment.sh").touch()
    trm.write_text('#!/bin/sh\nprintf "%s\\n" "$(printf " %s" "$@")" >> "$LOG"\n')
    trm.chmod(0o755)
    log = tmp_path / "commands"
    environment = {"PROFILE": profile, "LOG": str(log), "PATH": f"{trm.parent}:{os.environ['PATH']}"}
    environment |= {"DATA_DIR": str(tmp_path / "data"), "RUN_DIR": str(tmp_path / "run")}
    done = subprocess.run(["bash", str(script)], env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, *then = done.stdout.partition("\nnext:\n")[2].splitlines()
    assert first.split() == ["source", "./environment.sh"] and len(then) == 2, "the shell that ran it finds no trm yet"
    return [shlex.split(line) for line in log.read_text().splitlines()]


PHASES = "build-data preflight train build-data train"
NANOCHAT = "build-data train train chat-eval chat-eval chat-eval report summary"


@pytest.mark.parametrize(
    ("profile", "stages", "phases"),
    [
        ("text", "build-data preflight train evaluate generate export report summary", []),
        ("chat-quick", f"{PHASES} train chat-eval chat-eval report summary", ["sft run", "rl run-sft"]),
        ("nanochat", f"{PHASES} {NANOCHAT}", ["mid run", "sft run-mid", "rl run-sft"]),
    ],
)
def test_a_profile_has_its_stages_and_phases(tmp_path, profile, stages, phases):
    commands = commands_of(profile, tmp_path)
    assert " ".join(command[0] for command in commands) == stages
    options = [dict(itertools.pairwise(command)) for command in commands]
    begun = [f"{each['--phase']} {Path(each['--init-from']).name}" for each in options if "--phase" in each]
    assert begun == phases


@pytest.mark.slow
def test_every_phase_of_a_small_chat_model(tmp_path, capsys, monkeypatch):
    commands = commands_of("chat-quick", tmp_path)
    monkeypatch.chdir(ROOT)
    for command in commands:
        assert trm(command) == 0, command
    output = capsys.readouterr().out
    assert "problems: accuracy" in output and "ChatCORE" in output
    folder = RunFolder(tmp_path / "run-rl")
    table = (folder.report.parent / "phases.md").read_text().splitlines()
    assert [line.split(" | ")[0] for line in table[2:]] == ["| run", "| run-sft", "| run-rl", "| together"]
    assert "spelling:5" in table[0] and "<h2>Phases</h2>" in folder.report.read_text()


@pytest.mark.campaign
def test_every_stage_of_a_small_language_model(tmp_path, capsys, monkeypatch):
    commands = commands_of("text-tiny", tmp_path)
    monkeypatch.chdir(ROOT)
    outputs = {}
    for command in commands:
        assert trm(command) == 0, command
        outputs[command[0]] = capsys.readouterr().out
    folder = RunFolder(tmp_path / "run")
    assert json.loads(folder.finished.read_text())["train_steps"] == 20
    assert folder.weights.is_file() and "Beside compressors" in folder.report.read_text()
    assert "gzip -9" in outputs["evaluate"] and outputs["evaluate"].count("\n--- ") >= 3
    assert outputs["generate"].startswith("import") and "PyTorch agrees" in outputs["export"]
    assert "bits per byte" in outputs["summary"] and "PyTorch agrees" in outputs["summary"]
    weights = load_file(folder.weights)
    save_file(weights | {"lm_head.weight": 1.1 * weights["lm_head.weight"]}, folder.weights)
    run = restore(str(folder.path)).in_float32()
    assert not check_export(run, folder.weights, Console(print, progress)).agrees
