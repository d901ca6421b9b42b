"""Files of a run beside its checkpoints: logs, the wandb run, compiled programs, no secrets; the fields and data with
which a run continues, and the process that may write its folder."""

import contextlib
import dataclasses
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock
from urllib.parse import urlsplit

import numpy as np
import pytest
from support.presets import SMALL_RUN
from support.scripts import ENVIRONMENT

from train_jax.__main__ import main
from train_jax.errors import UserError
from train_jax.run.config import to_json
from train_jax.run.folder import RunFolder, read_run, write_text
from train_jax.run.host_log import host_log
from train_jax.run.presets import preset
from train_jax.run.resume import OPERATIONAL, changed_fields, decide_start, open_run, sole_writer
from train_jax.run.tracking import Tracker, read_metrics, wandb_mode
from train_jax.runtime.compilation import use_compile_cache
from train_jax.script.task import ScriptConfig
from train_jax.storage.files import local_copy, whole_file
from train_jax.storage.lease import LostFolderError, check_writer

WANDB_MODES = ("auto", "online", "offline", "disabled")
SECRETS = {
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "HF_TOKEN": "hf_PlantedPlantedPlantedPlantedPlant",
    "AWS_SECRET_ACCESS_KEY": "PlantedSecretPlantedSecretPlantedSecret1",
}


def trained(tmp_path, data_dir, *options, **environment):
    """Runs `trm train` in a folder of its own; returns what it printed."""
    words = [*SMALL_RUN, "--steps", "4", "--data-dir", str(data_dir), "--run-dir", str(tmp_path / "run"), *options]
    command = [sys.executable, "-m", "train_jax", "train", "tiny", *words]
    environment = os.environ | ENVIRONMENT | environment
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


# ---- damage


def test_records_that_a_continued_run_writes_again_are_removed(tmp_path):
    """These are the records after the checkpoint, and the evaluation at the end of a run that continues there; a kill
    tears the last line."""
    folder = RunFolder(tmp_path)
    config = dataclasses.replace(preset("tiny"), wandb="disabled")
    records = [{"step": step, name: 1.0} for step in (2, 4) for name in ("train/lm_loss", "eval/count")]
    for start, kept in ((4, records[:3]), (3, records[:2])):
        write_text(folder.metrics, "".join(f"{json.dumps(record)}\n" for record in records) + '{"step": 5, "tr')
        Tracker(config, folder, start_step=start, total_steps=4).close()
        assert read_metrics(folder) == kept


# ---- logs


def test_the_log_of_a_process_has_what_it_printed_and_how_it_ended(tmp_path, capsys):
    path = tmp_path / "logs" / "host-00.log"
    write_text(path, "torn")
    before = sys.stdout
    handler = logging.StreamHandler(sys.stderr)
    logging.getLogger("test_run_files").addHandler(handler)
    for error in (None, UserError("a mistake"), ZeroDivisionError("a bug")):
        with contextlib.suppress(Exception), host_log(path, "process 0 of 1"):
            print("to the output")
            print("to the errors", file=sys.stderr)
            logging.getLogger("test_run_files").warning("by a logger")
            assert path.read_text().endswith("by a logger\n"), "not written line by line"
            if error is not None:
                raise error
    logging.getLogger("test_run_files").removeHandler(handler)
    print("afterwards")
    assert sys.stdout is before and handler.stream is sys.stderr
    lines = path.read_text().splitlines()
    assert lines[0] == "torn"
    headers = [line for line in lines if line.startswith("==== ")]
    assert headers[2].endswith(f"process {os.getpid()} on {os.uname().nodename}")
    assert lines.count("to the output") == lines.count("to the errors") == lines.count("by a logger") == 3
    assert "trm: a mistake" in lines and "ZeroDivisionError: a bug" in lines and "afterwards" not in lines
    assert any("test_run_files.py" in line and "line" in line for line in lines), "no traceback"
    shown = capsys.readouterr()
    assert shown.out.count("to the output") == 3 and shown.err.count("to the errors") == 3


# ---- wandb and secrets

NAMED_LOOKUPS = """import sys
def note(event, arguments):
    if event == "socket.getaddrinfo" and arguments[0] not in (None, "127.0.0.1", "localhost"):
        open({!r}, "a").write(f"{{arguments[0]}} ")
sys.addaudithook(note)
"""


@pytest.mark.parametrize(("place", "found"), [("environment", "WANDB_API_KEY"), ("login", "`wandb login`"), ("", "")])
def test_the_key_is_where_wandb_finds_it_and_is_not_shown(place, found, tmp_path, monkeypatch, capfd):
    import wandb

    netrc = tmp_path / "netrc"
    key = SECRETS["WANDB_API_KEY"]
    monkeypatch.setenv("NETRC", str(netrc))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    if place == "environment":
        monkeypatch.setenv("WANDB_API_KEY", key)
    elif place == "login":
        host = urlsplit(wandb.Settings().base_url).netloc
        netrc.write_text(f"machine {host}\n  login user\n  password {key}\n")  # as `wandb login` writes it
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: pytest.fail("the network is asked"))
    modes = {mode: wandb_mode(dataclasses.replace(preset("tiny"), wandb=mode)) for mode in WANDB_MODES}
    assert modes == {
        "auto": ("online" if found else "offline", found),
        "online": ("online", found),
        "offline": ("offline", ""),
        "disabled": ("disabled", ""),
    }
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_secrets_are_in_no_file_and_the_wandb_run_is_the_same_one(tmp_path, data_dir):
    """The secret in the address of a git remote is in none either. The second command continues the run."""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    remote = f"https://user:{SECRETS['HF_TOKEN']}@example.com/x.git"
    subprocess.run(["git", "-C", tmp_path, "remote", "add", "origin", remote], check=True)
    lookups = tmp_path / "lookups"
    (tmp_path / "sitecustomize.py").write_text(NAMED_LOOKUPS.format(str(lookups)))
    path = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ENVIRONMENT['PYTHONPATH']}"}
    shown = trained(tmp_path, data_dir, "--wandb", "offline", **SECRETS, **path)
    assert not lookups.exists(), f"an offline run looked up {lookups.read_text()}"
    shown += trained(tmp_path, data_dir, "--wandb", "offline", "--steps", "6", **SECRETS)
    assert "continuing at step 4" in shown
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(files) > 20 and any(path.suffix == ".wandb" for path in files)
    for name, secret in SECRETS.items():
        assert secret not in shown, name
        assert not [path for path in files if secret.encode() in path.read_bytes()], name
    folder = RunFolder(tmp_path / "run")
    parts = [path.name.rpartition("-")[2] for path in (folder.path / "wandb").glob("offline-run-*")]
    assert parts == [folder.wandb_id.read_text()] * 2, "not one run of wandb"


def test_the_id_of_a_wandb_run_is_random_and_a_failure_shows_no_key(tmp_path, monkeypatch, capsys):
    """Runs of the same name on two machines are two runs; a run that continues is the same one. A failure of
    wandb stops nothing."""
    wandb = MagicMock()
    wandb.init.return_value.log.side_effect = ConnectionError(f"bad key {SECRETS['WANDB_API_KEY']}")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for machine in ("a", "b", "a"):
        folder = RunFolder(tmp_path / machine / "run")
        folder.path.mkdir(parents=True, exist_ok=True)
        config = dataclasses.replace(preset("tiny"), run_dir=str(folder.path), wandb="online")
        tracker = Tracker(config, folder, start_step=0, total_steps=4)
        tracker.log(2, {"train/lm_loss": 1.0})
        tracker.close()
    begun = [call.kwargs for call in wandb.init.call_args_list]
    first, other, again = (options["id"] for options in begun)
    assert first == again != other and {options["resume"] for options in begun} == {"allow"}
    shown = capsys.readouterr().err
    assert shown.count("wandb stopped (ConnectionError); metrics are in metrics.jsonl") == 3
    assert SECRETS["WANDB_API_KEY"] not in shown


def test_a_cache_that_cannot_be_written_is_left_out(tmp_path, monkeypatch):
    updates = {}
    (tmp_path / "file").touch()
    config = SimpleNamespace(jax_enable_compilation_cache=True, jax_compilation_cache_dir=None)
    config.update = updates.__setitem__
    monkeypatch.setattr("jax.config", config)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert use_compile_cache(True).endswith("cannot be written (Not a directory); set JAX_COMPILATION_CACHE_DIR")
    assert updates == {"jax_enable_compilation_cache": False}
    updates.clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for shared, folder in ((None, tmp_path / "trm" / "compiled"), (tmp_path / "runs", tmp_path / "runs")):
        assert use_compile_cache(True, shared) == "" and "jax_enable_compilation_cache" not in updates
        assert Path(updates["jax_compilation_cache_dir"]).parent == folder
    updates.clear()
    assert use_compile_cache(False) == "" and updates == {"jax_enable_compilation_cache": False}


# ---- continuation


@pytest.fixture
def command(place, data_at):
    """`trm train` with further options; returns the exit status."""
    where = ["--data-dir", str(data_at), "--run-dir", str(place / "run")]
    return lambda *options: main(["train", "tiny", *where, *SMALL_RUN, *options])


@pytest.mark.slow
@pytest.mark.parametrize("place", ["disk", pytest.param("storage", marks=pytest.mark.campaign)], indirect=True)
def test_a_run_continues_with_more_steps_and_records_what_changed(command, place, data_at, capsys):
    assert command("--resume", "must") == 2
    assert "run has no checkpoint; use --resume auto" in capsys.readouterr().err and not (place / "run").exists()
    assert command("--steps", "4", "--resume", "never") == 0
    assert command("--steps", "4", "--resume", "never") == 2
    assert "holds a run already; use another --run-dir, or --resume auto" in capsys.readouterr().err
    assert command("--steps", "3") == 2
    assert "steps 4 there, 3 requested" in capsys.readouterr().err
    assert command("--steps", "6", "--keep-checkpoints", "5", "--resume", "must") == 0
    assert "continuing at step 4" in capsys.readouterr().out
    folder = RunFolder(place / "run")
    assert json.loads(folder.finished.read_text())["train_steps"] == 6
    (record,) = map(json.loads, folder.changes.read_text().splitlines())
    assert record["fields"] == {"steps": [4, 6], "keep_checkpoints": [2, 5], "resume": ["never", "must"]}
    with sole_writer(str(folder.path)):
        assert command("--steps", "8") == 2
    assert "run is being written by process " in capsys.readouterr().err
    labels = data_at / "train" / "all__labels.npy"
    with local_copy(labels) as local:
        rolled = np.roll(np.load(local), 1, axis=0)
    with whole_file(labels) as scratch:
        np.save(scratch, rolled)
    assert command("--steps", "8") == 2
    assert "holds other data than the run was trained on up to step 6" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"seed": 1}, "seed 0 there, 1 requested"),
        ({"steps there": 0, "steps": 10}, "steps 0 there, 10 requested"),
        ({"optim": {"lr": 0.5}}, "optim.lr 0.001 there, 0.5 requested"),
        ({"optim": {"max_skipped_steps": 5}, "compute": {"runner": "shard_map"}, "steps": 11}, ""),
        ({"data_dir": "elsewhere", "wandb": "offline", "keep_best": "exact_accuracy"}, ""),
    ],
)
def test_fields_identify_the_run_or_may_change(place, changes, refused):
    """Without `steps`, the epochs decide, and may give more steps than those requested now."""
    config = dataclasses.replace(preset("tiny"), run_dir=str(place), steps=changes.pop("steps there", 10))
    folder = open_run(config)
    parts = {name: value for name, value in changes.items() if isinstance(value, dict)}
    other = {name: dataclasses.replace(getattr(config, name), **value) for name, value in parts.items()}
    changed = dataclasses.replace(config, **(changes | other))
    if refused:
        with pytest.raises(UserError, match=refused):
            changed_fields(folder, changed)
    else:
        assert len(changed_fields(folder, changed)) == len(changes)


def test_the_id_of_a_run_is_made_once(place):
    """A run of an earlier version gets one when it continues; a copy of the folder keeps it."""
    config = dataclasses.replace(preset("tiny"), run_dir=str(place / "run"))
    run_id = open_run(config).run_id
    assert re.fullmatch("[0-9a-f]{16}", run_id) and json.loads((place / "run" / "config.json").read_text())["run_id"]
    longer = dataclasses.replace(config, steps=10**6)
    assert open_run(longer).run_id == open_run(longer).run_id == read_run(config.run_dir)[0].run_id == run_id
    assert open_run(dataclasses.replace(config, run_dir=str(place / "other"))).run_id != run_id
    write_text(place / "run" / "config.json", to_json(config))
    earlier, fields = read_run(config.run_dir)
    assert earlier.run_id == "" and fields == config
    assert open_run(config, writes=False).run_id == ""
    assert open_run(config).run_id == read_run(config.run_dir)[0].run_id != ""


def test_operational_fields_exist():
    fields = {field.name for field in dataclasses.fields(preset("tiny"))} | {"compute.", "optim.max_skipped_steps"}
    configs = (type(preset("chat-tiny").task_config), ScriptConfig)
    of_tasks = {f"task_config.{field.name}" for config in configs for field in dataclasses.fields(config)}
    assert fields | of_tasks >= OPERATIONAL


def test_one_process_writes_a_local_folder(tmp_path):
    run = tmp_path / "runs" / "run"
    for _ in range(2):  # the second time over what the first one left
        with sole_writer(str(run)):
            owner = rf"{run} is being written by process {os.getpid()} on \S+ since [\d: -]+; wait until it ends"
            with pytest.raises(UserError, match=owner), sole_writer(str(run)):
                pass
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"), sole_writer(str(tmp_path / "file" / "run")):
        pass


@pytest.mark.parametrize("replace", ["moved", "removed", "replaced"])
def test_who_lost_the_folder_writes_nothing_more(tmp_path, replace):
    """The lock of a removed folder stays locked, and tells nobody."""
    run = tmp_path / "run"
    with sole_writer(str(run)):
        check_writer(run)
        run.rename(tmp_path / "moved") if replace == "moved" else shutil.rmtree(run)
        if replace == "replaced":
            run.mkdir()
            (run / "lock").touch()
        with pytest.raises(LostFolderError, match=rf"{run} was removed or replaced while .* wrote it; this run stops"):
            check_writer(run)
        with sole_writer(str(run)):  # the new run is not disturbed
            check_writer(run)
            owner = (run / "lock").read_text()
    assert (run / "lock").read_text() == owner


def test_a_start_needs_a_folder_for_a_run(place, tmp_path):
    """Nothing is made before the run is known to start."""

    def decided(folder, *steps, **fields):
        return decide_start(dataclasses.replace(preset("tiny"), run_dir=str(folder), **fields), *steps or (10, ""))

    assert decided(place / "run") == decided(place / "run", resume="never") and not (place / "run").exists()
    with pytest.raises(UserError, match="--run-dir is empty"):
        decided("")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file is a file; give a folder") as error:
        decided(tmp_path / "file")
    assert error.value.STATUS == 2
    (tmp_path / "set" / "train").mkdir(parents=True)
    (tmp_path / "set" / "train" / "dataset.json").write_text("{}")
    with pytest.raises(UserError, match="set is a data set"):
        decided(tmp_path / "set")
    finished = RunFolder(tmp_path / "finished").finished
    finished.parent.mkdir()
    figures = {"train_steps": 10, "train_seconds": 1.0, "summary": "done"}
    finished.write_text(json.dumps(figures | {"data": "one"}))
    assert decided(finished.parent, 10, "one").finished
    with pytest.raises(UserError, match="holds other data than the run was trained on up to step 10"):
        decided(finished.parent, 10, "two")
    for damaged in ("", '{"train_steps": "many"}', "[]"):
        finished.write_text(damaged)
        with pytest.raises(UserError, match=r"FINISHED cannot be read .*remove it"):
            decided(finished.parent, 40, "")
