"""The web page: chat and puzzles. Its files are in `page/`; the browser loads nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from train_jax.report.render import COLOURS, render_document

_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""Headers that make the browser refuse content of other servers."""


_SCRIPTS = ("page.js", "base.js", "chat.js", "conversations.js", "markdown.js", "vendor/marked.js", "vendor/purify.js")


def page_routes() -> Sequence[Route]:
    """Returns the routes of the files. They contain nothing of the models, so they need no token."""
    return [
        _file("/", _read("page.html"), "text/html"),
        _file("/page.css", stylesheet(), "text/css"),
        *(_file(f"/{name}", _read(name), "text/javascript") for name in _SCRIPTS),
    ]


def stylesheet() -> str:
    """Returns the colours and drawings of the reports, in light and dark, and the page's own rules."""
    colours = "".join(f"--{name}: light-dark({each.light}, {each.dark}); " for name, each in COLOURS.items())
    return f":root {{ {colours}}}\n{render_document('drawings.css.j2')}\n{_read('page.css')}"


def _file(path: str, content: str, media_type: str) -> Route:
    async def endpoint(_: Request) -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)

    return Route(path, endpoint)


def _read(name: str) -> str:
    return (resources.files("train_jax.serve") / "page" / name).read_text(encoding="utf-8")
