"""Problems by name, as a command line gives them: `NAME[,OPTION=VALUE…][@FOLDER][:COUNT]`."""

from __future__ import annotations

import contextlib
import re
from typing import Any, NamedTuple

from train_jax.errors import UserError
from train_jax.language.chat import problems, published, reasoning, sudoku
from train_jax.language.chat.problems import Problems, Split

TASKS: dict[str, type[Problems]] = {
    task.name: task
    for task in (
        *(problems.Arithmetic, problems.Calculator, problems.Spelling, problems.Counting, problems.Glosses),
        *(problems.Identity, problems.SmallTalk, published.Messages, published.SmolTalk, published.GSM8K),
        *(published.ArcEasy, published.ArcChallenge, published.MMLU, published.HumanEval, reasoning.ReasoningGym),
        sudoku.Sudoku,
    )
}
_WITH_COUNT = re.compile(r"(.*):(\d+)", re.DOTALL)


class TaskName(NamedTuple):
    """The parts of a text such as `arithmetic,digits=3:5000`."""

    text: str
    problems: type[Problems]
    options: dict[str, Any]
    folder: str
    count: int | None

    def open(self, split: Split, *, seed: int = 0, count: int | None = None) -> Problems:
        """Returns the problems of a split, by default as many as the text says.

        Raises `UserError` without data; only the test split may be empty.
        """
        count = self.count if count is None else count
        problems = self.problems(split, seed=seed, count=count, folder=self.folder, **self.options)
        if split == "train" and not len(problems):
            raise UserError(f"{self.text} has no problem in the train split; use more data")
        return problems


def task_name(text: str) -> TaskName:
    """Reads a text. Raises `UserError` for an unknown name, option or value."""
    counted = _WITH_COUNT.fullmatch(text)
    rest, count = (counted[1], int(counted[2])) if counted else (text, None)
    if count == 0:
        raise UserError(f"--tasks {text}: expected at least one problem")
    words, _, folder = rest.partition("@")
    name, *options = words.split(",")
    if name not in TASKS:
        raise UserError(f"--tasks {text}: unknown task {name!r}; use one of {', '.join(TASKS)}")
    return TaskName(text, TASKS[name], dict(_option(TASKS[name], option, text) for option in options), folder, count)


def _option(task: type[Problems], option: str, text: str) -> tuple[str, Any]:
    name, _, value = option.partition("=")
    if name and value and task.takes_any_option and name not in task.OPTIONS:
        return name, _literal(value)
    if name not in task.OPTIONS:
        known = ", ".join(f"{each}={default}" for each, default in task.OPTIONS.items()) or "no options"
        raise UserError(f"--tasks {text}: unknown option {name!r}; the task has {known}")
    default = task.OPTIONS[name]
    if not value or (isinstance(default, int) and not value.isdecimal()):
        raise UserError(f"--tasks {text}: {name}={value}, expected a value such as {name}={default}")
    return name, type(default)(value)


def _literal(value: str) -> bool | int | float | str:
    """Returns True, False or a number if the text is one, else the text."""
    if value in ("True", "False"):
        return value == "True"
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(value)
    return value
