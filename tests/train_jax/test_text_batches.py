"""Batches of a stream of tokens: pure functions of the step and the shard, which use every token once."""

import numpy as np
import pytest

from train_jax.tasks.language.batches import StreamRows, count_rows, eval_batches, tokens_per_step
from train_jax.tasks.language.text_set import TokenStream, shard_name


@pytest.fixture
def stream(tmp_path):
    """A stream of the numbers 0 to 199 in three shards."""
    shards = (90, 60, 50)
    for number, part in enumerate(np.split(np.arange(200, dtype="<u2"), np.cumsum(shards)[:-1])):
        np.save(tmp_path / shard_name(number), part)
    return TokenStream(tmp_path, shards, 300)


def test_taking_tokens_across_shards_and_ends(stream):
    for start, count in [(0, 200), (85, 10), (149, 2), (199, 2), (50, 500), (1234, 7), (3, 0)]:
        np.testing.assert_array_equal(stream.take(start, count), (start + np.arange(count)) % 200)


def test_an_epoch_uses_every_token_once(stream):
    """Of 4 rows of 6 tokens, 25 tokens a step: 8 steps are an epoch of 200 tokens."""
    used = []
    for step in range(8):
        batch = StreamRows(stream, 6, 4).batch(step=step, rows=4, shard=(0, 1))
        inputs, targets = batch["inputs"].ravel(), batch["targets"].ravel()
        np.testing.assert_array_equal(targets, inputs + 1)
        used += [*inputs, targets[-1]]
    assert used == list(range(200)) and tokens_per_step(4, 6) == 25
    again = StreamRows(stream, 6, 4).batch(step=8, rows=4, shard=(0, 1))
    assert again["inputs"][0, 0] == 0


@pytest.mark.parametrize("count", [2, 4])
def test_shards_are_parts_of_the_batch(stream, count):
    for step in (0, 3, 11):
        whole = StreamRows(stream, 6, 4).batch(step=step, rows=4, shard=(0, 1))
        parts = [StreamRows(stream, 6, 4).batch(step=step, rows=4, shard=(i, count)) for i in range(count)]
        for name, rows in whole.items():
            np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), rows)
            assert rows.dtype == np.int32


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("limit", [0, 5, 999])
def test_evaluation_uses_every_target_once(stream, count, limit):
    shards = [list(eval_batches(stream, rows=4, seq_len=6, limit=limit, shard=(i, count))) for i in range(count)]
    assert len({len(batches) for batches in shards}) == 1
    targets = np.concatenate([batch["targets"].ravel() for batches in shards for batch in batches])
    inputs = np.concatenate([batch["inputs"].ravel() for batches in shards for batch in batches])
    counted = targets >= 0
    np.testing.assert_array_equal(np.sort(targets[counted]), np.arange(1, 31 if limit == 5 else 200))
    np.testing.assert_array_equal(inputs[counted] + 1, targets[counted])
    assert count_rows(stream, 6) == 34
