"""Models and puzzles behind the application of `trm serve`, for tests: scripted models and an untrained Sudoku run."""

import asyncio
import contextlib
import threading
from functools import partial

import torch

import bridge
from support.scripted_model import BYTES, Scripted, token_of
from support.small_gpt import engine_of
from train_jax.errors import UserError
from train_jax.runtime.devices import Devices
from train_jax.serve.connection import server_of
from train_jax.serve.language import Model
from train_jax.serve.limits import Limits

SLOTS = 4
CAPACITY = 96
LIMITS = Limits(requests_per_minute=10**6, prompt_tokens=80)


def alphabet():
    """Returns a model whose answers are the alphabet, again and again."""
    module = Scripted()
    with torch.no_grad():
        module.table[token_of("<|assistant_start|>")] = 0.0
        module.table[token_of("<|assistant_start|>"), ord("a")] = 30.0
        letters = torch.arange(ord("a"), ord("z"))
        module.table[letters, letters + 1] = 30.0
        module.table[ord("z"), ord("a")] = 30.0
    return module


def model_of(name="toy", module=None, *, others=None, capacity=CAPACITY, limits=LIMITS):
    """A served model; `others` are modules with the weights of further checkpoints, by step; None for a deleted one."""
    module = module or Scripted()
    engine = engine_of(module, Devices(1), slots=SLOTS, capacity=capacity)
    checkpoints = {step: partial(_weights, step, each) for step, each in ({0: module} | (others or {})).items()}
    return Model(name, engine, BYTES, limits=limits, checkpoints=checkpoints)


def _weights(step, module):
    if module is None:
        raise UserError(f"run has no checkpoint of step {step}")
    fn = bridge.export(module)
    return fn.params, fn.buffers


@contextlib.contextmanager
def listening(app, limits=LIMITS):
    """The port of an application behind a real server."""
    server = server_of(app, limits, port=0, lifespan="off")
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        asyncio.run(until(lambda: server.started))
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)
