"""64-bit integers in 32 bits: what is refused, what is let through, and what the caller may choose."""

import os
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from eager import Calls, array, in_jax, raises, randn, verified
from support.markers import slow_unless
from torch import nn

import bridge
from bridge.dispatch import computation
from bridge.symbolic.ranges import follow, range_of

IDS = torch.tensor([[3, 1, 2], [0, 3, 7]])


def applied(function):
    return Calls(function, table=nn.Parameter(randn(97, 4, seed=0)))


def hashed(m, ids):
    return F.embedding((ids * 2654435761) % 97, m.table)


REFUSED = {
    "hash embedding": hashed,
    "hash by a table of primes": lambda m, ids: ids * torch.tensor([1, 805459861, 73856093]),
    "hash by a prime just above 2**24": lambda m, ids: (ids * 16777619) ^ ids,
    "power": lambda m, ids: 7 ** (ids % 13),
    "shift": lambda m, ids: (ids % 9) << 30,
    "product of all": lambda m, ids: (ids % 97 + 1).prod(),
    "matrix product": lambda m, ids: (ids % 2**16) @ (ids.T % 2**16),
    "sum of large known numbers": lambda m, ids: (ids % 2**30).sum(),
    "constant": lambda m, ids: ids + torch.tensor(2**40),
    "number": lambda m, ids: ids + 2**40,
    "modulus": lambda m, ids: ids % (2**61 - 1),
    "comparison": lambda m, ids: ids < 2**40,
    "filled": lambda m, ids: torch.full((2,), 2**40),
    "masked with the smallest": lambda m, ids: ids.masked_fill(ids > 2, torch.iinfo(torch.int64).min),
    "sum of 32 bits": lambda m, ids: (ids.int() * 0 + 2**30).sum(),
    "running sum of known numbers": lambda m, ids: ((ids % 2 + 1) * 2**29).cumsum(-1),
    "added by index": lambda m, ids: ids.new_zeros(9).index_add(0, ids[0] % 2, ids[0] % 2 * 2**30 + 2**30),
    "added by scattering": lambda m, ids: ids.new_zeros(2, 3).scatter_add(1, ids % 2, ids % 2 * 2**30 + 2**30),
    "view written": lambda m, ids: (lambda x: (x[0].mul_(2**20), x[1] * 2**20))(ids % 5000),
    "product of what was summed": lambda m, ids: (ids % 1000).cumsum(-1) * 1_000_000,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_may_leave_32_bits_is_refused(name):
    raises(r"64-bit integers that 32 bits do not hold.*int64='wrap'", applied(REFUSED[name]), IDS)


def rotary_places(m, ids):
    places = torch.arange(ids.shape[1])[None] + torch.arange(ids.shape[0])[:, None] * ids.shape[1]
    return places * 2 + (ids > 0).cumsum(-1) - 1


def sizes_of_levels():
    sizes = torch.empty((2, 2), dtype=torch.long)
    for level, size in enumerate([8, 4]):
        sizes[level, 0] = size
        sizes[level, 1] = size
    return sizes


def places_in_experts(m, ids):
    chosen = F.one_hot(m.table[:6].topk(2)[1], 4).permute(1, 0, 2).reshape(-1, 4)
    place = ((chosen.cumsum(0) - 1) * chosen).sum(-1)
    rows = torch.arange(97)[ids % 97]
    return place * 1000 + ids[0, 0] % 2, rows * rows, rows.view(3, 2).t().reshape(-1) * 10_000


WARNED = {
    "positions from a mask": lambda m, ids: [(x.cumsum(1) - 1) * x for x in (ids, ids + 1)],
    "rows and columns of inputs": lambda m, ids: F.embedding(ids * 10 + ids, m.table),
    "hash by exclusive or": lambda m, ids: F.embedding(((ids * 31) ^ (ids >> 3)) % 97, m.table),
    "product of unknown numbers": lambda m, ids: ids * ids,
    "product in place": lambda m, ids: ids.clone().mul_(31),
    "square": lambda m, ids: ids**2,
    "product of sizes": lambda m, ids: ids.prod(1).cumsum(0),
    "shift": lambda m, ids: ids << 4,
    "shift by a tensor": lambda m, ids: 1 << ids,
    "matrix product": lambda m, ids: ids @ ids.T,
    "floats with a lower limit alone": lambda m, ids: m.table.clamp(min=0).long() * 3,
    "floats of which nothing is known": lambda m, ids: (m.table * 10).long() * 4 + 1,
}


@pytest.mark.parametrize("name", WARNED)
def test_products_of_unknown_numbers_are_announced_once(name):
    with pytest.warns(bridge.BridgeWarning, match=r"64-bit integers of which nothing is known.*at .*: `") as caught:
        verified(applied(WARNED[name]), IDS, steps=1, jit=False)
    assert sum("of which nothing is known" in str(w.message) for w in caught) == 1


def of_known_numbers(m, ids):
    x = ids % 7 - 3
    y = ids % 5 + 1
    return (
        *(-y, x >> 1, x.abs(), 2 - x, x - y, x.sub(y, alpha=3), x // y, y // x.clamp(1, 2), x.remainder(-y), x & 5),
        *(torch.minimum(x, y), torch.maximum(x, y), torch.max(x, y), x.min(), x.amax(0), x.cumprod(1), x.prod(), y**2),
        *(x.tril(), F.pad(y, (1, 1)), F.pad(y, (1, 1), value=9), torch.cat([x, y]), torch.where(x > 1, x, y)),
        *(x.masked_fill(y > 2, -9), x.index_fill(1, ids[0, :2] % 3, 8), x.scatter(1, y % 3, y), x.sort(1)[0]),
        *(torch.full_like(x, 4) - y, x @ y.T, x.cumsum(0), x.sum(1), y << 2, x.clamp(max=y), x / y, (x / 2).long()),
        *((m.table.clamp(-1, 1) * 4 + 2).ceil().long(), (m.table.sigmoid() > 0.5).long() - 1),
    )


LET_THROUGH = {
    "known numbers": of_known_numbers,
    "positions": rotary_places,
    "long positions": lambda m, ids: torch.arange(70_000) * 4 + ids[0, 0] % 2,
    "sum of a mask": lambda m, ids: ((ids != 0).sum(-1), (ids != 0).long().cumsum(-1) * (ids != 0)),
    "sum of unknown numbers": lambda m, ids: (ids.sum(-1), (ids + 1).abs().cumsum(-1), (ids // 2).sum()),
    "added and subtracted": lambda m, ids: (ids + 1 - ids[:, :1], -ids),
    "masked by a product": lambda m, ids: ids * (ids > 1) + ids * (ids > 2).long(),
    "one hot": lambda m, ids: F.one_hot(ids % 8, 8) * 5,
    "rows and columns": lambda m, ids: (ids // 3 % 50) * 60 + ids % 60,
    "clamped": lambda m, ids: ids.clamp(0, 1000) * 1000 + ids.clamp_max(5).clamp_min(-5) * 7,
    "places of the largest": lambda m, ids: (
        m.table.argmax(-1) * 4 + m.table.topk(1)[1][:, 0] * m.table.sort(0)[1][:, 0]
    ),
    "flat gather": lambda m, ids: m.table.flatten()[(ids % 97) * 4 + 1],
    "32 bits of a mask": lambda m, ids: (ids > 2).int().cumsum(-1) * (ids > 2).int() * 7,
    "sizes written into a table": lambda m, ids: sizes_of_levels().prod(1).cumsum(0) + ids[0, 0] % 2,
    "in place": lambda m, ids: (ids % 100).mul_(3).add_(1),
    "clamped in place": lambda m, ids: (
        ids.clone().clamp_(0, 1000) * 1000,
        (ids * 1).remainder_(50) * 1000,
        torch.clamp(ids, 0, 9, out=torch.empty_like(ids)) * 1000,
    ),
    "bits": lambda m, ids: ((ids & 255) << 8) | (ids & 15),
    "small types": lambda m, ids: ids.to(torch.uint8) * torch.tensor(1000) + (ids.to(torch.int16).long() << 8),
    "int32 wraps in PyTorch, too": lambda m, ids: torch.tensor([3], dtype=torch.int32) * torch.tensor([2**30, 5]).int(),
    "floats": lambda m, ids: ids.float() * 2**40 + ids * 1e10,
    "counted": lambda m, ids: torch.count_nonzero(ids) * 1000 + torch.searchsorted(torch.arange(9), ids),
    "places in experts": places_in_experts,
    "sums of unknown numbers, added": lambda m, ids: (ids * 1).index_add(0, ids[0, :1] % 2, ids[:1] + 1) + ids.sum(),
    "relative buckets": lambda m, ids: torch.where(ids < 4, ids.abs().clamp(max=9), torch.full_like(ids, 3)) * 32,
}


@pytest.mark.parametrize("name", LET_THROUGH)
def test_what_cannot_leave_them_is_let_through(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error", bridge.BridgeWarning)
        verified(applied(LET_THROUGH[name]), IDS)


@pytest.mark.parametrize("name", slow_unless({"known numbers", *WARNED}.__contains__, [*LET_THROUGH, *WARNED]))
def test_no_value_is_outside_its_interval(name, monkeypatch):
    """A branch, or the size of a result, may be decided by one."""

    def follow_and_check(context, func, args, kwargs, results):
        follow(context, func, args, kwargs, results)
        for result in results:
            low, high = range_of(result)[:2]
            assert not (result.value < low).any() and not (result.value > high).any(), func

    monkeypatch.setattr(computation, "follow", follow_and_check)
    fn = bridge.export(applied((LET_THROUGH | WARNED)[name]), int64="wrap")
    for ids in (IDS, IDS * 0, IDS - 5, IDS * 1000):
        fn(fn.params, fn.buffers, array(ids))


def test_the_caller_may_choose_to_wrap_and_verify_sees_that_it_does():
    report = bridge.verify(applied(hashed), IDS, int64="wrap")
    assert {r.kind for r in report.rows if r.verdict == "beyond tolerance"} == {"output", "gradient"}
    assert bridge.verify(applied(lambda m, ids: F.embedding(ids * 31 % 97, m.table)), IDS, int64="wrap").ok


def test_verify_sees_floats_that_32_bit_integers_do_not_hold():
    """The range of a float is not known while tracing, and `(x * n).long()` is ordinary code: it is not refused."""
    module = applied(lambda m, ids: (ids.float() * 1e9).long() % 7)
    assert {r.verdict for r in bridge.verify(module, IDS).rows if r.kind == "output"} == {"beyond tolerance"}
    assert bridge.verify(applied(lambda m, ids: (ids.float() * 1e8).long() % 7), IDS).ok


@pytest.mark.slow
@pytest.mark.parametrize("x64", [False, True])
def test_python_integers_beyond_those_of_jax_beside_floats(x64):
    with jax.enable_x64(x64):
        for function in (
            lambda m, x: x / 2**63,
            lambda m, x: 2**63 - x,
            lambda m, x: x * 2**63 + (2**63 + 2**40),
            lambda m, x: x > 2**63,
        ):
            assert bridge.verify(applied(function), torch.linspace(-1, 2, 4)).ok


@pytest.mark.slow
def test_exact_needs_64_bits():
    with pytest.raises(bridge.BridgeError, match="int64='exact' needs JAX's 64-bit types: set JAX_ENABLE_X64=1"):
        bridge.export(applied(hashed), int64="exact")
    with pytest.raises(bridge.BridgeError, match="int64 is 'precise'; choose"):
        bridge.export(applied(hashed), int64="precise")
    program = (
        "import bridge, test_int64 as t; r = bridge.verify(t.applied(t.hashed), t.IDS, int64='exact'); assert r.ok, r"
    )
    environment = os.environ | {"JAX_ENABLE_X64": "1", "PYTHONPATH": os.pathsep.join(["tests/bridge", *sys.path])}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)


def test_state_inputs_and_constants_outside_32_bits_are_refused():
    module = applied(lambda m, ids: ids + 1)
    module.offset = nn.Buffer(torch.tensor([5, 2**40]))
    with pytest.raises(bridge.BridgeError, match=r"^offset holds 64-bit integers .* from 5 to 2\*\*40"):
        bridge.export(module)
    fn = bridge.export(applied(lambda m, ids: ids + 1))
    with pytest.raises(bridge.BridgeError, match=r"an input holds 64-bit integers"):
        fn(fn.params, fn.buffers, np.array([2**40]))
    with pytest.raises(bridge.BridgeError, match=r"input 0 holds 64-bit integers"):
        bridge.verify(applied(lambda m, ids: ids + 1), torch.tensor([-(2**40)]))
    raises(r"a constant holds .* in the module itself", lambda ids: ids + torch.tensor([2**40]), jnp.ones(1, int))


def test_inspect_lists_it():
    found = bridge.export(applied(hashed)).survey(array(IDS))
    assert list(found.unsupported) == ["aten::mul.Tensor"]


def test_complex128_is_announced():
    with pytest.warns(bridge.BridgeWarning, match=r"torch.complex128 is computed as complex64"):
        in_jax(lambda x: x.to(torch.complex128) * 2, jnp.ones(3))


def test_a_python_number_is_not_announced_as_float64():
    """The derivative of the number is zero, which PyTorch makes in float64."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", bridge.BridgeWarning)
        in_jax(lambda x: torch.func.jvp(lambda s: s + 0.25, (x,), (x,))[1], jnp.ones(3))


@pytest.mark.parametrize("given", [jnp.asarray, np.asarray], ids=["jax", "numpy"])
def test_an_integer_input_has_the_dtype_of_labels_and_indices(given):
    """A module that asks takes the branch that it takes in PyTorch."""

    def asks(y):
        made = y, y + 1, torch.zeros_like(y), y.new_zeros(2)
        sizes = torch.iinfo(y.dtype).bits == 64, y.element_size() == 8, F.one_hot(y * 0, 3).shape == (3, 3)
        return [*(each.dtype == torch.int64 for each in made), *sizes]

    assert in_jax(asks, given(np.array([0, 2, 1]))) == [True] * 7
