"""State outside of parameters and buffers, in 20 places of Python: `verify` flags each one, and passes a lazy table.

Most of it is found by comparison alone. PyTorch's calls advance the state, the compiled call keeps what its trace read.
"""

import collections
import contextvars
import functools
import itertools
import random
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import bridge

X = torch.linspace(-1, 2, 6).reshape(2, 3)
TOTAL = 0


def up(thing, name="calls"):
    setattr(thing, name, getattr(thing, name, 0) + 1)
    return getattr(thing, name)


def dividing(count, state=None):
    """Returns a `forward` whose result is divided by `count(module, state)`, which is another number at each call."""
    return lambda module, x: module.linear(x) / count(module, state)


def total_up(module, _):
    global TOTAL
    TOTAL += 1
    return TOTAL


def cell_of_a_closure():
    calls = 0

    def count(module, _):
        nonlocal calls
        calls += 1
        return calls

    return count


def attribute_of_a_function(module, _):
    return up(attribute_of_a_function)


def iterator_of(module, _):
    if not hasattr(module, "numbers"):
        module.numbers = iter([1.0, 2.0, 4.0, 8.0])
    return next(module.numbers)


class Slotted:
    __slots__ = ("calls",)


def entry_of_an_array(module, calls):
    calls[0] += 1
    return float(calls[0])


def draws(module, generators):
    python, numpy = generators
    return (1 + python.random()) * (1 + float(numpy.random()))


def turn(module, table):
    table.move_to_end(next(iter(table)))
    return next(iter(table.values()))


def length_of_a_file(module, file):
    file.write_text((file.read_text() if file.exists() else "") + ".")
    return len(file.read_text())


def with_a_tensor(module, x):
    kept = getattr(module, "kept", None)
    y = module.linear(x if kept is None else x + kept)
    module.kept = y.detach()
    return y


def with_tensors_in_a_list(module, x):
    history = vars(module).setdefault("history", [])
    history.append(x.detach())
    return module.linear(torch.stack(history).mean(0)) * len(history)


def with_a_function(module, x):
    module.gate = torch.sigmoid if getattr(module, "gate", torch.tanh) is torch.tanh else torch.tanh
    return module.gate(module.linear(x))


def with_a_hook(module, x):
    module.linear.register_forward_hook(lambda m, args, out: out * 0.5)
    return module.linear(x)


def with_requires_grad(module, x):
    y = module.linear(x)
    module.linear.weight.requires_grad_(False)
    return y


STATEFUL = {
    "number in a global": lambda path: dividing(total_up),
    "cell of a closure": lambda path: dividing(cell_of_a_closure()),
    "default of an argument": lambda path: dividing(lambda module, _, calls=[]: calls.append(1) or len(calls)),
    "attribute of a function": lambda path: dividing(attribute_of_a_function),
    "attribute of the class": lambda path: dividing(lambda module, _: up(type(module))),
    "number in the module": lambda path: dividing(lambda module, _: up(module)),
    "tensor in the module": lambda path: with_a_tensor,
    "tensors in a list of the module": lambda path: with_tensors_in_a_list,
    "function in the module": lambda path: with_a_function,
    "iterator in the module": lambda path: dividing(iterator_of),
    "iterator in a closure": lambda path: dividing(lambda module, numbers: next(numbers), itertools.count(1)),
    "slots": lambda path: dividing(lambda module, counter: up(counter), Slotted()),
    "array of NumPy": lambda path: dividing(entry_of_an_array, np.zeros(1)),
    "random numbers of Python or NumPy": lambda path: dividing(draws, (random.Random(0), np.random.default_rng(0))),
    "context variable": lambda path: dividing(
        lambda module, depth: depth.set(depth.get() + 1) and depth.get(), contextvars.ContextVar("depth", default=0)
    ),
    "weak dictionary": lambda path: dividing(
        lambda module, calls: calls.update({module: calls.get(module, 0) + 1}) or calls[module],
        weakref.WeakKeyDictionary(),
    ),
    "order of a dictionary": lambda path: dividing(turn, collections.OrderedDict(first=1.0, second=2.0, third=3.0)),
    "hook": lambda path: with_a_hook,
    "requires_grad": lambda path: with_requires_grad,
    "file": lambda path: dividing(length_of_a_file, path / "calls"),
}
"""A function from a folder to a `forward` with state of its own."""


def modules(forward):
    def init(module):
        nn.Module.__init__(module)
        torch.manual_seed(0)
        module.linear = nn.Linear(3, 3)

    return type("Stateful", (nn.Module,), {"__init__": init, "forward": forward})()


@pytest.mark.parametrize("name", STATEFUL)
def test_state_is_flagged(name, tmp_path):
    module = modules(STATEFUL[name](tmp_path))
    try:
        report = bridge.verify(module, X)
    except bridge.BridgeError:
        return
    assert report.count("beyond tolerance"), f"\n{report}"


def test_tables_that_are_made_when_they_are_needed_pass():
    @functools.cache
    def positions(length):
        return torch.arange(float(length))

    def forward(module, x):
        if not hasattr(module, "table"):
            module.table = torch.arange(3.0) + 1
        return module.linear(x) * module.table + positions(3)

    report = bridge.verify(modules(forward), X)
    assert report.ok and {row.step for row in report.rows} == {0, 1}, f"\n{report}"
