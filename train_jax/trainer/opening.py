"""Opens the folder of a run, and checks that all processes train the same."""

from __future__ import annotations

import contextlib
import dataclasses
import json

from train_jax.errors import UserError
from train_jax.run.config import to_json
from train_jax.run.folder import RunFolder, write_text
from train_jax.run.host_log import host_log
from train_jax.run.machine import hash_of_all, source_hashes, write_machine
from train_jax.run.resume import open_run, sole_writer
from train_jax.runtime.exits import before_exit
from train_jax.runtime.processes import all_or_none, is_main_process, of_main_process, process_shard, require_equal
from train_jax.storage.cache import continued_file, upload_working_files
from train_jax.trainer.start import Training


def identity(training: Training) -> str:
    return to_json(training.config) + training.task.fingerprint


def open_folder(training: Training, closing: contextlib.ExitStack) -> RunFolder:
    """Returns the run's folder with the files that describe the run, checked to be the same for every process."""
    config = training.config
    task = training.task
    devices = training.devices
    require_equal(identity(training), f"fields, or other data in {config.data_dir}")
    if process_shard()[1] > 1:
        require_equal(hash_of_all(source_hashes(config)), "code (`trm preflight` names the files that differ)")
    with all_or_none():
        if is_main_process():
            closing.enter_context(sole_writer(config.run_dir))
        folder = open_run(config, writes=is_main_process())
        if is_main_process():
            folder.finished.unlink(missing_ok=True)  # there are more steps to train now
            write_text(folder.data, json.dumps(task.facts, indent=1))
            parameters = sum(p.size for p in training.objective.params.values())
            write_machine(folder, devices=devices.kind, parameters=parameters)
    with all_or_none():
        if not folder.machine.exists():
            raise UserError(
                f"{folder.path} does not contain the files that the first process wrote; use a --run-dir that all "
                "processes share"
            )
    opened = folder
    folder = dataclasses.replace(folder, **of_main_process(lambda: {"run_id": opened.run_id}))
    closing.callback(upload_working_files, folder.path)  # after the last line of the log
    closing.enter_context(before_exit(lambda _reason: upload_working_files(folder.path)))
    number, count = process_shard()
    closing.enter_context(host_log(continued_file(folder.host_log(number)), f"process {number} of {count} of the run"))
    return folder
