"""`trm analyze ROOT`: the answers of groups of experiments, from their run folders alone."""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from train_jax.errors import UserError
from train_jax.research.law import METRIC, law
from train_jax.research.page import sections_of, write_report, write_tables
from train_jax.research.records import read_study
from train_jax.storage.files import write_text
from train_jax.storage.storage import path_of


@dataclasses.dataclass(frozen=True)
class Analyze:
    """Write the report of a sweep from its run folders, as HTML and Markdown: for each group one sentence with its
    evidence and a plot; and the tables of all runs as CSV. With --metric bits_per_byte, the law of language models
    instead: bits per byte against FLOPs."""

    root: Annotated[str, tyro.conf.Positional] = "runs"
    """Folder of the runs, ROOT/GROUP/ID/seed-N, or gs://bucket/folder."""
    groups: tuple[str, ...] = ()
    """Groups to analyze; by default all groups of the runs."""
    metric: str = "exact_accuracy"
    """Figure of the evaluation, a share between 0 and 1; or bits_per_byte."""
    output: str | None = None
    """Folder of the report, by default ROOT/analysis."""


def main(config: Analyze) -> None:
    study = read_study(config.root, config.metric)
    if not study.runs:
        raise UserError(f"{config.root} has no runs in GROUP/ID/seed-N; train some with `trm sweep`")
    unknown = [group for group in config.groups if group not in study.groups]
    if unknown:
        raise UserError(f"{config.root} has no group {unknown[0]}; use one of {', '.join(study.groups)}")
    folder: Path = path_of(config.output or f"{config.root.rstrip('/')}/analysis")
    if config.metric == METRIC:
        text = law(study)
        write_tables(study, folder)
        write_text(folder / "law.md", f"{text}\n")
        print(f"{text}\n{folder / 'law.md'}; tables: results.csv, curves.csv")
        return
    sections = sections_of(study, config.groups)
    write_report(study, sections, folder)
    for section in sections:
        print(f"{section.title}\n  {section.answer.sentence}")
        for note in section.answer.notes:
            print(f"  {note}")
    for problem in study.problems:
        print(f"not analysed: {problem}")
    print(f"report: {folder / 'index.html'}, {folder / 'analysis.md'}; tables: results.csv, curves.csv in {folder}")
