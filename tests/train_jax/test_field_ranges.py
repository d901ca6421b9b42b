"""Every field of every stage takes extreme values or refuses them in one line, refuses those below its range, and is on
one page of a help that fits a screen."""

import dataclasses
import importlib
import typing

import pytest
from support.markers import slow_unless

from models_torch.ranges import Range, field_rules
from models_torch.registry import ARCHITECTURES
from train_jax.__main__ import main
from train_jax.cli import build_data
from train_jax.core.optim.config import OptimConfig
from train_jax.language.stages import tokenizer
from train_jax.language.task import LanguageConfig
from train_jax.plugin import entries
from train_jax.puzzles.task import PuzzleConfig
from train_jax.research.stages import sweep
from train_jax.run.config import ComputeConfig, RunConfig

VALUES = ("-5", "nan", str(10**30), "")
COMMANDS = {"build-data": build_data.commands(), "tokenizer": tokenizer.COMMANDS, "sweep": sweep.COMMANDS}
POSITIONAL = {
    "score": " data file", "core": " run bundle", "build-data inspect": " folder", "build-data arc": " --source folder",
    "tokenizer evaluate": " folder", "tokenizer inspect": " folder", "sweep show": " exp01a", "sweep diff": " exp01a",
    "sweep run": " tiny",
}  # fmt: skip


def options(config_class, prefix=""):
    """The options of a dataclass, each with what its field declares; positional fields and nested ones have none."""
    hints = typing.get_type_hints(config_class, include_extras=True)
    for name, rule in field_rules(config_class).items():
        if "Positional" not in str(hints[name]) and not dataclasses.is_dataclass(rule.base):
            yield f"--{prefix}{name}".replace("_", "-"), rule.declared


def module_of(stage):
    return importlib.import_module(entries("stages")[stage].target.partition(":")[0])


def cases():
    """Returns a dict from the words of a command to its options."""
    every = {f"{stage} {name}": each for stage, commands in COMMANDS.items() for name, each in commands.items()}
    for stage in ("evaluate", "solve", "export", "report", "summary", "generate", "chat-eval", "chat", "serve"):
        every[stage] = getattr(module_of(stage), stage.title().replace("-", ""))
        POSITIONAL[stage] = " run"
    every |= {stage: getattr(module_of(stage), stage.title()) for stage in ("score", "core")}
    found = {words + POSITIONAL.get(words, ""): [*options(config_class)] for words, config_class in every.items()}
    parts = (RunConfig, ""), (PuzzleConfig, ""), (OptimConfig, "optim."), (ComputeConfig, "compute.")
    own = [each for config_class, prefix in parts for each in options(config_class, prefix)]
    skipped = {"--arch", "--task-config", "--optim", "--compute", "--task", "--model"}
    found["train tiny"] = [each for each in own if each[0] not in skipped]
    found["train chat-tiny"] = [*options(LanguageConfig)]
    seen = set()  # a field that architectures inherit has one declaration; test_ranges.py walks it for each of them
    for name, architecture in ARCHITECTURES.items():
        found[f"train tiny --model {name}"] = [
            each for each in options(architecture.config_class, "arch.") if not (each in seen or seen.add(each))
        ]
    return {words: each for words, each in found.items() if each}


CASES = cases()


@pytest.mark.parametrize("words", slow_unless(lambda words: not words.startswith("train tiny"), sorted(CASES)))
def test_extreme_values_are_accepted_or_refused_in_one_line(words, capsys, tmp_path, monkeypatch):
    """Parses and validates only; the working folder must stay empty."""
    monkeypatch.chdir(tmp_path)
    stage = words.split()[0]
    check = (lambda config: config.check()) if stage == "build-data" else (lambda config: None)
    monkeypatch.setattr(module_of(stage), "main", check)
    for option, declared in CASES[words]:
        for value in VALUES:
            status = main([*words.split(), f"{option}={value}"])
            error = capsys.readouterr().err
            assert status in (0, 2), (option, value)
            if status == 2:
                assert error.startswith("trm: ") and len(error.strip().splitlines()) == 1, (option, value, error)
            elif isinstance(declared, Range) and value in ("-5", "nan"):
                assert value == "-5" and declared.accepts(-5), option
    assert not list(tmp_path.iterdir())


# ---- help


@pytest.fixture
def shown(capsys, monkeypatch):
    """`shown(*words)`: a page of help, which fits a screen."""

    def run(*words):
        monkeypatch.setenv("COLUMNS", "100")
        with pytest.raises(SystemExit) as end:
            main([*words])
        page = capsys.readouterr().out
        assert not end.value.code and 5 < sum(-(-len(line) // 100) for line in page.splitlines()) <= 50
        return page

    return run


@pytest.mark.parametrize(
    "words", [*entries("stages"), *(f"{stage} {name}" for stage, commands in COMMANDS.items() for name in commands)]
)
def test_help_of_every_stage_fits_a_screen(words, shown):
    page = shown(*words.split(), "--help")
    assert not words.startswith("build-data") or "None" not in page


def test_every_page_of_the_help_of_training_fits_a_screen(shown):
    for page in RunConfig.HELP_PAGES:
        shown("train", "tiny", "--help", page)
