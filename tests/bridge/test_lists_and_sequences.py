"""Operations on lists of tensors, packed sequences and simulated quantization, against PyTorch eager."""

import collections

import jax
import jax.numpy as jnp
import pytest
import torch
from eager import Call, compare, randn
from support.markers import slow_unless
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence, unpack_sequence

import bridge

X, SHORT = randn(3, 5, 2), randn(3, 3, 2)
INT = torch.int32


def packed(kind, lengths, sorted_by=False, **settings):
    """The outputs of a recurrent layer over a packed sequence, padded again, and its state."""
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
    makes, takes = Call(pack_and_run, nn.GRU(2, 3)), Call(lambda layer, packed: layer(packed), nn.GRU(2, 3))
    packed = pack_padded_sequence(SHORT, [2, 3, 1], batch_first=True, enforce_sorted=False)
    for module, given in ((makes, SHORT), (takes, packed)):
        report = bridge.verify(module, given)
        assert report.ok, f"\n{report}"
        assert any("data" in r.name for r in report.rows if r.kind == "output")
        fn = bridge.export(module)
        arrays = jax.tree.map(lambda x: jnp.asarray(x.numpy()), given)
        result = jax.jit(lambda params, x, fn=fn: fn(params, {}, x)[0])(fn.params, arrays)[0]
        expected = module(given)[0]
        assert type(result) is type(expected) is PackedSequence
        assert result.batch_sizes.tolist() == expected.batch_sizes.tolist()
        assert result.unsorted_indices.tolist() == expected.unsorted_indices.tolist()


class Span(collections.namedtuple("Span", "start, length")):
    def __new__(cls, start, length=None):
        return super().__new__(cls, start, start.new_ones(start.shape) if length is None else length)


def test_a_named_tuple_with_a_constructor_of_its_own():
    fn = bridge.export(Call(lambda x: Span(x * 2)))
    assert isinstance(fn({}, {}, jnp.ones(2))[0], Span)
    made = jax.jit(lambda x: fn({}, {}, x)[0])(jnp.ones(2))
    assert isinstance(made, Span)
    assert made.length.tolist() == [1, 1]


def test_errors_of_packing():
    fn = bridge.export(Call(lambda x, lengths: pack_padded_sequence(x, lengths, batch_first=True).data))
    with pytest.raises(bridge.BridgeError, match=r"lengths of its sequences are traced.*give them as a list"):
        jax.jit(lambda *given: fn({}, {}, *given)[0])(jnp.ones((2, 3, 1)), jnp.array([3, 2]))
    for lengths in ([2, 3], [3, 0]):
        fn = bridge.export(Call(lambda x, lengths=lengths: pack_padded_sequence(x, lengths, batch_first=True).data))
        with pytest.raises(RuntimeError) as expected:
            fn.module(torch.ones(2, 3, 1))
        with pytest.raises(RuntimeError) as raised:
            fn({}, {}, jnp.ones((2, 3, 1)))
        assert str(raised.value) == str(expected.value)


LISTS = {
    "add": lambda x, y: torch._foreach_add([x, y], [y, x], alpha=2),
    "numbers": lambda x, y: torch._foreach_mul([x, y], [2.0, 3.0]),
    "one number": lambda x, y: torch._foreach_pow(torch._foreach_abs([x, y]), 1.5),
    "one tensor": lambda x, y: torch._foreach_mul([x, y], x.detach()[0, 0, 0]),
    "addcdiv": lambda x, y: torch._foreach_addcdiv([x, y], [y, x], [y * y + 1, x * x + 1], [0.5, 2.0]),
    "maximum": lambda x, y: torch._foreach_maximum([x, y], 0.1),
    "norm": lambda x, y: torch._foreach_norm([x, y], 1),
    "one of them": lambda x, y: [*torch._foreach_exp([x]), x * y],
}


@pytest.mark.parametrize("name", LISTS)
def test_operations_on_lists(name):
    compare(Call(LISTS[name]), [X, randn(3, 5, 2, seed=2)])


def test_operations_on_lists_in_place():
    def step(x, y):
        a, b = x * 1, y * 1
        torch._foreach_addcmul_([a, b], [b.clone(), a.clone()], [x, y], 0.5)
        with torch.no_grad():
            torch._foreach_zero_([a[:1]])
        return a, b

    compare(Call(step), [X, randn(3, 5, 2, seed=2)])


def test_lists_of_other_lengths():
    fn = bridge.export(Call(lambda x: torch._foreach_add([x, x], [x])[0]))
    with pytest.raises(RuntimeError, match="must have the same number"):
        fn({}, {}, jnp.ones(2))


QUANTIZED = {
    "tensor": lambda x: torch.fake_quantize_per_tensor_affine(x, 0.3, 2, -5, 6),
    "tensor, scale of the data": lambda x: torch.fake_quantize_per_tensor_affine(
        x, x.detach().abs().max() / 7, torch.tensor(2, dtype=INT), -5, 6
    ),
    "channel": lambda x: torch.fake_quantize_per_channel_affine(
        x, torch.tensor([0.1, 0.4, 0.3]), torch.tensor([0, 1, 2], dtype=INT), 0, -5, 6
    ),
    "outside": lambda x: torch.fake_quantize_per_tensor_affine(x * 100, 0.3, 0, -128, 127),
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_fake_quantization(name):
    compare(Call(QUANTIZED[name]), [X])


def parts_written(x):
    a, b, c = torch.unsafe_split_with_sizes(x * 2, [2, 1, 2], 1)
    d, e = torch.unsafe_chunk(x[:, 0] * 3, 2, 1)
    return a.add_(b).sigmoid_(), c.mul_(b), d.mul_(2), e


@pytest.mark.parametrize(
    "module",
    [
        Call(lambda cell, x: cell(x[:, 0]), nn.GRUCell(2, 3)),
        Call(lambda cell, x: cell(x[0]), nn.LSTMCell(2, 3)),
        Call(lambda layer, x: layer(x)[0], nn.LSTM(2, 3, bias=False)),
        Call(parts_written),
    ],
    ids=["GRU cell", "LSTM cell", "LSTM without biases", "parts that are no views"],
)
def test_recurrent_layers_and_the_parts_that_they_write_into(module):
    compare(module, [X])
