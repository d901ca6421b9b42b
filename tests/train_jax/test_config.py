"""A run's configuration for every architecture: switching with `--model`, JSON and back, sizes filled in."""

import dataclasses
import json

import pytest

from models_torch.outside import OutsideConfig
from models_torch.registry import ARCHITECTURES, config_class
from train_jax.__main__ import main
from train_jax.errors import UserError
from train_jax.run.config import PRESETS, RunConfig, from_json, preset, sized_for, to_json, with_model
from train_jax.run.folder import open_run
from train_jax.stages.train import cli
from train_jax.tasks.puzzles.format import Metadata

DATA = Metadata(36, 8, 0, 0, 0, 5, 1, 1.0, 1, ("all",))
OUTSIDE = "outside_models:Thinker"


@pytest.fixture(autouse=True)
def importable(monkeypatch, request):
    monkeypatch.syspath_prepend(str(request.config.rootpath / "tests"))


@pytest.fixture
def unknown_cells(monkeypatch):
    """What `trm train …` would train."""
    found: list[RunConfig] = []
    monkeypatch.setattr("train_jax.stages.train.main", found.append)

    def ask(*argv: str) -> RunConfig:
        cli(list(argv))
        return found[-1]

    return ask


@pytest.mark.parametrize("name", [*ARCHITECTURES, OUTSIDE])
def test_every_architecture_goes_to_json_and_back_and_takes_the_sizes_of_the_data(name, asked):
    options = ["--arch.options", '{"width": 8, "deep": {"a": [1, null]}}'] if ":" in name else []
    config = asked("tiny", "--model", name, "--arch.halt-max-steps", "3", *options)
    assert type(config.arch) is config_class(name) and config.arch.halt_max_steps == 3
    again = from_json(to_json(config))
    assert again == config and type(again.arch) is type(config.arch)
    sized = sized_for(config, DATA, 7)
    assert (sized.batch_size, sized.seq_len, sized.vocab_size, sized.num_puzzle_identifiers) == (7, 36, 8, 5)
    assert dataclasses.replace(sized, batch_size=1, seq_len=1, vocab_size=2, num_puzzle_identifiers=1) == config.arch


def test_what_a_preset_sets_is_carried_over_and_the_rest_is_the_architectures_own(asked):
    config = asked("sudoku6", "--model=hrm", "--arch.H-layers", "2")
    arch, was = dataclasses.asdict(config.arch), dataclasses.asdict(preset("sudoku6").arch)
    for name in ("hidden_size", "mlp_t", "L_layers", "H_cycles", "puzzle_emb_len", "loss_type", "forward_dtype"):
        assert arch[name] == was[name], name
    # What the preset leaves alone is published for HRM, not for TRM.
    assert arch["no_ACT_continue"] is False and was["no_ACT_continue"] is True
    assert arch["H_layers"] == 2 and arch["num_heads"] == 8
    assert config.optim == preset("sudoku6").optim and config.model == "hrm"
    assert with_model(preset("sudoku-extreme"), "transformer").arch.num_heads == 12


def test_without_a_model_or_with_the_presets_own_nothing_changes(asked):
    assert asked("tiny") == asked("tiny", "--model", "trm") == PRESETS["tiny"]


def test_an_outside_module_keeps_what_is_known_of_every_model(asked):
    config = asked("tiny", "--model", OUTSIDE, "--arch.options", '{"width": 4}')
    assert config.arch == OutsideConfig(halt_max_steps=4, forward_dtype="float32", options={"width": 4})
    plain = asked("tiny", "--model", "outside_models:CellNet")
    assert isinstance(plain.arch, OutsideConfig) and plain.arch.halt_max_steps == 1


def test_help_shows_the_fields_of_the_model(capsys):
    shown = {}
    for name in ("transformer", OUTSIDE):
        with pytest.raises(SystemExit):
            cli(["tiny", "--model", name, "--help"])
        shown[name] = capsys.readouterr().out
    assert "--arch.H-layers" in shown["transformer"] and "--arch.L-cycles" not in shown["transformer"]
    assert "--arch.options JSON" in shown[OUTSIDE] and "--arch.hidden-size" not in shown[OUTSIDE]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model", "gru"], "unknown architecture 'gru'; use one of trm, trm_singlez, trm_hier6, hrm, transformer"),
        (["--model", "nowhere:Net"], "'nowhere' cannot be imported (ModuleNotFoundError"),
        (["--model", "outside_models:Nought"], "has no nn.Module class 'Nought'; it has CellNet, Thinker"),
        (["--model", OUTSIDE], "outside_models:Thinker refused {'batch_size': 16, "),
        (["--model", "outside_models:CellNet", "--arch.halt-max-steps", "2"], "has no initial_carry to go on from"),
        (["--model", "outside_models:CellNet", "--arch.options", '{"depth": 1}'], "takes no depth; its arguments are"),
        (["--model", "hrm", "--arch.puzzle-emb-ndim", "99"], "puzzle_emb_ndim 99 does not fit"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_is_one_line_and_leaves_no_folder(argv, message, capsys, tmp_path, data_dir):
    where = ["--data-dir", str(data_dir), "--run-dir", str(tmp_path / "run"), "--wandb", "disabled"]
    status = main_status(["train", "tiny", *where, *argv])
    error = capsys.readouterr().err
    assert status == 2 and message in " ".join(error.split())
    if "unknown" in message or "outside" in argv[1]:
        assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


def main_status(argv: list[str]) -> int:
    try:
        return main(argv)
    except SystemExit as stop:
        return int(stop.code or 0)


def test_options_that_are_no_json_object_are_said():
    for given in ("[1]", "{a", "3"):
        with pytest.raises(UserError) as stop:
            cli(["tiny", "--model", OUTSIDE, "--arch.options", given])
        assert f"{given} is no JSON object" in str(stop.value)


def test_model_and_configuration_belong_together():
    with pytest.raises(UserError, match="model hrm is configured by HRMConfig, arch is a TRMConfig"):
        dataclasses.replace(preset("tiny"), model="hrm")


def test_a_run_of_another_model_or_with_fewer_options_is_another_run(tmp_path, asked):
    config = asked("tiny", "--model", OUTSIDE, "--arch.options", '{"width": 4, "more": 1}', "--run-dir", str(tmp_path))
    open_run(config)
    open_run(config)
    fewer = dataclasses.replace(config, arch=dataclasses.replace(config.arch, options={"width": 4}))
    with pytest.raises(UserError, match=r"\(arch.options.more 1 there, None asked\)"):
        open_run(fewer)
    with pytest.raises(UserError, match=r"\(model outside_models:Thinker there, hrm asked\)"):
        open_run(with_model(config, "hrm"))
    assert json.loads((tmp_path / "config.json").read_text())["arch"]["options"] == {"width": 4, "more": 1}
