"""Builds a data set of conversations: a text data set in which the weights say what the assistant writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Any, TypeVar

from models_torch.ranges import Range
from train_jax.errors import UserError
from train_jax.language.chat.conversations import Conversation, Rendered, render
from train_jax.language.chat.problems import Problems, Split
from train_jax.language.chat.task_names import TaskName, task_name
from train_jax.language.text_building import TokenData, write_documents
from train_jax.language.text_set import LAYOUT
from train_jax.language.tokenizer import Tokenizer
from train_jax.storage.new_dataset import Progress, new_dataset

_Sized = TypeVar("_Sized", bound=Sized)


@dataclass(frozen=True, kw_only=True)
class ChatData(TokenData):
    """Conversations of files, and problems with their answers, in a random order.

    Tasks: arithmetic, calculator, sudoku, spelling, counting, identity, and with packages glosses, smalltalk and
    reasoning-gym; with a folder, such as gsm8k@FOLDER, messages, smoltalk, gsm8k, arc-easy, arc-challenge, mmlu. A
    count follows a colon, options a comma: arithmetic,operations=2:5000. A data set with the same options is kept."""

    source: tuple[str, ...] = ()
    """Conversations: .jsonl or .parquet files with messages, or folders of them, also gs://bucket/…; hf://OWNER/NAME is
    a data set of the Hugging Face hub."""
    tasks: tuple[str, ...] = ()
    """Problems, `NAME[,OPTION=VALUE…][@FOLDER][:COUNT]`, separated by spaces; COUNT are those to train on."""
    tokenizer: str = "data/text"
    """Folder with tokenizer.json: of a tokenizer or of another data set."""
    output_dir: Path = Path("data/chat")
    """Output folder, or gs://bucket/folder."""
    overwrite: bool = False
    """Replace an existing data set that has other options."""
    test_share: Annotated[float, Range(0, 0.5, low_excluded=True)] = 0.05
    """Held-out problems of a task, as a share of COUNT."""
    seed: Annotated[int, Range(0, 2**63 - 1)] = 0
    """Seed of the problems and of the order."""
    license: str = ""
    """Licence of the sources, to be recorded; those of the tasks are known."""

    def build(self, progress: Progress) -> bool:
        """Builds the data set; returns False if it exists already."""
        self.check()
        if not (self.source or self.tasks):
            raise UserError("nothing to build; give --source FILE or --tasks, such as --tasks arithmetic:5000 spelling")
        tokenizer = Tokenizer.load(self.tokenizer)
        names = [task_name(f"messages@{source}") for source in self.source] + [task_name(text) for text in self.tasks]
        recipe = self._recipe(names, tokenizer)
        with new_dataset(self.output_dir, recipe, LAYOUT, overwrite=self.overwrite) as folder:
            if folder is None:
                return False
            train = [name.open("train", seed=self.seed) for name in names]
            test = [self._held_out(name, len(problems)) for name, problems in zip(names, train, strict=True)]
            questions = {question_of(each.conversation(index)) for each in test for index in range(len(each))}
            splits = {
                "train": self._documents("train", train, tokenizer, progress, questions),
                "test": self._documents("test", test, tokenizer, progress, set()),
            }
            write_documents(folder, tokenizer, recipe, splits)
        return True

    def _held_out(self, name: TaskName, trained: int) -> Problems:
        """Returns the test split: of problems as many as `test_share` says, of conversations all."""
        if name.problems.kind == "dialogue":
            return name.open("test", seed=self.seed)
        return name.open("test", seed=self.seed, count=max(1, round(self.test_share * trained)))

    def _documents(
        self, split: Split, problems: list[Problems], tokenizer: Tokenizer, progress: Progress, left_out: set[str]
    ) -> Iterator[Rendered]:
        """Yields conversations in a random order, without those whose question is one of `left_out`."""
        places = mixed(split, problems, seed=self.seed)
        for number, (each, index) in enumerate(places):
            progress(f"{split} conversations", number, len(places))
            conversation = each.conversation(index)
            if question_of(conversation) not in left_out:
                yield render(tokenizer, conversation)

    def _recipe(self, names: list[TaskName], tokenizer: Tokenizer) -> dict[str, Any]:
        options = {name: getattr(self, name) for name in ("source", "tasks", "test_share", "seed")}
        licenses = {name.text: name.problems.license or self.license for name in names}
        return options | {"licenses": licenses, "tokenizer_sha256": tokenizer.sha256}


def mixed(split: Split, problems: Sequence[_Sized], *, seed: int) -> list[tuple[_Sized, int]]:
    """Returns each problem once, in a random order: whose it is, and its number."""
    places = [(each, index) for each in problems for index in range(len(each))]
    Random(f"{split} {seed}").shuffle(places)
    return places


def question_of(conversation: Conversation) -> str:
    """Returns the texts before the last answer."""
    return "\n".join(message.text for message in conversation[:-1])
