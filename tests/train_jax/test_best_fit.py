"""Packing by best fit: beside an independent packer and the published loader; batches as pure functions.

`NANOCHAT_DIR=/path/to/nanochat` compares with the loader of a checkout at 92d63d4.
"""

import dataclasses
import os
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from train_jax.errors import UserError
from train_jax.run.presets import preset
from train_jax.tasks.language.batches import BestFit
from train_jax.tasks.language.task import LanguageConfig, LanguageTask
from train_jax.tasks.language.text_building import TextData
from train_jax.tasks.language.text_set import TextSet, TokenStream, shard_name

BOS = 299
ROWS, SEQ_LEN = 4, 32


@pytest.fixture(scope="module")
def documents():
    """300 documents of 1 to 60 tokens, also of equal lengths, and with less than three times 128 at the end."""
    rng = np.random.default_rng(0)
    return [[BOS, *rng.integers(0, BOS, size)] for size in rng.integers(0, 60, 300)]


@pytest.fixture
def stream(documents, tmp_path):
    tokens = np.concatenate(documents).astype("<u2")
    shards = (1000, 2500, len(tokens) - 3500)
    for number, part in enumerate(np.split(tokens, np.cumsum(shards)[:-1])):
        np.save(tmp_path / shard_name(number), part)
    return TokenStream(tmp_path, shards, 300)


def packed(documents, rows):
    """The published rule on lists of tokens: no sorting, no lengths, no numbers."""

    def batches():
        while True:
            yield from (documents[first : first + 128] for first in range(0, len(documents), 128))

    source, waiting, result = batches(), [], []
    for _ in range(rows):
        row = []
        while len(row) <= SEQ_LEN:
            while len(waiting) < 1000:
                waiting += next(source)
            free = SEQ_LEN + 1 - len(row)
            fitting = [document for document in waiting if len(document) <= free]
            chosen = max(fitting, key=len) if fitting else min(waiting, key=len)
            waiting.pop(next(n for n, document in enumerate(waiting) if document is chosen))
            row += chosen[:free]
        result.append(row)
    return np.array(result)


def test_two_hundred_batches_equal_those_of_an_independent_packer(documents, stream):
    expected = packed(documents, 200 * ROWS).reshape(200, ROWS, SEQ_LEN + 1)
    rows = BestFit(stream, BOS, SEQ_LEN)
    for step in range(200):
        batch = rows.batch(step=step, rows=ROWS, shard=(0, 1))
        np.testing.assert_array_equal(batch["inputs"], expected[step, :, :-1])
        np.testing.assert_array_equal(batch["targets"], expected[step, :, 1:])
        assert batch["inputs"].dtype == np.int32
    assert (expected[:, :, 0] == BOS).all()


def test_a_batch_is_a_function_of_the_step_and_the_shard(stream):
    in_order, other = BestFit(stream, BOS, SEQ_LEN), BestFit(stream, BOS, SEQ_LEN)
    whole = [in_order.batch(step=step, rows=ROWS, shard=(0, 1))["inputs"] for step in range(30)]
    for step in (29, 3, 3, 12, 0):
        np.testing.assert_array_equal(other.batch(step=step, rows=ROWS, shard=(0, 1))["inputs"], whole[step])
        parts = [other.batch(step=step, rows=ROWS, shard=(index, 4))["inputs"] for index in (2, 0, 1, 3)]
        np.testing.assert_array_equal(np.concatenate([parts[1], parts[2], parts[0], parts[3]]), whole[step])


def test_an_epoch_uses_as_many_documents_as_there_are(documents, stream):
    """A row of the epoch before the last uses fewer."""
    rows = BestFit(stream, BOS, SEQ_LEN)
    epoch = rows.rows_per_epoch
    starts = sum((row == BOS).sum() for row in packed(documents, epoch))
    assert len(documents) <= starts < len(documents) + SEQ_LEN


def test_the_run_chooses_the_packing(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for number in range(40):
        (source / f"{number}.txt").write_text(f"document {number} of forty, " * (1 + number % 5))
    TextData(source=(str(source),), output_dir=tmp_path / "set", vocab_size=280, test_share=0.2).build(lambda *_: None)
    config = preset("chat-tiny")
    config = dataclasses.replace(
        config, data_dir=str(tmp_path / "set"), arch=dataclasses.replace(config.arch, seq_len=SEQ_LEN)
    )
    bestfit = dataclasses.replace(config, task_config=LanguageConfig(packing="bestfit"))
    bos = TextSet(tmp_path / "set").tokenizer().bos
    batch = LanguageTask(bestfit).batch(7, (0, 2))
    assert batch["inputs"].shape == (8, SEQ_LEN) and (batch["inputs"][:, 0] == bos).all()
    stream = LanguageTask(dataclasses.replace(config, task_config=LanguageConfig()))
    shuffled = LanguageTask(config)
    assert not (stream.batch(7, (0, 2))["inputs"][:, 0] == bos).all()
    assert (shuffled.batch(7, (0, 2))["inputs"] != stream.batch(7, (0, 2))["inputs"]).any()
    assert 0 < shuffled.examples_per_epoch <= stream.examples_per_epoch
    assert LanguageTask(bestfit).examples_per_epoch > 0
    with pytest.raises(UserError, match="packing is 'best'"):
        LanguageConfig(packing="best")


@pytest.mark.skipif(
    not (Path(os.environ.get("NANOCHAT_DIR", "")) / "nanochat" / "optim.py").is_file(),
    reason="set NANOCHAT_DIR to a checkout of nanochat at 92d63d4",
)
@pytest.mark.usefixtures("nanochat")
def test_two_hundred_batches_equal_those_of_the_published_loader(tmp_path, monkeypatch):
    """Over several passes of the data."""
    import tiktoken
    from nanochat import dataloader, tokenizer

    rng = np.random.default_rng(1)
    texts = ["a few words " * int(count) + str(number) for number, count in enumerate(rng.integers(1, 12, 500))]
    (tmp_path / "texts.txt").write_text("held out")
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "texts.parquet", row_group_size=256)
    options = {"source": (str(tmp_path),), "output_dir": tmp_path / "set", "vocab_size": 280, "test_share": 0.01}
    TextData(**options).build(lambda *_: None)
    data = TextSet(tmp_path / "set")
    ours = data.tokenizer()
    stream = data.stream("train")
    tokens = stream.take(0, len(stream))
    kept = [ours.decode(part[1:]) for part in np.split(tokens, np.flatnonzero(tokens == ours.bos)[1:])]
    paths = [str(tmp_path / name) for name in ("train.parquet", "validation.parquet")]
    for path, part in zip(paths, (kept, ["validation"]), strict=True):
        pyarrow.parquet.write_table(pyarrow.table({"text": part}), path, row_group_size=256)
    monkeypatch.setattr(dataloader, "list_parquet_files", lambda **_: paths)
    encoding = tiktoken.Encoding("o", pat_str=ours.pattern, mergeable_ranks=ours.ranks, special_tokens=ours.specials)
    published = tokenizer.RustBPETokenizer(encoding, "<|bos|>")
    loader = dataloader.tokenizing_distributed_data_loader_bos_bestfit(published, ROWS, SEQ_LEN, "train", device="cpu")
    rows = BestFit(stream, ours.bos, SEQ_LEN)
    for step, (inputs, targets) in zip(range(200), loader, strict=False):
        batch = rows.batch(step=step, rows=ROWS, shard=(0, 1))
        np.testing.assert_array_equal(batch["inputs"], inputs)
        np.testing.assert_array_equal(batch["targets"], targets)
    assert step == 199 and rows.rows_per_epoch < 200 * ROWS
