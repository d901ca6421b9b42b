"""Changes by a call beside parameters and buffers: refused, lost with one warning, or silent if they do no harm."""

import collections
import functools
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from eager import Calls, agrees, differentiated, in_jax, raises, refused, snapshot
from torch import nn

import bridge

X = torch.ones(2, 3)
ONES = jnp.ones((2, 3))
KEY = jax.random.key(0)
READ_LATER = "the call changes {}.*a later call would read it"


class Box:
    n = 0
    last = None


class Counts(dict):
    n = 0


class Helper(nn.Module):
    def __init__(self, *children):
        super().__init__()
        self.n = 0
        self.inner = nn.ModuleList(children)

    def forward(self, x):
        for module in self.inner:
            x = module(x)
        return x * up(self)


def up(thing, name="n"):
    setattr(thing, name, getattr(thing, name) + 1)
    return getattr(thing, name)


def put(thing, name, value):
    setattr(thing, name, value)
    return value


def add(container, key):
    container[key] = container.get(key, 0) + 1
    return float(container[key])


def once(thing, name, make):
    return getattr(thing, name) if getattr(thing, name) is not None else put(thing, name, make())


def moved_to_the_end(table, key=None):
    key = next(iter(table)) if key is None else key
    table[key] = table.pop(key)
    return table[key]


def first_call(m, x):
    out = x @ m.w if m.first else x
    m.first = False
    return out


def popped(m, x):
    m.it[0].discard(len(m.it[0]))
    return x * len(m.it[0])


def rotated(m, x):
    m.it.rotate()
    return x * m.it[0]


def swapped(m, x):
    m.a, m.b = m.b, m.a
    return m.b(x)


def hook_removed(m, x):
    y = m.act(x)
    m.handle.remove()
    return y


def hooked(m):
    m.handle = m.act.register_forward_hook(lambda layer, args, out: out * 5)
    return m


def layers_reordered(m, x):
    for module in m.layers.values():
        x = module(x)
    moved_to_the_end(m.layers, "a")
    return x


def marked(parameter=None, **attributes):
    """Returns a parameter with these attributes."""
    parameter = nn.Parameter(torch.tensor([1.5, -0.5, 2.0])) if parameter is None else parameter
    vars(parameter).update(attributes)
    return parameter


def binarized(m, x):
    """BinaryNet's layers keep the weight that the optimizer writes as an attribute of the one that they use."""
    if not hasattr(m.b, "org"):
        m.b.org = m.b.data.clone()
    m.b.data = m.b.org.sign()
    return x * m.b


def table_of_a_written_buffer(m, x):
    table = once(m, "table", lambda: m.steps * 2)
    m.steps += 1
    return x * table


def doubled_when_full(m, x):
    m.list.append(len(x))
    return x @ m.w * (2 if len(m.list) == 3 else 1)


def ready_after_two(m, x):
    y = x @ m.w * (2 if m.ready else 1)
    m.ready = m.seen
    m.seen = True
    return y


CHANGED = {
    "number": (lambda: Calls(lambda m, x: x * up(m), n=0), "`n`"),
    "recurrent": (lambda: Calls(lambda m, x: put(m, "h", torch.tanh(x @ m.w + m.h)), h=torch.zeros(2, 3)), "`h`"),
    "list": (lambda: Calls(lambda m, x: m.list.append(x) or sum(m.list), list=[]), "`list"),
    "item of a dict": (lambda: Calls(lambda m, x: x / add(m.dict, "n"), dict={}), "`dict.n`"),
    "object": (lambda: Calls(lambda m, x: x - up(m.box), box=Box()), "`box.n`"),
    "first call": (lambda: Calls(first_call, first=True), "`first`"),
    "deque": (lambda: Calls(rotated, it=collections.deque([1.0, 2.0, 3.0])), ""),
    "defaultdict": (lambda: Calls(lambda m, x: x * add(m.it, "n"), it=collections.defaultdict(int)), ""),
    "subclass of dict": (lambda: Calls(lambda m, x: x * add(m.it, "n"), it=Counts(n=0)), ""),
    "set in a list": (lambda: Calls(popped, it=[{1, 2, 3}]), ""),
    "module in a list": (lambda: Calls(lambda m, x: m.it[0](x), it=[Helper(Helper())]), ""),
    "counts by module": (lambda: Calls(lambda m, x: x * add(m.counts, m), counts={}), "`counts"),
    "counts by tensor": (lambda: Calls(lambda m, x: x * add(m.counts, (m.w, "n")), counts={}), "`counts"),
    "swapped modules": (lambda: Calls(swapped, a=nn.Linear(3, 3), b=nn.Linear(3, 3)), "`a`"),
    "hook": (lambda: hooked(Calls(hook_removed, act=nn.Identity())), "`act._forward_hooks"),
    "order of an OrderedDict": (
        lambda: Calls(lambda m, x: x * moved_to_the_end(m.lru), lru=collections.OrderedDict(a=2.0, b=3.0)),
        "order of `lru`",
    ),
    "attribute of a parameter": (lambda: Calls(lambda m, x: x * up(m.b), b=marked(n=0)), "`b.n`"),
    "attribute of a buffer": (
        lambda: Calls(lambda m, x: x * up(m.b), b=marked(nn.Buffer(torch.ones(3)), n=0)),
        "`b.n`",
    ),
    "new attribute of a parameter": (lambda: Calls(lambda m, x: x * add(vars(m.b), "n"), b=marked()), "`b.n`"),
    "in an attribute of a parameter": (lambda: Calls(lambda m, x: x * add(m.b.d, "n"), b=marked(d={})), "`b.d.n`"),
    "order of modules": (
        lambda: Calls(layers_reordered, layers=nn.ModuleDict({"a": nn.Tanh(), "b": nn.Softplus()})),
        "order of `layers",
    ),
}
"""PyTorch's second call gives something else."""
STALE = {
    "weight of BinaryNet": (lambda: Calls(binarized, b=marked()), "`b.org`"),
    "table of a parameter": (lambda: Calls(lambda m, x: x @ once(m, "table", m.w.exp), table=None), "`table`"),
    "state of an input": (lambda: Calls(lambda m, x: once(m, "table", x.tanh), table=None), "`table`"),
    "table of a written buffer": (
        lambda: Calls(table_of_a_written_buffer, table=None, steps=nn.Buffer(torch.ones(3))),
        "`table`",
    ),
    "list of three": (lambda: Calls(doubled_when_full, list=[]), "`list"),
    "two flags": (lambda: Calls(ready_after_two, seen=False, ready=False), "`seen`"),
}
"""PyTorch's second call gives the same for these inputs, or fails."""


@pytest.mark.parametrize("name", [*CHANGED, *STALE])
def test_state_that_a_later_call_reads_is_refused(name):
    make, changed = (CHANGED | STALE)[name]
    if name in CHANGED:
        module = make()
        assert not torch.equal(module(X).detach().clone(), module(X))
    refused(make, READ_LATER.format(f".*{changed}"), X)


def registers(m, x):
    if not hasattr(m, "made"):
        m.register_buffer("made", torch.zeros(3))
    m.made += x.sum(0)
    return x * m.made


def adds_a_module(m, x):
    if not hasattr(m, "more"):
        m.add_module("more", nn.Linear(3, 3).requires_grad_(False))
    return m.more(x)


def late_parameter(m, x):
    if m.g is None:
        m.g = nn.Parameter(torch.ones(x.shape[-1]))
    return x * m.g


def with_late(register, forward, name):
    module = Calls(forward)
    register(module, name, None)
    return module


def with_late_parameter():
    return with_late(nn.Module.register_parameter, late_parameter, "g")


def filled(m, x):
    return put(m, "late", x if m.late is None else m.late + x)


def ring(m, x):
    m.q[m.ptr % 4] = x.detach().mean(0)
    m.q[:, m.ptr % 3] = m.ptr
    m.ptr += 1
    return x + m.q.sum(0)


OTHERS = {
    "a buffer is filled": (
        lambda: with_late(nn.Module.register_buffer, filled, "late"),
        "changes `late`.*register the buffer in `__init__` as a tensor",
    ),
    "a buffer is registered": (lambda: Calls(registers), "`made.*register the buffer in `__init__` as a tensor"),
    "a module is added": (lambda: Calls(adds_a_module), "changes `more.*register it in `__init__`"),
    "a parameter is made": (with_late_parameter, r"changes `g` .* or call the module once before `export`"),
    "a buffer is set to None": (
        lambda: Calls(lambda m, x: (x + m.k, put(m, "k", None))[0], k=nn.Buffer(torch.ones(3))),
        "sets k to None",
    ),
    "a buffer is deleted": (
        lambda: Calls(lambda m, x: (x, delattr(m, "k"))[0], k=nn.Buffer(torch.ones(3))),
        "the call deletes k,",
    ),
    "a plain tensor is written": (
        lambda: Calls(lambda m, x: x * m.plain.add_(1), plain=torch.zeros(3)),
        "is no parameter or buffer",
    ),
    "a pointer that is a number": (
        lambda: Calls(ring, q=nn.Buffer(torch.zeros(4, 3)), ptr=0),
        READ_LATER.format("`ptr`"),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_changes_are_refused(name):
    make, message = OTHERS[name]
    refused(make, message, X, rng=KEY)


def test_remedies_of_these():
    late = with_late_parameter()
    late(X)
    assert bridge.verify(late, X).ok
    pointer = nn.Buffer(torch.zeros((), dtype=torch.int64))
    assert bridge.verify(Calls(ring, q=nn.Buffer(torch.zeros(4, 3)), ptr=pointer), X, steps=3).ok


def shape_noted(m, x):
    m.shape = tuple(x.shape)
    return x.reshape(-1).reshape(m.shape)


def prefill(m, x):
    if len(x) == 1:
        return x * m.start
    m.start = len(x)
    return x @ m.w


def table_for_another_mode(m, x):
    if m.training:
        return x * put(m, "table", torch.arange(3.0))
    return x if m.table is None else x * m.table


LOST = {
    "shape": (lambda: Calls(shape_noted), "`shape`"),
    "tensor": (lambda: Calls(lambda m, x: (put(m, "last", torch.tanh(x)), x @ m.w)[1]), "`last`"),
    "in an object": (lambda: Calls(lambda m, x: (put(m.box, "last", (x, x)), x @ m.w)[1], box=Box()), "`box.last`"),
    "in a list": (lambda: Calls(lambda m, x: m.list.append(x) or x @ m.w, list=[]), "`list"),
    "on a parameter": (lambda: Calls(lambda m, x: (put(m.b, "last", x + 1), x * m.b)[1], b=marked()), "`b.last`"),
    "in a list of a parameter": (lambda: Calls(lambda m, x: m.b.l.append(x) or x * m.b, b=marked(l=[])), "`b.l"),
    "a number for itself": (lambda: Calls(lambda m, x: (up(m), x @ m.w)[1], n=0), "`n`"),
    "order": (lambda: Calls(lambda m, x: x * moved_to_the_end(m.lru, "a"), lru={"a": 2.0, "b": 3.0}), "`lru`"),
    "read at another shape": (lambda: Calls(prefill, start=1), "writes `start`, which is lost"),
    "read in another mode": (lambda: Calls(table_for_another_mode, table=None), "writes `table`, which is lost"),
}


@pytest.mark.parametrize("name", LOST)
def test_state_that_nobody_reads_is_one_warning(name):
    make, message = LOST[name]
    module = make()
    fn = bridge.export(module)
    before = snapshot(module)
    with pytest.warns(bridge.BridgeWarning, match=message) as seen:
        out, _ = fn(fn.params, fn.buffers, ONES)
        fn(fn.params, fn.buffers, ONES)
    assert len([w for w in seen if issubclass(w.category, bridge.BridgeWarning)]) == 1
    assert snapshot(module) == before
    np.testing.assert_allclose(out, module(X).detach().numpy(), rtol=1e-6)


def cached_table(m, x):
    if m.table is None or len(m.table) < len(x):
        m.table = torch.arange(len(x)).cos()[:, None]
    return x * m.table[: len(x)]


def memo(m, x):
    if len(x) not in m.dict:
        m.dict[len(x)] = torch.linspace(0, 1, len(x))[:, None]
    return x * m.dict[len(x)]


def grown_from_a_buffer(m, x):
    """Many rotary embeddings do this."""
    if m.n < len(x):
        m.table = torch.outer(torch.arange(len(x)), m.steps).cos()
        m.n = len(x)
    return x @ m.w * m.table[: len(x)]


def registered_when_grown(m, x):
    if m.n < len(x):
        m.register_buffer("rows", torch.outer(torch.arange(len(x)), m.steps).cos(), persistent=False)
        m.n = len(x)
    return x @ m.w * m.rows[: len(x)]


def read_as_a_whole(m, x):
    """ALiBi does this."""
    if m.bias is None:
        m.bias = -m.steps.cumsum(0)
        return x @ m.w + m.bias
    return x @ m.w + m.bias[-x.shape[1] :]


def hook_of_the_call(m, x):
    with m.act.register_forward_hook(lambda layer, args, out: out * 5):
        return m.act(x)


SILENT = {
    "table": lambda: Calls(cached_table, table=None),
    "large table": lambda: Calls(
        lambda m, x: x * once(m, "table", torch.ones(300, 300).tril)[: len(x), :3], table=None
    ),
    "memo": lambda: Calls(memo, dict={}),
    "table on a parameter": lambda: Calls(
        lambda m, x: x * once(m.b, "table", lambda: torch.arange(3.0)), b=marked(table=None)
    ),
    "mask of the input's shape": lambda: Calls(lambda m, x: x @ once(m, "table", x.new_ones(3, 3).tril), table=None),
    "grown from a buffer": lambda: Calls(grown_from_a_buffer, n=0, steps=nn.Buffer(torch.ones(3))),
    "registered when grown": lambda: Calls(registered_when_grown, n=0, steps=nn.Buffer(torch.ones(3))),
    "read as a whole": lambda: Calls(read_as_a_whole, bias=None, steps=nn.Buffer(torch.ones(3))),
    "weight of parameters": lambda: Calls(lambda m, x: x @ put(m, "table", m.w / m.w.norm())),
    "hook of the call alone": lambda: Calls(hook_of_the_call, act=nn.Identity()),
}
PARTS = {
    "middle": lambda table, position: table[1:7][position],
    "transposed": lambda table, position: table.t()[:, position],
    "flipped": lambda table, position: table.flip(0)[position],
}


def angles():
    return torch.outer(torch.arange(8.0), torch.tensor([1.0, 0.1, 0.01])).cos()


@pytest.mark.parametrize("name", [*SILENT, *PARTS])
def test_a_value_that_the_next_call_would_write_again_is_silent(name):
    """The same holds for a part of a table at a traced position."""
    make = SILENT.get(name) or (
        lambda: Calls(
            lambda m, x: PARTS[name](once(m, "table", angles), m.position.long()) * x,
            table=None,
            position=nn.Buffer(torch.tensor(3)),
        )
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agrees(make, X, calls=2)


def test_a_buffer_that_the_next_call_would_make_again_is_no_leaf_of_verify():
    module = Calls(read_as_a_whole, steps=nn.Buffer(torch.ones(3)))
    module.register_buffer("bias", None, persistent=False)
    report = bridge.verify(module, X)
    assert report.ok and {row.name for row in report.rows if row.kind == "buffer"} == {"steps"}


def test_a_table_of_parameters_is_made_again_in_each_call_in_eval_mode():
    """LeViT keeps its biases in this way; in training mode the parameters change between the calls."""

    def make(train=False):
        return Calls(memo_of_parameters, dict={}).train(train)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agrees(make, X)
    refused(functools.partial(make, train=True), READ_LATER.format("`dict.w`"), X)
    refused(make, READ_LATER.format("`dict.w`"), X, train=True)


def memo_of_parameters(m, x):
    if "w" not in m.dict:
        m.dict["w"] = m.w.cumsum(0)
    return x @ m.dict["w"]


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`:FutureWarning")
def test_the_weight_that_a_hook_computes_is_silent():
    module = nn.utils.spectral_norm(nn.utils.weight_norm(nn.Linear(3, 2), name="bias"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = in_jax(module, X, train=False)
    np.testing.assert_allclose(out, module.eval()(X).detach().numpy(), rtol=1e-5)


def test_a_written_parameter_needs_run():
    module = nn.Embedding(4, 3, max_norm=0.1)
    fn = bridge.export(module)
    ids = jnp.array([0, 2])
    with pytest.raises(bridge.BridgeError, match=r"writes the parameter weight.*fn\.run"):
        fn(fn.params, fn.buffers, ids)
    result = fn.run(fn.params, fn.buffers, ids)
    module(torch.tensor([0, 2]))
    np.testing.assert_allclose(result.params["weight"], module.weight.detach().numpy(), rtol=1e-6)


# ---- numbers that count calls: what a later call does with them


def reversed_gradient(m, x):
    """The factor of a gradient reversal, which DANN raises with the steps, is read in the backward."""

    def backward(ctx, gradient):
        return -ctx.factor * gradient, None

    def forward(ctx, x, factor):
        ctx.factor = factor
        return x * 1

    factor = m.n / 1000
    m.n += 1
    return differentiated(forward, backward).apply(x @ m.w, factor)


def frozen_at_first(m, x):
    h = (x @ m.w).tanh()
    return (h.detach() if up(m) < 500 else h) @ m.w


def penalized(m, x):
    """StyleGAN computes a penalty in each sixteenth step."""
    h = (x @ m.w).sum()
    if up(m) % 16:
        return h
    leaf = x.detach().requires_grad_()
    return h + torch.autograd.grad((leaf @ m.w).square().sum(), leaf, create_graph=True)[0].square().sum()


def resets_codes(m, x):
    """A call with data-dependent code has no translation."""
    x = x @ m.w
    return x[x.sum(-1) > 0] if up(m) % 100 == 0 else x


def phases(m, x):
    m.phase = {"cold": "warm", "warm": "hot", "hot": "main", "main": "main"}[m.phase]
    return x @ m.w * (2 if m.phase == "main" else 1)


def counted_in_a_tensor(m, x):
    m.n = m.n + 1
    return x @ m.w * (2 if m.n > 5 else 1)


COUNTERS = {
    "threshold": (lambda: Calls(lambda m, x: x @ m.w * (10 if up(m) > 2 else 1), n=0), "`n`, and call 10 "),
    "late": (
        lambda: Calls(lambda m, x: x @ m.w * (10 if up(m) > 10**6 else 1), n=0),
        "`n`, and call 1,000,003",
    ),
    "seventh": (
        lambda: Calls(lambda m, x: x @ m.w * (1 if up(m) % 7 else 2), n=0),
        "`n`, and call 18,018,000",
    ),
    "a share": (lambda: Calls(lambda m, x: (x if put(m, "a", min(1, m.a + 0.125)) < 0.5 else -x) @ m.w, a=0.0), "`a`"),
    "in a dict": (lambda: Calls(lambda m, x: x @ m.w * (1 if add(m.dict, "n") < 5 else 2), dict={}), "`dict.n`"),
    "on a parameter": (lambda: Calls(lambda m, x: x * m.b * (1 if up(m.b) < 5 else 2), b=marked(n=0)), "`b.n`"),
    "dropout": (lambda: Calls(lambda m, x: F.dropout(x @ m.w, training=up(m) > 5), n=0), "`n`, and call 10 "),
    "phases": (lambda: Calls(phases, phase="cold"), "`phase`, and call 10 "),
    "gradient reversal": (lambda: Calls(reversed_gradient, n=0), "`n`, and call 10 "),
    "frozen at first": (lambda: Calls(frozen_at_first, n=0), "`n`, and call 1,000 "),
    "penalty": (lambda: Calls(penalized, n=0), "`n`, and call 18,018,000"),
    "without translation": (lambda: Calls(resets_codes, n=0), "`n`, and call 1,000 "),
    "in a tensor": (lambda: Calls(counted_in_a_tensor, n=torch.tensor(0)), "`n`, and call 10 "),
}


@pytest.mark.parametrize("name", COUNTERS)
def test_a_number_that_decides_what_a_later_call_does_is_refused(name):
    make, message = COUNTERS[name]
    refused(make, rf"the call changes {message}.*would do something else.*torch\.where", X, rng=KEY)
    with pytest.raises(bridge.BridgeError, match=rf"changes {message}"):
        bridge.verify(make(), X)


def tensors_in_a_ring(m, x):
    """An index that goes on beyond the list in no call of PyTorch does so in a trace of a later call."""
    m.n = (m.n + 1) % 3
    m.list[m.n] = x.detach()
    return x @ m.w


def checks_its_steps(m, x):
    assert up(m) <= 5000, "trained for too long"
    return x @ m.w


HARMLESS = {
    "ring": lambda: Calls(tensors_in_a_ring, n=0, list=[None] * 3),
    "check": lambda: Calls(checks_its_steps, n=0),
    "kept in a list": lambda: Calls(lambda m, x: (m.list.append(x.detach()), x @ m.w)[1], list=[]),
    "temperature": lambda: Calls(lambda m, x: (put(m, "t", m.t * 0.99), x @ m.w)[1], t=1.0),
    "kept for inspection": lambda: Calls(lambda m, x: (up(m), put(m, "last", (x @ m.w).softmax(-1)))[1], n=0),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_a_number_that_decides_nothing_is_lost_with_a_warning(name):
    with pytest.warns(bridge.BridgeWarning, match="which is lost"):
        assert bridge.verify(HARMLESS[name](), X).ok


def counted_in_a_buffer(m, x):
    m.steps += 1
    return x @ m.w * torch.where(m.steps > 2, 10.0, 1.0)


def test_remedies_of_counters():
    agrees(lambda: Calls(counted_in_a_buffer, steps=nn.Buffer(torch.tensor(0))), X)
    with pytest.warns(bridge.BridgeWarning, match="writes `n`, which is lost"):
        agrees(lambda: Calls(lambda m, x: x @ m.w * (10 if up(m) > 2 else 1), n=2), X)


def test_later_calls_are_traced_at_the_first_shapes_only():
    fn = bridge.export(Calls(lambda m, x: (RUNS.append(1), up(m), x @ m.w)[2], n=0))
    runs = []
    with pytest.warns(bridge.BridgeWarning, match="writes `n`"):
        for rows in (2, 3, 3):
            RUNS.clear()
            jax.eval_shape(lambda x: fn(fn.params, {}, x)[0], jnp.ones((rows, 3)))
            runs.append(len(RUNS))
    assert runs[0] - runs[1] == 5 and runs[2] == 1  # four later calls beside the first one
    fn = bridge.export(COUNTERS["threshold"][0]())
    for rows in (2, 3):  # an error is one at other shapes, too
        with pytest.raises(bridge.BridgeError, match="call 10"):
            fn(fn.params, {}, jnp.ones((rows, 3)))


@functools.lru_cache
def table(n):
    return torch.arange(n).cos()


def test_a_table_cached_while_tracing_serves_pytorch_afterwards():
    module = Calls(lambda m, x: x * table(3))
    for _ in range(2):
        np.testing.assert_allclose(in_jax(module, X, jit=True), module(X).numpy(), rtol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_submodule_is_refused():
    module = nn.Sequential(nn.Linear(3, 3), torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))))
    with pytest.raises(bridge.BridgeError, match=r"1 was compiled by TorchScript.*e3nn\..*\(jit_script_fx=False\)"):
        bridge.export(module)


class Cached(Calls):
    @functools.cached_property
    def double(self):
        return self.w.detach() * 2

    @functools.cached_property
    def mask(self):
        return torch.ones(3).cumsum(0)


def test_a_cached_property_of_a_parameter_is_refused_and_one_of_constants_is_not():
    refused(lambda: Cached(lambda m, x: x @ m.double), READ_LATER.format("`double`"), X)
    agrees(lambda: Cached(lambda m, x: x * m.mask), X)


def fails(m, x):
    m.list.append(x)
    m.box.last = x
    raise KeyError("here")


def test_a_call_that_fails_leaves_nothing():
    module = Calls(fails, list=[], box=Box())
    with pytest.raises(KeyError):
        in_jax(module, X)
    assert module.list == [] and module.box.last is None


RUNS = []


def noting(m, x):
    RUNS.append(1)
    m.seen = tuple(x.shape)
    m.last = x.detach()
    return x @ m.w


def test_the_module_runs_once_at_a_trace_after_the_first():
    fn = bridge.export(Calls(noting))
    with pytest.warns(bridge.BridgeWarning, match="writes `last`"):
        fn(fn.params, {}, ONES)
    for _ in range(2):
        RUNS.clear()
        jax.make_jaxpr(lambda p, x: fn(p, {}, x)[0])(fn.params, ONES)
        assert len(RUNS) == 1


MODES = {
    "gradient mode": (torch.is_grad_enabled, lambda: torch.set_grad_enabled(False)),
    "autocast": (lambda: torch.is_autocast_enabled("cpu"), lambda: torch.set_autocast_enabled("cpu", True)),
}


@pytest.mark.parametrize("name", MODES)
def test_a_mode_of_the_process_that_the_call_leaves(name):
    mode, leave = MODES[name]
    before = mode()
    raises(r"leaves .* changed", Calls(lambda m, x: (leave(), x * 2)[1]), X)
    assert mode() == before


def test_state_beside_draws_under_jit():
    module = Calls(lambda m, x: torch.nn.functional.dropout(x) * up(m), n=0)
    raises(READ_LATER.format("`n`"), module, X, rng=KEY, train=True)


def test_a_weak_set_beside_an_array():
    module = Calls(lambda m, x: m.layer(x), layer=nn.Linear(3, 3), array=np.ones(3))
    module.weak = weakref.WeakSet([module.layer])
    assert bridge.verify(module, X).ok


def named(m, x):
    if x.shape not in m.tables:
        m.tables[x.shape] = torch.linspace(0, 1, 3)
    m.last = torch.ones(2)
    return x + m.tables[x.shape], "a name"


def test_text_in_a_result_beside_state():
    module = Calls(named, tables={}, last=None)
    out, name = in_jax(module, X)
    assert name == "a name" and jnp.array_equal(out[0], jnp.asarray([1, 1.5, 2]))
    assert bridge.verify(module, torch.randn(2, 3)).ok
