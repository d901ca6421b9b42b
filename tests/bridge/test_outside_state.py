"""State outside parameters and buffers: refused where a later call reads it, a warning where it is only lost."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import bridge


class Module(nn.Module):
    def __init__(self, forward, **attributes):
        super().__init__()
        self.w = nn.Parameter(torch.eye(3) * 0.5)
        for name, value in attributes.items():
            setattr(self, name, value)
        self._forward = forward

    def forward(self, x):
        return self._forward(self, x)


class Box:
    """A plain object."""

    def __init__(self):
        self.n, self.last, self.items = 0, None, []


def counted(self, x):
    self.n += 1
    return x * self.n


def recurrent(self, x):
    self.h = torch.tanh(x @ self.w + self.h)
    return self.h


def late_buffer(self, x):
    self.late = x if self.late is None else self.late + x
    return self.late


def in_list(self, x):
    self.list.append(x)
    return sum(self.list)


def in_dict(self, x):
    self.dict["n"] = self.dict.get("n", 0) + 1
    return x / self.dict["n"]


def in_object(self, x):
    self.box.n += 1
    return x - self.box.n


def first_call(self, x):
    """Not idempotent: the second call is another."""
    out = x @ self.w if self.first else x
    self.first = False
    return out


def with_late_buffer(self):
    self.register_buffer("late", None)
    return self


def table_of_a_parameter(self, x):
    if self.table is None:
        self.table = self.w.exp()
    return x @ self.table


def state_of_an_input(self, x):
    self.table = torch.tanh(x) if self.table is None else self.table
    return self.table


def table_of_a_written_buffer(self, x):
    if self.table is None:
        self.table = self.steps * 2
    self.steps += 1
    return x * self.table


def with_steps(self):
    self.register_buffer("steps", torch.ones(3))
    return self


READ = [
    (counted, {"n": 0}, "`n`"),
    (recurrent, {"h": torch.zeros(2, 3)}, "`h`"),
    (late_buffer, {}, "`late`"),
    (in_list, {"list": []}, "`list"),
    (in_dict, {"dict": {}}, "`dict.n`"),
    (in_object, {"box": Box()}, "`box.n`"),
    (first_call, {"first": True}, "`first`"),
    (table_of_a_parameter, {"table": None}, "`table`"),
    (state_of_an_input, {"table": None}, "`table`"),
    (table_of_a_written_buffer, {"table": None}, "`table`"),
]


@pytest.mark.parametrize(("forward", "attributes", "name"), READ, ids=lambda v: getattr(v, "__name__", ""))
@pytest.mark.parametrize("jit", [True, False])
def test_state_that_a_later_call_reads_is_refused(forward, attributes, name, jit):
    module = with_steps(with_late_buffer(Module(forward, **attributes)))
    fn = bridge.export(module)
    call = jax.jit(lambda p, x: fn(p, fn.buffers, x)[0]) if jit else lambda p, x: fn(p, fn.buffers, x)[0]
    with pytest.raises(bridge.BridgeError, match=f"changes {name}.*a later call would read it"):
        call(fn.params, jnp.ones((2, 3)))


def written(self, x):
    self.last = torch.tanh(x)
    return x @ self.w


def written_into_object(self, x):
    self.box.last = (x, x + 1)
    return x @ self.w


def collected(self, x):
    self.list.append(x)
    return x @ self.w


def counted_for_itself(self, x):
    self.n += 1
    return x @ self.w


def added_up(self, x):
    self.last = self.last + self.w.sum()
    return x @ self.w


def shape_noted(self, x):
    self.shape = tuple(x.shape)
    return x.reshape(-1).reshape(self.shape)


LOST = [
    (shape_noted, {}, "`shape`"),
    (written, {}, "`last`"),
    (written_into_object, {"box": Box()}, "`box.last`"),
    (collected, {"list": []}, "`list"),
    (counted_for_itself, {"n": 0}, "`n`"),
    (added_up, {"last": torch.zeros(())}, "`last`"),
]


@pytest.mark.parametrize(("forward", "attributes", "name"), LOST, ids=lambda v: getattr(v, "__name__", ""))
def test_state_that_nobody_reads_is_one_warning(forward, attributes, name):
    module = Module(forward, **attributes)
    before = {k: repr(vars(v)) if isinstance(v, Box) else repr(v) for k, v in attributes.items()}
    fn, x = bridge.export(module), jnp.ones((2, 3))
    with pytest.warns(bridge.BridgeWarning, match=name) as seen:
        out, _ = fn(fn.params, fn.buffers, x)
        fn(fn.params, fn.buffers, x)
    assert len([w for w in seen if issubclass(w.category, bridge.BridgeWarning)]) == 1
    assert {k: repr(vars(v)) if isinstance(v, Box) else repr(v) for k, v in attributes.items()} == before
    np.testing.assert_allclose(out, module(torch.ones(2, 3)).detach().numpy(), rtol=1e-6)


def cached_table(self, x):
    if self.table is None or len(self.table) < len(x):
        self.table = torch.arange(len(x)).cos()[:, None]
    return x * self.table[: len(x)]


def large_cached_table(self, x):
    if self.table is None:
        self.table = torch.ones(300, 300).tril()
    return x * self.table[: len(x), :3]


def memo(self, x):
    if len(x) not in self.dict:
        self.dict[len(x)] = torch.linspace(0, 1, len(x))[:, None]
    return x * self.dict[len(x)]


def mask_of_inputs_shape(self, x):
    if self.table is None:
        self.table = x.new_ones(3, 3).tril()
    return x @ self.table


def grown_from_a_buffer(self, x):
    """As many rotary embeddings."""
    if self.n < len(x):
        self.table, self.n = torch.outer(torch.arange(len(x)), self.steps).cos(), len(x)
    return x @ self.w * self.table[: len(x)]


def registered_when_grown(self, x):
    if self.n < len(x):
        self.register_buffer("rows", torch.outer(torch.arange(len(x)), self.steps).cos(), persistent=False)
        self.n = len(x)
    return x @ self.w * self.rows[: len(x)]


def weight_of_parameters(self, x):
    self.table = self.w / self.w.norm()
    return x @ self.table


@pytest.mark.parametrize(
    ("forward", "attributes"),
    [
        (cached_table, {"table": None}),
        (large_cached_table, {"table": None}),
        (memo, {"dict": {}}),
        (mask_of_inputs_shape, {"table": None}),
        (grown_from_a_buffer, {"n": 0}),
        (registered_when_grown, {"n": 0}),
        (weight_of_parameters, {"table": None}),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_a_value_that_the_next_call_would_write_again_is_silent(forward, attributes):
    module = with_steps(Module(forward, **attributes))
    fn = bridge.export(module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = jax.jit(lambda p, x: fn(p, fn.buffers, x)[0])(fn.params, jnp.ones((2, 3)))
    for _ in range(2):
        np.testing.assert_allclose(out, module(torch.ones(2, 3)).detach().numpy(), rtol=1e-6)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`:FutureWarning")
def test_the_weight_that_a_hook_computes_is_silent():
    module = nn.utils.spectral_norm(nn.utils.weight_norm(nn.Linear(3, 2), name="bias"))
    fn = bridge.export(module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out, _ = fn(fn.params, fn.buffers, jnp.ones((2, 3)), train=False)
    np.testing.assert_allclose(out, module.eval()(torch.ones(2, 3)).detach().numpy(), rtol=1e-5)


def test_a_plain_tensor_written_in_place_is_refused():
    def forward(self, x):
        self.plain.add_(1)
        return x * self.plain

    module = Module(forward, plain=torch.zeros(3))
    fn = bridge.export(module)
    with pytest.raises(bridge.BridgeError, match="is no parameter or buffer"):
        fn(fn.params, fn.buffers, jnp.ones((2, 3)))
    assert (module.plain == 0).all()


def test_a_written_parameter_needs_run():
    module = nn.Embedding(4, 3, max_norm=0.1)
    fn, ids = bridge.export(module), jnp.array([0, 2])
    with pytest.raises(bridge.BridgeError, match=r"writes the parameter weight.*fn\.run"):
        fn(fn.params, fn.buffers, ids)
    result = fn.run(fn.params, fn.buffers, ids)
    module(torch.tensor([0, 2]))
    np.testing.assert_allclose(result.params["weight"], module.weight.detach().numpy(), rtol=1e-6)


@functools.lru_cache
def table(n):
    return torch.arange(n).cos()


@functools.lru_cache
def large_table(n):
    return torch.arange(n * 300).reshape(n, 300).sin().sum(1)


@pytest.mark.parametrize("cached", [table, large_table])
def test_a_table_cached_while_tracing_serves_pytorch_afterwards(cached):
    cached.cache_clear()
    module = Module(lambda self, x: x * cached(3))
    fn = bridge.export(module)
    for _ in range(2):
        out = jax.jit(lambda p, x: fn(p, fn.buffers, x)[0])(fn.params, jnp.ones((2, 3)))
        np.testing.assert_allclose(out, module(torch.ones(2, 3)).numpy(), rtol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_submodule_is_refused():
    module = nn.Sequential(nn.Linear(3, 3), torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))))
    with pytest.raises(bridge.BridgeError, match="1 was compiled by TorchScript"):
        bridge.export(module)


class Cached(Module):
    @functools.cached_property
    def double(self):
        return self.w.detach() * 2

    @functools.cached_property
    def mask(self):
        return torch.ones(3).cumsum(0)


def test_a_cached_property_of_a_parameter_is_refused_and_one_of_constants_is_not():
    module, x = Cached(lambda self, x: x @ self.double), torch.ones(2, 3)
    fn = bridge.export(module)
    for _ in range(2):
        with pytest.raises(bridge.BridgeError, match=r"changes `double`.*a later call would read it"):
            fn(fn.params, {}, jnp.ones((2, 3)))
    torch.testing.assert_close(module(x), x)  # nothing of the trace is in the cache
    module = Cached(lambda self, x: x * self.mask)
    fn = bridge.export(module)
    np.testing.assert_allclose(fn(fn.params, {}, jnp.ones((2, 3)))[0], module(x))


def swaps(self, x):
    self.a, self.b = self.b, self.a
    return self.b(x)


def test_modules_that_a_call_swaps_are_refused():
    module = Module(swaps, a=nn.Linear(3, 3), b=nn.Linear(3, 3))
    a, fn = module.a, bridge.export(module)
    with pytest.raises(bridge.BridgeError, match=r"changes `a`.*a later call would read it"):
        fn(fn.params, {}, jnp.ones((2, 3)))
    assert module.a is a


def fails(self, x):
    self.list.append(x)
    self.box.last = x
    raise KeyError("here")


def test_a_call_that_fails_leaves_nothing():
    module = Module(fails, list=[], box=Box())
    fn = bridge.export(module)
    with pytest.raises(KeyError):
        fn(fn.params, {}, jnp.ones((2, 3)))
    assert module.list == [] and module.box.last is None


RUNS = []


def noting(self, x):
    RUNS.append(1)
    self.seen, self.last = tuple(x.shape), x.detach()
    return x @ self.w


def test_the_module_runs_once_at_a_trace_after_the_first():
    fn = bridge.export(Module(noting))
    with pytest.warns(bridge.BridgeWarning, match="writes `last`"):
        fn(fn.params, {}, jnp.ones((2, 3)))
    for shape in ((2, 3), (2, 3)):
        RUNS.clear()
        jax.make_jaxpr(lambda p, x: fn(p, {}, x)[0])(fn.params, jnp.ones(shape))
        assert len(RUNS) == 1
