"""PyTorch's own op database through the bridge: values and gradients of the ops that models of this field use.

    python -m benchmarks.op_survey [--op NAME] [--samples-per-op N] [--markdown docs/op_survey.md]

Every sample input of `torch.testing`'s database runs in PyTorch eager and, under `jax.jit`, through the bridge. Outputs
and the gradient of every float input are compared at 1e-5 of the leaf's largest entry, or 8 times what PyTorch's own
float32 differs from its float64 where that is more. Random draws are PyTorch's, replayed.
"""

from __future__ import annotations

import dataclasses
import importlib
import platform
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import torch
import tyro
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

import bridge
from bridge.parity import Row

OPS: dict[str, str] = {
    "elementwise": """abs acos acosh add addcdiv addcmul asin asinh atan atan2 atanh ceil clamp clamp_max clamp_min
        copysign cos cosh deg2rad div erf erfc erfinv exp exp2 expm1 float_power floor floor_divide fmax fmin fmod frac
        heaviside hypot ldexp lerp lgamma log log10 log1p log2 logaddexp logaddexp2 logit maximum minimum mul
        nan_to_num neg positive pow rad2deg reciprocal remainder round rsqrt rsub sgn sigmoid sign sin sinc sinh
        special.entr special.log_ndtr special.ndtr special.xlog1py sqrt square sub tan tanh true_divide trunc where
        xlogy digamma""",
    "reductions": """all amax amin aminmax any argmax argmin count_nonzero dist linalg.norm linalg.vector_norm logsumexp
        max mean median min mode nanmean nanmedian nansum norm prod quantile std std_mean sum sum_to_size trace var
        var_mean""",
    "shape": """T __getitem__ as_strided atleast_1d atleast_2d atleast_3d block_diag broadcast_tensors broadcast_to cat
        chunk clone column_stack contiguous diag diag_embed diagflat diagonal dstack expand expand_as flatten flip
        fliplr flipud hsplit hstack kron mT meshgrid movedim narrow permute ravel repeat repeat_interleave
        reshape reshape_as roll rot90 select slice split split_with_sizes squeeze stack swapaxes t
        tensor_split tile transpose tril triu unbind unflatten unfold unsqueeze view view_as vsplit vstack""",
    "indexing and scatter": """bucketize diagonal_scatter gather index_add index_copy index_fill index_put index_reduce
        index_select masked_fill masked_scatter masked_select put scatter scatter_add scatter_reduce searchsorted
        select_scatter slice_scatter take take_along_dim nonzero unique isin""",
    "linear algebra": """addbmm addmm addmv addr baddbmm bmm cdist cross dot einsum inner linalg.cholesky linalg.cross
        linalg.det linalg.inv linalg.matrix_norm linalg.matrix_power linalg.multi_dot linalg.solve linalg.vecdot matmul
        mm mv outer tensordot linalg.qr linalg.eigh linalg.svdvals""",
    "activations": """log_softmax nn.functional.celu nn.functional.elu nn.functional.gelu nn.functional.glu
        nn.functional.hardshrink nn.functional.hardsigmoid nn.functional.hardswish nn.functional.hardtanh
        nn.functional.leaky_relu nn.functional.logsigmoid nn.functional.mish nn.functional.prelu nn.functional.relu
        nn.functional.relu6 nn.functional.selu nn.functional.silu nn.functional.softmin nn.functional.softplus
        nn.functional.softshrink nn.functional.softsign nn.functional.tanhshrink nn.functional.threshold softmax""",
    "norms": """native_batch_norm native_layer_norm nn.functional.batch_norm nn.functional.group_norm
        nn.functional.instance_norm nn.functional.layer_norm nn.functional.local_response_norm nn.functional.normalize
        nn.functional.rms_norm renorm""",
    "losses": """nn.functional.binary_cross_entropy nn.functional.binary_cross_entropy_with_logits
        nn.functional.cosine_embedding_loss nn.functional.cosine_similarity nn.functional.cross_entropy
        nn.functional.gaussian_nll_loss nn.functional.hinge_embedding_loss nn.functional.huber_loss nn.functional.kl_div
        nn.functional.l1_loss nn.functional.margin_ranking_loss nn.functional.mse_loss nn.functional.nll_loss
        nn.functional.pairwise_distance nn.functional.poisson_nll_loss nn.functional.smooth_l1_loss
        nn.functional.soft_margin_loss nn.functional.triplet_margin_loss nn.functional.ctc_loss
        nn.functional.multi_margin_loss nn.functional.multilabel_soft_margin_loss""",
    "attention and linear": """nn.functional.bilinear nn.functional.linear nn.functional.multi_head_attention_forward
        nn.functional.scaled_dot_product_attention""",
    "convolution and pooling": """nn.functional.adaptive_avg_pool1d nn.functional.adaptive_avg_pool2d
        nn.functional.adaptive_avg_pool3d nn.functional.adaptive_max_pool1d nn.functional.adaptive_max_pool2d
        nn.functional.avg_pool1d nn.functional.avg_pool2d nn.functional.avg_pool3d nn.functional.conv1d
        nn.functional.conv2d nn.functional.conv3d nn.functional.conv_transpose1d nn.functional.conv_transpose2d
        nn.functional.conv_transpose3d nn.functional.grid_sample nn.functional.interpolate nn.functional.max_pool1d
        nn.functional.max_pool2d nn.functional.max_pool3d nn.functional.pad nn.functional.pixel_shuffle
        nn.functional.pixel_unshuffle nn.functional.unfold constant_pad_nd nn.functional.channel_shuffle
        nn.functional.upsample_bilinear nn.functional.upsample_nearest""",
    "embedding": "nn.functional.embedding nn.functional.embedding_bag nn.functional.one_hot",
    "comparison and bits": """allclose bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift
        bitwise_xor eq equal ge gt isclose isfinite isinf isnan le logical_and logical_not logical_or logical_xor lt
        ne signbit""",
    "creation and dtype": """arange bfloat16 bool double eye fill float full full_like half int linspace
        logspace long new_full new_ones new_zeros ones ones_like scalar_tensor to tril_indices triu_indices
        zeros zeros_like zero_""",
    "sorting and scans": """argsort cummax cummin cumprod cumsum cumulative_trapezoid diff histc kthvalue logcumsumexp
        msort sort topk trapezoid bincount""",
    "random": """bernoulli nn.functional.alpha_dropout nn.functional.dropout nn.functional.dropout2d normal rand_like
        randint randn randn_like uniform multinomial""",
}
"""Kind -> names in PyTorch's database, all of a name's variants included."""

_TIES = "PyTorch leaves open which of equal entries it picks, and the int64 and bool samples have equals"

GAPS: dict[str, str] = {
    "as_strided.partial_views": "the sample reaches memory outside its input; an array in JAX has none",
    "digamma": "the gradient is JAX's `polygamma`, which loses digits in float32 near the poles",
    "kthvalue": _TIES,
    "lgamma": "JAX's `lgamma` loses digits in float32 near its zeros at 1 and 2",
    "mode": _TIES,
    "nn.functional.ctc_loss": "no lowering: PyTorch's is one kernel with a backward of its own",
    "nn.functional.multi_head_attention_forward": "the sample saturates the softmax: rounding alone",
    "tensor_split": "PyTorch insists on int64 for sections given as a tensor, and JAX has 32 bits unless x64 is on",
    "topk": _TIES,
}
"""Op, or op and variant -> why some of its samples fail, in words."""

TOLERANCE = 1e-5


class Call(nn.Module):
    """The op as a module: its differentiable inputs are parameters, its other tensors the arguments of `forward`.

    `process` is the database's own: it takes from the outputs what is well defined (of eigenvectors, not the sign).
    """

    def __init__(self, op: Callable, args: tuple, kwargs: dict, process: Callable = lambda out: out):
        super().__init__()
        self.op, self.process = op, process
        leaves, self.structure = tree_flatten((args, kwargs))
        self.inputs: list[torch.Tensor] = []
        self.recipe: list[tuple[str, Any]] = []
        self.leaves = nn.ParameterList()
        placed: dict[int, tuple[str, Any]] = {}
        for leaf in leaves:
            if not torch.is_tensor(leaf):
                self.recipe.append(("constant", leaf))
                continue
            if id(leaf) not in placed:
                if leaf.requires_grad:
                    placed[id(leaf)] = ("parameter", len(self.leaves))
                    self.leaves.append(nn.Parameter(leaf.detach().clone()))
                else:
                    placed[id(leaf)] = ("input", len(self.inputs))
                    self.inputs.append(leaf.detach().clone())
            self.recipe.append(placed[id(leaf)])

    def forward(self, *inputs: torch.Tensor) -> Any:
        homes = {"parameter": self.leaves, "input": inputs}
        leaves = [value if kind == "constant" else homes[kind][value] for kind, value in self.recipe]
        args, kwargs = tree_unflatten(leaves, self.structure)
        out = self.process(self.op(*args, **kwargs))
        # A result that is an input itself, or a list subclass, comes back as a plain tensor or tuple.
        return tuple(out) if isinstance(out, (tuple, list)) else out


@dataclasses.dataclass
class Outcome:
    """What the samples of one op (or one variant of it) came to."""

    name: str
    kind: str
    total: int = 0
    passed: int = 0
    without_jit: int = 0
    """Of those passed: samples whose shapes depend on values, which pass outside `jit` only."""
    failures: list[str] = dataclasses.field(default_factory=list)


def entries(wanted: str | None = None) -> Iterator[tuple[str, str, Any]]:
    """(kind, name with variant, database entry) of every listed op, or of `wanted` alone."""
    database = importlib.import_module("torch.testing._internal.common_methods_invocations")
    # Its own version saves the state of every accelerator's generator, and torchax declares one that has none.
    database.wrapper_set_seed = seeded  # pyright: ignore[reportAttributeAccessIssue]
    kinds = {name: kind for kind, names in OPS.items() for name in names.split()}
    for entry in database.op_db:
        if (wanted is None and entry.name in kinds) or wanted in (entry.name, full_name(entry)):
            yield kinds.get(entry.name, "other"), full_name(entry), entry


def seeded(op: Callable, *args: Any, **kwargs: Any) -> Any:
    torch.manual_seed(42)
    return op(*args, **kwargs)


def full_name(entry: Any) -> str:
    return f"{entry.name}.{entry.variant_test_name}" if entry.variant_test_name else entry.name


def samples(entry: Any, limit: int) -> Iterator[tuple[tuple, dict, Callable]]:
    """Up to `limit` float32 samples spread over the database's, two of int64, two of bool where the op takes them."""
    for dtype, count in ((torch.float32, limit), (torch.int64, 2), (torch.bool, 2)):
        if dtype not in entry.dtypes:
            continue
        torch.manual_seed(0)
        differentiable = dtype.is_floating_point and entry.supports_autograd
        found = list(entry.sample_inputs("cpu", dtype, requires_grad=differentiable))
        for i in range(min(count, len(found))):
            sample = found[i * len(found) // min(count, len(found))]
            yield (sample.input, *sample.args), sample.kwargs, sample.output_process_fn_grad


def widened(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The same sample in float64."""

    def widen(t: torch.Tensor) -> torch.Tensor:
        return t.detach().double().requires_grad_(t.requires_grad) if t.dtype == torch.float32 else t

    return tree_map_only(torch.Tensor, widen, (args, kwargs))


def within(row: Row) -> bool:
    """Inputs and cotangents are of order 1 and float32 rounds that to 1e-7: no leaf is judged as smaller than 1e-2."""
    return row.error * row.scale <= row.tolerance * max(row.scale, 1e-2)


def reason(op: Callable, args: tuple, kwargs: dict, process: Callable) -> tuple[str | None, bool]:
    """(why this sample fails, or `None`; whether it ran under `jit`)."""
    module = Call(op, args, kwargs, process)
    jit = True
    try:
        try:
            report = bridge.verify(module, *module.inputs, tolerance=TOLERANCE)
        except bridge.BridgeError as error:
            if "traced tensor" not in str(error) and "depends on data" not in str(error):
                raise
            jit = False
            report = bridge.verify(module, *module.inputs, tolerance=TOLERANCE, jit=False)
        if not all(map(within, report.rows)):
            wide = Call(op, *widened(args, kwargs), process)
            try:
                judged = bridge.verify(module, *module.inputs, tolerance=TOLERANCE, jit=jit, double=wide)
            except RuntimeError:  # the op refuses one of the widened inputs
                judged = report
            report = judged
    except Exception as error:
        return f"{type(error).__name__}: {error}".split(" in the module", 1)[0].split("\n", 1)[0][:240], jit
    row = next((r for r in report.rows if not within(r)), None)
    if row is None:
        return None, jit
    return f"{row.kind} {row.name} is off by {row.error:.1e} of {row.scale:.1e}", jit


def survey(wanted: str | None, limit: int) -> Iterator[Outcome]:
    for kind, name, entry in entries(wanted):
        outcome = Outcome(name, kind)
        for args, kwargs, process in samples(entry, limit):
            if any(torch.is_tensor(t) and t.is_complex() for t in tree_flatten((args, kwargs))[0]):
                continue
            try:
                with torch.no_grad():
                    entry.op(*args, **kwargs)
            except Exception:  # PyTorch itself refuses the sample
                continue
            why, jit = reason(entry.op, args, kwargs, process)
            outcome.total += 1
            outcome.passed += why is None
            outcome.without_jit += why is None and not jit
            if why is not None:
                outcome.failures.append(why)
        yield outcome


@dataclasses.dataclass(frozen=True)
class Options:
    """Survey the bridge with PyTorch's own op database."""

    op: str | None = None
    """One op of the database, with or without its variant; every listed op if not given."""
    samples_per_op: int = 6
    """Float32 samples of each op (or variant)."""
    markdown: Path | None = None
    """Write the table as Markdown to this file."""


def summary(outcomes: list[Outcome]) -> str:
    passed, total = sum(o.passed for o in outcomes), sum(o.total for o in outcomes)
    whole = sum(o.passed == o.total for o in outcomes)
    return (
        f"{passed} of {total} samples pass ({passed / max(total, 1):.1%}); "
        f"{whole} of {len(outcomes)} ops pass whole ({whole / max(len(outcomes), 1):.1%})"
    )


def main(options: Options) -> int:
    warnings.simplefilter("ignore")
    jax.config.update("jax_disable_most_optimizations", True)  # compiling is nearly all of the time
    start, outcomes = time.perf_counter(), []
    for outcome in survey(options.op, options.samples_per_op):
        outcomes.append(outcome)
        print(
            f"{outcome.passed:3d}/{outcome.total:<3d} {outcome.name:<50} {next(iter(outcome.failures), '')}", flush=True
        )
        if options.op is not None:
            for failure in outcome.failures[1:]:
                print(f"        {failure}")
    print(summary(outcomes))
    print(f"{time.perf_counter() - start:.0f} s")
    if options.markdown is not None:
        options.markdown.write_text(markdown(outcomes, options))
    return 0 if all(o.passed == o.total or gap(o.name) for o in outcomes) else 1


def gap(name: str) -> str | None:
    return GAPS.get(name) or GAPS.get(name.rsplit(".", 1)[0])


def markdown(outcomes: list[Outcome], options: Options) -> str:
    lines = [
        "# Op survey",
        "",
        "PyTorch's own op database (`torch.testing._internal.common_methods_invocations.op_db`) through the bridge:",
        "outputs and the gradient of every float input, float32, with some int64 and bool samples, under `jax.jit`,",
        "compared at 1e-5 of the leaf's largest entry (or 8 times PyTorch's own float32-to-float64 difference, where",
        "that is more).",
        "",
        "```bash",
        f"python -m benchmarks.op_survey --markdown {options.markdown}",
        "```",
        "",
        f"{time.strftime('%Y-%m-%d')}, {platform.machine()} CPU, torch {torch.__version__}, jax {jax.__version__}: "
        f"**{summary(outcomes)}**.",
        "",
    ]
    short = [o for o in outcomes if o.passed < o.total]
    if short:
        lines += ["## Known gaps", "", "| op | passed | reason |", "|---|---|---|"]
        lines += [f"| `{o.name}` | {o.passed}/{o.total} | {gap(o.name) or o.failures[0]} |" for o in short]
        lines += [""]
    loose = [o for o in outcomes if o.without_jit]
    if loose:
        names = ", ".join(f"`{o.name}` ({o.without_jit})" for o in loose)
        lines += [
            "## Outside `jit` only",
            "",
            "The shape of the result depends on the values of an input, which `jit` does not know. Samples that pass",
            f"with concrete inputs: {names}.",
            "",
        ]
    lines += ["## By kind", "", "| kind | samples passed | ops passed whole |", "|---|---|---|"]
    for kind in dict.fromkeys(o.kind for o in outcomes):
        own = [o for o in outcomes if o.kind == kind]
        whole = sum(o.passed == o.total for o in own)
        lines.append(f"| {kind} | {sum(o.passed for o in own)}/{sum(o.total for o in own)} | {whole}/{len(own)} |")
    lines += ["", "## Every op", ""]
    for kind in dict.fromkeys(o.kind for o in outcomes):
        marks = [f"{o.name} {o.passed}/{o.total}" for o in outcomes if o.kind == kind]
        lines += [f"**{kind}**: {', '.join(marks)}", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(Options, description=__doc__)))
