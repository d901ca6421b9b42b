"""A script that stands for `trm train`: computes steps in a run folder, and continues after the last one.

python -m support.sweep_worker RUN_DIR STEPS
"""

import json
import os
import signal
import sys
import time

from train_jax.run.lease import sole_writer
from train_jax.run.storage import path_of
from train_jax.runtime import supervisor

supervisor.BEAT_SECONDS = 0.02
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
supervisor.connect_to_supervisor()
folder, steps = path_of(sys.argv[1]), int(sys.argv[2])
with sole_writer(folder), (folder / "steps.jsonl").open("a+") as file:
    file.seek(0)
    first = len(file.read().splitlines())
    for step in range(first, steps):
        if stopped:
            sys.exit(75)
        began = time.monotonic()
        time.sleep(0.01)
        file.write(f"{json.dumps({'step': step, 'pid': os.getpid(), 'began': began, 'ended': time.monotonic()})}\n")
        file.flush()
    (folder / "FINISHED").write_text(json.dumps({"train_steps": steps, "summary": "done"}))
