"""Files on disks and in storage are whole or absent; requests are repeated up to a limit; an error is one line; one
process has the right to write a run in storage."""

import contextlib
import itertools
import time
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from google.api_core.exceptions import Forbidden
from google.auth.exceptions import DefaultCredentialsError

from train_jax.__main__ import main
from train_jax.errors import StorageError, UserError
from train_jax.storage import lease, storage
from train_jax.storage.cache import continued_file, upload_working_files
from train_jax.storage.files import (
    append_text,
    local_copy,
    move_folder,
    remove_folder,
    upload_folder,
    whole_file,
    write_bytes,
    write_text,
)
from train_jax.storage.storage import path_of, read_generation, write_generation


def failing_twice(fault, requests=lambda method, path: True):
    """The first two of these requests fail."""
    left = iter([fault] * 2)
    return lambda method, path: next(left, "") if requests(method, path) else ""


def test_a_gs_path_survives_pathlib():
    assert str(path_of(Path("gs://tests/a/b"))) == str(path_of("gs://tests/a/b/")) == "gs://tests/a/b"
    assert (path_of("gs://tests/a") / "b").parent == path_of("gs://tests/a") and path_of("a").absolute().is_absolute()
    with pytest.raises(UserError, match=r"gs:// names no bucket; write it as gs://bucket/folder"):
        path_of("gs://")


@pytest.fixture(params=["disk", "storage"])
def anywhere(request, tmp_path):
    return tmp_path if request.param == "disk" else path_of(request.getfixturevalue("remote"))


def test_a_file_is_written_whole_or_not_at_all(anywhere):
    file = anywhere / "folder" / "file.txt"
    write_text(file, "one")
    append_text(file, " two")
    with pytest.raises(ZeroDivisionError), whole_file(file) as scratch:
        scratch.write_text("half")
        _ = 1 / 0
    assert file.read_text() == "one two" and [path.name for path in file.parent.iterdir()] == ["file.txt"]
    with whole_file(file) as first, whole_file(file) as second:  # two writers: the one that finishes last wins
        first.write_bytes(b"whole")
        second.write_bytes(b"other")
    with local_copy(file) as local:
        assert local.read_bytes() == b"whole" and file.stat().st_size == 5 and file.is_file()
    file.unlink()
    file.unlink(missing_ok=True)
    assert not file.exists() and not file.is_file()
    with pytest.raises(FileNotFoundError):
        file.read_text()


@pytest.mark.slow
def test_large_objects_come_in_parts(remote, tmp_path):
    content = bytes(range(256)) * 2**12 * 60
    write_bytes(path_of(remote) / "large", content)
    (tmp_path / "file").write_bytes(content)
    upload_folder(tmp_path, path_of(remote), last=[])
    for name in ("large", "file"):
        with local_copy(path_of(remote) / name) as local:
            assert local.read_bytes() == content


@pytest.mark.parametrize("fault", ["503", "429", "reset", "lost"])
def test_every_request_is_repeated(remote, emulator, monkeypatch, fault):
    monkeypatch.setattr("train_jax.storage.requests.FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr("gcsfs.retry.min", lambda *_: 0.01, raising=False)
    folder = path_of(remote)
    file = folder / "file"
    for request in (
        lambda: write_text(file, "content"),
        lambda: file.read_text() == "content",
        lambda: file.exists() and file.is_file() and folder.is_dir() and not (folder / "no").exists(),
        lambda: [path.name for path in folder.iterdir()] == ["file"],
        lambda: list(folder.files()) == ["file"],
        lambda: file.copy_to(folder / "copy"),
        lambda: write_generation(folder / "new", b"x", 0) == read_generation(folder / "new")[1],
        lambda: remove_folder(folder),
    ):
        with emulator.failing(failing_twice(fault)):
            assert request() in (None, True)
    assert not emulator.names(folder.name)


@pytest.mark.parametrize(
    ("answer", "status", "messages"),
    [
        ("503", StorageError.STATUS, ("/config.json cannot be reached (", "tried for 0 s; the same command")),
        ("401", 2, ("there are no credentials; run `gcloud auth application-default login`, or set GOOGLE_APPLICA",)),
        ("403", 2, ("needs the roles Storage Object Admin and Storage Legacy Bucket Reader on gs://tests",)),
    ],
)
def test_a_request_that_fails_for_good_is_one_line(remote, emulator, impatient, capsys, answer, status, messages):
    write_text(path_of(remote) / "config.json", "{}")
    with emulator.failing(lambda method, path: answer):
        assert main(["summary", remote]) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("trm: ") and all(message in line for message in messages)


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (DefaultCredentialsError("none"), "gs://other: there are no credentials; run `gcloud auth application-default"),
        (Forbidden("storage.buckets.get"), r"gs://other: no permission \(403 storage.buckets.get\); the account needs"),
        (OSError("Project was not passed and"), "there is no project; set GOOGLE_CLOUD_PROJECT to the project of gs"),
    ],
)
def test_missing_credentials_permissions_and_projects_are_named(emulator, monkeypatch, raised, message):
    monkeypatch.setattr(storage, "_client", MagicMock(side_effect=raised))
    with pytest.raises(UserError, match=message) as error:
        path_of("gs://other/run").exists()
    assert not isinstance(error.value, StorageError)


def test_without_the_bucket_or_the_package(emulator, monkeypatch, capsys):
    assert main(["summary", "gs://nowhere/run"]) == 2
    assert "the bucket gs://nowhere does not exist; create it with `gcloud storage" in capsys.readouterr().err
    storage._prepare_client.cache_clear()
    monkeypatch.setattr(storage.importlib.util, "find_spec", lambda name: None)
    assert main(["summary", "gs://tests/run"]) == 2
    assert "gs:// paths need the package gcsfs; install it with `pip install" in capsys.readouterr().err


def test_a_folder_that_is_moved_keeps_its_marker_only_while_it_is_complete(remote, emulator, impatient):
    """This holds for any number of requests before the process is killed."""
    for count in itertools.count(1):
        source = path_of(remote) / f"{count}" / "7"
        target = path_of(remote) / f"{count}" / "aside"
        names = ["a/data", "b/data", "done"]
        for name in names:
            write_text(source / name, name)
        handled = itertools.count(1)
        fault = lambda method, path, n=count, c=handled: "403" if next(c) > n else ""  # noqa: E731
        with emulator.failing(fault), contextlib.suppress(UserError):
            move_folder(source, target, marker="done")
            break
        if (source / "done").exists():
            assert sorted(source.files()) == names
        if (target / "done").exists():
            assert sorted(target.files()) == names
    assert count > 7 and not source.exists() and sorted(target.files()) == names


# ---- the lease of a run

ELSEWHERE = b"process 7 on other\nx 1\n"


@pytest.fixture
def folder(remote, monkeypatch):
    monkeypatch.setattr(lease, "LEASE_SECONDS", 0.5)
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.1)
    return path_of(remote)


def write(folder, content, generation=0):
    return write_generation(folder / "lock", content, generation)


def test_a_second_writer_is_refused_while_the_first_one_is_alive(folder, emulator):
    with lease.sole_writer(folder):
        time.sleep(0.3)
        with pytest.raises(UserError, match=rf"{folder} is being written by process \d+ on .*; wait until it ends"):
            lease.sole_writer(folder).__enter__()
        lease.check_writer(folder)
    start = time.monotonic()
    with lease.sole_writer(folder):
        assert time.monotonic() - start < 0.5, "a lease that was released is free at once"
    write(folder, ELSEWHERE, emulator.generation(f"{folder.name}/lock"))
    start = time.monotonic()
    with lease.sole_writer(folder):
        assert time.monotonic() - start > 0.5, "that of a silent owner is taken over"
        lease.check_writer(folder)


def test_who_lost_the_lease_writes_nothing_more(folder, emulator):
    with lease.sole_writer(folder):
        write(folder, ELSEWHERE, emulator.generation(f"{folder.name}/lock"))
        for _ in range(2):
            with pytest.raises(StorageError, match="was taken over by process 7 on other, because this process was"):
                lease.check_writer(folder)
    assert emulator.read(f"{folder.name}/lock") == ELSEWHERE


def test_who_wrote_a_folder_that_was_removed_uploads_nothing_more(folder, emulator):
    with lease.sole_writer(folder):
        continued_file(folder / "metrics.jsonl").write_text("old\n")
        (folder / "lock").unlink()
        with pytest.raises(lease.LostFolderError, match="was removed or replaced while this process wrote it"):
            lease.check_writer(folder)
        write(folder, ELSEWHERE)
        with pytest.raises(lease.LostFolderError, match="was taken over by process 7 on other"):
            lease.check_writer(folder)
        upload_working_files(folder)
    assert emulator.read(f"{folder.name}/lock") == ELSEWHERE and not (folder / "metrics.jsonl").exists()
