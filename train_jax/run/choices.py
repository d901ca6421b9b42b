"""The implementation of each operation that a run uses, as `trm prove --choose` measured it once."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

from train_jax.errors import UserError
from train_jax.run.config import RunConfig, read_config
from train_jax.run.folder import RunFolder
from train_jax.runtime.coordination import exchange, place
from train_jax.runtime.processes import of_main_process
from train_jax.storage.json_files import TEXT, object_of, read_object
from train_jax.storage.storage import path_of

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
    """Returns `with_file_read` for a run, which without a file goes on with the choices in its config.json. Collective.

    The file that is named may be gone: the machine may be another one than that which wrote it.
    """

    def named() -> dict[str, Any]:
        there = RunFolder(path_of(config.run_dir)).config if config.run_dir.strip() else None
        own = read_config(there).compute.choices if there is not None and there.exists() else ""
        given = config.compute.choices
        gone = not given or not (_INLINE.fullmatch(given) or path_of(given).exists())
        return {"choices": own if own and gone else given}

    return with_file_read(_with(config, of_main_process(named)["choices"]))


def with_file_read(config: RunConfig) -> RunConfig:
    """Returns the configuration with the choices in place of the name of their file. Collective, without the devices.

    The first process reads the file for all. Raises `UserError` in every process for another file.
    """
    read = {}
    if place()[0] == 0:
        try:
            read = {"choices": read_choices(config.compute.choices)}
        except UserError as error:
            read = {"reason": str(error)}
    read = json.loads(exchange("choices", json.dumps(read))[0])
    if "reason" in read:
        raise UserError(read["reason"])
    return _with(config, read["choices"])


def _with(config: RunConfig, choices: str) -> RunConfig:
    return dataclasses.replace(config, compute=dataclasses.replace(config.compute, choices=choices))


def read_choices(named: str) -> str:
    """Returns the choices in a file as `inline`. Raises `UserError` if it holds none."""
    if not named or _INLINE.fullmatch(named):
        return named
    remedy = "give --compute.choices a file of `trm prove --choose`"
    content = read_object(path_of(named), {"platform": TEXT, "choices": object_of(TEXT)}, remedy=remedy)
    text = inline(content["platform"], content["choices"])
    if not _INLINE.fullmatch(text):
        raise UserError(f"{named} cannot be read (no choices are in it); {remedy}")
    return text
