"""Samples of a language model as a file of its run. Imports neither JAX nor PyTorch."""

from __future__ import annotations

import dataclasses
import json

from train_jax.errors import UserError
from train_jax.run.folder import RunFolder, write_text


@dataclasses.dataclass(frozen=True)
class Sample:
    """A prompt, which may be empty, and what the model wrote after it."""

    name: str
    """Such as `test document 12` or `without a prompt`."""
    prompt: str
    text: str


def write_samples(folder: RunFolder, step: int, samples: list[Sample]) -> None:
    content = {"step": step, "samples": [dataclasses.asdict(sample) for sample in samples]}
    write_text(folder.samples, json.dumps(content, indent=1))


def read_samples(folder: RunFolder) -> list[Sample]:
    """Returns no samples if there is no file. Raises `UserError` for a damaged one."""
    if not folder.samples.is_file():
        return []
    try:
        samples = [Sample(**each) for each in json.loads(folder.samples.read_text())["samples"]]
        if not all(isinstance(value, str) for each in samples for value in dataclasses.astuple(each)):
            raise TypeError("expected text")
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{folder.samples} cannot be read ({error}); remove it and run `trm evaluate` to write it again"
        ) from error
    return samples
