"""docs/deploy-v4-64.md, from its first command to its last, against stand-ins for Google Cloud and its storage.

`trm` is the real one, with small data and small models; on the workers, a script stands for the training, and the run
that it would write is copied to its folder. Two hosts stand for the eight.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from support.arc_files import write_source
from support.launching import TRM
from support.scripts import ENVIRONMENT, ROOT
from support.sudoku_tables import sudoku_rows, write_tables
from test_docs import blocks_of

from train_jax.__main__ import main
from train_jax.pods.launch.record import read_record
from train_jax.puzzles.maze.generator import generate
from train_jax.puzzles.maze.grid import text_of
from train_jax.storage.files import upload_folder
from train_jax.storage.storage import path_of

PAGE = "docs/deploy-v4-64.md"
BLOCKS = [block for block in blocks_of(PAGE, (ROOT / PAGE).read_text()) if not block.marked]
SMALLER = {
    "compile-pod": "--global-batch-size 64 --arch.hidden-size 128 --arch.num-heads 2 --arch.puzzle-emb-ndim 128 "
    "--arch.H-cycles 1 --arch.L-cycles 1",
    "build-data arc": "--num-aug 2",
}
"""Options that are added to a command of the page, so that it takes seconds."""


@pytest.fixture
def follow_page(cloud, launch, remote, tmp_path, finished_run, monkeypatch, capsys):
    """`follow_page(command)`: runs one command of the page and returns what it printed."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    for name, value in ENVIRONMENT.items():  # the checkout has a folder train_jax with little in it
        monkeypatch.setenv(name, value)
    write_source(home / "arc")
    words_here = {
        "sapientinc/sudoku-extreme": str(write_tables(tmp_path / "sudokus", sudoku_rows()[:30], sudoku_rows()[30:])),
        "sapientinc/maze-30x30-hard-1k": str(write_tables(tmp_path / "mazes", maze_rows()[:6], maze_rows()[6:])),
        "~/arc": str(home / "arc"),
        "1000": "2",
    }
    worker = f"#!/usr/bin/env bash\nSHARED={tmp_path}/$1; STEPS=5; HOLD=; mkdir -p $SHARED\n"
    worker += f"[ $1 != train ] || HOLD=3\n{TRM}"
    (tmp_path / "checkout" / "bin" / "trm").write_text(worker)

    def here(word):
        return words_here.get(word, word).replace("gs://my-bucket", remote).replace("~/", f"{home}/")

    def run(command):
        if not command.startswith("trm "):
            done = subprocess.run(["bash", "-ec", command], capture_output=True, text=True)
            assert done.returncode == 0, (command, done.stderr)
            return done.stdout
        words = [here(word) for word in shlex.split(command)[1:]]
        added = next((more.split() for name, more in SMALLER.items() if " ".join(words).startswith(name)), [])
        if words[:2] == ["launch", "logs"]:
            return followed(words)
        if words[0] == "launch" and words[1] != "list":
            status, lines = launch(*words[1:])
            assert status == 0, lines
            assert "--detach" not in words or read_record("my-tpu").is_watched()
            while words[1] == "stop" and not read_record("my-tpu").over:  # the page says so
                time.sleep(0.1)
            while "--detach" in words and read_record("my-tpu").phase != "running":  # the reader is slower than this
                time.sleep(0.1)
            if "train" in words and "--dry-run" not in words:
                upload_folder(finished_run, path_of(words[words.index("--run-dir") + 1]), last=["FINISHED"])
            return "\n".join(lines).replace("2 of 2", "8 of 8").replace("2 hosts", "8 hosts")
        capsys.readouterr()
        assert main([*words, *added]) == 0, (words, capsys.readouterr().err)
        return capsys.readouterr().out

    return run


def maze_rows():
    mazes = generate(8, 8, 18, "walls", np.random.default_rng(0), lambda *_: None)
    texts = [[text_of(maze).replace("\n", "") for maze in array] for array in mazes]
    return [f",{maze},{answer},{i}" for i, (maze, answer) in enumerate(zip(*texts, strict=True))]


def followed(words):
    """Returns the lines of `trm launch logs` until a host has made a step; Ctrl-C then ends it, not the run."""
    listens = "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # if the tests ignore it
    command = [sys.executable, "-c", f"{listens}; runpy.run_module('train_jax', run_name='__main__')", *words]
    environment = os.environ | ENVIRONMENT
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "host 0 | step" in line:
                process.send_signal(signal.SIGINT)
                break
    return "".join(lines)


@pytest.mark.docs
def test_every_command_of_the_page_runs_and_prints_what_the_page_says(follow_page, cloud, remote):
    printed = ""
    for block in BLOCKS:
        if block.language == "bash":
            text = "\n".join(follow_page(line) for line in block.code.replace("\\\n", "").splitlines())
            printed = text.replace(remote, "gs://my-bucket")
        else:
            pattern = ".*".join(map(re.escape, block.code.strip().split("…")))
            assert re.search(pattern.replace("\n", "\n(?:.*\n)*?"), printed), f"{block}:\n{printed}"
    assert cloud.node("my-tpu") is None, "the page leaves no node"
