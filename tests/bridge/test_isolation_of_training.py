"""Training in PyTorch is the same before, between and after bridged calls, and in other threads."""

import queue
import threading

import jax
import jax.numpy as jnp
import numpy as np
import torch
from rows import ROWS
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import bridge


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 2))

    def forward(self, x):
        with torch.no_grad():
            x = x + torch.rand_like(x)
        return self.layers(x)


def training(steps, between=lambda: None):
    """Plain PyTorch, with the global generator; returns all it ends with."""
    torch.manual_seed(3)
    module = Classifier()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    between()
    for _ in range(steps):
        module(torch.randn(8, 4)).square().mean().backward()
        between()
        optimizer.step()
        between()
        optimizer.zero_grad()
        with torch.no_grad():
            module.layers[0].weight.mul_(0.999)
    return torch.cat([t.detach().double().reshape(-1) for t in module.state_dict().values()])


def bridged(module=None):
    """One traced call with gradients of a module that uses every mode, draws and writes."""
    module = Classifier() if module is None else module
    fn, x = bridge.export(module), jnp.ones((8, 4))
    jax.make_jaxpr(jax.grad(lambda p: fn(p, fn.buffers, x, rng=jax.random.key(0), train=True)[0].sum()))(fn.params)


def test_work_before_between_and_after_calls_is_the_same():
    alone, module = training(4), Classifier()
    assert torch.equal(training(4, between=lambda: bridged(module)), alone)
    assert torch.equal(training(4), alone)


def test_a_second_thread_is_not_disturbed():
    """It trains in PyTorch, with the global generator, until this one has traced call after call."""
    alone, module, trainings, done = training(10), Classifier(), [], threading.Event()

    def work():
        while not trainings or not done.is_set():
            modes = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), type(torch.ones(2) + 1)
            trainings.append((training(10), modes))

    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(5):
        bridged(module)
    done.set()
    thread.join()
    for end, modes in trainings:
        assert torch.equal(end, alone) and modes == (True, False, torch.Tensor)


def test_calls_in_two_threads_and_pytorch_inside_a_call():
    """A thread started in the middle of a call sees plain PyTorch; two calls at once are two calls."""
    row = ROWS["NoGrad"]
    module, (args, _) = row.build(), row.example()
    expected, seen = module(*args), queue.SimpleQueue()  # a list would be emptied after the call

    class Nosy(nn.Module):
        def forward(self, x):
            with torch.no_grad(), torch.autocast("cpu"):
                thread = threading.Thread(target=look)
                thread.start()
                thread.join()
            return x + 1

    def look():
        modes = _get_current_dispatch_mode_stack()
        assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
        assert not any(isinstance(mode, TorchDispatchMode) for mode in modes)
        fn = bridge.export(module)
        seen.put((module(*args), fn(fn.params, fn.buffers, jnp.asarray(args[0].numpy()))[0]))

    out, _ = bridge.export(Nosy())({}, {}, jnp.zeros(2))
    plain, through_bridge = seen.get_nowait()
    assert torch.equal(plain, expected) and (out == 1).all()
    np.testing.assert_allclose(through_bridge, expected.detach().numpy(), atol=1e-6)
