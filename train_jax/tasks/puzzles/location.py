"""Where the files of a data set can be read: its folder, or the local copy of a data set in `gs://`."""

from pathlib import Path

from train_jax.errors import UserError
from train_jax.run.cache import local_folder
from train_jax.run.storage import path_of
from train_jax.run.untrusted import DamagedError, map_array
from train_jax.tasks.puzzles.metadata import SPLITS, check, read_json, read_metadata
from train_jax.tasks.puzzles.recipe import FIELDS, content_of, read_record


def dataset_folder(directory: str | Path) -> Path:
    """The local folder with the files of a data set; a remote one is copied and its content compared with the recipe.

    Without files at a `gs://` path, that path. Raises `UserError` if the content is not what the recipe says.
    """
    return local_folder(directory, lambda copy: _check_content(copy, directory))


def _check_content(copy: Path, directory: str | Path) -> None:
    record = read_record(copy)
    if record is None:
        return
    try:
        metadata = {split: read_metadata(copy / split / "dataset.json") for split in SPLITS}
        if any(len(each.sets) != 1 for each in metadata.values()):
            return
        splits = {
            split: (each, {field: map_array(copy / split / f"{each.sets[0]}__{field}.npy") for field in FIELDS})
            for split, each in metadata.items()
        }
    except (DamagedError, FileNotFoundError, UserError):
        return  # the reader says what is wrong
    if content_of(splits).sha256 != record.get("content_sha256"):
        raise UserError(
            f"{path_of(directory)} is not what its recipe.json says (SHA-256); build it again with `trm build-data` "
            "and --overwrite"
        )


def read_identifiers(directory: str | Path) -> list[str]:
    """Reads `identifiers.json`: the names of the puzzles by puzzle identifier."""
    path = dataset_folder(directory) / "identifiers.json"
    names = read_json(path)
    check(isinstance(names, list) and all(isinstance(name, str) for name in names), path, "expected a list of names")
    return names
