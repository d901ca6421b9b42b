"""A text data set in parts: interrupted builds, several machines, damaged parts, and sources on the hub."""

import sys
import types

import numpy as np
import pytest

from train_jax.__main__ import main
from train_jax.errors import UserError
from train_jax.tasks.language import text_building
from train_jax.tasks.language.text_building import TextData
from train_jax.tasks.language.text_set import TextSet
from train_jax.tasks.language.tokenizer import Tokenizer


@pytest.fixture
def source(tmp_path, monkeypatch):
    """Thirty documents in parts of about three."""
    monkeypatch.setattr(text_building, "PART_BYTES", 600)
    rng, folder = np.random.default_rng(0), tmp_path / "source"
    folder.mkdir()
    for number in range(30):
        words = rng.choice(["the", "cat", "sat", "é", "42\n", "import"], 50)
        (folder / f"{number:03}.txt").write_text(" ".join(words) + f" {number}")
    (folder / "031.txt").write_bytes(b"caf\xe9")
    return folder


def data(source, output, **options):
    return TextData(source=(str(source),), output_dir=output, vocab_size=290, test_share=0.2, **options)


def built(source, output, **options):
    assert data(source, output, **options).build(lambda *_: None)
    return TextSet(output)


def stops_at(part):
    """A progress report that ends the build after so many parts, as a kill does."""
    calls = []

    def progress(what, *_):
        calls.extend([what] * (what == "tokens"))
        if len(calls) == part:
            raise KeyboardInterrupt

    return progress


def test_a_build_that_was_interrupted_goes_on(source, tmp_path, monkeypatch):
    whole = built(source, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        data(source, tmp_path / "set").build(stops_at(4))
    encoded = []
    encode = text_building.Parts._encode
    monkeypatch.setattr(text_building.Parts, "_encode", lambda *a: encoded.append(a[1]) or encode(*a))
    again = built(source, tmp_path / "set")
    assert encoded == list(range(4, encoded[-1] + 1)) and len(encoded) > 3
    assert again.fingerprint == whole.fingerprint and again.record == whole.record
    assert again.record["findings"]["skipped_not_utf8"] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set", "source", "whole"]


def test_parts_of_another_source_are_not_used(source, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        data(source, tmp_path / "set").build(stops_at(4))
    file = data(source, tmp_path / "set").files()[0].path
    file.write_text(file.read_text()[::-1])  # of the same size
    assert built(source, tmp_path / "set").fingerprint == built(source, tmp_path / "other").fingerprint


def test_several_machines_share_the_work(source, tmp_path, capsys):
    one = built(source, tmp_path / "one")
    options = {"tokenizer": str(tmp_path / "one"), "parts_dir": str(tmp_path / "parts")}
    lines = [data(source, tmp_path / "set", part=f"{n}/3", **options).encode_part(lambda *_: None) for n in (1, 2, 3)]
    counts = [int(line.split()[0]) for line in lines]
    total = len(text_building.Parts(tmp_path, data(source, tmp_path), Tokenizer.load(str(tmp_path / "one"))))
    assert sum(counts) == total and min(counts) >= total // 3 > 1
    for count, line in zip(counts, lines, strict=True):
        assert f"of {total} parts are in {tmp_path / 'parts'}, {count} of them" in line
    again = data(source, tmp_path / "set", part="2/3", **options).encode_part(lambda *_: None)
    assert ", 0 of them encoded now" in again and not (tmp_path / "set").exists()
    assert built(source, tmp_path / "set", **options).fingerprint == one.fingerprint
    assert (tmp_path / "parts").exists()
    words = ["--source", str(source), "--output-dir", str(tmp_path / "set"), "--test-share", "0.2", "--part", "1/1"]
    words += ["--tokenizer", options["tokenizer"], "--parts-dir", options["parts_dir"]]
    assert main(["build-data", "text", *words]) == 0
    assert "without --part makes the data set" in capsys.readouterr().out


def test_damaged_parts_are_encoded_again_or_refused(source, tmp_path):
    options = {"parts_dir": str(tmp_path / "parts")}
    one = built(source, tmp_path / "one", **options)
    (folder,) = (tmp_path / "parts").iterdir()
    (folder / "00001.json").write_text("{")
    assert built(source, tmp_path / "two", **options).fingerprint == one.fingerprint
    tokens = folder / "00002.train.bin"
    tokens.write_bytes(bytes(reversed(tokens.read_bytes())))
    with pytest.raises(UserError, match=r"00002\.train\.bin is damaged; remove it and 00002\.json, and run"):
        built(source, tmp_path / "three", **options)
    assert folder.exists() and not (tmp_path / "three").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"part": "0/3"}, "--part 0/3: expected N/M with N from 1 to M, such as 1/8"),
        ({"part": "2"}, "--part 2: expected N/M"),
        ({"part": "1/2"}, "--part 1/2 needs --tokenizer and --parts-dir, which all machines share"),
    ],
)
def test_mistakes_are_one_line(source, tmp_path, options, message):
    with pytest.raises(UserError, match=f"^{message}"):
        data(source, tmp_path / "set", **options).encode_part(lambda *_: None)


def test_a_data_set_of_the_hub(source, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match="--source hf://some/texts needs `pip install huggingface_hub`; or download it"):
        built("hf://some/texts", tmp_path / "set")
    asked = []

    def download(name, *, repo_type, allow_patterns):
        asked.append((name, repo_type, allow_patterns[0]))
        return str(tmp_path)

    client = types.ModuleType("huggingface_hub")
    client.snapshot_download = download
    monkeypatch.setitem(sys.modules, "huggingface_hub", client)
    hub, local = built("hf://some/texts/source", tmp_path / "set"), built(source, tmp_path / "local")
    assert asked and set(asked) == {("some/texts", "dataset", "source/*.txt")}
    assert sorted(hub.splits.items()) == sorted(local.splits.items())
    client.snapshot_download = lambda *_, **__: 1 / 0
    with pytest.raises(UserError, match=r"hf://a/b could not be downloaded from the hub \(division by zero\); check"):
        built("hf://a/b", tmp_path / "other")
    with pytest.raises(UserError, match="hf://a: expected hf://OWNER/NAME, or hf://OWNER/NAME/FOLDER"):
        built("hf://a", tmp_path / "other")
