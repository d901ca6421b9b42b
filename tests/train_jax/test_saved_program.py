"""Programs as files: a train step that `trm compile-pod` saves and a run loads, or that is an entry of JAX's cache of
compiled programs; a step that `trm export --train-step` writes for places where PyTorch cannot be imported."""

import dataclasses
import hashlib
import json
import os
import pickle
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.markers import slow_or_campaign
from support.scripts import ROOT, run_script

from train_jax.errors import UserError
from train_jax.run.config import ComputeConfig
from train_jax.runtime.compilation import ProgramKey, compile_lowered, entries_apart, load_program, save_program, ship
from train_jax.runtime.devices import Devices
from train_jax.trainer.exported_step import PLATFORMS, platforms_for


def lowered(scale):
    """Returns a program of two inputs for one device, lowered."""
    devices = Devices(1, "shard_map")
    program = devices.parallel_map(lambda params, _, batch: scale * params["w"] * batch)
    params = devices.shapes({"w": jnp.ones(3)})
    batch = devices.shapes(jnp.ones((1, 2, 3)), sharded=True)
    return program.lower(params, {}, batch)


def test_a_program_comes_back_and_nothing_else_is_loaded(tmp_path):
    devices = jax.local_devices()[:1]
    path = tmp_path / "program"
    written = lowered(2.0)
    save_program(path, written, written.compile(), devices)
    on = Devices(1, "shard_map")
    inputs = on.replicate({"w": jnp.arange(3.0)}), {}, on.shard(jnp.ones((1, 2, 3)))
    np.testing.assert_array_equal(load_program(path, lowered(2.0), devices)(*inputs), [[[0.0, 2.0, 4.0]] * 2])
    first, header, content = path.read_bytes().split(b"\n", 2)
    fields = json.loads(header)
    assert set(fields) == {f.name for f in dataclasses.fields(ProgramKey)} | {"sha256"}
    assert (fields["devices"], fields["processes"], fields["compiler"]) == (1, 1, "")

    own = "program", "sha256"

    def edited(content=content, **changes):
        return b"\n".join([first, json.dumps(fields | changes).encode(), content])

    def signed(content):
        return edited(content, sha256=hashlib.sha256(content).hexdigest())

    for expected, what, reason in (
        (3.0, path.read_bytes(), "was compiled for another train step: other code, fields or sizes of the data; save"),
        *((2.0, edited(**{name: 7}), f"was compiled for {name} 7, not ") for name in fields if name not in own),
        (2.0, edited(program="x"), "was compiled for another train step"),
        (2.0, edited(content[:-1] + b"x"), "is damaged; save it again"),
        (2.0, signed(content[:9]), r"cannot be loaded \("),
        (2.0, signed(pickle.dumps(os.mkdir)), r"cannot be loaded \(it refers to"),
        (2.0, edited(sha256=None), "is damaged"),
        (2.0, b"another" + path.read_bytes(), "is no program that `trm compile-pod --save` wrote"),
        (2.0, None, r"cannot be read \(No such file or directory\); write it with trm compile-pod"),
    ):
        other = tmp_path / "other"
        other.unlink(missing_ok=True) if what is None else other.write_bytes(what)
        with pytest.raises(UserError, match=rf"^{other} {reason}"):
            load_program(other, lowered(expected), devices)


def test_a_run_finds_what_was_shipped_or_says_how_it_differs(tmp_path):
    """The cache is at another path. A changed program with the same `ProgramKey` has no entry under its own name."""
    devices = jax.local_devices()[:1]
    shipped = tmp_path / "shipped"
    with entries_apart() as entries:
        program = lowered(2.0)
        program.compile()
        name = ship(entries, shipped, program, devices)
    assert sorted(path.name for path in shipped.iterdir()) == sorted([name, "shipped.json"])
    key = dataclasses.asdict(ProgramKey.of(program, devices))

    def source(scale, **changes):
        with entries_apart() as cache:
            (cache / ("renamed" if changes else name)).write_bytes((shipped / name).read_bytes())
            (cache / "shipped.json").write_text(json.dumps({name: key | changes}))
            return compile_lowered(lowered(scale), devices)[1]

    assert source(2.0) == "from the compilation cache"
    missed = "into the compilation cache; the shipped program differs in "
    assert source(3.0) == f"{missed}code, fields or sizes of the data"
    assert source(2.0, jaxlib="0.0.1", devices=8) == f"{missed}jaxlib, devices"
    assert source(2.0, other="") == f"{missed}XLA flags, numbers of devices or topology, which are in JAX's key"
    with entries_apart():
        assert compile_lowered(lowered(4.0), devices)[1] == "into the compilation cache", "nothing was shipped"
    with pytest.raises(UserError, match="JAX wrote no entry of its compilation cache for this program; leave out --fi"):
        ship(tmp_path, tmp_path / "none", lowered(2.0), devices)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("runner", slow_or_campaign(["pmap"], ["shard_map"]))
def test_a_normal_run_begins_with_the_program_of_compile_pod(data_dir, tmp_path, monkeypatch, runner):
    """Here for virtual devices of a CPU in the place of a TPU's; the same run with another field compiles."""
    programs = tmp_path / "programs"
    fields = ["--data-dir", data_dir, "--compute.runner", runner, "--steps", "4"]
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    run_script("shipped_programs", "tiny", *fields, "--fill-cache", programs)
    assert len(list(programs.iterdir())) == 2
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(programs))

    def how(name, *others):
        words = ["train", "tiny", *fields, *others, "--run-dir", tmp_path / name, "--wandb", "disabled"]
        command = [sys.executable, "-m", "train_jax", *map(str, words)]
        shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        return shown.partition("train step compiled in ")[2].splitlines()[0].partition(" s, ")[2]

    assert how("same") == "from the compilation cache"
    missed = "into the compilation cache; the shipped program differs in code, fields or sizes of the data"
    assert how("other", "--optim.beta2", "0.9") == missed


# ---- the step of a run, exported

BEFORE = """
import sys
sys.modules |= dict.fromkeys(("torch", "torchax", "bridge", "models_torch", "train_jax", "optax"))  # an import raises
import numpy as np
given = np.load("batches.npz")
batches = [{name: given[name][number] for name in given.files} for number in range(20)]
"""
AFTER = """
after = {**arrays, **{f"metrics.{name}": x for name, x in metrics.items()}}
np.savez("after.npz", **{name: np.asarray(x) for name, x in after.items()})
assert not [name for name, module in sys.modules.items() if name.startswith("torch") and module]
"""


def elsewhere(folder):
    """Returns the code of docs/jax.md that takes steps, adapted to the step in a folder."""
    page = (ROOT / "docs" / "jax.md").read_text()
    (code,) = re.findall(r"<!-- not run: needs an exported step.*?```python\n(.*?)```", page, re.DOTALL)
    assert code.count("runs/mine/train-step") == 1
    return BEFORE + code.replace("runs/mine/train-step", folder) + AFTER


@pytest.mark.campaign
@pytest.mark.parametrize("devices", [1, 2])
def test_twenty_steps_elsewhere_are_those_of_the_run(data_dir, tmp_path, devices):
    """State, carry and metrics are those of its jitted step bit for bit."""
    run_script("exported_steps", data_dir, tmp_path, devices)
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = {"PATH": os.environ["PATH"], "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", elsewhere("step")], check=True, env=environment, cwd=tmp_path)
    before, after, expected = (np.load(tmp_path / name) for name in ("step/state.npz", "after.npz", "expected.npz"))
    assert set(after.files) == set(expected.files)
    assert [name for name in expected.files if after[name].tobytes() != expected[name].tobytes()] == []
    names = [name for name in before.files if name.startswith(("state.params.", "state.ema.", "state.opt_state."))]
    assert {name.removeprefix("state.params.") for name in names} >= {"model.inner.lm_head.weight"}
    assert all(before[name].tobytes() != after[name].tobytes() for name in names if name.endswith("lm_head.weight"))
    convention = json.loads((tmp_path / "step/convention.json").read_text())
    assert (convention["step"], convention["devices"], convention["platforms"]) == (3, devices, [*PLATFORMS])
    assert {path.name for path in (tmp_path / "step").glob("*.program")} == {f"step.{p}.program" for p in PLATFORMS}
    assert set(convention["arrays"]) | {"key"} == set(before.files)


@pytest.mark.parametrize(
    ("platform", "fields", "platforms"),
    [
        ("cpu", {}, PLATFORMS),
        ("gpu", {}, ("cuda",)),
        ("tpu", {"mlp": "fused"}, ("tpu",)),
        ("cpu", {"attention": "fused"}, PLATFORMS),  # there are no such kernels on a CPU
        ("cpu", {"choices": "cpu/trm::mix_positions=joined"}, ("cpu",)),
    ],
)
def test_a_step_with_kernels_is_for_their_platform(platform, fields, platforms, monkeypatch):
    """The same holds for a step traced on a GPU, where attention in half precision may be cuDNN's."""
    own = {"gpu": "cuda"}.get(platform, platform)
    monkeypatch.setattr("jax.export.default_export_platform", lambda: own)
    assert platforms_for(ComputeConfig(**fields), platform) == platforms
