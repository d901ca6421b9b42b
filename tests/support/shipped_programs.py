"""`trm compile-pod` with the virtual CPU devices of this process in the place of a TPU topology.

python -m support.shipped_programs NAME --fill-cache FOLDER [--field value …]
"""

import sys

import jax

from train_jax.__main__ import main
from train_jax.pods.stages import compile_pod
from train_jax.pods.topologies import Topology

compile_pod.topology = lambda _: Topology("cpu", jax.devices(), 2**34, 1e12, 1e11)
sys.exit(main(["compile-pod", *sys.argv[1:]]))
