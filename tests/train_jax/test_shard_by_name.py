"""`--shard`: parameters divided over a mesh by their names, beside the same runs on one device and on replicas."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from support.scripts import run_script
from support.shard_by_name import EXACT

from train_jax.__main__ import main
from train_jax.errors import UserError
from train_jax.plugin import use_file
from train_jax.run.arguments import parse_run
from train_jax.run.config import ComputeConfig
from train_jax.run.presets import preset
from train_jax.runtime.devices import devices_of
from train_jax.runtime.shard_patterns import read_pattern
from train_jax.trainer.start import start

LORA = "base_model.model.model.layers.0.q_proj"


@pytest.mark.parametrize(
    ("text", "name", "dimensions"),
    [
        ("layers.*.weight=data,model", "layers.0.up.weight", (("data",), ("model",))),
        ("layers.*.weight=data,model", "layers.0.up.bias", None),
        ("up.weight=data", "layers.0.up.weight", None),
        (".*weight=,data+model", "up.weight", ((), ("data", "model"))),
        (".*weight=", "up.weight", ()),
        (r"x=y\.(a|b)=model", "x=y.a", (("model",),)),
    ],
)
def test_a_pattern_matches_whole_names(text, name, dimensions):
    assert read_pattern(text).of(name) == dimensions


@pytest.mark.parametrize(
    ("text", "name", "dimensions"),
    [
        ("model.layers.*q_proj.weight=data,model", f"{LORA}.base_layer.weight", (("data",), ("model",))),
        ("model.layers.*q_proj.weight=data,model", f"{LORA}.lora_A.default.weight", ((), ("model",))),
        ("model.layers.*q_proj.weight=data,model", f"{LORA}.lora_B.default.weight", (("data",),)),
        ("model.layers.*weight=model", f"{LORA}.lora_A.default.weight", ()),
        ("model.layers.*q_proj.bias=data", f"{LORA}.base_layer.bias", (("data",),)),
        (".*lora_A.*=data", f"{LORA}.lora_A.default.weight", (("data",),)),
        ("model.norm.weight=data", "base_model.model.model.norm.weight", (("data",),)),
        ("head.weight=data", "base_model.model.head.modules_to_save.default.weight", (("data",),)),
        ("embed.weight=data,model", "base_model.model.embed.lora_embedding_A.default", ((), ("data",))),
        ("embed.weight=data,model", "base_model.model.embed.lora_embedding_B.default", (("model",),)),
    ],
)
def test_a_pattern_for_the_model_without_adapters_means_their_parts(text, name, dimensions):
    assert read_pattern(text).of(name) == dimensions


def test_the_names_of_adapters_are_those_of_peft():
    peft, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(8, 4), "up": torch.nn.Linear(4, 12)})
    model.forward = lambda ids: model["up"](model["embed"](ids))
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["embed", "up"]))
    embedding, linear = read_pattern("embed.weight=data,model"), read_pattern("up.weight=data,model")
    sizes: dict[tuple[str, ...], tuple[int, int]] = {("data",): (8, 12), ("model",): (4, 4)}
    for name, parameter in adapted.named_parameters():
        dimensions = (embedding if ".embed." in name else linear).of(name)
        if dimensions is None:
            assert name.endswith("bias")
            continue
        for size, axes in zip(parameter.shape, (*dimensions, (), ()), strict=False):
            assert size == (sizes[axes][".up." in name] if axes else 2), name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shard", "weight"], "--shard 'weight' has no names or no axes"),
        (["--shard", "(=data"], r"'\(' is not a regular expression"),
        (["--shard", "a=rows"], "'rows' is no axis; use data, model"),
        (["--shard", "a=data,data"], "divides two dimensions over one axis"),
        (["--shard", "a=data", "--compute.runner", "shard_map"], "cannot be used with compute.runner shard_map"),
        (["--shard", "a=data", "--compute.shard-optimizer"], "cannot be used with compute.shard_optimizer"),
        (["--compute.model-devices", "4"], "compute.model_devices is 4 without --shard"),
    ],
)
def test_a_mistake_in_a_pattern_is_said_at_once(words, message):
    with pytest.raises(UserError, match=message):
        parse_run(["tiny", *words], prog="trm train", description="")


def test_several_processes_are_refused(monkeypatch):
    import jax

    from train_jax.runtime.mesh import MeshDevices

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(UserError, match="over the devices of one process, and there are 2; start one process, or"):
        MeshDevices([read_pattern("a=data")], 1)


def test_frozen_parameters_are_in_the_table(tmp_path, monkeypatch, forgotten):
    monkeypatch.chdir(tmp_path)
    frozen = EXACT.replace("    return nn.Sequential(", "    made = nn.Sequential(", 1).replace(
        "nn.Linear(16, 1))\n", "nn.Linear(16, 1))\n    made[2].requires_grad_(False)\n    return made\n", 1
    )
    Path("mine.py").write_text(frozen)
    use_file("mine.py")
    config = dataclasses.replace(preset("mine"), steps=1, compute=ComputeConfig(shard=("2.*up.weight=data",)))
    table = "\n".join(start(config, devices=devices_of(config.compute)).placement.table())
    assert re.search(r"2\.0\.up\.weight +\(64, 16\) +data", table) and "3.weight" in table


def test_model_devices_divide_the_devices(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--compute.model-devices=7", "--shard", ".*=model", "--run-dir=run"]
    assert main(["train", "tiny", *words]) == 2
    assert "compute.model_devices 7 does not divide the" in capsys.readouterr().err


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharding")
    run_script("shard_by_name", folder)
    return json.loads((folder / "found.json").read_text())


@pytest.mark.slow
def test_eight_devices_train_what_one_trains(found):
    assert found["exact"] < 1e-6 and found["continued"] < 1e-6


@pytest.mark.slow
def test_a_mean_is_that_of_each_replica(found):
    assert found["mean"] < 1e-5


@pytest.mark.slow
def test_a_step_computes_with_parts_and_leaves_them_in_their_places(found):
    step = found["step"]
    assert step["stays"]
    assert "16,64" not in step["products"] and "64,16" not in step["products"]  # the gradients of whole matrices
    assert "16,16" in step["products"]


@pytest.mark.slow
def test_the_table_has_whole_parameters_first_and_the_bytes_of_a_device(found):
    table = [line.split() for line in found["step"]["table"]]
    assert table[1] == ["0.weight", "(16,", "6)", "whole", "384"]
    assert ["2.0.up.weight", "(64,", "16)", "model,data", "512"] in table
    whole = [row[-2] == "whole" for row in table[1:-1]]
    assert whole == sorted(whole, reverse=True)


@pytest.mark.slow
def test_all_misfits_are_one_error(found):
    for part in (
        "the pattern 'layers.*' decides for no parameter",
        "dimension 1 of 0.weight (16, 6) does not divide over 4 devices of model",
        "2.0.norm.weight has 1 dimensions",
        "2.1.norm.weight has 1 dimensions",
    ):
        assert part in found["misfits"]
    assert "\n" not in found["misfits"]
