"""Text data sets: documents, splits, shards, batches as pure functions; beside the published loader.

`NANOCHAT_DIR=/path/to/nanochat` compares with the loader of a checkout at 4a87a0d.
"""

import hashlib
import json
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from support.made_wordnet import make_wordnet

from train_jax.__main__ import main
from train_jax.errors import UserError
from train_jax.tasks.language.batches import StreamRows, tokens_per_step
from train_jax.tasks.language.documents import (
    GLOSSES,
    STANDARD_LIBRARY,
    Skipped,
    TextFile,
    docstrings,
    is_test,
    list_files,
    read_documents,
    shuffled,
    source_facts,
)
from train_jax.tasks.language.text_building import TextData
from train_jax.tasks.language.text_set import TextSet, shard_name


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


def build(source, output, **options):
    options = {"vocab_size": 300, "test_share": 0.2} | options
    data = TextData(source=(str(source),), output_dir=output, **options)
    assert data.build(lambda *_: None)
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


def test_docstrings_and_topics_are_documents():
    long = "It is long enough to be kept, which is forty characters."
    source = f'"""{long}"""\nx = """{long} No."""\ndef f():\n    """short"""\nclass C:\n    """{long} In C."""\n'
    assert list(docstrings(source.encode())) == [long, f"{long} In C."]
    assert list(docstrings(f"topics = {{'a': {long!r}}}".encode())) == [long]
    assert list(docstrings(b"print 1")) == list(docstrings(b"\0")) == []


def test_words_and_meanings_are_documents(tmp_path, monkeypatch):
    make_wordnet(tmp_path / "data")
    monkeypatch.setattr("train_jax.tasks.language.wordnet.package_folder", lambda name: tmp_path)
    documents, _ = read(GLOSSES)
    assert documents[0] == "dog, an old dog (noun): an animal that barks"
    assert documents[-1] == "soon, an old soon (adverb): in a short time"
    assert source_facts([GLOSSES]) == {"glosses_license": "WordNet"}
    monkeypatch.setattr("train_jax.tasks.language.wordnet.package_folder", lambda name: None)
    with pytest.raises(UserError, match="WordNet, which is not installed; run `pip install"):
        read(GLOSSES)


def test_documents_that_are_empty_or_not_utf8_are_skipped_and_counted(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    (tmp_path / "b.jsonl").write_text('{"text": "\\ud800"}\n{"text": "good"}\n{"text": "  "}\n{"text": null}\n')
    documents, skipped = read(tmp_path)
    assert documents == ["good"] and (skipped.not_utf8, skipped.empty, skipped.documents) == (2, 2, 5)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"txt": "b"}', "line 2 is not a JSON object with a text in 'text'"),
        ("a.jsonl", b"[1]", "line 1 is not a JSON object"),
        ("a.jsonl", b'{"text": 5}', "line 1 is not a JSON object"),
        ("a.jsonl", b"[" * 10**5, "line 1 is not a JSON object"),
        ("a.parquet", b"PAR1 no", "is not a readable parquet file"),
        ("a.bin", b"", "is not a folder or a .txt, .md"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read(tmp_path / name)


def test_missing_columns_and_sources_are_named(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"body": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="has no column 'text'; choose another --column, such as body"):
        read(tmp_path)
    assert read(tmp_path, column="body")[0] == ["a"]
    with pytest.raises(UserError, match=r"none\.txt does not exist"):
        list_files([str(tmp_path / "none.txt")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty contains no \.txt, \.md"):
        list_files([str(tmp_path / "empty")])


def test_the_standard_library_is_there_without_its_tests():
    names = [file.name for file in list_files([STANDARD_LIBRARY])]
    assert f"{STANDARD_LIBRARY}/json/decoder.py" in names and len(names) > 300
    assert not [name for name in names if "/test/" in name or "site-packages" in name]


def test_splits_depend_on_the_text_alone():
    share = np.mean([is_test(text, 0, 0.2) for text in texts(2000)])
    assert share == pytest.approx(0.2, abs=0.03)
    assert [is_test(text, 0, 0.2) for text in texts()] != [is_test(text, 1, 0.2) for text in texts()]
    files = [TextFile(str(number), Path()) for number in range(50)]
    assert shuffled(files, 3) == shuffled(files, 3) != shuffled(files, 4)
    assert set(shuffled(files, 3)) == set(files) and shuffled(files, 3) != files


# ---- shards


def test_a_data_set_holds_every_document_once(source, tmp_path):
    (source / "again.txt").write_text(texts()[0])
    data = build(source, tmp_path / "set", shard_tokens=97)
    tokenizer, documents = data.tokenizer(), []
    for split in ("train", "test"):
        tokens, record = tokens_of(data, split), data.splits[split]
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
    one, two = build(source, tmp_path / "one"), build(source, tmp_path / "two", shard_tokens=50)
    assert one.fingerprint == two.fingerprint != build(source, tmp_path / "three", seed=1).fingerprint
    given = build(source, tmp_path / "four", tokenizer=str(tmp_path / "one"))
    assert given.fingerprint == one.fingerprint
    again = TextData(source=(str(source),), output_dir=tmp_path / "one", vocab_size=300, test_share=0.2)
    assert not again.build(lambda *_: None)
    with pytest.raises(UserError, match=r"other options \(seed is 0, requested 5\); choose another"):
        build(source, tmp_path / "one", seed=5)


def test_a_failed_build_leaves_nothing(source, tmp_path):
    with pytest.raises(UserError, match="the test split has no documents"):
        build(source, tmp_path / "set", test_share=1e-9)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


DAMAGE = {
    "a shard is missing": (lambda folder: (folder / "train" / shard_name(0)).unlink(), "is missing; build it again"),
    "a shard is shorter": (lambda folder: save(folder, np.zeros(3, "<u2")), r"has shape \(3,\) and dtype uint16, exp"),
    "another type": (lambda folder: save(folder, np.zeros(3)), "dtype float64, expected"),
    "objects": (lambda folder: save(folder, np.array([{}]), allow_pickle=True), "is not a valid array"),
    "no recipe": (lambda folder: (folder / "recipe.json").write_text("{}"), "is not a text data set; build one"),
    "another tokenizer": (lambda folder: edit(folder, tokenizer_sha256="0"), "is another tokenizer than recipe.json"),
    "a smaller vocabulary": (lambda folder: edit(folder, vocab_size=60), "contains the token 2[0-9]+, expected less"),
}


def save(folder, array, **options):
    np.save(folder / "train" / shard_name(0), array, **options)


def edit(folder, **changes):
    record = json.loads((folder / "recipe.json").read_text())
    (folder / "recipe.json").write_text(json.dumps(record | changes))


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
    built, inspected = capsys.readouterr().out.split("already exists")
    for shown in (built, inspected):
        assert "vocabulary: 300 tokens" in shown and "license: CC0-1.0" in shown and "gzip bits per byte" in shown
    assert main(["build-data", "text", "--source", str(tmp_path / "nothing")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


# ---- beside the published loader


@pytest.mark.usefixtures("nanochat")
def test_two_hundred_batches_equal_those_of_the_published_loader(source, tmp_path, monkeypatch):
    """They are of one pass over the data, because the published loader does not return from its second one."""
    from nanochat import dataloader, tokenizer

    for number, text in enumerate(texts(400)):
        (source / f"{number:03}.txt").write_text(text)
    data = build(source, tmp_path / "set", shard_tokens=1000)
    ours = data.tokenizer()
    documents = [
        text
        for text in read_documents(shuffled(list_files([str(source)]), 0), "text", Skipped())
        if not is_test(text, 0, 0.2)
    ]
    for number, part in enumerate((documents[:20], documents[20:], ["validation"])):
        table = pyarrow.table({"text": part})
        pyarrow.parquet.write_table(table, tmp_path / f"{number}.parquet", row_group_size=7)
    paths = [str(tmp_path / f"{number}.parquet") for number in range(3)]
    monkeypatch.setattr(dataloader, "list_parquet_files", lambda: paths)
    published = published_tokenizer(tokenizer, ours)
    monkeypatch.setattr(dataloader, "get_tokenizer", lambda: published)
    loader = dataloader.tokenizing_distributed_data_loader(4, 8, "train", device="cpu")
    stream = data.stream("train")
    for step, (inputs, targets) in zip(range(200), loader, strict=False):
        batch = StreamRows(stream, 8, 4).batch(step=step, rows=4, shard=(0, 1))
        np.testing.assert_array_equal(batch["inputs"], inputs)
        np.testing.assert_array_equal(batch["targets"], targets)
    assert step == 199 and 200 * tokens_per_step(4, 8) <= len(stream)


def published_tokenizer(module, ours):
    """The published class with our merges."""
    import tiktoken

    encoding = tiktoken.Encoding("o", pat_str=ours.pattern, mergeable_ranks=ours.ranks, special_tokens=ours.specials)
    return module.RustBPETokenizer(encoding, "<|bos|>")
