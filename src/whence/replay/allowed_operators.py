"""The operators a program may use: base operators of aten that are pure functions of tensors, and
their in-place variants.

The list is curated by base name. An overload of a listed base is allowed when its schema takes only
tensors, numbers, dtypes and short words; `binding` checks that (no generator, no storage, no
stream, no `out=`). Left out on purpose: operators that read or write files, that use memory behind
a foreign pointer (`from_blob`, `set_`, `resize_`), that draw random numbers, or that communicate
with other processes.
"""

from __future__ import annotations

from typing import NamedTuple

from whence.frameworks.operator_names import words

# Views and other changes of shape only.
VIEWS = words("""
    alias as_strided broadcast_to chunk contiguous detach diagonal expand expand_as flatten hsplit
    vsplit dsplit imag lift_fresh lift movedim moveaxis narrow permute real reshape reshape_as
    select slice split split_with_sizes squeeze swapaxes swapdims t tensor_split transpose unbind
    unflatten unfold unsqueeze unsafe_chunk unsafe_split unsafe_split_with_sizes view view_as
    view_as_complex view_as_real _reshape_alias _unsafe_view _conj _neg_view conj resolve_conj
    resolve_neg adjoint matrix_H ravel numpy_T mT mH _conj_physical positive
""")

# New tensors from sizes and numbers.
CONSTRUCTORS = words("""
    arange eye empty empty_like empty_strided empty_permuted full full_like linspace logspace
    new_empty new_empty_strided new_full new_ones new_zeros ones ones_like scalar_tensor
    tril_indices triu_indices zeros zeros_like _efficientzerotensor hann_window hamming_window range
""")

POINTWISE = words("""
    abs absolute acos acosh add addcdiv addcmul angle arccos arccosh arcsin arcsinh arctan arctan2
    arctanh asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or
    bitwise_right_shift bitwise_xor ceil celu clamp clamp_max clamp_min clip clone complex
    conj_physical copysign cos cosh deg2rad digamma div divide elu eq erf erfc erfinv exp exp2 expm1
    fill fix float_power floor floor_divide fmax fmin fmod frac frexp gcd ge gelu glu greater
    greater_equal gt hardshrink hardsigmoid hardswish hardtanh heaviside hypot i0 igamma igammac
    isclose isfinite isinf isnan isneginf isposinf lcm ldexp le leaky_relu lerp less less_equal
    lgamma log log10 log1p log2 log_sigmoid log_sigmoid_forward logaddexp logaddexp2 logical_and
    logical_not logical_or logical_xor logit lt masked_fill maximum minimum mish mul multiply
    mvlgamma nan_to_num ne neg negative nextafter not_equal pow polygamma prelu _prelu_kernel
    rad2deg reciprocal relu relu6 remainder round rsqrt rsub selu sgn sigmoid sign signbit silu sin
    sinc sinh softplus softshrink special_entr special_erf special_erfc special_erfcx special_erfinv
    special_exp2 special_expit special_expm1 special_gammaln special_i0 special_i0e special_i1
    special_i1e special_log1p special_log_ndtr special_logit special_ndtr special_ndtri special_psi
    special_round special_sinc special_xlog1py special_xlogy special_zeta sqrt square sub subtract
    tan tanh threshold true_divide trunc where xlogy _to_copy to type_as polar
    fake_quantize_per_tensor_affine fake_quantize_per_channel_affine __and__ __or__ __xor__
    __lshift__ __rshift__
""")

REDUCTIONS = words("""
    all amax amin aminmax any argmax argmin argsort argwhere bincount bucketize count_nonzero cummax
    cummin cumprod cumsum cumulative_trapezoid diff histc kthvalue linalg_norm linalg_vector_norm
    log_softmax _log_softmax logcumsumexp logsumexp max mean median min mode msort nanmean nanmedian
    nansum nanquantile norm native_norm prod quantile searchsorted softmax _softmax _safe_softmax
    sort std std_mean sum topk trace trapezoid unique_consecutive unique_dim unique_dim_consecutive
    _unique _unique2 var var_mean dist linalg_matrix_norm frobenius_norm nuclear_norm
""")

CONTRACTIONS = words("""
    addbmm addmm addmv addr baddbmm bilinear bmm chain_matmul dot einsum ger inner kron linear
    matmul mm mv outer tensordot vdot _trilinear linalg_multi_dot linalg_vecdot cdist _cdist_forward
    _euclidean_dist pdist _pdist_forward cosine_similarity pairwise_distance _grouped_mm _scaled_mm
    _int_mm _addmm_activation conv1d conv2d conv3d conv_transpose1d conv_transpose2d
    conv_transpose3d conv_tbc convolution _convolution mkldnn_convolution cudnn_convolution
    miopen_convolution _convolution_mode slow_conv_transpose2d _slow_conv2d_forward thnn_conv2d
    conv_depthwise3d _conv_depthwise2d im2col col2im _mps_convolution cross linalg_cross
""")

LAYERS = words("""
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d _adaptive_avg_pool2d
    _adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d avg_pool1d
    avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d max_pool1d_with_indices
    max_pool2d_with_indices max_pool3d_with_indices max_unpool2d max_unpool3d mkldnn_max_pool2d
    alpha_dropout dropout feature_dropout native_dropout feature_alpha_dropout batch_norm
    native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training
    _native_batch_norm_legit_functional _batch_norm_impl_index _batch_norm_with_update
    cudnn_batch_norm miopen_batch_norm instance_norm group_norm native_group_norm layer_norm
    native_layer_norm rms_norm _fused_rms_norm embedding embedding_bag _embedding_bag
    _embedding_bag_forward_only embedding_renorm_ one_hot scaled_dot_product_attention
    _scaled_dot_product_attention_math _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention
    _scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable
    _scaled_dot_product_attention_math_for_mps _native_multi_head_attention
    _transformer_encoder_layer_fwd _transform_bias_rescale_qkv _masked_softmax lstm gru rnn_tanh
    rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell mkldnn_rnn_layer _thnn_fused_lstm_cell
    _thnn_fused_gru_cell channel_shuffle native_channel_shuffle pixel_shuffle
    pixel_unshuffle upsample_nearest1d upsample_nearest2d upsample_nearest3d
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
    upsample_linear1d upsample_bilinear2d
    upsample_trilinear3d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa
    grid_sampler grid_sampler_2d grid_sampler_3d affine_grid_generator pad constant_pad_nd
    reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d
    replication_pad3d _pad_circular _pad_enum cross_entropy_loss nll_loss nll_loss_forward
    nll_loss2d nll_loss2d_forward nll_loss_nd mse_loss l1_loss smooth_l1_loss huber_loss kl_div
    binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss margin_ranking_loss
    triplet_margin_loss
""")

INDEXING = words("""
    block_diag cartesian_prod cat combinations concat concatenate column_stack copy copy_ diag
    diag_embed diagonal_scatter dstack flip fliplr flipud gather hstack index index_add index_copy
    index_fill index_put _index_put_impl_ _unsafe_index _unsafe_index_put index_reduce index_select
    isin masked_scatter masked_select meshgrid nonzero nonzero_numpy put repeat repeat_interleave
    roll rot90 row_stack scatter scatter_add scatter_reduce select_scatter slice_scatter
    as_strided_scatter stack take take_along_dim tile tril triu unsafe_chunk vander vstack zero_
    fill_ zero unfold_copy view_copy permute_copy transpose_copy expand_copy slice_copy select_copy
    squeeze_copy unsqueeze_copy split_copy t_copy as_strided_copy detach_copy alias_copy
    segment_reduce _pack_padded_sequence
""")

SPECTRAL = words("""
    _fft_c2c _fft_c2r _fft_r2c fft_fft fft_ifft fft_rfft fft_irfft fft_fft2 fft_ifft2 fft_rfft2
    fft_irfft2 fft_fftn fft_ifftn fft_rfftn fft_irfftn fft_hfft fft_ihfft fft_fftshift fft_ifftshift
    fft_fftfreq fft_rfftfreq stft istft
""")

LINEAR_ALGEBRA = words("""
    cholesky linalg_cholesky linalg_cholesky_ex linalg_det _linalg_det linalg_eigh linalg_eigvalsh
    _linalg_eigh linalg_inv linalg_inv_ex inverse det logdet slogdet linalg_slogdet _linalg_slogdet
    linalg_matrix_exp matrix_exp linalg_matrix_power matrix_power linalg_pinv pinverse linalg_qr qr
    linalg_solve linalg_solve_ex _linalg_solve_ex linalg_solve_triangular triangular_solve
    cholesky_solve linalg_svd linalg_svdvals _linalg_svd linalg_lu linalg_lu_factor
    linalg_lu_factor_ex linalg_lu_solve linalg_diagonal
""")

# Gradients of the operators above.
BACKWARD = words("""
    _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward _cdist_backward
    _convolution_double_backward _embedding_bag_backward _embedding_bag_dense_backward
    _embedding_bag_per_sample_weights_backward _fused_rms_norm_backward _log_softmax_backward_data
    _masked_softmax_backward _pdist_backward _prelu_kernel_backward
    _scaled_dot_product_cudnn_attention_backward _scaled_dot_product_efficient_attention_backward
    _scaled_dot_product_flash_attention_backward
    _scaled_dot_product_flash_attention_for_cpu_backward
    _scaled_dot_product_fused_attention_overrideable_backward _slow_conv2d_backward
    _softmax_backward_data _thnn_fused_gru_cell_backward _thnn_fused_lstm_cell_backward_impl
    _upsample_bicubic2d_aa_backward _upsample_bilinear2d_aa_backward
    _upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward
    _upsample_nearest_exact3d_backward _weight_norm_interface _weight_norm_interface_backward
    adaptive_max_pool2d_backward adaptive_max_pool3d_backward avg_pool2d_backward
    avg_pool3d_backward batch_norm_backward binary_cross_entropy_backward conv_tbc_backward
    convolution_backward convolution_backward_overrideable cudnn_batch_norm_backward
    diagonal_backward elu_backward embedding_backward embedding_dense_backward
    fake_quantize_per_channel_affine_cachemask fake_quantize_per_channel_affine_cachemask_backward
    fake_quantize_per_tensor_affine_cachemask fake_quantize_per_tensor_affine_cachemask_backward
    gelu_backward glu_backward grid_sampler_2d_backward grid_sampler_3d_backward hardshrink_backward
    hardsigmoid_backward hardswish_backward hardtanh_backward huber_loss_backward
    index_select_backward leaky_relu_backward linear_backward log_sigmoid_backward logit_backward
    masked_scatter_backward masked_select_backward max_pool2d_with_indices_backward
    max_pool3d_with_indices_backward miopen_batch_norm_backward mish_backward mkldnn_linear_backward
    mkldnn_rnn_layer_backward mse_loss_backward multi_margin_loss_backward
    multilabel_margin_loss_backward native_batch_norm_backward native_dropout_backward
    native_group_norm_backward native_layer_norm_backward nll_loss2d_backward nll_loss_backward
    reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward
    replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward select_backward
    sigmoid_backward silu_backward slice_backward smooth_l1_loss_backward soft_margin_loss_backward
    softplus_backward softshrink_backward tanh_backward threshold_backward trace_backward
    unfold_backward upsample_bicubic2d_backward upsample_bilinear2d_backward
    upsample_linear1d_backward upsample_nearest1d_backward upsample_nearest2d_backward
    upsample_nearest3d_backward upsample_trilinear3d_backward value_selecting_reduction_backward
""")

# Steps of optimizers, on lists of tensors, and the fused ones.
FOREACH = frozenset(
    f"_foreach_{name}"
    for name in words("""
    abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min clone copy cos cosh div erf erfc
    exp expm1 floor frac lerp lgamma log log10 log1p log2 max maximum minimum mul neg norm pow
    reciprocal round rsqrt sigmoid sign sin sinh sqrt sub tan tanh trunc zero
""")
)
FUSED = words(
    "_fused_adagrad _fused_adam _fused_adamw _fused_sgd _amp_foreach_non_finite_check_and_unscale"
)

# These return a Python number; a program uses them as guards.
NUMBERS = frozenset(["_local_scalar_dense", "item", "is_nonzero", "equal", "allclose"])

# Their output sizes depend on the elements of their operands, not on shapes alone.
DATA_DEPENDENT = words("""
    nonzero nonzero_numpy argwhere masked_select _unique _unique2 unique_dim unique_consecutive
    unique_dim_consecutive repeat_interleave bincount index one_hot where
""")

LISTED = (
    VIEWS
    | CONSTRUCTORS
    | POINTWISE
    | REDUCTIONS
    | CONTRACTIONS
    | LAYERS
    | INDEXING
    | SPECTRAL
    | LINEAR_ALGEBRA
    | NUMBERS
)
LISTED |= BACKWARD | FOREACH | FUSED
IN_PLACE = POINTWISE | INDEXING | CONTRACTIONS | REDUCTIONS | FOREACH | FUSED
# prims that torch's own decompositions leave behind.
LISTED_PRIMS = words("""
    broadcast_in_dim convert_element_type iota squeeze transpose view_of rsqrt
""")

CAST = "whence.cast"


class OperatorName(NamedTuple):
    """The parts of an operator name such as "aten.add.Tensor"."""

    namespace: str
    base: str
    overload: str


OPTIMIZERS = frozenset(
    words("""
    ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax Muon NAdam RAdam RMSprop Rprop SGD
""")
)
