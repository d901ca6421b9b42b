"""`trm export --train-step`: the training step of a run where neither PyTorch nor this package can be imported."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from support.scripts import ROOT, run_script

from train_jax.exported_step import PLATFORMS, platforms_for
from train_jax.run.config import ComputeConfig

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
    (code,) = re.findall(r"<!-- not run: needs an exported step;.*?```python\n(.*?)```", page, re.DOTALL)
    assert code.count("runs/mine/train-step") == 1
    return BEFORE + code.replace("runs/mine/train-step", folder) + AFTER


@pytest.mark.slow
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
    assert {path.name for path in (tmp_path / "step").glob("*.program")} == {
        f"step.{name}.program" for name in PLATFORMS
    }
    assert set(convention["arrays"]) | {"key"} == set(before.files)


@pytest.mark.parametrize(
    ("platform", "fields", "platforms"),
    [
        ("cpu", {}, PLATFORMS),
        ("tpu", {}, PLATFORMS),
        ("gpu", {}, ("cuda",)),
        ("tpu", {"mlp": "fused"}, ("tpu",)),
        ("cpu", {"attention": "fused"}, PLATFORMS),  # there are no such kernels on a CPU
        ("cpu", {"choices": "cpu/trm::mix_positions=joined"}, ("cpu",)),
        ("cpu", {"choices": "tpu/trm::mix_positions=fused"}, PLATFORMS),
    ],
)
def test_a_step_with_kernels_is_for_their_platform(platform, fields, platforms, monkeypatch):
    """The same holds for a step traced on a GPU, where attention in half precision may be cuDNN's."""
    own = {"gpu": "cuda"}.get(platform, platform)
    monkeypatch.setattr("jax.export.default_export_platform", lambda: own)
    assert platforms_for(ComputeConfig(**fields), platform) == platforms
