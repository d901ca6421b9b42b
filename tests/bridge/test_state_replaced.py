"""Buffers, parameters and modules that a call makes, replaces or grows, and NumPy arrays over their memory."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from holding import Calls
from torch import nn

import bridge
from bridge import holders


class Aliased(nn.Module):
    """Its buffer, and a NumPy array over the same memory."""

    def __init__(self, written):
        super().__init__()
        self.array = np.ones(4, np.float32)
        self.buf = nn.Buffer(torch.from_numpy(self.array[1:]))
        self.alias, self.written = {"of": self.buf.numpy()}, written

    def forward(self, x):
        if self.written:
            self.buf.add_(1)
        return x * self.buf * torch.from_numpy(self.alias["of"])


def test_an_array_over_the_memory_of_a_buffer_is_refused_where_the_buffer_is_written():
    module, x = Aliased(written=True), torch.ones(2, 3)
    one, two = (module(x).clone() for _ in range(2))
    assert not torch.equal(one * two, one * one)
    fn = bridge.export(module)
    with pytest.raises(bridge.BridgeError, match=r"`(array|alias.of)` is a NumPy array over the memory of buf"):
        fn({}, fn.buffers, x.numpy())
    assert bridge.verify(Aliased(written=False), x).ok


def test_an_array_over_the_memory_of_a_parameter_is_refused():
    module = nn.Linear(3, 3)
    vars(module)["alias"] = module.weight.detach().numpy()
    fn = bridge.export(module)
    with pytest.raises(bridge.BridgeError, match="`alias` is a NumPy array over the memory of weight"):
        fn(fn.params, {}, np.ones((2, 3), np.float32))


def test_what_a_call_registers_says_where_to_register_it():
    def fills(self, x):
        self.late = x if self.late is None else self.late + x
        return self.late

    def registers(self, x):
        if not hasattr(self, "made"):
            self.register_buffer("made", torch.zeros(3))
        self.made += x.sum(0)
        return x * self.made

    def adds_a_module(self, x):
        if not hasattr(self, "more"):
            self.add_module("more", nn.Linear(3, 3).requires_grad_(False))
        return self.more(x)

    for forward, name, remedy in (
        (fills, "late", "register the buffer in `__init__` as a tensor"),
        (registers, "made", "register the buffer in `__init__` as a tensor"),
        (adds_a_module, "more", "register it in `__init__`"),
    ):
        module = Calls(forward)
        module.register_buffer("late", None)
        fn = bridge.export(module)
        with pytest.raises(bridge.BridgeError, match=f"changes `{name}.*{remedy}"):
            fn(fn.params, fn.buffers, jnp.ones((2, 3)), rng=jax.random.key(0))
        assert "made" not in module._buffers and "more" not in module._modules and module.late is None


def test_a_parameter_that_the_call_replaces_is_handed_back():
    def forward(self, x):
        out = x @ self.w
        self.w = nn.Parameter(self.w.detach() * 2)
        return out + x @ self.w

    module, x = Calls(forward), torch.ones(2, 3)
    fn = bridge.export(module)
    params = fn.params
    for _ in range(2):
        result = fn.run(params, fn.buffers, jnp.ones((2, 3)))
        np.testing.assert_allclose(result.outputs, module(x).detach().numpy(), rtol=1e-6)
        params = result.params


def test_a_buffer_keeps_its_shape_from_call_to_call():
    class Grows(nn.Module):
        def __init__(self):
            super().__init__()
            self.cache = nn.Buffer(torch.zeros(0, 3))

        def forward(self, x):
            self.cache = torch.cat([self.cache, x])
            return self.cache.sum(0)

    fn = bridge.export(Grows())
    _, buffers = fn({}, fn.buffers, jnp.ones((2, 3)))
    with pytest.raises(bridge.BridgeError, match=r"buffer cache has shape \(2, 3\), expected \(0, 3\).*register it at"):
        fn({}, buffers, jnp.ones((2, 3)))


def test_a_ring_of_past_inputs_by_a_pointer_in_a_buffer():
    class Ring(nn.Module):
        def __init__(self, pointer):
            super().__init__()
            self.q, self.ptr = nn.Buffer(torch.zeros(4, 3)), pointer

        def forward(self, x):
            self.q[self.ptr % 4] = x.detach().mean(0)
            self.q[:, self.ptr % 3] = self.ptr
            self.ptr += 1
            return x + self.q.sum(0)

    x = torch.ones(2, 3)
    assert bridge.verify(Ring(nn.Buffer(torch.zeros((), dtype=torch.int64))), x, steps=3).ok
    fn = bridge.export(Ring(0))
    with pytest.raises(bridge.BridgeError, match="changes `ptr` and a later call would read it"):
        fn({}, fn.buffers, x.numpy())


def counts_by(key):
    def forward(self, x):
        self.counts[key(self)] = self.counts.get(key(self), 0) + 1
        return x * self.counts[key(self)]

    return forward


@pytest.mark.parametrize("key", [lambda m: m, lambda m: (m.w, "n"), lambda m: id(m.w)], ids=["module", "tensor", "id"])
def test_counts_by_the_module_or_a_tensor_are_refused(key):
    module, x = Calls(counts_by(key), counts={}), torch.ones(2, 3)
    fn = bridge.export(module)
    with pytest.raises(bridge.BridgeError, match=r"changes `counts.* a later call would read it"):
        jax.make_jaxpr(lambda p: fn(p, {}, x.numpy())[0])(fn.params)
    assert module.counts == {} and not torch.equal(module(x), module(x))


def test_of_a_large_array_a_checksum_is_compared(monkeypatch):
    monkeypatch.setattr(holders, "COPIED", 2)

    def forward(self, x):
        self.times[0] += np.timedelta64(1, "s")
        return x * int(self.times[0].astype(int))

    for change in (True, False):
        module = Calls(forward if change else lambda self, x: x * len(self.times), times=np.zeros(4, "m8[s]"))
        fn = bridge.export(module)
        if change:
            with pytest.raises(bridge.BridgeError, match="changes `times` and a later call would read it"):
                fn(fn.params, {}, jnp.ones((2, 3)))
        else:
            assert (fn(fn.params, {}, jnp.ones((2, 3)))[0] == 4).all()


# ---- tables that the next call would write again

TABLES = {}


def in_global(m, x):
    if len(x) not in TABLES:
        TABLES[len(x)] = torch.linspace(0, 1, len(x))[:, None]
    return x * TABLES[len(x)]


def in_function(m, x):
    in_function.table = getattr(in_function, "table", None)
    if in_function.table is None:
        in_function.table = torch.arange(3.0).cos()
    return x * in_function.table


def in_class(m, x):
    if not hasattr(type(m), "cosines"):
        type(m).cosines = torch.arange(3.0).cos()
    return x * type(m).cosines


def in_array(m, x):
    m.array[:] = np.arange(3)
    return x * float(m.array.sum())


def in_closure():
    table = None

    def forward(m, x):
        nonlocal table
        table = torch.ones(3, 3).tril() if table is None else table
        return x @ table

    return forward


@pytest.mark.parametrize(
    "forward", [in_global, in_function, in_class, in_array, in_closure()], ids=lambda f: f.__name__
)
def test_a_cached_table_is_silent_wherever_it_is(forward):
    module, x = Calls(forward, array=np.zeros(3)), torch.ones(2, 3)
    fn = bridge.export(module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = jax.jit(lambda p: fn(p, {}, x.numpy())[0])(fn.params)
    assert not TABLES and not hasattr(Calls, "cosines") and (module.array == 0).all()
    np.testing.assert_allclose(out, module(x), rtol=1e-6)
    TABLES.clear()
    if hasattr(Calls, "cosines"):
        del Calls.cosines


def test_what_the_code_appends_to_a_list_of_a_closure_is_gone():
    shapes = []

    def forward(m, x):
        shapes.append(tuple(x.shape))
        return x @ m.w

    module = Calls(forward)
    fn = bridge.export(module)
    for _ in range(2):
        fn(fn.params, {}, jnp.ones((2, 3)))
    assert shapes == []


class Named(nn.Module):
    """Returns text beside a tensor, and keeps a table."""

    def __init__(self):
        super().__init__()
        self.tables, self.last = {}, None

    def forward(self, x):
        if x.shape not in self.tables:
            self.tables[x.shape] = torch.linspace(0, 1, 3)
        self.last = torch.ones(2)
        return x + self.tables[x.shape], "a name"


def test_text_in_a_result_beside_state():
    fn = bridge.export(Named())
    out, name = fn({}, {}, jnp.ones((2, 3)))[0]
    assert name == "a name" and jnp.array_equal(out[0], jnp.asarray([1, 1.5, 2]))
    assert bridge.verify(Named(), torch.randn(2, 3)).ok
