"""The notebook for Colab and Kaggle: its code cells run on a CPU, in one process, as a kernel would run them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "docs" / "notebooks" / "first-run.ipynb"
KERNEL = '''
import json, subprocess, sys

def shell(command):
    """Runs the command as `!command` does, but a failure ends the notebook."""
    done = subprocess.run(command, shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout)
    assert done.returncode == 0, command

names = {"shell": shell}
for cell in json.load(sys.stdin):
    exec(compile(cell, "cell", "exec"), names)
'''


def cells():
    notebook = json.loads(NOTEBOOK.read_text())
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def as_python(cell):
    """Returns the cell with each `!command {name}` as a call, as IPython runs it."""
    return re.sub(r"^(\s*)!(.*)$", lambda line: f"{line[1]}shell(f{line[2]!r})", cell, flags=re.MULTILINE)


def test_its_cells_run(tmp_path):
    """The cells run in a folder with the files that the installation looks for; the packages are installed already."""
    notebook = json.loads(NOTEBOOK.read_text())
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook["cells"])
    (tmp_path / "constraints.txt").touch()
    (tmp_path / "bin").mkdir()
    trm = tmp_path / "bin" / "trm"
    trm.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m train_jax "$@"\n')
    trm.chmod(0o755)
    paths = os.pathsep.join([str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": paths, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    environment |= {"MPLBACKEND": "agg", "STEPS": "60"}
    code = json.dumps([as_python(cell) for cell in cells()])
    done = subprocess.run(
        [sys.executable, "-c", KERNEL], input=code, capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for expected in ("CpuDevice", "held-out exact accuracy", "the last of step 60", "PyTorch agrees", "_proj.weight"):
        assert expected in done.stdout, done.stdout
