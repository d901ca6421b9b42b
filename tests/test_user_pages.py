"""The pages for users name what a user can find, and read as technical English.

User pages are README.md and docs/*.md; docs/dev is for developers. `tests/test_docs.py` parses the commands in
code blocks. A page is in `COVERED` once it is written to these rules.
"""

import ast
import re
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[1]
COVERED = [
    "README.md",
    "docs/alternatives.md",
    "docs/architectures.md",
    "docs/at_night.md",
    "docs/atlas.md",
    "docs/bridge.md",
    "docs/bridge_call.md",
    "docs/bridge_semantics.md",
    "docs/chat.md",
    "docs/contents.md",
    "docs/data.md",
    "docs/deploy-v4-64.md",
    "docs/evaluation.md",
    "docs/experiments.md",
    "docs/from_pytorch.md",
    "docs/glossary.md",
    "docs/hrm_text.md",
    "docs/jax.md",
    "docs/language.md",
    "docs/nanochat.md",
    "docs/own_puzzle.md",
    "docs/performance.md",
    "docs/plugins.md",
    "docs/pods.md",
    "docs/potentials.md",
    "docs/profiling.md",
    "docs/releases.md",
    "docs/reliability.md",
    "docs/tpu_types.md",
    "docs/training.md",
    "docs/troubleshooting.md",
    "docs/your_script.md",
]
ALL = ["README.md", *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").glob("*.md")))]
WORDS = 32_000
"""Words of all pages for users together; a word has a letter or a digit, and the bars and rules of a table are none."""
MAY_NAME_COMMITS = {"docs/performance.md", "docs/atlas.md"}
"""Pages whose figures are written by commands."""

OF_OTHER_PROGRAMS = {"additional-suffix", "logdir", "max-restarts", "requeue"}
"""Options of programs that a page for users names beside this project's."""
NANOCHATS = {"fp8", "hf-path", "model-tag", "num-gpus", "sample-every", "scalar-lr", "split-tokens", "device-type"}
"""Options of nanochat that its page names and that have no underscore."""

on_each_page = pytest.mark.parametrize("page", COVERED)


def text_of(page):
    return (ROOT / page).read_text()


def without_blocks(text):
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def prose_of(page):
    """Returns the text without code and without the addresses of links; code in a line becomes `code`."""
    text = re.sub(r"(``?)[^`\n]+?\1", "`code`", without_blocks(text_of(page)))
    return re.sub(r"\]\([^)]*\)|<!--.*?-->", "]", text)


NOT_COVERED: set[str] = set()
"""Pages that are not written to these rules yet."""


def test_every_page_is_covered():
    assert set(COVERED) <= set(ALL)
    assert set(ALL) - set(COVERED) <= NOT_COVERED


def test_the_pages_are_short():
    assert sum(len(words_of(text_of(page))) for page in ALL) <= WORDS


def words_of(text):
    return [word for word in text.split() if re.search(r"\w", word)]


@on_each_page
def test_no_commit(page):
    if page not in MAY_NAME_COMMITS:
        words = re.findall(r"\b[0-9a-f]{7,40}\b", text_of(page))
        assert not [word for word in words if re.search("[a-f]", word) and re.search("[0-9]", word)]


@on_each_page
def test_no_test(page):
    assert not re.findall(
        r"\btests/(?!run\.sh|newest\.sh|write_hashes\.py)\S*|\btest_(?!data\b)\w+(?:\.py)?", text_of(page)
    )


def anchors_of(path):
    """Returns the anchors that MkDocs gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", without_blocks(path.read_text()), re.MULTILINE)
    words = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings]
    return {re.sub(r"[-\s]+", "-", each) for each in words}


@on_each_page
def test_anchors_exist(page):
    links = re.findall(r"\]\(([^)\s#:]*)#([^)\s]+)\)", without_blocks(text_of(page)))
    paths = {name: (ROOT / page).parent / name if name else ROOT / page for name, _ in links}
    assert not [f"{name}#{anchor}" for name, anchor in links if anchor not in anchors_of(paths[name])]


# ---- options


def fields_of(tree):
    """Yields the names of the fields of classes and of the options that the code writes as text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from (
                each.target.id
                for each in node.body
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"(?<!\S)--([a-z][\w.-]*)", node.value)


@pytest.fixture(scope="module")
def known_options():
    packages = [ROOT / package for package in ("bridge", "train_jax", "models_torch", "benchmarks", "campaigns")]
    paths = [path for package in packages for path in package.rglob("*.py")]
    return {name.replace("_", "-") for path in paths for name in fields_of(ast.parse(path.read_text()))}


@on_each_page
def test_options_exist(page, known_options):
    """An option in a line of text, by the last part of its name; code blocks are parsed as commands."""
    lines = re.findall(r"``?([^`\n]+)``?", without_blocks(text_of(page)))
    named = {option for line in lines for option in re.findall(r"(?<!\S)--([a-z][\w.-]*)", line)}
    named = {
        each for each in named if not each.startswith("xla") and "_" not in each
    }  # flags of XLA, nanochat's options
    last_parts = {each: each.rpartition(".")[2].replace("_", "-") for each in named}
    known = known_options | OF_OTHER_PROGRAMS | (NANOCHATS if page == "docs/nanochat.md" else set())
    assert not {each for each, part in last_parts.items() if not known & {part, part.removeprefix("no-")}}


@on_each_page
def test_extras_exist(page):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"\bextras? `([\w-]+)`", text_of(page))) <= set(extras)


# ---- plain English

PATTERNS = {
    "another, where something different is meant": r"\b(?:is|are|was|were|be|become) another\b|\banother than\b",
    "a clause as a noun": r"\bwhat (?:(?:the|a|an|its) [\w`]+|it|they) (?:does|has|gives|leaves|needs|makes|says)\b",
    "that one side lacks": r"\bthat [\w`]+(?: [\w`]+)? lacks?\b",
    "is reported": r"\b(?:is|are|was|were) said\b",
    "previous": r"\bof before\b",
    "of these": r"\bof these\b",
    "whoever": r"\b[Ww]hoever\b",
    "a relative clause with a verb of being": r"\bwhose [\w`]+ (?:is|are)\b",
    "the more, the": r"\b[Tt]he more\b[^.|]*,? the (?:more|less|fewer|\w+er)\b",
    "a subject that can act": r"\b(?:page|slider|table|section|bundle)s? (?:asks?|says?|tells?|wants?|reads?)\b",
    "at once": r"\bat 1 time\b",
    "since when": r"\bsince when\b",
    "the first word of a sentence": r"(?:^|[.!?:] |\| |[-*] |\n\n)(?:So|Of|Nor|Not)\b",
    "as is": r"\bas is\b",
    "such a": r"\bsuch an?\b",
    "an option with its end": r"\buntil (?:commit )?`?[0-9a-f]{7,}",
    "a relative clause in a relative clause": r"\b(?:that|which|who)\b(?:[^.,;:|()]{1,40}\b(?:that|which|who)\b){2}",
}


@on_each_page
@pytest.mark.parametrize("pattern", PATTERNS)
def test_plain_english(page, pattern):
    found = re.finditer(PATTERNS[pattern], prose_of(page), re.MULTILINE)
    assert not [each[0] for each in found], pattern


def test_patterns_find_what_they_are_for():
    examples = {
        "another, where something different is meant": "the result would be another one",
        "a clause as a noun": "what the call leaves",
        "that one side lacks": "a leaf that one side lacks",
        "is reported": "as is said",
        "previous": "the run of before",
        "of these": "one of these",
        "whoever": "Whoever asks",
        "a relative clause with a verb of being": "a run whose name is long",
        "the more, the": "The more steps, the better",
        "a subject that can act": "the page says",
        "at once": "all at 1 time",
        "since when": "since when it is there",
        "the first word of a sentence": "It ends. So it is",
        "as is": "as is the case",
        "such a": "such a model",
        "an option with its end": "--x until 1e27dfb",
        "a relative clause in a relative clause": "a file that a process that wrote data that ended",
    }
    assert set(examples) == set(PATTERNS)
    assert not [name for name, text in examples.items() if not re.search(PATTERNS[name], text, re.MULTILINE)]


def test_every_tutorial_has_a_small_picture_that_the_script_makes():
    """The notebook draws its own."""
    tutorials = text_of("docs/contents.md").partition("**Tutorials**")[2].partition("**How-to guides**")[0]
    made = re.findall(r'^    "(\w+)": \1,$', (ROOT / "docs/pictures.py").read_text(), re.MULTILINE)
    for page in re.findall(r"^- \[[^\]]*\]\((.*?\.md)\)", tutorials, re.MULTILINE):
        shown = re.findall(r"!\[.+?\]\(pictures/(\w+)\.svg\)", text_of(f"docs/{page}"))
        assert shown and set(shown) <= set(made), page
        assert all((ROOT / f"docs/pictures/{name}.svg").stat().st_size < 60_000 for name in shown), page


NOT_IN_THE_GALLERY = {"diffusion.py"}
"""Examples that `python docs/gallery.py` has not run yet: it takes many minutes on two cores."""


def test_the_gallery_has_examples_that_agree():
    sections = re.split(r"^## \[", text_of("docs/examples/gallery.md"), flags=re.MULTILINE)[1:]
    shown = [each.partition("]")[0] for each in sections]
    examples = sorted(path.name for path in ROOT.glob("examples/*.py"))
    assert shown == [name for name in examples if name in shown] and {*examples} - {*shown} <= NOT_IN_THE_GALLERY
    assert all(re.search(r"^\d+ steps agree with PyTorch", each, re.MULTILINE) for each in sections)


@on_each_page
def test_the_first_line_says_who_the_page_is_for(page):
    first = text_of(page).split("\n\n")[1]
    assert re.search(r"\bfor (?:anyone|readers|a |an |those|you|contributors)", first, re.IGNORECASE), first
