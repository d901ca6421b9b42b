"""A script: one sweeper of several runs, or one of these runs, which computes steps and continues after the last one.

python -m support.sweep_process ROOT RUNS STEPS
python -m support.sweep_process RUN_DIR STEPS
"""

import json
import signal
import sys
import time

from train_jax.research import sweeper
from train_jax.research.sweeper import SweepFiles, Work
from train_jax.runtime import supervisor
from train_jax.storage.lease import sole_writer
from train_jax.storage.storage import path_of


def sweep(root, runs, steps):
    sweeper.POLL_SECONDS = 0.05
    names = [f"group/run{number}/seed-0" for number in range(runs)]
    works = [Work(name, steps, (f"{root}/{name}", str(steps))) for name in names]

    def run(words):
        return supervisor.Supervisor([sys.executable, "-m", "support.sweep_process", *words], 0, print).run()

    return sweeper.Sweeper(SweepFiles(root), works, say=print, run=run).sweep()


def train(folder, steps):
    supervisor.BEAT_SECONDS = 0.02
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    supervisor.connect_to_supervisor()
    with sole_writer(folder), (folder / "steps.jsonl").open("a+") as file:
        file.seek(0)
        for step in range(len(file.read().splitlines()), steps):
            if stopped:
                return 75
            began = time.monotonic()
            time.sleep(0.01)
            file.write(f"{json.dumps({'step': step, 'began': began, 'ended': time.monotonic()})}\n")
            file.flush()
        (folder / "FINISHED").write_text(json.dumps({"train_steps": steps, "summary": "done"}))
    return 0


place, *numbers = sys.argv[1:]
sys.exit(sweep(place, *map(int, numbers)) if len(numbers) == 2 else train(path_of(place), int(numbers[0])))
