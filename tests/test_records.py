"""Comparisons with recorded weights and outputs: what differs is named."""

from campaigns.outputs import _section, _text_of_page
from campaigns.same_weights import CASES, differences


def test_a_run_with_another_hash_or_other_parts_is_named():
    before = {"same": {"a": "1"}, "other": {"a": "1", "b": "2", "c": "3"}, "refused": "trm: no"}
    now = {"same": {"a": "1"}, "other": {"a": "1", "b": "9", "d": "3"}, "refused": {"a": "1"}, "new": {"a": "1"}}
    assert differences(now, before) == [
        "other: b, c, d",
        "refused: trained; recorded: trm: no",
        "new: trained; recorded: nothing",
    ]


def test_forty_runs_have_different_command_lines():
    lines = [(devices, line) for devices, cases in CASES.items() for line in cases.values()]
    assert len(lines) == len(set(lines)) == 40


def test_times_and_the_shape_of_plots_are_not_compared():
    lines = list(_section("status", "4, 3 min ago\nat 2026-11-28 10:00 UTC, step 5\n"))
    assert lines == ["==== status", "4, TIME ago", "at DATE, step 5"]
    page = "<style>p {}</style><p>loss <b>1 &lt; 2</b></p><svg><text>3</text></svg>"
    assert _text_of_page(page).splitlines() == ["1 plots", "loss", "1 < 2"]
