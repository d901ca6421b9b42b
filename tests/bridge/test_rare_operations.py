"""Operations that are seldom called: lists of tensors, packed sequences, quantization, and many more."""

import collections
import copy
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from eager import Call, array, close, compare, in_jax, raises, randn, same, verified
from support.markers import slow_unless
from torch import nn
from torch.ao import quantization
from torch.nn.utils.parametrizations import orthogonal
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence, unpack_sequence

import bridge

MASKED = randn(3, 4).masked_fill(torch.tensor([[1, 1, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]]).bool(), float("-inf"))
IMAGE = randn(1, 2, 6, 6)
SQUARE = randn(4, 4, seed=0)
LABELS = torch.tensor([[1, 1, 2], [3, 4, 1], [2, 2, 2]])
ROWS = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, -2.0], [-2.0, float("nan")], [0.0, float("-inf")], [3.0, 3.0]])
BAGS = torch.tensor([1, 2, 2, 2, 4, 3, 5, 5, 1, 2, 3, 0, 4, 4]), torch.tensor([0, 2, 3, 5, 5, 8, 12])
CORNER = torch.tensor([[0.0, 1.0, 1.0, -1.0], [2.0, 1.0, 0.0, 3.0], [0.5, 0.5, -0.5, float("nan")]])


SPEECH = randn(7, 3, 5)


def ctc(labels, *lengths, **settings):
    return lambda x: F.ctc_loss(x.log_softmax(-1), labels, *lengths, **settings), SPEECH


def ctc_of_traced_lengths(x):
    some = (x[0, :, 0] > 9).long()
    inputs = some + torch.tensor([7, 5, 6])
    labels = some + torch.tensor([3, 2, 1])
    x = x.log_softmax(-1)
    in_a_row = F.ctc_loss(x, LABELS.ravel()[:6], inputs, labels)
    one = F.ctc_loss(x[:, 0], LABELS[0], inputs[0], labels[0])
    return F.ctc_loss(x, LABELS, inputs, labels, reduction="none"), in_a_row, one


def antialiased(x):
    bilinear = {"mode": "bilinear", "antialias": True}
    bicubic = {"mode": "bicubic", "antialias": True}
    linear = F.interpolate(x, (3, 11), **bilinear), F.interpolate(x, (2, 5), align_corners=True, **bilinear)
    return *linear, F.interpolate(x, (4, 3), **bicubic), F.interpolate(x, scale_factor=(0.6, 1.3), **bicubic)


def functions_of_booleans(x):
    special = torch.special
    one = special.bessel_j0, special.bessel_y0, special.bessel_j1, special.modified_bessel_k0, special.ndtri
    return *(f(x) for f in one), special.chebyshev_polynomial_u(x, x), special.hermite_polynomial_h(x, x)


SYMMETRIC = randn(4, 4).tril() + randn(4, 4).tril().mT + 4 * torch.eye(4)
SIGNS = torch.tensor([[1, -1, 1, -1], [-1, 1, -1, 1], [-1, -1, 1, 1]])
OTHER = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 2.0, 1.0, 2.0], [0.5, -0.5, 1.5, 0.5]])
MARGINS = {
    "multi margin, one row": lambda x, y: F.multi_margin_loss(x[0], torch.tensor(0), 1, 2.0, reduction="none"),
    "margin ranking": lambda x, y: F.margin_ranking_loss(x, y, SIGNS, margin=1.0, reduction="none"),
    "hinge embedding": lambda x, y: F.hinge_embedding_loss(x, SIGNS, reduction="none"),
    "multilabel margin": lambda x, y: F.multilabel_margin_loss(x, torch.tensor([[0, 2, -1, 1]] * 3), reduction="none"),
    "triplet margin": lambda x, y: F.triplet_margin_loss(x[:2], y[:2], x[:2] * 2, reduction="none"),
    "cosine embedding": lambda x, y: F.cosine_embedding_loss(x, y, SIGNS[:, 0], margin=0.0, reduction="none"),
}
"""Margins, some of which `CORNER` and `OTHER` meet exactly."""


CASES = {
    "pdist": (F.pdist, randn(5, 3)),
    "pdist, p=inf": (lambda x: F.pdist(x, float("inf")), randn(5, 3)),
    "pdist, equal rows": (F.pdist, randn(1, 3).expand(3, 3).clone()),
    "safe softmax": (lambda x: torch.ops.aten._safe_softmax(x, -1), MASKED),
    "pinv, wide": (torch.linalg.pinv, randn(3, 5)),
    "pinv, rtol": (lambda x: torch.linalg.pinv(x, rtol=0.5), randn(5, 3)),
    "pinv, atol": (lambda x: torch.linalg.pinv(x, atol=1.5), randn(5, 3)),
    "pinv, atol and rtol": (lambda x: torch.linalg.pinv(x, atol=0.0, rtol=0.5), randn(5, 3)),
    "pinverse": (torch.pinverse, randn(5, 3)),
    "pinv, Hermitian": (lambda x: torch.linalg.pinv(x, hermitian=True), SYMMETRIC),
    "functions of booleans": (functions_of_booleans, torch.tensor([True, False])),
    "ctc": ctc(LABELS, (7, 5, 6), (3, 2, 0), reduction="none"),
    "ctc, traced lengths": (ctc_of_traced_lengths, SPEECH),
    "ctc, impossible": ctc(LABELS, (3, 5, 6), (3, 2, 1), zero_infinity=True),
    "ctc, labels in a row, blank last": ctc(LABELS.ravel()[:6] - 1, (7, 5, 6), (3, 2, 1), blank=4),
    "ctc of what is no log_softmax": (lambda x: F.ctc_loss(x, LABELS, (7, 5, 6), (3, 2, 1)), -randn(7, 3, 5).abs()),
    "max_unpool1d": (lambda x: F.max_unpool1d(*F.max_pool1d(x, 2, return_indices=True), 2), randn(2, 2, 6)),
    "max_unpool2d": (
        lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2, output_size=(7, 6)),
        randn(2, 2, 7, 6),
    ),
    "max_unpool3d": (lambda x: F.max_unpool3d(*F.max_pool3d(x, 2, return_indices=True), 2), randn(1, 2, 2, 4, 4)),
    "antialiased": (antialiased, IMAGE),
    "frexp": (torch.frexp, torch.tensor([3.0, -0.3, 0.0, 1e30, float("inf")])),
    "nonzero_static": (lambda x: torch.nonzero_static(x > 0, size=5), randn(2, 3)),
    "complex acosh": (torch.acosh, torch.tensor([0.5 + 0.7j, -0.5 + 0.7j, -0.5 - 0.7j, 2 - 1j])),
    "eigenvalues": (lambda x: torch.linalg.eigvals(x + torch.diag(torch.arange(4.0) * 5)).abs().sort()[0], randn(4, 4)),
    "likelihood of a normal": (lambda x: F.gaussian_nll_loss(x, x * 2, x.square(), full=True), randn(3, 4)),
    **{name: (function, CORNER.nan_to_num(0.5), OTHER) for name, function in MARGINS.items()},
    **{f"{name}, nan": (function, CORNER, OTHER) for name, function in MARGINS.items()},
}


@pytest.mark.parametrize("name", CASES)
def test_operation(name):
    function, *inputs = CASES[name]
    compare(function, inputs)


SMALLEST = {
    torch.uint8: [3, 254, 7, 0, 5, 0],
    torch.int8: [-128, 3, -5, 127, 0, 1],
    torch.int32: [-(2**31), 3, -5, 2**31 - 1, 0, 1],
    torch.float32: [float("nan"), 3.0, float("-inf"), float("inf"), 0.0, 1.0],
}


@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize("dtype", SMALLEST, ids=str)
def test_topk(dtype, largest):
    def function(x):
        of_all = [x.topk(k, largest=largest)[0] for k in (1, 3, 6)]
        of_columns = [x.view(3, 2).topk(k, 0, largest=largest)[0] for k in (1, 2, 3)]
        return *of_all, *of_columns, of_all[0] + x[0].topk(1, largest=largest)[0]

    compare(function, [torch.tensor(SMALLEST[dtype], dtype=dtype)])


def test_ldexp_by_negative_integers():
    """Before PyTorch 2.15, its formula took the power of two in integers, where it is 0."""
    exponents = torch.tensor([2, 0, -1, -2])

    def function(x):
        return torch.ldexp(x, exponents).sum()

    x = torch.ones(4, requires_grad=True)
    function(x).backward()
    assert jax.grad(lambda x: in_jax(function, x))(jnp.ones(4)).tolist() == [4, 1, 0.5, 0.25]
    assert x.grad is not None and x.grad.tolist() in ([4, 1, 0, 0], [4, 1, 0.5, 0.25])


def parts_of_what_is_written(x):
    y = x * 1
    first, second = y.split(2)
    y.mul_(3)
    return first * second


def test_parts_are_read_after_their_base_was_written():
    x = randn(4)
    with pytest.raises(RuntimeError, match="returns multiple views"):
        parts_of_what_is_written(x.clone().requires_grad_())
    out, pull = jax.vjp(lambda x: in_jax(parts_of_what_is_written, x), array(x))
    np.testing.assert_allclose(out, parts_of_what_is_written(x))
    np.testing.assert_allclose(pull(jnp.ones(2))[0], 9 * x.roll(2))


def test_numbers_beyond_float8_e4m3fn():
    """The type has no infinity: PyTorch gives the largest number. The gradient passes."""
    x = torch.tensor([448.0, 464.0, 465.0, 1000.0, -5000.0, float("inf"), float("nan"), 0.3], requires_grad=True)
    out = x.to(torch.float8_e4m3fn).float()
    out[:5].sum().backward()
    call = functools.partial(in_jax, lambda x: x.to(torch.float8_e4m3fn).float())
    ours, back = jax.vjp(call, array(x.detach()))
    np.testing.assert_array_equal(ours, out.detach().numpy())
    np.testing.assert_array_equal(back(jnp.array([1.0] * 5 + [0.0] * 3))[0], x.grad.numpy())


def scattered(x):
    index = torch.tensor([[0, 0], [2, 1]])
    return x.scatter(1, index, 2.5, reduce="add"), x.clone().scatter_(1, index, 3, reduce="multiply")


def parts_of_nan(z):
    return torch.nan_to_num(z, posinf=7.0)


INFINITE = torch.tensor([1 + 2j, complex("nan"), complex("inf"), complex(2, float("-inf"))])


@pytest.mark.parametrize(("function", "x"), [(scattered, randn(2, 3)), (parts_of_nan, INFINITE)])
def test_operation_without_a_derivative(function, x):
    same(function, x)


LABELS_OF_ROWS = torch.tensor([0, 2, 1, 2])


def seeded_slopes(x, y):
    torch.manual_seed(0)
    return F.rrelu(x, training=True)


REFUSED = {
    "as_strided_scatter": (
        lambda x, y: torch.as_strided_scatter(x, torch.zeros(2), (2,), (1,), 0),
        "as_strided_scatter.*own gradient of it is wrong",
    ),
    "lengths": (
        lambda x, y: pack_padded_sequence(x, y, batch_first=True).data,
        r'lengths of packed sequences are traced.*known_inputs=r"1".*give them as a list',
    ),
    "resize_": (lambda x, y: (x * 2).resize_(5, 4), "it makes a tensor larger; make one of the new size"),
    "bincount": (lambda x, y: torch.bincount(y), "has a length that depends on data.*minlength=n"),
    "lstsq": (lambda x, y: torch.linalg.lstsq(x, x)[0], r"only where the matrix has full rank.*pinv\(A\) @ B"),
    "rrelu, seeded": (seeded_slopes, "a seeded generator gives slopes to negative entries only"),
}


@pytest.mark.parametrize(("function", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(function, message):
    raises(message, function, SQUARE, LABELS_OF_ROWS, rng=jax.random.key(0))


ZERO = torch.zeros((), dtype=torch.int32)
ERRORS = {
    "lengths that rise": lambda x: pack_padded_sequence(x[:2, :3, None], [2, 3], batch_first=True).data,
    "a length of zero": lambda x: pack_padded_sequence(x[:2, :3, None], [3, 0], batch_first=True).data,
    "statistics that require grad": lambda x: F.batch_norm(x, torch.ones(4, requires_grad=True), torch.ones(4)),
}


@pytest.mark.parametrize("name", ERRORS)
def test_pytorch_s_own_error(name):
    with pytest.raises(RuntimeError) as expected:
        ERRORS[name](SQUARE)
    raises(re.escape(str(expected.value)), ERRORS[name], SQUARE, error=RuntimeError)


@pytest.mark.parametrize("x64", [False, True])
def test_numbers_that_were_clamped_are_counted(x64):
    with jax.enable_x64(x64):
        counts = in_jax(lambda y: torch.bincount(y.clamp(0, 2), minlength=3), LABELS_OF_ROWS, jit=True)
    assert counts.tolist() == [1, 1, 2]


def test_a_mask_that_is_multiplied_hides_what_it_masks():
    """XLA makes a selection of the product with a mask, so infinity times False is 0."""

    def loss(x):
        p = x.softmax(-1)
        return F.kl_div(x.log_softmax(-1), p.roll(1, 0) * (p > 0.2), reduction="batchmean")

    leaf = SQUARE.clone().requires_grad_()
    loss(leaf).backward()
    gradient = jax.jit(jax.grad(lambda x: in_jax(loss, x)))(SQUARE.numpy())
    assert leaf.grad is not None and leaf.grad.isnan().any() and np.isfinite(gradient).all()


# ---- Operations on lists of tensors, packed sequences and simulated quantization, against PyTorch eager

X = randn(3, 5, 2)
SHORT = randn(3, 3, 2)
INT = torch.int32
IDS = torch.tensor([[0, 1, 1], [2, 1, 2]])


def packed(kind, lengths, sorted_by=False, **settings):
    """Returns the outputs of a recurrent layer over a packed sequence, padded again, and its state."""
    layer = kind(2, 3, batch_first=True, **settings)

    def run(layer, x):
        out, state = layer(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=sorted_by))
        padded, again = pad_packed_sequence(out, batch_first=True, padding_value=-1.0, total_length=4)
        return padded, *(state if kind is nn.LSTM else (state,)), padded.sum(1) / again[:, None]

    return Call(run, layer)


SEQUENCES = {
    "LSTM": lambda: packed(nn.LSTM, [2, 3, 1]),
    "LSTM, sorted": lambda: packed(nn.LSTM, torch.tensor([3, 3, 1]), True, bidirectional=True),
    "GRU": lambda: packed(nn.GRU, torch.tensor([1, 3, 2])),
    "RNN": lambda: packed(nn.RNN, [3, 2, 1], True, num_layers=2, bidirectional=True),
    "one layer": lambda: packed(nn.RNN, [1, 2, 1], nonlinearity="relu"),
    "projected": lambda: packed(nn.LSTM, [2, 3, 1], proj_size=2),
    "a list of sequences": lambda: Call(
        lambda x: unpack_sequence(pack_sequence([x[0, :3] * 2, x[1, :1], x[2, :2]], enforce_sorted=False))
    ),
    "time first": lambda: Call(lambda x: pad_packed_sequence(pack_padded_sequence(x, [3, 2, 1], False))[0]),
}


@pytest.mark.parametrize("name", slow_unless(lambda name: name in ("one layer", "a list of sequences"), SEQUENCES))
def test_packed_sequences(name):
    torch.manual_seed(0)
    compare(SEQUENCES[name](), [SHORT])


def pack_and_run(layer, x):
    return layer(pack_padded_sequence(x, [2, 3, 1], batch_first=True, enforce_sorted=False))


def test_a_packed_sequence_is_a_result_and_an_argument():
    torch.manual_seed(0)
    makes = Call(pack_and_run, nn.GRU(2, 3))
    takes = Call(lambda layer, packed: layer(packed), nn.GRU(2, 3))
    packed = pack_padded_sequence(SHORT, [2, 3, 1], batch_first=True, enforce_sorted=False)
    for module, given in ((makes, SHORT), (takes, packed)):
        report = bridge.verify(module, given)
        assert report.ok, f"\n{report}"
        assert any("data" in r.name for r in report.rows if r.kind == "output")
        fn = bridge.export(module)
        arrays = jax.tree.map(lambda x: array(x), given)
        result = jax.jit(lambda params, x, fn=fn: fn(params, {}, x)[0])(fn.params, arrays)[0]
        expected = module(given)[0]
        assert type(result) is type(expected) is PackedSequence
        assert result.batch_sizes.tolist() == expected.batch_sizes.tolist()
        assert result.unsorted_indices.tolist() == expected.unsorted_indices.tolist()


class Span(collections.namedtuple("Span", "start, length")):
    def __new__(cls, start, length=None):
        return super().__new__(cls, start, start.new_ones(start.shape) if length is None else length)


def test_a_named_tuple_with_a_constructor_of_its_own():
    for jit in (False, True):
        made = in_jax(lambda x: Span(x * 2), jnp.ones(2), jit=jit)
        assert isinstance(made, Span) and made.length.tolist() == [1, 1]


def quantized(x):
    whole = torch.fake_quantize_per_tensor_affine
    channels = torch.fake_quantize_per_channel_affine
    zero = torch.tensor(2, dtype=INT)
    of_channels = torch.tensor([0, 1, 2], dtype=INT)
    return (
        whole(x, 0.3, 2, -5, 6),
        whole(x, x.detach().abs().max() / 7, zero, -5, 6),
        whole(x * 100, 0.3, 0, -128, 127),
        channels(x, torch.tensor([0.1, 0.4, 0.3]), of_channels, 0, -5, 6),
    )


def parts_written(x):
    a, b, c = torch.unsafe_split_with_sizes(x * 2, [2, 1, 2], 1)
    d, e = torch.unsafe_chunk(x[:, 0] * 3, 2, 1)
    return a.add_(b).sigmoid_(), c.mul_(b), d.mul_(2), e


OTHERS = {
    "fake quantization": (quantized, X),
    "GRU cell": (Call(lambda cell, x: cell(x[:, 0]), nn.GRUCell(2, 3)), X),
    "LSTM cell": (Call(lambda cell, x: cell(x[0]), nn.LSTMCell(2, 3)), X),
    "LSTM without biases": (Call(lambda layer, x: layer(x)[0], nn.LSTM(2, 3, bias=False)), X),
    "parts that are no views": (parts_written, X),
    "embedding by frequency": (nn.Embedding(5, 3, scale_grad_by_freq=True), IDS),
    "embedding by frequency, padding": (nn.Embedding(5, 3, padding_idx=2, scale_grad_by_freq=True), IDS),
}


@pytest.mark.parametrize("name", OTHERS)
def test_lists_quantization_and_layers(name):
    module, *inputs = OTHERS[name]
    compare(module, inputs)


# ---- Operations that were refused, or gave results another dtype, `requires_grad` or warning


def volume(x):
    return x.view(1, 1, 4, 2, 2).repeat(2, 2, 2, 3, 3)


OF_ROWS_AND_LABELS = {
    "mean": lambda x, y: (x.half().mean(0, dtype=torch.float32), x.mean(dtype=x.dtype), y.mean(dtype=x.dtype)),
    "lu": lambda x, y: (*torch.linalg.lu(x), *torch.linalg.lu(x[:2])[1:], *torch.linalg.lu(torch.stack([x, x + 1]))),
    "lu_unpack": lambda x, y: torch.lu_unpack(*torch.linalg.lu_factor(x[:, :3])),
    "householder_product": lambda x, y: torch.linalg.householder_product(torch.stack([x[:, :3]] * 2), x[2:, :2]),
    "adaptive_avg_pool": lambda x, y: (
        F.adaptive_avg_pool2d(x.repeat(2, 3, 2, 2)[..., :7], (3, 5)),
        F.adaptive_avg_pool1d(x, 3),
        F.adaptive_avg_pool3d(volume(x), (3, 1, 2)),
        F.adaptive_avg_pool2d(x[None], (2, 2)),
    ),
    "order": lambda x, y: (*torch.kthvalue(x, 2, 0), torch.kthvalue(y + x.argmax(1) * 3, 2, keepdim=True)[0]),
    "bucketize": lambda x, y: (
        torch.bucketize(y, torch.tensor([0, 1])),
        torch.bucketize(x, x[0].detach().sort().values, right=True),
    ),
    "cumprod": lambda x, y: (x.cumprod(1), (y % 3).cumprod(0), (y > 0).cumprod(0), x.half().cumprod(0).detach()),
    "integers divided": lambda x, y: (
        torch.div(y + 2**24 + 1, 1, rounding_mode="trunc"),
        torch.div(-y * 0 - 7, y + 2, rounding_mode="trunc"),
        torch.div(-7, y + 2, rounding_mode="floor"),
        torch.div(y > 1, y + 1, rounding_mode="trunc"),
        torch.div(x, 0.3, rounding_mode="trunc") * x,
    ),
    "bincount": lambda x, y: (
        torch.bincount(y.clamp(0, 2), minlength=3),
        torch.bincount(x.argmax(1), minlength=4) * x,
        torch.bincount(y.clamp(0, 2), x[0].detach(), minlength=5),
        torch.bincount(y % 3, y, minlength=3),
    ),
}


@pytest.mark.filterwarnings("error:Explicitly requested dtype")
@pytest.mark.parametrize("name", slow_unless({"mean", "integers divided", "bincount"}.__contains__, OF_ROWS_AND_LABELS))
def test_values_and_gradients(name):
    verified(OF_ROWS_AND_LABELS[name], SQUARE, LABELS_OF_ROWS)


def test_random_slopes_of_a_call_that_asks_for_the_seed():
    """Torchax asks for it in the first call of a process that needs one of its operations."""

    def forward(x):
        torch.initial_seed()
        return F.rrelu(x, training=True)

    verified(forward, SQUARE)


@pytest.mark.slow
def test_random_slopes():
    def forward(x):
        return F.rrelu(x, training=True) + F.rrelu(x * 2, 0.1, 0.3, training=True, inplace=True) + F.rrelu(x)

    verified(forward, SQUARE)
    slopes = in_jax(nn.RReLU(0.2, 0.9), -jnp.ones(4000), rng=jax.random.key(0), train=True)
    np.testing.assert_allclose([-slopes.max(), -slopes.min(), -slopes.mean()], [0.2, 0.9, 0.55], atol=0.01)


@pytest.mark.slow
def test_orthogonal_by_reflections():
    torch.manual_seed(0)
    compare(orthogonal(nn.Linear(4, 3), orthogonal_map="householder"), [SQUARE])


# ---- the adaptive softmax looks up which targets are in which cluster


def test_an_adaptive_softmax():
    loss = nn.AdaptiveLogSoftmaxWithLoss(8, 20, [4, 10])
    own = nn.AdaptiveLogSoftmaxWithLoss.forward
    compare(Call(lambda m, x, y: tuple(m(x, y)), loss), [randn(4, 8), torch.tensor([0, 5, 13, 19])])
    compare(Call(lambda m, x, y: m(x, y).loss, loss), [randn(8), torch.tensor(13)])
    assert nn.AdaptiveLogSoftmaxWithLoss.forward is own
    with pytest.raises(RuntimeError, match="same size in the batch dimension"):
        in_jax(loss, randn(4, 8), torch.tensor([1, 2]))


@pytest.mark.parametrize("mask", [torch.ones(3, 4) > 0, torch.tensor([True, False, True, True])])
def test_a_source_that_is_too_small_for_a_constant_mask(mask):
    source = randn(8)
    with pytest.raises(RuntimeError, match="elements of source < number of ones in mask"):
        in_jax(lambda x, y: x.masked_scatter(mask, y), randn(3, 4), source)
    compare(lambda x, y: x.masked_scatter(mask[:2], y) if mask.dim() > 1 else x, [randn(2, 4), source])


# ---- quantisation-aware training: observers, and fake quantisation by what they saw


def trained_for_quantization(backend):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5)).train()
    module.qconfig = quantization.get_default_qat_qconfig(backend)  # pyright: ignore[reportArgumentType]
    return quantization.prepare_qat(module)


IMAGES = randn(2, 3, 4, 4)
STATES = {
    "observing": (),
    "observer off": (quantization.disable_observer,),
    "quantization off": (quantization.disable_fake_quant,),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("backend", slow_unless("fbgemm".__eq__, ["fbgemm", "qnnpack"]))
@pytest.mark.parametrize("state", STATES)
def test_quantization_aware_training(backend, state):
    module = trained_for_quantization(backend)
    if backend == "fbgemm":
        raises("Remedy: call the module once before export", module, IMAGES)
    module(IMAGES)
    for change in STATES[state]:
        module.apply(change)
    verified(module, IMAGES)


@pytest.mark.parametrize("x", [randn(6) * 1e-4, torch.zeros(6), randn(6).abs(), -randn(6).abs()])
@pytest.mark.parametrize(
    "scheme",
    slow_unless(lambda it: it is torch.per_tensor_affine, [torch.per_tensor_affine, torch.per_tensor_symmetric]),
)
def test_a_scale_by_what_was_observed(x, scheme):
    module = quantization.FusedMovingAvgObsFakeQuantize(qscheme=scheme)
    expected = copy.deepcopy(module)(x)
    fn = bridge.export(module)
    out, _ = fn(fn.params, fn.buffers, x.numpy())
    close(out, expected, 1e-6)
    verified(module, x, steps=1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.slow
def test_fake_quantization_whose_flags_are_constants():
    module = quantization.FakeQuantize()
    module(X)
    module.disable_observer()
    raises(r'static=r"fake_quant_enabled"|static=r"observer_enabled"', module, X)
    verified(module, X, static=".*_enabled")


@pytest.mark.parametrize("bins, low, high", [(4, 0, 4), (11, -0.784, 1.369), (7, 0.1, 2.9)])
def test_a_histogram_of_values_at_the_edges(bins, low, high):
    edges = torch.cat([torch.linspace(low, high, bins + 1), torch.linspace(low, high, 3 * bins + 1)])
    values = torch.cat([edges, torch.tensor([low - 1, high + 1, float("nan")])])
    (counts,) = jax.jit(lambda x: bridge.export(Call(lambda x: torch.histc(x, bins, low, high)))({}, {}, x)[:1])(
        array(values)
    )
    assert counts.tolist() == torch.histc(values, bins, low, high).tolist()
