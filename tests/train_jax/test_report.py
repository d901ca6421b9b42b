"""`trm report`: what a run measured, and only that, as a page and a picture that stand alone."""

import dataclasses
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from support.documents import Balanced, words

from train_jax.cli.report import Report, main
from train_jax.errors import UserError
from train_jax.puzzles.answers import Answers, by_act_step, first_unsolved, read_results, slowest_solved
from train_jax.puzzles.boards import board
from train_jax.puzzles.format import load_split
from train_jax.puzzles.metrics import HaltingCurve, Point
from train_jax.puzzles.metrics import to_json as curve_to_json
from train_jax.puzzles.page import page, picture
from train_jax.puzzles.sudoku.grid import GEOMETRIES
from train_jax.puzzles.sudoku.kind import SudokuKind
from train_jax.puzzles.view_example import ViewExample, save_example
from train_jax.report.plots import Series, plot
from train_jax.report.run_page import read_run_files
from train_jax.run.config import to_json
from train_jax.run.folder import RunFolder
from train_jax.run.machine import write_machine
from train_jax.run.presets import preset

PUZZLES = 8
ACT_STEPS = 4
HOSTILE = "<script>alert('1')</script> & \"x\""
CURVE = HaltingCurve(
    tuple(Point(m, e, 0.9, t) for m, e, t in ((1, 0.5, 0.0), (1.5, 0.625, 0.5), (2.0, 0.75, 0.9), (4, 0.75, 1.0))),
    tuple(Point(step, e, 0.9) for step, e in ((1, 0.5), (2, 0.6), (3, 0.7), (4, 0.75))),
)


def answers_of(data_dir: Path) -> tuple[np.ndarray, np.ndarray]:
    """Puzzle 0 is never right, puzzle 1 from step 3 on, puzzle 2 at step 1 and 4, the others always."""
    predictions = np.repeat(load_split(data_dir, "test").labels[None], ACT_STEPS, axis=0).astype(np.uint8)
    wrong = [(0, [1, 2, 3, 4]), (1, [1, 2]), (2, [2, 3])]
    for puzzle, steps in wrong:
        for step in steps:
            predictions[step - 1, puzzle, :2] = predictions[step - 1, puzzle, 1::-1]
    logits = np.where(np.arange(PUZZLES) == 0, -1.0, 1.0) * np.ones((ACT_STEPS, 1))
    return predictions, logits.astype(np.float32)


@pytest.fixture
def run_dir(tmp_path, data_dir) -> Path:
    """A finished run whose every figure is known."""
    folder = RunFolder(tmp_path / "run")
    folder.evaluation("test").parent.mkdir(parents=True)
    config = dataclasses.replace(preset("tiny"), data_dir=str(data_dir), run_dir=str(folder.path))
    config = dataclasses.replace(config, arch=dataclasses.replace(config.arch, halt_max_steps=ACT_STEPS))
    folder.config.write_text(to_json(config))
    records = []
    for step in range(10, 210, 10):
        train = {"lm_loss": 2 / step, "exact_accuracy": step / 400, "lr": 1e-3, "grad_norm": 0.5 + 1 / step}
        record = {"step": step, "train_seconds": step / 10, "step_seconds": 0.008 if step % 20 else 0.004}
        records.append(record | {f"train/{name}": value for name, value in train.items()})
        if step % 50 == 0:
            records.append({"step": step, "train_seconds": step / 10, "eval/exact_accuracy": 0.25, "eval/lm_loss": 1.0})
    folder.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    test = {"accuracy": (PUZZLES - 2 / 16) / PUZZLES, "exact_accuracy": 7 / 8, "count": 8.0}
    folder.evaluation("test").write_text(json.dumps(test))
    folder.finished.write_text(json.dumps(test | {"train_seconds": 125.4, "train_steps": 200}))
    check = {"puzzles": 12, "agree": 12, "torch_exact_accuracy": 0.75, "max_logit_difference": 2.5e-6}
    folder.export_check.write_text(json.dumps(check))
    predictions, logits = answers_of(data_dir)
    np.savez_compressed(folder.predictions("test"), predictions=predictions, q_halt_logits=logits)
    folder.halting_curve("test").write_text(curve_to_json(CURVE))
    write_machine(folder, devices="3 x abacus", parameters=22_226)
    return folder.path


def rewrite(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def text_of(run_dir: Path) -> str:
    return words(page(read_run_files(str(run_dir))))


def test_the_report_holds_what_was_measured_and_nothing_from_outside(run_dir, capsys):
    main(Report(str(run_dir)))
    path = RunFolder(run_dir).report
    assert capsys.readouterr().out == f"report: {path}\n"
    document = path.read_text(encoding="utf-8")
    text = words(document)
    for figure in (
        "87.50%",
        "98.44%",
        "8 the whole test set",
        "2 min 5 s with compilation, without evaluation",
        "200 of 16 examples",
        "2,667 median over training",  # of 10 steps of 4 ms and 10 of 8 ms: 6 ms, for 16 examples
        "22,226 without the puzzle table",
        "3 x abacus",
        "PyTorch agrees : the exported weights",
        "12 of 12 puzzles (100.00%)",
        "at most 2.5e-06",
        "ACT step exact token q_halt > 0 1 75.00%",
        "hidden_size 32",
        "seq_len 16",
        "torch 2.",
        "EMA weights",
        "after the last ACT step: 2 of 16 cells wrong",
    ):
        assert figure in text, figure
    assert "script" not in Balanced(document).tags
    for tag, attributes in Balanced(document).elements:
        assert tag != "th" or attributes["scope"] in ("col", "row")
        assert tag != "svg" or (attributes["role"] == "img" and attributes["aria-label"])
    assert not re.search(r"https?://(?!www\.w3\.org/(2000/svg|1999/xlink)\")", document)
    main(Report(str(run_dir)))
    assert path.read_text(encoding="utf-8") == document


def test_the_section_of_early_halting(run_dir):
    folder = RunFolder(run_dir)
    early = {"threshold": 0.9, "exact_accuracy": 0.75, "steps": 2.0, "computed_steps": 3.5, "step": 1200}
    folder.halted_early("test").write_text(json.dumps(early))
    text = text_of(run_dir)
    assert "At 0.5, where training halts, 62.50% are solved after 1.50 steps on average." in text
    assert "At 0.9 the accuracy does not decrease: 75.00% are solved after 2.00 steps on average." in text
    assert "halt probability above 0.9 2.00 75.00% 90.00%" in text and "all after 3 3.00 70.00% 90.00%" in text
    assert "at step 1,200 of training, threshold 0.9: 75.00% exact after 2.00 steps on average; 3.50 were" in text
    folder.halted_early("test").write_text(json.dumps(early | {"trajectories": 8, "noise": 0.2, "depth": 16}))
    assert "threshold 0.9, up to 8 trajectories of 16 ACT steps with noise 0.2: 75.00% exact" in text_of(run_dir)
    folder.halted_early("test").write_text("{}")
    folder.halting_curve("test").unlink()
    assert "Not shown: it needs an evaluation on the whole test set" in text_of(run_dir)
    folder.halting_curve("test").write_text("[]")
    with pytest.raises(UserError, match=r"halting_curve.json cannot be read \(.*; remove it"):
        read_results(read_run_files(str(run_dir)))


def test_a_puzzle_in_several_views_side_by_side(run_dir, data_dir):
    folder = RunFolder(run_dir)
    test = load_split(data_dir, "test")
    assert "In several views" not in text_of(run_dir)
    answers = np.stack([test.labels[3], np.roll(test.labels[3], 4)])
    images = np.stack([test.inputs[3], test.inputs[4]])
    example = ViewExample(np.array([3]), images, answers, np.array([-2.0, 3.0], np.float32), np.array([2, 1]))
    save_example(folder.view_example("test"), example)
    text = text_of(run_dir)
    wrong = int((answers[1] != answers[0]).sum())
    assert "In several views Test puzzle 3, which took most views" in text
    assert "View 1, the puzzle itself" in text and "solved after ACT step 2, halt 0.12" in text
    assert f"{wrong} wrong after ACT step 1, halt 0.95" in text
    folder.view_example("test").write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"test_views.npz cannot be read \(.*; run `trm evaluate --views` to write it"):
        text_of(run_dir)


def test_text_of_the_run_is_never_markup(run_dir):
    folder = RunFolder(run_dir)
    rewrite(folder.config, wandb_project=HOSTILE)
    rewrite(folder.machine, processor=HOSTILE, versions={HOSTILE: HOSTILE})
    assert text_of(run_dir).count(HOSTILE) == 5
    rewrite(folder.config, data_dir=HOSTILE)
    assert "<script" not in page(read_run_files(str(run_dir)))
    hostile = plot([Series(HOSTILE, [(1, 2)], marks=True), Series("b", [])], title=HOSTILE, x_label=HOSTILE)
    ElementTree.fromstring(hostile)
    drawing = SudokuKind(GEOMETRIES[4]).drawing
    assert "<script" not in hostile + board(drawing, np.zeros(16, np.uint8), label=HOSTILE)


def test_missing_pieces_leave_gaps_not_inventions(run_dir):
    folder = RunFolder(run_dir)
    rewrite(folder.config, optim=json.loads(folder.config.read_text())["optim"] | {"ema_decay": 0.0})
    for path in (folder.export_check, folder.machine, folder.finished, folder.predictions("test")):
        path.unlink()
    text = text_of(run_dir)
    assert "not finished" in text and "Not shown: the run has not been evaluated" in text
    assert "held out, raw weights" in text and "EMA weights" not in text
    about_the_machine = text.replace("cpu_devices", "").replace("model_devices", "")  # fields of the configuration
    assert not [word for word in ("PyTorch", "parameters", "devices", "Machine") if word in about_the_machine]
    assert "20 s with compilation" in text
    folder.evaluation("test").unlink()
    assert "25.00%" in text_of(run_dir)
    folder.metrics.write_text(folder.metrics.read_text().splitlines()[0] + "\n")
    assert "held-out puzzles" not in text_of(run_dir)
    folder.metrics.unlink()
    with pytest.raises(UserError, match="has no metrics yet; train it with `trm train`"):
        read_results(read_run_files(str(run_dir)))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda f, p, q: rewrite(f.config, data_dir="gone"), "no data set at gone/test"),
        (lambda f, p, q: rewrite(f.config, data_dir="one,two"), "answers are shown only for runs on one data set"),
        (lambda f, p, q: rewrite(f.evaluation("test"), exact_accuracy=0.5), "exact accuracy 0.8750"),
        (lambda f, p, q: np.savez(f.predictions("test"), predictions=p[:, 1:], q_halt_logits=q), "(7, 16), the test"),
        (lambda f, p, q: f.predictions("test").write_bytes(b"PK"), "cannot be read"),
        (lambda f, p, q: np.savez(f.predictions("test"), predictions=p[-1:], q_halt_logits=q[-1:]), "ACT step 4 are"),
    ],
)
def test_answers_are_shown_only_beside_the_set_they_belong_to(run_dir, data_dir, spoil, reason):
    folder = RunFolder(run_dir)
    folder.metrics.unlink()
    text = text_of(run_dir)
    assert "A puzzle solved" in text and "Learning" not in text
    spoil(folder, *answers_of(data_dir))
    text = text_of(run_dir)
    assert "Not shown: " in text and reason in text
    assert "A puzzle solved" not in text
    with pytest.raises(UserError, match="--picture needs the answers"):
        picture(read_run_files(str(run_dir)))


def test_accuracy_after_each_act_step_is_counted_as_in_the_loss_head(run_dir):
    answers = read_results(read_run_files(str(run_dir))).answers
    assert answers is not None
    act_steps = by_act_step(answers)
    np.testing.assert_allclose(act_steps.exact_accuracy, np.array([6, 5, 6, 7]) / 8)
    np.testing.assert_allclose(act_steps.token_accuracy, 1 - np.array([2, 3, 2, 1]) * 2 / 16 / 8)
    np.testing.assert_allclose(act_steps.halting, 7 / 8)
    assert slowest_solved(act_steps.solved) == 1
    assert first_unsolved(act_steps) == 0
    # Tokens without a label count for nothing.
    labels = np.array([[2, 3, 0, 0], [4, 5, 2, 3], [0, 0, 0, 0]])
    predictions = np.array([[[2, 9, 9, 9], [4, 5, 2, 3], [1, 1, 1, 1]]])
    act_steps = by_act_step(Answers(answers.data, labels, labels, predictions, np.zeros((1, 3), np.float32)))
    assert (act_steps.token_accuracy[0], act_steps.exact_accuracy[0]) == (0.75, 0.5)
    assert first_unsolved(act_steps) == 0
    assert slowest_solved(act_steps.solved) == 1
    assert slowest_solved(np.zeros((2, 3), bool)) is None
    assert slowest_solved(np.array([[True, False], [False, False], [True, False]])) == 0
    # One that stays solved, although the other one was solved later.
    assert slowest_solved(np.array([[False, True], [True, True], [False, True], [True, True]])) == 1


def test_the_picture_is_one_svg(run_dir, tmp_path, capsys):
    main(Report(str(run_dir), picture=tmp_path / "picture.svg"))
    assert f"picture: {tmp_path / 'picture.svg'}\n" in capsys.readouterr().out
    text = " ".join(ElementTree.parse(tmp_path / "picture.svg").getroot().itertext())
    assert "4x4 Sudoku: 87.5% of 8 unseen puzzles solved after 2 min 5 s of training" in text
    assert "ACT step 1, 2 wrong" in text and "ACT step 3, solved" in text
    assert text.count("input") == 1
    with pytest.raises(UserError, match="is not a folder; give a file in an existing folder"):
        main(Report(str(run_dir), picture=tmp_path / "nowhere" / "picture.svg"))


def test_a_summary_loads_nothing_that_it_does_not_need(run_dir):
    code = "import sys; from train_jax.cli import summary as s; s.main(s.Summary(sys.argv[1])); print(*sys.modules)"
    command = [sys.executable, "-c", code, str(run_dir)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert not {"torch", "jax", "matplotlib", "jinja2", "rich"} & set(shown.split())
    assert "held-out exact accuracy 0.8750 with EMA weights on 8 puzzles" in shown
