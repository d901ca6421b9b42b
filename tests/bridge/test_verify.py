"""`bridge.verify`: the leaves that it compares, tolerances, calls, and the report."""

import copy
import dataclasses
import json
import threading
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from eager import Call, Calls, verified
from torch import nn
from torch.nn.utils import prune, weight_norm

import bridge
from bridge.tensor.tensor import BridgeTensor

X = torch.linspace(-1, 2, 12).reshape(4, 3)


class Applied(nn.Module):
    """A function of the input and one weight."""

    def __init__(self, function, weight=None):
        super().__init__()
        self.function = function
        self.w = nn.Parameter(torch.linspace(0.5, 1.5, 3) if weight is None else weight)

    def forward(self, x):
        return self.function(x, self.w)


def rows(report, kind):
    return {row.name: row for row in report.rows if row.kind == kind}


def traced(x):
    """A fault that is planted: the module sees by which side it is called."""
    return isinstance(x, BridgeTensor)


def test_gradients_of_inputs_by_their_names():
    module = Applied(lambda inputs, w: inputs["x"] * w + inputs["parts"][1])
    inputs = {"x": X, "parts": [torch.arange(3), X.double()]}
    report = bridge.verify(module, inputs, tolerance=1e-5)
    assert report.ok and set(rows(report, "input gradient")) == {"0.x", "0.parts.1"}
    report = bridge.verify(module, inputs, input_gradients=False)
    assert report.ok and not rows(report, "input gradient")


def test_inputs_may_be_written_and_stay_as_they_were():
    x = X.clone()
    verified(Applied(lambda x, w: x.mul_(w) + x), x)
    assert torch.equal(x, X)


def test_complex_numbers_with_both_parts():
    weight = torch.complex(torch.linspace(0.5, 1.5, 3), torch.linspace(-1, 1, 3))
    report = bridge.verify(Applied(lambda x, w: x * w.exp(), weight), torch.complex(X, 2 * X), tolerance=1e-5)
    assert report.ok, f"\n{report}"
    assert len(report.rows) == 6 and all(row.scale > 0.1 for row in report.rows)


class Lora(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(3, 3)
        self.a = nn.Linear(3, 2, bias=False)
        self.b = nn.Linear(2, 3, bias=False)
        self.unused = nn.Parameter(torch.ones(2))
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        x = x.to(self.base.weight.dtype)
        return self.base(x) + self.b(self.a(x))


def test_what_is_zero_on_both_sides_is_compared_at_perturbed_parameters():
    report = bridge.verify(Lora(), X)
    assert report.ok, report
    (row,) = [row for row in report.rows if row.note == "at parameters with noise of 0.1"]
    assert row.name == "a.weight" and row.scale > 1e-3
    unused = rows(report, "gradient")["unused"]
    assert unused.verdict == "equal" and unused.note == "no gradient in PyTorch"
    report = bridge.verify(Lora(), X, jitter=0.1)
    assert report.ok and not any("noise" in row.note for row in report.rows)


def test_what_is_zero_at_perturbed_parameters_too_is_zero():
    report = bridge.verify(Applied(lambda x, w: torch.round(w) + x), X)
    (row,) = [row for row in report.rows if row.note]
    assert report.ok and (row.name, row.note) == ("w", "zero at perturbed parameters, too")


def test_what_is_zero_is_unproved_where_perturbed_parameters_cannot_be_run():
    def gated(m, x):
        return x + x.detach() @ m.w * m.gate + torch.linalg.cholesky(m.scale)[0, :3]

    scale = nn.Parameter(torch.ones(9, 9) + 1e-5 * torch.eye(9))
    report = bridge.verify(Calls(gated, scale=scale, gate=nn.Parameter(torch.zeros(()))), X)
    assert not report.ok and report.count("beyond tolerance") == 0
    assert [(r.kind, r.name) for r in report.rows if r.verdict == "unproved"] == 2 * [("gradient", "w")]
    assert report.worst.verdict == "unproved" and "0 beyond tolerance, 2 unproved" in str(report)
    assert "a side fails at perturbed parameters" in str(report)


def test_the_table_has_twenty_equal_leaves():
    report = bridge.verify(nn.Sequential(*(nn.Linear(3, 3) for _ in range(8))), X, input_gradients=False)
    lines = str(report).splitlines()
    rows = report.rows
    assert report.ok and len(rows) > 20 and lines[22:] == [f"… {len(rows) - 20} more, equal", report.summary]
    worse = dataclasses.replace(report, rows=(dataclasses.replace(rows[0], error=1.0), *rows[1:]))
    assert "1 beyond tolerance" in str(worse) and len(str(worse).splitlines()) == len(lines) + 1


def test_jitter_is_the_same_for_the_module_in_float64():
    double = Lora().double()
    module = Lora()
    double.load_state_dict(module.state_dict())
    report = bridge.verify(module, X, jitter=0.1, double=double, input_gradients=False)
    assert report.ok and all(row.tolerance == 1e-4 for row in report.rows)
    assert not module.b.weight.any(), "the module itself is not changed"


def test_one_step_in_which_a_leaf_speaks_proves_it():
    def late(m, x):
        out = x @ m.w * m.gate
        m.gate = m.gate + 1
        return out

    report = bridge.verify(Calls(late, gate=nn.Buffer(torch.zeros(()))), X)
    assert report.ok and not any("noise" in row.note for row in report.rows)


def test_a_buffer_that_holds_a_graph_goes_on_without_it():
    def hidden(m, x):
        m.h.copy_(torch.tanh(x + m.h.clone() @ m.w))
        return m.h * 2

    verified(Calls(hidden, h=nn.Buffer(torch.zeros(4, 3))), X, steps=3, tolerance=1e-5)


def test_a_buffer_that_views_another_one_goes_on_as_its_view():
    def added(m, x):
        m.whole += x @ m.w
        return m.row * x, m.twin * x

    module = Calls(added)
    whole = torch.zeros(4, 3)
    for name, buffer in {"row": whole[1], "whole": whole, "twin": whole}.items():
        module.register_buffer(name, buffer)
    verified(module, X, steps=3)


def test_nothing_compared_is_not_ok():
    report = bridge.verify(Call(lambda x: None), torch.arange(3))
    assert not report.ok and "nothing compared" in str(report) and not json.loads(report.to_json())["ok"]


def test_modules_with_a_weight_that_is_a_result():
    """Pruned, and with a `weight_norm` that has been called before."""
    pruned = nn.Linear(3, 4)
    normed = nn.Linear(3, 4)
    prune.l1_unstructured(pruned, "weight", amount=0.5)
    with pytest.warns(FutureWarning):
        weight_norm(normed)
    normed(X)
    for module in (pruned, normed):
        verified(nn.Sequential(module, nn.Tanh()), X, tolerance=1e-5)


def test_dtypes_are_compared_as_they_are_stored():
    verified(Applied(lambda x, w: (x.double() * w, x.argmax(-1), x > 0, x.bfloat16())), X)


def test_integers_are_equal_or_not():
    report = bridge.verify(Call(lambda x: x + traced(x) * (x > 0)), torch.tensor([0, 100_000_000]))
    assert not report.ok and report.worst.error == 1


def test_the_order_of_a_dict_is_the_users_in_pytorch():
    """JAX's transformations sort the keys of a dict: a module that goes through them in turn is seen to be another."""
    module = Applied(lambda inputs, w: torch.cat(list(inputs.values())) * w)
    assert not bridge.verify(module, {"b": X, "a": 2 * X}).ok
    verified(module, {"a": X, "b": 2 * X})


def fails_in_jax(x):
    if traced(x):
        raise ZeroDivisionError("of its own")
    return x


FAILS = {
    "in PyTorch": (nn.Linear(5, 3), {}, r"PyTorch itself fails, in step 0: RuntimeError: .*input_gradients=False"),
    "in JAX": (Call(fails_in_jax), {}, r"where PyTorch does not, in step 0: ZeroDivisionError: of its own"),
    "lazy": (nn.LazyLinear(3), {}, "is not initialized"),
    "meta": (nn.Linear(3, 3, device="meta"), {}, "is on the meta device"),
    "advance": (nn.Linear(3, 3), {"advance": lambda out, *_: out.no_such_field}, "`advance` fails, after step 0"),
}


@pytest.mark.parametrize(("module", "settings", "message"), FAILS.values(), ids=FAILS)
def test_a_module_that_fails_is_named_by_its_side(module, settings, message):
    with pytest.raises(bridge.BridgeError, match=message):
        bridge.verify(module, X, **settings)


def test_a_module_with_something_that_python_cannot_copy():
    module = nn.Linear(3, 3)
    module.lock = threading.Lock()
    verified(module, X)


def test_json_holds_no_infinity():
    report = bridge.verify(Applied(lambda x, w: x * w if traced(x) else (x * w)[:2]), X)
    report = json.loads(report.to_json())
    first = report["rows"][0]
    assert first["error"] is None and first["verdict"] == "beyond tolerance"
    assert first["note"] == "shape (4, 3), PyTorch has (2, 3)"
    assert set(report["environment"]["versions"]) == {"torch", "jax", "torchax"}


def test_a_buffer_that_the_call_registers_is_named():
    def late(m, x):
        m.register_buffer("seen", torch.zeros(3))
        return x @ m.w + m.seen

    report = bridge.verify(Calls(late), X)
    assert not report.ok
    assert "buffer seen (missing in JAX; one that the call registers belongs into __init__)" in str(report)


class Hooked(nn.Module):
    """Hooks that enclose the module: `copy.deepcopy` shares functions with what it copies."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.calls = nn.Buffer(torch.zeros(()))
        self.features = {}
        self.body[0].register_forward_hook(lambda m, i, o: self.features.__setitem__("h", o))
        self.body.register_forward_pre_hook(lambda m, inputs: (inputs[0] * self.gain,))
        self.body.register_forward_hook(lambda m, i, o: (self.calls.add_(1), None)[1])

    def forward(self, x):
        y = self.body(x)
        return y, self.features.pop("h").square().mean()


def test_hooks_that_enclose_the_module():
    module = Hooked()
    report = bridge.verify(module, torch.ones(2, 3), steps=2)
    gains = [row for row in report.rows if (row.kind, row.name) == ("gradient", "gain")]
    assert report.ok and len(gains) == 2 and not any(row.zero for row in gains), report
    assert module.features == {} and module.gain.grad is None and module.calls == 0


def test_a_module_in_float64_gets_its_inputs_in_float64():
    module = nn.Linear(3, 2)
    verified(module, X, double=copy.deepcopy(module).double())


def test_attributes_of_parameters_and_memory_that_they_share_are_copied():
    def scaled(m, x):
        m.kept[0] += 1
        return x @ m.w * m.w.scale + m.table.weight[0]

    table = nn.Embedding(2, 3).requires_grad_(False)
    module = Calls(scaled, table=table, kept=table.weight.data)
    module.w.scale = 0.5
    verified(module, X, steps=2)


def test_a_result_to_which_the_backward_pass_adds():
    def forward(x, w):
        leaf = (x.detach() * 2).requires_grad_()
        leaf.square().sum().backward()
        return leaf.grad, leaf.grad * 1, leaf * w

    verified(Applied(forward), X, input_gradients=False)


# ---- For leaves beyond the tolerance, PyTorch's own distance from float64 decides, and hides no fault


def test_rounding_of_a_gradient_that_is_zero():
    """PyTorch's own float64, which runs if a leaf is beyond the tolerance, decides."""
    torch.manual_seed(0)
    summed = Applied(lambda x, _: torch.zeros(16, 8).index_add_(0, torch.arange(16), x))  # in float64 where x is
    module = nn.Sequential(nn.Linear(4, 8), summed, nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
    report = bridge.verify(module, torch.randn(16, 4), train=True, tolerance=1e-9)
    row = rows(report, "gradient")["0.bias"]
    assert row.verdict == "equal" and row.note == "zero in float64" and row.tolerance < 0.01, f"\n{report}"


def test_rounding_of_long_sums():
    x = torch.randn(50_000, 8, generator=torch.Generator().manual_seed(0))
    x += 2e-4 - x.double().mean(0).float()
    report = bridge.verify(Applied(lambda x, w: (x * w).sum(0), torch.ones(8)), x, tolerance=1e-6)
    assert report.ok and any("float64 differs from PyTorch's own" in row.note for row in report.rows), f"\n{report}"


def rounding_only(x, w):
    return x * w * (1 + 1e-3 * traced(x))


def of_another_type(x, w):
    """Computes something else in float64, and in the bridge the same."""
    return x * w * (2 if traced(x) or x.dtype == torch.float64 else 1)


def with_state(x, w, calls=[0]):  # noqa: B006
    """Computes something else in each call, in float64 by less than any rounding is."""
    calls[0] += 1
    return x * w * (1 + 1e-3 * calls[0])


EYE = torch.eye(3)


def in_float32_only(x, w):
    return F.linear(x * (1 + traced(x)), EYE) * w


@pytest.mark.parametrize(
    ("forward", "note"),
    [
        (rounding_only, "float64 differs from PyTorch's own by"),
        (of_another_type, "float64 differs from PyTorch's own by 1.0e+00, which counts as more than rounding"),
        (with_state, "PyTorch itself computes something else when it is called again"),
        (in_float32_only, "PyTorch fails in float64, so the leaf cannot be judged: RuntimeError: "),
    ],
)
def test_float64_hides_no_fault(forward, note):
    try:
        report = bridge.verify(Applied(forward), X, steps=1)
    except bridge.BridgeError as error:  # hidden state, by its name
        assert "calls" in str(error)
        return
    row = report.worst
    assert row.verdict == "beyond tolerance" and note in row.note and row.tolerance < 0.1, f"\n{report}"


def test_a_module_in_float64_that_shares_less_memory_is_no_judge():
    """A buffer is a view of another one, which a module in float64 has no more."""

    def forward(m, x):
        if not traced(x):  # the bridge computes what the copy in float64 does
            m.whole += 1.0
        return x @ m.w * (1 + m.part)

    whole = nn.Buffer(torch.zeros(2, 3))
    report = bridge.verify(Calls(forward, whole=whole, part=nn.Buffer(whole[0])), X, steps=1)
    outputs = rows(report, "output")["value"]
    assert outputs.verdict == "beyond tolerance" and "when it is called again" in outputs.note, f"\n{report}"


# ---- `verify` works on copies, which have to be what the module is


def test_a_backward_inside_of_the_call_leaves_no_gradient_of_an_input():
    def forward(x):
        weight = torch.ones(3, requires_grad=True)
        (x * weight).sum().backward()
        return x * weight.grad.detach()

    verified(forward, X[:1])


@pytest.mark.parametrize("method", ["register_hook", "register_post_accumulate_grad_hook"])
def test_gradient_hooks_of_parameters_are_refused(method):
    """A copy of a parameter has none, and `verify` works on copies."""
    layer = nn.Linear(3, 2)
    getattr(layer.weight, method)(lambda gradient: None)
    with pytest.raises(bridge.BridgeError, match="parameter weight has a gradient hook"):
        bridge.verify(layer, X)


def test_dicts_of_weak_references_hold_the_copies():
    norm = nn.BatchNorm1d(3)
    dicts = {"by_name": weakref.WeakValueDictionary({"norm": norm}), "names": weakref.WeakKeyDictionary({norm: "norm"})}
    verified(Calls(lambda m, x: m.by_name[m.names[m.norm]](x) @ m.w, norm=norm, **dicts), X, train=True)


# ---- several calls

SEEN = []


def test_a_further_call_gets_other_numbers_of_the_same_kind():
    def forward(inputs, w):
        if not traced(inputs["floats"]):
            SEEN.append(inputs)  # a list that the function encloses would be copied with the module
        return inputs["floats"] * w + inputs["mask"].log()[:, None]

    inputs = {
        "floats": torch.linspace(0.1, 0.9, 12).reshape(4, 3),
        "mask": torch.tensor([1.0, 1, 1, 2]),
        "ids": torch.arange(4),
        "flags": torch.tensor([[True, True, False]]),
        "additive": torch.tensor([0.0, -torch.inf, 0.5]),
        "step": torch.tensor(7),
        "ones": torch.ones(3),
        "complex": torch.complex(X, 2 * X),
        "half": X.bfloat16(),
        "empty": torch.empty(0, 3),
        "number": 2,
    }
    verified(Applied(forward), inputs, steps=3)
    first, second, third = SEEN
    assert first["ids"].tolist() == [0, 1, 2, 3] and second["ids"].tolist() == [3, 0, 1, 2]
    assert second["mask"].tolist() == [2, 1, 1, 1] and third["mask"].tolist() == [1, 2, 1, 1]
    assert second["flags"].tolist() == [[False, True, True]], "a batch of one: along the next axis"
    assert second["additive"].tolist() == [0.5, 0, -torch.inf] and second["step"] == 7 and second["number"] == 2
    for name in ("floats", "ones", "complex", "half"):
        assert not torch.equal(first[name], second[name]) and second[name].dtype == first[name].dtype, name
    assert second["floats"].min() >= 0.1 and second["floats"].max() <= 0.9
    assert second["ones"].min() >= 0.5 and second["ones"].max() <= 1


def attends(query, keys, mask=None):
    """Attention to itself has a factor of its own, and both names see a write."""
    key, (value,) = keys["key"], keys["values"]
    itself = query is key
    query.mul_(2)
    return query * key.detach() * (3 if itself else 1) + value.sin() * (1 if value is key else mask)


@pytest.mark.parametrize("settings", [{}, {"known_inputs": "0", "input_gradients": False}])
def test_one_tensor_as_several_arguments_stays_one(settings):
    x = torch.rand(3)
    other = torch.rand(3)
    for keys in ({"key": x, "values": (x,)}, {"key": x, "values": (other,)}, {"key": other, "values": (x,)}):
        report = bridge.verify(Call(attends), x, keys, torch.rand(3), **settings)
        assert report.ok and {row.step for row in report.rows} == {0, 1}, f"\n{report}"


def test_a_module_that_cannot_take_other_numbers_says_what_to_do():
    def forward(x, lengths):
        if not traced(x) and not torch.equal(lengths, lengths.sort()[0]):
            raise ValueError("lengths have to be sorted")
        return x * 2

    given = X, torch.arange(3)
    with pytest.raises(bridge.BridgeError, match=r"fails, in step 1: ValueError: lengths.*steps=1 compares one call"):
        bridge.verify(Call(forward), *given)
    verified(forward, *given, steps=1)
    verified(forward, *given, advance=lambda outputs, args, kwargs: (args, kwargs))


# ---- gradients that the call itself leaves or asks for


def test_a_grad_that_the_call_leaves_is_compared():
    def forward(x, w):
        if not traced(x):
            (x * 2).sum().backward()
        return x * w

    report = bridge.verify(Applied(forward), X.clone().requires_grad_())
    row = report.worst
    assert row.kind == ".grad" and row.verdict == "beyond tolerance" and "returns no `.grad`" in row.note, f"\n{report}"
    assert bridge.verify(Applied(forward), X).ok, "an input that requires none"


def test_a_grad_of_a_parameter_that_the_call_leaves_is_refused():
    def forward(x, w):
        w.grad = torch.ones(3)
        return x * w

    with pytest.raises(bridge.BridgeError, match=r"\.grad"):
        bridge.verify(Applied(forward), X)


def test_a_gradient_that_is_sparse_in_pytorch():
    module = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
    report = bridge.verify(module, torch.tensor([0, 2, 2]))
    assert report.ok and rows(report, "gradient")["0.weight"].scale > 0, f"\n{report}"


def quantised(x, codes):
    """Straight through, where an input asks for a gradient."""
    nearest = codes[(x.detach()[..., None] - codes).abs().argmin(-1)]
    return x + (nearest - x).detach() + nearest if x.requires_grad else 2 * nearest


def test_a_module_that_asks_an_input_for_requires_grad_is_said():
    module = Applied(quantised, torch.linspace(-1, 2, 5))
    x = torch.rand(4, 3)
    with pytest.warns(bridge.BridgeWarning, match=r"test_verify.py:\d+ asks an input whether it requires grad") as said:
        assert not bridge.verify(module, x).ok
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        verified(module, x, input_gradients=False)
