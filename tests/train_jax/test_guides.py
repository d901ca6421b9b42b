"""The guides in docs/experiments: one for each group, complete, and their tables are those of the code."""

import re
from pathlib import Path

import pytest

from campaigns.guides import GUIDES, generated, updated
from train_jax.research.answers import AIMS
from train_jax.research.table import EXPERIMENTS

pytestmark = pytest.mark.docs

FOLDER = Path(__file__).parents[2] / "docs/experiments"
SECTIONS = ["Hypothesis", "What changes", "Commands", "What to read off", "What would refute it"]


@pytest.mark.parametrize("group", GUIDES)
def test_a_guide_is_up_to_date_and_complete(group):
    page = (FOLDER / f"{group}.md").read_text()
    assert updated(page, group) == page, "run `python -m campaigns.guides docs/experiments`"
    sections = dict(re.findall(r"^## ([^\n]*)\n\n(.*?)(?=^## |^<!-- gen|\Z)", page, re.DOTALL | re.MULTILINE))
    assert list(sections) == SECTIONS
    assert all(len(text.split()) > 10 for text in sections.values())


def test_every_group_has_one_guide_and_every_experiment_is_in_one():
    assert set(GUIDES) == set(AIMS) == {path.stem for path in FOLDER.glob("*.md")}
    rows = re.findall(r"^\| `(\w+)` \|", "\n".join(map(generated, GUIDES)), re.MULTILINE)
    assert sorted(rows) == sorted([*EXPERIMENTS, *EXPERIMENTS])  # at full and at tiny size
