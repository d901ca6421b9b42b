"""Shuffled rows of a stream: every token once an epoch, in an order of the seed; batches as pure functions."""

import numpy as np
import pytest

from train_jax.tasks.language.batches import ShuffledRows, StreamRows
from train_jax.tasks.language.text_set import TokenStream, shard_name

ROWS, SEQ_LEN, LENGTH = 4, 32, 2000


@pytest.fixture
def stream(tmp_path):
    """The token at a position is the position."""
    np.save(tmp_path / shard_name(0), np.arange(LENGTH, dtype="<u2"))
    return TokenStream(tmp_path, (LENGTH,), LENGTH)


def rows_of(stream, steps, seed=0):
    rows = ShuffledRows(stream, SEQ_LEN, seed)
    return [rows.batch(step=step, rows=ROWS, shard=(0, 1)) for step in range(steps)]


def test_every_target_occurs_once_an_epoch(stream):
    """62 rows of 32 tokens; the 63rd would need more than 2 000."""
    batches = rows_of(stream, 31)  # two epochs
    targets = np.concatenate([batch["targets"] for batch in batches])
    for epoch in (targets[:62], targets[62:]):
        np.testing.assert_array_equal(np.sort(epoch.ravel()), np.arange(1, 62 * SEQ_LEN + 1))
    assert (targets[:62] != targets[62:]).any(), "another order in another epoch"
    for batch in batches:
        np.testing.assert_array_equal(batch["inputs"] + 1, batch["targets"])
    assert (np.diff(targets[:, 0]) != SEQ_LEN).mean() > 0.9, "rows of a batch are not those that follow each other"
    assert ShuffledRows(stream, SEQ_LEN, 0).rows_per_epoch == 62


def test_a_batch_is_a_function_of_the_seed_the_step_and_the_shard(stream):
    whole, other = rows_of(stream, 40), ShuffledRows(stream, SEQ_LEN, 0)
    for step in (39, 15, 15, 0):  # step 15 has the end of an epoch
        parts = [other.batch(step=step, rows=ROWS, shard=(index, 2))["inputs"] for index in (1, 0)]
        np.testing.assert_array_equal(np.concatenate(parts[::-1]), whole[step]["inputs"])
    assert (rows_of(stream, 1, seed=1)[0]["inputs"] != whole[0]["inputs"]).any()


def test_the_rows_are_those_of_the_stream(stream):
    """In the order of the data, as one step takes them."""
    rows = {tuple(row) for batch in rows_of(stream, 16) for row in batch["inputs"]}
    in_order = StreamRows(stream, SEQ_LEN, 8).batch(step=0, rows=8, shard=(0, 1))["inputs"]
    assert {tuple(row) for row in in_order} <= rows
