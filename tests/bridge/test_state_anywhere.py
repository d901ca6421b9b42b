"""State of every kind of object, wherever the user's code keeps it: refused, and as it was after the call."""

import array
import collections
import contextvars
import functools
import threading
import types
import weakref

import holding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from holding import Calls, Slotted, with_last
from torch import nn

import bridge
from bridge.held_objects import inside


class Counts(dict):
    n = 0


class Callback:
    """An object that is called, and calls others."""

    def __init__(self):
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return self.calls


class Inner(nn.Module):
    n = 0


class Helper(nn.Module):
    child: Inner

    def __init__(self):
        super().__init__()
        self.n, self.child = 0, Inner()

    def forward(self, x):
        self.n += 1
        self.child.n += 1
        return x * (self.n + self.child.n)


def add(container, key, value=1):
    container[key] += value
    return float(container[key])


def up(thing, name="n"):
    setattr(thing, name, getattr(thing, name) + 1)
    return getattr(thing, name)


def rotated(m, x):
    m.it.rotate()
    return x * m.it[0]


def popped(m, x):
    m.it[0].discard(len(m.it[0]))
    return x * len(m.it[0])


def keyed_weakly(m, x):
    m.it[type(m)] = m.it.get(type(m), 0) + 1
    return x * m.it[type(m)]


HELD = {
    "array": (lambda m, x: x * add(m.it, 0), lambda: np.zeros(2)),
    "view of an array": (lambda m, x: x * add(m.it, 1), lambda: np.zeros((3, 2))[:, 0]),
    "array of objects": (lambda m, x: x * add(m.it, 0), lambda: np.array([1, None], dtype=object)),
    "bytearray": (lambda m, x: x * add(m.it, 0), lambda: bytearray(2)),
    "array.array": (lambda m, x: x * add(m.it, 0), lambda: array.array("d", [0.0])),
    "deque": (rotated, lambda: collections.deque([1.0, 2.0, 3.0])),
    "Counter": (lambda m, x: x * add(m.it, "n"), collections.Counter),
    "defaultdict": (lambda m, x: x * add(m.it, "n"), lambda: collections.defaultdict(int)),
    "OrderedDict": (lambda m, x: x * add(m.it, "n"), lambda: collections.OrderedDict(n=0)),
    "subclass of dict": (lambda m, x: x * add(m.it, "n"), lambda: Counts(n=0)),
    "attribute of a dict": (lambda m, x: x * up(m.it), Counts),
    "set in a list": (popped, lambda: [{1, 2, 3}]),
    "slots": (lambda m, x: x * m.it.up(), Slotted),
    "callable": (lambda m, x: x * m.it(), Callback),
    "namespace": (lambda m, x: x * up(m.it), lambda: types.SimpleNamespace(n=0)),
    "keys held weakly": (keyed_weakly, weakref.WeakKeyDictionary),
    "module in a list": (lambda m, x: m.it[0](x), lambda: [Helper()]),
    "method": (lambda m, x: x * m.it(), lambda: Slotted().up),
    "arguments of a partial": (lambda m, x: x * m.it(), lambda: functools.partial(add, [0], 0)),
    "weak reference": (lambda m, x: x * m.it[0]()(), lambda: [weakref.ref(c := Callback()), c]),
    "list in a slot": (lambda m, x: x * add(m.it.last, 0), lambda: with_last(Slotted(), [0])),
}


def state(value):
    """All that is in it, by value."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, (Slotted, Callback, Counts, types.SimpleNamespace)):
        names = [n for n in dir(value) if not n.startswith("__") and not callable(getattr(value, n, len))]
        return {n: state(getattr(value, n)) for n in names}, state(dict(value) if isinstance(value, dict) else 0)
    if isinstance(value, Helper):
        return value.n, value.child.n
    if isinstance(value, (types.MethodType, functools.partial, weakref.ref)):
        return [state(v) for v in (inside(value) or {}).values()]
    return [state(v) for v in value] if isinstance(value, (list, tuple)) else repr(getattr(value, "data", value))


def differs_in_pytorch(module):
    x = torch.ones(2, 3)
    one, two = (module(x).detach().clone() for _ in range(2))
    return not torch.equal(one, two)


def refused(module, match):
    fn = bridge.export(module)
    with pytest.raises(bridge.BridgeError, match=match):
        jax.make_jaxpr(lambda p, x: fn(p, fn.buffers, x)[0])(fn.params, jnp.ones((2, 3)))


READ = "the call changes .*a later call would read it"


@pytest.mark.parametrize("name", HELD)
def test_what_a_module_holds(name):
    function, make = HELD[name]
    assert differs_in_pytorch(Calls(function, it=make()))
    module = Calls(function, it=make())
    held, before = module.it, state(make())
    refused(module, READ)
    assert module.it is held and state(held) == before


# ---- outside of the module

GLOBAL, NUMBER = collections.Counter(), 0
TABLE = np.zeros(2)
VARIABLE = contextvars.ContextVar("VARIABLE", default=0)
NAMESPACE, LOCAL = types.SimpleNamespace(n=0), threading.local()


def global_container(m, x):
    return x * add(GLOBAL, "calls")


def global_number(m, x):
    global NUMBER
    NUMBER += 1
    return x * NUMBER


def by_way_of_another(m, x):
    return global_number(m, x)


def global_array(m, x):
    return x * add(TABLE, 0)


def default_argument(m, x, log=[1]):  # noqa: B006 (which is the case)
    log.append(1)
    return x * len(log)


def keyword_default(m, x, *, log={"n": 0}):  # noqa: B006
    return x * add(log, "n")


def of_a_function(m, x):
    of_a_function.n = getattr(of_a_function, "n", 0) + 1
    return x * of_a_function.n


def in_context(m, x):
    VARIABLE.set(VARIABLE.get() + 1)
    return x * VARIABLE.get()


@torch.no_grad()
def decorated(m, x):
    return x * add(GLOBAL, "decorated")


def in_namespace(m, x):
    return x * up(NAMESPACE)


def of_this_thread(m, x):
    LOCAL.n = getattr(LOCAL, "n", 0) + 1
    return x * LOCAL.n


def name_of_another(m, x):
    holding.COUNT += 1
    return x * holding.COUNT


def enclosed():
    n, log = 0, []

    def tick(m, x):
        nonlocal n
        n += 1
        log.append(n)
        return x * (n + len(log))

    return tick


class Shared(Calls):
    n, table = 0, {}

    def __init__(self):
        super().__init__(Shared.count)

    def count(self, x):
        type(self).n += 1
        return x * self.n


class SharedTable(Shared):
    def count(self, x):
        self.table["n"] = self.table.get("n", 0) + 1
        return x * self.table["n"]

    def forward(self, x):
        return self.count(x)


class ByProperty(Shared):
    @property
    def counted(self):
        self.made = True
        return add(GLOBAL, "property")

    def forward(self, x):
        return x * self.counted


class ByText(Shared):
    def step_one(self, x):
        return x * add(GLOBAL, "by text")

    def forward(self, x):
        return getattr(self, "step_" + "one")(x)


OUTSIDE = {
    "global container": lambda: Calls(global_container),
    "global number": lambda: Calls(global_number),
    "called function": lambda: Calls(by_way_of_another),
    "global array": lambda: Calls(global_array),
    "default argument": lambda: Calls(default_argument),
    "keyword default": lambda: Calls(keyword_default),
    "function attribute": lambda: Calls(of_a_function),
    "context variable": lambda: Calls(in_context),
    "decorated": lambda: Calls(decorated),
    "closure": lambda: Calls(enclosed()),
    "partial": lambda: Calls(functools.partial(functools.partial(global_container))),
    "class attribute": Shared,
    "table of a class": SharedTable,
    "property": ByProperty,
    "method by text": ByText,
    "global namespace": lambda: Calls(in_namespace),
    "thread's own": lambda: Calls(of_this_thread),
    "another module's": lambda: Calls(name_of_another),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_the_code_reaches(name):
    module, x = OUTSIDE[name](), torch.ones(2, 3)
    one, two = (module(x).detach() for _ in range(2))
    assert not torch.equal(one, two)
    refused(module, READ)
    torch.testing.assert_close(module(x).detach() - two, two - one)  # each counts by one from call to call
