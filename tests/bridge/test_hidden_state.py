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
STATEFUL = {}


def stateful(make):
    """Registers a function that returns the `forward` of a module, with state of its own. `tmp_path` is a folder."""
    STATEFUL[make.__name__] = make
    return make


@stateful
def number_in_a_global(tmp_path):
    def forward(module, x):
        global TOTAL
        TOTAL += 1
        return module.linear(x) / TOTAL

    return forward


@stateful
def item_of_a_global_list(tmp_path):
    def forward(module, x):
        LIST[0] += 1
        return module.linear(x) / LIST[0]

    return forward


@stateful
def global_by_a_name_made_at_run_time(tmp_path):
    def forward(module, x):
        numbers = globals()["".join(["LI", "ST"])]
        numbers[0] += 1
        return module.linear(x) / numbers[0]

    return forward


@stateful
def cell_of_a_closure(tmp_path):
    calls = 0

    def forward(module, x):
        nonlocal calls
        calls += 1
        return module.linear(x) / calls

    return forward


@stateful
def default_of_an_argument(tmp_path):
    def forward(module, x, calls=[]):  # noqa: B006
        calls.append(None)
        return module.linear(x) / len(calls)

    return forward


@stateful
def attribute_of_a_function(tmp_path):
    def forward(module, x):
        forward.calls = getattr(forward, "calls", 0) + 1
        return module.linear(x) / forward.calls

    return forward


@stateful
def attribute_of_the_class(tmp_path):
    def forward(module, x):
        cls = type(module)
        cls.calls = getattr(cls, "calls", 0) + 1
        return module.linear(x) / cls.calls

    return forward


@stateful
def number_in_the_module(tmp_path):
    def forward(module, x):
        module.calls = getattr(module, "calls", 0) + 1
        return module.linear(x) / module.calls

    return forward


@stateful
def tensor_in_the_module(tmp_path):
    def forward(module, x):
        kept = getattr(module, "kept", None)
        y = module.linear(x if kept is None else x + kept)
        module.kept = y.detach()
        return y

    return forward


@stateful
def tensors_in_a_list_of_the_module(tmp_path):
    def forward(module, x):
        history = vars(module).setdefault("history", [])
        history.append(x.detach())
        return module.linear(torch.stack(history).mean(0)) * len(history)

    return forward


@stateful
def function_in_the_module(tmp_path):
    def forward(module, x):
        module.gate = torch.sigmoid if getattr(module, "gate", torch.tanh) is torch.tanh else torch.tanh
        return module.gate(module.linear(x))

    return forward


@stateful
def iterator_in_the_module(tmp_path):
    def forward(module, x):
        if not hasattr(module, "scales"):
            module.scales = iter([1.0, 0.5, 0.25, 0.125])
        return module.linear(x) * next(module.scales)

    return forward


@stateful
def iterator_in_a_closure(tmp_path):
    scales = itertools.count(1)
    return lambda module, x: module.linear(x) / next(scales)


@stateful
def generator_in_a_closure(tmp_path):
    scales = (2.0**-i for i in range(99))
    return lambda module, x: module.linear(x) * next(scales)


@stateful
def slots(tmp_path):
    class Counter:
        __slots__ = ("calls",)

    counter = Counter()
    counter.calls = 0

    def forward(module, x):
        counter.calls += 1
        return module.linear(x) / counter.calls

    return forward


@stateful
def array_of_numpy(tmp_path):
    calls = np.zeros(1)

    def forward(module, x):
        calls[0] += 1
        return module.linear(x) / float(calls[0])

    return forward


@stateful
def random_numbers_of_python_or_numpy(tmp_path):
    python, numpy = random.Random(0), np.random.default_rng(0)
    return lambda module, x: module.linear(x) * (1 + python.random()) * (1 + float(numpy.random()))


@stateful
def context_variable(tmp_path):
    depth = contextvars.ContextVar("depth", default=0)

    def forward(module, x):
        depth.set(depth.get() + 1)
        return module.linear(x) / depth.get()

    return forward


@stateful
def weak_dictionary(tmp_path):
    calls = weakref.WeakKeyDictionary()

    def forward(module, x):
        calls[module] = calls.get(module, 0) + 1
        return module.linear(x) / calls[module]

    return forward


@stateful
def order_of_a_dictionary(tmp_path):
    scales = collections.OrderedDict(first=1.0, second=2.0, third=3.0)

    def forward(module, x):
        scales.move_to_end(next(iter(scales)))
        return module.linear(x) * next(iter(scales.values()))

    return forward


@stateful
def hook(tmp_path):
    def forward(module, x):
        module.linear.register_forward_hook(lambda m, args, out: out * 0.5)
        return module.linear(x)

    return forward


@stateful
def requires_grad(tmp_path):
    def forward(module, x):
        y = module.linear(x)
        module.linear.weight.requires_grad_(False)
        return y

    return forward


@stateful
def file(tmp_path):
    calls = tmp_path / "calls"

    def forward(module, x):
        calls.write_text(calls.read_text() + "." if calls.exists() else ".")
        return module.linear(x) / len(calls.read_text())

    return forward


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
