"""`shardings`: the first pattern decides, mistakes are one line, and sharded training has the losses of one device."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import bridge

PROCESS = Path(__file__).with_name("sharding_process.py")
MESH = AbstractMesh((2, 4), ("data", "model"))
PARAMS = {"head.weight": jnp.zeros((8, 6)), "head.bias": jnp.zeros(8), "scale": jnp.zeros(())}


def test_the_first_pattern_that_matches_a_whole_name_decides():
    found = bridge.shardings(PARAMS, MESH, {r"head\.weight": P("model", "data"), r"head\..*": P("data")})
    assert {name: each.spec for name, each in found.items()} == {
        "head.weight": P("model", "data"),
        "head.bias": P("data"),
        "scale": P(),
    }


def test_the_state_of_an_optimizer_is_sharded_by_the_same_names():
    state = jax.eval_shape(optax.adam(0.1).init, PARAMS)
    found = bridge.shardings(state, MESH, {"head.*": P(("model", "data"))})
    assert found[0].mu["head.weight"].spec == found[0].nu["head.weight"].spec == P(("model", "data"))
    assert found[0].count.spec == found[0].mu["scale"].spec == P()


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ({"weight": P("data")}, "the pattern 'weight' decides for no array.*matches no whole name"),
        ({".*weight": P(), "head.weight": P("data")}, "'head.weight' decides for no array.*earlier patterns match"),
        ({"head.weight": P(None, "model")}, r"dimension 1 of head.weight \(8, 6\) does not divide over 4 devices"),
        ({"head.weight": P("rows")}, "sharded over 'rows'; the mesh has data, model"),
        ({"head.bias": P("data", "model")}, "head.bias has 1 dimensions, and .* is for 2"),
    ],
)
def test_a_mistake_is_one_line(patterns, message):
    with pytest.raises(bridge.BridgeError, match=message) as error:
        bridge.shardings(PARAMS, MESH, patterns)
    assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def differences(tmp_path_factory):
    out = tmp_path_factory.mktemp("sharding") / "differences.json"
    subprocess.run([sys.executable, str(PROCESS), str(out)], check=True)
    return json.loads(out.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tensor parallel", "FSDP", "both"])
def test_losses_are_those_of_one_device(differences, layout):
    assert differences[layout] <= 1e-5
