"""Run folders with known figures, written without training."""

import json
from pathlib import Path

from train_jax.research.jobs import Job, Options, jobs_of, select
from train_jax.run.config import to_json

FACTS = {"seq_len": 16, "vocab_size": 6, "total_groups": 100, "mean_puzzle_examples": 1.0}


def plan(root: Path, *names: str, seeds: int = 1, preset: str = "tiny") -> list[Job]:
    """Returns the jobs of a sweep."""
    return jobs_of(select(names), [{}], Options(str(root), "data", preset, seeds))


def write_run(job: Job, final: float | None, *, curve=(), parameters: int = 1000, act_steps: float = 4.0, **facts):
    """Writes the folder of a run with these figures; without `final` it is not finished."""
    folder = Path(job.config.run_dir)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(to_json(job.config))
    (folder / "dataset.json").write_text(json.dumps(FACTS | facts))
    (folder / "machine.json").write_text(json.dumps({"parameters": parameters}))
    records = [{"step": 1, "train/steps": act_steps, "train/count": 3.0}]
    records += [{"step": step, "eval/exact_accuracy": value} for step, value in curve]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records) + '{"step": 9, "ev')
    if final is not None:
        figures = {"train_steps": job.steps, "train_seconds": 60.0, "exact_accuracy": final}
        figures |= {"steps": act_steps, "summary": "done"}
        (folder / "FINISHED").write_text(json.dumps(figures))
    return folder
