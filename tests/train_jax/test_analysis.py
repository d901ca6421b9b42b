"""`trm analyze` on runs with known answers, and on folders that are missing, half-finished, damaged or foreign."""

import csv
import dataclasses
import hashlib
import json
import math

import pytest
from support.synthetic_runs import plan, write_run

from models_torch.flops import evaluation_flops_per_example, language_flops_per_token
from train_jax.__main__ import main
from train_jax.research import answers as statistics
from train_jax.research.answers import answer
from train_jax.research.jobs import cost_of
from train_jax.research.records import read_study
from train_jax.research.table import puzzles_of


def test_the_interval_of_a_mean_is_that_of_the_tables():
    """Student's t for two degrees of freedom at 97.5 % is 4.302653 (tables)."""
    estimate = statistics.estimate([0.8, 0.9, 1.0])
    assert (estimate.mean, estimate.count) == (pytest.approx(0.9), 3)
    assert estimate.high - estimate.mean == pytest.approx(4.302653 * 0.1 / math.sqrt(3), rel=1e-6)
    assert statistics.estimate([0.7]) == statistics.Estimate(0.7, None, None, 1)


def test_welch_agrees_with_the_closed_form():
    """t = 3 / sqrt(2/3) with four degrees of freedom, whose distribution function has a closed form."""
    t = 3 / math.sqrt(2 / 3)
    s = t / math.sqrt(1 + t * t / 4)
    expected = 2 * (1 - (0.5 + 3 / 8 * s * (1 - t * t / (12 * (1 + t * t / 4)))))
    assert statistics.welch([1, 2, 3], [4, 5, 6]) == pytest.approx(expected, rel=1e-9)
    assert statistics.welch([1], [2, 3]) is None and statistics.welch([1, 1], [2, 2]) is None


def test_p_values_are_adjusted_for_several_comparisons():
    """The smallest of four is multiplied by 4, the next by 3, …, and none is smaller than one before it."""
    assert statistics.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert statistics.holm([0.6, 0.7]) == [1.0, 1.0] and statistics.holm([]) == []


def test_a_power_law_is_fitted_with_its_interval():
    exact = statistics.power_law([10, 100, 1000], [5 * x**-0.3 for x in (10, 100, 1000)])
    assert (exact.coefficient, exact.exponent, exact.r_squared) == pytest.approx((5, -0.3, 1))
    assert (exact.low, exact.high) == pytest.approx((-0.3, -0.3), abs=1e-6)
    # Logarithms (0, 0), (1, 1), (2, 1): slope 1/2, residuals 1/6, 1/3, 1/6, so its error is sqrt(1/12).
    noisy = statistics.power_law([1, math.e, math.e**2], [1, math.e, math.e])
    assert noisy.exponent == pytest.approx(0.5)
    assert noisy.high - noisy.exponent == pytest.approx(12.7062047 * math.sqrt(1 / 12), rel=1e-6)
    assert statistics.power_law([1, 1], [1, 2]) is None and statistics.power_law([1, 2], [1, 2]) is None
    assert statistics.power_law([1, 2, 3], [1, 0, 2]) is None and statistics.power_law([1, 2, 3], [1, 1, 1]) is None


def answer_of(root, group):
    return answer(read_study(str(root)), group)


def test_the_best_model_size_is_named_with_its_interval(tmp_path):
    sizes = {f"exp01{letter}": 1000 * 2**number for number, letter in enumerate("abcdef")}
    for job in plan(tmp_path, "exp01", seeds=3):
        accuracy = 1 - 2 * sizes[job.experiment] ** -0.25 + 0.001 * (job.seed - 1)
        write_run(job, accuracy, curve=[(20, 0.1), (40, accuracy)], parameters=sizes[job.experiment])
    answered = answer_of(tmp_path, "exp01")
    assert [point.x for point in answered.points] == list(sizes.values())
    best = 1 - 2 * 32000**-0.25
    half = 4.302653 * 0.001 / math.sqrt(3)
    assert answered.sentence.startswith(
        f"exp01f (parameters 32,000, at the edge of the grid) is best with {best:.2%} (95 % interval "
        f"{best - half:.2%} to {best + half:.2%}, 3 seeds); exp01e follows with"
    )
    assert answered.law.exponent == pytest.approx(-0.25, abs=1e-4) and answered.law.count == 6
    assert answered.notes[0] == "18 of 18 runs are finished."
    worse = "Worse than exp01f by Welch's t-test, adjusted for 5 comparisons (Holm): exp01e"
    assert answered.notes[1].startswith(worse) and answered.notes[1].endswith("Not significant: none.")


def test_without_seeds_there_is_no_test_and_without_runs_no_answer(tmp_path):
    jobs = plan(tmp_path, "exp02b", "exp08")
    for job, accuracy in zip(jobs, (0.1, 0.5, 0.3, 0.2, 0.2, 0.9), strict=False):
        write_run(job, accuracy)
    cycles = answer_of(tmp_path, "exp02b")
    averages = answer_of(tmp_path, "exp08")
    best = "exp02b_02 (H-cycles 2, inside the grid) is best with 50.00% (1 seed)"
    assert cycles.sentence == f"{best}; exp02b_03 follows with 30.00% (1 seed)."
    assert cycles.notes[1] == "Without two seeds of each, nothing says whether they differ by chance."
    assert averages.sentence == "No answer yet: 1 of 5 experiments have finished runs."
    assert averages.notes == ("1 of 1 runs are finished.",)


def test_a_law_is_fitted_to_language_models(tmp_path, capsys):
    jobs = plan(tmp_path, "chat-d2", "chat-d3", "chat-d4", "d12-2026")
    for job in jobs[1:]:  # d12-2026 has not begun
        folder = write_run(job, 0.0, parameters=100)
        _, flops = cost_of(job)
        assert flops == language_flops_per_token(job.config.arch) * 256 * 8 * job.config.steps
        figures = {"train_steps": job.steps, "bits_per_byte": 40 * flops**-0.1, "loss": 1.0, "summary": ""}
        (folder / "FINISHED").write_text(json.dumps(figures))
        (folder / "dataset.json").write_text(json.dumps({"vocab_size": 1024}))
    assert main(["analyze", str(tmp_path), "--metric", "bits_per_byte"]) == 0
    table, sentence, _ = capsys.readouterr().out.strip().rsplit("\n", 2)
    assert "| chat-d4, seed 0 | 100 | 1,048,576 | 2.17e+12 | 2.3362 | 2.3362 |" in table
    assert sentence.startswith("Bits per byte are 40 x FLOP^-0.1000 (95 % interval of the exponent -0.1000 to -0.1000")
    assert "3 runs), fitted by least squares of the logarithms between 1.13e+11 and 2.17e+12 FLOP." in sentence
    assert (tmp_path / "analysis" / "law.md").read_text().strip() == f"{table}\n{sentence}".strip()
    (tmp_path / "chat-d2" / "chat-d2" / "seed-0" / "FINISHED").unlink()
    assert main(["analyze", str(tmp_path), "--metric", "bits_per_byte"]) == 2
    assert "has 2 finished language runs, expected three or more of different sizes" in capsys.readouterr().err


def test_missing_half_finished_and_foreign_folders_are_reported(tmp_path, capsys):
    jobs = plan(tmp_path, "exp02b")
    write_run(jobs[0], 0.5, curve=[(20, 0.7), (40, 0.5)])
    write_run(jobs[1], None, curve=[(20, 0.4)])
    (write_run(jobs[2], 0.5) / "config.json").write_text("{")
    (write_run(jobs[3], 0.5) / "FINISHED").write_text('{"train_steps": "many"}')
    (tmp_path / "exp02b" / "notes" / "mine").mkdir(parents=True)
    (tmp_path / "a file").touch()
    assert main(["analyze", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "1 of 3 runs are finished." in shown
    lines = [line for line in shown.splitlines() if line.startswith("not analysed:")]
    assert len(lines) == 1 and "exp02b/exp02b_03/seed-0: cannot be read" in lines[0]
    study = read_study(str(tmp_path))
    assert [run.state for run in study.runs] == ["finished", "silent", "stopped"]
    assert (study.runs[0].final, study.runs[0].peak) == (0.5, (0.7, 20.0))
    assert study.runs[1].final is None and study.runs[1].train_steps == 20


def test_the_flops_of_a_finished_run_are_those_that_were_planned(tmp_path):
    jobs = plan(tmp_path, "contrib01", "exp08", preset="study")
    for job in jobs:
        write_run(job, 0.5, total_groups=puzzles_of(job.sets), seq_len=36, vocab_size=8)
    flops = {run.experiment: run.train_flops for run in read_study(str(tmp_path)).runs}
    assert flops == {job.name.split("/")[1]: cost_of(job)[1] for job in jobs}
    assert flops["contrib01_curriculum"] < flops["contrib01_baseline"] == flops["exp08a"]
    evaluated = {run.evaluation_flops for run in read_study(str(tmp_path)).runs}
    arch = dataclasses.replace(jobs[0].config.arch, seq_len=36, vocab_size=8)
    assert evaluated == {4 * evaluation_flops_per_example("trm", arch)}, "four ACT steps"


def test_the_report_and_the_tables_have_every_run(tmp_path, capsys):
    for job in plan(tmp_path, "exp02b", "exp09", seeds=2):
        write_run(job, 0.5 + 0.01 * job.seed + 0.02 * job.config.arch.H_cycles, curve=[(20, 0.3), (40, 0.5)])
    assert main(["analyze", str(tmp_path)]) == 0
    folder = tmp_path / "analysis"
    with (folder / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 20
    for row in rows:
        log = (tmp_path / row["group"] / row["experiment"] / f"seed-{row['seed']}" / "metrics.jsonl").read_bytes()
        assert row["metrics_sha256"] == hashlib.sha256(log).hexdigest()
        assert float(row["final_exact_accuracy"]) == pytest.approx(
            0.5 + 0.01 * int(row["seed"]) + 0.02 * int(row["arch.H_cycles"])
        )
        assert float(row["train_flops"]) > 0
        assert 0 < float(row["evaluation_flops"]) < float(row["train_flops"])
    assert {"optim.optimizer", "optim.beta2", "arch.H_cycles"} <= set(rows[0])
    assert len(list(csv.DictReader((folder / "curves.csv").open()))) == 40
    page = (folder / "index.html").read_text()
    text = (folder / "analysis.md").read_text()
    assert page.count("<svg") == 2 and "http" not in page.replace("http://www.w3.org", "")
    assert "| exp02b_05 | 2 | 60.50% |" in text
    assert "exp02b_05 (H-cycles 5, at the edge of the grid) is best" in text and text in text.replace("\r", "")
    capsys.readouterr()
    assert main(["analyze", str(tmp_path), "--groups", "exp09", "--output", str(tmp_path / "other")]) == 0
    assert "exp02b_05 (" not in (tmp_path / "other" / "analysis.md").read_text()
    assert main(["analyze", str(tmp_path), "--groups", "exp99"]) == 2
    assert "has no group exp99; use one of exp02b" in capsys.readouterr().err
