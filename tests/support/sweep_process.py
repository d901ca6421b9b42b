"""A script: one sweeper of the runs in a plan, each of which is `support.sweep_worker`.

python -m support.sweep_process ROOT RUNS STEPS
"""

import sys

from train_jax.experiments import sweeper
from train_jax.experiments.sweeper import SweepFiles, Work
from train_jax.runtime.supervisor import Supervisor

sweeper.POLL_SECONDS = 0.05
root, runs, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])


def work(number: int) -> Work:
    name = f"group/run{number}/seed-0"
    return Work(name, steps, ("support.sweep_worker", f"{root}/{name}", str(steps)))


def run(words):
    return Supervisor([sys.executable, "-m", *words], 0, print).run()


files, works = SweepFiles(root), [work(number) for number in range(runs)]
sys.exit(sweeper.Sweeper(files, works, say=print, run=run).sweep())
