"""Run in a process of its own: trains on virtual devices and prints, as JSON, what was compiled and what was fetched.

python -m support.inspect_programs DEVICES DATA_DIR RUN_DIR [field=value …]
"""

import ast
import json
import os
import re
import sys
import threading

devices, data_dir, run_dir = int(sys.argv[1]), *sys.argv[2:4]
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
os.environ["JAX_PLATFORMS"] = "cpu"

from jax._src import array  # noqa: E402

from support.presets import with_fields  # noqa: E402
from train_jax import loop, start  # noqa: E402
from train_jax.run.presets import preset  # noqa: E402
from train_jax.runtime.devices import Devices  # noqa: E402

fields = {name: ast.literal_eval(value) for name, value in (pair.split("=") for pair in sys.argv[4:])}
common = {"data_dir": data_dir, "run_dir": run_dir, "wandb": "disabled", "eval_batch_size": 8}
config = with_fields(preset("tiny"), common | fields)

texts, fetches, calls = [], [], []
inside = False
main = threading.current_thread()  # others compile and make batches


class Watched(start.Programs):
    """Records every program's text, and every array fetched to the host during a dispatch."""

    def __call__(self, *args):
        global inside
        inside = True
        try:
            return super().__call__(*args)
        finally:
            inside = False
            calls.append(self.compiles)

    def __exit__(self, *exception):
        texts.extend(future.result().as_text() for future in self._compiled.values())
        super().__exit__(*exception)


plain = array.ArrayImpl._value.fget  # CPU arrays need no transfer, so no transfer guard sees them


def fetched(self):
    if inside and threading.current_thread() is main:
        fetches.append(str(self.aval))
    return plain(self)


array.ArrayImpl._value = property(fetched)
start.Programs = Watched
figures = loop.train(config, Devices(devices, config.compute.runner))
print(
    json.dumps(
        {
            "all_reduces": [len(re.findall(r"= \S+ all-reduce(?:-start)?\(", text)) for text in texts],
            "programs": len(texts),
            "programs_by_call": calls,
            "fetches": fetches,
            "figures": figures,
        }
    )
)
