"""The tables of a study as CSV and Parquet, with the SHA-256 of the log that each row comes from. Needs polars."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from train_jax.analysis.aims import OPERATIONAL, differing_fields
from train_jax.analysis.records import Run, Study
from train_jax.errors import UserError
from train_jax.run.files import write_bytes


def result_rows(study: Study) -> list[dict[str, Any]]:
    """Returns one row for each run, with every field in which runs of the study differ."""
    fields = [name for name in differing_fields(study.runs) if name not in OPERATIONAL]
    return [_row(study, run, fields) for run in study.runs]


def _row(study: Study, run: Run, fields: list[str]) -> dict[str, Any]:
    peak, step = run.peak or (None, None)
    row: dict[str, Any] = {"group": run.group, "experiment": run.experiment, "seed": run.seed, "state": run.state}
    row |= {f"final_{study.metric}": run.final, f"peak_{study.metric}": peak, "peak_step": step}
    row |= {"train_steps": run.train_steps, "examples": run.examples, "train_seconds": run.train_seconds}
    row |= {"parameters": run.parameters, "train_flops": run.flops, "hbm_peak_bytes": run.hbm_peak}
    row |= {"act_steps": run.act_steps}
    row |= {name: _cell(run.config.get(name)) for name in fields}
    return row | {"run_dir": run.run_dir, "metrics_sha256": run.metrics_sha256}


def _cell(value: Any) -> Any:
    return value if isinstance(value, int | float | str | None) else str(value)


def curve_rows(study: Study) -> list[dict[str, Any]]:
    """Returns one row for each evaluation of each run."""
    return [
        {"group": run.group, "experiment": run.experiment, "seed": run.seed, "step": int(step), study.metric: value,
         "metrics_sha256": run.metrics_sha256}
        for run in study.runs
        for step, value in run.curve
    ]  # fmt: skip


def write_tables(study: Study, folder: Path) -> list[Path]:
    """Writes results and curves, each as .csv and .parquet; returns the files. Raises `UserError` without polars."""
    try:
        import polars as pl
    except ImportError:
        raise UserError(
            "the tables need the package polars; install it with `pip install 'trm-bridge[analysis]'`"
        ) from None
    written = []
    for name, rows in (("results", result_rows(study)), ("curves", curve_rows(study))):
        frame = pl.DataFrame(rows, infer_schema_length=None, strict=False)
        for suffix, write in ((".csv", frame.write_csv), (".parquet", frame.write_parquet)):
            buffer = io.BytesIO()
            write(buffer)
            written.append(folder / f"{name}{suffix}")
            write_bytes(written[-1], buffer.getvalue())
    return written
