"""Checks HTML pages: well-formed, without external references; returns their visible text and their tags."""

from html.parser import HTMLParser

VOID = {"meta", "br", "path", "rect", "circle"}


class Balanced(HTMLParser):
    """Fails on unbalanced tags and external references; collects the text."""

    def __init__(self, document: str):
        super().__init__()
        self.open = []
        self.tags = set()
        self.text = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(document)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.elements.append((tag, dict(attrs)))
        for name, value in attrs:
            outward = name in ("src", "href") or name.startswith("on") or "url(" in (value or "")
            outward |= name == "xlink:href" and not (value or "").startswith("#")
            assert not outward, f"<{tag} {name}={value!r}> reaches outside"
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open and self.open[-1] == tag, f"</{tag}> inside {self.open}"
            self.open.pop()

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_data(self, data):
        if not self.open or self.open[-1] != "style":
            self.text.append(data)


def words(document: str) -> str:
    return " ".join(" ".join(Balanced(document).text).split())
