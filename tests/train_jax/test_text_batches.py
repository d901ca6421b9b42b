"""Rows of a stream of tokens, in the order of the data or shuffled: pure functions that use every token once."""

import numpy as np
import pytest

from train_jax.tasks.language.batches import ShuffledRows, StreamRows, count_rows, eval_batches, tokens_per_step
from train_jax.tasks.language.text_set import TokenStream, shard_name

LENGTH = 200


@pytest.fixture
def stream(tmp_path):
    """A stream of the numbers 0 to 199 in three shards."""
    shards = (90, 60, 50)
    for number, part in enumerate(np.split(np.arange(LENGTH, dtype="<u2"), np.cumsum(shards)[:-1])):
        np.save(tmp_path / shard_name(number), part)
    return TokenStream(tmp_path, shards, 300)


def test_taking_tokens_across_shards_and_ends(stream):
    for start, count in [(0, 200), (85, 10), (149, 2), (199, 2), (50, 500), (1234, 7), (3, 0)]:
        np.testing.assert_array_equal(stream.take(start, count), (start + np.arange(count)) % LENGTH)


def test_an_epoch_uses_every_token_once(stream):
    """A step takes 25 tokens for 4 rows of 6, so that 8 steps are an epoch of 200 tokens."""
    batches = [StreamRows(stream, 6, 4).batch(step=step, rows=4, shard=(0, 1)) for step in range(9)]
    used = []
    for batch in batches[:8]:
        inputs, targets = batch["inputs"].ravel(), batch["targets"].ravel()
        np.testing.assert_array_equal(targets, inputs + 1)
        used += [*inputs, targets[-1]]
    assert used == list(range(LENGTH)) and tokens_per_step(4, 6) == 25
    assert batches[8]["inputs"][0, 0] == 0 and inputs.dtype == targets.dtype == np.int32


def test_a_shuffled_epoch_has_every_target_once(stream):
    """An epoch has 33 rows of 6 tokens; the 34th would need more than 200."""
    rows = ShuffledRows(stream, 6, seed=0)
    batches = [rows.batch(step=step, rows=3, shard=(0, 1)) for step in range(22)]  # two epochs
    targets = np.concatenate([batch["targets"] for batch in batches])
    for epoch in (targets[:33], targets[33:]):
        np.testing.assert_array_equal(np.sort(epoch.ravel()), np.arange(1, 33 * 6 + 1))
    assert (targets[:33] != targets[33:]).any(), "another order in another epoch"
    assert (np.diff(targets[:, 0]) != 6).mean() > 0.9, "rows of a batch are not those that follow each other"
    for batch in batches:
        np.testing.assert_array_equal(batch["inputs"] + 1, batch["targets"])
    other = ShuffledRows(stream, 6, seed=1).batch(step=0, rows=3, shard=(0, 1))
    assert (other["targets"] != targets[:3]).any() and rows.rows_per_epoch == 33


@pytest.mark.parametrize("make", [lambda stream: StreamRows(stream, 6, 4), lambda stream: ShuffledRows(stream, 6, 0)])
def test_shards_are_parts_of_the_batch_of_a_step(stream, make):
    """The steps may be asked for in any order; step 8 has the end of an epoch."""
    whole, parts = make(stream), make(stream)
    for step in (11, 8, 8, 0):
        batch = whole.batch(step=step, rows=4, shard=(0, 1))
        for count in (2, 4):
            shards = [parts.batch(step=step, rows=4, shard=(index, count)) for index in reversed(range(count))]
            for name, rows in batch.items():
                np.testing.assert_array_equal(np.concatenate([shard[name] for shard in shards[::-1]]), rows)


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("limit", [0, 5, 999])
def test_evaluation_uses_every_target_once(stream, count, limit):
    shards = [list(eval_batches(stream, rows=4, seq_len=6, limit=limit, shard=(i, count))) for i in range(count)]
    assert len({len(batches) for batches in shards}) == 1
    targets, inputs = (
        np.concatenate([batch[name].ravel() for shard in shards for batch in shard]) for name in ("targets", "inputs")
    )
    counted = targets >= 0
    np.testing.assert_array_equal(np.sort(targets[counted]), np.arange(1, 31 if limit == 5 else LENGTH))
    np.testing.assert_array_equal(inputs[counted] + 1, targets[counted])
    assert count_rows(stream, 6) == 34
