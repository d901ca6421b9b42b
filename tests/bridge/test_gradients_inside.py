"""The gradient of an operation that the call itself asks for: PyTorch's formula, on what the lowerings return."""

import pytest
import torch
import torch.nn.functional as F
from eager import Call, compare, randn
from support.markers import slow_unless
from torch import nn

MATRICES, IMAGES = randn(2, 4, 4), randn(2, 3, 7, 6)
BAGS = torch.tensor([[0, 1], [2, 3]])
LABELS = torch.tensor([[1, 2], [2, 1], [3, 1], [1, 3]])


def made(kind, *sizes, **options):
    torch.manual_seed(0)
    return kind(*sizes, **options)


def unpooled(x):
    return F.max_unpool2d(*F.max_pool2d(x, 2, 2, return_indices=True), 2)


OPERATIONS = {
    "det": torch.linalg.det,
    "det of a transpose": lambda x: torch.det(x.mT),
    "slogdet": lambda x: torch.linalg.slogdet(x)[1],
    "logdet": lambda x: torch.logdet(x @ x.mT),
    "eigh": lambda x: torch.cat([each.abs().flatten() for each in torch.linalg.eigh(x)]),
    "eigvals": lambda x: torch.linalg.eigvals(x).abs(),
    "inv": lambda x: torch.linalg.inv(x + 3 * torch.eye(4)),
    "svdvals": torch.linalg.svdvals,
    "qr": lambda x: torch.linalg.qr(x)[1],
    "cholesky": lambda x: torch.linalg.cholesky(x @ x.mT + torch.eye(4)),
    "solve": lambda x: torch.linalg.solve(x + 3 * torch.eye(4), x),
    "lu": lambda x: torch.linalg.lu(x)[1],
    "matrix_exp": torch.matrix_exp,
    "max_pool1d": lambda x: F.max_pool1d(x, 2),
    "max_pool2d": lambda x: F.max_pool2d(x, (3, 2), (2, 1), (1, 0), 1, True),
    "dilated max_pool2d": lambda x: F.max_pool2d(x, 2, 2, 0, 2),
    "max_pool3d": lambda x: F.max_pool3d(x, 2),
    "max_unpool2d": unpooled,
    "adaptive_max_pool1d": lambda x: F.adaptive_max_pool1d(x, 3),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, (3, 2)),
    "adaptive_max_pool3d": lambda x: F.adaptive_max_pool3d(x, (2, 3, 2)),
    "fractional_max_pool2d": lambda x: F.fractional_max_pool2d(
        x, 2, output_size=(3, 3), _random_samples=torch.full((2, 3, 2), 0.3)
    ),
    "ctc_loss": lambda x: F.ctc_loss(
        torch.cat([x, x]).log_softmax(-1), LABELS, torch.full((4,), 4), torch.full((4,), 2)
    ),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "nn.MultiheadAttention": lambda x: made(nn.MultiheadAttention, 4, 2, batch_first=True)(x, x, x)[0],
    "nn.TransformerEncoderLayer": lambda x: made(nn.TransformerEncoderLayer, 4, 2, 8, 0.0, batch_first=True)(x),
    "nn.LSTM": lambda x: made(nn.LSTM, 4, 4)(x)[0],
    "nn.GRU": lambda x: made(nn.GRU, 4, 4)(x)[0],
    "embedding_bag, max": lambda x: F.embedding_bag(BAGS, x[0], mode="max"),
    "embedding_bag, mean": lambda x: F.embedding_bag(BAGS, x[0], mode="mean", padding_idx=1),
    "embedding_bag, weights": lambda x: F.embedding_bag(BAGS, x[0], mode="sum", per_sample_weights=x[1, :2, :2]),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "group_norm": lambda x: F.group_norm(x, 3),
    "grid_sample": lambda x: F.grid_sample(x[:, None], x[:, None, :, :2].tanh(), align_corners=False),
    "volumes": lambda x: F.grid_sample(x[None], x[:1, :, :, None, :3].tanh(), align_corners=True),
    "fractional_max_pool3d": lambda x: F.fractional_max_pool3d(
        x, 2, output_size=(1, 3, 3), _random_samples=torch.full((1, 2, 3), 0.3)
    ),
    "margins": lambda x: F.multi_margin_loss(x[0], LABELS[:, 0], reduction="none"),
    "margins of several labels": lambda x: F.multilabel_margin_loss(x[0], torch.tensor([[3, 0, -1, 1]] * 4)),
    "interpolate": lambda x: F.interpolate(x, size=(5, 9), mode="bicubic"),
    "masked_scatter": lambda x: (x * 2).masked_scatter(x > 0, x.flatten()[1:].tanh() @ torch.ones(31, 31)),
    "pdist": lambda x: F.pdist(x[0]),
    "cdist": lambda x: torch.cdist(x, x + 1),
    "sort": lambda x: x.sort(-1)[0],
    "median": lambda x: x.median(-1)[0],
    "cummax": lambda x: x.cummax(-1)[0],
    "logcumsumexp": lambda x: x.logcumsumexp(-1),
    "renorm": lambda x: x.renorm(2, 0, 1.0),
    "stft": lambda x: torch.stft(x.reshape(1, -1), 8, window=torch.ones(8), return_complex=True).abs(),
    "convolution": lambda x: F.conv1d(F.pad(x, (1, 1), mode="circular"), x[:1, :, :3].expand(3, 4, 3)),
    "transposed convolution": lambda x: F.conv_transpose1d(F.pad(x, (1, 1), mode="circular"), x[0, :, None, :3]),
}
"""`F.pad` with `circular` writes into a tensor that it makes."""
OF_IMAGES = (
    "max_pool2d", "dilated max_pool2d", "max_pool3d", "max_unpool2d", "adaptive_max_pool2d", "adaptive_max_pool3d",
    "fractional_max_pool2d", "fractional_max_pool3d", "volumes", "batch_norm", "group_norm", "interpolate",
)  # fmt: skip


def weighed(name, x):
    out = OPERATIONS[name](x)
    return (out * torch.arange(1.0, out.numel() + 1).reshape(out.shape).cos()).sum()


@pytest.mark.parametrize("name", slow_unless(["det", "convolution"].__contains__, OPERATIONS))
def test_by_the_engine(name):
    def slope(x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(weighed(name, x), x)[0]

    compare(Call(slope), [IMAGES if name in OF_IMAGES else MATRICES], 2e-4)


@pytest.mark.parametrize("name", slow_unless(["convolution"].__contains__, OPERATIONS))
def test_by_torch_func(name):
    def slope(x):
        return torch.func.grad(lambda x: weighed(name, x))(x.detach())

    compare(Call(slope), [IMAGES if name in OF_IMAGES else MATRICES], 2e-4)
