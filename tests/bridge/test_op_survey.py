"""The op survey's figures say of how much of PyTorch's database they are."""

from pathlib import Path

from benchmarks import op_list, op_survey


def test_the_survey_says_what_it_does_not_run():
    """Every entry of PyTorch's database is run or named with a reason."""
    names = {entry.name for entry in op_survey.database()}
    run = {entry.name for _, _, entry in op_survey.entries()}
    absent = {name for group in op_list.not_listed(names).values() for name in group}
    assert run | absent == names and not run & absent
    text = (Path(op_survey.__file__).parents[1] / "docs" / "op_survey.md").read_text()
    assert not [name for name in absent if f"`{name}`" not in text]
