"""Caches of keys and values, and other objects whose state is their attributes: arguments and results of a call."""

import collections
import enum
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from eager import Call, array, in_jax, verified
from support.markers import slow_unless

import bridge

transformers = pytest.importorskip("transformers", reason="transformers is in the test extra: pip install .[test]")

SIZES = {"vocab_size": 61, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
LLAMA = {"intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 32}
MODELS = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=61, n_positions=32, n_embd=32, n_layer=2, n_head=4)
    ),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **LLAMA)),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, **LLAMA, sliding_window=4)),
    "mamba": lambda: transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2, state_size=8)
    ),
}
CACHE = {"mamba": "cache_params"}
"""The name of the cache among arguments and results, where it is not `past_key_values`."""


def tokens(*shape):
    return torch.randint(1, 61, shape, generator=torch.Generator().manual_seed(3))


def model(name):
    torch.manual_seed(0)
    return MODELS[name]().eval()


def close(ours, expected):
    np.testing.assert_allclose(ours, expected.detach().numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", slow_unless("llama".__eq__, MODELS))
def test_generation_with_the_cache_that_a_call_returns(name):
    """A prompt, then three steps, each with the cache of the last."""
    module = model(name)
    ids = tokens(2, 8)
    where = CACHE.get(name, "past_key_values")
    fn = bridge.export(module)

    @jax.jit
    def step(params, ids, cache):
        return fn(params, fn.buffers, ids, use_cache=True, **cache)[0]

    theirs = {}
    ours = {}
    for part in (ids[:, :5], ids[:, 5:6], ids[:, 6:7], ids[:, 7:]):
        expected = module(part, use_cache=True, **theirs)
        out = step(fn.params, array(part), ours)
        theirs = {where: expected[where]}
        ours = {where: out[where]}
        assert type(out[where]) is type(expected[where])
        close(out.logits, expected.logits)


def test_a_cache_made_by_the_caller_is_filled_by_the_call_alone():
    """PyTorch fills it; here the filled one is a result, and the caller's stays empty."""
    module = model("llama")
    ids = tokens(2, 5)
    fn = bridge.export(module)
    cache = transformers.DynamicCache()
    out = jax.jit(lambda params: fn(params, fn.buffers, ids, past_key_values=cache)[0])(fn.params)
    assert len(cache.layers) == 0 and len(out.past_key_values.layers) == 2
    expected = module(ids, past_key_values=transformers.DynamicCache()).past_key_values
    close(out.past_key_values.layers[1].keys, expected.layers[1].keys)


def test_a_static_cache():
    """One program serves every step: the length of the cache is a tensor."""
    module = model("llama")
    ids = tokens(2, 8)
    fn = bridge.export(module)

    @jax.jit
    def step(params, ids, cache):
        return fn(params, fn.buffers, ids, past_key_values=cache)[0]

    theirs = transformers.StaticCache(module.config, max_cache_len=16)
    bridge.register(transformers.StaticCache)
    ours = jax.tree.map(jnp.asarray, transformers.StaticCache(module.config, max_cache_len=16))
    for part in (ids[:, :5], ids[:, 5:6], ids[:, 6:7], ids[:, 7:]):
        expected = module(part, past_key_values=theirs)
        out = step(fn.params, array(part), ours)
        ours = out.past_key_values
        close(out.logits, expected.logits)
    assert step._cache_size() == 2


def test_tensors_of_pytorch_in_an_argument_are_inputs():
    """The call writes the length of such a cache, and the caller's stays as it was."""
    module = model("llama")
    ids = tokens(2, 6)
    fn = bridge.export(module)
    ours, theirs = (transformers.StaticCache(module.config, max_cache_len=8) for _ in range(2))
    for part in (ids[:, :4], ids[:, 4:]):
        call = jax.jit(lambda params, given=(part, ours): fn(params, fn.buffers, given[0], past_key_values=given[1])[0])
        out = call(fn.params)
        close(out.logits, module(part, past_key_values=theirs).logits)
        assert int(ours.layers[0].cumulative_length) == int(theirs.layers[0].cumulative_length) - part.shape[1]
        ours = out.past_key_values


def test_verify_compares_what_is_in_a_cache():
    module = model("gpt2")
    report = bridge.verify(module, tokens(2, 5), tolerance=1e-4)
    assert report.ok, f"\n{report}"
    assert any("layers.0.keys" in row.name for row in report.rows), f"\n{report}"


def test_verify_of_an_encoder_and_decoder():
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 61}
    module = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0)).eval()
    verified(module, input_ids=tokens(2, 6), labels=tokens(2, 4))


# ---- other objects


class Mode(enum.Enum):
    ADD = 1


class Part:
    def __init__(self, value):
        self.value = value
        self.count = 1

    def grow(self, x):
        self.count += 1
        self.value = self.value + x


class Memory:
    """Parts in a list, one of them twice, a cycle, a mode, a setting that is no tensor."""

    def __init__(self, value):
        self.parts = [Part(value), Part(value * 2)]
        self.first = self.parts[0]
        self.owner = self
        self.mode = Mode.ADD
        self.dtype = torch.float32
        self.table = {"z": value, "a": 1}


X = torch.arange(3.0)


def grown(x, memory=None):
    memory = Memory(x) if memory is None else memory
    memory.parts[0].grow(x)
    assert memory.mode is Mode.ADD and isinstance(memory.table["a"], int)
    return memory.first.value * memory.first.count, memory


def test_objects_keep_their_settings_and_their_identities():
    fn = bridge.export(Call(grown))
    step = jax.jit(lambda x, memory: fn({}, {}, x, memory)[0])
    expected, theirs = grown(X)
    out, ours = jax.jit(lambda x: fn({}, {}, x)[0])(jnp.asarray(X))
    for _ in range(2):
        close(out, expected)
        assert ours.first is ours.parts[0] and ours.owner is ours and ours.first.count == theirs.first.count
        assert list(ours.table) == ["z", "a"]
        (out, ours), (expected, theirs) = step(jnp.asarray(X), ours), grown(X, theirs)


def test_transformations_of_an_object():
    fn = bridge.export(Call(grown))
    _, memory = fn({}, {}, jnp.ones((2, 3)))[0]
    out, rows = jax.vmap(lambda m: fn({}, {}, jnp.ones(3), m)[0])(memory)
    assert out.shape == (2, 3) and rows.first.value.shape == (2, 3)
    slope = jax.grad(lambda m: fn({}, {}, jnp.ones((2, 3)), m)[0][0].sum())(memory)
    np.testing.assert_array_equal(slope.first.value, np.full((2, 3), 3.0))


def test_an_argument_that_the_call_changes_and_does_not_return():
    memory = Memory(jnp.ones(3))
    with pytest.warns(bridge.BridgeWarning, match=r"its argument `(memory|argument 1)`"):
        in_jax(lambda x, memory: grown(x, memory)[0], jnp.ones(3), memory)
    assert memory.first.count == 1


class Named(dict):
    """Reads and copies through its own methods fail."""

    def _refuse(self, *args, **kwargs):
        raise RuntimeError("frozen")

    update = __setitem__ = __getitem__ = items = __iter__ = __len__ = _refuse


class Ordered(collections.OrderedDict):
    note = None


class Space(types.SimpleNamespace):
    pass


def made(x):
    named = Named({"y": x, "n": 2})
    ordered = Ordered(b=x, a=x * 2)
    ordered.move_to_end("b")
    ordered.note = "kept"
    return {
        "named": named,
        "ordered": ordered,
        "space": types.SimpleNamespace(y=x, n=2),
        "space of a subclass": Space(y=x, n=2),
        "deque": collections.deque([x], 2),
    }


def test_containers_of_other_classes():
    out = in_jax(made, jnp.ones(3))
    back = jax.jit(lambda tree: tree)(out)
    for each in (out, back):
        assert type(each["named"]) is Named and dict.__getitem__(each["named"], "n") == 2
        assert list(each["ordered"]) == ["a", "b"] and each["ordered"].note == "kept"
        assert each["deque"].maxlen == 2 and each["deque"][0].shape == (3,)
        for name in ("space", "space of a subclass"):
            assert each[name].n == 2 and each[name].y.shape == (3,)


def test_a_distribution():
    head = Call(lambda x: torch.distributions.Normal(x, x.exp()))
    np.testing.assert_allclose(jax.jit(lambda d: d.scale)(in_jax(head, jnp.ones(3))), np.exp(np.ones(3)), rtol=1e-6)
    verified(head, torch.ones(3))
