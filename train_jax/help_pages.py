"""`--help` in pages that fit on a screen, for stages with many fields.

A configuration class declares its pages in `HELP_PAGES`; fields that are on none of them are on the first page.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, get_type_hints

import tyro

from train_jax.errors import UserError

ALL = "all"


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


def leaf_fields(config: Any, prefix: str = "") -> Iterator[str]:
    """Yields the dotted name of every field of a configuration, including the fields of nested dataclasses."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from leaf_fields(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}"


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
