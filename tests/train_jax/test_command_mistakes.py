"""A mistake of a user is found before anything is computed: one line with the value and the remedy; the status is 2."""

import contextlib
import dataclasses
import shlex
from functools import partial
from typing import Any

import numpy as np
import pytest

from train_jax.__main__ import main
from train_jax.errors import UserError
from train_jax.language.documents import Skipped, TextFile, read_documents
from train_jax.language.task import LanguageTask
from train_jax.puzzles.building import chunks_of
from train_jax.puzzles.task import PuzzleTask
from train_jax.run.presets import preset
from train_jax.run.restore import restore
from train_jax.storage.untrusted import DamagedError, map_array, read_arrays, read_whole
from train_jax.task import Periodic
from train_jax.trainer.start import _check_keep_best

TRAIN = "train tiny --data-dir PUZZLES --run-dir run --wandb disabled --model"
SHARDED = f"{TRAIN} trm --compute.shard-optimizer"
CHAT = "build-data chat --output-dir chat --tokenizer TEXT"
CELL_NET = "support.outside_models:CellNet"
THINKER = "support.outside_models:Thinker"
LAUNCH = "launch --zone us-central2-b --dry-run --tpu "
MISTAKES = {
    # arguments
    "trian": "unknown stage 'trian'; use one of build-data",
    "train": "needs a preset",
    "train nope": "unknown preset 'nope'; use one of sudoku-extreme, sudoku9",
    "train tiny --steps abc": "'abc'; expected --steps INT; see trm train tiny --help",
    "train tiny --stepz 3": "--stepz, 3; perhaps --steps INT; see trm train tiny --help",
    "train tiny --steps -5": "steps is -5; use at least 0",
    "evaluate": "a folder, or gs://bucket/folder. (required); see trm evaluate --help",
    "build-data soduku": "'soduku'; use one of sudoku, maze, arc, text, chat, instructions, inspect",
    "build-data sudoku --size": "'--size'. Expected 1 values; see trm build-data sudoku --help",
    # data sets and models
    "train tiny --data-dir no --run-dir run": "no data set at no/train (dataset.json is missing); build one with `trm",
    "train d20 --data-dir no --run-dir run": "build one with `trm build-data text --source FOLDER --vocab-size 65536",
    f"{TRAIN} gru": "unknown architecture 'gru'; use one of trm, trm_singlez, trm_hier6, hrm, transformer",
    f"{TRAIN} gpt": "--model gpt is not for task puzzles; use one of trm, trm_singlez, trm_hier6, hrm, transformer",
    "sweep tiny --over model=gpt --data-root . --dry-run": "--model gpt is not for task puzzles",
    "train chat-tiny --data-dir TEXT --run-dir run --model trm": "--model trm is not for task language",
    f"{TRAIN} nowhere:Net": "'nowhere' cannot be imported (ModuleNotFoundError",
    f"{TRAIN} nets/mine.py:Net": "has a file in place of a module; use --model nets.mine:Net",
    f"{TRAIN} {CELL_NET} --arch.hidden-size 8": """give it as --arch.options '{"hidden_size": …}'""",
    f"{TRAIN} {THINKER}": "support.outside_models:Thinker cannot be constructed with {'batch_size': 16, ",
    f"{TRAIN} {CELL_NET} --arch.halt-max-steps 2": "has no initial_carry for further steps",
    f"""{TRAIN} {CELL_NET} --arch.options '{{"depth": 1}}'""": "takes no depth; use its arguments",
    f"{TRAIN} {CELL_NET} --optim.freeze .*": "leaves nothing to train: the model has no sparse table",
    f"{TRAIN} trm --compute.load step": "--compute.load step needs --compute.runner shard_map",
    f"{TRAIN} trm --compute.load step --compute.runner shard_map": "step cannot be read (No such file or directory)",
    f"{SHARDED} --optim.optimizer optax:adam": "shard_optimizer cannot be used with the optimizer optax:adam",
    "train chat-tiny --data-dir PUZZLES --run-dir run": "give a --data-dir with text, or build one with",
    # runs
    "evaluate RUNS": "is a folder of runs; give one of them, such as",
    **{f"{stage} none": "no run at" for stage in ("evaluate", "export", "solve", "report", "summary", "status")},
    "evaluate RUN --step 7": "has no checkpoint of step 7; use one of 50, 60, newest, best",
    "evaluate RUN --step 50 --weights x.pt": "--weights and --step 50 both select weights",
    "report RUN --step 50": "at-step-50/evaluation/test.json is missing; run `trm evaluate",
    "export RUN --average-last 3": "average_last is 3, and",
    "export RUN --average 50 --step 60": "give only one of --step, --average and --average-last",
    "export none --train-step --average-last 2": "--train-step exports one checkpoint",
    # launches
    f"{LAUNCH}one --max-hours -3 -- train tiny": "--max-hours is -3.0; use at least 0",
    f"{LAUNCH}one --type v4-63 -- train tiny": "a v4 slice has 8, 16, 32, 64 or a multiple of 128 cores; use v4-64",
    f"{LAUNCH}one -- train tiny": "is in no git checkout; start trm launch in one of this project",
    # experiments
    "sweep tiny --over optim.lrr=1 --data-root . --dry-run": "with model trm and task puzzles; perhaps optim.lr; `trm",
    "analyze nowhere": "nowhere is not a folder",
    "sweep list exp99": "unknown group 'exp99'; use one of baseline, exp01",
    # language models
    "evaluate LANGUAGE_RUN --halt-early": "--halt-early is not for runs of task language",
    "chat LANGUAGE_RUN --top-p 0": "--top-p is 0.0; use a value above 0 to 1",
    "generate LANGUAGE_RUN": "no prompt; give --prompt TEXT or --prompts-file FILE; --prompt '' is an empty one",
    "generate LANGUAGE_RUN --prompts-file no.txt": "no.txt does not exist; give a text or .jsonl file with prompts",
    "generate LANGUAGE_RUN --prompt a --max-tokens 160": "a prompt of 2 tokens and --max-tokens 160 need 161 positions",
    f"generate LANGUAGE_RUN --prompt '{'12 ' * 100}'": "use a shorter prompt",
    "bench-generate tiny": "tiny is a preset of the task puzzles; use one of a language model",
    "chat-eval run --tasks smalltalk": "--tasks smalltalk has no right answers; leave it out",
    "chat-eval run --tasks humaneval": "no task is left; give --tasks",
    CHAT: "nothing to build; give --source FILE or --tasks",
    f"{CHAT} --tasks arithmetik": "unknown task 'arithmetik'; use one of arithmetic",
    f"{CHAT} --tasks mmlu:50": "mmlu needs files; give mmlu@FOLDER, a folder or hf://OWNER/NAME",
    f"{CHAT} --source none.jsonl": "none.jsonl does not exist",
    f"{CHAT} --source BINARY": "cannot be read",
    f"{CHAT} --source BAD": "bad.jsonl line 1 is no row of messages",
    "tokenizer train --source BLANKS --vocab-size 300 --output-dir made": "more than 500,000 blank characters in a row",
    "serve": "trm serve needs a run",
    # compilation for a TPU
    "compile-pod": "needs a preset or an experiment",
    "compile-pod tiny --save step": "use --compute.runner shard_map, and leave out --step",
    "compile-pod tiny --topology v3:2x2": "unknown topology 'v3:2x2'; use a chip and its axes",
    "compile-pod tiny --data-dir elsewhere/mine": "is not built, and does not name its kind; use --kind",
    "compile-pod tiny --step decode --topology v4:2x2x1": "has no cache of keys and values",
    "compile-pod chat-tiny --global-batch-size 32 --step decode --capacity 99999": "--capacity is 99999, the model",
}


@pytest.fixture
def given(tmp_path, data_dir, finished_run, language_run, monkeypatch):
    """The folders and files that a command line names in capitals; the working folder is empty."""
    files = {"BAD": b'{"messages": 1}\n', "BINARY": b"\xff\xfe\0", "BLANKS": b'{"text": "a%sb"}' % (b" " * 600_000)}
    for name, content in files.items():
        (tmp_path / f"{name.lower()}.jsonl").write_bytes(content)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("COLUMNS", "40")
    text = language_run.removesuffix("run") + "set"
    folders = {
        "PUZZLES": data_dir,
        "RUN": finished_run,
        "RUNS": finished_run.parent,
        "LANGUAGE_RUN": language_run,
        "TEXT": text,
    }
    return folders | {name: tmp_path / f"{name.lower()}.jsonl" for name in files}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_line_and_writes_nothing(line, given, tmp_path, finished_run, capsys):
    assert main([str(given.get(word, word)) for word in shlex.split(line)]) == 2
    *progress, error = capsys.readouterr().err.splitlines()
    assert error.startswith("trm: ") and MISTAKES[line] in error
    assert all(each.startswith("compiling for ") for each in progress), progress
    assert not list((tmp_path / "work").iterdir()) and not list(finished_run.glob("a*"))


# ---- files, figures and weights


@pytest.mark.parametrize(
    ("keep_best", "known", "every", "message"),
    [
        ("acc", PuzzleTask.evaluated, (2, 0), "keep_best is acc, which no evaluation has; use one of exact_accuracy"),
        ("acc", LanguageTask.evaluated, (2, 0), "keep_best is acc, which no evaluation has; use one of bits_per_byte"),
        ("-exact_accuracy", PuzzleTask.evaluated, (2, 0), ""),
        ("exact_accuracy", PuzzleTask.evaluated, (5, 0), "its evaluation is every 5 steps"),
        ("loss", (), (0, 2), "its evaluation is every 0 steps"),
        ("hard/loss", (), (0, 2), ""),
    ],
)
def test_the_figure_of_the_best_checkpoint_is_checked_before_the_run(keep_best, known, every, message):
    """The cadence of a task's evaluation does not depend on `eval_every_steps`."""
    config = dataclasses.replace(preset("tiny"), keep_best=keep_best, eval_every_steps=5, checkpoint_every_steps=2)
    evaluator: Any = None
    evaluations = [Periodic(evaluator, every[0]), Periodic(evaluator, every[1], "hard")]
    with pytest.raises(UserError, match=message) if message else contextlib.nullcontext():
        _check_keep_best(config, known, evaluations, 9)


def test_with_checkpoints_by_the_clock_any_evaluation_can_be_the_best():
    fields: Any = {"keep_best": "exact_accuracy", "checkpoint_every_steps": 2, "checkpoint_every_minutes": 1}
    evaluator: Any = None
    _check_keep_best(dataclasses.replace(preset("tiny"), **fields), PuzzleTask.evaluated, [Periodic(evaluator, 5)], 9)


def test_texts_that_are_not_utf8_are_counted_in_the_error(tmp_path, capsys):
    for number in range(3):
        (tmp_path / f"{number}.txt").write_bytes(b"caf\xe9 number")
    arguments = ["--source", str(tmp_path), "--output-dir", str(tmp_path / "set")]
    for size in ("280", "265"):  # with merges, and without
        assert main(["build-data", "text", *arguments, "--vocab-size", size]) == 2
        line = capsys.readouterr().err
        assert "3 of 3 documents are not UTF-8" in line and "iconv" in line


def test_weights_and_checkpoints_that_are_not_finite_are_named(finished_run, monkeypatch):
    run = restore(str(finished_run))
    weights = run.state_dict()
    names = [name for name in weights if name in run.state.params][:2]
    for name, value in zip(names, (float("nan"), float("inf")), strict=True):
        weights[name].view(-1)[-1] = value
    with pytest.raises(UserError, match=rf"w.pt has NaN or infinity in 2 tensors: {names[0]}, {names[1]}; use an ear"):
        run.with_weights(weights, "w.pt")
    params = run.state.params | {names[0]: run.state.params[names[0]] * np.nan}
    monkeypatch.setattr("train_jax.run.restore.mean_weights", lambda weights, _tables: (params, next(weights)[1]))
    with pytest.raises(UserError, match=r"run at step 60 has NaN or infinity in a tensor: "):
        restore(str(finished_run))


def test_a_pointer_of_git_lfs_is_named(tmp_path):
    path = tmp_path / "train.csv"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 9\n")
    for read in (map_array, partial(read_whole, largest_bytes=999), partial(read_arrays, names=(), largest_bytes=999)):
        with pytest.raises(DamagedError, match="it is a pointer of Git LFS; run `git lfs pull`"):
            read(path)
    with pytest.raises(UserError, match=r"train.csv cannot be read: it is a pointer of Git LFS"):
        list(chunks_of(path, rows=5, remedy=""))
    pytest.importorskip("pyarrow")
    parquet = path.rename(tmp_path / "train.parquet")
    with pytest.raises(UserError, match=r"not a readable parquet file \(it is a pointer"):
        list(read_documents([TextFile("a", parquet)], "text", Skipped()))
