"""Options of an export and of a call: names of operations, overrides, functions in place of others, wrapped methods."""

import contextlib
import dataclasses
import functools
import inspect
import re
import sys
import types
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from eager import Call, in_jax, raises, randn, verified
from support.markers import slow_unless
from torch import nn
from torch.utils.checkpoint import checkpoint

import bridge
from bridge.dispatch import replacements
from bridge.module import modes

# ---- `bridge.export(name_scopes=True)`: operations have the qualified names of the submodules that they come from


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, *, scale=1.0):
        return torch.tanh(self.linear(x)) * scale


class Net(nn.Module):
    """Calls a submodule twice, looks at the signature of its `forward`, and holds it in two places."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.first = self.layers[0]

    def forward(self, x):
        assert list(inspect.signature(self.first.forward).parameters) == ["x", "scale"]
        for layer in (*self.layers, self.first):
            x = layer(x, scale=0.5)
        return x


X = np.ones((3, 4), np.float32)


def names(**options):
    """Returns the names of the products in the gradient, as they are in the compiled program."""
    fn = bridge.export(Net(), **options)
    compiled = jax.jit(jax.grad(lambda params: fn(params, fn.buffers, X)[0].sum())).lower(fn.params).compile()
    return {name for name in re.findall(r'op_name="([^"]*)"', compiled.as_text()) if "dot_general" in name}


@pytest.mark.parametrize("recompute", ["", r"layers\.\d"])
def test_products_have_the_names_of_their_linears(recompute):
    both = names(name_scopes=True, recompute=recompute)
    for linear in ("layers.0.linear[Linear]", "layers.1.linear[Linear]"):
        assert any(name.endswith(f"{linear}/dot_general") and "transpose(" in name for name in both), both
        # The product of the forward pass may be merged with that of the recomputation.
        assert recompute or any(name.endswith(f"{linear}/dot_general") and "transpose(" not in name for name in both)
    assert all("[Net]" in name and "[Block]" in name for name in both)


def test_without_the_option_there_are_no_names_and_results_are_the_same():
    assert not any("[" in name for name in names())
    module = Net()
    with_names, without = (bridge.export(module, name_scopes=on) for on in (True, False))
    results = [fn(fn.params, fn.buffers, X)[0] for fn in (with_names, without)]
    np.testing.assert_array_equal(*results)
    assert all("forward" not in vars(m) for m in module.modules())


# ---- Numbers in attributes, given as traced inputs by name


@dataclasses.dataclass(frozen=True)
class Config:
    scale: float = 2.0
    name: str = "a"


class Inner(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.power = 2
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(x**self.power * self.config.scale)


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = Config()
        self.inner = Inner(self.config)

    def forward(self, x):
        return self.inner(x) + self.config.scale


NUMBERS = jnp.arange(1.0, 5.0)


def test_a_new_value_compiles_nothing_and_everybody_who_shares_it_sees_it():
    fn, compiles = bridge.export(Outer().eval()), 0

    @jax.jit
    def call(scale, power):
        nonlocal compiles
        compiles += 1
        return fn({}, {}, NUMBERS, overrides={"config.scale": scale, "inner.power": power})[0]

    for scale, power in ((2.0, 2.0), (3.0, 1.0)):
        np.testing.assert_allclose(call(scale, power), NUMBERS**power * scale + scale, rtol=1e-6)
    assert compiles == 1
    assert fn.module.config.scale == 2.0 and fn.module.inner.config is fn.module.config
    np.testing.assert_allclose(fn({}, {}, NUMBERS)[0], NUMBERS**2 * 2 + 2)


def test_it_has_a_gradient():
    fn = bridge.export(Outer().eval())
    slope = jax.grad(lambda s: fn({}, {}, NUMBERS, overrides={"config.scale": s})[0].sum())(2.0)
    np.testing.assert_allclose(slope, (NUMBERS**2 + 1).sum())


def test_a_dropout_rate():
    fn = bridge.export(nn.Dropout(0.5).train())

    @jax.jit
    def call(p):
        return fn({}, {}, jnp.ones(20_000), rng=jax.random.key(0), overrides={"p": p})[0]

    for p in (0.0, 0.25, 1.0):
        out = call(p)
        assert abs(float((out == 0).mean()) - p) < 0.01
        kept = out[out != 0]
        np.testing.assert_allclose(kept, 1 / (1 - p) if p < 1 else kept, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("config.scales", r"names no number: scales is not there in config \(Config\); numbers there: scale"),
        ("config.name", r"names no number: name is 'a'"),
        ("outer.x", r"names no number: outer is not there in the module \(Outer\); numbers there: none"),
    ],
)
def test_a_wrong_name_is_said(name, message):
    raises(message, Outer(), NUMBERS, overrides={name: 1.0})


# ---- Python functions that a traced call replaces by their names

BUFFER = randn(2, 5, 3, seed=1)
NEW = randn(2, 1, 3, seed=2)


def written(buffer, new, *, lengths):
    """Acts as a kernel that asks for the value of a tensor, and writes into another one."""
    first = lengths[0].item()
    buffer[:, first : first + new.shape[1]] = new
    return buffer[:, : first + new.shape[1]].sum((1, 2))


def written_anywhere(buffer, new, *, lengths):
    """Writes the same for every position, also of each row."""
    places = lengths[:, None] + torch.arange(new.shape[1])
    buffer[torch.arange(len(buffer))[:, None], places] = new
    filled = torch.arange(buffer.shape[1]) < places[:, -1:] + 1
    return torch.where(filled[..., None], buffer, 0).sum((1, 2))


kernels = types.SimpleNamespace(written=written)
NAME = f"{__name__}:kernels.written"


def use(buffer, new, lengths):
    buffer = buffer * 2
    return kernels.written(buffer, new, lengths=lengths), buffer


LAST = torch.full((2,), 4)


def used(**options):
    return bridge.export(Call(use), **options)({}, {}, BUFFER, NEW, LAST)[0]


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(replacements, "_REPLACEMENTS", {})
    monkeypatch.setattr(kernels, "written", written)
    bridge.register_function(NAME, written_anywhere)


def test_a_registered_function_is_pytorch_s_at_every_position(registered):
    verified(use, BUFFER, NEW, LAST)
    step = jax.jit(lambda *inputs: bridge.export(Call(use))({}, {}, *inputs)[0])
    for position in (0, 3):
        lengths = torch.full((2,), position)
        ours = step(jnp.asarray(BUFFER), jnp.asarray(NEW), jnp.asarray(lengths))
        for array, expected in zip(ours, use(BUFFER, NEW, lengths), strict=True):
            assert jnp.allclose(array, expected.numpy(), atol=1e-6)
    assert step._cache_size() == 1


class Kernel:
    @staticmethod
    def total(x):
        return x.sum()


class Inherits(Kernel):
    pass


def test_a_function_is_replaced_only_while_a_call_runs(registered):
    """The function is restored also after two calls at once, and if a call fails; other threads run the original."""

    def use_inside(buffer, new, lengths):
        seen = [kernels.written.__wrapped__ is written]
        used()
        seen.append(kernels.written is not written)
        with ThreadPoolExecutor(1) as pool:
            wrong = pool.submit(kernels.written, BUFFER.clone(), NEW, lengths=torch.zeros(1, 2)).exception()
        raise KeyError(*seen, "2 elements cannot be converted" in str(wrong))

    with pytest.raises(KeyError) as error:
        in_jax(use_inside, BUFFER, NEW, LAST)
    assert error.value.args == (True,) * 3 and kernels.written is written
    for name in ("Kernel.total", "Inherits.total"):
        functions = {f"{__name__}:{name}": lambda x: x.sum() * 2}
        fn = bridge.export(Call(lambda x: Inherits.total(x)), functions=functions)
        before = dict(vars(Kernel)), dict(vars(Inherits))
        assert fn({}, {}, jnp.ones(3))[0] == 6 and Inherits.total(torch.ones(3)) == 3
        assert (dict(vars(Kernel)), dict(vars(Inherits))) == before


def test_without_the_rule_the_function_cannot_be_traced(registered, monkeypatch):
    monkeypatch.setattr(modes, "replaced", lambda functions: contextlib.nullcontext())
    raises("a traced i that may be from", use, BUFFER, NEW, LAST)


def test_the_last_replacement_counts(registered):
    bridge.register_function(NAME, lambda buffer, new, *, lengths: buffer.sum())
    assert used()[0] == pytest.approx(2 * BUFFER.sum().item(), rel=1e-5)


def test_a_function_of_one_export(registered):
    """The function of an export precedes a registered one, and other modules do not have it."""

    def total(buffer, new, *, lengths):
        return buffer.sum() + lengths.sum()

    for _ in range(2):
        assert used(functions={NAME: total})[0] == pytest.approx(2 * BUFFER.sum().item() + 8, 1e-5)
        assert jnp.allclose(used()[0], use(BUFFER, NEW, LAST)[0].numpy(), atol=1e-6)
    with pytest.raises(ValueError, match="names no function"):
        used(functions={"written": total})
    with pytest.raises(bridge.BridgeError, match=r"kernels\.other is not there"):
        used(functions={f"{__name__}:kernels.other": total})


def test_names(registered):
    for wrong in ("package.module.function", "module:", ":function", "a b:c", "module:a..b"):
        with pytest.raises(ValueError, match=r"names no function; use package\.module:function"):
            bridge.register_function(wrong, written_anywhere)
    bridge.register_function("not_imported.kernels:written", written_anywhere)
    in_jax(torch.sin, LAST)
    assert "not_imported" not in sys.modules
    bridge.register_function(f"{__name__}:kernels.other", written_anywhere)
    raises(r"kernels\.other is not there: .* has no attribute 'other'; correct", torch.sin, LAST)


# ---- Keywords of the module with the name of an option of the call


class Ported(nn.Module):
    """A port from Flax: the mode is an argument of the call."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))

    @torch.enable_grad()
    def forward(self, x, train=False, steps=1, rng=None):
        return x * self.w * (2 if train else 1) * steps * (3 if self.training else 1)


@pytest.mark.parametrize("train", [True, False])
def test_a_keyword_of_the_module_with_the_name_of_an_option(train):
    fn = bridge.export(Ported().eval())
    x = jnp.ones(3)
    said = r"`train` is an option here and an argument of Ported.forward;.*module_kwargs=\{'train': …\}"
    for call in (fn, fn.run):
        with pytest.raises(bridge.BridgeError, match=said):
            call(fn.params, {}, x, train=train)
        out = call(fn.params, {}, x, train=True, module_kwargs={"train": train, "steps": 5})[0]
        np.testing.assert_array_equal(out, 15 * (2 if train else 1) * np.ones(3))
    with pytest.raises(bridge.BridgeError, match=said):
        bridge.verify(Ported(), torch.ones(3), train=train)
    with pytest.raises(bridge.BridgeError, match=said):
        fn.survey(x, train=train)
    fn.survey(x, module_kwargs={"train": train})
    np.testing.assert_array_equal(fn(fn.params, {}, x, rng=jax.random.key(0), module_kwargs={})[0], np.ones(3))


def test_verify_compares_the_call_with_its_own_keywords():
    with pytest.raises(bridge.BridgeError, match=r"`steps` is an option here.*module_kwargs=\{'steps': …\}"):
        bridge.verify(Ported(), torch.ones(3), steps=3)
    report = bridge.verify(Ported(), torch.ones(3), steps=1, module_kwargs={"steps": 4, "train": True})
    assert report.ok and max(row.scale for row in report.rows if row.kind == "output") == 24
    assert {row.step for row in report.rows} == {0}


# ---- Modules that keep a wrapper of PyTorch's around a method: `train=` and `overrides=` reach what it wraps


class Wrapping(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.5, -2.0]))
        self.scale = 1.0
        self.register_buffer("calls", torch.zeros(2))
        self.step = wrap(self.core)

    def core(self, x):
        if self.training:
            self.calls = self.calls + 1
        return x * self.w * self.scale * (2 if self.training else 1)

    def forward(self, x):
        return self.step(x)


WRAPPERS = {
    "enable_grad": torch.enable_grad(),
    "compiler.disable": torch.compiler.disable,
    "checkpoint": lambda f: functools.partial(checkpoint, f, use_reentrant=False),
    "wraps": lambda f: functools.wraps(f)(lambda x: f(x)),
    "twice": lambda f: torch.enable_grad()(torch.autocast("cpu", enabled=False)(f)),
    "compile": lambda f: torch.compile(f, backend="eager"),
}
PAIR = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


@pytest.mark.parametrize("name", slow_unless("compile".__ne__, WRAPPERS))
@pytest.mark.parametrize(("exported", "called"), [(True, False), (False, True)])
def test_the_mode_and_overrides_reach_it(name, exported, called):
    fn = bridge.export(Wrapping(WRAPPERS[name]).train(exported))

    def loss(params, scale):
        out, buffers = fn(params, fn.buffers, PAIR.numpy(), train=called, overrides={"scale": scale})
        return out.sum(), (out, buffers)

    (_, (out, buffers)), gradient = jax.value_and_grad(loss, has_aux=True)(fn.params, 3.0)
    expected = Wrapping(lambda f: f).train(called)
    expected.scale = 3.0
    result = expected(PAIR)
    result.sum().backward()
    np.testing.assert_allclose(out, result.detach().numpy())
    np.testing.assert_allclose(gradient["w"], expected.w.grad.numpy())
    np.testing.assert_array_equal(buffers["calls"], expected.calls.numpy())


@pytest.mark.slow
def test_pytorch_still_compiles_after_a_call():
    runs = []

    def backend(graph, _):
        return lambda *args: runs.append(1) or graph.forward(*args)

    module = torch.compile(nn.Linear(2, 2), backend=backend, fullgraph=True)
    out = in_jax(module, PAIR)
    assert not runs, "the bridge runs the code itself"
    np.testing.assert_allclose(out, module(PAIR).detach().numpy(), rtol=1e-6)
    assert len(runs) == 1
    assert torch.compile(nn.Linear(2, 2), backend=backend, fullgraph=True)(torch.ones(3, 2)).shape == (3, 2)


# ---- `train=` where a module has a `train` of its own

BATCH = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))


class FrozenStatistics(nn.Module):
    """The usual way to keep a backbone's batch norm as it is while the rest trains."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        # Biases before a batch norm are left out: their gradient is zero, and only rounding would be left of it.
        self.norm = nn.BatchNorm1d(4, affine=False)
        self.linear = nn.Linear(4, 4, bias=False)
        self.other = nn.BatchNorm1d(4)

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x):
        return self.other(self.linear(self.norm(x)))


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("build", [FrozenStatistics, lambda: nn.Sequential(FrozenStatistics(), nn.Tanh())])
def test_an_overridden_train_is_called(build, train):
    module = build()
    verified(module, BATCH, train=train, steps=2)
    assert all(m.training for m in module.modules())


class Merging(nn.Module):
    """LoRA as first published: evaluation merges the update into the weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.w, self.a, self.b = (nn.Parameter(torch.randn(4, 4)) for _ in range(3))
        self.merged = False

    def train(self, mode=True):
        super().train(mode)
        if mode == self.merged:
            self.w.data += (self.a @ self.b) * (-1 if mode else 1)
            self.merged = not mode
        return self

    def forward(self, x):
        return x @ self.w + (0 if self.merged else x @ self.a @ self.b)


def test_a_train_that_writes_weights_is_refused():
    """The attribute that says so would die with the call, while the merged weight comes back."""
    fn = bridge.export(Merging())
    fn(fn.params, fn.buffers, BATCH.numpy(), train=True)
    with pytest.raises(bridge.BridgeError, match=r"train\(False\) writes w.*call module.train\(False\) before export"):
        fn(fn.params, fn.buffers, BATCH.numpy(), train=False)
