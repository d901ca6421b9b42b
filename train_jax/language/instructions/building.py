"""Builds a data set of instructions and responses in the published layout, with held-out samples."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np

from models_torch.ranges import Range
from train_jax.errors import UserError
from train_jax.language.chat.published import read_rows
from train_jax.language.chat.task_names import task_name
from train_jax.language.documents import is_test, list_files
from train_jax.language.instructions.data import PLACES, InstructionSet
from train_jax.language.tokenizer import JSON_NAME, RANKS_NAME, Tokenizer
from train_jax.storage.files import write_text
from train_jax.storage.new_dataset import Layout, OutputOptions, Progress, new_dataset
from train_jax.storage.storage import path_of
from train_jax.storage.untrusted import DamagedError, read_whole

RECIPE = "recipe.json"
LARGEST_RECIPE = 2**24
EPOCHS = 1000


class Sample(NamedTuple):
    """An instruction, the response, and the kind of response that is requested."""

    instruction: str
    response: str
    condition: str


@dataclass(frozen=True, kw_only=True)
class InstructionData(OutputOptions):
    """Instructions and responses from files or tasks, for HRM-Text, in its published layout.

    A sample is the tokens of --boq, its condition, the instruction and --eoq, then the response and --eoa. Samples with
    an empty response are dropped. A data set with the same options is kept."""

    source: tuple[str, ...] = ()
    """.jsonl or .parquet files with instruction, response and condition (by default direct), or folders of them, also
    gs://bucket/…; hf://OWNER/NAME is a data set of the Hugging Face hub."""
    tasks: tuple[str, ...] = ()
    """Problems with their answers, as with `trm build-data chat`: arithmetic:5000 spelling."""
    tokenizer: str = "data/text"
    """Folder with tokenizer.json: of a tokenizer or of another data set."""
    output_dir: Path = Path("data/instructions")
    """Output folder, or gs://bucket/folder."""
    overwrite: bool = False
    """Replace an existing data set that has other options."""
    test_share: Annotated[float, Range(0, 0.5, low_excluded=True)] = 0.05
    """Share of held-out samples; from tasks, the same share comes from their test split."""
    epochs: Annotated[int, Range(1, EPOCHS)] = 4
    """Number of orders of the samples that are written; the first one follows the last one."""
    seed: Annotated[int, Range(0, 2**63 - 1)] = 0
    """Seed of the orders, of the problems, and of the choice of held-out samples."""
    boq: str = "<|user_start|>"
    """Special token that begins a sample."""
    eoq: str = "<|user_end|>"
    """Special token after the instruction."""
    eoa: str = "<|assistant_end|>"
    """Special token after the response."""
    conditions: str = "direct=<|assistant_start|>,cot=<|python_start|>,noisy=<|python_end|>,synth=<|output_start|>"
    """Special token of each condition."""

    def summary(self, built: bool, seconds: float) -> str:
        return build_summary(path_of(self.directory), built, seconds)

    def build(self, progress: Progress) -> bool:
        """Builds the data set; returns False if it exists already."""
        self.check()
        if not (self.source or self.tasks):
            raise UserError("nothing to build; give --source FILE.jsonl or --tasks, such as --tasks arithmetic:5000")
        tokenizer = Tokenizer.load(self.tokenizer)
        specials = self._specials(tokenizer)
        options = {name: value for name, value in asdict(self).items() if name not in ("output_dir", "overwrite")}
        recipe = options | {"tokenizer": tokenizer.sha256}
        with new_dataset(self.output_dir, recipe, LAYOUT, overwrite=self.overwrite) as folder:
            if folder is None:
                return False
            splits: dict[str, list[Sample]] = {"train": [], "test": []}
            for split, sample in self._samples():
                splits[split].append(sample)
            for split, samples in splits.items():
                self._write(folder / ("test" * (split == "test")), samples, tokenizer, specials, progress)
            tokenizer.save(folder)
            write_text(folder / RECIPE, json.dumps({"recipe": recipe}, indent=1))
        return True

    @property
    def _condition_tokens(self) -> dict[str, str]:
        pairs = (pair.partition("=") for pair in self.conditions.split(","))
        return {condition: token for condition, _, token in pairs}

    def _specials(self, tokenizer: Tokenizer) -> dict[str, int]:
        """Returns the ids of the special tokens by name: boq, eoq, eoa and the conditions."""
        names = {"boq": self.boq, "eoq": self.eoq, "eoa": self.eoa}
        names |= {f"condition {condition}": token for condition, token in self._condition_tokens.items()}
        for name, token in names.items():
            if token not in tokenizer.specials:
                known = ", ".join(tokenizer.specials)
                raise UserError(f"the token {token!r} of {name} is not special in {self.tokenizer}; use one of {known}")
        return {name: tokenizer.specials[token] for name, token in names.items()}

    def _samples(self) -> Iterator[tuple[str, Sample]]:
        """Yields the samples with their split; no sample of a task is in both splits."""
        for file in list_files(self.source) if self.source else []:
            for row in read_rows(file):
                try:
                    sample = Sample(
                        row.values["instruction"], row.values["response"], row.values.get("condition") or "direct"
                    )
                    if not all(isinstance(text, str) for text in sample):
                        raise TypeError("instruction, response and condition are texts")
                except (KeyError, TypeError, AttributeError) as error:
                    raise UserError(f"{row.place} is no sample ({error!r}); correct or remove it") from None
                yield "test" if is_test(sample.instruction, self.seed, self.test_share) else "train", sample
        for text in self.tasks:
            name = task_name(text)
            train = name.open("train", seed=self.seed)
            test = name.open("test", seed=self.seed, count=max(1, round(self.test_share * len(train))))
            for split, problems in (("train", train), ("test", test)):
                for index in range(len(problems)):
                    *asked, answer = problems.conversation(index)
                    yield split, Sample("\n".join(message.text for message in asked), answer.text, "direct")

    def _write(
        self, folder: Path, samples: list[Sample], tokenizer: Tokenizer, specials: dict[str, int], progress: Progress
    ) -> None:
        """Writes a split in the published layout."""
        folder.mkdir(parents=True, exist_ok=True)
        tokens: list[int] = []
        places: list[tuple[int, int, int, int]] = []
        for number, sample in enumerate(samples):
            progress(f"{folder.name or 'train'} samples", number, len(samples))
            response = tokenizer.encode(sample.response)
            if not response:
                continue
            condition = specials.get(f"condition {sample.condition}")
            if condition is None:
                raise UserError(f"a sample has the condition {sample.condition!r}; add its token to --conditions")
            asked = [specials["boq"], condition, *tokenizer.encode(sample.instruction), specials["eoq"]]
            answered = [*response, specials["eoa"]]
            places.append((len(tokens), len(asked), len(tokens) + len(asked), len(answered)))
            tokens += asked + answered
        if not places:
            raise UserError(
                f"the {folder.name or 'train'} split has no samples: give more, or another --test-share, which is"
                f" {self.test_share:g} of the samples"
            )
        np.save(folder / "tokens.npy", np.asarray(tokens, np.int32))
        table = np.asarray(places, np.int64)
        for epoch in range(self.epochs if folder.name != "test" else 1):
            order = np.random.default_rng([self.seed, epoch]).permutation(len(table))
            (folder / f"epoch_{epoch}").mkdir()
            for column, name in enumerate(PLACES):
                np.save(folder / f"epoch_{epoch}" / f"{name}.npy", table[order, column])
        info = {"boq": self.boq, "eoq": self.eoq, "eoa": self.eoa, "condition_mapping": self._condition_tokens}
        metadata = {
            "tokenizer_info": info | {"tokenizer_path": ".", "vocab_size": tokenizer.vocab_size},
            "vocab_size": None,
            "max_seq_len": int(table[:, [1, 3]].sum(axis=1).max()) + 1,
            "total_length": int(table[:, [1, 3]].sum()),
        }
        write_text(folder / "metadata.json", json.dumps(metadata, indent=1))


def read_record(directory: str | Path) -> dict[str, Any] | None:
    """Reads `recipe.json`; None if there is none that is valid."""
    try:
        record = json.loads(read_whole(path_of(directory) / RECIPE, largest_bytes=LARGEST_RECIPE))
    except (OSError, ValueError, DamagedError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("recipe"), dict) else None


LAYOUT = Layout(
    frozenset(
        {"metadata.json", "tokens.npy", "test", JSON_NAME, RANKS_NAME, RECIPE, *(f"epoch_{n}" for n in range(EPOCHS))}
    ),
    (RECIPE,),
    read_record,
)


def build_summary(directory: Path, built: bool, seconds: float) -> str:
    """Returns a line about a data set that was built or existed."""
    data = InstructionSet(str(directory))
    test = InstructionSet(str(directory / "test"))
    counts = (
        f"{len(data.epoch(0).inst_len):,} instructions with {data.total_length:,} tokens, "
        f"{len(test.epoch(0).inst_len):,} held out"
    )
    return f"{directory}: {counts}, " + (f"built in {seconds:.1f} s" if built else "already there")
