"""The ops of PyTorch's database by kind, the known gaps among them, and what is out of the survey's scope."""

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
"""Maps a kind to names in PyTorch's database that are common in models; a name includes all of its variants."""

BEGINNINGS: dict[str, tuple[str, ...]] = {
    "Fourier transforms, complex numbers and windows": (
        "fft.", "stft", "istft", "conj", "resolve_", "view_as_", "complex", "real", "imag", "angle", "polar", "cdouble",
        "cfloat", "chalf", "H", "mH", "isreal", "signal.windows.", "vdot",
    ),
    "special functions": ("special.", "i0", "igamma", "mvlgamma", "polygamma", "erfcx"),
    "factorisations and least squares": (
        "linalg.", "cholesky", "lu", "qr", "geqrf", "ormqr", "svd", "pca_", "pinverse", "triangular_solve", "logdet",
        "matrix_exp", "cov", "corrcoef",
    ),
    "masked reductions": ("masked.",),
    "copies of views, private and in-place forms": (
        "_softmax_backward_data", "_native_batch", "_batch_norm", "_unsafe", "_chunk_cat", "unsafe_", "resize_",
        "alias_copy", "as_strided_", "diagonal_copy", "expand_copy", "narrow_copy", "permute_copy", "squeeze_copy",
        "split_with_sizes_copy", "t_copy", "transpose_copy", "unbind_copy", "unfold_copy", "unsqueeze_copy",
        "view_copy", "native_", "grid_sampler_", "max_pool2d_with", "__r", "torch.ops.aten.",
    ),
    "memory, sparse and special hardware": (
        "empty", "new_empty", "sparse.", "to_sparse", "_segment_reduce", "torch._scaled_mm", "jiterator_",
        "nonzero_static", "hash_tensor",
    ),
    "random": ("cauchy", "exponential", "geometric", "log_normal", "randint_like", "nn.functional.rrelu",
        "nn.functional.dropout3d", "nn.functional.feature_alpha_dropout", "nn.functional.fractional_max_pool"),
}  # fmt: skip
"""Maps a kind to the beginnings of names that are not in `OPS`."""

_KINDS = {name: kind for kind, names in OPS.items() for name in names.split()}


def kind_of(name: str) -> str:
    """Returns the kind of an entry of the database."""
    return _KINDS.get(name) or next((kind for kind, starts in BEGINNINGS.items() if name.startswith(starts)), "rare")


_UNINITIALISED = "uninitialised memory has no values to compare"
_SPARSE = "sparse tensors have no counterpart in JAX's arrays"
OUT_OF_SCOPE: dict[str, str] = {
    "empty": _UNINITIALISED,
    "new_empty": _UNINITIALISED,
    "sparse.": _SPARSE,
    "to_sparse": _SPARSE,
    "jiterator_": "it compiles a kernel in CUDA's language",
    "torch._scaled_mm": "PyTorch has only float8 samples",
    "torch.ops.aten._flash_attention_forward": "it is a kernel for GPUs",
    "torch.ops.aten._efficient_attention_forward": "it is a kernel for GPUs",
    "chalf": "PyTorch's own sum of complex32 numbers fails on a CPU",
}
"""Maps beginnings of names to the reason why the survey does not cover these entries."""


def out_of_scope(name: str) -> str | None:
    return next((why for start, why in OUT_OF_SCOPE.items() if name.startswith(start)), None)


_HERMITIAN = "the samples are not Hermitian; PyTorch's gradient mixes the matrix and its triangle"
_INT64 = "PyTorch fills masked entries with the limits of int64, which 32 bits do not hold"
_POLES = "JAX's function is wrong below -7, where the bridge returns nan; at its poles it is nan or the limit"
_ON_CPU = "the saved mean and deviation are float32, as PyTorch's are on a GPU; on a CPU they are bfloat16 there"
_BRANCH = "both are logarithms of the same number; JAX's is the principal one, PyTorch's may differ by whole turns"
_WINDOWS = "several windows keep the same entry; its derivative is that of any of them"
_TIES = "PyTorch does not specify which of equal entries it returns, and small types have many"

GAPS: dict[str, str] = {
    "bfloat16: matrix_exp": "JAX has no bfloat16 form; PyTorch's own result of these samples is nan",
    "bfloat16: native_batch_norm": _ON_CPU,
    "bfloat16: native_layer_norm": _ON_CPU,
    "complex64: logaddexp": _BRANCH,
    "complex64: logcumsumexp": _BRANCH,
    "complex64: renorm": "PyTorch's own gradient with the infinity norm is nan",
    "forward mode: logcumsumexp": "at entries of 1e4, float32 rounds the exponents of the derivative to 1e-3",
    "forward mode: nn.functional.max_unpool1d": _WINDOWS,
    "forward mode: nn.functional.max_unpool2d": _WINDOWS,
    "forward mode: nn.functional.max_unpool3d": _WINDOWS,
    "as_strided.partial_views": "the sample reads memory outside its input, which a JAX array does not have",
    "digamma": "the result at 0 is nan, where PyTorch returns an infinity",
    "kthvalue": _TIES,
    "linalg.pinv.hermitian": _HERMITIAN,
    "masked.amax": _INT64,
    "masked.amin": _INT64,
    "masked.logsumexp": _INT64,
    "polygamma": _POLES,
    "special.polygamma": _POLES,
    "special.zeta": "JAX's function is nan at some poles, where PyTorch returns an infinity",
    "lgamma": "JAX's `lgamma` loses digits in float32 near its zeros at 1 and 2",
    "nn.functional.multi_head_attention_forward": "the sample saturates the softmax, so only rounding remains",
    "tensor_split": "PyTorch requires int64 for sections given as a tensor, but JAX has 32 bits unless x64 is enabled",
    "topk": _TIES,
    "torchax: as_strided_scatter": "PyTorch's own gradient of it is wrong",
    "torchax: linalg.pinv.hermitian": _HERMITIAN,
    "torchax: nn.functional.max_unpool2d": _WINDOWS,
    "torchax: nn.functional.max_unpool3d": _WINDOWS,
}
"""Maps an op (or `column: op`), with or without its variant, to the reason why some of its samples fail."""
