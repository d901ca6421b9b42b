"""Functions of PyTorch by name, for the comparison at corners, boundaries, ties, infinities and nan.

`UNARY` and `BINARY` act on each element; `ROWS` reduce or reorder the last dimension.
"""

import functools
import math

import torch
import torch.nn.functional as F

special = torch.special

_SAME_NAME = (
    "abs acos acosh angle asin asinh atan atanh ceil cos cosh deg2rad digamma erf erfc erfinv exp exp2 expm1 floor "
    "frac lgamma log log10 log1p log2 logit nan_to_num neg positive rad2deg reciprocal relu round rsqrt sgn "
    "sigmoid sign sin sinc sinh sqrt square tan tanh trunc"
)
_OF_SPECIAL = "entr erfcx i0 i0e i1 i1e log_ndtr ndtr ndtri"
_OF_FUNCTIONAL = (
    "celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu6 rrelu selu silu softplus "
    "softshrink softsign tanhshrink"
)

UNARY = (
    {name: getattr(torch, name) for name in _SAME_NAME.split()}
    | {f"special.{name}": getattr(special, name) for name in _OF_SPECIAL.split()}
    | {f"F.{name}": getattr(F, name) for name in _OF_FUNCTIONAL.split()}
    | {
        "F.celu 2": lambda x: F.celu(x, 2.0),
        "F.elu 0.5": lambda x: F.elu(x, 0.5),
        "F.gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
        "F.leaky_relu -1": lambda x: F.leaky_relu(x, -1.0),
        "F.softplus 2, 3": lambda x: F.softplus(x, 2, 3),
        "F.threshold": lambda x: F.threshold(x, 0.5, 3.0),
        "F.threshold -1": lambda x: F.threshold(x, -1.0, 7.0),
        "F.hardtanh -2 2": lambda x: F.hardtanh(x, -2.0, 2.0),
        "clamp": lambda x: x.clamp(-1, 1),
        "clamp crossed": lambda x: x.clamp(2, -2),
        "clamp min": lambda x: x.clamp(min=0.5),
        "clamp max": lambda x: x.clamp(max=-0.5),
        "clamp float": lambda x: x.clamp(-0.5, math.inf),
        "quotient by 2": lambda x: x / 2,
        "quotient of 1": lambda x: 1 / x,
        "quotient by 0": lambda x: x / 0,
        "remainder 2": lambda x: x % 2,
        "remainder -3": lambda x: x % -3.0,
        "fmod 2": lambda x: torch.fmod(x, 2),
        "floor div": lambda x: torch.div(x, 2, rounding_mode="floor"),
        "trunc div": lambda x: torch.div(x, 2, rounding_mode="trunc"),
        "copysign -1": lambda x: torch.copysign(x, -1.0),
        "copysign of 2": lambda x: torch.copysign(torch.full_like(x, 2.0), x),
        "xlogy 2": lambda x: torch.xlogy(x, 2.0),
        "xlogy 0": lambda x: torch.xlogy(x, 0.0),
        "xlogy of 2": lambda x: torch.xlogy(2.0, x),
        "xlog1py of 0": lambda x: special.xlog1py(0.0, x),
        "logit eps": lambda x: torch.logit(x, eps=1e-3),
        "mvlgamma": lambda x: torch.mvlgamma(x.abs() + 1, 2),
        "nan_to_num 1": lambda x: torch.nan_to_num(x, 1.0, 2.0, 3.0),
        "ldexp": lambda x: torch.ldexp(x, torch.tensor(3)),
        "maximum 0": lambda x: torch.maximum(x, torch.zeros(())),
        "where": lambda x: torch.where(x > 0, x, x * 2),
        "masked_fill": lambda x: x.masked_fill(x > 0, 5.0),
        "abs squared": lambda x: x.abs().square(),
        "square of norm": lambda x: x.unsqueeze(-1).norm(dim=-1),
        "soft margin": lambda x: F.soft_margin_loss(x, torch.ones(()), reduction="none"),
        "heaviside": lambda x: x * torch.heaviside(x.detach(), torch.full_like(x, 0.5).detach()),
    }
    | {f"pow {n}": lambda x, n=n: x**n for n in (0, 1, 2, 3.0, -1, -2, 0.5, -0.5, 1.5)}
    | {f"{n} to the x": lambda x, n=n: n**x for n in (0.0, 1.0, 2)}
    | {f"polygamma {n}": lambda x, n=n: torch.polygamma(n, x.abs() if n == 1 else x) for n in (1, 2, 3)}
)

_OF_TWO = (
    "add sub mul div remainder fmod pow maximum minimum fmax fmin max min atan2 hypot copysign logaddexp logaddexp2 "
    "xlogy true_divide rsub"
)

BINARY = {
    **{name: getattr(torch, name) for name in _OF_TWO.split()},
    "xlog1py": special.xlog1py,
    "div floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "div trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "clamp min": lambda x, y: torch.clamp(x, min=y),
    "clamp max": lambda x, y: torch.clamp(x, max=y),
    "clamp low": lambda x, y: torch.clamp(x, y, torch.ones_like(y)),
    "clamp high": lambda x, y: torch.clamp(x, torch.ones_like(y), y),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "lerp by": lambda x, y: torch.lerp(torch.ones_like(x), x, y),
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=2),
    "addcdiv": lambda x, y: torch.addcdiv(x, x, y, value=2),
    "where": lambda x, y: torch.where(x > y, x, y),
    "prelu": torch._prelu_kernel,
    "heaviside": lambda x, y: x + y * torch.heaviside(x.detach(), y.detach()),
    "l1": lambda x, y: F.l1_loss(x, y, reduction="none"),
    "mse": lambda x, y: F.mse_loss(x, y, reduction="none"),
    "smooth l1": lambda x, y: F.smooth_l1_loss(x, y, reduction="none"),
    "huber": lambda x, y: F.huber_loss(x, y, reduction="none", delta=2.0),
    "bce with logits": lambda x, y: F.binary_cross_entropy_with_logits(x, y, reduction="none"),
    "kl": lambda x, y: F.kl_div(x, y, reduction="none"),
    "kl of logs": lambda x, y: F.kl_div(x, y, reduction="none", log_target=True),
}

_inf = math.inf
_nan = math.nan
ROW_VALUES = torch.tensor(
    [
        [1.0, 2.0, 3.0, -4.0],
        [2.0, 2.0, 1.0, 2.0],
        [0.0, -0.0, 0.0, 0.0],
        [0.0, 3.0, 0.0, 2.0],
        [0.0, 3.0, 4.0, 2.0],
        [-1.0, -1.0, -1.0, -1.0],
        [_inf, 1.0, 2.0, _inf],
        [-_inf, 1.0, -_inf, 0.0],
        [-_inf, -_inf, -_inf, -_inf],
        [_nan, 1.0, 2.0, 0.0],
        [1.0, _nan, 3.0, _nan],
        [1e30, -1e30, 1e30, 1.0],
        [100.0, 0.0, -100.0, 100.0],
    ]
)

_SOME = [1, 3, 9, 10]
"""Rows with ties, zeros and nan."""
_VALUES_ALONG = ("max", "min", "median", "nanmedian", "mode", "cummax", "cummin")
_REDUCTIONS = (
    *("amax", "amin", "prod", "sum", "mean", "logsumexp", "std", "var", "cumsum", "cumprod", "softmax"),
    *("log_softmax", "nansum"),
)


def _values(function, x, dim):
    return function(x, dim).values


def _of_all(name, x, dim):
    return torch.stack([getattr(row, name)() for row in x[_SOME]])


ROWS = {
    **{name: getattr(torch, name) for name in _REDUCTIONS},
    **{name: functools.partial(_values, getattr(torch, name)) for name in _VALUES_ALONG},
    "nanmean": lambda x, d: torch.nanmean(x, d),
    "aminmax": lambda x, d: torch.stack(tuple(torch.aminmax(x, dim=d)), -1),
    "kthvalue": lambda x, d: torch.kthvalue(x, 2, d).values,
    "topk": lambda x, d: torch.topk(x, 2, d).values,
    "sort": lambda x, d: torch.sort(x, dim=d, stable=True).values,
    "sort down": lambda x, d: torch.sort(x, dim=d, stable=True, descending=True).values,
    "quantile": lambda x, d: torch.quantile(x, 0.3, d),
    **{f"norm {p}": lambda x, d, p=p: torch.linalg.vector_norm(x, p, d) for p in (2, 1, 3, 0.5, _inf, -_inf)},
    "normalize": lambda x, d: F.normalize(x, dim=d),
    "cosine": lambda x, d: F.cosine_similarity(x, x.roll(1, d), d),
    "distance": lambda x, d: F.pairwise_distance(x, x.roll(1, d)),
    "aminmax of all": lambda x, d: torch.stack([torch.stack(tuple(row.aminmax())) for row in x[_SOME]]),
    **{f"{name} of all": functools.partial(_of_all, name) for name in ("max", "min", "median", "nanmedian", "prod")},
    "softmin": lambda x, d: F.softmin(x, d),
    "max pool": lambda x, d: F.max_pool1d(x[:, None], 2, 1)[:, 0],
}
"""`function(matrix, dim)`."""


def _infinite(*values):
    return any(math.isinf(v) for v in values)


def _with_nan(*values):
    return any(v != v for v in values)


def _tied(*values):
    return len({str(v) for v in values}) < len(values)


def _huge(*values):
    return any(1e29 < abs(v) < _inf for v in values)


DIFFERS = {
    "digamma": (lambda x: x <= 0, "between poles PyTorch's own float32 differs by 1e-4 of its float64; JAX has a pole"),
    "lgamma": (lambda x: x <= 0, "its gradient is that digamma"),
    "special.ndtri": (lambda x: x in (0, 1), "JAX's derivative at the ends is 0, PyTorch's inf"),
    "polygamma 1": (_infinite, "JAX's value at infinity is nan"),
    "polygamma 2": (lambda x: x <= 0, "JAX's value at poles is nan"),
    "polygamma 3": (lambda x: x <= 0, "its gradient at poles is nan, and below -7 its value"),
    "logit": (lambda x: str(x) == "-0.0", "PyTorch's gradient is inf or -inf there, by the width of its vectors"),
    "F.gelu": (lambda x: x == _inf, "PyTorch's value is inf or nan there, by the width of its vectors"),
    "special.log_ndtr": (lambda x: x < -80, "PyTorch divides two rounded numbers; ours is the more exact one"),
    "square of norm": (_huge, "a square leaves float32; PyTorch's CPU has float64 inside"),
    "addcdiv": (lambda x, y: _infinite(x) and _huge(y), "PyTorch's derivative divides by the square of the divisor"),
    "kl of logs": (lambda x, y: y == -100, "exp(-100) is a denormal number, which XLA rounds to zero"),
    "std": (_huge, "a square leaves float32; PyTorch's CPU has float64 inside"),
    "logsumexp": (_huge, "exp(x - logsumexp(x)), rounded at 1e30"),
    "cumprod": (lambda *row: _infinite(*row) or _with_nan(*row), "PyTorch divides by the factor: inf / inf"),
    "prod of all": (_infinite, "PyTorch divides by the factor: inf / inf"),
    "mode": (_with_nan, "PyTorch counts nan by its place"),
    "kthvalue": (_tied, "which of equals PyTorch selects depends on its algorithm"),
    "topk": (_tied, "which of equals PyTorch selects depends on its algorithm"),
    "norm 3": (_with_nan, "a zero beside nan has no gradient"),
    "norm 0.5": (lambda *row: _infinite(*row) or _with_nan(*row), "a zero beside nan or inf has no gradient"),
    "max pool": (_with_nan, "XLA's pooling passes over nan in its backward"),
}
"""Name -> the points at which the bridge is not as PyTorch, and why. A pair or a row is given as its values."""
