"""The count of the calls and imports between the folders of a package."""

import sys
from textwrap import dedent

import pytest

from campaigns.ways import Recorder, counts, import_counts

FILES = {
    "house/__init__.py": "",
    "house/hall/__init__.py": "",
    "house/hall/door.py": """
        from house.hall import lamp
        from house.kitchen import table

        def enter():
            lamp.light()
            for _ in range(3):
                table.sit(lambda: lamp.light())
            return [table.eat() for _ in range(2)]
        """,
    "house/hall/lamp.py": """
        def light():
            pass
        """,
    "house/kitchen/__init__.py": "",
    "house/kitchen/table.py": """
        from house.cellar import stairs

        def sit(then):
            then()

        def eat():
            return stairs.down()
        """,
    "house/cellar/__init__.py": "",
    "house/cellar/stairs.py": """
        def down():
            from house.hall import lamp

            lamp.light()
        """,
}


@pytest.fixture
def tree(tmp_path, monkeypatch):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "house"]:
        del sys.modules[name]


@pytest.fixture
def recorded(tree, monkeypatch):
    """The calls of `enter`, in files."""
    from house.hall.door import enter  # pyright: ignore[reportMissingImports]

    recorder = Recorder(tree, "house")
    before = sys.getprofile()
    recorder.install()
    try:
        recorder.on = True
        enter()
        recorder.on = False
    finally:
        sys.setprofile(before)
    return recorder.calls


def test_a_pair_of_functions_counts_once_and_a_lambda_belongs_to_its_function(recorded):
    pairs = [(call.caller.name, call.callee.name) for call in recorded]
    assert pairs == [
        ("enter", "light"),
        ("enter", "sit"),
        ("sit", "enter"),  # the lambda
        ("enter", "eat"),
        ("eat", "down"),
        ("down", "light"),
    ]


def test_calls_between_folders_and_between_files(recorded):
    # hall, kitchen, hall, kitchen, cellar, hall; the lambda and the lamp are in the folder that waits
    assert counts(recorded, "folder") == {"calls": 5, "arrows": 4, "visited": 3, "returns": 3, "climbs": 2}
    # door, lamp, door, table, door, table, stairs, lamp: five different pairs; only the lambda is in a file that waits
    assert counts(recorded, "file") == {"calls": 6, "arrows": 5, "visited": 4, "returns": 4, "climbs": 1}


def test_imports_inside_functions_and_rooms_in_circles(tree, monkeypatch):
    monkeypatch.setattr("campaigns.ways.PACKAGES", ("house",))
    found = import_counts(tree, "house")
    assert found == {
        "files": 8,
        "imports inside functions": 1,
        "imports for types": 0,
        "rooms": 3,
        "arrows": 3,
        "floors": 1,
        "rooms in circles": 3,
    }
    stairs = tree / "house" / "cellar" / "stairs.py"
    stairs.write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from house.hall import lamp\n")
    found = import_counts(tree, "house")
    assert found["imports for types"] == 1
    assert (found["arrows"], found["floors"], found["rooms in circles"]) == (2, 3, 0)
