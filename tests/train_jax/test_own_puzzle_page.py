"""docs/own_puzzle.md: its two files, as the page has them, build a data set that trains with its kind."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest
from support.scripts import ENVIRONMENT, ROOT
from test_docs import blocks_of

PAGE = "docs/own_puzzle.md"
SMALLER = {"train": ["--steps", "3", "--eval-examples", "20", "--eval-batch-size", "20"]}
"""Options that are added to a command of the page, so that it takes seconds."""


@pytest.mark.docs
def test_the_page_from_its_files_to_its_report(tmp_path):
    blocks = list(blocks_of(PAGE, (ROOT / PAGE).read_text()))
    for block in blocks:
        if block.language == "python":
            name = re.match(r"# (\w+\.py)\n", block.code)
            assert name, f"{block}: the first line names no file"
            (tmp_path / name[1]).write_text(block.code)
    (commands,) = [block.code for block in blocks if block.language == "bash"]
    printed = {}
    for line in commands.splitlines():
        stage, *words = line.partition("#")[0].split()[1:]
        start = ["-m", "train_jax", stage] if line.startswith("trm") else [stage]
        command = [sys.executable, *start, *words, *SMALLER.get(stage, [])]
        done = subprocess.run(command, cwd=tmp_path, env=os.environ | ENVIRONMENT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        printed[stage] = done.stdout
    assert "not solved: a line is not balanced" in printed["solve"], "the rules of the page's class were not used"
    inputs, labels = (np.load(tmp_path / f"data/takuzu/test/all__{name}.npy") for name in ("inputs", "labels"))
    assert inputs.shape == labels.shape == (200, 36)
    assert ((inputs == 1) | (inputs == labels)).all() and (inputs == 1).any(axis=1).all()
