"""Programs that a model wrote, run in a sandbox, and verdicts on them, by a process that has none of their code."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from train_jax.errors import UserError
from train_jax.language.chat.sandbox import SECONDS, EndedError, Sandbox


class Execution(NamedTuple):
    """What a program says of itself; it could say anything else."""

    output: str = ""
    """The text that it printed; empty if it did not come to its end."""
    error: str = ""
    """Empty if it came to its end."""
    timed_out: bool = False


class FunctionTests(NamedTuple):
    """The tests of a function, in the form of HumanEval."""

    prompt: str
    """Code that the tests may use: imports, other functions."""
    code: str
    """It defines `check(candidate)`, which raises an exception for a wrong function."""
    name: str
    """The name of the function."""


def execute(program: str, seconds: int = SECONDS) -> Execution:
    """Runs a program. Raises `UserError` where programs cannot be kept apart: nothing is run then."""
    try:
        with Sandbox(seconds) as sandbox:
            said = _parse(sandbox.ask(_line({"program": program})))
    except EndedError as error:
        return Execution(error=str(error), timed_out=error.timed_out)
    return Execution(str(said.get("output")), str(said.get("error")))


def passes(program: str, tests: FunctionTests, seconds: int = SECONDS) -> bool:
    """Returns True if a function of a program passes its tests, in time. Raises `UserError` as `execute` does.

    The program and the tests run in sandboxes of their own. Arguments and results go from one to the other as data, so
    that no class or patch of the program takes part in a comparison. Also raises `UserError` for tests whose arguments
    are not data.
    """
    try:
        with Sandbox(seconds) as answers, Sandbox(seconds) as judge:
            if _parse(answers.ask(_line({"program": program}))).get("error") != "":
                return False
            line = judge.ask(_line({"prompt": tests.prompt, "tests": tests.code, "name": tests.name}))
            while "call" in (message := _parse(line)):
                line = judge.ask(answers.ask(line))
    except EndedError:
        return False
    if "refused" in message:
        raise UserError(f"the tests of {tests.name} give it an argument that cannot be sent: {message['refused']}")
    return message.get("passed") is True


def check_sandbox() -> None:
    """Raises `UserError` where programs cannot be kept apart."""
    execute("")


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _parse(line: bytes) -> dict[str, Any]:
    """Raises `EndedError` for what is not a message: a program wrote it."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise EndedError("it wrote into the pipe of its results")
    return message
