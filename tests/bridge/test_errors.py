"""What cannot be translated is one message: the op, the submodule, the line, the remedy."""

import queue
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from eager import Call
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.flop_counter import FlopCounterMode

import bridge


class Inner(nn.Module):
    def __init__(self, action):
        super().__init__()
        self.action = action

    def forward(self, x):
        return self.action(x)  # the line that is named


class Outer(nn.Module):
    def __init__(self, action):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Identity(), Inner(action)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def said(action, x=None, **settings):
    fn = bridge.export(Outer(action))
    x = jnp.arange(4.0) if x is None else x
    with pytest.raises(bridge.BridgeError) as caught:
        jax.jit(lambda x: fn({}, {}, x, **settings))(x)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 500
    assert "in blocks.1 (Inner)" in text and "test_errors.py:" in text and "Remedy: " in text
    return text


def branch(x):
    return x if x.sum() > 0 else -x


def loop_bound(x):
    return x * int(x[0])


def test_branch_on_a_traced_value():
    assert "value of a traced tensor" in said(branch) and "torch.where" in said(branch)
    assert "`return x if x.sum() > 0 else -x`" in said(branch)
    assert ".item()" in said(loop_bound)


def test_a_function_of_pytorch_that_asks_for_a_value_is_named():
    text = said(lambda x: x * nn.init.trunc_normal_(torch.empty(3)), rng=jax.random.key(0))
    assert "inside `torch.nn.init.trunc_normal_`" in text and "torch.where" in text


def test_data_dependent_shape():
    for action in (lambda x: x[x > 1], lambda x: x.nonzero(), lambda x: x.unique()):
        assert "makes a shape that depends on data" in said(action)


def test_unsupported_op():
    text = said(lambda x: torch.special.airy_ai(x))
    assert "aten::special_airy_ai" in text and "bridge.LOWERINGS" in text
    fraction = said(lambda x: torch.addcmul(x.long(), x.long(), x.long(), value=0.5))
    assert "`aten::addcmul` has no translation" in fraction


@torch.library.custom_op("tests_bridge::sine", mutates_args=())
def sine(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


@sine.register_fake
def _(x):
    return torch.empty_like(x)


def choice(x):
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))


def flexible(x):
    return flex_attention(*[x.reshape(1, 1, 2, 2)] * 3)


def counted(x):
    with FlopCounterMode(display=False):
        return x * nn.Linear(4, 4)(x)


@pytest.mark.parametrize(
    ("action", "what", "remedy"),
    [
        (sine, "`tests_bridge::sine` has no translation", "call the Python function"),
        (choice, "`cond` takes functions", "torch.where"),
        (flexible, "`flex_attention` takes functions", "F.scaled_dot_product_attention, with a mask"),
        (counted, "`FlopCounterMode` is a TorchDispatchMode", "enter it around the module"),
    ],
)
def test_the_remedy_names_what_to_use_instead(action, what, remedy):
    text = said(action)
    assert what in text and remedy in text.partition("Remedy: ")[2]


def test_randomness_without_a_key():
    text = said(lambda x: torch.rand_like(x))
    assert "`aten::rand_like` draws random numbers" in text and "rng=jax.random.key" in text


def test_pytorch_s_own_errors_stay_pytorch_s():
    fn = bridge.export(nn.Linear(3, 3))
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        fn(fn.params, fn.buffers, jnp.ones((2, 5)))


def normalized(x):
    return next(nn.BatchNorm1d(4)(row) for row in [x[None]])


def loss(x):
    return nn.functional.nll_loss(x[None], torch.tensor([0, 1]))


@pytest.mark.parametrize("action", [normalized, loss], ids=["one example", "two labels"])
def test_errors_of_pytorch_s_python_code_name_the_submodule(action):
    with pytest.raises(ValueError) as expected:
        action(torch.ones(4))
    with pytest.raises(ValueError) as ours:
        bridge.export(Outer(action))({}, {}, jnp.ones(4))
    assert str(ours.value) == str(expected.value)
    assert any("in blocks.1 (Inner), at " in note and "test_errors.py:" in note for note in ours.value.__notes__)


def test_errors_of_the_module_s_own_code_have_no_note():
    def own(x):
        raise ValueError("mine")

    with pytest.raises(ValueError) as ours:
        bridge.export(Outer(own))({}, {}, jnp.ones(4))
    assert not hasattr(ours.value, "__notes__")


def test_branches_on_constants_are_no_error():
    class Constants(nn.Module):
        def forward(self, x):
            steps = torch.tensor([1, 2, 3])
            if (steps > 2).any() and int(steps.sum()) == 6:
                x = x + steps[-1].item()
            for width in torch.linspace(0, 1, 3).tolist():
                x = x + width
            return x

    fn = bridge.export(Constants())
    assert float(jax.jit(lambda x: fn({}, {}, x)[0])(jnp.zeros(()))) == 4.5


def test_float64_is_said_once_with_its_place():
    class Double(nn.Module):
        def forward(self, x):
            for _ in range(3):
                x = x.to(torch.float64).sum().to(torch.float32) + x
            return x

    fn = bridge.export(Double())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fn({}, {}, jnp.ones(3))
    seen = [w for w in seen if issubclass(w.category, bridge.BridgeWarning)]
    assert len(seen) == 1, [str(w.message) for w in seen]
    assert "JAX_ENABLE_X64=1" in str(seen[0].message) and "test_errors.py" in str(seen[0].message)


def test_a_tensor_that_escapes_says_so():
    kept = queue.SimpleQueue()  # a list would be emptied after the call

    class Leaky(nn.Module):
        def forward(self, x):
            kept.put(x)
            return x

    bridge.export(Leaky())({}, {}, jnp.ones(2))
    with pytest.raises(RuntimeError, match="outside the call that made it"):
        kept.get_nowait() + 1


class Guarded(nn.Module):
    """Code that takes another way where an operation fails; in PyTorch it does not fail."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        try:
            scale = 2.0 if x.mean() > 0 else 3.0
        except self.kind:
            scale = 5.0
        return x * scale


@pytest.mark.parametrize("kind", [RuntimeError, Exception])
def test_an_error_that_the_module_catches_is_raised_all_the_same(kind):
    fn = bridge.export(Guarded(kind))
    with pytest.raises(bridge.BridgeError, match="asks for the value of a traced tensor"):
        jax.jit(lambda x: fn({}, {}, x)[0])(jnp.ones(3))
    assert fn({}, {}, jnp.ones(3))[0][0] == 2.0


def test_out_of_another_size():
    """PyTorch resizes it."""
    module = Call(lambda x: torch.cat([x, x * 2], out=torch.empty(0)) + 1)
    with pytest.raises(bridge.BridgeError, match="it resizes the tensor of `out=`"):
        bridge.export(module)({}, {}, np.ones(2, np.float32))
    sized = Call(lambda x: torch.cat([x, x * 2], out=torch.empty(4)) + 1)
    np.testing.assert_array_equal(bridge.export(sized)({}, {}, np.ones(2, np.float32))[0], [2, 2, 3, 3])


def test_a_dict_with_keys_of_several_types():
    module = Call(lambda x: {0: x, "a": x * 2})
    with pytest.raises(bridge.BridgeError, match="keys of several types"):
        bridge.export(module)({}, {}, np.ones(2, np.float32))
