"""Serves a scripted model in a process of its own, and prints its port: `python -m support.serve_scripted`."""

import time

from support.served import listening, model_of
from train_jax.serve.app import create_app
from train_jax.serve.gate import Gate
from train_jax.serve.language import TextService
from train_jax.serve.limits import Limits

QUEUE = 24
CAPACITY = 2048

if __name__ == "__main__":
    limits = Limits(requests_per_minute=10**6, queue=QUEUE)
    model = model_of(capacity=CAPACITY, limits=limits)
    gate = Gate(limits)
    model.thread.engine.warm_up(range(1, model.thread.engine.capacity + 1))
    with listening(create_app(gate, [TextService(gate, [model])])) as port:
        print(port, flush=True)
        time.sleep(3600)
