"""Memory as PyTorch has it: strides, offsets, views, and several state tensors over one storage."""

import contextlib
import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from eager import Call, Calls, array, close, compare, in_jax, raises, randn, verified
from support.markers import slow_unless
from torch import nn

import bridge

X = randn(3, 4)
WHOLE = torch.zeros(4)


def strided(make):
    """`as_strided` counts in memory, whatever the layout of the tensor it is called on."""

    def forward(m, x):
        h = make(x @ m.w)
        return h.as_strided((2, 3), (2, 1), 1).sin().sum() + h.sum()

    return Calls(forward, w=nn.Parameter(randn(4, 6)))


def strided_write(make):
    def forward(m, x):
        h = make(x @ m.w)
        h.as_strided((2, 3), (3, 1), 2).mul_(3)
        return (h * torch.arange(h.numel()).view(h.shape)).sum()

    return Calls(forward, w=nn.Parameter(randn(4, 6)))


MAKES = {
    "contiguous": lambda h: h * 1,
    "transposed clone": lambda h: h.t().clone(),
    "channels last": lambda h: (h * 1).view(1, 3, 2, 3).to(memory_format=torch.channels_last),
}


def view_parameter():
    """A parameter that is a view of a larger tensor, read through `.data` that was kept."""

    def forward(m, x):
        with torch.no_grad():
            m.w.mul_(2)
        return x @ m.w + m.kept.sum() + (x @ m.flipped)

    w = nn.Parameter(randn(6, 4)[1:5])
    return Calls(forward, w=w, kept=w.data[1:, :2], flipped=w.data.t())


def flat_parameters():
    """Returns a module with two parameters cut from one flat tensor: neither is the other."""

    def forward(m, x):
        return torch.tanh(x @ m.a) @ m.b + m.kept[0] * 2 - m.kept[1] + x @ m.kept[2]

    a, b = (nn.Parameter(part.view(4, 4)) for part in randn(32).split(16))
    return Calls(forward, a=a, b=b, kept=[a.data[1], b.data[2], a.detach().t()])


def buffer_of_buffer():
    """A buffer that views another one, written through either."""

    def forward(m, x):
        m.base.mul_(2)
        y = x * m.row
        m.row.add_(x[0].detach())
        y = y + m.base.sum() + m.column
        m.column += 1
        return (y + x @ m.base) * m.scale

    base = nn.Buffer(randn(4, 4))
    state = {"base": base, "row": nn.Buffer(base[1]), "column": nn.Buffer(base.t()[2])}
    return Calls(forward, scale=nn.Parameter(randn(4)), **state)


def buffer_over_a_parameter():
    def forward(m, x):
        with torch.no_grad():
            m.w[2].add_(1)
        return x @ m.w + m.seen

    w = nn.Parameter(randn(4, 4))
    return Calls(forward, w=w, seen=nn.Buffer(w.data[2]))


MODULES = {
    **{f"read, {name}": (lambda make=make: strided(make)) for name, make in MAKES.items()},
    **{f"write, {name}": (lambda make=make: strided_write(make)) for name, make in MAKES.items()},
    "view parameter": view_parameter,
    "flat": flat_parameters,
    "buffer of buffer": buffer_of_buffer,
    "buffer over a parameter": buffer_over_a_parameter,
}


@pytest.mark.parametrize("name", MODULES)
def test_memory(name):
    """Two calls agree; `deepcopy` keeps shared memory, but not the tie to memory kept outside of parameters."""
    fn = bridge.export(MODULES[name]())
    reference = MODULES[name]()
    params = fn.params
    buffers = fn.buffers

    @jax.jit
    def gradient(params, buffers):
        def loss(params):
            result = fn.run(params, buffers, array(X))
            return jnp.sum(result.outputs**2), result

        return jax.grad(loss, has_aux=True)(params)

    for _ in range(2):
        reference.zero_grad()
        out = reference(X)
        (out * out).sum().backward()
        gradients, result = gradient(params, buffers)
        params = result.params
        buffers = result.buffers
        close(result.outputs, out.detach(), 2e-5)
        for n, p in reference.named_parameters():
            close(gradients[n], torch.zeros_like(p) if p.grad is None else p.grad, 2e-5)
            close(params[n], p.detach(), 2e-5)
        for n, b in reference.named_buffers():
            close(buffers[n], b, 2e-5)


def test_parameters_that_overlap_are_refused():
    """One step of any optimizer would write the shared elements twice, which two arrays cannot represent."""
    a, b = (nn.Parameter(part.view(4, 4)) for part in randn(20).unfold(0, 16, 4))
    with pytest.raises(bridge.BridgeError, match="parameters a and b share memory"):
        bridge.export(Calls(lambda m, x: x @ m.a @ m.b, a=a, b=b))


def test_a_buffer_given_apart_from_the_one_it_views():
    """Both names are one memory: the value given for the view is written into it, as `load_state_dict` does."""
    fn = bridge.export(buffer_of_buffer())
    reference = buffer_of_buffer()
    other = fn.buffers | {"row": fn.buffers["row"] + 1}
    out, _ = fn(fn.params, other, X.numpy())
    with torch.no_grad():
        for name in ("base", "row", "column"):  # `column` crosses `row`, and is given with the old value there
            reference.get_buffer(name).copy_(torch.from_numpy(np.array(other[name])))
    close(out, reference(X).detach(), 2e-5)


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
    y = x * 2
    z = x * 3
    y[0].zero_()
    z.zero_()
    return y + z


SHARED = {
    "add": lambda y: y.expand(2, 3, 4).add_(1),
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

    compare(call, [X])


UNDEFINED = {
    "unfold": lambda y: y.unfold(1, 2, 1).add_(1),
    "as_strided": lambda y: y.as_strided((3, 2), (1, 1)).mul_(2),
    "zero": lambda y: y.expand(2, 3, 4).zero_(),
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

    raises(r"has no translation \(a write into elements that share memory", call, X)


def test_a_tensor_of_which_the_state_is_a_part_is_refused():
    module = Calls(lambda m, x: x * m.whole.sum() + m.part.sum(), whole=WHOLE, part=nn.Buffer(WHOLE[:2]))
    raises("shares memory with a parameter or buffer and reaches beyond it", module, jnp.ones(2))


# ---- Strides of results, and what depends on them: whether `flatten` copies, whether `view` is possible

V = torch.rand(3)
W = randn(4, 3, 3, 3)


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
    "log sigmoid": lambda m, x: F.logsigmoid(x),
    "padding": lambda m, x: F.pad(x, (1, 1, 1, 1), mode="replicate"),
    "shuffle": lambda m, x: F.channel_shuffle(x, 3),
    "roll": lambda m, x: x.roll(1, 1),
    "logical": lambda m, x: torch.logical_and(x > 0, x.contiguous() > 0),
    "division": lambda m, x: torch.div(x, V.view(-1, *[1] * (x.dim() - 2)), rounding_mode="floor"),
    "copysign": lambda m, x: torch.copysign(x, V[0]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", slow_unless({"kernel of size 1", "division", "log sigmoid"}.__contains__, FUNCTIONS))
def test_strides(name, layout):
    """Strides are those of the result; dimensions of size 1 have none."""
    x, arranged = LAYOUTS[layout]

    def strides(m, x):
        out = FUNCTIONS[name](m, arranged(x))
        return torch.tensor([s if n > 1 else -1 for n, s in zip(out.shape, out.stride(), strict=True)])

    module = Calls(strides, w=nn.Parameter(W.contiguous(memory_format=torch.channels_last)))
    try:
        with torch.no_grad():
            expected = module(x)
    except (RuntimeError, NotImplementedError):
        pytest.skip("PyTorch does not take this shape")
    assert in_jax(module, x).tolist() == expected.tolist()


def flattened(layers, x):
    h = layers(x)
    h.detach().flatten(1).mul_(0)  # acts on a copy if `h` is channels last
    return h


def viewed(layers, x):
    h = layers(x)
    return h.permute(0, 2, 3, 1).view(h.shape[0], -1) * 2


@pytest.mark.parametrize("function", [flattened, viewed])
def test_what_depends_on_strides(function):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3)).to(memory_format=torch.channels_last)
    verified(Call(function, layers), randn(2, 2, 3, 3), train=False)


def test_batch_norm_of_a_transposed_sequence_can_be_viewed():
    module = Call(lambda norm, x: norm(x.transpose(1, 2)).view(x.shape[0], -1), nn.BatchNorm1d(3))
    verified(module, randn(4, 5, 3), train=True)


@pytest.mark.parametrize(
    "write", [lambda y: y.as_strided_((4, 3), (1, 4)), lambda y: y[1:].as_strided_((2, 4), (4, 1), 0)]
)
def test_another_layout_of_memory_in_place_is_refused(write):
    raises(r"as_strided_.*use as_strided", lambda x: write(x * 1), X)


# ---- Views that show memory beyond the tensor they are taken of, pooling, and copies, against PyTorch eager


def pooled(x):
    """Pools to one element; PyTorch sets the strides of its own result anew."""
    return F.adaptive_avg_pool2d(x.permute(0, 3, 1, 2), 1)


def slope_of_pooled(x):
    return torch.autograd.grad(pooled(x).square().sum(), x, create_graph=True)[0]


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


def attributes(memory, x):
    trial = copy.deepcopy(memory)
    trial.code.clamp_(-3, 3)
    z = x.detach()
    z.note = [memory.rows, 2.0]
    noted = copy.deepcopy(z)
    noted.note[0].add_(1)
    return trial.code.float() * trial.code.scale, noted.note[0] * noted.note[1], memory.rows.clone(), x * memory.w


def shallow(memory, x):
    weight = copy.copy(memory.w)
    code = copy.copy(memory.code)
    factor = 2.0 if isinstance(weight, nn.Parameter) and weight.requires_grad else 0.0
    rows = memory.rows.clone()
    copy.copy(rows).add_(1)
    return x * weight * factor * weight.note, code.float() * code.scale, rows


IMAGES = randn(2, 4, 5, 3)
COMPARED = {
    "one element of several": (one_of_several, X),
    "cleared": (cleared, X),
    "view_copy of a transpose": (lambda x: torch.view_copy(x.t(), (-1,)), X),
    "pooled sequence": (lambda x: F.adaptive_avg_pool1d(x.transpose(1, 2), 1), randn(2, 5, 4)),
    "pooled images": (lambda x: pooled(x).flatten(1), IMAGES),
    "pooled images, written": (lambda x: pooled(x).mul_(2).sin_(), IMAGES),
    "pooled volume": (lambda x: F.adaptive_avg_pool3d(x.permute(0, 4, 1, 2, 3), 1), randn(2, 3, 2, 2, 3)),
    "pooled images, gradient inside": (slope_of_pooled, IMAGES),
    "copies are written": (Call(writes, Memory()), randn(2, 3)),
    "copies of a dict": (Call(a_dict, Memory()), randn(2, 3)),
    "copies of attributes": (Call(attributes, Memory()), randn(2, 3)),
    "shallow copies": (Call(shallow, Memory()), randn(2, 3)),
}


@pytest.mark.parametrize(("module", "x"), COMPARED.values(), ids=COMPARED)
def test_values_and_gradients(module, x):
    compare(module, [x])


def test_bits_of_bits_under_jit():
    def forward(x):
        bits = x.clone()
        bits.view(torch.uint8)[:, 3::4] ^= 0x80
        return bits.view(torch.int16), bits.view(torch.uint8).view(torch.int32)

    verified(forward, X)


def test_deepcopy_of_a_result_is_pytorch_s_error():
    module = Call(lambda memory, x: copy.deepcopy(x * memory.w), Memory())
    with pytest.raises(RuntimeError, match="Only Tensors created explicitly by the user"):
        module(randn(2, 3))
    raises("Only Tensors created explicitly by the user", module, randn(2, 3), error=RuntimeError)


# ---- arguments


def writes_one(m, a, b):
    a.add_(1)
    m.seen = a.detach()  # is judged by a second call, in which the arguments are one, too
    return (b @ m.w if a is b else b) + b.square()


@pytest.mark.filterwarnings("ignore:the call writes `seen`:bridge.BridgeWarning")
@pytest.mark.filterwarnings("ignore:the call changes its argument a:bridge.BridgeWarning")
@pytest.mark.parametrize("twice", [True, False])
def test_one_array_given_twice_is_one_tensor(twice):
    module = Calls(writes_one)
    fn = bridge.export(module)
    x = randn(2, 3)
    y = randn(2, 3, seed=2)

    def value(x, y):
        return fn(fn.params, {}, x, x if twice else y)[0].sum()

    leaf = x.clone().requires_grad_()
    given = leaf * 1
    out = module(given, given if twice else y).sum()
    expected = torch.autograd.grad(out, leaf)[0] if twice else torch.zeros_like(x)
    for form in (jax.value_and_grad(value), jax.jit(jax.value_and_grad(value))):
        result, gradient = form(array(x), array(y))
        close(result, out.detach(), 1e-6)
        close(gradient, expected, 1e-6)
