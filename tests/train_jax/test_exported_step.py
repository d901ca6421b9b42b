"""`trm export --train-step`: the training step of a run where neither PyTorch nor this package can be imported."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from support.markers import slow_or_campaign
from support.scripts import run_script

ELSEWHERE = """
import sys
sys.modules |= dict.fromkeys(("torch", "torchax", "bridge", "models_torch", "train_jax", "optax"))  # an import raises
import jax
import numpy as np
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

folder = sys.argv[1]
program = export.deserialize(bytearray(open(f"{folder}/step/step.program", "rb").read()))
arrays = dict(np.load(f"{folder}/step/state.npz"))
key = arrays.pop("key")
mesh = jax.make_mesh((program.nr_devices,), ("devices",), axis_types=(AxisType.Auto,))
whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("devices"))
step = jax.jit(program.call, donate_argnums=0)
batches = np.load(f"{folder}/batches.npz")
batches = {name: batches[name] for name in batches.files}
arrays = {name: jax.device_put(x, split if name.startswith("carry.") else whole) for name, x in arrays.items()}
for number in range(20):
    batch = jax.device_put({name: x[number] for name, x in batches.items()}, split)
    arrays, metrics = step(arrays, batch, jax.device_put(key, whole))
after = {**arrays, **{f"metrics.{name}": x for name, x in metrics.items()}}
np.savez(f"{folder}/after.npz", **{name: np.asarray(x) for name, x in after.items()})
assert not [name for name, module in sys.modules.items() if name.startswith("torch") and module]
"""


@pytest.mark.parametrize("devices", slow_or_campaign([2], [1]))
def test_twenty_steps_elsewhere_are_those_of_the_run(data_dir, tmp_path, devices):
    """They are equal bit for bit on two devices. On one, XLA rounds 20 steps of the two programs differently (6e-8)."""
    pytest.importorskip("flatbuffers")  # which `serialize` imports
    run_script("exported_steps", data_dir, tmp_path, devices)
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = {"PATH": os.environ["PATH"], "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", ELSEWHERE, str(tmp_path)], check=True, env=environment, cwd=tmp_path)
    before, after, expected = (np.load(tmp_path / name) for name in ("step/state.npz", "after.npz", "expected.npz"))
    assert set(after.files) == set(expected.files)
    if devices > 1:
        assert [name for name in expected.files if after[name].tobytes() != expected[name].tobytes()] == []
    for name in expected.files:
        np.testing.assert_allclose(after[name], expected[name], rtol=1e-4, atol=1e-6, err_msg=name)
    names = [name for name in before.files if name.startswith(("state.params.", "state.ema.", "state.opt_state."))]
    assert {name.removeprefix("state.params.") for name in names} >= {"model.inner.lm_head.weight"}
    assert all(before[name].tobytes() != after[name].tobytes() for name in names if name.endswith("lm_head.weight"))
    convention = json.loads((tmp_path / "step/convention.json").read_text())
    assert (convention["step"], convention["devices"]) == (3, devices)
    assert set(convention["arrays"]) | {"key"} == set(before.files)
