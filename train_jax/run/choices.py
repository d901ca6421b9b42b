"""Which implementation of an operation a run uses, as `trm prove --choose` measured it once."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from train_jax.errors import UserError
from train_jax.run.config import RunConfig, from_json
from train_jax.run.folder import RunFolder
from train_jax.run.storage import path_of
from train_jax.runtime.processes import of_main_process

_CHOICE = r"[\w.:]+=\w+"
_INLINE = re.compile(rf"(?P<platform>cpu|gpu|tpu)/(?P<choices>({_CHOICE}(,{_CHOICE})*)?)")


def inline(platform: str, choices: dict[str, str]) -> str:
    """Returns choices as `gpu/operation=implementation,…`, the form in a run's `config.json`."""
    return f"{platform}/{','.join(f'{operation}={name}' for operation, name in sorted(choices.items()))}"


def choices_for(text: str, platform: str) -> dict[str, str]:
    """Returns the implementation of each operation; none on another platform than that of the choices.

    Raises `UserError` for what is not of the form of `inline`.
    """
    parsed = _INLINE.fullmatch(text)
    if parsed is None:
        raise UserError(f"--compute.choices {text!r} was not read; give a file that `trm prove --choose` wrote")
    if parsed["platform"] != platform or not parsed["choices"]:
        return {}
    return dict(each.split("=") for each in parsed["choices"].split(","))


def with_choices(config: RunConfig) -> RunConfig:
    """Returns the configuration with the choices in place of the name of their file. Collective.

    The first process reads them for all. A run that continues keeps its own. Raises `UserError` for another file.
    """

    def read() -> dict[str, Any]:
        own = RunFolder(path_of(config.run_dir)).config if config.run_dir.strip() else None
        before = from_json(own.read_text()).compute.choices if own is not None and own.exists() else ""
        return {"choices": before or read_choices(config.compute.choices)}

    choices = of_main_process(read)["choices"]
    return dataclasses.replace(config, compute=dataclasses.replace(config.compute, choices=choices))


def read_choices(named: str) -> str:
    """Returns the choices in a file as `inline`. Raises `UserError` if it holds none."""
    if not named or _INLINE.fullmatch(named):
        return named
    path: Path = path_of(named)
    try:
        content = json.loads(path.read_text())
        text = inline(content["platform"], content["choices"])
        choices_for(text, content["platform"])
        return text
    except OSError as error:
        reason = error.strerror or error
    except (ValueError, KeyError, TypeError, AttributeError, UserError):
        reason = "no choices are in it"
    raise UserError(f"--compute.choices {named} cannot be read ({reason}); write it with `trm prove --choose`")
