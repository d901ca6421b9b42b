"""Containers and objects in attributes: read and copied without methods of their own, whole, and never the caller's."""

import collections
import threading

import jax
import jax.numpy as jnp
import numpy as np
import torch
from eager import Calls, array, in_jax
from torch import nn

import bridge


class Irrep(tuple):
    """A tuple like the kinds of features of equivariant networks."""

    def __len__(self):
        raise NotImplementedError


class Frozen(collections.OrderedDict):
    """A dict like the configurations of diffusion models."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.note = "kept"
        self.frozen = True

    def _refuse(self, *args, **kwargs):
        raise Exception("frozen")

    __delitem__ = setdefault = pop = update = _refuse

    def __setitem__(self, name, value):
        if getattr(self, "frozen", False):
            raise Exception("frozen")
        super().__setitem__(name, value)


class Makes(collections.OrderedDict):
    """A dict like a table of activations that makes a new one at each look-up."""

    def __getitem__(self, key):
        return super().__getitem__(key)()


class Cache:
    """A user's own cache."""

    def __init__(self, layer):
        self.layer = layer
        self.last = None
        self.lock = threading.Lock()

    def __call__(self, x):
        self.last = self.layer(x)
        return self.last


class Holds(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(2, 2)
        self.drop = nn.Dropout(0.5)
        self.kind = Irrep((1, self.lin))
        self.config = Frozen(scale=2.0, part=self.drop)
        self.acts = Makes(tanh=nn.Tanh, relu=nn.ReLU)
        self.cache = Cache(self.lin)

    def forward(self, x):
        assert self.kind[1] is self.lin is self.cache.layer and self.config["part"] is self.drop
        assert list(self.config) == ["scale", "part"] and self.config.note == "kept"
        x = self.acts["tanh"](self.kind[1](x)) * self.config["scale"] + self.cache(x)
        return self.config["part"](x) + self.cache.last


def test_a_call_and_verify():
    module = Holds()
    x = torch.randn(3, 2)
    before = dict(collections.OrderedDict.items(module.acts))
    fn = bridge.export(module)
    out, _ = jax.jit(lambda params, x: fn(params, {}, x, train=False))(fn.params, array(x))
    assert module.cache.last is None and module.cache.layer is module.lin, "the caller's hold nothing of a call"
    np.testing.assert_allclose(out, module.eval()(x).detach().numpy(), rtol=1e-5, atol=1e-6)
    assert bridge.verify(module, x, train=True).ok
    assert dict(collections.OrderedDict.items(module.acts)) == before and module.config.frozen


def test_a_copy_shares_no_tensor_and_what_python_cannot_copy():
    from bridge.module.copying import independent

    module = Holds()
    module.view = module.lin.weight.detach()[0]
    module.log = [module.lin.weight]
    module.lin.register_forward_hook(lambda layer, args, out: module.log.append(out))
    twin = independent(module)
    assert twin.log[0] is twin.lin.weight is not module.lin.weight and twin.cache.lock is module.cache.lock
    with torch.no_grad():
        twin.lin.weight.fill_(5.0)
    assert twin.view.tolist() == [5.0, 5.0] and 5.0 not in module.lin.weight
    twin.eval()(torch.ones(1, 2))
    assert len(module.log) == 1 and len(twin.log) > 1, "its hook encloses the copy"


def test_where_a_submodule_hangs_in_an_object_its_mode_is_the_calls():
    drop = nn.Dropout(0.5)
    module = Calls(lambda m, x: m.held(x), drop=drop, held=Cache(drop))
    assert in_jax(module.train(), jnp.ones(8), train=False).tolist() == [1.0] * 8
