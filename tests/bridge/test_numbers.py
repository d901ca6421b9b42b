"""Traced numbers: PyTorch's values and gradients with `.item()`, `float(t)` and `.tolist()`, or a refusal by name."""

from __future__ import annotations

import copy
import math
import queue
from math import sqrt

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from eager import TRANSFORMS, Call, Calls, array, compare, composes, in_jax, raises, randn, same, verified
from torch import nn
from torch.utils.checkpoint import checkpoint

import bridge
from bridge.dispatch import values
from bridge.symbolic import numbers

X = torch.tensor([0.5, -1.0, 2.0])
IMAGE = randn(2, 3, 9, 9)


# ---- a number as an operand, as models use it


def clipped(x):
    """Clips by the global norm, as an optimizer does."""
    with torch.no_grad():
        norm = x.norm().item()
    return x * min(1.0 / (norm + 1e-6), 1.0)


def weighted_losses(x):
    losses = [x.mean(), x.square().mean()]
    weights = [1 / (1 + loss.item()) for loss in losses]
    total = sum(weights)
    return sum(loss * (w / total) for loss, w in zip(losses, weights, strict=True))


def logs(x):
    loss = x.square().mean()
    return loss, {"loss": loss.item(), "largest": x.abs().max().item(), "each": x.tolist(), "any": (x > 0).any().item()}


def of_a_length(x):
    length = int((x > 0).sum())
    return x.sum() / max(length, 1) + length


def annealed(x):
    step = float((x > 0).sum())
    return x * (0.5 * (1 + math.cos(math.pi * min(step / 10, 1.0)))) + sqrt(step) + math.log(step + 1, 2)


def later_writes(x):
    """A number is that of its time."""
    kept = x.clone()
    largest = kept.max().reshape(1)[0].item()
    first = kept[0].item()
    kept[0] = 7.0
    return x * largest * first + kept


def copied(x):
    return x * copy.deepcopy({"scale": x.abs().max().item()})["scale"]


def in_order(x):
    values = x.tolist()
    return x * max(values) + min(values[0], values[1]) - max(2, int(x.sum()))


def of_numpy(x):
    return x * np.mean([v.item() for v in x]) + np.float32(2) * x.max().item() + np.sqrt(x.abs().max().item())


def with_signs(x):
    n = x.min().item()
    whole = int(x.max() * 1.7)
    parts = (n + 1, 1 - n, n / 3, 3 / n, n // 0.3, 0.3 // n, n % 0.3, 5 % n, -n, +n, abs(n), n**2, 2.0**n, round(n, 1))
    ints = (whole // 2, whole % 2, -whole, whole**2, 7 // whole, whole & 1, whole / 2, round(n), math.floor(n * 0.7))
    return x * sum(parts) + sum(ints) + sum(divmod(whole, 2)) + math.ceil(n * 0.7) + math.trunc(n * 0.7)


def as_scalars(x):
    n = x.abs().max().item()
    least = x.min().item()
    y = (
        torch.lerp(x, 2 * x, n)
        + x.clamp(min=least / 2)
        + torch.clamp(x, least, 1.0)
        + x.add(x, alpha=n)
        - x.sub(2, alpha=n)
    )
    y = y + x.masked_fill(x < 0, n) + torch.where(x > 0, x, n) + F.leaky_relu(x, n) + F.elu(x, n) + x.abs() ** n
    y = y + F.threshold(x, least, n) + x.scatter(0, torch.tensor([1]), n)
    return (
        y,
        F.pad(x, (1, 1), value=least),
        torch.linspace(0, n, 5),
        F.hardtanh(x, least / 2, n / 2),
        (x > n / 2),
        n - x,
        n / x,
    )


def into_tensors(x):
    n = x.max().item()
    made = torch.tensor([1.0, n, 2]), torch.full((3,), n), x.new_tensor(n), torch.as_tensor(n), x.new_full((2,), n)
    held = x.clone()
    held[0] = n
    held.mul_(n).add_(x, alpha=n).clamp_(min=-n)
    return (
        *made,
        held,
        torch.zeros(3).fill_(n) + x,
        torch.full_like(x, n),
        torch.arange(3.0).add(torch.ones(3), alpha=n),
    )


def softmax(x):
    q = x.view(1, 1, 3, 1).expand(1, 1, 3, 4)
    return F.softmax(x / x.max().item(), -1), F.scaled_dot_product_attention(q, q, q, scale=x.max().item())


def is_float(x):
    n = x.max().item()
    assert isinstance(n, float) and isinstance(int(n), int) and isinstance(n > 0, bool) and not isinstance(n, int)
    return x * n


# ---- as a condition


def of_two_sides(x):
    n = x.sum().item()
    if n > 0.5:
        y = x * n
    elif n < -5:
        y = x - n
    else:
        y = x + n
    return y * n


def chosen(x):
    scale = 2.0 if x.sum().item() > 0 else x.max().item()
    other = x.min().item() or 1.0
    if 0 < scale < 5 and not other > 3:
        scale = scale + 1
    return x * scale * other


def of_nan(x):
    loss = x.sum().item()
    if math.isnan(loss) or math.isinf(loss):
        return x * 0
    return x * loss


def accumulated(x):
    best = -math.inf
    for v in x:
        value = v.item()
        if value > best:
            best = value
    return x * best


CASES = {
    f.__name__: f
    for f in (
        *(clipped, weighted_losses, logs, of_a_length, annealed, later_writes, copied, in_order, of_numpy, with_signs),
        *(as_scalars, into_tensors, softmax, is_float, of_two_sides, chosen, of_nan, accumulated),
    )
}


class Weighted(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.w = nn.Parameter(torch.tensor([1.0, 2.0, 0.5]))

    def forward(self, x):
        return self.function(x * self.w)


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_pytorchs(name):
    report = bridge.verify(Weighted(CASES[name]), X, steps=1)
    assert not report.count("beyond tolerance"), report
    for x in (X, -X):
        if name != "annealed":
            compare_numbers(CASES[name], x)


def compare_numbers(function, x):
    """Numbers among the results have no gradient in PyTorch."""
    expected = jax.tree.leaves(function(x))
    for ours, theirs in zip(jax.tree.leaves(in_jax(function, x, jit=True)), expected, strict=True):
        np.testing.assert_allclose(ours, np.asarray(theirs), rtol=2e-5, atol=1e-6)


def test_second_derivatives():
    module = Weighted(clipped)
    fn = bridge.export(module)
    ours = jax.hessian(lambda x: (fn(fn.params, {}, x)[0] ** 3).sum())(array(X))
    theirs = torch.autograd.functional.hessian(lambda x: (module(x) ** 3).sum(), X)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


# ---- dtypes: a number promotes as Python's does


def promoted(x):
    whole = (x > 0).sum().item()
    n = x.max().item()
    truth = (x > 0).any().item()
    ones = torch.ones(2, dtype=torch.int64)
    short = (x * 50).to(torch.int8)
    narrow = x.bfloat16()
    return (
        *(ones * n, ones.int() * whole, torch.ones(2) * whole, (x > 0) * whole, short * whole, narrow * n),
        *(
            narrow.sum() * n,
            narrow.sum() * narrow.max().item(),
            (x > 0).sum() / whole,
            ones * truth,
            ones.bool() * truth,
        ),
        *(torch.tensor(whole), torch.tensor(n), torch.tensor(truth), torch.tensor([whole, n]), torch.full((2,), whole)),
        *(torch.full((2,), truth), torch.where(x > 0, ones[:1], n), x.half() / n, narrow / n, narrow + n, ones / whole),
    )


def test_a_number_promotes_as_pythons_does():
    same(promoted, X)


def test_numbers_of_narrow_tensors_have_32_bits():
    """In PyTorch they have 64."""
    assert in_jax(lambda x: x.to(torch.int8)[2].item() + 1000, X, jit=True) == 1002
    large = in_jax(lambda x: x.half()[2].item() * 60000, X, jit=True)
    assert large.dtype == jnp.float32 and large == 120_000


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_a_number_is_not_rounded_to_the_type_beside_it(name):
    """As for Python's numbers, PyTorch computes in float32."""

    def call(x, n):
        x = x.to(getattr(torch, name))
        return x * n.item(), x / n.item(), x + n.item(), n.item() - x

    same(call, torch.linspace(0.1, 3, 64), torch.tensor(1.2345678))


# ---- cuts, and where PyTorch differentiates by itself


def test_a_number_has_no_gradient():
    slope = jax.grad(lambda x: bridge.export(Call(lambda x: x * x.item()))({}, {}, x)[0])(3.0)
    assert slope == 3.0
    _, tangent = jax.jvp(lambda x: bridge.export(Call(lambda x: x.item() ** 2))({}, {}, x)[0], (3.0,), (1.0,))
    assert tangent == 0.0


def of_the_engine(x):
    n = x.abs().max().item()
    (slope,) = torch.autograd.grad((x * n * x / n * (n - 1)).sum(), x, create_graph=True)
    return slope * n


def in_a_loss(x):
    def loss(x):
        return (x * x * x.max().item()).sum()

    return torch.func.grad(loss)(x)


def around_a_transform(x):
    n = x.max().item()
    return torch.func.grad(lambda x: (x * x * n * (n - 1)).sum())(x), torch.func.vmap(lambda v: v * n)(x)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, n):
        ctx.n = n
        ctx.largest = x.abs().max().item()
        return x * n * ctx.largest

    @staticmethod
    def backward(ctx, g):
        return g * ctx.n + ctx.largest, None


def of_a_function(x):
    return Scaled.apply(x, x.max().item())


def recomputed(x):
    kept = []

    def part(x):
        kept.append(x.max().item())
        return x.sin() * kept[0]

    return checkpoint(part, x, use_reentrant=False) * kept[0]


@pytest.mark.parametrize("function", [of_the_engine, in_a_loss, around_a_transform, of_a_function, recomputed])
def test_inside_of_pytorchs_own_gradients(function):
    verified(Weighted(function), X)


@pytest.mark.parametrize("function", [of_two_sides, accumulated, clipped, of_a_function, recomputed, of_the_engine])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_it_composes(transform, function):
    composes(transform, Weighted(function), torch.stack([X, -X, X + 1, X - 2]) / 2)


def test_under_autocast():
    def call(module, x):
        with torch.autocast("cpu", torch.bfloat16):
            return module(x) * x.max().item(), x * x.max().item()

    verified(Call(call, nn.Linear(3, 2)), X)


# ---- in a model's state


@pytest.mark.parametrize("make", [lambda: nn.BatchNorm1d(3, momentum=None), lambda: nn.BatchNorm2d(3, momentum=None)])
def test_a_batch_norm_with_the_mean_of_all_batches(make):
    module = make()
    x = randn(5, 3) if isinstance(module, nn.BatchNorm1d) else IMAGE
    verified(module, x, train=True)
    verified(module, x, train=False)


def test_buffers():
    def call(module, x):
        largest = x.detach().abs().max().item()
        module.count += 1
        module.mean.mul_(1 - largest / 10).add_(x.detach(), alpha=largest / 10)
        return x / module.count.item() + module.mean

    verified(Calls(call, count=nn.Buffer(torch.tensor(0)), mean=nn.Buffer(torch.zeros(3))), X)


def test_an_attribute_that_a_later_call_reads_is_refused():
    def keeps(module, x):
        before = module.last
        module.last = x.sum().item()
        return x if before is None else x * before

    def writes(module, x):
        module.last = x.sum().item()
        module.logs["loss"] = module.last
        return x * module.last

    raises("the call changes `last` and a later call would read it", Calls(keeps, last=None), X)
    verified(Calls(writes, last=None, logs={}), X)


def test_dropout_by_a_number():
    verified(Call(lambda x: F.dropout(x, p=torch.sigmoid(x.max()).item() * 0.5)), X)


# ---- as a place


def crop(x):
    top = int((x.mean() * 40).abs()) % 4
    left = min(max(int(x.sum()), 0), 3)
    window = x[:, :, top : top + 5, left : left + 5]
    rows = sum(x[:, :, i] for i in range(left, left + 2))
    return window * 2, x[..., left], x[..., (x > 0).sum().item() % 9], rows


def random_crop(x):
    start = torch.randint(0, 5, (1,)).item()
    return x[..., start : start + 5]


def test_crops():
    compare(crop, [IMAGE])
    fn = bridge.export(Call(random_crop))
    for seed in range(4):
        window = jax.jit(lambda key, x: fn({}, {}, x, rng=key)[0])(jax.random.key(seed), array(IMAGE))
        assert any(np.array_equal(window, IMAGE[..., i : i + 5]) for i in range(5))


def anywhere(x):
    start = int(x.sum())
    return x[..., start : start + 5]


def within(x):
    start = min(max(int(x.sum()), 0), 4)
    return x[..., start : start + 5]


def test_a_crop_that_may_lie_outside_is_refused():
    """PyTorch's would be smaller."""
    raises(r"a traced i that may be from .*Remedy: i\.clamp\(0, 4\), .*min\(max\(i, 0\), 4\)", anywhere, IMAGE)
    compare(within, [IMAGE])


# ---- refusals, each with what works instead


def formatted(x):
    return f"{x.max().item():.2f}"


def printed(x):
    print(x.max().item())


def key(x):
    return {x.max().item(): x}


def shape(x):
    return torch.zeros(int(x.max()))


def viewed(x):
    return x.view((x > 0).sum().item(), -1)


def counted_up(x):
    return torch.arange(int(x.max()))


def repeated(x):
    return x.repeat(int(x.max()))


def looped(x):
    for _ in range(int(x.max())):
        x = x + 1
    return x


def of_a_list(x):
    return x * [1, 2, 3][int(x.max())]


def negative_power(x):
    return 2 ** int(x.sum())


def dimension(x):
    return x.sum(int(x.max()))


def ordered(x):
    return sorted(x.tolist())


def added(x):
    return torch.addcmul(x, x, x, value=x.max().item())


def half_known(x):
    return F.alpha_dropout(x, x.max().item(), True)


REFUSED = {
    formatted: "a traced number is formatted .*return the number beside the result",
    printed: "a traced number is formatted",
    key: "a traced number is a key of a dict",
    shape: "asks for the value of a traced tensor .*a mask over a fixed size for a shape",
    viewed: "asks for the value of a traced tensor .*a mask over a fixed size for a shape",
    counted_up: "asks for the value of a traced tensor",
    repeated: "asks for the value of a traced tensor",
    looped: "asks for the value of a traced tensor .*fixed turns with",
    of_a_list: "asks for the value of a traced tensor",
    negative_power: r"a traced power that may be negative.*`2\.0\*\*n`",
    dimension: "asks for the value of a traced tensor",
    ordered: "asks for the value of a traced tensor",
    added: r"`aten::addcmul` needs the value of a traced number .*as in `x \+ n \* y`",
    half_known: "asks for the value of a traced tensor",
}


@pytest.mark.parametrize("function", REFUSED, ids=lambda f: f.__name__)
def test_what_needs_the_value_is_refused(function):
    text = raises(REFUSED[function], function, X)
    assert "\n" not in text and "test_numbers.py" in text and "Remedy: " in text


def with_a_fixed_number_of_turns(x):
    count = int(x.max())
    for i in range(3):
        if i < count:
            x = x + 1
    return x


def test_the_remedies_work():
    compare(with_a_fixed_number_of_turns, [X])
    compare(lambda x: x * 2.0 ** (x > 0).sum().item(), [X])
    compare(lambda x: x * 2 ** x.sum().long().clamp(min=0).item(), [X])
    in_a_branch = Call(check_with_a_message)
    with pytest.warns(bridge.BridgeWarning, match="a check of traced values is not made"):
        verified(in_a_branch, X)


def check_with_a_message(x):
    if x.max().item() > 100:
        raise ValueError(f"too large: {x.max().item():.2f}")
    return x


def test_a_number_does_not_outlive_its_call():
    kept = queue.SimpleQueue()  # a list would be emptied after the call
    in_jax(lambda x: kept.put(x.max().item()) or x, X, jit=True)
    number = kept.get_nowait()
    for use in (lambda n: n + 1, float, bool, lambda n: torch.ones(2) * n):
        with pytest.raises((bridge.BridgeError, RuntimeError)):
            use(number)


def test_values_that_are_known_stay_pythons():
    def call(x):
        assert type(torch.tensor([1.5, 2.0])[0].item()) is float
        assert type(torch.arange(3).sum().item()) is int
        return x * 2

    compare(call, [X])
    assert in_jax(lambda x: x * x.sum().item(), X)[0] == 0.75


# ---- each rule is needed


def test_without_weak_types_a_number_would_decide_the_dtype(monkeypatch):
    monkeypatch.setattr(numbers, "weakly_typed", lambda array: array)
    with pytest.raises(AssertionError):
        test_a_number_is_not_rounded_to_the_type_beside_it("bfloat16")


def test_without_the_cut_a_number_would_have_a_gradient(monkeypatch):
    monkeypatch.setattr(numbers, "stop_gradient", lambda array: array)
    with pytest.raises(AssertionError):
        test_a_number_has_no_gradient()


def test_without_numbers_a_value_is_refused(monkeypatch):
    monkeypatch.setattr(values, "number_behind", lambda tensor: None)
    with pytest.raises((AssertionError, TypeError, bridge.BridgeError)):
        compare(lambda x: x * x.sum().item(), [X])
