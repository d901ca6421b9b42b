"""Python functions that a traced call replaces by their names."""

import contextlib
import sys
import types
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest
import torch
from eager import Call, randn

import bridge
from bridge.dispatch import named_functions, tracing

BUFFER, NEW = randn(2, 5, 3, seed=1), randn(2, 1, 3, seed=2)


def written(buffer, new, *, lengths):
    """A kernel that asks for the value of a tensor, and writes into another one."""
    first = lengths[0].item()
    buffer[:, first : first + new.shape[1]] = new
    return buffer[:, : first + new.shape[1]].sum((1, 2))


def written_anywhere(buffer, new, *, lengths):
    """The same for every position, also of each row."""
    places = lengths[:, None] + torch.arange(new.shape[1])
    buffer[torch.arange(len(buffer))[:, None], places] = new
    filled = torch.arange(buffer.shape[1]) < places[:, -1:] + 1
    return torch.where(filled[..., None], buffer, 0).sum((1, 2))


kernels = types.SimpleNamespace(written=written)
NAME = f"{__name__}:kernels.written"


def use(buffer, new, lengths):
    buffer = buffer * 2
    return kernels.written(buffer, new, lengths=lengths), buffer


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(named_functions, "_REPLACEMENTS", {})
    monkeypatch.setattr(kernels, "written", written)
    bridge.register_function(NAME, written_anywhere)


def test_a_registered_function_is_pytorch_s_at_every_position(registered):
    report = bridge.verify(Call(use), BUFFER, NEW, torch.full((2,), 4))
    assert report.ok, f"\n{report}"
    step = jax.jit(lambda *inputs: bridge.export(Call(use))({}, {}, *inputs)[0])
    for position in (0, 3):
        lengths = torch.full((2,), position)
        ours = step(jnp.asarray(BUFFER), jnp.asarray(NEW), jnp.asarray(lengths))
        for array, expected in zip(ours, use(BUFFER, NEW, lengths), strict=True):
            assert jnp.allclose(array, expected.numpy(), atol=1e-6)
    assert step._cache_size() == 1


class Kernel:
    @staticmethod
    def total(x):
        return x.sum()


class Inherits(Kernel):
    pass


def test_a_function_is_replaced_only_while_a_call_runs(registered):
    """Also in two calls at once, and where the code of a call fails; other threads run the function itself."""

    def use_inside(buffer, new, lengths):
        seen = [kernels.written.__wrapped__ is written]
        bridge.export(Call(use))({}, {}, BUFFER.numpy(), NEW.numpy(), LAST)
        seen.append(kernels.written is not written)
        with ThreadPoolExecutor(1) as pool:
            wrong = pool.submit(kernels.written, BUFFER.clone(), NEW, lengths=torch.zeros(1, 2)).exception()
        raise KeyError(*seen, "2 elements cannot be converted" in str(wrong))

    with pytest.raises(KeyError) as error:
        bridge.export(Call(use_inside))({}, {}, BUFFER.numpy(), NEW.numpy(), LAST)
    assert error.value.args == (True,) * 3 and kernels.written is written
    for name in ("Kernel.total", "Inherits.total"):
        functions = {f"{__name__}:{name}": lambda x: x.sum() * 2}
        fn = bridge.export(Call(lambda x: Inherits.total(x)), functions=functions)
        before = dict(vars(Kernel)), dict(vars(Inherits))
        assert fn({}, {}, jnp.ones(3))[0] == 6 and Inherits.total(torch.ones(3)) == 3
        assert (dict(vars(Kernel)), dict(vars(Inherits))) == before


def test_without_the_rule_the_function_cannot_be_traced(registered, monkeypatch):
    monkeypatch.setattr(tracing, "replaced", lambda functions, active: contextlib.nullcontext())
    with pytest.raises(bridge.BridgeError, match="asks for the value of a traced tensor"):
        jax.eval_shape(lambda *inputs: bridge.export(Call(use))({}, {}, *inputs)[0], BUFFER.numpy(), NEW.numpy(), LAST)


LAST = jnp.full((2,), 4)


def test_the_last_replacement_counts(registered):
    bridge.register_function(NAME, lambda buffer, new, *, lengths: buffer.sum())
    total, _ = bridge.export(Call(use))({}, {}, BUFFER.numpy(), NEW.numpy(), LAST)[0]
    assert total == pytest.approx(2 * BUFFER.sum().item(), rel=1e-5)


def test_a_function_of_one_export(registered):
    """It goes before a registered one, and other modules do not have it."""

    def total(buffer, new, *, lengths):
        return buffer.sum() + lengths.sum()

    own = bridge.export(Call(use), functions={NAME: total})
    for _ in range(2):
        assert own({}, {}, BUFFER.numpy(), NEW.numpy(), LAST)[0][0] == pytest.approx(2 * BUFFER.sum().item() + 8, 1e-5)
        ours = bridge.export(Call(use))({}, {}, BUFFER.numpy(), NEW.numpy(), LAST)[0][0]
        assert jnp.allclose(ours, use(BUFFER, NEW, torch.full((2,), 4))[0].numpy(), atol=1e-6)
    with pytest.raises(ValueError, match="names no function"):
        bridge.export(Call(use), functions={"written": total})
    with pytest.raises(bridge.BridgeError, match=r"kernels\.other is not there"):
        bridge.export(Call(use), functions={f"{__name__}:kernels.other": total})(
            {}, {}, BUFFER.numpy(), NEW.numpy(), LAST
        )


def test_names(registered):
    for wrong in ("package.module.function", "module:", ":function", "a b:c", "module:a..b"):
        with pytest.raises(ValueError, match=r"names no function; use package\.module:function"):
            bridge.register_function(wrong, written_anywhere)
    bridge.register_function("not_imported.kernels:written", written_anywhere)
    bridge.export(Call(torch.sin))({}, {}, LAST)
    assert "not_imported" not in sys.modules
    bridge.register_function(f"{__name__}:kernels.other", written_anywhere)
    with pytest.raises(bridge.BridgeError, match=r"kernels\.other is not there: .* has no attribute 'other'; correct"):
        bridge.export(Call(torch.sin))({}, {}, LAST)
