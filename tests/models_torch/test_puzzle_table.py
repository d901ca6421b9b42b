"""The puzzle table: the gradients of the rows in a training batch, and what evaluation reads."""

import torch
from support.architectures import EVERY_VARIANT, make_head

from models_torch import registry
from models_torch.sparse_embedding import SparseEmbedding


@EVERY_VARIANT
def test_puzzle_rows_get_one_gradient_for_each_example(name):
    head, config = make_head(name)
    batch = registry.example_batch(config, 4, seed=0) | {
        "puzzle_identifiers": torch.tensor([3, 1, 3, 0], dtype=torch.int32)
    }
    table = head.model.inner.puzzle_emb
    before = table.weights.clone()
    _, loss, _, _, _ = head(head.initial_carry(batch), batch)
    loss.backward()
    assert table.local_ids.tolist() == [3, 1, 3, 0]
    torch.testing.assert_close(table.local_weights.detach(), table.weights[[3, 1, 3, 0]])
    assert (table.local_weights.grad.abs().sum(dim=1) > 0).all()
    assert not torch.equal(table.local_weights.grad[0], table.local_weights.grad[2])
    assert torch.equal(table.weights, before) and table.weights.grad is None
    assert not any("puzzle_emb" in name for name, _ in head.named_parameters())


def test_evaluation_reads_the_table_and_leaves_the_local_rows():
    head, config = make_head("trm")
    batch = registry.example_batch(config, 7, seed=0)  # not the batch size of training
    head.eval()(head.initial_carry(batch), batch)
    assert not head.model.inner.puzzle_emb.local_weights.any()


def test_puzzle_rows_still_train_after_the_module_is_converted():
    table = SparseEmbedding(3, 4, batch_size=2, init_std=0.0, dtype=torch.float32).to(torch.float64)
    table(torch.tensor([1, 2])).sum().backward()
    assert table.local_weights.grad is not None
    assert list(table.state_dict()) == ["weights"]
