"""`trm compile-pod`: real compilation for TPU topologies on this machine, and every experiment up to the compiler."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from support.markers import slow_or_campaign, slow_unless
from support.scripts import run_script

from models_torch import uninitialized
from models_torch.registry import ARCHITECTURES
from train_jax.__main__ import main
from train_jax.errors import UserError
from train_jax.pods.compile import train_step_arguments
from train_jax.pods.gpus import CARDS
from train_jax.pods.stages import compile_pod as stage
from train_jax.puzzles.presets import PRESETS
from train_jax.puzzles.task import UnbuiltPuzzles
from train_jax.research.runs import experiment_run
from train_jax.research.table import EXPERIMENTS, data_sets
from train_jax.run.plan import plan
from train_jax.run.presets import preset


def compile_pod(tmp_path, *arguments):
    """Runs in a process of its own: libtpu changes the environment of the process."""
    command = [sys.executable, "-m", "train_jax", "compile-pod", *arguments, "--json", str(tmp_path / "pod.json")]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads((tmp_path / "pod.json").read_text()), done.stdout


@pytest.mark.slow
def test_the_train_step_compiles_for_a_host_of_v4(tmp_path):
    figures, text = compile_pod(tmp_path, "tiny", "--topology", "v4:2x2x1")
    assert (figures["devices"], figures["hosts"], figures["batch_size"]) == (4, 1, 16)
    assert figures["fits"] and 0 < figures["memory"]["peak"] < figures["hbm_capacity"] == 2 * 17_200_000_000
    # XLA counts every operation, the program's own count only the products.
    assert 1 < figures["flops"] / figures["product_flops"] < 1.3
    assert figures["estimated_cycles"] == pytest.approx(sum(part["cycles"] for part in figures["by_pass"].values()))
    assert {"forward", "backward", "update"} <= set(figures["by_pass"])
    assert {"SwiGLU/CastLinear", "ReasoningModule/Block"} <= set(figures["by_class"])
    assert "model.inner.L_level.layers.0.mlp.down_proj" in figures["by_module"]
    assert [each["kind"] for each in figures["collectives"]].count("all-gather") == 1  # the rows of the puzzle table
    assert "by module" in text
    assert figures["bundles"] == pytest.approx(sum(part["bundles"] for part in figures["by_pass"].values()))
    assert figures["bundles"] > 0 and re.search(r"[kM]bundles  share     HBM [kMG]B  share", text)


GPU_COMPILER = [
    Path(sys.prefix, "gpu-aot", "jax_plugins"),
    *(Path(folder, "jax_plugins", "xla_cuda13") for folder in sys.path),
]
with_gpu_compiler = pytest.mark.skipif(
    not any(path.exists() for path in GPU_COMPILER), reason="the GPU compiler is not installed"
)


@pytest.mark.slow
@with_gpu_compiler
def test_the_train_step_compiles_for_eight_gpus(tmp_path):
    small = ["--arch.H-cycles", "1", "--arch.L-cycles", "1", "--arch.forward-dtype", "bfloat16"]
    small += ["--arch.no-mlp-t", "--arch.pos-encodings", "rope"]
    figures, text = compile_pod(tmp_path, "tiny", "--topology", "gpu:h100:8", *small)
    assert (figures["devices"], figures["hosts"], figures["batch_size"]) == (8, 1, 16)
    assert figures["fits"] and 0 < figures["memory"]["peak"] < figures["hbm_capacity"]
    assert figures["product_flops"] == pytest.approx(figures["analytic_flops"], rel=0.2)  # the scores again
    assert {"matrix products", "fused attention of cuDNN", "collectives"} <= set(figures["by_kind"])
    assert {"forward", "backward", "update"} <= set(figures["by_pass"])
    assert sorted(each["kind"] for each in figures["collectives"]) == ["all-gather", "all-reduce"]
    assert figures["instructions"] == sum(part["instructions"] for part in figures["by_kind"].values()) > 100
    assert re.search(r"kernels  share     HBM [kMG]B  share", text) and "bundles" not in text and "cycles" not in text


@pytest.mark.slow
@with_gpu_compiler
def test_a_program_compiles_for_every_card():
    script = """
import jax
from train_jax.pods.gpus import CARDS
from train_jax.pods.topologies import topology, use_host_backend
use_host_backend()
for card in CARDS:
    pod = topology(f"gpu:{card}:2x4")
    assert (len(pod.devices), pod.hosts) == (8, 2), pod
    x = jax.ShapeDtypeStruct((8, 64, 64), "bfloat16")
    step = jax.pmap(lambda x: jax.lax.psum(x @ x, "devices"), axis_name="devices", devices=pod.devices)
    text = step.lower(x).compile(compiler_options=dict(pod.compiler_options)).as_text()
    assert "all-reduce" in text
    print(pod)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == len(CARDS)


@pytest.mark.parametrize("name", ["gpu:h1000", "gpu:", "gpu:h100:0", "gpu:h100:x8", "gpu:h100:8:8"])
def test_an_unknown_gpu_is_one_line(name, capsys):
    assert main(["compile-pod", "tiny", "--topology", name]) == 2
    assert f"unknown topology '{name}'; use gpu: and one of a100, a6000, h100" in capsys.readouterr().err


@pytest.mark.parametrize("topology", slow_or_campaign(["v5e:2x2"], ["v6e:2x2", "v4:2x2x2", "v5p:2x2x1"]))
def test_every_generation_of_chips_has_an_estimate(topology, tmp_path):
    figures, _ = compile_pod(tmp_path, "tiny", "--topology", topology, "--compute.runner", "shard_map")
    assert figures["estimated_cycles"] > 0 and figures["fits"]
    assert (figures["bundles"] is None) == (not topology.startswith("v4"))


STEPS = slow_or_campaign(
    [[*((model, "train") for model in ARCHITECTURES), ("trm", "evaluate")]],
    [[(model, "evaluate") for model in ARCHITECTURES if model != "trm"]],
)


@pytest.mark.parametrize("steps", STEPS, ids=["train", "evaluate"])
def test_every_architecture_compiles_in_training_and_evaluation(steps):
    small = "--arch.hidden-size 16 --arch.num-heads 1 --arch.puzzle-emb-ndim 16"
    words = []
    for model, step in steps:
        cycles = "" if model == "transformer" else "--arch.H-cycles 1 --arch.L-cycles 1"
        words += f"-- tiny --topology v4:2x2x1 --model {model} --step {step} {small} {cycles}".split()
    *_, last = run_script("compile_pods", *words).splitlines()
    assert [(each["model"], each["step"]) for each in json.loads(last)] == steps
    assert all(each["estimated_cycles"] > 0 and each["fits"] for each in json.loads(last))


def test_without_the_compiler(monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["compile-pod", "tiny"]) == 2
    assert "the TPU compiler is not installed; run `source ./environment.sh pod`" in capsys.readouterr().err
    assert main(["compile-pod", "tiny", "--topology", "gpu:h100"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "the GPU compiler is not installed; run `source ./environment.sh gpu-aot`" in line


def test_a_program_for_a_gpu_is_not_kept(capsys):
    assert main(["compile-pod", "tiny", "--topology", "gpu:h100", "--fill-cache", "cache"]) == 2
    assert "--save and --fill-cache are for TPUs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("data_dir", "kind", "sizes"),
    [
        ("data/sudoku-extreme-100-aug-1000", "", (81, 11)),
        ("data/sudoku-4x4-25-aug-0", "", (16, 6)),
        (PRESETS["maze-unique"].data_dir, "", (81, 6)),
        ("data/arc1concept-aug-1000", "", (900, 12)),
        ("anywhere", "maze-30", (900, 6)),
    ],
)
def test_sizes_are_those_of_the_kind_without_a_data_set(data_dir, kind, sizes):
    task = UnbuiltPuzzles(dataclasses.replace(preset("tiny"), data_dir=data_dir), kind, 7)
    assert (task.sizes["seq_len"], task.sizes["vocab_size"], task.sizes["num_puzzle_identifiers"]) == (*sizes, 7)
    assert task.batch(0, (0, 2))["inputs"].shape == (8, sizes[0])


LAST_OF_GROUP = {row.group: name for name, row in EXPERIMENTS.items()}
OTHERS = {name for name, row in EXPERIMENTS.items() if row.starts_from or len(row.data) > 1}
"""Experiments that need more than data and a model: weights of another experiment, or several data sets."""
WHOLE = slow_unless({*LAST_OF_GROUP.values(), *OTHERS}.__contains__, EXPERIMENTS)
DEVICES = 32
SIZES = {"sudoku-9x9": (81, 11), "maze-30": (900, 6), "maze-50": (2500, 6)}


def sizes_of(name):
    kinds = [SIZES[each.kind] for each in data_sets(EXPERIMENTS[name])]
    return (*map(max, zip(*kinds, strict=True)), len(kinds))


@pytest.mark.parametrize("name", WHOLE)
def test_an_experiment_is_assembled(monkeypatch, tmp_path, name):
    trainings = []

    def leave_out(training, options):
        trainings.append((training, train_step_arguments(training)))
        raise UserError("left out")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stage, "compile_train_step", leave_out)
    monkeypatch.setattr(uninitialized, "LARGE", 2**10)  # draws almost nothing
    assert main(["compile-pod", name]) == 2
    ((training, (state, carry, shares, _)),) = trainings
    config = experiment_run(name)
    row = EXPERIMENTS[name]
    arch: Any = config.arch
    assert training.config == config and training.devices.count == DEVICES
    puzzles = sum(each.puzzles for each in data_sets(row))
    assert training.total_steps == plan(config, puzzles).steps
    seq_len, vocab_size, identifiers = sizes_of(name)
    local = config.global_batch_size // DEVICES
    assert shares["inputs"].shape == (DEVICES, local, seq_len)
    table = state.buffers["model.inner.puzzle_emb.weights"]
    assert table.shape[-2:] == (identifiers, arch.puzzle_emb_ndim)
    assert state.params["model.inner.lm_head.weight"].shape[-2:] == (vocab_size, arch.hidden_size)
    assert bool(state.ema) == (config.optim.ema_decay > 0)
    assert all(leaf.shape[:2] == (DEVICES, local) for leaf in jax.tree.leaves(carry) if leaf.ndim > 1)
    training.train_step()  # raises the errors of optimizer, schedules and groups
