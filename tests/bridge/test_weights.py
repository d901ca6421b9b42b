"""Weights in and out: every format, prefixes, strict both ways, bit for bit."""

import json

import jax.numpy as jnp
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import bridge


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.scale = nn.Buffer(torch.randn(3).to(torch.bfloat16))
        self.count = nn.Buffer(torch.tensor(7))
        self.scratch = nn.Buffer(torch.ones(2), persistent=False)

    def forward(self, x):
        return self.second(self.first(x)) * self.scale


@pytest.fixture
def module():
    torch.manual_seed(0)
    return Small()


def other():
    torch.manual_seed(1)
    return Small()


def write(path, state, kind):
    if kind == "pt":
        torch.save(state, path / "w.pt")
        return path / "w.pt"
    state = {name: tensor.clone() for name, tensor in state.items()}
    if kind == "safetensors":
        save_file(state, path / "w.safetensors")
        return path / "w.safetensors"
    names = sorted(state)
    shards = {"a-1.safetensors": names[:2], "a-2.safetensors": names[2:]}
    for shard, part in shards.items():
        save_file({name: state[name] for name in part}, path / shard)
    index = {"weight_map": {name: shard for shard, part in shards.items() for name in part}}
    (path / "a.safetensors.index.json").write_text(json.dumps(index))
    return path


@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module.", "_orig_mod.module."])
@pytest.mark.parametrize("kind", ["pt", "safetensors", "sharded"])
def test_round_trip_is_bit_exact(tmp_path, module, kind, prefix):
    state = {prefix + name: tensor for name, tensor in module.state_dict().items()}
    loaded = bridge.load_weights(write(tmp_path, state, kind))
    fn = bridge.export(other())
    params, buffers = bridge.into(fn, loaded)
    back = bridge.state_dict(fn, params, buffers)
    assert back.keys() == module.state_dict().keys()
    for name, tensor in module.state_dict().items():
        assert back[name].dtype == tensor.dtype and torch.equal(back[name], tensor)
    bridge.save_weights(tmp_path / "again.safetensors", back)
    fresh = other()
    fresh.load_state_dict(bridge.load_weights(tmp_path / "again.safetensors"), strict=True)
    assert torch.equal(fresh.first.weight, module.first.weight) and fresh.second.weight is fresh.first.weight


def test_every_difference_is_listed(module):
    state = module.state_dict()
    state["surprise"] = torch.zeros(2)
    state["scale"] = torch.zeros(5)
    del state["first.bias"]
    with pytest.raises(bridge.BridgeError) as caught:
        bridge.into(bridge.export(module), state)
    lines = str(caught.value).splitlines()
    assert lines[0] == "the weights are of another module, 3 differences:"
    assert [line.split() for line in lines[1:]] == [
        ["missing", "first.bias", "(3,)"],
        ["surplus", "surprise", "(2,)"],
        ["shape", "scale", "is", "(5,),", "expected", "(3,)"],
    ]


def test_extra_state_is_no_weight():
    class WithSettings(nn.Linear):
        def get_extra_state(self):
            return {"momentum": 0.9}

        def set_extra_state(self, state):
            raise AssertionError("it is not given")

    module = WithSettings(2, 2)
    fn = bridge.export(module)
    assert [*bridge.state_dict(fn, fn.params, fn.buffers)] == ["weight", "bias"]
    assert [*bridge.into(fn, module.state_dict())[0]] == [*fn.params]


def test_files_that_are_no_weights(tmp_path):
    (tmp_path / "junk.pt").write_bytes(b"not a checkpoint")
    torch.save({"a": torch.ones(1), "step": 3}, tmp_path / "mixed.pt")
    torch.save({"model": {"a": torch.ones(1)}, "optimizer": {}, "epoch": 3}, tmp_path / "nested.pt")
    torch.save([torch.ones(1)], tmp_path / "list.pt")
    torch.save(nn.Linear(2, 2), tmp_path / "whole.pt")
    (tmp_path / "cut.safetensors").write_text("cut")
    for name in ("pointer.pt", "pointer.safetensors"):
        (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:12\n")
    (tmp_path / "sharded").mkdir()
    (tmp_path / "sharded" / "x.index.json").write_text(json.dumps({"weight_map": {"a": "../../etc/passwd"}}))
    for name, message in (
        ("absent.pt", "no weights at"),
        ("junk.pt", "is not a file of torch.save; save module.state_dict"),
        ("cut.safetensors", "cannot be read as weights"),
        ("mixed.pt", "something else than tensors by name in step"),
        ("nested.pt", "of its keys model, optimizer, epoch, save the one with the weights alone"),
        ("list.pt", "holds a list, expected tensors by name"),
        ("whole.pt", r"holds an object of torch.nn.modules.linear.Linear, and nothing in a file is executed"),
        ("pointer.pt", "is a pointer of Git LFS, not the weights; run `git lfs pull`"),
        ("pointer.safetensors", "is a pointer of Git LFS"),
        ("sharded/x.index.json", "not a plain file name"),
        ("", "holds 2 files"),
    ):
        with pytest.raises(bridge.BridgeError, match=message) as caught:
            bridge.load_weights(tmp_path / name)
        assert "weights_only" not in str(caught.value)


def test_nothing_in_a_file_is_executed(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "pwned"), "w"))

    torch.save({"a": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(bridge.BridgeError):
        bridge.load_weights(tmp_path / "evil.pt")
    assert not (tmp_path / "pwned").exists()


def test_an_interrupted_write_leaves_the_old_file(tmp_path, module, monkeypatch):
    path = tmp_path / "w.safetensors"
    bridge.save_weights(path, module.state_dict())
    before = path.read_bytes()
    monkeypatch.setattr("bridge.weights.os.replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        bridge.save_weights(path, {"other": torch.zeros(1)})
    assert path.read_bytes() == before


def test_names_and_shapes_are_checked_at_the_call(module):
    fn = bridge.export(module)
    x = jnp.ones((2, 3))
    missing = {name: array for name, array in fn.params.items() if name != "first.bias"}
    for params, message in (
        (missing, r"missing parameters: first.bias; pass exactly the names"),
        (fn.params | {"more": x}, "surplus parameters: more"),
        (fn.params | {"first.bias": jnp.zeros(4)}, r"first.bias has shape \(4,\), expected \(3,\)"),
    ):
        with pytest.raises(bridge.BridgeError, match=message):
            fn(params, fn.buffers, x)
