"""A mistake in the arguments of a command is one line with the value and the remedy; the status is 2."""

import shlex

import pytest

from train_jax.__main__ import main

TRAIN = "train tiny --data-dir PUZZLES --run-dir run --wandb disabled --model"
CHAT = "build-data chat --output-dir chat --tokenizer TEXT"
CELL_NET, THINKER = "support.outside_models:CellNet", "support.outside_models:Thinker"
MISTAKES = {
    # arguments
    "trian": "unknown stage 'trian'; use one of build-data",
    "train": "needs a preset",
    "train nope": "unknown preset 'nope'; use one of sudoku-extreme, sudoku9",
    "train --help optimizer": "no help page 'optimizer'; use one of data, arch, act, optim",
    "train tiny --steps abc": "'abc'; expected --steps INT; see trm train tiny --help",
    "train tiny --stepz 3": "--stepz, 3; perhaps --steps INT; see trm train tiny --help",
    "train tiny --steps -5": "steps is -5; use at least 0",
    "train tiny --log-every-steps 0": "log_every_steps is 0; use at least 1",
    "train tiny --optim.lr nan": "optim.lr is nan",
    "train tiny --wandb maybe": "'maybe' for argument '--wandb'. Expected one of ('auto', 'online'",
    "train tiny --arch.attention-window 4": "attention_window is 4; use an odd number",
    "evaluate": "a folder, or gs://bucket/folder. (required); see trm evaluate --help",
    "evaluate run --limit -1": "--limit is -1; use at least 0",
    "build-data": "Expected one of {sudoku, maze, arc, text, chat, instructions, inspect}; see trm build-data --help",
    "build-data soduku": "'soduku'; use one of sudoku, maze, arc, text, chat, instructions, inspect",
    "build-data sudoku --size": "'--size'. Expected 1 values; see trm build-data sudoku --help",
    # data sets and models
    "train tiny --data-dir no --run-dir run": "no data set at no/train (dataset.json is missing); build one with `trm",
    f"{TRAIN} gru": "unknown architecture 'gru'; use one of trm, trm_singlez, trm_hier6, hrm, transformer",
    f"{TRAIN} nowhere:Net": "'nowhere' cannot be imported (ModuleNotFoundError",
    f"{TRAIN} support.outside_models:Nought": "has no nn.Module class 'Nought'; use one of: CellNet, Thinker",
    f"{TRAIN} {THINKER}": "support.outside_models:Thinker cannot be constructed with {'batch_size': 16, ",
    f"{TRAIN} {THINKER} --arch.options [1]": "[1] is not a JSON object",
    f"{TRAIN} {CELL_NET} --arch.halt-max-steps 2": "has no initial_carry for further steps",
    f"""{TRAIN} {CELL_NET} --arch.options '{{"depth": 1}}'""": "takes no depth; use its arguments",
    f"{TRAIN} hrm --arch.puzzle-emb-ndim 99": "puzzle_emb_ndim 99 does not fit",
    "build-data inspect none": "no data set at",
    "build-data inspect PUZZLES --examples -1": "--examples is -1; use at least 0",
    # runs
    **{f"{stage} none": "no run at" for stage in ("evaluate", "export", "solve", "report", "summary", "status")},
    "evaluate RUN --step 7": "has no checkpoint of step 7; use one of 50, 60, newest, best",
    "evaluate RUN --step 50 --weights x.pt": "--weights and --step 50 both select weights",
    "evaluate RUN --halt-threshold 2": "--halt-threshold is 2.0; use at most 1",
    "solve RUN --step best": "has no best checkpoint; train with --keep-best exact_accuracy, or use one of 50, 60",
    "report RUN --step 50": "at-step-50/evaluation/test.json is missing; run `trm evaluate",
    "export RUN --average-last 3": "average_last is 3, and",
    "export RUN --average 50,x": "--average 50,x is not a list of steps; write it as 10,20,30",
    "export RUN --average 50 --step 60": "give only one of --step, --average and --average-last",
    "export none --train-step --average-last 2": "--train-step exports one checkpoint",
    "export none --train-step --format huggingface": "--train-step exports one checkpoint",
    # experiments
    "analyze nowhere": "nowhere is not a folder",
    "analyze .": ". has no runs in GROUP/ID/seed-N",
    "sweep list exp99": "unknown group 'exp99'; use one of baseline, exp01",
    "train tiny --preset sudoku9": "--preset sudoku9 is for experiments",
    # language models
    "evaluate LANGUAGE_RUN --halt-early": "--halt-early is not for runs of task language",
    "core none none": "no run at",
    "chat LANGUAGE_RUN --step 8": "no checkpoint of step 8",
    "chat LANGUAGE_RUN --data-dir nowhere": "nowhere/tokenizer.json does not exist",
    "chat LANGUAGE_RUN --cycles 2": "--cycles 2 is an option of HRM-Text, not of --model gpt; omit it",
    "chat LANGUAGE_RUN --top-p 0": "--top-p is 0.0; use a value above 0 to 1",
    "generate LANGUAGE_RUN": "no prompt; give --prompt TEXT or --prompts-file FILE; --prompt '' is an empty one",
    "generate LANGUAGE_RUN --prompts-file no.txt": "no.txt does not exist; give a text or .jsonl file with prompts",
    "generate LANGUAGE_RUN --prompts-file BINARY": "cannot be read",
    "generate LANGUAGE_RUN --prompt a --max-tokens 160": "a prompt of 2 tokens and --max-tokens 160 need 161 positions",
    f"generate LANGUAGE_RUN --prompt '{'12 ' * 100}'": "use a shorter prompt",
    "generate LANGUAGE_RUN --prompt \ud800": "a prompt is not valid UTF-8; correct it",
    "bench-generate tiny": "tiny is a preset of the task puzzles; use one of a language model",
    "bench-generate chat-tiny --tokens 2500": "--prompt-tokens 128 and --tokens 2500 are more than the 2560 positions",
    "bench-generate chat-tiny --rows 0": "--rows is (0,); use at least 1",
    "bench-generate chat-tiny --tokens 8": "--tokens 8 come with the first one, in a dispatch of --tokens-per-dispatch",
    "chat-eval run --tasks smalltalk": "--tasks smalltalk has no right answers; leave it out",
    "chat-eval run --tasks humaneval": "no task is left; give --tasks",
    "chat-eval run --tasks nothing": "unknown task 'nothing'",
    "chat-eval run --num-samples 4": "--num-samples 4 are equal at --temperature 0; use --temperature 1",
    "chat-eval run --results /nowhere/a.json": "/nowhere is not a folder",
    "chat-eval run --tasks identity": "no run at ",
    CHAT: "nothing to build; give --source FILE or --tasks",
    f"{CHAT} --tasks arithmetik": "unknown task 'arithmetik'; use one of arithmetic",
    f"{CHAT} --tasks mmlu:50": "mmlu needs files; give mmlu@FOLDER, a folder or hf://OWNER/NAME",
    f"{CHAT} --tasks humaneval@.": "humaneval@",
    f"{CHAT} --source none.jsonl": "none.jsonl does not exist",
    f"{CHAT} --source BINARY": "cannot be read",
    f"{CHAT} --source EMPTY": "has no problem in the train split",
    f"{CHAT} --source BAD": "bad.jsonl line 1 is no row of messages",
    f"{CHAT} --tasks identity --tokenizer .": "tokenizer.json does not exist",
    f"{CHAT} --tasks identity --test-share 0.7": "--test-share",
    # compilation for a TPU
    "compile-pod": "needs a preset or an experiment",
    "compile-pod nothing": "unknown preset 'nothing'",
    "compile-pod tiny --topology v3:2x2": "unknown topology 'v3:2x2'; use a chip and its axes",
    "compile-pod tiny --topology v5e:2x2x2": "v5e has 2 axes, such as 2x4",
    "compile-pod tiny --topology v4:3x5x7": "topology 'v4:3x5x7'",
    "compile-pod tiny --topology v4:2x2x1 --global-batch-size 6": "6",
    "compile-pod tiny --data-dir elsewhere/mine": "is not built, and does not name its kind; use --kind",
    "compile-pod tiny --kind chess": "unknown kind 'chess'",
    "compile-pod tiny --search-batch-sizes 8,many": "'8,many' is not a list of batch sizes",
    "compile-pod tiny --search-batch-sizes 7,9": "no batch size of 7, 9 is a multiple of 32 devices",
    "compile-pod tiny --search --step evaluate": "--search is for the train step",
    "compile-pod tiny --search --text a": "leave out --step, --text, --save and --fill-cache",
    "compile-pod tiny --step decode --topology v4:2x2x1": "has no cache of keys and values",
    "compile-pod d20 --step decode --capacity 99999": "--capacity is 99999, the model has 20480 positions",
}


@pytest.fixture
def given(tmp_path, data_dir, finished_run, language_run, monkeypatch):
    """The folders and files that a command line names in capitals; the working folder is empty."""
    files = {"EMPTY": b"\n", "BAD": b'{"messages": 1}\n', "BINARY": b"\xff\xfe\0"}
    for name, content in files.items():
        (tmp_path / f"{name.lower()}.jsonl").write_bytes(content)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("COLUMNS", "40")
    text = language_run.removesuffix("run") + "set"
    folders = {"PUZZLES": data_dir, "RUN": finished_run, "LANGUAGE_RUN": language_run, "TEXT": text}
    return folders | {name: tmp_path / f"{name.lower()}.jsonl" for name in files}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_line_and_writes_nothing(line, given, tmp_path, finished_run, capsys):
    assert main([str(given.get(word, word)) for word in shlex.split(line)]) == 2
    *progress, error = capsys.readouterr().err.splitlines()
    assert error.startswith("trm: ") and MISTAKES[line] in error
    assert all(each.startswith("compiling for ") for each in progress), progress
    assert not list((tmp_path / "work").iterdir()) and not list(finished_run.glob("a*"))
