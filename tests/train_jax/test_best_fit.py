"""Rows of a stream, and packing by best fit, also with padding: pure functions that use every token once.

`NANOCHAT_DIR=/path/to/nanochat` compares with the loaders of a checkout at 92d63d4.
"""

import ast
import hashlib
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

from train_jax.language.batches import (
    BestFit,
    MixedRows,
    ShuffledRows,
    StreamRows,
    count_rows,
    eval_batches,
    tokens_per_step,
)
from train_jax.language.text_building import TextData
from train_jax.language.text_set import TextSet, TokenStream, shard_name

BOS = 299
ROWS = 4
SEQ_LEN = 32
published = pytest.mark.skipif(
    not (Path(os.environ.get("NANOCHAT_DIR", "")) / "nanochat" / "optim.py").is_file(),
    reason="set NANOCHAT_DIR to a checkout of nanochat at 92d63d4",
)


@pytest.fixture(scope="module")
def documents():
    """300 documents of 1 to 60 tokens, also of equal lengths, and with less than three times 128 at the end."""
    rng = np.random.default_rng(0)
    return [[BOS, *rng.integers(0, BOS, size)] for size in rng.integers(0, 60, 300)]


@pytest.fixture(scope="module")
def masks(documents):
    rng = np.random.default_rng(2)
    return [[0, *rng.integers(0, 2, len(document) - 1)] for document in documents]


@pytest.fixture
def stream(documents, tmp_path):
    return stream_of(tmp_path, documents)


def stream_of(folder, documents, masks=None):
    """Writes the documents and, with `masks`, their weights, in three shards."""
    size = sum(map(len, documents))
    shards = (1000, 2500, size - 3500)
    for kind, values, dtype in (("tokens", documents, "<u2"), ("weights", masks, "u1")):
        for number, part in enumerate(np.split(np.concatenate(values), np.cumsum(shards)[:-1]) if values else ()):
            np.save(folder / shard_name(number, kind), part.astype(dtype))
    return TokenStream(folder, shards, 300, weighted=masks is not None)


def packed(documents, rows):
    """Packs by the published rule on lists of tokens: no sorting, no lengths, no numbers."""

    def batches():
        while True:
            yield from (documents[first : first + 128] for first in range(0, len(documents), 128))

    source = batches()
    waiting = []
    result = []
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


@published
@pytest.mark.usefixtures("nanochat")
def test_two_hundred_batches_equal_those_of_the_published_loader(tmp_path, monkeypatch):
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


# ---- with padding


def padded_batches(folder, documents, masks):
    rows = BestFit(stream_of(folder, documents, masks), BOS, SEQ_LEN, pads=True)
    assert rows.cut_documents == sum(len(document) > SEQ_LEN + 1 for document in documents) > 100
    return [rows.batch(step=step, rows=ROWS, shard=(0, 1)) for step in range(200)]


def test_padded_rows_are_as_when_they_were_compared_with_the_published_loader(documents, masks, tmp_path):
    digest = hashlib.sha256()
    for batch in padded_batches(tmp_path, documents, masks):
        digest.update(b"".join(np.ascontiguousarray(values).tobytes() for values in batch.values()))
    assert digest.hexdigest() == "424a19802d1121d0920c1d3fbe91742dd5bc6d6bd4d7b8546bd280cbed8d495d"


@published
def test_padded_rows_equal_those_of_the_published_loader(documents, masks, tmp_path):
    """The published function for conversations is taken out of its script, and reads rendered documents."""
    script = Path(os.environ["NANOCHAT_DIR"], "scripts", "chat_sft.py")
    name = "sft_data_generator_bos_bestfit"
    function = next(node for node in ast.parse(script.read_text()).body if getattr(node, "name", "") == name)
    rendered = list(zip(documents, masks, strict=True))
    names = {"torch": torch, "train_dataset": rendered, "val_dataset": rendered, "ddp_rank": 0, "ddp_world_size": 1}
    names |= {"device": "cpu", "device_type": "cpu"}
    names["args"] = SimpleNamespace(max_seq_len=SEQ_LEN, device_batch_size=ROWS, num_iterations=-1)
    names["tokenizer"] = SimpleNamespace(
        get_bos_token_id=lambda: BOS, render_conversation=lambda pair: tuple(list(each)[: SEQ_LEN + 1] for each in pair)
    )
    exec(compile(ast.Module([function], []), str(script), "exec"), names)
    for batch, (inputs, targets) in zip(padded_batches(tmp_path, documents, masks), names[name]("train"), strict=False):
        np.testing.assert_array_equal(batch["inputs"], inputs)
        np.testing.assert_array_equal(batch["targets"], targets)


# ---- rows of a stream, in the order of the data or shuffled

LENGTH = 200


@pytest.fixture
def numbers(tmp_path):
    shards = (90, 60, 50)
    for number, part in enumerate(np.split(np.arange(LENGTH, dtype="<u2"), np.cumsum(shards)[:-1])):
        np.save(tmp_path / shard_name(number), part)
    return TokenStream(tmp_path, shards, 300)


def test_an_epoch_uses_every_token_once(numbers):
    """A step takes 25 tokens for 4 rows of 6, so that 8 steps are an epoch of 200 tokens."""
    batches = [StreamRows(numbers, 6, 4).batch(step=step, rows=4, shard=(0, 1)) for step in range(9)]
    used = []
    for batch in batches[:8]:
        inputs = batch["inputs"].ravel()
        targets = batch["targets"].ravel()
        np.testing.assert_array_equal(targets, inputs + 1)
        used += [*inputs, targets[-1]]
    assert used == list(range(LENGTH)) and tokens_per_step(4, 6) == 25
    assert batches[8]["inputs"][0, 0] == 0 and inputs.dtype == targets.dtype == np.int32


def test_a_shuffled_epoch_has_every_target_once(numbers):
    """An epoch has 33 rows of 6 tokens; the 34th would need more than 200."""
    rows = ShuffledRows(numbers, 6, seed=0)
    batches = [rows.batch(step=step, rows=3, shard=(0, 1)) for step in range(22)]  # two epochs
    targets = np.concatenate([batch["targets"] for batch in batches])
    for epoch in (targets[:33], targets[33:]):
        np.testing.assert_array_equal(np.sort(epoch.ravel()), np.arange(1, 33 * 6 + 1))
    assert (targets[:33] != targets[33:]).any(), "another order in another epoch"
    assert (np.diff(targets[:, 0]) != 6).mean() > 0.9, "rows of a batch are not those that follow each other"
    for batch in batches:
        np.testing.assert_array_equal(batch["inputs"] + 1, batch["targets"])
    assert rows.rows_per_epoch == 33


MAKERS = {
    "stream": lambda stream: StreamRows(stream, 1000, 4),
    "shuffled": lambda stream: ShuffledRows(stream, 1000, 0),
    "bestfit": lambda stream: BestFit(stream, BOS, SEQ_LEN),
    "mixed": lambda stream: MixedRows([StreamRows(stream, 1000, 4), ShuffledRows(stream, 1000, 0)], [3, 1], 0),
}


@pytest.mark.parametrize("name", MAKERS)
def test_shards_are_parts_of_the_batch_of_a_step(stream, name):
    """The steps may be asked for in any order; step 2 has the end of an epoch."""
    whole = MAKERS[name](stream)
    parts = MAKERS[name](stream)
    batches = [whole.batch(step=step, rows=4, shard=(0, 1)) for step in range(12)]
    for step in (11, 2, 2, 0):
        for count in (2, 4):
            shards = [parts.batch(step=step, rows=4, shard=(index, count)) for index in reversed(range(count))]
            for each, rows in batches[step].items():
                np.testing.assert_array_equal(np.concatenate([shard[each] for shard in shards[::-1]]), rows)
                assert rows.dtype == np.int32


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("limit", [0, 5, 999])
def test_evaluation_uses_every_target_once(numbers, count, limit):
    shards = [list(eval_batches(numbers, rows=4, seq_len=6, limit=limit, shard=(i, count))) for i in range(count)]
    assert len({len(batches) for batches in shards}) == 1
    targets, inputs = (
        np.concatenate([batch[name].ravel() for shard in shards for batch in shard]) for name in ("targets", "inputs")
    )
    counted = targets >= 0
    np.testing.assert_array_equal(np.sort(targets[counted]), np.arange(1, 31 if limit == 5 else LENGTH))
    np.testing.assert_array_equal(inputs[counted] + 1, targets[counted])
    assert count_rows(numbers, 6) == 34
