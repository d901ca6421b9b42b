"""Tensors without dimensions, which PyTorch takes for one dimension of size 1 wherever a dimension is named."""

import functools

import pytest
import torch
import torch.nn.functional as F
from eager import Call, compare

X = torch.tensor(0.7)
zero = torch.tensor(0)

ALONG = (
    *("softmax", "log_softmax", "cumsum", "cumprod", "logsumexp", "logcumsumexp", "sum", "mean", "prod", "nansum"),
    *("nanmean", "amax", "amin", "argmax", "argmin", "argsort", "median", "nanmedian", "mode", "max", "min", "cummax"),
    *("cummin", "squeeze"),
)
"""`function(x, 0)`."""

SPECIAL = {
    "any": lambda x: (x > 0).any(0),
    "all": lambda x: (x > 0).all(0),
    "msort": torch.msort,
    "sort": lambda x: (x.sort(0), x.sort(-1, descending=True), x.sort(stable=True, dim=0)),
    "topk": lambda x: (x.topk(1), x.topk(1, 0, largest=False)),
    "kthvalue": lambda x: x.kthvalue(1, 0),
    "quantile": lambda x: torch.quantile(x, 0.4, 0),
    "flip": lambda x: (x.flip(0), x.flip(-1)),
    "roll": lambda x: x.roll(1),
    "norm": lambda x: (x.norm(), x.norm(dim=0), x.norm(1, 0)),
    "vector_norm": lambda x: torch.linalg.vector_norm(x, 3, 0),
    "aminmax": lambda x: x.aminmax(dim=0),
    "std": lambda x: (x.std(0, correction=0), x.std(dim=0, correction=0, keepdim=True)),
    "var": lambda x: (x.var(0, correction=0), x.var(correction=0)),
    "std_mean": lambda x: torch.std_mean(x, 0, correction=0),
    "var_mean": lambda x: torch.var_mean(x, 0, correction=0),
    "count_nonzero": lambda x: x.count_nonzero(0),
    "softmin": lambda x: F.softmin(x, 0),
    "normalize": lambda x: F.normalize(x, dim=0),
    "gather": lambda x: (x.gather(0, zero), x.gather(-1, zero)),
    "index_select": lambda x: x.index_select(0, zero),
    "index_add": lambda x: x.index_add(0, zero, x * 2),
    "index_copy": lambda x: x.index_copy(0, zero, x * 2),
    "index_fill": lambda x: x.index_fill(0, zero, 3.0) + x,
    "index_reduce": lambda x: x.index_reduce(0, zero, x * 2, "amax"),
    "scatter": lambda x: (x.scatter(0, zero, x * 2), x.scatter(0, zero, 4.0) + x),
    "scatter_add": lambda x: x.scatter_add(0, zero, x * 2),
    "scatter_reduce": lambda x: x.scatter_reduce(0, zero, x * 2, "prod"),
    "unsqueeze": lambda x: (x.unsqueeze(0), x.unsqueeze(-1)),
    "cosine": lambda x: F.cosine_similarity(x, x * 2, 0),
    "repeat_interleave": lambda x: x.repeat_interleave(3),
    "stack": lambda x: (torch.stack([x, x * 2]), torch.stack([x, x * 2], -1)),
    "take": lambda x: x.take(zero),
    "renorm": lambda x: x.expand(2, 2).renorm(2, 0, 1.0),
    "diff": lambda x: x[None].diff(),
}


FUNCTIONS = {name: functools.partial(lambda f, x: f(x, 0), getattr(torch, name)) for name in ALONG} | SPECIAL
NAMES = [*FUNCTIONS]


def flat(out):
    return [t for o in out for t in flat(o)] if isinstance(out, tuple) else [out]


@pytest.mark.parametrize("names", [NAMES[i::4] for i in range(4)], ids=" ".join)
def test_no_dimensions(names):
    """A quarter of the functions in each program."""
    compare(Call(lambda x: [t for name in names for t in flat(FUNCTIONS[name](x))]), [X])
