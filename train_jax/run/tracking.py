"""Writes metrics to metrics.jsonl, to the console and, if it is installed, to wandb. The only file that uses wandb."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import io
import json
import os
import secrets
import sys
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from train_jax.run.folder import RunFolder, write_text
from train_jax.storage.cache import continued_file, upload_working_files, working_folder
from train_jax.storage.json_files import COUNT, FINITE, NUMBER, optional, record_of
from train_jax.storage.lines import LineFile, read_lines

if TYPE_CHECKING:  # importing it would import torch, which `trm summary` does not need
    from train_jax.run.config import RunConfig

_CONSOLE_EVERY_SECONDS = 5.0

METRICS = record_of(
    {"step": COUNT, "train/skipped_steps": optional(COUNT), "step_seconds": optional(FINITE)}, others=NUMBER
)
"""A line of metrics.jsonl."""

WandbMode = Literal["online", "offline", "disabled", "not installed"]


class Tracker:
    """Writes the metrics of one run. Records after `start_step` are removed, so that no step occurs twice."""

    def __init__(self, config: RunConfig, folder: RunFolder, *, start_step: int, total_steps: int):
        self._total_steps = total_steps
        self._last_line = 0.0
        metrics = continued_file(folder.metrics)
        records = read_lines(metrics, METRICS)
        kept = [record for record in records if self._stays(record, start_step)]
        if len(kept) < len(records):  # atomic: a crash loses nothing
            write_text(metrics, "".join(f"{json.dumps(record)}\n" for record in kept))
        self._folder = folder
        self._file = LineFile(metrics)
        self._wandb = _start_wandb(config, folder)

    def _stays(self, record: Mapping[str, float], start_step: int) -> bool:
        last_evaluation = record["step"] == self._total_steps and "eval/count" in record  # will be evaluated again
        return record["step"] <= start_step and not last_evaluation

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        record = {"step": step, **{name: float(value) for name, value in metrics.items()}}
        self._file.write(record)
        if self._wandb is not None:
            with self._without_wandb_after_an_error():
                self._wandb.log(dict(metrics), step=step)

    def progress(self, step: int, figures: str, *, step_seconds: float, speed: str) -> None:
        """Prints one line: step, metrics of the task, speed, and remaining time."""
        now = time.monotonic()
        if now - self._last_line < _CONSOLE_EVERY_SECONDS and step < self._total_steps:
            return
        self._last_line = now
        left = (self._total_steps - step) * step_seconds
        self.say(
            f"step {step:>{len(str(self._total_steps))}}/{self._total_steps}"
            f"  {figures}  {step_seconds * 1e3:.0f} ms/step  {speed}"
            f"  {duration(left)} left"
        )

    def say(self, line: str) -> None:
        print(line, flush=True)

    def sync(self) -> None:
        """Returns when every record so far survives a loss of power."""
        self._file.sync()

    def close(self) -> None:
        self._file.close()
        upload_working_files(self._folder.path)
        if self._wandb is not None:
            with self._without_wandb_after_an_error():
                self._wandb.finish()

    @contextlib.contextmanager
    def _without_wandb_after_an_error(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a failure of wandb must not stop the training
            self._wandb = None
            print(f"wandb stopped ({type(error).__name__}); metrics are in metrics.jsonl", file=sys.stderr)


class NullTracker(Tracker):
    """The tracker of a process that does not write the files of the run."""

    def __init__(self): ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def progress(self, step: int, figures: str, *, step_seconds: float, speed: str) -> None: ...

    def say(self, line: str) -> None: ...

    def sync(self) -> None: ...

    def close(self) -> None: ...


def duration(seconds: float) -> str:
    """Formats a duration: `47 s`, `3:07`, `2:05:33`."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def read_metrics(folder: RunFolder) -> list[dict[str, float]]:
    """Returns every record of a run, in order, without torn and damaged lines."""
    return read_lines(folder.metrics, METRICS)


def _start_wandb(config: RunConfig, folder: RunFolder) -> Any:
    mode, _ = wandb_mode(config)
    if mode in ("disabled", "not installed"):
        return None
    if mode == "offline":
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # it would look up the host of wandb
    try:
        import wandb

        return wandb.init(
            project=config.wandb_project,
            id=_wandb_id(folder),
            name=config.wandb_name or folder.path.name,
            group=config.wandb_group or None,
            resume="allow" if mode == "online" else None,
            dir=str(working_folder(folder.path)),
            config=dataclasses.asdict(config),
            mode=mode,
            # The address of a git remote may contain a token.
            settings=wandb.Settings(silent=True, x_disable_stats=True, disable_git=True, disable_code=True),
        )
    except Exception as error:  # a failure of wandb must not stop the training
        reason = type(error).__name__  # its text may contain the key
        print(f"wandb did not start ({reason}); metrics are in {folder.metrics}", file=sys.stderr)
        return None


def wandb_mode(config: RunConfig) -> tuple[WandbMode, str]:
    """Returns `online`, `offline`, `disabled` or `not installed`, and the place of a key; never the key.

    The place is empty if no key is needed.
    """
    if config.wandb == "disabled":
        return "disabled", ""
    if "wandb" not in sys.modules and importlib.util.find_spec("wandb") is None:
        return "not installed", ""
    if config.wandb == "offline":
        return "offline", ""
    key = _place_of_key()
    if config.wandb == "auto" and not key:
        return "offline", ""
    return "online", key


def _wandb_id(folder: RunFolder) -> str:
    """Returns the random wandb id of the run, stored in its folder so that a continued run keeps it."""
    if not folder.wandb_id.exists():
        write_text(folder.wandb_id, secrets.token_hex(8))
    return folder.wandb_id.read_text().strip()


def _place_of_key() -> str:
    """Returns where wandb finds a key, without asking its server; empty if there is none."""
    if os.environ.get("WANDB_API_KEY"):
        return "WANDB_API_KEY"
    # wandb knows its host, its settings and its file, which change with its version. This property is deprecated, but
    # `wandb.login(prompt=False)`, which is to replace it, looks the host up.
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            import wandb

            return "`wandb login`" if wandb.api.api_key else ""
        except Exception:  # such as a damaged netrc file: like a failure of wandb, it must not stop the training
            return ""
