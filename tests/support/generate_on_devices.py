"""A script: generates on virtual devices, alone and in batches; prints tokens, log-probabilities and compilations.

python -m support.generate_on_devices NAME_OF_A_LANGUAGE_MODEL DEVICES

With `JAX_COORDINATOR_ADDRESS` and the other variables of `train_jax.runtime.processes`, it is one of several processes,
of so many devices each.
"""

import os
import sys

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={sys.argv[2]}"
os.environ["JAX_PLATFORMS"] = "cpu"

import json

import jax

from support.compilations import compilations
from support.small_gpt import engine_of, prompts_of, requests_of, small_gpt
from train_jax.language.sampling import Sampling
from train_jax.runtime.devices import Devices
from train_jax.runtime.processes import join_processes

join_processes()
SAMPLING = Sampling(temperature=0.8, top_k=20, top_p=0.9)
module = small_gpt(sys.argv[1])
requests = requests_of(prompts_of([1, 9, 4, 12, 2, 7, 12, 5, 20, 3]), 10, sampling=SAMPLING, seed=5, sample=3)
results = {}


def generate(name, devices, slots):
    engine = engine_of(module, devices, slots=slots, capacity=32, tokens_per_dispatch=4)
    rows = list(engine.complete(requests))
    results[name] = {"tokens": [row.tokens for row in rows], "log_probs": [row.log_probs for row in rows]}
    with compilations() as compiled:
        list(engine.complete(requests[::-1]))
    results[name]["compiled for other prompts"] = compiled


if jax.process_count() > 1:
    generate("processes", Devices(), 8)
else:
    generate("one device", Devices(1), 10)
    generate("eight devices", Devices(8), 8)
    generate("eight devices by shard_map", Devices(8, "shard_map"), 16)
if jax.process_index() == 0:
    print(json.dumps(results))
