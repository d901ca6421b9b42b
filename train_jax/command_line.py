"""Parses the arguments of a stage into its dataclass with tyro; errors are one line, `--help` fits on a screen.

A configuration class with many fields declares pages of them in `HELP_PAGES`; other fields are on the first page.
"""

import contextlib
import dataclasses
import inspect
import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, get_type_hints

import tyro

from train_jax.errors import UserError, check_options

WIDE = "5000"
"""Columns, so that tyro does not wrap messages."""
ALL = "all"


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
        check_options(config)
    return config


def run_stage(name: str, target: Any, argv: list[str]) -> None:
    """Runs a stage: a function of the arguments, or a dataclass of options in a module with `main(options)`."""
    if isinstance(target, type):
        sys.modules[target.__module__].main(parse(target, argv, prog=f"trm {name}"))
    else:
        target(argv)


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


# ---- help


@dataclasses.dataclass(frozen=True)
class HelpPage:
    """Options that are shown together."""

    title: str
    fields: tuple[str, ...]
    """Fields such as "seed", all fields of a nested dataclass such as "optim", or single fields such as "optim.lr"."""


def pages_of(command: Any) -> Mapping[str, HelpPage]:
    """Returns the pages that a configuration class declares, without the first page."""
    return getattr(command, "HELP_PAGES", {})


def requested_page(command: Any, argv: list[str]) -> str | None:
    """Returns the page after `--help`; None without `--help`, empty for the first page.

    Raises `UserError` for an unknown page.
    """
    index = next((index for index, word in enumerate(argv) if word in ("-h", "--help")), None)
    if index is None:
        return None
    after = argv[index + 1] if index + 1 < len(argv) else ""
    pages = pages_of(command)
    if not pages or not after or after.startswith("-"):
        return ""
    if after not in (*pages, ALL):
        raise UserError(f"no help page {after!r}; use one of {', '.join((*pages, ALL))}, or --help alone")
    return after


def print_pages(
    command: Any, page: str, *, default: Any, description: str, prog: str, reader: Callable[..., Any], **more: Any
) -> None:
    """Prints one or all pages of a configuration class; `reader` is a function of tyro."""
    pages = pages_of(command)
    for name in ("", *pages) if page == ALL else (page,):
        shown = _showing(default, lambda field, name=name: page_of(pages, field) == name)
        text = pages[name].title if name else description
        with contextlib.suppress(SystemExit):
            reader(type(shown), args=["--help"], default=shown, description=text, prog=prog, **more)
    if not page:
        width = max(map(len, pages))
        lines = [f"  --help {name:<{width}}  {each.title}" for name, each in pages.items()]
        print("\n".join(["More options:", *lines, f"  --help {ALL:<{width}}  every page"]))


def page_of(pages: Mapping[str, HelpPage], field: str) -> str:
    """Returns the page that names a field or the dataclass that contains it; "" for the first page."""
    part = field.partition(".")[0]
    names = {each: name for name, page in pages.items() for each in page.fields}
    return names.get(field, names.get(part, ""))


def _showing(config: Any, visible: Callable[[str], bool], prefix: str = "") -> Any:
    """Returns the configuration as a subclass with help only for fields with `visible(dotted name)`.

    tyro reads help texts from the source of the class that declares a field; the subclass refers to that source.
    """
    hints = get_type_hints(type(config), include_extras=True)
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    for name, value in values.items():
        if dataclasses.is_dataclass(value):
            values[name] = _showing(value, visible, f"{prefix}{name}.")
            markers = getattr(hints[name], "__metadata__", ())  # such as OmitArgPrefixes
            hints[name] = Annotated[(type(values[name]), *markers)] if markers else type(values[name])
        elif not visible(f"{prefix}{name}"):
            hints[name] = Annotated[hints[name], tyro.conf.Suppress]
    body = {
        "__annotations__": {name: hints[name] for name in values},
        "__doc__": type(config).__doc__,
        "__module__": type(config).__module__,
        "__qualname__": type(config).__qualname__,
        "__post_init__": lambda self: None,  # no checks: the values are valid, but have other classes here
    }
    return dataclasses.dataclass(frozen=True, kw_only=True)(type(type(config).__name__, (type(config),), body))(
        **values
    )
