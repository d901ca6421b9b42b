"""Starts several processes as those of one run, as the hosts of a pod are."""

import os
import re
import shutil
import socket
import subprocess

from support.scripts import ENVIRONMENT, ROOT
from train_jax.run.machine import SOURCES

# Several threads of Gloo write "[Gloo] Rank 0 is connected to 3 peer ranks. …" at once, a part with each write.
GLOO = re.compile(r"\[Gloo\] Rank | is connected to | peer ranks\. |Expected number of connected peer ranks is : |\d+")


def own_lines(text):
    """Returns the lines of a process's output that are more than parts of Gloo's."""
    return [line for line in text.splitlines() if GLOO.sub("", line).strip()]


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_processes(commands, folders=(ROOT, ROOT), *, count=0, environments=({}, {})):
    """Runs the commands as the processes of one run; returns exit statuses and outputs.

    `count`: the number of processes that each of them expects, by default that of the commands; `environments`: more
    variables for each.
    """
    count = count or len(commands)
    variables = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}", "JAX_NUM_PROCESSES": str(count)}
    running = []
    for number, command in enumerate(commands):
        own = {} if count == 1 else variables | {"JAX_PROCESS_ID": str(number)}
        environment = os.environ | ENVIRONMENT | own | environments[number]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        running.append(subprocess.Popen(command, env=environment, cwd=folders[number], **pipes))
    texts = [process.communicate(timeout=400)[0] for process in running]
    return [process.returncode for process in running], texts


def other_code(folder):
    """Copies the code with another train_jax/trainer/loop.py; returns the variables of a process that runs the copy."""
    for name in (*SOURCES, "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    with (folder / "train_jax" / "trainer" / "loop.py").open("a") as file:
        file.write("# older\n")
    return {"PYTHONPATH": f"{folder}:{folder / 'tests'}"}
