"""A file that is missing in storage has a reason in words, although fsspec's error has none."""

from pathlib import PosixPath

import pytest

from train_jax.errors import UserError
from train_jax.storage.json_files import read_object


class RemotePath(PosixPath):
    """A path whose client raises an error with one argument, as gcsfs does."""

    def stat(self, **_):
        raise FileNotFoundError(str(self))


def test_a_file_that_is_missing_in_storage_is_one_line():
    with pytest.raises(UserError, match=r"absent\.json cannot be read \(No such file or directory\); restore it"):
        read_object(RemotePath("absent.json"), {}, remedy="restore it")
