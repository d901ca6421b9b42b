"""Modules without values: exported from the meta device, and modules whose weights `export` takes over."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import bridge


class Model(nn.Module):
    """A model with a tied weight, and a buffer that is not saved."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)

    def forward(self, ids):
        return self.head(self.scale * self.norm(self.embed(ids)))


IDS = np.array([0, 3, 6])


def filled():
    torch.manual_seed(0)
    return Model().eval()


def on_meta():
    with torch.device("meta"):
        module = Model().eval()
    module.scale = torch.tensor(2.0)
    return module


def outputs(fn, params, buffers):
    return fn(params, buffers, IDS, train=False)[0]


@pytest.mark.parametrize("source", ["mapping", "safetensors", "pt"])
def test_weights_that_come_later(tmp_path, source):
    state = filled().state_dict()
    weights = {"mapping": state, "safetensors": tmp_path / "w.safetensors", "pt": tmp_path / "w.pt"}[source]
    if source == "safetensors":
        save_file({name: tensor.clone() for name, tensor in state.items()}, weights)
    elif source == "pt":
        torch.save(state, weights)
    fn = bridge.export(on_meta())
    assert fn.params["embed.weight"] == jax.ShapeDtypeStruct((7, 4), jnp.float32) and "head.weight" not in fn.params
    params, buffers = bridge.into(fn, weights)
    expected = filled()(torch.from_numpy(IDS)).detach()
    np.testing.assert_allclose(outputs(fn, params, buffers), expected, atol=1e-6)
    again = bridge.state_dict(fn, params, buffers)
    assert again.keys() == state.keys() and all(torch.equal(again[name], state[name]) for name in state)
    assert len(state) == 8  # the caller's own is as it was


def test_shapes_alone_are_enough_to_survey_and_lower():
    fn = bridge.export(on_meta())
    assert "aten::linear" in {name for name, _ in fn.survey(IDS, train=False).ops}
    lowered = jax.jit(lambda params, buffers: outputs(fn, params, buffers)).lower(fn.params, fn.buffers)
    assert lowered.out_info.shape == (3, 7)


def test_a_call_without_values_is_refused():
    fn = bridge.export(on_meta())
    with pytest.raises(bridge.BridgeError, match=r"parameter .* has no values.*meta device; pass .* bridge.into"):
        outputs(fn, fn.params, fn.buffers)


def test_values_that_no_state_dict_has_are_asked_for():
    module = on_meta()
    module.scale = torch.tensor(2.0, device="meta")
    with pytest.raises(bridge.BridgeError, match=r"no values scale \(\) is on the meta device.*before export"):
        bridge.into(bridge.export(module), filled().state_dict())


def test_a_constant_buffer_needs_its_values():
    module = on_meta()
    module.scale = torch.tensor(2.0, device="meta")
    with pytest.raises(bridge.BridgeError, match="scale is on the meta device and has no values"):
        bridge.export(module, static="scale")


def test_released_weights_are_the_function_s_alone():
    module = filled()
    module.embed.weight.note = "kept"
    expected = module(torch.from_numpy(IDS)).detach()
    parameters = [*module.parameters()]
    fn = bridge.export(module, release=True)
    assert all(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()])
    assert all(a is b and a.requires_grad for a, b in zip(module.parameters(), parameters, strict=True))
    assert module.head.weight is module.embed.weight and module.embed.weight.note == "kept"
    np.testing.assert_allclose(outputs(fn, fn.params, fn.buffers), expected, atol=1e-6)


def test_views_of_released_weights_keep_their_memory():
    module = nn.Linear(4, 4)
    module.register_buffer("first", module.weight.detach()[0])
    fn = bridge.export(module, release=True)
    assert not module.weight.is_meta and not module.first.is_meta and module.bias.is_meta
    np.testing.assert_array_equal(fn.params["weight"][0], fn.buffers["first"])


def test_an_array_does_not_see_what_pytorch_writes_later():
    """This holds for any alignment of the memory: JAX adopts aligned memory without a copy."""
    for first in range(16):
        memory = torch.zeros(100)
        module = nn.Module()
        module.register_buffer("state", memory[first : first + 64])
        fn = bridge.export(module)
        memory += 1
        assert not fn.buffers["state"].any()


PEAK = """
import sys, threading, time
import jax, torch
from torch import nn
import bridge

count, path = int(sys.argv[1]), sys.argv[2]


def build():
    return nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(count)))


def resident():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def watch():
    global peak
    while True:
        peak = max(peak, resident())
        time.sleep(0.002)


def from_meta():
    with torch.device("meta"):
        module = build()
    return bridge.into(bridge.export(module), path)


def released():
    return bridge.export(build(), release=True).params


fn = bridge.export(nn.Linear(3, 3))
fn(fn.params, {}, jax.numpy.ones((1, 3)))
baseline = peak = resident()
threading.Thread(target=watch, daemon=True).start()
arrays = jax.block_until_ready(globals()[sys.argv[3]]())
print(max(peak, resident()) - baseline)
"""


def check_peak(tmp_path, how, megabytes):
    """Uses a fresh process: an allocator that has freed blocks as large before may keep those of the module."""
    count = megabytes // 16
    path = tmp_path / "weights.safetensors"
    if how == "from_meta":
        save_file({f"{i}.weight": torch.full((2048, 2048), float(i)) for i in range(count)}, path)
    command = [sys.executable, "-c", PEAK, str(count), str(path), how]
    peak = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(f"{how}: {peak:.0f} MB for {16 * count} MB")
    assert 0.9 * 16 * count < peak < 1.2 * 16 * count


@pytest.mark.slow
@pytest.mark.parametrize("how", ["from_meta", "released"])
def test_no_weight_is_held_twice(tmp_path, how):
    check_peak(tmp_path, how, 208)


@pytest.mark.campaign
@pytest.mark.parametrize("how", ["from_meta", "released"])
def test_no_weight_of_a_large_model_is_held_twice(tmp_path, how):
    check_peak(tmp_path, how, 1040)
