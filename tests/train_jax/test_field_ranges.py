"""Every field of every stage takes extreme values or refuses them in one line, and refuses those below its range."""

import dataclasses
import importlib
import typing

import pytest
from support.markers import slow_unless

from models_torch.ranges import Range, field_rules
from models_torch.registry import ARCHITECTURES
from train_jax.__main__ import STAGES, main
from train_jax.optim.config import OptimConfig
from train_jax.run.config import ComputeConfig, RunConfig
from train_jax.stages import build_data, evaluate, solve, sweep, tokenizer
from train_jax.tasks.language.task import LanguageConfig
from train_jax.tasks.puzzles.task import PuzzleConfig

VALUES = ("-5", "nan", str(10**30), "")
REQUIRED = {
    "evaluate": ["run"], "score": ["data", "file"], "solve": ["run"], "export": ["run"], "report": ["run"],
    "summary": ["run"], "core": ["run", "bundle"], "generate": ["run"], "chat-eval": ["run"],
    "chat": ["run"], "serve": ["run"],
}  # fmt: skip


def options(config_class, prefix=""):
    """The options of a dataclass, each with what its field declares; positional fields and nested ones have none."""
    hints = typing.get_type_hints(config_class, include_extras=True)
    for name, rule in field_rules(config_class).items():
        if "Positional" not in str(hints[name]) and not dataclasses.is_dataclass(rule.base):
            yield f"--{prefix}{name}".replace("_", "-"), rule.declared


def cases():
    classes = {"evaluate": evaluate.Evaluate, "solve": solve.Solve}
    for stage in ("score", "export", "report", "summary", "core", "generate", "chat-eval", "chat", "serve"):
        module = importlib.import_module(f"train_jax.stages.{stage.replace('-', '_')}")
        classes[stage] = getattr(module, stage.title().replace("-", ""))
    for stage, config_class in classes.items():
        yield from (([stage, *REQUIRED[stage]], *option) for option in options(config_class))
    for kind, config_class in build_data.COMMANDS.items():
        first = {"inspect": ["folder"], "arc": ["--source", "folder"]}.get(kind, [])
        yield from ((["build-data", kind, *first], *option) for option in options(config_class))
    for command, config_class in tokenizer.COMMANDS.items():
        first = [] if command == "train" else ["folder"]
        yield from ((["tokenizer", command, *first], *option) for option in options(config_class))
    for command, config_class in sweep.COMMANDS.items():
        first = {"show": ["exp01a"], "diff": ["exp01a"], "run": ["tiny"]}.get(command, [])
        yield from ((["sweep", command, *first], *option) for option in options(config_class))
    parts = {"": RunConfig, "optim.": OptimConfig, "compute.": ComputeConfig}
    for prefix, config_class in parts.items():
        skipped = {"--arch", "--task-config", "--optim", "--compute", "--task", "--model"}
        yield from ((["train", "tiny"], *each) for each in options(config_class, prefix) if each[0] not in skipped)
    yield from ((["train", "tiny"], *option) for option in options(PuzzleConfig))
    yield from ((["train", "chat-tiny"], *option) for option in options(LanguageConfig))
    seen = set()  # a field that architectures inherit has one declaration; test_ranges.py walks it for each of them
    for name, architecture in ARCHITECTURES.items():
        for each in options(architecture.config_class, "arch."):
            if each not in seen:
                seen.add(each)
                yield ["train", "tiny", "--model", name], *each


CASES = list(cases())
STAGES_OF_CASES = slow_unless(
    lambda stage: not stage.startswith("train tiny"), sorted({" ".join(argv) for argv, *_ in CASES})
)


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch, tmp_path):
    """Parses and validates only; the working folder must stay empty."""
    monkeypatch.chdir(tmp_path)
    for stage in STAGES:
        module = importlib.import_module(f"train_jax.stages.{stage.replace('-', '_')}")
        check = (lambda config: config.check()) if stage == "build-data" else (lambda config: None)
        monkeypatch.setattr(module, "main", check)


@pytest.mark.parametrize("stage", STAGES_OF_CASES)
def test_extreme_values_are_accepted_or_refused_in_one_line(stage, capsys, tmp_path):
    for argv, option, declared in CASES:
        if " ".join(argv) != stage:
            continue
        for value in VALUES:
            status = main([*argv, f"{option}={value}"])
            error = capsys.readouterr().err
            assert status in (0, 2), (option, value)
            if status == 2:
                assert error.startswith("trm: ") and len(error.strip().splitlines()) == 1, (option, value, error)
            elif isinstance(declared, Range) and value in ("-5", "nan"):
                assert value == "-5" and declared.accepts(-5), option
    assert not list(tmp_path.iterdir())
