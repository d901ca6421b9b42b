"""What models of new kinds call: counts, columns of selected rows, the largest of a bag, assignments."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
import torch
import torch.nn.functional as F
from checked_values import asserted, asserted_numbers
from eager import array, compare, in_jax, raises, randn, same, verified
from scipy.optimize import linear_sum_assignment
from torch import nn

import bridge

BOXES = randn(6, 4)
TOKENS = randn(2, 3, 4)
ROW = randn(1, 4, seed=2)
LABELS = torch.tensor([0, 2, 2, 1, 0, 2])


# ---- counts


def confusion(prediction, target):
    return torch.bincount(target * 3 + prediction, minlength=9).reshape(3, 3)


@pytest.mark.filterwarnings("ignore:a check of traced values")
def test_counts_of_numbers_without_a_known_range():
    prediction = LABELS.flip(0).to(torch.int32)
    target = LABELS.to(torch.int32)
    same(confusion, prediction, target)
    verified(confusion, prediction, target)


def test_numbers_beyond_the_counts_are_seen():
    """PyTorch's result would be longer."""
    with pytest.warns(bridge.BridgeWarning, match="a check of traced values is not made"):
        counts = in_jax(lambda y: torch.bincount(y, minlength=2), LABELS, jit=True)
    assert counts.tolist() == [-(2**31)] * 2
    with pytest.warns(bridge.BridgeWarning):
        sums = in_jax(lambda y, w: torch.bincount(y, w, minlength=2), LABELS, randn(6), jit=True)
    assert np.isnan(sums).all()


def test_verify_names_the_check_of_counts():
    with pytest.warns(bridge.BridgeWarning):
        report = bridge.verify(Counts(), LABELS)
    assert report.ok
    assert "check not made" in str(report)
    with pytest.warns(bridge.BridgeWarning):
        assert not bridge.verify(Counts(2), LABELS, steps=1).ok


class Counts(nn.Module):
    def __init__(self, size=3):
        super().__init__()
        self.size = size

    def forward(self, y):
        return torch.bincount(y, minlength=self.size) * 1.0


def test_counts_of_unknown_length_are_refused():
    remedy = raises("has a length that depends on data", lambda x: torch.bincount(x.argmax(-1)), BOXES)
    assert "minlength=n" in remedy
    same(lambda x: torch.bincount(x.argmax(-1), minlength=4), BOXES)


# ---- rows that a mask selects


def added(x, w):
    y = x * 1
    y[y[:, 0] > 0] += w
    return y


def scaled(x, w):
    y = x * 1
    y[y[:, 0] > 0] *= w
    y[y[:, 1] > 0] /= w
    return y


def embedded_points(x, w):
    """As the prompt encoder of Segment Anything does."""
    points = x * 2
    labels = (x[..., 0] > 0).long() - (x[..., 1] > 0).long()
    points[labels == -1] = 0.0
    points[labels == -1] += w
    points[labels == 0] += w * 2
    return points


def corners(x):
    chosen = x[:, 0] > 0
    center_x, center_y, width, height = x[chosen].unbind(-1)
    corners = [center_x - width / 2, center_y - height / 2, center_x + width / 2, center_y + height / 2]
    return torch.stack(corners, dim=-1).square().sum()


def columns(x):
    boxes = x[x[:, 0] > 0]
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[..., 3] - boxes[..., 1])
    joined = torch.cat([boxes[:, :2] - boxes[:, 2:], boxes[:, 2:] * 2], dim=-1)
    return areas.clamp(min=0).sum(), joined.sum(0), (boxes[:, None, 1:] * boxes[:, 1:, None]).sum(0)


def columns_written(x):
    y = x * 1
    chosen = x[:, 0] > 0
    boxes = y[chosen]
    boxes[:, 0] += 2
    boxes[..., 1::2].clamp_(0, 0.1)
    boxes[:, 3] = boxes[:, 2] * 7
    y[chosen] = torch.stack(boxes.unbind(1)[::-1], 1)
    return y


SELECTED = {
    "one row added": (added, BOXES, ROW),
    "one row scales": (scaled, BOXES, ROW),
    "one number": (lambda x, w: (x[x > 0] * w).sum(), BOXES, ROW[0, :1]),
    "one row of several": (lambda x, w: (x[:, x[0, :, 0] > 0] * w).sum((0, 1)), TOKENS, randn(2, 1, 4)),
    "more dimensions": (lambda x, w: (x[x[:, 0] > 0] * w).sum(), BOXES, randn(2, 1, 4)),
    "a mask of two dimensions": (lambda x, w: (x[x[..., 0] > 0] * w).sum(0), TOKENS, ROW),
    "no row": (lambda x, w: (added(x - 99, w), (x[x[:, 0] > 99] * w).sum()), BOXES, ROW),
    "points": (embedded_points, TOKENS, ROW),
    "corners": (corners, BOXES),
    "columns": (columns, BOXES),
    "columns written": (columns_written, BOXES),
}


@pytest.mark.parametrize("name", SELECTED)
def test_selected_rows(name):
    function, *inputs = SELECTED[name]
    compare(function, inputs)


@pytest.mark.parametrize("name", ["points", "columns written"])
def test_selected_rows_under_vmap(name):
    function, x, *others = SELECTED[name]
    xs = torch.stack([x, -x, x * 0.5])
    call = bridge.export(Function(function))
    mapped = jax.jit(jax.vmap(lambda x: call({}, {}, x, *map(array, others))[0]))(array(xs))
    for ours, x in zip(mapped, xs, strict=True):
        np.testing.assert_allclose(ours, function(x, *others), rtol=1e-6)


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def test_other_rows_keep_infinity_from_gradients():
    """Where the mask selects nothing, ones stand for the rows, and one minus one is zero."""

    def ratio(x, w):
        boxes = x[x[:, 0] > 0]
        return (boxes[:, 0] / (boxes[:, 1] - boxes[:, 2]) * w[0, 0]).sum()

    def projected(x, w):
        boxes = x[x[:, 0] > 0]
        return F.linear(boxes / (boxes[:, :1] - boxes[:, 1:2]), w).sum()

    compare(ratio, [BOXES, ROW])
    compare(projected, [BOXES, ROW])


def test_rows_along_the_mask_are_refused():
    raises("`unbind` of the rows", lambda x: sum(x[x[:, 0] > 0].unbind()), BOXES)
    raises("`stack` beside a tensor with rows of its own", lambda x: torch.stack([x[x[:, 0] > 0], x]), BOXES)
    raises("beside a tensor with rows of its own", lambda x: x[x[:, 0] > 0] + x[:2], BOXES)


# ---- the largest of each bag

WORDS = torch.tensor([1, 2, 2, 4, 3, 5, 0, 1])
STARTS = torch.tensor([0, 3, 3, 6])
EQUAL = torch.tensor([[1.0, 2.0], [3.0, 2.0], [3.0, 2.0], [0.0, float("-inf")], [-1.0, 2.0], [3.0, -1.0]])
BAGS = {
    "an empty bag": lambda w: F.embedding_bag(WORDS, w, STARTS, mode="max"),
    "rows": lambda w: F.embedding_bag(WORDS.view(2, 4), w, mode="max"),
    "padding": lambda w: F.embedding_bag(WORDS, w, STARTS, mode="max", padding_idx=2),
    "a bag of padding": lambda w: F.embedding_bag(torch.tensor([[1, 1], [0, 1]]), w, mode="max", padding_idx=1),
    "the last offset": lambda w: F.embedding_bag(
        WORDS, w, torch.tensor([0, 3, 8]), mode="max", include_last_offset=True
    ),
}


@pytest.mark.parametrize("name", BAGS)
@pytest.mark.parametrize("weight", [randn(6, 2), EQUAL], ids=["numbers", "ties"])
def test_largest_of_each_bag(name, weight):
    compare(BAGS[name], [weight])


def test_largest_where_a_number_is_missing():
    for place in range(1, 6):
        weight = randn(6, 2)
        weight[place, 0] = float("nan")
        same(BAGS["an empty bag"], weight)


@pytest.mark.slow
def test_a_layer_of_bags():
    layer = nn.EmbeddingBag(6, 3, mode="max", padding_idx=0)
    verified(layer, WORDS.view(2, 4))
    fn = bridge.export(layer)
    words = jnp.asarray(WORDS.view(2, 4).numpy())
    rows = jax.vmap(lambda word: fn(fn.params, {}, word[None])[0][0])(words)
    np.testing.assert_array_equal(rows, layer(WORDS.view(2, 4)).detach().numpy())


# ---- checks


def raised(xs):
    if any(bool((x < -100).any()) for x in xs):
        raise ValueError("too small")
    return xs[0] * 2


def raised_unless(xs):
    if not all(not bool((x < -100).any()) for x in xs):
        raise ValueError("too small")
    return xs[0] * 2


@pytest.mark.filterwarnings("ignore:.*a check of traced values")
@pytest.mark.parametrize("function", [asserted, asserted_numbers, raised, raised_unless])
def test_checks_of_several(function):
    compare(lambda x, y: function([x, y]), [BOXES, ROW])
    verified(lambda x, y: function([x, y]), BOXES, ROW)
    with pytest.warns(bridge.BridgeWarning, match="a check of traced values is not made"):
        in_jax(lambda x, y: function([x, y]), BOXES, ROW, jit=True)


def test_several_truths_that_are_no_check_are_refused():
    raises("asks for the value of a traced tensor", lambda x: x * sum(bool(row.any()) for row in x), BOXES)


def degenerate(boxes):
    """As the detectors of torchvision do."""
    wrong = boxes[:, 2:] <= boxes[:, :2] - 100
    if wrong.any():
        place = torch.where(wrong.any(dim=1))[0][0]
        box: list = boxes[place].tolist()
        torch._assert(False, f"a box without an area: {box}")
    if boxes.sum() > 0:
        boxes = boxes * 2
    return boxes


@pytest.mark.filterwarnings("ignore:.*a check of traced values")
def test_a_check_that_ends_in_torch_assert():
    compare(degenerate, [BOXES])
    compare(degenerate, [-BOXES])
    verified(degenerate, BOXES)


def drawn(x):
    if torch.rand([]) < 0.5:
        return x * torch.rand(6, 4)
    return x + torch.rand(6, 4)


def never_drawn(x):
    if torch.rand([]) < 0.0:
        x = x * torch.rand(6, 4)
    return x + torch.rand(6, 4)


class DroppedLayers(nn.Module):
    """A draw for all layers, of which none is left out; a variable has no value where one would be."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        draws = torch.empty(len(self.layers)).uniform_()
        weights = None
        for i, layer in enumerate(self.layers):
            if torch.rand(1) < 0.0 or draws[i] < 0.0:
                continue
            weights = layer(x).softmax(-1)
            x = x + weights
        return x, weights.sum(0)


def test_a_draw_is_not_below_zero():
    verified(DroppedLayers(), BOXES)


@pytest.mark.slow
def test_a_draw_decides_about_draws():
    verified(drawn, BOXES)
    verified(never_drawn, BOXES)
    fn = bridge.export(Function(never_drawn))
    keys = jax.random.split(jax.random.key(0), 3)
    rows = jax.vmap(lambda key: fn({}, {}, array(BOXES), rng=key)[0])(keys)
    assert (rows - array(BOXES) >= 0).all()
    assert (rows - array(BOXES) < 1.0001).all()


# ---- `backward()` in the call, whose gradients the call takes away again


class Adversarial(nn.Module):
    """Virtual adversarial training: the direction in which the prediction changes most."""

    def __init__(self, **settings):
        super().__init__()
        self.net = nn.Linear(4, 3)
        self.settings = settings

    def forward(self, x):
        with torch.no_grad():
            prediction = F.softmax(self.net(x), -1)
        direction = self.start(x)
        for _ in range(2):
            direction = direction.detach().requires_grad_()
            self.distance(x + 0.1 * direction, prediction).backward()
            direction = F.normalize(direction.grad, dim=-1)  # pyright: ignore[reportArgumentType]
            self.net.zero_grad(**self.settings)
        return self.distance(x + direction, prediction)

    def start(self, x):
        return F.normalize(1 + x, dim=-1)

    def distance(self, x, prediction):
        return F.kl_div(F.log_softmax(self.net(x), -1), prediction, reduction="batchmean")


class AdversarialOfNoise(Adversarial):
    def start(self, x):
        return torch.rand_like(x) - 0.5


class OfOwnGradient(Adversarial):
    def forward(self, x):
        self.net(x).square().sum().backward()
        self.net(x).sin().sum().backward()
        gradient = self.net.weight.grad * 1  # pyright: ignore[reportOptionalOperand]
        self.zero_grad()
        return (self.net(x) @ gradient).sum()


@pytest.mark.parametrize("make", [Adversarial, OfOwnGradient])
def test_backward_and_zero_grad(make):
    module = make()
    expected = module(BOXES)
    expected.backward()
    fn = bridge.export(module)
    value, gradients = jax.jit(jax.value_and_grad(lambda params: fn(params, {}, array(BOXES))[0]))(fn.params)
    np.testing.assert_allclose(value, expected.detach(), rtol=1e-5)
    for name, parameter in module.named_parameters():
        np.testing.assert_allclose(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_adversarial_training_with_draws():
    verified(AdversarialOfNoise(), BOXES)
    fn = bridge.export(Adversarial())
    xs = jnp.stack([array(BOXES), array(BOXES.flip(0))])
    values = jax.vmap(lambda x: fn(fn.params, {}, x)[0])(xs)
    np.testing.assert_allclose(values[0], fn(fn.params, {}, xs[0])[0], rtol=1e-5)
    np.testing.assert_allclose(values[1], fn(fn.params, {}, xs[1])[0], rtol=1e-5)


def test_gradients_that_a_call_leaves_are_refused():
    remedy = raises("adds to the `grad`", Adversarial(set_to_none=False), BOXES)
    assert "call zero_grad(), which sets them to None" in remedy


class InABranch(Adversarial):
    def forward(self, x):
        if x.sum() > 0:
            self.net(x).sum().backward()
        return self.net(x)


def test_backward_on_one_side_of_a_branch_is_refused():
    raises("a branch on a traced value in a call that asks PyTorch's engine", InABranch(), BOXES)


# ---- SciPy's assignment


def matched(cost):
    rows, columns = linear_sum_assignment(cost.detach().cpu().numpy())
    return cost[rows, columns].sum()


def matched_of_scipy(cost):
    rows, columns = scipy.optimize.linear_sum_assignment(cost.detach().T, maximize=True)
    return cost.T[torch.from_numpy(rows), torch.from_numpy(columns)].sum()


class Matcher(nn.Module):
    """As DETR does: the cost of all queries and targets, split by images."""

    def __init__(self):
        super().__init__()
        self.boxes = nn.Linear(4, 4)
        self.sizes = (2, 0, 1)

    @torch.no_grad()
    def match(self, boxes, targets):
        costs = torch.cdist(boxes.flatten(0, 1), targets, p=1).view(3, -1, 3).cpu()
        indices = [linear_sum_assignment(c[i]) for i, c in enumerate(costs.split(self.sizes, -1))]
        return [tuple(torch.as_tensor(each, dtype=torch.int64) for each in pair) for pair in indices]

    def forward(self, queries, targets):
        boxes = self.boxes(queries)
        indices = self.match(boxes, targets)
        batch = torch.cat([torch.full_like(rows, i) for i, (rows, _) in enumerate(indices)])
        chosen = boxes[batch, torch.cat([rows for rows, _ in indices])]
        wanted = torch.cat([t[columns] for t, (_, columns) in zip(targets.split(self.sizes), indices, strict=True)])
        return F.l1_loss(chosen, wanted)


@pytest.mark.filterwarnings("ignore:.*a check of traced values")
def test_assignments():
    compare(matched, [BOXES])
    compare(matched, [BOXES.T.contiguous()])
    compare(matched_of_scipy, [BOXES])
    queries = randn(3, 5, 4)
    targets = randn(3, 4, seed=3)
    compare(Matcher(), [queries, targets])
    verified(Matcher(), queries, targets)
    assert scipy.optimize.linear_sum_assignment is linear_sum_assignment
    assert type(linear_sum_assignment) is type(len)


@pytest.mark.filterwarnings("ignore:.*a check of traced values")
def test_the_cost_of_assignments_is_scipy_s():
    """Costs with ties have several assignments of the least cost."""
    generator = torch.Generator().manual_seed(0)
    for rows, columns in ((7, 7), (4, 9), (9, 4), (1, 5)):
        costs = torch.stack(
            [
                torch.rand(rows, columns, generator=generator),
                torch.randint(0, 3, (rows, columns), generator=generator).float(),
                torch.randn(rows, columns, generator=generator) * 1e4,
            ]
        )
        fn = bridge.export(Function(matched))
        ours = jax.jit(jax.vmap(lambda cost: fn({}, {}, cost)[0]))(array(costs))  # noqa: B023 (called at once)
        np.testing.assert_allclose(ours, [float(matched(cost)) for cost in costs], rtol=1e-5)


@pytest.mark.filterwarnings("ignore:.*a check of traced values")
def test_an_infinite_cost_is_avoided():
    cost = torch.tensor([[1.0, float("inf"), 5.0], [2.0, 3.0, float("inf")], [float("inf"), 1.0, 4.0]])
    np.testing.assert_allclose(in_jax(matched, cost, jit=True), float(matched(cost)))


@pytest.mark.filterwarnings("ignore:.*a check of traced values")
def test_what_else_is_done_with_costs_in_numpy_is_refused():
    def scaled(cost):
        costs = cost.detach().numpy()
        linear_sum_assignment(costs)
        return (costs * 2).sum()

    def returned(cost):
        costs = cost.detach().numpy()
        linear_sum_assignment(costs)
        return costs

    def converted(cost):
        costs = cost.detach().numpy()
        linear_sum_assignment(costs)
        return torch.as_tensor(np.nan_to_num(costs))

    for function in (scaled, returned, converted):
        raises(r"`numpy\(\)` asks for the memory", function, BOXES)
    raises(r"`numpy\(\)` asks for the memory", lambda x: x.numpy(), BOXES)


def test_assignments_without_optax(monkeypatch):
    monkeypatch.setitem(sys.modules, "optax", None)
    with pytest.warns(bridge.BridgeWarning):
        text = raises("needs Optax, which is not installed", matched, BOXES)
    assert text.endswith('pip install "trm-bridge[train]", or optax alone.')
    assert "\n" not in text
