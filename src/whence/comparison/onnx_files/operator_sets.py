"""What the specification of ONNX says of attributes: their defaults, which inputs were attributes
in older operator sets, and where an operator changed its meaning.

Source: onnx.defs of onnx 1.23, all versions; `tests/comparison/test_onnx_files.py` checks this
against the installed one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_REDUCE = {"keepdims": 1, "noop_with_empty_axes": 0}
_KERNEL: dict[str, Any] = {"auto_pad": "NOTSET", "group": 1}
_POOL: dict[str, Any] = {"auto_pad": "NOTSET", "ceil_mode": 0}
_WINDOW = {"periodic": 1, "output_datatype": 1}
_RECURRENT: dict[str, Any] = {"direction": "forward", "layout": 0}
_NORM: dict[str, Any] = {"axis": -1, "epsilon": 9.999999747378752e-06, "stash_type": 1}

DEFAULTS: dict[str, dict[str, Any]] = {
    "AffineGrid": {"align_corners": 0},
    "ArgMax": {"axis": 0, "keepdims": 1, "select_last_index": 0},
    "ArgMin": {"axis": 0, "keepdims": 1, "select_last_index": 0},
    "Attention": {
        "is_causal": 0, "left_window_size": -1, "qk_matmul_output_mode": 0,
        "right_window_size": -1, "softcap": 0.0,
    },
    "AveragePool": {**_POOL, "count_include_pad": 0},
    "BatchNormalization": {
        "epsilon": 9.999999747378752e-06, "momentum": 0.8999999761581421, "training_mode": 0,
    },
    "BlackmanWindow": _WINDOW,
    "Cast": {"round_mode": "up", "saturate": 1},
    "CastLike": {"round_mode": "up", "saturate": 1},
    "Celu": {"alpha": 1.0},
    "ConcatFromSequence": {"new_axis": 0},
    "Conv": _KERNEL,
    "ConvInteger": _KERNEL,
    "ConvTranspose": _KERNEL,
    "CumSum": {"exclusive": 0, "reverse": 0},
    "DFT": {"inverse": 0, "onesided": 0},
    "DeformConv": {"group": 1, "offset_group": 1},
    "DepthToSpace": {"mode": "DCR"},
    "DequantizeLinear": {"axis": 1, "block_size": 0, "output_dtype": 0},
    "Elu": {"alpha": 1.0},
    "EyeLike": {"k": 0},
    "Flatten": {"axis": 1},
    "GRU": {**_RECURRENT, "linear_before_reset": 0},
    "Gather": {"axis": 0},
    "GatherElements": {"axis": 0},
    "GatherND": {"batch_dims": 0},
    "Gelu": {"approximate": "none"},
    "Gemm": {"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 0},
    "GridSample": {"align_corners": 0, "padding_mode": "zeros"},
    "GroupNormalization": {"epsilon": 9.999999747378752e-06, "stash_type": 1},
    "HammingWindow": _WINDOW,
    "HannWindow": _WINDOW,
    "HardSigmoid": {"alpha": 0.20000000298023224, "beta": 0.5},
    "InstanceNormalization": {"epsilon": 9.999999747378752e-06},
    "IsInf": {"detect_negative": 1, "detect_positive": 1},
    "LRN": {"alpha": 9.999999747378752e-05, "beta": 0.75, "bias": 1.0},
    "LSTM": {**_RECURRENT, "input_forget": 0},
    "LayerNormalization": _NORM,
    "LeakyRelu": {"alpha": 0.009999999776482582},
    "LpNormalization": {"axis": -1, "p": 2},
    "LpPool": {**_POOL, "p": 2},
    "MaxPool": {**_POOL, "storage_order": 0},
    "MeanVarianceNormalization": {"axes": [0, 2, 3]},
    "Mod": {"fmod": 0},
    "NonMaxSuppression": {"center_point_box": 0},
    "OneHot": {"axis": -1},
    "Pad": {"mode": "constant"},
    "QLinearConv": _KERNEL,
    "QuantizeLinear": {
        "axis": 1, "block_size": 0, "output_dtype": 0, "precision": 0, "saturate": 1,
    },
    "RMSNormalization": _NORM,
    "RNN": _RECURRENT,
    **dict.fromkeys(
        ("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean",
         "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare"), _REDUCE,
    ),
    "Reshape": {"allowzero": 0},
    "Resize": {
        "antialias": 0, "coordinate_transformation_mode": "half_pixel", "cubic_coeff_a": -0.75,
        "exclude_outside": 0, "extrapolation_value": 0.0,
        "keep_aspect_ratio_policy": "stretch", "mode": "nearest",
        "nearest_mode": "round_prefer_floor",
    },
    "ReverseSequence": {"batch_axis": 1, "time_axis": 0},
    "RoiAlign": {
        "mode": "avg", "output_height": 1, "output_width": 1, "sampling_ratio": 0,
        "spatial_scale": 1.0,
    },
    "RotaryEmbedding": {"interleaved": 0, "rotary_embedding_dim": 0},
    "STFT": {"onesided": 1},
    "ScatterElements": {"axis": 0, "reduction": "none"},
    "ScatterND": {"reduction": "none"},
    "Selu": {"alpha": 1.6732631921768188, "gamma": 1.0507010221481323},
    "Shape": {"start": 0},
    "Shrink": {"bias": 0.0, "lambd": 0.5},
    "Split": {"axis": 0},
    "SplitToSequence": {"axis": 0, "keepdims": 1},
    "Swish": {"alpha": 1.0},
    "ThresholdedRelu": {"alpha": 1.0},
    "TopK": {"axis": -1, "largest": 1, "sorted": 1},
    "Trilu": {"upper": 1},
    "Unique": {"sorted": 1},
}  # fmt: skip
"""The value of an attribute that a node does not state, where all versions agree."""

OF_GEMM = {"Add": {"beta": 1.0}, "MatMul": {"alpha": 1.0}}
"""What the parts of a Gemm have of it, where other nodes of their types have nothing."""

INPUT_WAS: dict[str, dict[int, str]] = {
    "Clip": {1: "min", 2: "max"},
    "Dropout": {1: "ratio"},
    "Pad": {1: "pads", 2: "value"},
    "ReduceSum": {1: "axes"}, "ReduceMean": {1: "axes"}, "ReduceMax": {1: "axes"},
    "ReduceMin": {1: "axes"}, "ReduceProd": {1: "axes"}, "ReduceL1": {1: "axes"},
    "ReduceL2": {1: "axes"}, "ReduceLogSum": {1: "axes"}, "ReduceLogSumExp": {1: "axes"},
    "ReduceSumSquare": {1: "axes"},
    "Reshape": {1: "shape"},
    "Slice": {1: "starts", 2: "ends", 3: "axes", 4: "steps"},
    "Split": {1: "split"},
    "Squeeze": {1: "axes"},
    "TopK": {1: "k"},
    "Unsqueeze": {1: "axes"},
    "Upsample": {1: "scales"},
}  # fmt: skip
"""Inputs that older versions have as attributes; constant ones are compared as these."""

NEW_MEANING: dict[str, tuple[int, ...]] = {
    "AveragePool": (19,),
    "BatchNormalization": (7, 14),
    "GroupNormalization": (21,),
    "Hardmax": (13,),
    "LogSoftmax": (13,),
    "Resize": (11,),
    "RoiAlign": (16,),
    "Softmax": (13,),
}
"""Versions from which on equal attributes mean something else."""

AXES = frozenset(("axis", "axes"))
"""Attributes that count axes, of the first input, from its end where they are negative."""

OF_OUTPUT = frozenset(("Unsqueeze",))
"""Operators whose axes are those of what they make."""

KEEPS_RANK = frozenset((
    "Abs", "AveragePool", "BatchNormalization", "Cast", "Ceil", "Clip", "Concat", "Conv",
    "ConvTranspose", "Cos", "CumSum", "Elu", "Erf", "Exp", "Floor", "Gelu", "GroupNormalization",
    "HardSigmoid", "HardSwish", "Hardmax", "InstanceNormalization", "LayerNormalization",
    "LeakyRelu", "Log", "LogSoftmax", "LpNormalization", "MaxPool", "Mish", "Neg", "Pad",
    "RMSNormalization", "Reciprocal", "Relu", "Resize", "Selu", "Sigmoid", "Sin", "Slice",
    "Softmax", "Softplus", "Split", "Sqrt", "Tanh", "TopK", "Trilu",
))  # fmt: skip
"""Operators that make what has as many axes as their input."""

COMMUTE = frozenset(("Add", "Mul", "Min", "Max", "Sum", "And", "Or", "Xor", "Equal", "Mean"))


def meaning(op_type: str, opset: int, attributes: Mapping[str, Any]) -> int:
    """Which meaning of an operator with these attributes a version has, counted from 0."""
    if op_type == "AveragePool" and not attributes.get("ceil_mode"):
        return 0
    return sum(opset >= version for version in NEW_MEANING.get(op_type, ()))


def last_axis_default(op_type: str, opset: int) -> int:
    """The default axis of Softmax and its kind."""
    return -1 if opset >= NEW_MEANING[op_type][-1] else 1
