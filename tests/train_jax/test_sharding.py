"""A sharded optimizer learns the same as a replicated one; `test_step.py` compares with PyTorch."""

import dataclasses

import jax
import numpy as np
import pytest
from support.markers import slow_or_campaign
from support.presets import with_fields
from support.scripts import run_script
from support.toy_language import write_tokens
from support.toy_training import BAD, BASE, SHARDED, STEPS

from train_jax.core.optim.chain import matrices_alike
from train_jax.core.optim.config import ParameterGroup
from train_jax.core.sharding import Sharded
from train_jax.run.presets import preset
from train_jax.runtime.devices import Devices
from train_jax.trainer.start import start

OTHER_CASES = ("adam_atan2", "lion", "groups", "frozen head", "muon", "muon_2025", "without epsilon")


# ---- buckets


def test_a_bucket_has_matrices_of_one_group_and_shape_one_for_each_device():
    params = {f"layers.{n}.weight": np.zeros((4, 4), np.float32) for n in range(5)}
    params |= {"embed.weight": np.zeros((4, 4)), "layers.0.bias": np.zeros(4), "wide.weight": np.zeros((4, 8))}
    config = dataclasses.replace(
        BASE,
        optimizer="muon_2025",
        freeze=r"layers\.3.*",
        groups=(ParameterGroup(r"layers\.2\..*", lr=0.1), ParameterGroup("wide.*", optimizer="adamw")),
    )
    alike = matrices_alike(params, config)
    assert alike == [["layers.0.weight", "layers.1.weight", "layers.4.weight"], ["layers.2.weight"]]
    sharded = Sharded(params, params, alike, devices=2)
    assert set(sharded.buckets) == params.keys() - {"layers.1.weight"}
    matrices = [bucket.names for bucket in sharded.buckets.values() if bucket.matrices]
    assert matrices == [("layers.0.weight", "layers.1.weight"), ("layers.4.weight",), ("layers.2.weight",)]


def test_the_state_of_a_run_comes_back_from_its_shards(data_dir):
    config = with_fields(preset("tiny"), {"data_dir": str(data_dir), "shard_optimizer": True})
    training = start(config, devices=Devices(1))
    state = training.initial_state()
    placement = training.placement
    placed = placement.place(state)
    shapes = jax.tree.map(lambda x: x.shape, placement.shapes(state))
    assert shapes == jax.tree.map(lambda x: x.shape, placed) and shapes != jax.tree.map(lambda x: x.shape, state)
    jax.tree.map(np.testing.assert_array_equal, placement.to_checkpoint(placed), state)
    jax.tree.map(np.testing.assert_array_equal, placement.whole(placed), state._replace(opt_state=()))


# ---- steps with given gradients, on eight devices


@pytest.mark.parametrize("case", slow_or_campaign(["clipped"], OTHER_CASES))
def test_steps_equal_those_of_a_replicated_optimizer(tmp_path, case):
    """State, carry and metrics at each of the steps, with a bad batch among them, which changes no bit."""
    run_script("toy_training", tmp_path / "out.npz", case, SHARDED + case)
    results = dict(np.load(tmp_path / "out.npz"))
    replicated, sharded = (
        {name.removeprefix(run + "/"): array for name, array in results.items() if name.startswith(run + "/")}
        for run in (case, SHARDED + case)
    )
    assert replicated.keys() == sharded.keys() and f"{STEPS - 1}/2/param_norm" in replicated
    for name, array in replicated.items():
        np.testing.assert_allclose(sharded[name], array, rtol=1e-5, atol=1e-5, err_msg=name)
    before = {name: array for name, array in sharded.items() if name.startswith("before/") and "guard" not in name}
    assert len(before) > 10
    for name, array in before.items():
        assert array.tobytes() == sharded[name.replace("before/", "bad/0/")].tobytes(), name
    assert sharded[f"{BAD}/0/guard/skipped_steps"] == 1


# ---- runs


def last_states(folder, *names):
    """Returns the last state of each run, all of them close to that of the first one."""
    write_tokens(folder)
    run_script("sharded_runs", folder, folder, *names)
    expected, *others = [dict(np.load(folder / f"{name}.npz")) for name in names]
    assert float(expected["__loss"]) < np.log(11) and all(other.keys() == expected.keys() for other in others)
    for name, array in expected.items():
        for other in others:
            np.testing.assert_allclose(other[name], array, rtol=0, atol=1e-5, err_msg=name)
    return expected, *others


@pytest.mark.slow
def test_a_run_continues_with_and_without_the_option_on_other_devices(tmp_path):
    """Sharded in parts under `shard_map` on eight devices, replicated on one, sharded under `pmap` on four."""
    last_states(tmp_path, "replicated", "continued on others")
