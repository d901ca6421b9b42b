"""State outside of parameters and buffers, in 23 places of Python: `verify` flags each one, and passes a lazy table.

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
TOTAL, LIST = 0, [0]


def dividing(count):
    """A `forward` whose result is divided by `count(module)`, which is another number at each call."""
    return lambda module, x: module.linear(x) / count(module)


def up(thing, name="calls"):
    setattr(thing, name, getattr(thing, name, 0) + 1)
    return getattr(thing, name)


def item_up(numbers):
    numbers[0] += 1
    return numbers[0]


def total_up(module):
    global TOTAL
    TOTAL += 1
    return TOTAL


def cell_of_a_closure():
    calls = 0

    def count(module):
        nonlocal calls
        calls += 1
        return calls

    return dividing(count)


def attribute_of_a_function():
    def count(module):
        return up(count)

    return dividing(count)


def following(numbers):
    return dividing(lambda module: next(numbers))


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


def iterator_of(module):
    if not hasattr(module, "numbers"):
        module.numbers = iter([1.0, 2.0, 4.0, 8.0])
    return next(module.numbers)


class Slotted:
    __slots__ = ("calls",)


def in_slots(counter):
    counter.calls = 0
    return dividing(lambda module: up(counter))


def in_an_array(calls):
    return dividing(lambda module: float(item_up(calls)))


def in_random_numbers(python, numpy):
    return dividing(lambda module: (1 + python.random()) * (1 + float(numpy.random())))


def in_a_context(depth):
    return dividing(lambda module: depth.set(depth.get() + 1) and depth.get())


def in_a_weak_dictionary(calls):
    return dividing(lambda module: calls.update({module: calls.get(module, 0) + 1}) or calls[module])


def in_an_order(table):
    return dividing(lambda module: table.move_to_end(next(iter(table))) or next(iter(table.values())))


def with_a_hook(module, x):
    module.linear.register_forward_hook(lambda m, args, out: out * 0.5)
    return module.linear(x)


def with_requires_grad(module, x):
    y = module.linear(x)
    module.linear.weight.requires_grad_(False)
    return y


def in_a_file(calls):
    return dividing(
        lambda module: calls.write_text((calls.read_text() if calls.exists() else "") + ".") and len(calls.read_text())
    )


STATEFUL = {
    "number in a global": lambda path: dividing(total_up),
    "item of a global list": lambda path: dividing(lambda module: item_up(LIST)),
    "global by a name made at run time": lambda path: dividing(lambda m: item_up(globals()["".join(["LI", "ST"])])),
    "cell of a closure": lambda path: cell_of_a_closure(),
    "default of an argument": lambda path: dividing(lambda module, calls=[]: calls.append(1) or len(calls)),
    "attribute of a function": lambda path: attribute_of_a_function(),
    "attribute of the class": lambda path: dividing(lambda module: up(type(module))),
    "number in the module": lambda path: dividing(up),
    "tensor in the module": lambda path: with_a_tensor,
    "tensors in a list of the module": lambda path: with_tensors_in_a_list,
    "function in the module": lambda path: with_a_function,
    "iterator in the module": lambda path: dividing(iterator_of),
    "iterator in a closure": lambda path: following(itertools.count(1)),
    "generator in a closure": lambda path: following(2.0**i for i in range(99)),
    "slots": lambda path: in_slots(Slotted()),
    "array of NumPy": lambda path: in_an_array(np.zeros(1)),
    "random numbers of Python or NumPy": lambda path: in_random_numbers(random.Random(0), np.random.default_rng(0)),
    "context variable": lambda path: in_a_context(contextvars.ContextVar("depth", default=0)),
    "weak dictionary": lambda path: in_a_weak_dictionary(weakref.WeakKeyDictionary()),
    "order of a dictionary": lambda path: in_an_order(collections.OrderedDict(first=1.0, second=2.0, third=3.0)),
    "hook": lambda path: with_a_hook,
    "requires_grad": lambda path: with_requires_grad,
    "file": lambda path: in_a_file(path / "calls"),
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
