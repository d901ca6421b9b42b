"""Memory as PyTorch has it: strides, offsets, views, and several state tensors over one storage."""

import contextlib
import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from eager import Call, compare, randn, verified
from support.markers import slow_unless
from torch import nn

import bridge

# ---- Memory as PyTorch has it: strides, offsets, and several state tensors over one storage

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


class Strided(nn.Module):
    """`as_strided` counts in memory, whatever the layout of the tensor it is called on."""

    def __init__(self, make):
        super().__init__()
        self.make = make
        self.w = nn.Parameter(randn(4, 6))

    def forward(self, x):
        h = self.make(x @ self.w)
        return h.as_strided((2, 3), (2, 1), 1).sin().sum() + h.sum()


class StridedWrite(Strided):
    def forward(self, x):
        h = self.make(x @ self.w)
        h.as_strided((2, 3), (3, 1), 2).mul_(3)
        return (h * torch.arange(h.numel()).view(h.shape)).sum()


MAKES = {
    "contiguous": lambda h: h * 1,
    "transposed clone": lambda h: h.t().clone(),
    "transposed result": lambda h: h.t() * 2,
    "channels last": lambda h: (h * 1).view(1, 3, 2, 3).to(memory_format=torch.channels_last),
    "channels last clone": lambda h: h.view(1, 3, 2, 3).clone(memory_format=torch.channels_last),
    "slice": lambda h: (h * 1)[1:],
    "slice of transposed": lambda h: h.t().clone()[1:, 1:],
}


class ViewParameter(nn.Module):
    """A parameter that is a view of a larger tensor, read through `.data` that was kept."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(randn(6, 4)[1:5])
        self.kept = self.w.data[1:, :2]
        self.flipped = self.w.data.t()

    def forward(self, x):
        with torch.no_grad():
            self.w.mul_(2)
        return x @ self.w + self.kept.sum() + (x @ self.flipped)


class TransposedParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(randn(4, 3).t())
        self.kept = self.w.data[1:, :2]

    def forward(self, x):
        return (x * self.w).sum() + self.kept[:, 0].sum() * 3 + self.kept[1, 1]


class Flat(nn.Module):
    """Two parameters cut from one flat tensor: neither is the other."""

    def __init__(self):
        super().__init__()
        flat = randn(32)
        self.a = nn.Parameter(flat[:16].view(4, 4))
        self.b = nn.Parameter(flat[16:].view(4, 4))
        self.kept = [self.a.data[1], self.b.data[2], self.a.detach().t()]

    def forward(self, x):
        return torch.tanh(x @ self.a) @ self.b + self.kept[0] * 2 - self.kept[1] + x @ self.kept[2]


class BufferOfBuffer(nn.Module):
    """A buffer that views another one, written through either."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(randn(4))
        self.base = nn.Buffer(randn(4, 4))
        self.row = nn.Buffer(self.base[1])
        self.column = nn.Buffer(self.base.t()[2])

    def forward(self, x):
        self.base.mul_(2)
        y = x * self.row
        self.row.add_(x[0].detach())
        y = y + self.base.sum() + self.column
        self.column += 1
        return (y + x @ self.base) * self.scale


class FrozenInTrained(nn.Module):
    """A buffer over a part of a parameter's memory."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(randn(4, 4))
        self.seen = nn.Buffer(self.w.data[2])

    def forward(self, x):
        with torch.no_grad():
            self.w[2].add_(1)
        return x @ self.w + self.seen


MODULES = {
    **{f"read, {name}": (lambda make=make: Strided(make)) for name, make in MAKES.items()},
    **{f"write, {name}": (lambda make=make: StridedWrite(make)) for name, make in MAKES.items()},
    "view parameter": ViewParameter,
    "transposed parameter": TransposedParameter,
    "flat": Flat,
    "buffer of buffer": BufferOfBuffer,
    "buffer over a parameter": FrozenInTrained,
}


@pytest.mark.parametrize("name", MODULES)
def test_memory(name):
    """Two calls; `deepcopy` keeps shared memory, but not the tie to memory kept outside of parameters."""
    fn = bridge.export(MODULES[name]())
    reference = MODULES[name]()
    params, buffers = fn.params, fn.buffers
    for _ in range(2):
        for p in reference.parameters():
            p.grad = None
        out = reference(X)
        (out * out).sum().backward()

        def loss(params, buffers=buffers):
            result = fn.run(params, buffers, jnp.asarray(X.numpy()))
            return jnp.sum(result.outputs**2), result

        gradients, result = jax.jit(jax.grad(loss, has_aux=True))(params)
        close(result.outputs, out.detach())
        for n, p in reference.named_parameters():
            close(gradients[n], p.grad)
            close(result.params[n], p.detach())
        for n, b in reference.named_buffers():
            close(result.buffers[n], b)
        params, buffers = result.params, result.buffers


def close(results, expected):
    expected = expected.numpy()
    np.testing.assert_allclose(results, expected, rtol=0, atol=2e-5 * max(np.abs(expected).max(), 1e-3))


class Overlapping(nn.Module):
    def __init__(self):
        super().__init__()
        flat = randn(20)
        self.a = nn.Parameter(flat[:16].view(4, 4))
        self.b = nn.Parameter(flat[4:].view(4, 4))

    def forward(self, x):
        return x @ self.a @ self.b


def test_parameters_that_overlap_are_refused():
    """One step of any optimizer writes the shared elements twice; two arrays cannot say that."""
    with pytest.raises(bridge.BridgeError, match="parameters a and b share memory"):
        bridge.export(Overlapping())


def test_a_buffer_given_apart_from_the_one_it_views():
    """Both names are one memory: what is given for the view is written into it, as `load_state_dict` does."""
    fn, reference = bridge.export(BufferOfBuffer()), BufferOfBuffer()
    other = fn.buffers | {"row": fn.buffers["row"] + 1}
    out, _ = fn(fn.params, other, X.numpy())
    state = {name: torch.from_numpy(np.array(array)) for name, array in other.items()}
    with torch.no_grad():
        reference.base.copy_(state["base"])
        reference.row.copy_(state["row"])
        reference.column.copy_(state["column"])
    # `column` crosses `row`, and is given with the old value there.
    close(out, reference(X).detach())


# ---- writes where elements share memory


def one_of_several(x):
    y = x * 2
    y.expand(1, 3, 4)[0, 1].add_(1)
    y[:1].expand(3, 4)[2].mul_(x[0])
    y.expand(3, 4).mul_(x)
    y.unfold(1, 2, 1)[:, 0].add_(x[:, :2])
    y.as_strided((2, 3), (4, 0))[:, 1].exp_()
    return y


def cleared(x):
    y, z = x * 2, x * 3
    y[0].zero_()
    z.zero_()
    return y + z


@pytest.mark.parametrize("call", [one_of_several, cleared])
def test_each_element_is_written_once(call):
    compare(Call(call), [X])


SHARED = {
    "add": lambda y: y.expand(2, 3, 4).add_(1),
    "copy": lambda y: y[0].expand(3, 4).copy_(torch.ones(3, 4)),
    "item": lambda y: y[:1].expand(3, 4).__setitem__((slice(None), 0), 1.0),
    "scatter": lambda y: y.expand(2, 3, 4).scatter_(0, torch.zeros(1, 3, 4, dtype=torch.long), 1.0),
    "constant": lambda y: torch.zeros(4).expand(3, 4).add_(y),
    "strided": lambda y: y.as_strided((3, 2), (0, 1)).mul_(2),
}


@pytest.mark.parametrize("name", SHARED)
def test_elements_that_share_memory_are_refused_as_in_pytorch(name):
    """Code may catch the error, as it may there."""

    def call(x):
        y = x * 2
        with pytest.raises(RuntimeError, match="more than one element of the written-to tensor") as caught:
            SHARED[name](y)
        assert type(caught.value) is RuntimeError
        return y

    compare(Call(call), [X])


UNDEFINED = {
    "unfold": lambda y: y.unfold(1, 2, 1).add_(1),
    "as_strided": lambda y: y.as_strided((3, 2), (1, 1)).mul_(2),
    "fill": lambda y: y.expand(2, 3, 4).fill_(7.0),
    "zero": lambda y: y.expand(2, 3, 4).zero_(),
    "masked": lambda y: y.expand(2, 3, 4).masked_fill_(torch.tensor([True, False, True, False]), 1.0),
    "complex": lambda y: torch.view_as_real(torch.complex(y, y).expand(2, 3, 4))[0].add_(1),
}


@pytest.mark.parametrize("name", UNDEFINED)
def test_elements_that_share_memory_where_pytorch_goes_on(name):
    """Element after element, with a result that depends on their order."""

    def call(x):
        y = x * 2
        with contextlib.suppress(Exception):
            UNDEFINED[name](y)
        return y

    with pytest.raises(bridge.BridgeError, match=r"has no translation \(a write into elements that share memory"):
        bridge.export(Call(call))({}, {}, jnp.asarray(X.numpy()))


def test_a_tensor_of_which_the_state_is_a_part_is_refused():
    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.whole = torch.zeros(4)
            self.part = nn.Buffer(self.whole[:2])

        def forward(self, x):
            return x * self.whole.sum() + self.part.sum()

    fn = bridge.export(Part())
    with pytest.raises(bridge.BridgeError, match="shares memory with a parameter or buffer and reaches beyond it"):
        fn({}, fn.buffers, jnp.ones(2))


# ---- Strides of results, and what depends on them: whether `flatten` copies, whether `view` is possible

V = torch.rand(3)
W = randn(4, 3, 3, 3)


class Strides(nn.Module):
    """The strides of `function(layout(x))`, as numbers of the result; dimensions of size 1 have none."""

    def __init__(self, function, layout):
        super().__init__()
        self.function, self.layout = function, layout
        self.w = nn.Parameter(W.contiguous(memory_format=torch.channels_last))

    def forward(self, x):
        out = self.function(self, self.layout(x))
        return torch.tensor([s if n > 1 else -1 for n, s in zip(out.shape, out.stride(), strict=True)])


LAYOUTS = {
    "channels last": (randn(2, 3, 6, 6), lambda x: x.contiguous(memory_format=torch.channels_last)),
    "one row": (randn(1, 3, 1, 6), lambda x: x.contiguous(memory_format=torch.channels_last)),
    "plain": (randn(2, 3, 6, 6), lambda x: x),
    "permuted": (randn(6, 6, 3, 2), lambda x: x.permute(3, 2, 0, 1)),
    "sequence": (randn(2, 8, 3), lambda x: x.transpose(1, 2)),
    "volume": (randn(2, 3, 4, 4, 4), lambda x: x.contiguous(memory_format=torch.channels_last_3d)),
}
FUNCTIONS = {
    "convolution": lambda m, x: F.conv2d(x, W, padding=1),
    "weights channels last": lambda m, x: F.conv2d(x, m.w, padding=1),
    "kernel of size 1": lambda m, x: F.conv2d(x, W[:, :, :1, :1].contiguous(memory_format=torch.channels_last)),
    "depthwise": lambda m, x: F.conv2d(x, W[:3, :1], groups=3, padding=1),
    "transposed": lambda m, x: F.conv_transpose2d(x, W[:3, :2, :2, :2], stride=2),
    "of sequences": lambda m, x: F.conv1d(x, W[..., 0]),
    "of volumes": lambda m, x: F.conv3d(x, W[..., None]),
    "batch norm": lambda m, x: F.batch_norm(x, None, None, V, V, True),
    "batch norm, no weight": lambda m, x: F.batch_norm(x, V, V + 1),
    "log sigmoid": lambda m, x: F.logsigmoid(x),
    "padding": lambda m, x: F.pad(x, (1, 1, 1, 1), mode="replicate"),
    "shuffle": lambda m, x: F.channel_shuffle(x, 3),
    "roll": lambda m, x: x.roll(1, 1),
    "logical": lambda m, x: torch.logical_and(x > 0, x.contiguous() > 0),
    "division": lambda m, x: torch.div(x, V.view(-1, *[1] * (x.dim() - 2)), rounding_mode="floor"),
    "copysign": lambda m, x: torch.copysign(x, V[0]),
    "lerp": lambda m, x: torch.lerp(x, x.contiguous(), 0.5),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", slow_unless(lambda name: name in ("kernel of size 1", "division"), FUNCTIONS))
def test_strides(name, layout):
    x, arranged = LAYOUTS[layout]
    module = Strides(FUNCTIONS[name], arranged)
    try:
        with torch.no_grad():
            expected = module(x)
    except (RuntimeError, NotImplementedError):
        pytest.skip("PyTorch does not take this shape")
    fn = bridge.export(module)
    assert fn(fn.params, fn.buffers, jnp.asarray(x.numpy()))[0].tolist() == expected.tolist()


def flattened(module, x):
    h = module(x)
    h.detach().flatten(1).mul_(0)  # of a copy, where `h` is channels last
    return h


def viewed(module, x):
    h = module(x)
    return h.permute(0, 2, 3, 1).view(h.shape[0], -1) * 2


@pytest.mark.parametrize("function", [flattened, viewed])
def test_what_depends_on_strides(function):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.c = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3)).to(memory_format=torch.channels_last)

        def forward(self, x):
            return function(self.c, x)

    torch.manual_seed(0)
    verified(Model(), randn(2, 2, 3, 3), train=False)


def test_batch_norm_of_a_transposed_sequence_can_be_viewed():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x):
            return self.norm(x.transpose(1, 2)).view(x.shape[0], -1)

    assert bridge.verify(Model(), randn(4, 5, 3), train=True, steps=2).ok


def test_log_sigmoid_is_contiguous():
    x = torch.randn(2, 3, 4, 5)

    def strides(x):
        return torch.tensor(F.logsigmoid(x.to(memory_format=torch.channels_last)).stride())

    assert bridge.export(Call(strides))({}, {}, x.numpy())[0].tolist() == strides(x).tolist() == [60, 20, 5, 1]


POOLED = {
    "of a transposed sequence": (lambda x: F.adaptive_avg_pool1d(x.transpose(1, 2), 1), randn(2, 5, 4)),
    "channels last": (lambda x: F.adaptive_avg_pool2d(x.permute(0, 3, 1, 2), 1).flatten(1), randn(2, 4, 5, 3)),
    "written later": (lambda x: F.adaptive_avg_pool2d(x.permute(0, 3, 1, 2), 1).mul_(2).sin_(), randn(2, 4, 5, 3)),
    "volume": (lambda x: F.adaptive_avg_pool3d(x.permute(0, 4, 1, 2, 3), 1), randn(2, 3, 2, 2, 3)),
    "gradient inside": (
        lambda x: torch.autograd.grad(
            F.adaptive_avg_pool2d(x.permute(0, 3, 1, 2), 1).square().sum(), x, create_graph=True
        )[0],
        randn(2, 4, 5, 3),
    ),
}


@pytest.mark.parametrize("name", POOLED)
def test_pooling_to_one_element_of_channels_last_images(name):
    """PyTorch writes the strides of its own result anew."""
    function, x = POOLED[name]
    compare(Call(function), [x])


@pytest.mark.parametrize(
    "write", [lambda y: y.as_strided_((4, 3), (1, 4)), lambda y: y[1:].as_strided_((2, 4), (4, 1), 0)]
)
def test_another_layout_of_memory_in_place_is_refused(write):
    fn = bridge.export(Call(lambda x: write(x * 1)))
    with pytest.raises(bridge.BridgeError, match=r"as_strided_.*use as_strided"):
        fn({}, {}, randn(3, 4).numpy())


# ---- Views that show memory beyond the tensor they are taken of, or read it as other types, against PyTorch eager

X = randn(3, 4)


def strided_beyond(x, write):
    """A view by strides of all rows, taken of one row."""
    whole = x * 1
    row = whole[1]
    view = row.as_strided((2, 4), (4, 1), 0)
    write(whole, row, view)
    return whole.sin(), view.cos()


WRITES_BEYOND = {
    "nothing": lambda whole, row, view: None,
    "the whole": lambda whole, row, view: whole.mul_(3),
    "the row": lambda whole, row, view: row.exp_(),
    "the view": lambda whole, row, view: view.mul_(4).sin_(),
    "a part of the view": lambda whole, row, view: view[:, 1:3].mul_(4),
    "a copy": lambda whole, row, view: view.copy_(whole[1:3] * 2),
}


@pytest.mark.parametrize("name", WRITES_BEYOND)
def test_gradients_of_a_view_that_shows_more_than_it_was_taken_of(name):
    """PyTorch takes it of the base once something was written."""
    compare(Call(lambda x: strided_beyond(x, WRITES_BEYOND[name])), [X])


def test_bits_of_bits_under_jit():
    def forward(x):
        bits = x.clone()
        bits.view(torch.uint8)[:, 3::4] ^= 0x80
        return bits.view(torch.int16), bits.view(torch.uint8).view(torch.int32)

    assert bridge.verify(Call(forward), X).ok


def test_view_copy_of_a_transpose():
    compare(Call(lambda x: torch.view_copy(x.t(), (-1,))), [X])


# ---- `copy.copy` and `copy.deepcopy` in `forward`: what the copies share, and what they carry

X[:2, :3] = randn(2, 3)


class Memory(nn.Module):
    """Two buffers over one memory, a plain view of it, a note on a buffer, and a parameter."""

    def __init__(self):
        super().__init__()
        self.register_buffer("rows", torch.arange(6.0).view(2, 3))
        self.register_buffer("flat", self.rows.view(-1), persistent=False)
        self.register_buffer("code", torch.tensor([[3, -2, 5]], dtype=torch.int8))
        vars(self.code)["scale"] = 0.25
        self.column = self.rows[:, 0]
        self.w = nn.Parameter(torch.ones(3))
        vars(self.w)["note"] = 3.0


class Copies(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.memory, self.function = Memory(), function

    def forward(self, x):
        return self.function(self.memory, x)


def writes(memory, x):
    trial = copy.deepcopy(memory)
    trial.rows.lerp_(x.detach(), 0.5)
    trial.flat.mul_(0.9)
    return trial.rows * memory.w * x, trial.flat.clone(), memory.flat.clone()


def a_dict(memory, x):
    copied = copy.deepcopy({"a": memory.rows, "b": memory.rows[1], "c": memory.rows.detach()})
    copied["b"].fill_(9.0)
    copied["c"][0, 0] = 7.0
    return copied["a"] * x, memory.rows.clone()


def results(memory, x):
    y = (x * memory.w).detach()
    first, second = copy.deepcopy((y, y.t()))
    second.mul_(2)
    return first * x, y


def attributes(memory, x):
    trial = copy.deepcopy(memory)
    trial.code.clamp_(-3, 3)
    z = x.detach()
    z.note = [memory.rows, 2.0]
    noted = copy.deepcopy(z)
    noted.note[0].add_(1)
    return trial.code.float() * trial.code.scale, noted.note[0] * noted.note[1], memory.rows.clone(), x * memory.w


def plain_view(memory, x):
    trial = copy.deepcopy(memory)
    trial.rows.mul_(2)
    return trial.column + x[:, 0], memory.column.clone()


def shallow(memory, x):
    weight, code = copy.copy(memory.w), copy.copy(memory.code)
    factor = 2.0 if isinstance(weight, nn.Parameter) and weight.requires_grad else 0.0
    rows = memory.rows.clone()
    copy.copy(rows).add_(1)
    return x * weight * factor * weight.note, code.float() * code.scale, rows


def deep_parameter(memory, x):
    weight = copy.deepcopy(memory.w)
    return x * memory.w * (1.0 if hasattr(weight, "note") else 5.0)


COPIED = [writes, a_dict, results, attributes, plain_view, shallow, deep_parameter]


@pytest.mark.parametrize("function", COPIED, ids=lambda f: f.__name__)
def test_copies_are_pytorch_s(function):
    compare(Copies(function), [X[:2, :3]])


def test_deepcopy_of_a_result_is_pytorch_s_error():
    def call(memory, x):
        return copy.deepcopy(x * memory.w)

    with pytest.raises(RuntimeError, match="Only Tensors created explicitly by the user") as expected:
        Copies(call)(X[:2, :3])
    fn = bridge.export(Copies(call))
    with pytest.raises(RuntimeError, match="Only Tensors created explicitly by the user") as ours:
        fn(fn.params, fn.buffers, X[:2, :3].numpy())
    assert str(expected.value).split(".")[0] in str(ours.value)
