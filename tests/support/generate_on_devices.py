"""A script: generates on one and on eight virtual devices, alone and in batches; prints tokens and compilations.

python -m support.generate_on_devices NAME_OF_A_LANGUAGE_MODEL
"""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import dataclasses
import json
import sys

import jax

from support.small_gpt import generator_of, rows_of, small_gpt
from train_jax.runtime.devices import Devices
from train_jax.tasks.language.generation import Sampling

SAMPLING = Sampling(temperature=0.8, top_k=20, top_p=0.9)
compiled: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, _, **of: compiled.append(of["fun_name"]) if "backend_compile" in event else None
)
PROGRAMS = ("jit(_fun)", "jit(on_one_device)")
"""The names of `Devices.parallel_map`'s programs, by pmap and shard_map; tracing also converts constants."""
module = small_gpt(sys.argv[1])
rows = [dataclasses.replace(row, sample=3) for row in rows_of([1, 9, 4, 12, 2, 7, 12, 5])]
results = {}


def generate(name, devices, rows, batch, **sizes):
    generator = generator_of(module, devices, rows=batch, new_tokens=10, sampling=SAMPLING, seed=5, **sizes)
    compiled.clear()
    results[name] = {"tokens": list(generator.complete(rows)), "programs": sum(map(compiled.count, PROGRAMS))}
    compiled.clear()
    for _ in generator.complete(rows[::-1]):
        pass
    results[name]["compiled for other prompts"] = compiled[:]


generate("one device", Devices(1), rows, 8, prompt_tokens=12)
generate("eight devices", Devices(8), rows, 8, prompt_tokens=12)
generate("eight devices by shard_map", Devices(8, "shard_map"), rows, 8, prompt_tokens=12)
generate("in batches of three", Devices(1), rows, 3, prompt_tokens=16)
generate("alone", Devices(1), rows, 1, prompt_tokens=12)
print(json.dumps(results))
