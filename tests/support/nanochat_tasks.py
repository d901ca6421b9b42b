"""A script: runs the tests of nanochat's tasks on the problems here, through an adapter with its names.

NANOCHAT_DIR=/path/to/nanochat python -m support.nanochat_tasks
"""

import sys
import tempfile
from pathlib import Path

import pyarrow.parquet

from support.published_tests import run_published
from train_jax.tasks.language.chat.building import mixed
from train_jax.tasks.language.chat.problems import multiple_choice
from train_jax.tasks.language.chat.published import PUBLISHED_SEED, Published, read_rows


class Task:
    """A slice of examples, which here are counted by `:COUNT` alone."""

    def __init__(self, start=0, stop=None, step=1):
        self._slice = slice(start, stop, step)

    @property
    def _numbers(self):
        return range(self.num_examples())[self._slice]

    def __len__(self):
        return len(self._numbers)

    def __getitem__(self, index):
        return self.get_example(self._numbers[index])


class TaskMixture:
    def __init__(self, tasks):
        self._places = mixed("train", tasks, seed=0)

    def __len__(self):
        return len(self._places)

    def __getitem__(self, index):
        task, number = self._places[index]
        return task[number]


class HubDataset:
    """A table as a file of the hub: its rows as they are read, or in the order of the problems."""

    def __init__(self, table, seed=None):
        self._table = table
        with tempfile.TemporaryDirectory() as folder:
            pyarrow.parquet.write_table(table, Path(folder) / "test-00000-of-00001.parquet")
            problems = Published("test", seed=(seed or 0) - PUBLISHED_SEED, folder=folder)
            (file,) = problems.files()
            self._rows = list(read_rows(file)) if seed is None else problems._items

    def shuffle(self, seed):
        return HubDataset(self._table, seed)

    def __len__(self):
        return len(self._rows)

    def __getitem__(self, index):
        return self._rows[index].values


if __name__ == "__main__":
    names = {"Task": Task, "TaskMixture": TaskMixture, "HubDataset": HubDataset, "render_mc": multiple_choice}
    sys.exit(run_published("test_tasks", {"tasks.common": names}))
