"""Sample arguments of every ATen operation with a lowering in the bridge."""

import torch

aten = torch.ops.aten


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X = numbers(3, 4)
Y = numbers(3, 4, seed=1)
LABELS = torch.tensor([2, 0, 3])
UNIT = torch.sigmoid(X)
IMAGES = numbers(2, 3, 7, 6)
VOLUME = numbers(1, 2, 5, 6, 4)
SQUARE = numbers(2, 4, 4)
POSITIVE = SQUARE @ SQUARE.mT + 4 * torch.eye(4, dtype=torch.float64)
INDEX = torch.tensor([[0, 2, 1, 0], [1, 1, 0, 2]])
LARGE = (torch.tensor([2**30 + 1, -7]), 4)
SIZED = ([2, 3],)

CASES = {
    **{
        getattr(aten, name).default: [((argument,), {})]
        for argument, names in (
            (X, "clone lift_fresh_copy angle selu empty_like ones_like sigmoid erf erfc special_log_ndtr silu tanh"),
            (X, "sinc abs sign sgn median exp2"),
            (3 * X, "hardsigmoid hardswish special_modified_bessel_i1 special_i1"),
            (9 * X, "special_bessel_j0 special_bessel_j1"),
            (9 * X.abs() + 0.1, "special_bessel_y0 special_bessel_y1"),
            (SQUARE, "_linalg_det _linalg_slogdet"),
        )
        for name in names.split()
    },
    **{key: [((X, Y), {}), ((X, Y), {"alpha": 2})] for key in (aten.add.Tensor, aten.sub.Tensor)},
    **{key: [((X, 0.3, 2), {})] for key in (aten.add.Scalar, aten.sub.Scalar)},
    aten.mul.Tensor: [((X, Y), {}), ((X, 0.3), {})],
    aten.mul.Scalar: [((X, 0.3), {})],
    aten.addr.default: [((numbers(3, 5), numbers(3), numbers(5)), {"beta": 0.5, "alpha": 2})],
    aten.addbmm.default: [((numbers(3, 5), numbers(2, 3, 4), numbers(2, 4, 5)), {"beta": 0.5, "alpha": 2})],
    aten.addmm.default: [((numbers(3), X, Y.T), {}), ((numbers(3, 3), X, Y.T), {"beta": 0.5, "alpha": 2})],
    aten.addmv.default: [((numbers(3), X, numbers(4)), {}), ((numbers(3), X, numbers(4)), {"beta": 2, "alpha": 0.5})],
    aten.linear.default: [((X, Y, numbers(3)), {}), ((numbers(2, 3, 4), Y), {}), ((X, numbers(4)), {})],
    aten.scaled_dot_product_attention.default: [((numbers(2, 3, 5, 8), numbers(2, 3, 6, 8), numbers(2, 3, 6, 8)), {})],
    aten._to_copy.default: [((X,), {"dtype": torch.int32}), ((X,), {})],
    aten.diagonal_scatter.default: [
        ((X, numbers(3)), {}),
        ((SQUARE, numbers(4, 2), -2, 2, 0), {}),
        ((SQUARE, numbers(2, 3), 1, -1, -2), {}),
    ],
    aten.permute_copy.default: [((X, [1, 0]), {}), ((numbers(2, 3, 4), [0, -1, 1]), {}), ((X[0, 0], []), {})],
    aten.masked_scatter_backward.default: [((X, X > 0, [2, 5]), {}), ((X, X[0] > 0, [13]), {})],
    aten.fake_quantize_per_tensor_affine_cachemask.default: [((X, 0.25, 2, -5, 6), {})],
    aten.copy.default: [((X.int(), torch.arange(4)), {})],
    aten.softplus.default: [((X,), {}), ((X, 2, 10), {})],
    aten.mish.default: [((X * 3,), {})],
    aten.elu.default: [((X,), {}), ((X, 0.5), {})],
    aten.celu.default: [((X,), {}), ((X, 0.5), {})],
    aten.convolution.default: [
        ((numbers(2, 4, 5, 6), numbers(6, 2, 3, 2), numbers(6), [2, 1], [1, 0], [1, 2], False, [0, 0], 2), {}),
        ((numbers(2, 4, 5, 6), numbers(4, 3, 3, 3), numbers(6), [2], [1], [2], True, [1], 2), {}),
        ((numbers(2, 4, 7), numbers(4, 2, 4), None, [3], [2], [1], True, [2], 1), {}),
    ],
    aten.fmod.Tensor: [((X, Y), {}), ((torch.tensor([2**30 + 1, -7]), torch.tensor([4, 3])), {})],
    aten.fmod.Scalar: [((X, 0.7), {}), (LARGE, {})],
    aten.zeros.default: [(SIZED, {}), (SIZED, {"dtype": torch.int64})],
    aten.empty.memory_format: [(SIZED, {})],
    aten.empty_strided.default: [(([2, 3], [3, 1]), {})],
    aten.new_empty.default: [((X, [2, 3]), {})],
    aten.ones.default: [(SIZED, {})],
    aten.full.default: [(([2, 3], 1.5), {}), (([2], 3), {})],
    aten.zeros_like.default: [((X,), {}), ((X,), {"dtype": torch.bool})],
    aten.full_like.default: [((X, 2.5), {})],
    aten.new_zeros.default: [((X, [2, 3]), {})],
    aten.new_ones.default: [((X, [2, 3]), {})],
    aten.new_full.default: [((X, [2, 3], 1.5), {})],
    aten.scalar_tensor.default: [((2.5,), {})],
    aten.masked_fill.Scalar: [((X, X > 0, 2.0), {})],
    aten.masked_fill.Tensor: [((X, X > 0, torch.tensor(2.0, dtype=torch.float64)), {})],
    aten._softmax.default: [((X, 1, False), {}), ((SQUARE, 0, False), {})],
    aten._log_softmax.default: [((X, -1, False), {})],
    aten.nll_loss_forward.default: [
        ((X, LABELS, None, 1, -100), {}),
        ((X, LABELS, None, 2, 2), {}),
        ((X[0], LABELS[1], None, 1, -100), {}),
    ],
    aten.nll_loss2d_forward.default: [((numbers(2, 4, 1, 3), LABELS.expand(2, 1, 3), None, 0, 2), {})],
    aten.native_layer_norm.default: [
        ((X, [4], numbers(4), numbers(4, seed=1), 1e-5), {}),
        ((X, [4], None, None, 1e-5), {}),
    ],
    aten.native_group_norm.default: [((numbers(2, 4, 3), numbers(4), numbers(4, seed=1), 2, 4, 3, 2, 1e-5), {})],
    aten.rsqrt.default: [((UNIT,), {})],
    aten.erfinv.default: [((UNIT - 0.5,), {})],
    aten.gelu.default: [((X,), {}), ((X,), {"approximate": "tanh"})],
    aten.glu.default: [((X,), {}), ((SQUARE, 1), {})],
    aten.clamp.default: [((X, -0.5, 0.5), {}), ((X, None, 0.5), {}), ((X, -0.5), {})],
    aten.clamp.Tensor: [((X, UNIT - 1, UNIT), {}), ((X, None, UNIT), {})],
    aten.clamp_min.default: [((X, 0.2), {})],
    aten.clamp_min.Tensor: [((X, Y), {})],
    aten.clamp_max.default: [((X, 0.2), {})],
    aten.clamp_max.Tensor: [((X, Y), {})],
    aten.hardtanh.default: [((X,), {}), ((X, -0.5, 0.25), {})],
    aten.leaky_relu.default: [((X, 0.1), {})],
    aten.fmax.default: [((X, Y), {})],
    aten.fmin.default: [((X, Y), {})],
    aten.pow.Tensor_Tensor: [((UNIT, Y), {})],
    aten.pow.Tensor_Scalar: [((UNIT, 1.7), {}), ((X, 3), {}), ((X, -2), {}), ((X, 0), {})],
    aten.xlogy.Tensor: [((X, UNIT), {})],
    aten.max.dim: [((X, 1), {}), ((X, 0, True), {})],
    aten.min.dim: [((X, 1), {})],
    aten.cummax.default: [((X, 1), {})],
    aten.cummin.default: [((X, 0), {})],
    aten.cumsum.default: [((X, 1), {}), ((INDEX, 0), {}), ((INDEX > 0, 1), {})],
    aten.logcumsumexp.default: [((X, 1), {})],
    aten.std.correction: [((X, [1]), {"correction": 1}), ((X,), {"correction": 0})],
    aten.std_mean.correction: [((X, [1]), {"correction": 1, "keepdim": True})],
    aten.linalg_vector_norm.default: [((X, p, [1]), {}) for p in (2, 1, 3, 0.5, float("inf"), -float("inf"), 0)],
    aten.dist.default: [((X, Y, 2), {}), ((X, Y, 1), {})],
    aten._cdist_forward.default: [((X, numbers(5, 4, seed=2), 2.0, None), {})],
    aten.binary_cross_entropy.default: [
        ((UNIT, UNIT.flip(0)), {}),
        ((UNIT, UNIT.flip(0)), {"weight": UNIT.round(), "reduction": 2}),
    ],
    aten.linalg_cholesky_ex.default: [((POSITIVE,), {}), ((POSITIVE,), {"upper": True})],
    aten._linalg_eigh.default: [((POSITIVE,), {})],
    aten._linalg_solve_ex.default: [((SQUARE, numbers(2, 4, 3)), {}), ((SQUARE, numbers(2, 3, 4)), {"left": False})],
    aten.max_pool2d_with_indices.default: [
        ((IMAGES, [3, 2], [2, 1], [1, 0], [1, 2], True), {}),
        ((IMAGES, [3], [2]), {}),
    ],
    aten.max_pool3d_with_indices.default: [((VOLUME, [2, 3, 2], [2, 2, 1]), {}), ((VOLUME, [2], [1], [1], [2]), {})],
    aten.adaptive_max_pool2d.default: [((IMAGES, [3, 4]), {})],
    aten.adaptive_max_pool3d.default: [((VOLUME, [2, 3, 3]), {})],
    aten.avg_pool1d.default: [((numbers(2, 3, 7), [3], [2], [1], True), {})],
    aten.avg_pool2d.default: [((IMAGES, [3, 2], [2, 2], [1, 1], True, False), {})],
    aten.avg_pool3d.default: [((VOLUME, [2, 3, 2]), {"divisor_override": 5})],
    aten.scatter_reduce.two: [
        ((X, 0, INDEX, Y[:2], reduce), {"include_self": include})
        for reduce in ("sum", "prod", "mean", "amax", "amin")
        for include in (True, False)
    ],
    # PyTorch has no gradient for the first argument.
    aten.scatter.reduce: [((X.int(), 0, INDEX, Y[:2].int()), {"reduce": r}) for r in ("add", "multiply")],
    aten.index_put.default: [
        ((X, [torch.tensor([2, 0]), None], Y[:2]), {}),
        ((X, [INDEX[0], None], numbers(4, 4), True), {}),
        ((X, [X > 0], numbers()), {}),
        ((X > 0, [INDEX[0]], numbers(4, 4) > 0, True), {}),
    ],
    aten.scatter_add.default: [((X, 0, INDEX, Y[:2]), {})],
    aten.index_reduce.default: [((X, 0, torch.tensor([1, 1, 0]), Y, "prod"), {})],
    aten.index_select.default: [((X, 1, torch.tensor([3, 0])), {}), ((X, 0, torch.tensor(1)), {})],
    aten.gather.default: [((X, 0, INDEX), {}), ((X, -1, INDEX), {})],
    aten.index_add.default: [((X, 1, torch.tensor([1, 1, 0, 3]), Y), {"alpha": 0.5})],
    aten.index_copy.default: [
        ((X, 1, torch.tensor([3, 0]), Y[:, :2]), {}),
        ((X, -1, torch.tensor(1), Y[:, :1]), {}),
        ((numbers(), 0, torch.tensor([0]), numbers(1)), {}),
    ],
    aten.slice_scatter.default: [((X, Y[:, :2], -1, 1, 3), {}), ((X, Y[:2], 0, -3, 9, 2), {})],
    aten.take.default: [((X, torch.tensor([[0, 5], [11, -1]])), {})],
    aten.repeat.default: [((X, [2, 1]), {}), ((X, [2, 1, 3]), {}), ((X, [0, 1]), {}), ((X[0, 0], [3]), {})],
    aten._unsafe_index.Tensor: [((X, [None, torch.tensor([1, 1, -1])]), {})],
    aten.sum.default: [((X,), {}), ((INDEX,), {"dtype": torch.float64})],
    aten.sum.dim_IntList: [((X, [1]), {}), ((SQUARE, [0, -1], True), {}), ((X > 0, [0]), {})],
    aten.mean.default: [((X,), {}), ((INDEX,), {"dtype": torch.float64})],
    aten.mean.dim: [((X, [1]), {}), ((SQUARE, [0, -1], True), {}), ((X > 0, [0]), {"dtype": torch.float64})],
    aten.cumprod.default: [((X, 1), {}), ((INDEX, 1), {})],
    aten.kthvalue.default: [((X, 2), {}), ((SQUARE, 3, 1, True), {})],
    **{
        op: [(pair, {"rounding_mode": mode}) for pair in ((X, other), LARGE) for mode in ("trunc", "floor")]
        for op, other in ((aten.div.Tensor_mode, Y), (aten.div.Scalar_mode, 0.7))
    },
    aten._adaptive_avg_pool2d.default: [((IMAGES, [3, 4]), {}), ((IMAGES, [1, 1]), {})],
    aten._adaptive_avg_pool3d.default: [((VOLUME, [2, 3, 3]), {})],
    aten.linalg_lu.default: [((SQUARE,), {}), ((numbers(2, 3, 5),), {})],
    aten.lu_unpack.default: [((SQUARE, torch.tensor([[2, 2, 4, 4], [1, 3, 3, 4]], dtype=torch.int32)), {})],
    aten.linalg_householder_product.default: [((numbers(2, 5, 3), UNIT[:2, :3]), {})],
    aten.bucketize.Tensor: [((Y, X[0].sort().values), {}), ((Y, X[0].sort().values), {"right": True})],
    aten.bucketize.Scalar: [((0.25, X[0].sort().values), {})],
    **{
        getattr(aten, f"special_{kind}").default: [((X, torch.tensor([0, 1, 2, 3])), {})]
        for kind in (
            *("chebyshev_polynomial_t", "chebyshev_polynomial_u", "hermite_polynomial_h", "hermite_polynomial_he"),
            "laguerre_polynomial_l",
        )
    },
    aten.acosh.default: [((X.abs() + 1.5,), {})],
    aten.nan_to_num.default: [((X,), {}), ((torch.where(X > 0, X, torch.nan), 2.0), {})],
    aten.elu_backward.default: [((Y, 0.7, 1.2, 0.9, result, X), {}) for result in (False, True)],
    aten.topk.default: [((X, 2), {}), ((X, 2, 0, False), {})],
    aten.searchsorted.Tensor: [((X.sort(1).values, Y), {"right": True}), ((X[0].sort().values, Y), {})],
    aten.searchsorted.Scalar: [((X[0].sort().values, 0.25), {})],
}
"""Maps an op to (arguments, keywords) of its samples, in float64."""

UNDEFINED = {aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default}
"""Ops whose values are undefined; only the shape is compared."""

WORKSPACE = {aten._linalg_det.default: 1, aten._linalg_slogdet.default: 2, aten._linalg_solve_ex.default: 1}
"""Maps an op to the number of outputs that are results; the others are for PyTorch's backward."""

NAMES_ELSEWHERE = """
relu softshrink special_entr logit polygamma digamma lgamma special_erfcx i0 maximum minimum logaddexp logaddexp2
div.Tensor hypot atan2 copysign.Tensor copysign.Scalar _prelu_kernel smooth_l1_loss huber_loss amax amin
remainder.Tensor remainder.Scalar remainder.Scalar_Tensor pow.Scalar xlogy.Scalar_Self special_xlog1py
special_xlog1py.self_scalar special_xlog1py.other_scalar aminmax max min median.dim nanmedian.dim nanmedian mode sort
sort.stable var.correction var_mean.correction xlogy.Scalar_Other
floor_divide floor_divide.Scalar log_sigmoid_forward log_sigmoid_backward linalg_eig _grouped_mm
_standard_gamma_grad _dirichlet_grad nonzero_static scatter.value_reduce fake_quantize_per_channel_affine_cachemask
_fake_quantize_per_tensor_affine_cachemask_tensor_qparams _weight_norm_interface _ctc_loss _ctc_loss.Tensor
fractional_max_pool2d fractional_max_pool3d max_unpool2d max_unpool3d _upsample_bilinear2d_aa
_upsample_bicubic2d_aa _linalg_eigvals linalg_inv_ex linalg_lu_factor_ex _efficientzerotensor polar complex
_euclidean_dist _fft_c2r nextafter put multilabel_margin_loss_forward mkldnn_rnn_layer _pdist_forward _safe_softmax
embedding histc linalg_pinv.atol_rtol_tensor linalg_qr cholesky_solve cholesky_inverse max_pool2d_with_indices_backward
max_pool3d_with_indices_backward adaptive_max_pool2d_backward adaptive_max_pool3d_backward
fractional_max_pool2d_backward fractional_max_pool3d_backward
"""
_ops = (each.partition(".") for each in NAMES_ELSEWHERE.split())
ELSEWHERE = {getattr(getattr(aten, op), overload or "default") for op, _, overload in _ops}
ELSEWHERE |= {torch.ops.prims.copy_strided.default, torch.ops.prims.convert_element_type.default}
"""Ops with other tests: `test_special_points.py` for the first five lines, `test_lowerings.py` for those that PyTorch
supports only in float32, `test_selected_rows.py` for grouped products, `test_autograd_inside.py` for pooling backward,
`test_rare_operations.py`, `test_second_derivatives.py`, `test_complex.py`, `test_unusual_arguments.py`,
`test_gradients.py`, `test_narrow_dtypes.py`."""
