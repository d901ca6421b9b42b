"""Packing by best fit, also with padding: beside an independent packer and the published loaders; pure functions.

`NANOCHAT_DIR=/path/to/nanochat` compares with the loaders of a checkout at 92d63d4.
"""

import ast
import dataclasses
import hashlib
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

from train_jax.errors import UserError
from train_jax.run.presets import preset
from train_jax.tasks.language.batches import BestFit
from train_jax.tasks.language.task import LanguageConfig, LanguageTask
from train_jax.tasks.language.text_building import TextData
from train_jax.tasks.language.text_set import TextSet, TokenStream, shard_name

BOS = 299
ROWS, SEQ_LEN = 4, 32
PADDED = "424a19802d1121d0920c1d3fbe91742dd5bc6d6bd4d7b8546bd280cbed8d495d"
"""SHA-256 of 200 padded batches, which are those of the published loader."""
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
    """Weights of the tokens of each document."""
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


@published
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


# ---- with padding


def padded(documents, masks, rows):
    """Packs by the rule on lists of tokens; returns rows as inputs and targets."""
    number, waiting, result = 0, [], []
    for _ in range(rows):
        row, targets = [], []
        while True:
            while len(waiting) < 100:
                waiting.append(number % len(documents))
                number += 1
            fitting = [n for n in waiting if len(documents[n][: SEQ_LEN + 1]) <= SEQ_LEN + 1 - len(row)]
            if not fitting:
                break
            chosen = max(fitting, key=lambda n: len(documents[n][: SEQ_LEN + 1]))
            waiting.remove(chosen)
            row += documents[chosen][: SEQ_LEN + 1]
            targets += [token if mask else -1 for token, mask in zip(documents[chosen], masks[chosen], strict=True)]
            targets = targets[: SEQ_LEN + 1]
        rest = SEQ_LEN + 1 - len(row)
        result.append((row + [BOS] * rest, targets + [-1] * rest))
    return np.array(result)


def padded_batches(folder, documents, masks):
    rows = BestFit(stream_of(folder, documents, masks), BOS, SEQ_LEN, pads=True)
    return [rows.batch(step=step, rows=ROWS, shard=(0, 1)) for step in range(200)]


def test_padded_rows_equal_those_of_an_independent_packer(documents, masks, tmp_path):
    expected = padded(documents, masks, 200 * ROWS).reshape(200, ROWS, 2, SEQ_LEN + 1)
    digest = hashlib.sha256()
    for step, batch in enumerate(padded_batches(tmp_path, documents, masks)):
        np.testing.assert_array_equal(batch["inputs"], expected[step, :, 0, :-1])
        np.testing.assert_array_equal(batch["targets"], expected[step, :, 1, 1:])
        assert {values.dtype for values in batch.values()} == {np.dtype("int32")}
        digest.update(b"".join(np.ascontiguousarray(values).tobytes() for values in batch.values()))
    assert digest.hexdigest() == PADDED


def test_padding_cuts_no_document_that_fits_and_counts_those_that_do_not(documents, tmp_path):
    rows = BestFit(stream_of(tmp_path, documents), BOS, SEQ_LEN, pads=True)
    assert rows.cut_documents == sum(len(document) > SEQ_LEN + 1 for document in documents) > 100
    assert BestFit(stream_of(tmp_path, documents), BOS, SEQ_LEN).cut_documents == 0
    seen = set()
    for row in rows.at(range(1800))["targets"]:  # a document may wait for several passes
        # Without its first token, as a target; <|bos|> of the next one ends it, or padding.
        tokens = row[row >= 0].tolist()
        ends = [n for n, token in enumerate(tokens) if token == BOS]
        starts = [0, *(end + 1 for end in ends)]
        seen |= {tuple(tokens[a:b]) for a, b in zip(starts, [*ends, len(tokens)], strict=True)}
    assert seen == {tuple(document[1 : SEQ_LEN + 1]) for document in documents}


@published
def test_padded_rows_equal_those_of_the_published_loader(documents, masks, tmp_path):
    """The published function for conversations is taken out of its script, and reads rendered documents."""
    script = Path(os.environ["NANOCHAT_DIR"], "scripts", "chat_sft.py")
    name = "sft_data_generator_bos_bestfit"
    function = next(node for node in ast.parse(script.read_text()).body if getattr(node, "name", "") == name)
    rendered = list(zip(documents, masks, strict=True))
    names = {
        "torch": torch,
        "args": SimpleNamespace(max_seq_len=SEQ_LEN, device_batch_size=ROWS, num_iterations=-1),
        "tokenizer": SimpleNamespace(
            get_bos_token_id=lambda: BOS,
            render_conversation=lambda pair: tuple(list(each)[: SEQ_LEN + 1] for each in pair),
        ),
        **{"train_dataset": rendered, "val_dataset": rendered, "ddp_rank": 0, "ddp_world_size": 1},
        **{"device": "cpu", "device_type": "cpu"},
    }
    exec(compile(ast.Module([function], []), str(script), "exec"), names)
    for batch, (inputs, targets) in zip(padded_batches(tmp_path, documents, masks), names[name]("train"), strict=False):
        np.testing.assert_array_equal(batch["inputs"], inputs)
        np.testing.assert_array_equal(batch["targets"], targets)
