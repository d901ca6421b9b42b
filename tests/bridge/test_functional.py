"""An exported module as a value: hashable, comparable, a static field; and arguments that no call can take."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from torch import nn

import bridge

X = np.ones((2, 3), np.float32)


def test_it_is_hashable_and_equal_to_itself_alone():
    module = nn.Linear(3, 3)
    fn, other = bridge.export(module), bridge.export(module)
    assert fn == fn and fn != other and fn in {fn} and other not in {fn: 1}


def test_jit_of_it():
    fn = bridge.export(nn.Linear(3, 3))
    compiled = jax.jit(fn, static_argnames=("train", "method"))
    out, _ = compiled(fn.params, fn.buffers, X, train=True)
    np.testing.assert_allclose(out, fn(fn.params, fn.buffers, X)[0], rtol=1e-6)


def test_a_static_argument_and_a_static_field():
    traces = 0

    @functools.partial(jax.jit, static_argnums=0)
    def call(fn, params):
        nonlocal traces
        traces += 1
        return fn(params, {}, X)[0]

    fn = bridge.export(nn.Linear(3, 3))
    for _ in range(2):
        call(fn, fn.params)
    assert traces == 1

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Model:
        params: dict
        fn: bridge.Functional = dataclasses.field(metadata={"static": True})

    model = Model(fn.params, fn)
    slopes = jax.jit(jax.grad(lambda model: model.fn(model.params, {}, X)[0].sum()))(model)
    assert slopes.fn is fn and slopes.params["bias"].tolist() == [2, 2, 2]
    assert jax.tree.leaves(fn) == [fn], "one leaf"


@pytest.mark.parametrize("rng", [0, np.int32(0), jnp.zeros(3), "key"])
def test_what_is_no_key(rng):
    fn = bridge.export(nn.Dropout())
    with pytest.raises(bridge.BridgeError, match=r"rng is a JAX key, such as jax\.random\.key\(0\)"):
        fn({}, {}, X, rng=rng, train=True)


def test_keys_of_both_kinds():
    fn = bridge.export(nn.Dropout())
    for key in (jax.random.key(0), jax.random.PRNGKey(0), np.asarray(jax.random.PRNGKey(0))):
        out, _ = jax.jit(lambda key: fn({}, {}, X, rng=key, train=True))(key)
        np.testing.assert_array_equal(out, fn({}, {}, X, rng=jax.random.key(0), train=True)[0])


def test_a_symbolic_shape():
    fn = bridge.export(nn.Linear(3, 3))
    shape = jax.export.symbolic_shape("batch, 3")
    call = jax.export.export(jax.jit(lambda x: fn(fn.params, fn.buffers, x)[0]))
    with pytest.raises(bridge.BridgeError, match=r"an input has the symbolic shape \(batch, 3\).*a number for each"):
        call(jax.ShapeDtypeStruct(shape, jnp.float32))
