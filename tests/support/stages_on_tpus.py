"""Runs stages of `trm` on virtual CPU devices, and compiles each of their programs over devices for TPU chips, too.

python -m support.stages_on_tpus TOPOLOGY ARGUMENTS … [-- ARGUMENTS …] prints a line of JSON at the end: the programs
of each stage that were compiled. It ends with the first stage that fails.
"""

import itertools
import json
import os
import sys

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax

from train_jax.__main__ import main
from train_jax.pods.topologies import topology, use_host_backend
from train_jax.runtime.devices import Devices

use_host_backend()
TPUS = topology(sys.argv[1]).devices
on_the_host = Devices.parallel
compiled: list[str] = []


class Both:
    """A program of the host; it is compiled for TPUs when it is called or lowered for arguments of new shapes."""

    def __init__(self, name, program, for_tpus):
        self.name = name
        self.program = program
        self.for_tpus = for_tpus
        self.known = set()

    def __call__(self, *args):
        self.compile(args)
        return self.program(*args)

    def lower(self, *args):
        self.compile(args)
        return self.program.lower(*args)

    def compile(self, args):
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype)), args)
        known = str(shapes)
        if known not in self.known:
            self.for_tpus.lower(*shapes).compile()
            self.known.add(known)
            compiled.append(self.name)


def parallel(self, function, *args, **kwargs):
    chips = Devices(runner="pmap", available=TPUS[: self.count])
    for_tpus = on_the_host(chips, function, *args, **kwargs)
    return Both(function.__name__, on_the_host(self, function, *args, **kwargs), for_tpus)


Devices.parallel = parallel
stages = [list(part) for divides, part in itertools.groupby(sys.argv[2:], lambda word: word == "--") if not divides]
results = []
for stage in stages:
    compiled.clear()
    status = main(stage)
    if status:
        sys.exit(status)
    results.append(sorted(compiled))
print(json.dumps(results))
