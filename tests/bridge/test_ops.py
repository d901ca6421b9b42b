"""Operations from PyTorch's database and a survey of them, against PyTorch eager."""

import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from eager import Call, randn, verified
from special_points import BINARY, ROW_VALUES, ROWS, UNARY
from support.markers import slow_or_campaign
from torch import nn

import bridge
from campaigns import op_columns, op_survey

INF = float("inf")
NAN = float("nan")
STEPS = [-3.0, -2.0, -1.0, -0.5, -0.0, 0.0, 0.5, 1.0, 2.0, 3.0, 6.0, 25.0]
TIES = [[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0], [-1.0, -1.0, -2.0, -2.0]]
ZEROS = [[0.0, 0.0, 0.0], [3.0, 0.0, 4.0], [1.0, 2.0, 2.0]]
MEETING = [[0.0, 3.0, 0.0], [1.0, 0.0, 4.0], [0.0, 2.0, 0.0]]
"""Entries that a scatter brings together with equals and with zeros of `ZEROS`."""
IMAGE = [[[[1.0, 1.0, 0.0, 2.0], [1.0, 0.5, 2.0, 2.0], [0.0, 0.0, 3.0, 3.0], [0.0, 0.0, 3.0, 1.0]]]]
LOGITS = [[0.5, -1.0, 2.0], [30.0, -30.0, 0.0], [0.0, 0.0, 0.0], [1.0, 2.0, 3.0]]
CLASSES = torch.tensor([2, 0, -100, 1])


def places_of(reduce, **settings):
    """Returns a case whose scatter brings equal entries and zeros together."""
    places = torch.tensor([[0, 1, 0], [0, 1, 2], [0, 0, 0]])
    return lambda x, y: x.scatter_reduce(0, places, y, reduce, **settings), ZEROS, MEETING


EDGES = {
    "prelu": (lambda x, w: F.prelu(x, w), STEPS, [0.25]),
    "softplus": (lambda x: F.softplus(x, 1.0, 6.0), STEPS),
    "logsigmoid": (F.logsigmoid, [*STEPS, -100.0, 100.0]),
    "clamp tensor": (lambda x, a: x.clamp(a, a + 2), STEPS, [-1.0] * len(STEPS)),
    "fmax": (torch.fmax, [1.0, NAN, 2.0, NAN], [1.0, 2.0, NAN, NAN]),
    "max": (torch.max, TIES),
    "min": (torch.min, TIES),
    "max dim": (lambda x: tuple(torch.max(x, 1)), TIES),
    "min dim": (lambda x: tuple(torch.min(x, 1)), TIES),
    "median": (torch.median, TIES),
    "sort": (lambda x: torch.sort(x, stable=True), TIES),
    "sort down": (lambda x: torch.sort(x, dim=0, descending=True, stable=True), TIES),
    "argsort": (lambda x: torch.argsort(x, stable=True), TIES),
    "topk": (lambda x: tuple(torch.topk(x, 2)), [[1.0, 3.0, 2.0], [0.0, -1.0, 5.0]]),
    "cummax": (lambda x: tuple(torch.cummax(x, 1)), TIES),
    "norm of zeros": (torch.linalg.vector_norm, [0.0, 0.0]),
    "frobenius": (lambda x: torch.linalg.matrix_norm(x - x.detach()), ZEROS),
    "dist": (lambda x: torch.dist(x, x.detach()), ZEROS),
    "cdist": (lambda x, y: torch.cdist(x, y), ZEROS, ZEROS),
    "scalar pow": (lambda x: 0.0**x, [0.0, 1.0, 2.0]),
    "where inf": (lambda x: torch.where(x > 0, x, torch.tensor(-INF)).amax(), STEPS),
    "masked log": (lambda x: torch.where(x > 0, x.clamp(min=1e-6).log(), x * 0), STEPS),
    "logsumexp": (lambda x: x.logsumexp(1), [[-INF, -INF], [-INF, 0.0], [INF, 0.0], [1.0, 1.0]]),
    "softmax": (lambda x: x.softmax(1), [[-INF, 0.0], [100.0, -100.0], [1.0, 1.0]]),
    "log_softmax": (lambda x: x.log_softmax(1), [[-INF, 0.0], [100.0, -100.0], [1.0, 1.0]]),
    "logcumsumexp": (lambda x: x.logcumsumexp(0), [0.0, 1.0, -INF, 2.0]),
    "var of one": (lambda x: x.var(1), [[1.0], [3.0]]),
    "floor_divide": (lambda x: torch.floor_divide(x.detach(), torch.tensor([3.0, -3.0])), [[5.0, 5.0], [-5.0, -5.0]]),
    "div trunc": (lambda x: torch.div(x, 3, rounding_mode="trunc"), [5.0, -5.0, 6.0]),
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
    "margin_ranking": (lambda x: F.margin_ranking_loss(x, torch.zeros(12), torch.ones(12), 1.0), STEPS),
    "hinge_embedding": (lambda x: F.hinge_embedding_loss(x, torch.tensor([1.0, -1.0] * 6)), STEPS),
    "triplet": (lambda x, y: F.triplet_margin_loss(x, y, x.detach()), ZEROS, ZEROS),
    "bce": (lambda x: F.binary_cross_entropy(x, torch.tensor([0.0, 1.0, 1.0, 0.0])), [0.0, 1.0, 0.3, 0.6]),
    "bce logits": (lambda x: F.binary_cross_entropy_with_logits(x, (x > 0).float()), [*STEPS, -100.0, 100.0]),
    "kl_div": (lambda x, y: F.kl_div(x, y, reduction="batchmean"), [[-1.0, -2.0]], [[0.0, 1.0]]),
    "kl_div log": (lambda x, y: F.kl_div(x, y, log_target=True, reduction="sum"), [[-1.0, -2.0]], [[-3.0, -0.1]]),
    "cross_entropy": (lambda x: F.cross_entropy(x, CLASSES), LOGITS),
    "cross_entropy ignored": (lambda x: F.cross_entropy(x[2:3], CLASSES[2:3], reduction="sum"), LOGITS),
    "cross_entropy mean of none": (lambda x: F.cross_entropy(x[2:3].detach(), CLASSES[2:3]), LOGITS),
    "cross_entropy of probabilities": (
        lambda x, y: F.cross_entropy(x, y, label_smoothing=0.2),
        LOGITS,
        [[0.2, 0.3, 0.5], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.3, 0.3, 0.4]],
    ),
    "index_add": (lambda x, y: x.index_add(0, torch.tensor([1, 1, 0]), y, alpha=2), ZEROS, MEETING),
    "scatter amax": places_of("amax"),
    "scatter amin anew": places_of("amin", include_self=False),
    "scatter prod": places_of("prod"),
    "scatter mean anew": places_of("mean", include_self=False),
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


"""Edges whose value or gradient is zero in truth."""


@pytest.mark.parametrize("name", EDGES)
def test_edge(name):
    verified(Edge(*EDGES[name]), tolerance=1e-5)


OF_ELEMENTS = (
    *("abs", "relu", "F.relu6", "F.leaky_relu", "F.elu", "F.selu", "F.celu 2", "F.hardtanh", "F.hardsigmoid"),
    *("F.hardswish", "F.hardshrink", "F.softshrink", "F.threshold", "F.threshold -1", "F.gelu", "F.gelu tanh"),
    *("F.silu", "F.mish", "F.softsign", "F.tanhshrink", "clamp", "clamp min", "clamp max", "pow 0", "pow 2", "pow 3.0"),
    *("pow 0.5", "sqrt", "nan_to_num", "round", "frac", "sign", "sinc"),
)
OF_PAIRS = (
    *("maximum", "minimum", "fmax", "pow", "xlogy", "atan2", "fmod", "remainder", "logaddexp", "lerp", "l1"),
    "huber",
)
OF_ROWS = (
    *("amax", "amin", "prod", "sum", "std", "var", "cumprod", "median", "norm 2", "norm 1", "norm 3", "norm inf"),
    *("normalize", "cosine", "distance"),
)
PAIRS = torch.cartesian_prod(*[torch.tensor([-3.0, -1.0, -0.0, 0.0, 2.0, 5.0])] * 2).T
BOUNDARIES = {
    "elements": ({name: UNARY[name] for name in OF_ELEMENTS}, [torch.tensor(STEPS)]),
    "pairs": ({name: BINARY[name] for name in OF_PAIRS}, [*PAIRS]),
    "rows": ({name: lambda x, name=name: ROWS[name](x, 1) for name in OF_ROWS}, [ROW_VALUES[:6]]),
}


@pytest.mark.parametrize("kind", BOUNDARIES)
def test_boundaries(kind):
    """Tests both sides of boundaries, equal entries and zeros; `test_special_points.py` has more points."""
    functions, values = BOUNDARIES[kind]
    inputs = {name: [x.clone() for x in values] for name in functions}

    def forward(given):
        return {name: functions[name](*xs) for name, xs in given.items()}

    verified(forward, inputs, steps=1, tolerance=1e-5)


REDUCTIONS = {
    "sum of an axis": lambda x: x.sum(2),
    "sum of the last axis": lambda x: x.sum(-1, keepdim=True),
    "mean of two axes": lambda x: x.mean((1, 3), keepdim=True),
    "sum of three axes": lambda x: x.sum((1, 2, 4)),
    "mean of all": lambda x: x.mean(),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_reduction_has_no_dimension_of_size_one(name):
    """XLA's sums on a CPU take up to 20 times as long with them."""
    x = randn(2, 3, 1, 4, 1)
    fn = bridge.export(Call(REDUCTIONS[name]))
    lowered = jax.jit(lambda x: fn({}, {}, x)[0]).lower(x.numpy())
    shapes = re.findall(r"stablehlo.reduce\(.*?\(tensor<([\dx]+)xf32>", lowered.as_text())
    assert "1" not in {size for shape in shapes for size in shape.split("x")}
    torch.testing.assert_close(torch.from_numpy(np.array(lowered.compile()(x.numpy()))), REDUCTIONS[name](x))


# ---- a quick part of the survey

_OF_TORCH = (
    "add addmm amax arange argmax argsort baddbmm bmm cat chunk clamp cumsum diagonal div einsum erf exp expand "
    "flip gather index_add index_put index_select linalg.vector_norm log_softmax logsumexp masked_fill matmul "
    "mean mul pow prod repeat_interleave roll scatter_add softmax sort split std sum take_along_dim topk tril "
    "unbind var where"
)
_OF_FUNCTIONAL = (
    "avg_pool2d batch_norm conv2d conv_transpose2d cross_entropy embedding gelu group_norm instance_norm kl_div "
    "layer_norm linear max_pool2d one_hot rms_norm scaled_dot_product_attention softplus unfold"
)
QUICK = [*_OF_TORCH.split(), *(f"nn.functional.{name}" for name in _OF_FUNCTIONAL.split())]
"""Ops that every model of this field is made of."""


FEW = QUICK[::16]


@pytest.mark.parametrize(
    "name", [*FEW, *slow_or_campaign(QUICK[1::2], [name for name in QUICK[::2] if name not in FEW])]
)
def test_database_sample(name):
    """The first samples of PyTorch's database; the whole of it is `python -m campaigns.op_survey`."""
    pytest.importorskip("expecttest", reason="PyTorch's op database imports it; it is in the test extra")
    outcomes = list(op_survey.survey(name, 2))
    assert sum(o.total for o in outcomes) > 0
    assert [o.failures for o in outcomes if o.failures and not op_survey.gap(o)] == []


@pytest.mark.parametrize(
    ("column", "names"),
    [
        ("bfloat16", "addmm nn.functional.layer_norm nn.functional.gelu cumsum"),
        ("complex64", "addmm abs fft.fft linalg.solve pinverse"),
        ("forward mode", "addmm nn.functional.layer_norm amax linalg.solve"),
    ],
)
def test_other_columns_of_the_survey(column, names):
    pytest.importorskip("expecttest", reason="PyTorch's op database imports it; it is in the test extra")
    outcomes = [o for name in names.split() for o in op_survey.survey(name, 1, [column])]
    assert {o.name: o.failures or o.verdict for o in outcomes} == {o.name: "right" for o in outcomes}


@pytest.mark.parametrize("column", ["bfloat16", "complex64", "forward mode"])
def test_the_survey_finds_a_wrong_derivative(column):
    pytest.importorskip("expecttest", reason="PyTorch's op database imports it; it is in the test extra")

    def other(x):  # has other numbers in PyTorch than in the bridge
        return x * (2.0 if type(x) in (torch.Tensor, nn.Parameter) else 2.1)

    numbers = torch.randn(3, dtype=getattr(torch, column, torch.float32), requires_grad=True)
    why, _ = op_columns.reason(column, other, (numbers,), {}, lambda out: out)
    assert why is not None and "is off by" in why


@pytest.mark.slow
def test_torchax_in_the_survey():
    """In a process of its own, since importing torchax changes PyTorch."""
    pytest.importorskip("expecttest", reason="PyTorch's op database imports it; it is in the test extra")
    command = [sys.executable, "-m", "campaigns.op_survey", "--columns", "torchax", "--samples-per-op", "1", "--op"]
    root = Path(op_survey.__file__).parents[1]
    run = subprocess.run([*command, "addmm"], check=True, capture_output=True, text=True, cwd=root)
    assert run.stdout.splitlines()[-1] == "torchax ('right', 2)"


# ---- The op survey covers every entry of PyTorch's database


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the page is of PyTorch 2.13")
def test_the_survey_has_every_entry():
    text = (Path(op_survey.__file__).parents[1] / "docs" / "dev" / "op_survey.md").read_text()
    run = re.findall(r"^\| `([\w.-]+)` \|", text.partition("## Every op")[2], re.MULTILINE)
    assert set(run) == {op_survey.full_name(entry) for entry in op_survey.database()}
