"""Parses the arguments of a stage into its dataclass with tyro; errors are one line."""

import contextlib
import dataclasses
import inspect
import io
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tyro

from models_torch.ranges import check_ranges
from train_jax.errors import UserError, option_error
from train_jax.help_pages import pages_of, print_pages, requested_page

WIDE = "5000"
"""Columns, so that tyro does not wrap messages."""


def parse(command: Any, argv: list[str], *, prog: str, reader: Callable[..., Any] = tyro.cli, **more: Any) -> Any:
    """Parses the arguments with `tyro.cli` or another of tyro's functions, and checks the range of every field.

    `--help` prints the help and exits; `--help PAGE` prints one page of a class with `HELP_PAGES`. Raises `UserError`
    for arguments that tyro rejects and for values out of range. A configuration with a `__post_init__` checks itself. A
    class with pages has one required field at most, its first one.
    """
    page = requested_page(command, argv)
    if page is not None and pages_of(command):
        shown = {} if "default" in more else {"default": command(dataclasses.fields(command)[0].name.upper())}
        print_pages(
            command,
            page,
            reader=reader,
            prog=prog,
            **(shown | {"description": inspect.cleandoc(command.__doc__)} | more),
        )
        raise SystemExit(0)
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), _wide() if page is None else contextlib.nullcontext():
            config = reader(command, args=argv, prog=prog, **more)
    except SystemExit:
        if not errors.getvalue():
            raise
        raise UserError(_one_line(errors.getvalue())) from None
    if not hasattr(config, "__post_init__"):
        try:
            check_ranges(config)
        except ValueError as error:
            raise option_error(error) from None
    return config


def parse_subcommand(commands: Mapping[str, Any], argv: list[str], *, prog: str, unknown: str, description: str) -> Any:
    """Parses the arguments of a stage with subcommands, classes by name; `unknown` says what a wrong name is.

    Raises `UserError` as `parse` does.
    """
    if argv and not argv[0].startswith("-") and argv[0] not in commands:
        raise UserError(f"unknown {unknown.format(repr(argv[0]))}; use one of {', '.join(commands)}")
    return parse(
        commands,
        argv,
        prog=prog,
        reader=tyro.extras.subcommand_cli_from_dict,
        description=description,
        config=(tyro.conf.DisallowNone, tyro.conf.FlagCreatePairsOff),
    )


@contextlib.contextmanager
def _wide() -> Iterator[None]:
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = WIDE
    try:
        yield
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before


def _one_line(box: str) -> str:
    """Converts tyro's error box to one line: the message, the proposed options, and the command for help.

    Sections are separated by rules, and the first one is the title. Without Unicode on stdout, boxes consist of spaces
    and hyphens.
    """
    sections: list[list[str]] = [[]]
    for line in re.sub(r"\x1b\[[0-9;]*m", "", box).splitlines():
        line = line.strip(" │")
        if line.startswith("╭") or (set(line) and set(line) <= set("─-╰╯")):
            sections.append([])
        elif line:
            sections[-1].append(line)
    message, *more = (" ".join(section) for section in sections[1:] if section)
    message = message.rstrip(".:")
    proposed = [line for section in sections[2:] for line in section if line.startswith("-")]
    if proposed:
        message += f"; {'expected' if message.startswith('Error parsing') else 'perhaps'} {' or '.join(proposed[:3])}"
    return f"{message}; see {re.sub('.* (run:?|see) ', '', more[-1])}"
