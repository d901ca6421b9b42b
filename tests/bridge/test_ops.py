"""Operations from PyTorch's database and a survey of them, against PyTorch eager."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.markers import slow_unless
from torch import nn

import bridge
from benchmarks import op_list, op_survey

# ---- Single operations against PyTorch eager, values and gradients at 1e-5

INF, NAN = float("inf"), float("nan")
STEPS = [-3.0, -2.0, -1.0, -0.5, -0.0, 0.0, 0.5, 1.0, 2.0, 3.0, 6.0, 25.0]
"""The boundaries of PyTorch's activations, from both sides."""
TIES = [[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0], [-1.0, -1.0, -2.0, -2.0]]
ZEROS = [[0.0, 0.0, 0.0], [3.0, 0.0, 4.0], [1.0, 2.0, 2.0]]
MEETING = [[0.0, 3.0, 0.0], [1.0, 0.0, 4.0], [0.0, 2.0, 0.0]]
"""Entries that a scatter brings together with equals and with zeros of `ZEROS`."""
IMAGE = [[[[1.0, 1.0, 0.0, 2.0], [1.0, 0.5, 2.0, 2.0], [0.0, 0.0, 3.0, 3.0], [0.0, 0.0, 3.0, 1.0]]]]
LOGITS = [[0.5, -1.0, 2.0], [30.0, -30.0, 0.0], [0.0, 0.0, 0.0], [1.0, 2.0, 3.0]]
CLASSES = torch.tensor([2, 0, -100, 1])

EDGES = {
    "abs": (torch.abs, STEPS),
    "relu": (torch.relu, STEPS),
    "relu6": (F.relu6, STEPS),
    "leaky_relu": (F.leaky_relu, STEPS),
    "prelu": (lambda x, w: F.prelu(x, w), STEPS, [0.25]),
    "elu": (F.elu, STEPS),
    "selu": (F.selu, STEPS),
    "celu": (lambda x: F.celu(x, 2.0), STEPS),
    "hardtanh": (F.hardtanh, STEPS),
    "hardsigmoid": (F.hardsigmoid, STEPS),
    "hardswish": (F.hardswish, STEPS),
    "hardshrink": (F.hardshrink, STEPS),
    "softshrink": (F.softshrink, STEPS),
    "softplus": (lambda x: F.softplus(x, 1.0, 6.0), STEPS),
    "threshold": (lambda x: F.threshold(x, 1.0, 7.0), STEPS),
    "gelu": (F.gelu, STEPS),
    "gelu tanh": (lambda x: F.gelu(x, approximate="tanh"), STEPS),
    "silu": (F.silu, STEPS),
    "mish": (F.mish, STEPS),
    "softsign": (F.softsign, STEPS),
    "logsigmoid": (F.logsigmoid, [*STEPS, -100.0, 100.0]),
    "tanhshrink": (F.tanhshrink, STEPS),
    "clamp": (lambda x: x.clamp(-1.0, 1.0), STEPS),
    "clamp min": (lambda x: x.clamp(min=0.0), STEPS),
    "clamp max": (lambda x: x.clamp(max=2.0), STEPS),
    "clamp tensor": (lambda x, a: x.clamp(a, a + 2), STEPS, [-1.0] * len(STEPS)),
    "maximum": (torch.maximum, TIES, [[1.0, 0.0, 3.0, 5.0]] * 3),
    "minimum": (torch.minimum, TIES, [[1.0, 0.0, 3.0, 5.0]] * 3),
    "fmax": (torch.fmax, [1.0, NAN, 2.0, NAN], [1.0, 2.0, NAN, NAN]),
    "max": (torch.max, TIES),
    "min": (torch.min, TIES),
    "max dim": (lambda x: tuple(torch.max(x, 1)), TIES),
    "min dim": (lambda x: tuple(torch.min(x, 1)), TIES),
    "amax": (lambda x: x.amax(1), TIES),
    "amin": (lambda x: x.amin((0, 1)), TIES),
    "median": (torch.median, TIES),
    "median dim": (lambda x: torch.median(x, 1).values, TIES),
    "sort": (lambda x: torch.sort(x, stable=True), TIES),
    "sort down": (lambda x: torch.sort(x, dim=0, descending=True, stable=True), TIES),
    "argsort": (lambda x: torch.argsort(x, stable=True), TIES),
    "topk": (lambda x: tuple(torch.topk(x, 2)), [[1.0, 3.0, 2.0], [0.0, -1.0, 5.0]]),
    "cummax": (lambda x: tuple(torch.cummax(x, 1)), TIES),
    "norm": (lambda x: x.norm(dim=1), ZEROS),
    "norm of zeros": (torch.linalg.vector_norm, [0.0, 0.0]),
    "norm 1": (lambda x: torch.linalg.vector_norm(x, 1, 1), ZEROS),
    "norm 3": (lambda x: torch.linalg.vector_norm(x, 3, 1), ZEROS),
    "norm inf": (lambda x: torch.linalg.vector_norm(x, INF, 1), ZEROS),
    "frobenius": (lambda x: torch.linalg.matrix_norm(x - x.detach()), ZEROS),
    "normalize": (F.normalize, ZEROS),
    "dist": (lambda x: torch.dist(x, x.detach()), ZEROS),
    "cdist": (lambda x, y: torch.cdist(x, y), ZEROS, ZEROS),
    "pairwise_distance": (lambda x, y: F.pairwise_distance(x, y), ZEROS, ZEROS),
    "cosine_similarity": (lambda x, y: F.cosine_similarity(x, y), ZEROS, [[1.0, 2.0, 0.0]] * 3),
    "sqrt": (torch.sqrt, [0.0, 1.0, 4.0]),
    "pow 2": (lambda x: x**2, STEPS),
    "pow 0": (lambda x: x**0, STEPS),
    "pow half": (lambda x: x**0.5, [0.0, 1.0, 4.0]),
    "pow 3": (lambda x: x**3, STEPS),
    "pow tensor": (torch.pow, [0.0, 0.0, 2.0, 3.0], [0.0, 2.0, 0.0, 0.5]),
    "scalar pow": (lambda x: 0.0**x, [0.0, 1.0, 2.0]),
    "where inf": (lambda x: torch.where(x > 0, x, torch.tensor(-INF)).amax(), STEPS),
    "masked log": (lambda x: torch.where(x > 0, x.clamp(min=1e-6).log(), x * 0), STEPS),
    "logsumexp": (lambda x: x.logsumexp(1), [[-INF, -INF], [-INF, 0.0], [INF, 0.0], [1.0, 1.0]]),
    "logaddexp": (torch.logaddexp, [-INF, -INF, 0.0], [-INF, 0.0, 0.0]),
    "softmax": (lambda x: x.softmax(1), [[-INF, 0.0], [100.0, -100.0], [1.0, 1.0]]),
    "log_softmax": (lambda x: x.log_softmax(1), [[-INF, 0.0], [100.0, -100.0], [1.0, 1.0]]),
    "logcumsumexp": (lambda x: x.logcumsumexp(0), [0.0, 1.0, -INF, 2.0]),
    "std": (lambda x: x.std(1), [[1.0, 2.0], [3.0, 5.0]]),
    "std of one": (lambda x: x.std(1), [[1.0], [3.0]]),
    "std of equals": (lambda x: x.std(1), [[1.0, 1.0], [3.0, 1.0]]),
    "var of one": (lambda x: x.var(1), [[1.0], [3.0]]),
    "prod": (lambda x: x.prod(1), ZEROS),
    "cumprod": (lambda x: x.cumprod(1), ZEROS),
    "nan_to_num": (torch.nan_to_num, [NAN, INF, -INF, 1.0]),
    "xlogy": (torch.xlogy, [0.0, 0.0, 1.0], [0.0, 2.0, 3.0]),
    "atan2": (torch.atan2, [0.0, 1.0, -1.0, 0.0], [1.0, 0.0, -0.0, -1.0]),
    "fmod": (torch.fmod, [5.0, -5.0, 5.0, -5.0, 6.0], [3.0, 3.0, -3.0, -3.0, 3.0]),
    "remainder": (torch.remainder, [5.0, -5.0, 5.0, -5.0, 6.0], [3.0, 3.0, -3.0, -3.0, 3.0]),
    "floor_divide": (
        lambda x, y: torch.floor_divide(x.detach(), y.detach()),
        [5.0, -5.0, 5.0, -5.0],
        [3.0, 3.0, -3.0, -3.0],
    ),
    "div trunc": (lambda x: torch.div(x, 3, rounding_mode="trunc"), [5.0, -5.0, 6.0]),
    "round": (torch.round, [0.5, 1.5, -0.5, 2.5, 1.2]),
    "frac": (torch.frac, [1.5, -1.5, 0.0]),
    "sign": (torch.sign, STEPS),
    "sinc": (torch.sinc, STEPS),
    "lerp": (lambda x, y: torch.lerp(x, y, 0.75), [1.0, 2.0], [3.0, 5.0]),
    "max_pool": (lambda x: F.max_pool2d(x, 2, 1, return_indices=True), IMAGE),
    "max_pool dilated": (lambda x: F.max_pool2d(x, 2, 1, 1, 2, return_indices=True), IMAGE),
    "max_pool ceil": (lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True), IMAGE),
    "max_pool short": (lambda x: F.max_pool2d(x, 3, 2, return_indices=True), IMAGE),
    "adaptive_max_pool": (lambda x: F.adaptive_max_pool2d(x, 3, return_indices=True), IMAGE),
    "avg_pool": (lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False), IMAGE),
    "avg_pool padded": (lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True), IMAGE),
    "adaptive_avg_pool": (lambda x: F.adaptive_avg_pool2d(x, 3), IMAGE),
    "nearest": (lambda x: F.interpolate(x, scale_factor=1.5), IMAGE),
    "bilinear": (lambda x: F.interpolate(x, size=(7, 3), mode="bilinear"), IMAGE),
    "bilinear corners": (lambda x: F.interpolate(x, size=(7, 3), mode="bilinear", align_corners=True), IMAGE),
    "bicubic": (lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), IMAGE),
    "reflect": (lambda x: F.pad(x, (2, 1, 1, 3), mode="reflect"), IMAGE),
    "replicate": (lambda x: F.pad(x, (2, 1, 1, 3), mode="replicate"), IMAGE),
    "circular": (lambda x: F.pad(x, (2, 1, 1, 3), mode="circular"), IMAGE),
    "crop": (lambda x: F.pad(x, (-1, 1, 0, -2)), IMAGE),
    "unfold fold": (lambda x: F.fold(F.unfold(x, 2, stride=1), (4, 4), 2), IMAGE),
    "l1": (lambda x, y: F.l1_loss(x, y), STEPS, [0.0] * len(STEPS)),
    "huber": (lambda x, y: F.huber_loss(x, y), STEPS, [0.0] * len(STEPS)),
    "smooth_l1": (lambda x, y: F.smooth_l1_loss(x, y), STEPS, [0.0] * len(STEPS)),
    "margin_ranking": (lambda x: F.margin_ranking_loss(x, torch.zeros(12), torch.ones(12), 1.0), STEPS),
    "hinge_embedding": (lambda x: F.hinge_embedding_loss(x, torch.tensor([1.0, -1.0] * 6)), STEPS),
    "triplet": (lambda x, y: F.triplet_margin_loss(x, y, x.detach()), ZEROS, ZEROS),
    "bce": (lambda x: F.binary_cross_entropy(x, torch.tensor([0.0, 1.0, 1.0, 0.0])), [0.0, 1.0, 0.3, 0.6]),
    "bce logits": (
        lambda x: F.binary_cross_entropy_with_logits(x, (x > 0).float(), pos_weight=torch.tensor(2.0)),
        [*STEPS, -100.0, 100.0],
    ),
    "kl_div": (lambda x, y: F.kl_div(x, y, reduction="batchmean"), [[-1.0, -2.0]], [[0.0, 1.0]]),
    "kl_div log": (lambda x, y: F.kl_div(x, y, log_target=True, reduction="sum"), [[-1.0, -2.0]], [[-3.0, -0.1]]),
    "nll": (lambda x: F.nll_loss(x.log_softmax(1), CLASSES), LOGITS),
    "cross_entropy": (lambda x: F.cross_entropy(x, CLASSES), LOGITS),
    "cross_entropy weights": (
        lambda x: F.cross_entropy(x, CLASSES, weight=torch.tensor([1.0, 2.0, 0.5]), label_smoothing=0.1),
        LOGITS,
    ),
    "cross_entropy ignored": (lambda x: F.cross_entropy(x[2:3], CLASSES[2:3], reduction="sum"), LOGITS),
    "cross_entropy mean of none": (lambda x: F.cross_entropy(x[2:3].detach(), CLASSES[2:3]), LOGITS),
    "cross_entropy of probabilities": (
        lambda x, y: F.cross_entropy(x, y, label_smoothing=0.2),
        LOGITS,
        [[0.2, 0.3, 0.5], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.3, 0.3, 0.4]],
    ),
    "index_add": (lambda x, y: x.index_add(0, torch.tensor([1, 1, 0]), y, alpha=2), ZEROS, MEETING),
    "scatter amax": (
        lambda x, y: x.scatter_reduce(0, torch.tensor([[0, 1, 0], [0, 1, 2], [0, 0, 0]]), y, "amax"),
        ZEROS,
        MEETING,
    ),
    "scatter amin anew": (
        lambda x, y: x.scatter_reduce(
            0, torch.tensor([[0, 1, 0], [0, 1, 2], [0, 0, 0]]), y, "amin", include_self=False
        ),
        ZEROS,
        MEETING,
    ),
    "scatter prod": (
        lambda x, y: x.scatter_reduce(0, torch.tensor([[0, 1, 0], [0, 1, 2], [0, 0, 0]]), y, "prod"),
        ZEROS,
        MEETING,
    ),
    "scatter mean anew": (
        lambda x, y: x.scatter_reduce(
            0, torch.tensor([[0, 1, 0], [0, 1, 2], [0, 0, 0]]), y, "mean", include_self=False
        ),
        ZEROS,
        MEETING,
    ),
    "embedding": (lambda w: F.embedding(torch.tensor([[0, 1], [1, 2]]), w, padding_idx=1), ZEROS),
    "embedding max_norm": (lambda w: F.embedding(torch.tensor([2, 1]), w.clone(), max_norm=1.0), ZEROS),
    "layer_norm of equals": (lambda x: F.layer_norm(x, (3,)), [[1.0, 1.0, 1.0], [1.0, 2.0, 4.0]]),
    "rms_norm of zeros": (lambda x: F.rms_norm(x, (3,)), ZEROS),
    "instance_norm": (F.instance_norm, IMAGE),
    "constant mask": (lambda x: x[:, torch.tensor([True, False, True])], ZEROS),
    "bitwise": (lambda x: ((x.int() & 3) | 4) ^ 1, STEPS),
    "shifts": (lambda x: (x.int() << 2) + (x.int() >> 1), STEPS),
    "integer division": (lambda x: (x.int() // 2, x.int() % 3, torch.fmod(x.int(), 3)), STEPS),
}
"""name -> (function, inputs that require grad)"""


class Edge(nn.Module):
    def __init__(self, function, *inputs):
        super().__init__()
        self.function = function
        self.inputs = nn.ParameterList([nn.Parameter(torch.tensor(x)) for x in inputs])

    def forward(self):
        out = self.function(*self.inputs)
        return tuple(out) if isinstance(out, tuple) else out


ZERO = {"median", "norm of zeros", "frobenius", "dist", "pow 0", "scalar pow", "div trunc", "round", "sign", "triplet"}
"""Edges whose value or gradient is zero in truth."""


@pytest.mark.parametrize("name", EDGES)
def test_edge(name):
    report = bridge.verify(
        Edge(*EDGES[name]), tolerance=1e-5, known_zero="." if name in {*ZERO, "cross_entropy ignored"} else ""
    )
    assert report.ok, f"\n{report}"


# ---- a quick part of the survey

QUICK = [
    "add",
    "addmm",
    "amax",
    "arange",
    "argmax",
    "argsort",
    "baddbmm",
    "bmm",
    "cat",
    "chunk",
    "clamp",
    "cumsum",
    "diagonal",
    "div",
    "einsum",
    "erf",
    "exp",
    "expand",
    "flip",
    "gather",
    "index_add",
    "index_put",
    "index_select",
    "linalg.vector_norm",
    "log_softmax",
    "logsumexp",
    "masked_fill",
    "matmul",
    "mean",
    "mul",
    "nn.functional.avg_pool2d",
    "nn.functional.batch_norm",
    "nn.functional.conv2d",
    "nn.functional.conv_transpose2d",
    "nn.functional.cross_entropy",
    "nn.functional.embedding",
    "nn.functional.gelu",
    "nn.functional.group_norm",
    "nn.functional.instance_norm",
    "nn.functional.kl_div",
    "nn.functional.layer_norm",
    "nn.functional.linear",
    "nn.functional.max_pool2d",
    "nn.functional.one_hot",
    "nn.functional.rms_norm",
    "nn.functional.scaled_dot_product_attention",
    "nn.functional.softplus",
    "nn.functional.unfold",
    "pow",
    "prod",
    "repeat_interleave",
    "roll",
    "scatter_add",
    "softmax",
    "sort",
    "split",
    "std",
    "sum",
    "take_along_dim",
    "topk",
    "tril",
    "unbind",
    "var",
    "where",
]
"""Ops that every model of this field is made of."""


@pytest.mark.parametrize("name", slow_unless(lambda name: QUICK.index(name) % 8 == 0, QUICK))
def test_database_sample(name):
    """The first samples of PyTorch's database; the whole of it is `python -m benchmarks.op_survey`."""
    pytest.importorskip("expecttest", reason="PyTorch's op database imports it; it is in the test extra")
    from benchmarks import op_survey

    outcomes = list(op_survey.survey(name, 2))
    assert sum(o.total for o in outcomes) > 0
    assert [o.failures for o in outcomes if o.failures and not op_survey.gap(o.name)] == []


# ---- The op survey's figures say of how much of PyTorch's database they are


def test_the_survey_says_what_it_does_not_run():
    """Every entry of PyTorch's database is run or named with a reason."""
    names = {entry.name for entry in op_survey.database()}
    run = {entry.name for _, _, entry in op_survey.entries()}
    absent = {name for group in op_list.not_listed(names).values() for name in group}
    assert run | absent == names and not run & absent
    text = (Path(op_survey.__file__).parents[1] / "docs" / "op_survey.md").read_text()
    assert not [name for name in absent if f"`{name}`" not in text]
