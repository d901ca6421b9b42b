"""Rows of the table of meanings: dtypes, what passes in and out, methods, checkpoints."""

import collections
import dataclasses

import torch
import torch.nn.functional as F
from rows_registry import BF16, Weighted, meaning, row, weighted
from torch import nn
from torch.utils.checkpoint import checkpoint

# ---- dtypes


@row(lambda: {"linear": nn.Linear(4, 4)}, tolerance=BF16)
def autocast(m, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = m.linear(x)
        k = h @ m.linear.weight
    assert h.dtype == k.dtype == torch.bfloat16
    return h.float() + k.float()


@row(lambda: {"linear": nn.Linear(4, 4)}, tolerance=2 * BF16)  # rounded twice in a row
def autocast_nested(m, x):
    """Switched off inside; operations that autocast keeps in float32; attention."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = m.linear(x)
        with torch.autocast("cpu", enabled=False):
            k = m.linear(h.float())
        m = F.scaled_dot_product_attention(h[None], h[None], h[None])
        n = F.mse_loss(h, x)
    assert [t.dtype for t in (h, k, m, n)] == [torch.bfloat16, torch.float32, torch.bfloat16, torch.float32]
    return k, m.float(), n


class Narrow(Weighted):
    """float32 masters, used in a narrow dtype."""

    dtype: torch.dtype

    def forward(self, x):
        h = F.silu(F.linear(x.to(self.dtype), self.a.to(self.dtype)))
        h = h @ self.b.to(h.dtype) + 1
        assert h.dtype == self.dtype
        return h.to(torch.float32) * 3


@meaning((3, 4), tolerance=BF16)
class MastersOfBfloat16(Narrow):
    dtype = torch.bfloat16


@meaning((3, 4), tolerance=2e-3)  # 11 bits
class MastersOfFloat16(Narrow):
    dtype = torch.float16


@row(
    lambda: {"layers": nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)).to(torch.bfloat16)},
    tolerance=3 * BF16,
)  # its gradients are rounded to bf16 too
def whole_module_in_bfloat16(m, x):
    out = m.layers(x.to(torch.bfloat16)) * torch.tensor(0.5)
    assert out.dtype == torch.bfloat16
    return out


@weighted(tolerance=BF16)
def scalars_do_not_promote(m, x):
    h = (x @ m.a).to(torch.bfloat16)
    h = h * torch.tensor(2.0) + 1.5
    assert h.dtype == torch.bfloat16
    k = torch.arange(4) / 3
    assert k.dtype == torch.float32
    return h.float() * k + (torch.tensor([1, 2, 3]) // 2).unsqueeze(1)


# ---- what passes in and out


@dataclasses.dataclass
class Pair:
    left: torch.Tensor
    right: torch.Tensor | None
    label: str


Point = collections.namedtuple("Point", "x y")


def nested(generator):
    x, y = torch.randn(2, 3, 4, generator=generator)
    pair = Pair(x, None, "left")
    # an input that is given twice would be one leaf
    deep = x.clone()
    extra = y.clone()
    return (pair, [Point(y, {"deep": (deep, 2)}), None]), {"scale": 1.5, "flag": True, "extra": {"y": extra}}


@meaning(inputs=nested)
class Containers(Weighted):
    """Dataclasses, named tuples, dicts, `None`, numbers and keyword arguments, in and out."""

    def forward(self, pair, rest, *, scale=2.0, flag=False, extra=None):
        h = (pair.left if pair.label == "left" else pair.right) @ self.a
        point, nothing = rest
        assert isinstance(point, Point) and nothing is None and pair.right is None and flag is True
        deep, factor = point.y["deep"]
        kept = Pair(h * factor, None, "kept")
        return {"pair": kept, "point": Point(h * scale, [deep, (extra["y"] @ self.b,)]), "none": nothing, "number": 3}


@meaning((3, 4), method="encode")
class OtherMethod(Weighted):
    """A method other than `forward`; it calls submodules, hooks and the rest as usual."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.linear.register_forward_hook(lambda module, args, out: out * 2)
        self.linear.register_forward_pre_hook(lambda module, args: (args[0] + 1,))

    def encode(self, x):
        return self.linear(x) @ self.a

    def forward(self, x):
        raise AssertionError("forward was called")


@meaning((3, 4))
class Checkpointed(Weighted):
    def block(self, x):
        return torch.tanh(x @ self.a) @ self.b

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False) + x
