"""`--help` of every stage fits a screen, and shows every field of a stage on exactly one of its pages."""

import re

import pytest

from models_torch.registry import ARCHITECTURES
from train_jax.__main__ import STAGES, main
from train_jax.command_line import leaf_fields, page_of
from train_jax.run.config import RunConfig, with_model
from train_jax.run.presets import preset
from train_jax.stages import build_data, sweep, tokenizer

PAGES = ("", *RunConfig.HELP_PAGES)
MODELS = (*ARCHITECTURES, "support.outside_models:Thinker")


@pytest.fixture
def shown(capsys, monkeypatch):
    def run(*argv):
        monkeypatch.setenv("COLUMNS", "100")
        with pytest.raises(SystemExit) as end:
            main(list(argv))
        assert not end.value.code
        return capsys.readouterr().out

    return run


def fits(page):
    return 5 < sum(-(-len(line) // 100) for line in page.splitlines()) <= 50  # tyro wraps no description


def option(field):
    """Returns the option as on the command line: the fields of the task have no prefix."""
    return f"--{field.removeprefix('task_config.').replace('_', '-')}"


@pytest.mark.parametrize(
    "words",
    [[stage] for stage in STAGES]
    + [["build-data", kind] for kind in build_data.COMMANDS]
    + [["sweep", command] for command in sweep.COMMANDS]
    + [["tokenizer", command] for command in tokenizer.COMMANDS],
    ids=" ".join,
)
def test_help_of_every_stage_fits_a_screen(words, shown):
    page = shown(*words, "--help")
    assert fits(page) and (words[0] != "build-data" or "None" not in page)


@pytest.mark.parametrize("model", MODELS)
def test_every_field_of_training_is_on_one_page_that_fits_a_screen(model, shown):
    names = PAGES if model == "trm" else ("arch", "act")  # the others are the same for every model
    pages = {name: shown("train", "tiny", "--model", model, "--help", *filter(None, [name])) for name in names}
    assert all(fits(page) for page in pages.values())
    for field in leaf_fields(with_model(preset("tiny"), model)):
        where = page_of(RunConfig.HELP_PAGES, field)
        showing = [name for name in names if re.search(rf"(?m)^\W*{option(field)}[ ,]", pages[name])]
        assert showing == [where] * (where in names), field
