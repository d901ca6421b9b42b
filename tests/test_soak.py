"""`benchmarks.soak`: what counts as a good end of a fault, and its table. The soak itself takes hours."""

import dataclasses
import json

import pytest

from benchmarks.soak import SIGNALS, TIMES, Disturbed, fault_of, judge, read, tables


def test_a_number_determines_its_fault():
    faults = [fault_of(number, 8, 0)[0] for number in range(200)]
    assert faults == [fault_of(number, 8, 0)[0] for number in range(200)]
    assert faults != [fault_of(number, 8, 1)[0] for number in range(200)]
    assert {fault.victim for fault in faults} == set(range(8))
    assert {(fault.signal, fault.phase) for fault in faults} == {(kind, phase) for kind in SIGNALS for phase in TIMES}


@pytest.mark.parametrize(
    ("kind", "statuses", "problems"),
    [
        ("SIGKILL", [69, -9, 69], []),
        ("SIGSTOP", [69, None, 69], []),
        ("SIGTERM", [75, 75, 75], []),
        ("SIGTERM", [0, 0, 0], []),
        ("SIGKILL", [None, -9, 69], ["hosts [0] had not ended after 180 s"]),
        ("SIGTERM", [75, None, 75], ["hosts [1] had not ended after 180 s"]),
        ("SIGKILL", [1, -9, 69], ["a launch would not start the run again"]),
    ],
)
def test_how_the_hosts_may_end(kind, statuses, problems):
    fault = Disturbed("fault 0", "training", 3, 1, kind, statuses)
    judge(fault)
    assert fault.problems == problems


def test_only_a_finished_equal_run_counts_as_exact(tmp_path):
    rows = [Disturbed(f"fault {n}", "saving", 8, 0, "SIGKILL", run=n, stop_seconds=n, lost_steps=n) for n in range(4)]
    rows[1].problems = ["hosts [0] had not ended after 180 s"]
    assert "| kill | saving | 4 | 1 | 2 | 1 | 0.0 to 3.0 | 0 to 3 |" in tables(rows, [[], [], ["model: other arrays"]])
    assert tables(rows, [[], [], ["other"]]).endswith("1 of 4 faults; 2 of 3 finished runs bit for bit.")
    lines = [dataclasses.asdict(rows[0]), {"finished": 0, "problems": []}]
    (tmp_path / "soak.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read(tmp_path / "soak.jsonl") == (rows[:1], [[]]) and read(tmp_path / "absent") == ([], [])
