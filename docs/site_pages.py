"""MkDocs hook that makes the site from the Markdown files of the repository.

README.md and the other pages at the root become pages of the site. A link to a file outside docs/ (a test, a script)
leads to a copy of that file on the site, as text, so that every link works without knowing where the repository is.
"""

import ast
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
ROOT_PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}
"""Pages at the root of the repository, by their place on the site."""

LARGEST_PAGE = 300_000
"""Bytes that a page of the site may have: a phone loads a larger one in seconds."""
API_OF_THE_BRIDGE = "api/bridge.md"

LINK = re.compile(r"(\]\()([^)\s#:]+)([)\s#])")
"""Target of a Markdown link that is neither a URL nor an anchor alone."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages at the root, and a copy of every file outside docs/ that a page links to."""
    for name, place in ROOT_PAGES.items():
        files.append(File.generated(config, place, content=(ROOT / name).read_text()))
    for file in list(files.documentation_pages()):
        for _, target, _ in LINK.findall(file.content_string):
            path = in_repository(file.src_uri, target)
            if path.startswith("docs/") or path in ROOT_PAGES:
                continue
            if not (ROOT / path).is_file():
                raise PluginError(f"{file.src_uri} links to {target}, and there is no file {path}")
            if files.get_file_from_path(copied(path)) is None:
                files.append(File.generated(config, copied(path), content=(ROOT / path).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links between files of the repository into links between pages of the site."""

    def on_site(match: re.Match[str]) -> str:
        path = in_repository(page.file.src_uri, match[2])
        place = ROOT_PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else copied(path))
        return match[1] + posixpath.relpath(place, posixpath.dirname(page.file.src_uri) or ".") + match[3]

    return LINK.sub(on_site, markdown)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Refuses a page that is too large, and a reference of the bridge without one of its public names."""
    size = len(output.encode())
    if size > LARGEST_PAGE:
        raise PluginError(f"{page.file.src_uri} has {size:,} bytes, more than {LARGEST_PAGE:,}; divide it")
    if page.file.src_uri == API_OF_THE_BRIDGE:
        missing = [name for name in public_names(ROOT / "bridge/__init__.py") if f'id="bridge.{name}"' not in output]
        if missing:
            raise PluginError(f"{page.file.src_uri} does not show {', '.join(missing)}")
    return output


def public_names(path: Path) -> list[str]:
    """Returns the `__all__` of a module, which is not imported."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            return ast.literal_eval(node.value)
    return []


def in_repository(page: str, target: str) -> str:
    """Returns the path from the root of the repository of a file that `page` of the site links to."""
    source = {place: name for name, place in ROOT_PAGES.items()}.get(page, f"docs/{page}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))


def copied(path: str) -> str:
    """Returns the path on the site of a file outside docs/; it ends in .txt, which browsers show."""
    return f"source/{path}.txt"
