"""Text data sets: documents, splits, shards, parts, sources on the hub; beside the published loader; tokenizers.

`NANOCHAT_DIR=/path/to/nanochat` compares with the loader and the tokenizer of a checkout at 4a87a0d.
"""

import hashlib
import json
import os
import random
import re
import sys
import types

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from train_jax.__main__ import main
from train_jax.errors import UserError
from train_jax.language import text_building
from train_jax.language.batches import StreamRows, tokens_per_step
from train_jax.language.documents import (
    Skipped,
    docstrings,
    is_test,
    list_files,
    read_documents,
    shuffled,
)
from train_jax.language.text_building import TextData
from train_jax.language.text_set import TextSet, shard_name
from train_jax.language.tokenizer import (
    JSON_NAME,
    RANKS_NAME,
    SPECIAL_TOKENS,
    SPLIT_PATTERN,
    Tokenizer,
    text_package,
    train_tokenizer,
)

# ---- data sets


def texts(count=60):
    rng = np.random.default_rng(0)
    words = ["the", "cat", "sat", "on", "and returned", "self", "value", "def", "class", "import", "é", "42\n", "\n"]
    return [" ".join(rng.choice(words, rng.integers(5, 60))) + f" {number}" for number in range(count)]


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    for number, text in enumerate(texts()):
        (folder / f"{number:03}.txt").write_text(text)
    return folder


def text_data(source, output, **options):
    return TextData(source=(str(source),), output_dir=output, **{"vocab_size": 300, "test_share": 0.2} | options)


def build(source, output, **options):
    assert text_data(source, output, **options).build(lambda *_: None)
    return TextSet(output)


def tokens_of(data, split):
    stream = data.stream(split)
    return stream.take(0, len(stream))


# ---- documents


def read(*sources, column="text"):
    skipped = Skipped()
    return list(read_documents(list_files([str(each) for each in sources]), column, skipped)), skipped


def test_documents_of_every_kind_of_file(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo")
    (tmp_path / "b.jsonl").write_text('{"text": "three"}\n\n{"text": "four \\ud83d\\ude00", "id": 1}\n')
    table = pyarrow.table({"text": ["five", None, "six"]})
    pyarrow.parquet.write_table(table, tmp_path / "c.parquet", row_group_size=1)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "d.py").write_text("seven")
    (tmp_path / "image.png").write_bytes(b"\x89PNG")
    documents, skipped = read(tmp_path)
    assert documents == ["one\ntwo", "three", "four 😀", "five", "six", "seven"]
    assert skipped.empty == 1 and not skipped.not_utf8
    assert read(tmp_path / "b.jsonl", tmp_path / "a.txt")[0] == ["three", "four 😀", "one\ntwo"]
    pyarrow.parquet.write_table(pyarrow.table({"body": ["a"]}), tmp_path / "e.parquet")
    assert read(tmp_path / "e.parquet", column="body")[0] == ["a"]
    with pytest.raises(UserError, match="has no column 'text'; choose another --column, such as body"):
        read(tmp_path / "e.parquet")


def test_docstrings_and_topics_are_documents():
    long = "It is long enough to be kept, which is forty characters."
    source = f'"""{long}"""\nx = """{long} No."""\ndef f():\n    """short"""\nclass C:\n    """{long} In C."""\n'
    assert list(docstrings(source.encode())) == [long, f"{long} In C."]
    assert list(docstrings(f"topics = {{'a': {long!r}}}".encode())) == [long]
    assert list(docstrings(b"print 1")) == list(docstrings(b"\0")) == []


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"txt": "b"}', "line 2 is not a JSON object with a text in 'text'"),
        ("a.jsonl", b"[" * 10**5, "line 1 is not a JSON object"),
        ("a.parquet", b"PAR1 no", "is not a readable parquet file"),
        ("a.bin", b"", "is not a folder or a .txt, .md"),
        ("none.txt", None, r"none\.txt does not exist"),
        ("", None, r"contains no \.txt, \.md"),
    ],
)
def test_a_source_that_cannot_be_read_is_one_line(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read(tmp_path / name)


def test_splits_depend_on_the_text_alone():
    share = np.mean([is_test(text, 0, 0.2) for text in texts(2000)])
    assert share == pytest.approx(0.2, abs=0.03)
    assert [is_test(text, 0, 0.2) for text in texts()] != [is_test(text, 1, 0.2) for text in texts()]


# ---- shards


def test_a_data_set_holds_every_document_once(source, tmp_path):
    (source / "again.txt").write_text(texts()[0])
    data = build(source, tmp_path / "set", shard_tokens=97)
    tokenizer = data.tokenizer()
    documents = []
    for split in ("train", "test"):
        tokens = tokens_of(data, split)
        record = data.splits[split]
        starts = np.flatnonzero(tokens == tokenizer.bos)
        assert starts[0] == 0 and len(starts) == record.documents
        parts = [tokenizer.decode(part[1:]) for part in np.split(tokens, starts[1:])]
        assert sum(len(part.encode()) for part in parts) == record.bytes
        assert all(is_test(part, 0, 0.2) == (split == "test") for part in parts)
        assert set(record.shards[:-1]) <= {97} and len(record.shards) == -(-record.tokens // 97)
        assert hashlib.sha256(tokens.astype("<u2").tobytes()).hexdigest() == record.sha256
        documents += parts
    assert sorted(documents) == sorted([*texts(), texts()[0]])


def test_the_same_options_give_the_same_bytes_whatever_the_shards(source, tmp_path):
    one = build(source, tmp_path / "one")
    two = build(source, tmp_path / "two", shard_tokens=50)
    assert one.fingerprint == two.fingerprint != build(source, tmp_path / "three", seed=1).fingerprint
    given = build(source, tmp_path / "four", tokenizer=str(tmp_path / "one"))
    assert given.fingerprint == one.fingerprint
    assert not text_data(source, tmp_path / "one").build(lambda *_: None)
    with pytest.raises(UserError, match=r"other options \(seed is 0, requested 5\); choose another"):
        build(source, tmp_path / "one", seed=5)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(UserError, match="the test split has no documents"):
        build(source, tmp_path / "five", test_share=1e-9)
    assert sorted(path.name for path in tmp_path.iterdir()) == before, "a failed build leaves nothing"


def save(folder, array, **options):
    np.save(folder / "train" / shard_name(0), array, **options)


def edit(folder, **changes):
    record = json.loads((folder / "recipe.json").read_text())
    (folder / "recipe.json").write_text(json.dumps(record | changes))


DAMAGE = {
    "a shard is missing": (lambda folder: (folder / "train" / shard_name(0)).unlink(), "is missing; build it again"),
    "a shard is shorter": (lambda folder: save(folder, np.zeros(3, "<u2")), r"has shape \(3,\) and dtype uint16, exp"),
    "objects": (lambda folder: save(folder, np.array([{}]), allow_pickle=True), "is not a valid array"),
    "no recipe": (lambda folder: (folder / "recipe.json").write_text("{}"), "is not a text data set; .*or build one"),
    "another tokenizer": (lambda folder: edit(folder, tokenizer_sha256="0"), "is another tokenizer than recipe.json"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_data_set_is_one_line(source, tmp_path, damage):
    build(source, tmp_path / "set")
    change, message = DAMAGE[damage]
    change(tmp_path / "set")
    with pytest.raises(UserError, match=message):
        data = TextSet(tmp_path / "set")
        tokens_of(data, "train")
        data.tokenizer()


def test_commands(source, tmp_path, capsys):
    options = ["--source", str(source), "--output-dir", str(tmp_path / "set"), "--vocab-size", "300"]
    assert main(["build-data", "text", *options, "--license", "CC0-1.0"]) == 0
    assert main(["build-data", "inspect", str(tmp_path / "set")]) == 0
    assert "license: CC0-1.0" in capsys.readouterr().out
    assert main(["tokenizer", "evaluate", str(tmp_path / "set")]) == 0
    assert f"held-out text of {tmp_path / 'set'}, and short texts; 300 tokens" in capsys.readouterr().out
    assert main(["build-data", "text", "--source", str(tmp_path / "nothing")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


# ---- beside the published loader


@pytest.mark.usefixtures("nanochat")
def test_two_hundred_batches_equal_those_of_the_published_loader(source, tmp_path, monkeypatch):
    """The batches are of one pass over the data, because the published loader does not return from its second one."""
    import tiktoken
    from nanochat import dataloader, tokenizer

    for number, text in enumerate(texts(400)):
        (source / f"{number:03}.txt").write_text(text)
    data = build(source, tmp_path / "set", shard_tokens=1000)
    ours = data.tokenizer()
    files = shuffled(list_files([str(source)]), 0)
    documents = [text for text in read_documents(files, "text", Skipped()) if not is_test(text, 0, 0.2)]
    for number, part in enumerate((documents[:20], documents[20:], ["validation"])):
        table = pyarrow.table({"text": part})
        pyarrow.parquet.write_table(table, tmp_path / f"{number}.parquet", row_group_size=7)
    paths = [str(tmp_path / f"{number}.parquet") for number in range(3)]
    monkeypatch.setattr(dataloader, "list_parquet_files", lambda: paths)
    encoding = tiktoken.Encoding("o", pat_str=ours.pattern, mergeable_ranks=ours.ranks, special_tokens=ours.specials)
    monkeypatch.setattr(dataloader, "get_tokenizer", lambda: tokenizer.RustBPETokenizer(encoding, "<|bos|>"))
    loader = dataloader.tokenizing_distributed_data_loader(4, 8, "train", device="cpu")
    stream = data.stream("train")
    for step, (inputs, targets) in zip(range(200), loader, strict=False):
        batch = StreamRows(stream, 8, 4).batch(step=step, rows=4, shard=(0, 1))
        np.testing.assert_array_equal(batch["inputs"], inputs)
        np.testing.assert_array_equal(batch["targets"], targets)
    assert step == 199 and 200 * tokens_per_step(4, 8) <= len(stream)


# ---- builds in parts


@pytest.fixture
def in_parts(source, monkeypatch):
    """The source with a file that is not UTF-8, encoded in parts of a few documents."""
    monkeypatch.setattr(text_building, "PART_BYTES", 600)
    (source / "061.txt").write_bytes(b"caf\xe9")
    return source


def stops_at(part):
    """A progress report that ends the build after so many parts, as a kill does."""
    calls = []

    def progress(what, *_):
        calls.extend([what] * (what == "tokens"))
        if len(calls) == part:
            raise KeyboardInterrupt

    return progress


def test_a_build_that_was_interrupted_goes_on(in_parts, tmp_path, monkeypatch):
    whole = build(in_parts, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        text_data(in_parts, tmp_path / "set").build(stops_at(4))
    encoded = []
    encode = text_building.Parts._encode
    monkeypatch.setattr(text_building.Parts, "_encode", lambda *a: encoded.append(a[1]) or encode(*a))
    again = build(in_parts, tmp_path / "set")
    assert encoded == list(range(4, encoded[-1] + 1)) and len(encoded) > 3
    assert again.fingerprint == whole.fingerprint and again.record == whole.record
    assert again.record["findings"]["skipped_not_utf8"] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set", "source", "whole"]
    with pytest.raises(KeyboardInterrupt):
        text_data(in_parts, tmp_path / "again").build(stops_at(4))
    file = text_data(in_parts, tmp_path / "again").files()[0].path
    file.write_text(file.read_text()[::-1])  # the file keeps its size, and its part is not used
    assert build(in_parts, tmp_path / "again").fingerprint == build(in_parts, tmp_path / "other").fingerprint


def test_several_machines_share_the_work(in_parts, tmp_path):
    one = build(in_parts, tmp_path / "one")
    options = {"tokenizer": str(tmp_path / "one"), "parts_dir": str(tmp_path / "parts")}
    machines = [text_data(in_parts, tmp_path / "set", part=f"{number}/3", **options) for number in (1, 2, 3)]
    lines = [machine.encode_part(lambda *_: None) for machine in machines]
    counts = [int(line.split()[0]) for line in lines]
    total = len(text_building.Parts(tmp_path, text_data(in_parts, tmp_path), Tokenizer.load(str(tmp_path / "one"))))
    assert sum(counts) == total and min(counts) >= total // 3 > 1
    assert build(in_parts, tmp_path / "set", **options).fingerprint == one.fingerprint
    with pytest.raises(UserError, match=r"^--part 0/3: expected N/M with N from 1 to M, such as 1/8"):
        text_data(in_parts, tmp_path / "set", part="0/3").encode_part(lambda *_: None)


def test_damaged_parts_are_encoded_again_or_refused(in_parts, tmp_path):
    options = {"parts_dir": str(tmp_path / "parts")}
    one = build(in_parts, tmp_path / "one", **options)
    (folder,) = (tmp_path / "parts").iterdir()
    (folder / "00001.json").write_text("{")
    assert build(in_parts, tmp_path / "two", **options).fingerprint == one.fingerprint
    tokens = folder / "00002.train.bin"
    tokens.write_bytes(bytes(reversed(tokens.read_bytes())))
    with pytest.raises(UserError, match=r"00002\.train\.bin is damaged; remove it and 00002\.json, and run"):
        build(in_parts, tmp_path / "three", **options)
    assert folder.exists() and not (tmp_path / "three").exists()


def test_a_data_set_of_the_hub(in_parts, tmp_path, monkeypatch):
    asked = []

    def download(name, *, repo_type, allow_patterns):
        asked.append((name, repo_type, allow_patterns[0]))
        return str(tmp_path)

    client = types.ModuleType("huggingface_hub")
    client.snapshot_download = download
    monkeypatch.setitem(sys.modules, "huggingface_hub", client)
    hub = build("hf://some/texts/source", tmp_path / "set")
    local = build(in_parts, tmp_path / "local")
    assert asked and set(asked) == {("some/texts", "dataset", "source/*.txt")}
    assert sorted(hub.splits.items()) == sorted(local.splits.items())


# ---- tokenizers: libraries agree on hostile text, text comes back, special tokens cannot be written, files are data


VOCAB_SIZE = 700


def training_texts():
    return [open(module.__file__).read() for module in (json, json.decoder, random, re, os)]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(training_texts(), VOCAB_SIZE)


ALPHABETS = (
    "abcdefgh self.return def \n\t  ",
    "0123456789,.  -e",
    " \t\r\n\v\f\x00\x1f\x7f\x85\xa0\u2028\u3000",
    "äßñçéАбвγδ漢字かな한글עבר",
    "e\u0301\u200d\ufe0f\u202e👩👧🏽🇩🇪\U0010ffff\ufffd\ufffe",
    "'sS'llLL'VEve'mMdDtT ",
    "<|>_bosusertand[]{}()!?",
)


def hostile_strings(count):
    rng = random.Random(0)
    for number in range(count):
        alphabet = "".join(rng.sample(ALPHABETS, rng.randint(1, 3)))
        text = "".join(rng.choices(alphabet, k=rng.randint(0, 40)))
        if number % 5 == 0:
            special = rng.choice(SPECIAL_TOKENS)
            text = text[: len(text) // 2] + special + text[len(text) // 2 :]
        yield text


def test_three_libraries_agree_on_hostile_strings_and_text_comes_back(tokenizer):
    trained = text_package("rustbpe").Tokenizer()
    trained.train_from_iterator(iter(training_texts()), VOCAB_SIZE - len(SPECIAL_TOKENS), pattern=SPLIT_PATTERN)
    from_json = text_package("tokenizers").Tokenizer.from_str(tokenizer.to_json())
    from_json.encode_special_tokens = True
    texts = [*hostile_strings(10_000), "", "a" * 5000, " " * 5000, "\n" * 999]
    encoded = tokenizer.encode_batch(texts)
    for text, ids in zip(texts, encoded, strict=True):
        assert tokenizer.decode(ids) == text
        assert max(ids, default=0) < len(tokenizer.ranks), "a special token"
        assert trained.encode(text) == ids, repr(text)
        assert from_json.encode(text, add_special_tokens=False).ids == ids, repr(text)


def test_ids_bytes_and_sizes(tokenizer):
    assert tokenizer.vocab_size == VOCAB_SIZE
    assert sorted(tokenizer.specials.values()) == list(range(VOCAB_SIZE - 9, VOCAB_SIZE))
    text = "déjà vu: 12345"
    assert sum(tokenizer.token_bytes[tokenizer.encode(text)]) == len(text.encode())
    assert not any(re.search("[0-9]{3}", tokenizer.decode([number])) for number in tokenizer.ranks.values())
    for name, number in tokenizer.specials.items():
        assert tokenizer.decode([number]) == name and tokenizer.token_bytes[number] == 0
        ids = tokenizer.encode(f"a{name}b")
        assert max(ids) < len(tokenizer.ranks) and tokenizer.decode(ids) == f"a{name}b", "its name is ordinary text"


def test_files_hold_the_same_tokenizer_without_pickle(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [JSON_NAME, RANKS_NAME]
    loaded = Tokenizer.load(tmp_path)
    assert (loaded.ranks, loaded.specials, loaded.pattern) == (tokenizer.ranks, tokenizer.specials, tokenizer.pattern)
    assert loaded.sha256 == tokenizer.sha256


BROKEN = {
    "no byte": lambda c: c["model"]["vocab"].pop("!"),
    "an id twice": lambda c: c["model"]["vocab"].update({"!": 1}),
    "a special token as text": lambda c: c["added_tokens"][0].update(special=False),
    "another kind": lambda c: c["model"].update(type="Unigram"),
}


@pytest.mark.parametrize("damage", [*BROKEN, b"", b"[]", b"\xff", b"[" * 100_000])
def test_a_file_that_is_no_tokenizer_is_one_line(tokenizer, tmp_path, damage):
    content = json.loads(tokenizer.to_json())
    if damage in BROKEN:
        BROKEN[damage](content)
    (tmp_path / JSON_NAME).write_bytes(json.dumps(content).encode() if damage in BROKEN else damage)
    with pytest.raises(UserError, match=r"is not a byte-level BPE tokenizer of `trm tokenizer train` \(.+\); write it"):
        Tokenizer.load(tmp_path)


def test_commands_of_tokenizers(tmp_path, capsys):
    folder = str(tmp_path / "tokenizer")
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(training_texts()):
        (tmp_path / "texts" / f"{number}.txt").write_text(text)
    training_source = ["--source", str(tmp_path / "texts"), "--test-share", "0.4"]
    assert main(["tokenizer", "train", *training_source, "--vocab-size", "300", "--output-dir", folder]) == 0
    assert main(["tokenizer", "evaluate", folder, *training_source]) == 0
    shown = capsys.readouterr().out
    assert "300 tokens, 9 of them special" in shown and "0 documents differ from their decoded tokens" in shown
    assert "0 documents have other tokens by tokenizer.json" in shown
    assert main(["tokenizer", "inspect", folder, "--text", "<|bos|>", "--longest", "2"]) == 0
    assert "7 bytes, 7 tokens" in capsys.readouterr().out
