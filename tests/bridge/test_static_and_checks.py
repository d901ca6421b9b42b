"""`export(static=…)`: buffers that are constants; checks of values, which are not made."""

import copy
import json
import re
from typing import Any

import checked_values
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from checked_values import all_of, compared, raising, used_otherwise
from eager import Call, Calls, raises, randn, verified
from torch import nn

import bridge
from bridge.tensor import pytrees

X = randn(4, 3)


class Codebook(nn.Module):
    """A module like vector quantizers, whose first batch would initialise it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("initted", torch.tensor([True]))
        self.register_buffer("steps", torch.zeros(()))
        self.codes = nn.Parameter(torch.randn(5, 3))

    def forward(self, x):
        if not self.initted:
            self.codes.data.copy_(x[:1].expand(5, 3))
            self.initted.copy_(torch.tensor([True]))
        self.steps += 1
        return self.codes[(x[:, None] - self.codes).square().sum(-1).argmin(-1)]


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Codebook(), Codebook()])

    def forward(self, x):
        return self.layers[1](self.layers[0](x))


def remedied(text):
    """Returns the pattern that an error advises."""
    return text.partition('static=r"')[2].partition('"')[0]


def test_a_flag_in_a_buffer():
    branched = bridge.verify(Layers(), X)
    assert branched.ok and "side not compared, where this is True: in layers.0 (Codebook)" in str(branched)
    report = bridge.verify(Layers(), X, static=r"layers\.\d+\.initted")
    assert report.ok and "constant: layers.1.initted" in str(report)
    assert json.loads(report.to_json())["granted"] == list(report.granted)


def test_a_constant_is_no_buffer_and_stays_what_it_was():
    module = Layers()
    fn = bridge.export(module, static=r".*\.initted")
    assert sorted(fn.buffers) == ["layers.0.steps", "layers.1.steps"]
    module.get_buffer("layers.0.initted").fill_(False)
    _, buffers = fn(fn.params, fn.buffers, jnp.asarray(X))
    state = bridge.state_dict(fn, fn.params, buffers)
    assert state["layers.0.initted"] and state["layers.0.steps"] == 1
    module.load_state_dict(state)
    assert bridge.into(fn, state)[1].keys() == fn.buffers.keys()
    with pytest.raises(bridge.BridgeError, match=r"static +layers.0.initted has other values; export"):
        bridge.into(fn, state | {"layers.0.initted": torch.tensor([False])})


def test_numbers_of_buffers_decide_shapes():
    module = Calls(
        lambda m, x: x[m.rows > m.least] @ m.w, rows=nn.Buffer(torch.arange(4)), least=nn.Buffer(torch.tensor(1))
    )
    assert remedied(raises("makes a shape that depends on data", module, X)) in ("rows|least", "least|rows")
    verified(module, X, static="rows|least")


def test_integer_inputs_that_stay_the_same_may_be_known():
    """The edges of a graph, whose loops a layer leaves out, are such inputs."""

    def messages(x, edges):
        edges = edges[:, edges[0] != edges[1]]
        return torch.zeros_like(x).index_add_(0, edges[1], x[edges[0]]) * int(edges.max())

    module = Call(messages)
    edges = torch.tensor([[0, 1, 2, 2], [1, 1, 0, 1]])
    assert bridge.verify(module, X, edges, known_inputs="1|edges").ok
    fn = bridge.export(module)
    ours = jax.jit(lambda x: fn({}, {}, x, edges.numpy())[0])(jnp.asarray(X))
    np.testing.assert_allclose(ours, module(X, edges))
    with pytest.raises(bridge.BridgeError, match=re.escape("known_inputs is '(', which is no regular expression")):
        bridge.verify(module, X, edges, known_inputs="(")


class Batch:
    def __init__(self, x, edges, ids):
        self.x = x
        self.parts = {"edges": edges, "ids": [ids]}
        self.scale = 2


class OfBatch(Calls):
    def forward(self, batch, *, more=None, scale=None):
        if isinstance(batch, Batch):
            more = batch.parts
            batch = {"x": batch.x}
        more = batch if more is None else more
        batch["y"] = batch["x"] @ self.w  # a module may write into a dict
        return batch["y"] * (len([0] * int(more["edges"].max())) + len([0] * more["ids"][0].tolist()[-1]))


EDGES = torch.tensor([[0, 1, 2, 2], [1, 1, 0, 1]])
IDS = torch.tensor([0, 2])
PLACES = {
    "0.edges 0.ids.0": (({"x": X, "edges": EDGES, "ids": [IDS], "scale": 2},), {}),
    "more.edges more.ids.0": (({"x": X},), {"more": {"edges": EDGES, "ids": [IDS]}, "scale": torch.ones(3)}),
    "0.parts.edges 0.parts.ids.0": ((Batch(X, EDGES, IDS),), {}),
}


@pytest.mark.parametrize("names", PLACES)
def test_the_remedy_is_the_expression_that_verify_export_and_the_function_take(names):
    """Each next one has the inputs of those before."""
    module, (args, kwargs) = OfBatch(lambda: None), PLACES[names]
    known = ""
    for name in names.split():
        with pytest.raises(bridge.BridgeError) as caught:
            bridge.verify(module, *args, **kwargs, known_inputs=known)
        assert f"the input {name}, if it stays the same" in str(caught.value)
        (known,) = re.findall(r'`known_inputs=r"(.*?)"` of `bridge.export` and `bridge.verify`', str(caught.value))
    assert known == names.replace(" ", "|").replace(".", r"\.")
    assert bridge.verify(module, *args, **kwargs, known_inputs=known).ok
    fn = bridge.export(module, known_inputs=known)
    given, others = as_arrays(copy.deepcopy(args)), as_arrays(kwargs)
    ours = jax.jit(lambda p: fn(p, {}, *given, **others)[0])(fn.params)
    np.testing.assert_allclose(ours, module(*copy.deepcopy(args), **kwargs).detach(), rtol=1e-6)
    with pytest.raises(bridge.BridgeError, match=r"the input .* is traced, and known_inputs .* names it"):
        jax.jit(lambda p, given, others: fn(p, {}, *given, **others))(fn.params, given, others)
    said = rf"known_inputs .edges. matches no input; inputs here are .*{names.split()[0]}, "
    with pytest.raises(bridge.BridgeError, match=said):
        bridge.verify(module, *args, **kwargs, known_inputs="edges")


def as_arrays(tree):
    return pytrees.convert(tree, lambda v: jnp.asarray(v.numpy()) if torch.is_tensor(v) else v, objects=True)


KNOWN = {
    "a shape": lambda x, n: torch.zeros(int(n.max()), 3) + x[0],
    "a loop": lambda x, n: sum(x * i for i in range(n[0].item() + 2)),
    "a list": lambda x, n: x * [1, 2, 3][n.tolist()[0]],
    "repeated": lambda x, n: x.repeat(int(n.max()), 1),
    "a place": lambda x, n: x[n[0].item() : n[0].item() + 2],
    "rows": lambda x, n: x[n > 0].cumsum(0),
    "an operation": lambda x, n: torch.addcmul(x, x, x, value=n.max().item()),
}


@pytest.mark.parametrize("name", KNOWN)
def test_each_refusal_about_an_input_has_the_remedy(name):
    module, lengths = Call(KNOWN[name]), torch.tensor([1, 2, 2, 0])
    with pytest.raises(bridge.BridgeError) as caught:
        bridge.verify(module, X, lengths)
    (known,) = re.findall(r'`known_inputs=r"(.*?)"`', str(caught.value))
    assert bridge.verify(module, X, lengths, known_inputs=known).ok


def test_known_inputs_stay_known_where_effects_are_judged():
    """The attribute is of no later call, which a trace without the numbers could not tell."""
    fn = bridge.export(Calls(kept_length, last=None))
    jax.jit(lambda params, x: fn(params, {}, x, LENGTHS)[0])(fn.params, jnp.asarray(X))


LENGTHS = np.array([1, 2])


def kept_length(module, x, lengths):
    module.last = max(lengths.tolist())
    return x[: module.last] @ module.w


def test_a_value_of_an_input_has_no_such_remedy():
    module = Calls(lambda m, x: x @ m.w if m.least > x.sum() else x, least=nn.Buffer(torch.tensor(1)))
    assert "static=" not in raises("asks for the value", module, X)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda m: m.ready.fill_(True), "the call writes ready, which `static=` makes a constant .*Remedy: leave"),
        (lambda m: m.ready[0].copy_(m.w[0, 0] > 9), "the call writes ready"),
        (lambda m: setattr(m, "ready", torch.tensor([False])), "the call changes `ready`"),
    ],
)
def test_a_call_that_writes_a_constant_is_refused(write, message):
    module = Calls(lambda m, x: (x @ m.w if m.ready else x, write(m))[0], ready=nn.Buffer(torch.tensor([True])))
    fn = bridge.export(module, static="ready")
    with pytest.raises(bridge.BridgeError, match=message):
        jax.eval_shape(lambda p, x: fn(p, {}, x), fn.params, X.numpy())


def test_names():
    options: dict[str, Any]
    for options, message in (
        ({"static": "initted"}, "static 'initted' matches no buffer; buffers here are layers.0.initted"),
        ({"static": r".*codes"}, "matches no buffer"),
    ):
        with pytest.raises(bridge.BridgeError, match=re.escape(message)):
            bridge.export(Layers(), **options)
    whole = torch.zeros(4)
    shared = Calls(lambda m, x: x, whole=nn.Buffer(whole), part=nn.Buffer(whole[:2]))
    with pytest.raises(bridge.BridgeError, match="share memory, and static 'part' matches one of them; name both"):
        bridge.export(shared, static="part")


# ---- checks


class Checks(nn.Module):
    def __init__(self, check):
        super().__init__()
        self.inner = Call(check)
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        self.inner(x)
        return self.linear(x)


@pytest.mark.parametrize("check", [compared, all_of, raising, used_otherwise])
def test_a_check_is_not_made_and_that_is_said(check):
    with pytest.warns(
        bridge.BridgeWarning, match=r"a check of traced values is not made in inner \(Call\), at .*:\d+: "
    ):
        report = bridge.verify(Checks(check), X)
    assert report.ok
    assert all("check not made: in inner (Call), at " in each for each in report.granted) and report.granted


NO_CHECKS = {
    "a branch": lambda x: x if x.max() < 99 else -x,
    "a value that is a size": lambda x: torch.zeros(int(x.max())),
    "a value that a function gets": lambda x: x * sorted([x.max().item(), 1.0])[0],
}


@pytest.mark.parametrize("name", NO_CHECKS)
def test_anything_else_is_refused(name):
    raises("asks for the value of a traced tensor", NO_CHECKS[name], X)


CAUGHT = ["loop_that_ends", "suppressed", "another_way", "until_it_holds", "decorated"]
CAUGHT += ["another_way_that_has_no_translation"]


@pytest.mark.filterwarnings("ignore:a check of traced values is not made:bridge.BridgeWarning")
@pytest.mark.parametrize("name", CAUGHT)
def test_a_raise_that_the_code_catches_is_refused(name):
    module = Call(getattr(checked_values, name))
    fn = bridge.export(module)
    for _ in range(2):
        with pytest.raises(bridge.BridgeError, match=r"catches what it raises .*checked_values.py:.*torch\.where"):
            jax.jit(lambda x: fn({}, {}, x)[0])(jnp.asarray(X))
    with pytest.raises(bridge.BridgeError, match="catches what it raises"):
        bridge.verify(module, X)


@pytest.mark.filterwarnings("ignore:a check of traced values is not made:bridge.BridgeWarning")
@pytest.mark.parametrize("name", ["cleaned_up", "raised_as_another", "of_another_class"])
def test_a_raise_that_leaves_the_call_is_a_check_whatever_is_around_it(name):
    module = Call(getattr(checked_values, name))
    fn = bridge.export(module)
    try:  # is around the call, not in it
        out = jax.jit(lambda x: fn({}, {}, x)[0])(jnp.asarray(X))
    except Exception as error:
        raise AssertionError from error
    np.testing.assert_allclose(out, module(X))
    assert bridge.verify(module, X).granted


def test_without_tracing_nothing_is_left_out():
    fn = bridge.export(Call(checked_values.loop_that_ends))
    np.testing.assert_allclose(fn({}, {}, jnp.asarray(X))[0], checked_values.loop_that_ends(X))


# ---- PyTorch's own checks are assumed to pass, as its compiler does


def checked_by_pytorch(x):
    torch._check_tensor_all(x < 99)
    torch._assert((x < 99).all(), "too large")
    torch._assert_async((x < 99).all())
    return x * 2


def test_checks_of_pytorch():
    verified(checked_by_pytorch, X)
    with pytest.raises(RuntimeError, match="Expected cond to be True"):
        bridge.export(Call(lambda x: torch._check_tensor_all(torch.tensor([False]))))({}, {}, X.numpy())


# ---- labels of a CTC loss, which speech models select by a mask


def ctc(scores, labels):
    mask = labels >= 0
    return F.ctc_loss(scores, labels.masked_select(mask), torch.full((2,), 9), mask.sum(-1), reduction="sum")


def test_selected_labels():
    scores = randn(9, 2, 5).log_softmax(-1)
    labels = torch.tensor([[1, 3, -100, 4], [2, -100, -100, 2]])
    fn = bridge.export(Call(ctc))
    ours, slope = jax.jit(jax.value_and_grad(lambda s, y: fn({}, {}, s, y)[0]))(scores.numpy(), labels.numpy())
    leaf = scores.clone().requires_grad_()
    np.testing.assert_allclose(ours, ctc(scores, labels), rtol=1e-5)
    np.testing.assert_allclose(slope, torch.autograd.grad(ctc(leaf, labels), leaf)[0], atol=1e-5)
    raises(
        "whose lengths are mask.sum", lambda s, y: F.ctc_loss(s, y[y > 0], s[:2, 0, 0].int(), y[:, 0]), scores, labels
    )
