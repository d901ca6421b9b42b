"""A script: trains on virtual devices and prints the compiled programs and transfers, one line of JSON per run.

python -m support.inspect_programs DATA_DIR DEVICES RUN_DIR [field=value …] [-- DEVICES RUN_DIR [field=value …] …]

Several runs share one process, which saves the time of the imports.
"""

import ast
import itertools
import json
import os
import re
import sys
import threading

data_dir, *words = sys.argv[1:]
runs = [list(run) for separator, run in itertools.groupby(words, lambda word: word == "--") if not separator]
most = max(int(devices) for devices, *_ in runs)
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={most}"
os.environ["JAX_PLATFORMS"] = "cpu"

from jax._src import array  # noqa: E402

from support.presets import with_fields  # noqa: E402
from train_jax.run.presets import preset  # noqa: E402
from train_jax.runtime.devices import Devices  # noqa: E402
from train_jax.trainer import loop, start  # noqa: E402

texts = []
fetches = []
calls = []
inside = False
main_thread = threading.current_thread()  # other threads compile and prepare batches


class Watched(start.Programs):
    """Records the text of every program, and every array that is fetched to the host during a dispatch."""

    def _call(self, *args):
        global inside
        inside = True
        try:
            return super()._call(*args)
        finally:
            inside = False
            calls.append(self.compiles)

    def __exit__(self, *exception):
        texts.extend(future.result().as_text() for future in self._compiled.values())
        super().__exit__(*exception)


plain = array.ArrayImpl._value.fget  # CPU arrays need no transfer, so a transfer guard does not detect them


def fetched(self):
    if inside and threading.current_thread() is main_thread:
        fetches.append(str(self.aval))
    return plain(self)


array.ArrayImpl._value = property(fetched)
start.Programs = Watched


def main(devices, run_dir, *pairs):
    for seen in (texts, fetches, calls):
        seen.clear()
    fields = {name: ast.literal_eval(value) for name, value in (pair.split("=") for pair in pairs)}
    common = {"data_dir": data_dir, "run_dir": run_dir, "wandb": "disabled", "eval_batch_size": 8}
    config = with_fields(preset("tiny"), common | fields)
    loop.train(config, Devices(int(devices), config.compute.runner))
    shown = {
        "all_reduces": [len(re.findall(r"= \S+ all-reduce(?:-start)?\(", text)) for text in texts],
        "programs": len(texts),
        "programs_by_call": calls,
        "fetches": fetches,
    }
    print(json.dumps(shown))


for run in runs:
    main(*run)
