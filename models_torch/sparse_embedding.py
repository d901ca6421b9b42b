"""The puzzle table: one learned embedding per puzzle; a step updates only the rows of its batch."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from models_torch.layers import truncated_normal_


class SparseEmbedding(nn.Module):
    """An embedding table that is too large for a dense gradient, trained through a copy of the batch's rows.

    `weights` is the table: a persistent buffer instead of a parameter, so that no optimizer or EMA processes it. In
    training, the rows of the batch are copied to `local_weights`, a leaf that requires grad, and their indices to
    `local_ids`. After `backward()`, `local_weights.grad` has one gradient per example (a puzzle that occurs twice has
    two, which must be summed); the trainer writes the updated rows to `weights`. In evaluation, rows are read from the
    table.

    Training batches have exactly `batch_size` sequences; evaluation batches may have any number.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, batch_size: int, init_std: float, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype
        self.weights = nn.Buffer(truncated_normal_(torch.empty(num_embeddings, embedding_dim), init_std))
        self.local_weights = nn.Buffer(torch.zeros(batch_size, embedding_dim, requires_grad=True), persistent=False)
        self.local_ids = nn.Buffer(torch.zeros(batch_size, dtype=torch.int32), persistent=False)

    def forward(self, ids: Int[Tensor, "batch"]) -> Float[Tensor, "batch embedding_dim"]:
        if not self.training:
            return self.weights[ids].to(self.dtype)
        with torch.no_grad():
            self.local_weights.copy_(self.weights[ids])
            self.local_ids.copy_(ids)
        return self.local_weights.to(self.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "SparseEmbedding":
        # `.cuda()` and `.to()` replace a buffer by a non-leaf copy, which gets no `.grad`; without the following lines
        # the puzzle table would silently never be trained.
        super()._apply(fn, recurse)
        self.local_weights = nn.Buffer(self.local_weights.detach().requires_grad_(), persistent=False)
        return self
