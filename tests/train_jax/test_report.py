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

from models_torch.trm import TRMConfig
from train_jax.errors import UserError
from train_jax.optim.config import ParameterGroup
from train_jax.report.answers import Answers, by_act_step, first_unsolved, read_results, slowest_solved
from train_jax.report.boards import board, strip
from train_jax.report.plots import Series, plot
from train_jax.report.puzzle_page import chosen_steps, page, picture
from train_jax.report.run_page import SIZED_BY_DATA, learning, read_run_files
from train_jax.run.config import to_json
from train_jax.run.folder import RunFolder
from train_jax.run.machine import write_machine
from train_jax.run.model import sized
from train_jax.run.presets import preset
from train_jax.stages.build_data import SudokuData
from train_jax.stages.build_data import main as build_data
from train_jax.stages.report import Report, main
from train_jax.tasks.puzzles.format import load_split
from train_jax.tasks.puzzles.kinds import Trace
from train_jax.tasks.puzzles.sudoku.grid import GEOMETRIES
from train_jax.tasks.puzzles.sudoku.kind import SudokuKind
from train_jax.tasks.puzzles.task import PuzzleTask

PUZZLES, ACT_STEPS = 12, 4
KIND = SudokuKind(GEOMETRIES[4])
HOSTILE = "<script>alert('1')</script> & \"x\""


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("data") / "set"
    build_data(SudokuData(output_dir=directory, size=4, num_train=20, num_test=PUZZLES))
    return directory


def test_every_learning_rate_in_use_is_plotted(run_dir):
    files = read_run_files(str(run_dir))
    groups = (ParameterGroup("lm_head.*", lr=0.1), ParameterGroup("q_head.*"))
    config = dataclasses.replace(files.config, optim=dataclasses.replace(files.config.optim, groups=groups))
    rates = {"train/lr/default": 0.2, "train/lr/group_0": 0.1}
    records = [{"step": step, "train_seconds": 1.0, "train/grad_norm": 1.0, **rates} for step in (1, 2)]
    of_groups = dataclasses.replace(files, config=config, records=records)
    for each, titles in (
        (of_groups, ["learning rate, default", "learning rate, lm_head.*"]),
        (files, ["learning rate"]),
    ):
        plots = learning(each, ())
        assert [re.findall(r'aria-label="(.*?), over', plot)[0] for plot in plots] == [*titles, "gradient norm"]


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
    folder.config.write_text(to_json(config))
    records = []
    for step in range(10, 210, 10):
        train = {"lm_loss": 2 / step, "exact_accuracy": step / 400, "lr": 1e-3, "grad_norm": 0.5 + 1 / step}
        record = {"step": step, "train_seconds": step / 10, "step_seconds": 0.008 if step % 20 else 0.004}
        records.append(record | {f"train/{name}": value for name, value in train.items()})
        if step % 50 == 0:
            records.append({"step": step, "train_seconds": step / 10, "eval/exact_accuracy": 0.25, "eval/lm_loss": 1.0})
    folder.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    test = {"accuracy": (PUZZLES - 2 / 16) / PUZZLES, "exact_accuracy": 11 / 12, "count": 12.0}
    folder.evaluation("test").write_text(json.dumps(test))
    folder.finished.write_text(json.dumps(test | {"train_seconds": 125.4, "train_steps": 200}))
    folder.export_check.write_text(json.dumps({"puzzles": 12, "agree": 12, "max_logit_difference": 2.5e-6}))
    predictions, logits = answers_of(data_dir)
    np.savez_compressed(folder.predictions("test"), predictions=predictions, q_halt_logits=logits)
    write_machine(folder, devices="3 x abacus", parameters=22_226)
    return folder.path


def rewrite(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_the_report_holds_what_was_measured_and_nothing_from_outside(run_dir, capsys):
    main(Report(str(run_dir)))
    path = RunFolder(run_dir).report
    assert capsys.readouterr().out == f"report: {path}\n"
    document = path.read_text(encoding="utf-8")
    text = words(document)
    for figure in (
        "91.67%",
        "98.96%",
        "12 the whole test set",
        "2 min 5 s with compilation, without evaluation",
        "200 of 16 examples",
    ):
        assert figure in text, figure
    # The median of 10 steps of 4 ms and 10 of 8 ms is 6 ms, for 16 examples.
    assert "2,667 median over training" in text
    assert "22,226 without the puzzle table" in text and "3 x abacus" in text
    assert "PyTorch agrees : the exported weights" in text and "12 of 12 puzzles (100.00%)" in text
    assert "at most 2.5e-06" in text
    assert "ACT step exact token q_halt > 0 1 83.33%" in text
    assert "hidden_size 32" in text and "seq_len 16" in text and "torch 2." in text
    assert "script" not in Balanced(document).tags
    for tag, attributes in Balanced(document).elements:
        assert tag != "th" or attributes["scope"] in ("col", "row")
        assert tag != "svg" or (attributes["role"] == "img" and attributes["aria-label"])
    assert not re.search(r"https?://(?!www\.w3\.org/(2000/svg|1999/xlink)\")", document)
    main(Report(str(run_dir)))
    assert path.read_text(encoding="utf-8") == document


def test_text_of_the_run_is_never_markup(run_dir, data_dir):
    folder = RunFolder(run_dir)
    rewrite(folder.config, wandb_project=HOSTILE)
    rewrite(folder.machine, processor=HOSTILE, versions={HOSTILE: HOSTILE})
    assert words(page(read_run_files(str(run_dir)))).count(HOSTILE) == 5
    rewrite(folder.config, data_dir=HOSTILE)
    document = page(read_run_files(str(run_dir)))
    assert "script" not in Balanced(document).tags
    assert "<script" not in document
    hostile = plot([Series(HOSTILE, [(1, 2)], marks=True), Series("b", [])], title=HOSTILE, x_label=HOSTILE)
    ElementTree.fromstring(hostile)
    assert "<script" not in hostile + board(KIND.drawing, np.zeros(16, np.uint8), label=HOSTILE)


@pytest.mark.slow
def test_missing_pieces_leave_gaps_not_inventions(run_dir):
    folder = RunFolder(run_dir)
    for path in (folder.export_check, folder.machine, folder.finished, folder.predictions("test")):
        path.unlink()
        Balanced(page(read_run_files(str(run_dir))))
    text = words(page(read_run_files(str(run_dir))))
    assert "not finished" in text and "Not shown: the run has not been evaluated" in text
    about_the_machine = text.replace("cpu_devices", "")  # a field of the configuration
    assert not [word for word in ("PyTorch", "parameters", "devices", "Machine") if word in about_the_machine]
    assert "20 s with compilation" in text
    folder.evaluation("test").unlink()
    assert "25.00%" in words(page(read_run_files(str(run_dir))))
    folder.metrics.write_text(folder.metrics.read_text().splitlines()[0] + "\n")
    assert "held-out puzzles" not in words(page(read_run_files(str(run_dir))))
    folder.metrics.unlink()
    with pytest.raises(UserError, match="has no metrics yet; train it with `trm train`"):
        read_results(read_run_files(str(run_dir)))


def test_a_run_with_answers_but_no_metrics_is_reported(run_dir):
    RunFolder(run_dir).metrics.unlink()
    text = words(page(read_run_files(str(run_dir))))
    assert "91.67%" in text and "A puzzle solved" in text and "Learning" not in text


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda f, p, q: rewrite(f.config, data_dir="gone"), "no data set at gone/test"),
        (lambda f, p, q: rewrite(f.evaluation("test"), exact_accuracy=0.5), "exact accuracy 0.9167"),
        (
            lambda f, p, q: np.savez(f.predictions("test"), predictions=p[:, 1:], q_halt_logits=q),
            "(11, 16), the test set",
        ),
        (lambda f, p, q: f.predictions("test").write_bytes(b"PK"), "cannot be read"),
    ],
)
def test_answers_are_shown_only_beside_the_set_they_belong_to(run_dir, data_dir, spoil, reason):
    spoil(RunFolder(run_dir), *answers_of(data_dir))
    text = words(page(read_run_files(str(run_dir))))
    assert "Not shown: " in text and reason in text
    assert "A puzzle solved" not in text
    with pytest.raises(UserError, match="--picture needs the answers"):
        picture(read_run_files(str(run_dir)))


def test_accuracy_after_each_act_step_is_counted_as_in_the_loss_head(run_dir):
    files = read_run_files(str(run_dir))
    answers = read_results(files).answers
    assert answers is not None and files.test is not None
    act_steps = by_act_step(answers)
    np.testing.assert_allclose(act_steps.exact_accuracy, np.array([10, 9, 10, 11]) / 12)
    np.testing.assert_allclose(act_steps.token_accuracy, 1 - np.array([2, 3, 2, 1]) * 2 / 16 / 12)
    np.testing.assert_allclose(act_steps.halting, 11 / 12)
    assert slowest_solved(act_steps.solved) == 1
    assert first_unsolved(act_steps) == 0


def test_tokens_without_a_label_count_for_nothing(data_dir):
    metadata = dataclasses.replace(load_split(data_dir, "test").metadata, ignore_label_id=0)
    labels = np.array([[2, 3, 0, 0], [4, 5, 2, 3], [0, 0, 0, 0]])
    predictions = np.array([[[2, 9, 9, 9], [4, 5, 2, 3], [1, 1, 1, 1]]])
    answers = Answers(metadata, labels, labels, predictions, np.zeros((1, 3), np.float32))
    act_steps = by_act_step(answers)
    assert (act_steps.token_accuracy[0], act_steps.exact_accuracy[0]) == (0.75, 0.5)
    assert first_unsolved(act_steps) == 0
    assert slowest_solved(act_steps.solved) == 1
    assert slowest_solved(np.zeros((2, 3), bool)) is None
    assert slowest_solved(np.array([[True, False], [False, False], [True, False]])) == 0


def test_the_picture_is_one_svg(run_dir, tmp_path, capsys):
    main(Report(str(run_dir), picture=tmp_path / "picture.svg"))
    assert f"picture: {tmp_path / 'picture.svg'}\n" in capsys.readouterr().out
    root = ElementTree.parse(tmp_path / "picture.svg").getroot()
    text = " ".join(root.itertext())
    assert "4x4 Sudoku: 91.7% of 12 unseen puzzles solved after 2 min 5 s of training" in text
    assert "ACT step 1, 2 wrong" in text and "ACT step 3, solved" in text
    assert text.count("input") == 1
    with pytest.raises(UserError, match="is not a folder; give --picture a file in an existing folder"):
        main(Report(str(run_dir), picture=tmp_path / "nowhere" / "picture.svg"))


def test_the_page_names_the_weights_that_were_evaluated(run_dir):
    config = RunFolder(run_dir).config
    assert "EMA weights" in words(page(read_run_files(str(run_dir))))
    rewrite(config, optim=json.loads(config.read_text())["optim"] | {"ema_decay": 0.0})
    text = words(page(read_run_files(str(run_dir))))
    assert "held out, raw weights" in text and "EMA weights" not in text


def test_a_folder_without_a_run_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"no run at .*train one with `trm train PRESET"):
        main(Report(str(tmp_path)))


def test_the_fields_left_out_of_the_configuration_are_those_that_the_data_decides(data_dir):
    arch = TRMConfig(batch_size=77, seq_len=77)
    task = PuzzleTask(dataclasses.replace(preset("tiny"), data_dir=str(data_dir)))
    before, after = dataclasses.asdict(arch), dataclasses.asdict(sized(arch, task, 3))
    changed = {name for name in before if before[name] != after[name]}
    assert changed <= SIZED_BY_DATA and {"batch_size", "seq_len"} <= changed


def test_a_trace_tells_what_changed_and_what_is_wrong():
    solution = np.array([1, 2, 3, 4, 3, 4, 1, 2, 2, 1, 4, 3, 4, 3, 2, 1], np.uint8)
    inputs = np.where(np.arange(16) % 2, solution, 0).astype(np.uint8)
    swapped = solution.copy()
    swapped[:2] = 2, 0
    trace = Trace(KIND, inputs, np.array([swapped, solution, solution, swapped]), np.zeros(4), solution)
    assert [tuple(stretch) for stretch in trace.stretches] == [(1, 1), (2, 3), (4, 4)]
    assert trace.changed(1).sum() == 9 and trace.changed(2).sum() == 2 and not trace.changed(3).any()
    assert trace.wrong(1).tolist() == [True, True] + [False] * 14
    assert trace.mistakes(1) and trace.mistakes(2) == []
    assert chosen_steps(trace) == [0, 1, 2, 4]
    drawn = ElementTree.fromstring(str(strip(trace)).replace("<br>", "<br/>"))
    labels = [svg.get("aria-label") for svg in drawn.findall(".//{*}svg")]
    assert labels[:2] == ["input", "ACT step 1, 2 wrong, halt 0.50"] and all(labels)
    captions = ["".join(caption.itertext()) for caption in drawn.iter("figcaption")]
    assert captions == [
        "input",
        "ACT step 12 wrong · halt 0.50",
        "ACT steps 2\u20133correct · halt 0.50",
        "ACT step 42 wrong · halt 0.50",
        "solution",
    ]
    # A valid grid that overwrites a given is no solution of this puzzle.
    inputs = np.roll(solution, 1) * (np.arange(16) == 5)
    assert Trace(KIND, inputs, solution[None], np.zeros(1)).mistakes(1)


@pytest.mark.parametrize(
    ("module", "argv", "absent"),
    [
        ("summary", ["RUN"], {"torch", "jax", "matplotlib", "jinja2", "rich"}),
        pytest.param("train", None, {"matplotlib", "jinja2", "rich"}, marks=pytest.mark.slow),
    ],
)
def test_nothing_is_loaded_that_is_not_needed(run_dir, module, argv, absent):
    rewrite(RunFolder(run_dir).export_check, torch_exact_accuracy=0.75)
    name = f"train_jax.stages.{module}"
    call = f"stage.main(stage.Summary({str(run_dir)!r}))" if argv else "pass"
    code = f"import importlib; stage = importlib.import_module({name!r}); {call}; import sys; print(*sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not absent & set(shown.split())
    assert not argv or "held-out exact accuracy 0.9167 with EMA weights on 12 puzzles" in shown
