"""Nodes of ONNX models with attributes and operands drawn at random, one function a family."""

import numpy as np
from onnx import helper
from onnx_nodes import node

FAMILIES = {}
RUNTIME = {"domain": "com.microsoft"}
BOTH = {"": 17, "com.microsoft": 1}
"""Opsets of a model with operators of ONNX Runtime."""


def family(function):
    FAMILIES[function.__name__] = function
    return function


class Draw:
    """Numbers, arrays and choices of one generator."""

    def __init__(self, seed):
        self.random = np.random.default_rng(seed)

    def floats(self, *shape):
        return self.random.standard_normal(shape).astype(np.float32)

    def positive(self, *shape):
        return np.abs(self.floats(*shape)) + np.float32(0.1)

    def between(self, low, high):
        return int(self.random.integers(low, high + 1))

    def several(self, count, low, high):
        return [self.between(low, high) for _ in range(count)]

    def pick(self, *choices):
        return choices[self.random.integers(len(choices))]

    def whole(self, low, high, shape, dtype=np.int64):
        return self.random.integers(low, high, shape).astype(dtype)

    def flags(self, *shape):
        return self.random.integers(0, 2, shape).astype(bool)

    def codes(self, *shape, dtype=np.uint8):
        limits = np.iinfo(dtype)
        return self.random.integers(limits.min, limits.max + 1, shape).astype(dtype)

    def weights(self, *shape, dtype):
        """Codes of a weight. Signed ones are of seven bits: a processor without the instructions
        for it adds pairs of products of unsigned and signed codes in 16 bits, which saturate.
        """
        codes = self.codes(*shape, dtype=dtype)
        return codes // 2 if dtype is np.int8 else codes

    def scale(self, *shape):
        return self.random.uniform(0.01, 0.1, shape).astype(np.float32)

    def axes(self, rank, least=0):
        return [int(a) for a in self.random.permutation(rank)[: self.between(least, rank)]]

    def maybe(self, value):
        return value if self.pick(True, False) else None


def ints(*values):
    return np.array(values, np.int64)


def trimmed(operands):
    """Without the absent ones at the end."""
    while operands[-1] is None:
        operands = operands[:-1]
    return operands


# ---- element by element


@family
def unary(d):
    op = d.pick(
        *[
            "Abs",
            "Neg",
            "Ceil",
            "Floor",
            "Round",
            "Sqrt",
            "Exp",
            "Log",
            "Sin",
            "Cos",
            "Tan",
            "Asin",
            "Acos",
            "Atan",
            "Sinh",
            "Cosh",
            "Tanh",
            "Asinh",
            "Acosh",
            "Atanh",
            "Erf",
            "Sigmoid",
            "Sign",
            "Reciprocal",
            "Relu",
            "IsNaN",
            "Mish",
            "HardSwish",
            "Identity",
            "Softplus",
            "Softsign",
            "LeakyRelu",
            "Elu",
            "Selu",
            "Celu",
            "ThresholdedRelu",
            "HardSigmoid",
            "Gelu",
            "Shrink",
            "IsInf",
            "Dropout",
        ]
    )
    x = (d.floats(3, 5) * d.pick(0.3, 2, 20)).astype(np.float32)
    if op in ("Sqrt", "Log", "Acosh"):
        x = np.abs(x) + np.float32(1 if op == "Acosh" else 0)
    elif op in ("Asin", "Acos", "Atanh"):
        x = np.tanh(x) * np.float32(0.99)
    elif op in ("Exp", "Sinh", "Cosh"):
        x = np.clip(x, -20, 20)
    elif op == "IsInf":
        x[0, 0], x[1, 1] = np.inf, -np.inf
    attributes = {
        "Selu": {"alpha": d.pick(None, 1.2), "gamma": d.pick(None, 1.3)},
        "HardSigmoid": {"alpha": d.pick(None, 0.3), "beta": d.pick(None, 0.4)},
        "Gelu": {"approximate": d.pick(None, "tanh", "none")},
        "Shrink": {"lambd": d.pick(None, 0.7), "bias": d.pick(None, 0.2)},
        "IsInf": {"detect_positive": d.between(0, 1), "detect_negative": d.between(0, 1)},
    }.get(op, {})
    if op in ("LeakyRelu", "Elu", "Celu", "ThresholdedRelu"):
        attributes = {"alpha": d.pick(None, 0.3, 1.7)}
    return node(op, [x], **attributes), {"": 20}


@family
def binary(d):
    op = d.pick(
        *[
            "Add",
            "Sub",
            "Mul",
            "Div",
            "Pow",
            "Mod",
            "Equal",
            "Less",
            "Greater",
            "LessOrEqual",
            "GreaterOrEqual",
            "Max",
            "Min",
            "Sum",
            "Mean",
            "PRelu",
        ]
    )
    shape = d.several(d.between(1, 4), 1, 3)
    smaller = [d.pick(1, n) for n in shape][d.between(0, len(shape)) :]
    dtype = np.float32 if op in ("Sum", "Mean", "PRelu") else d.pick(
        np.float32, np.int32, np.int64
    )  # fmt: skip
    signs = (1, 1) if op == "Pow" else (d.pick(1, -1), d.pick(1, -1))
    a, b = (d.whole(1, 30, s, dtype) * dtype(sign) for s, sign in zip((shape, smaller), signs))
    if dtype is np.float32:
        a, b = a / dtype(10), b / dtype(10)
    elif op == "Pow":
        b = b % dtype(4)
    attributes = {}
    if op == "Mod":
        attributes["fmod"] = 1 if dtype is np.float32 else d.between(0, 1)
    operands = [a, b, a] if op in ("Max", "Min", "Sum", "Mean") and d.flags() else [a, b]
    return node(op, operands, **attributes), {"": d.pick(13, 14, 16)}


@family
def bits(d):
    op = d.pick("And", "Or", "Xor", "Not", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitwiseNot",
                "BitShift")  # fmt: skip
    if op in ("And", "Or", "Xor", "Not"):
        a, b, opset = d.flags(3, 4), d.flags(4), 7
    elif op == "BitShift":
        dtype = d.pick(np.uint8, np.uint32)
        a, b, opset = d.whole(0, 200, (3, 4), dtype), d.whole(0, 7, 4, dtype), 11
    else:
        dtype = d.pick(np.int32, np.uint16, np.uint8)
        a, b, opset = d.whole(0, 100, (3, 4), dtype), d.whole(0, 100, 4, dtype), 18
    attributes = {"direction": d.pick("LEFT", "RIGHT")} if op == "BitShift" else {}
    return node(op, [a] if op.endswith("Not") else [a, b], **attributes), {"": opset}


@family
def casts(d):
    x = (d.floats(3, 4) * 10).astype(d.pick(np.float32, np.float64, np.int32, np.int8))
    codes = (1, 3, 5, 6, 7, 9, 10, 11, 16)  # to unsigned ones a negative number is not defined
    if d.flags():
        return node("Cast", [x], to=d.pick(*codes)), {"": 13}
    like = np.zeros(2, d.pick(np.float32, np.int64, np.float16))
    return node("CastLike", [x, like]), {"": 15}


@family
def selection(d):
    op = d.pick("Where", "Clip")
    x = d.floats(*d.several(d.between(1, 4), 1, 4))
    if op == "Where":
        return node(op, [d.flags(*x.shape), x, d.floats(1)]), {"": 16}
    dtype = d.pick(np.float32, np.int32)
    low, high = np.array(-0.5, dtype), np.array(1, dtype)
    limits = d.pick([], [low], [None, high], [low, high], [high, low])
    if dtype is np.float32 and d.flags():
        return node(op, [x], min=d.maybe(-0.5), max=d.maybe(0.7)), {"": 6}
    return node(op, [(x * 3).astype(dtype), *limits]), {"": 13}


# ---- shapes


@family
def shapes(d):
    op = d.pick("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Expand", "Tile",
                "Concat", "Split", "Trilu", "CenterCropPad")  # fmt: skip
    rank = d.between(1, 4)
    x = d.floats(*d.several(rank, 1, 4))
    if op == "Reshape":
        return node(op, [x, d.pick(ints(-1), ints(0, -1), ints(1, -1, 1))]), {"": d.pick(5, 14)}
    if op == "Flatten":
        return node(op, [x], axis=d.between(-rank, rank)), {"": 13}
    if op in ("Squeeze", "Unsqueeze"):
        x, new = d.floats(2, 1, 3, 1), d.flags()
        axes = d.pick(None, [1], [-1, 1], [3]) if op == "Squeeze" else d.pick([0], [-1], [1, -1])
        given = [ints(*axes)] if new and axes else []
        return node(op, [x, *given], axes=None if new else axes), {"": 13 if new else 11}
    if op == "Transpose":
        return node(op, [x], perm=d.maybe([int(a) for a in d.random.permutation(rank)])), {"": 13}
    if op == "Expand":
        shape = [n if n > 1 else d.between(1, 3) for n in x.shape][d.between(0, rank - 1) :]
        return node(op, [x, ints(*shape)]), {"": 13}
    if op == "Tile":
        return node(op, [x, ints(*d.several(rank, 0, 2))]), {"": 13}
    if op == "Concat":
        return node(op, [x, x, x], axis=d.between(-rank, rank - 1)), {"": 13}
    if op == "Trilu":
        k = d.pick([], [np.array(d.between(-6, 6), np.int64)])
        return node(op, [d.floats(2, 4, 5), *k], upper=d.pick(None, 0, 1)), {"": 14}
    if op == "CenterCropPad":
        return node(op, [x, ints(*d.several(rank, 1, 6))]), {"": 18}
    return _split(d)


def _split(d):
    opset, x = d.pick(2, 13, 18), d.floats(2, 6, 3)
    sizes = d.pick(None, [1, 2, 3], [2, 4])
    if sizes is not None:
        given = [ints(*sizes)] if opset >= 13 else []
        attribute = sizes if opset < 13 else None
        return node("Split", [x, *given], len(sizes), axis=1, split=attribute), {"": opset}
    if opset == 18:
        return node("Split", [d.floats(2, 7)], 4, axis=1, num_outputs=4), {"": opset}
    return node("Split", [x], d.pick(2, 3), axis=1), {"": opset}


@family
def constructors(d):
    op = d.pick("Shape", "Size", "ConstantOfShape", "Constant", "Range", "EyeLike",
                "DepthToSpace", "SpaceToDepth")  # fmt: skip
    if op == "Shape":
        start, end = d.pick(None, d.between(-5, 5)), d.pick(None, d.between(-5, 5))
        return node(op, [d.floats(2, 3, 4)], start=start, end=end), {"": 15}
    if op == "Size":
        return node(op, [d.floats(2, 3, 4)]), {"": 13}
    if op == "ConstantOfShape":
        filled = [None, helper.make_tensor("v", 7, [1], [5]), helper.make_tensor("v", 1, [1], [2])]
        return node(op, [ints(2, 3)], value=d.pick(*filled)), {"": 9}
    if op == "Constant":
        held = {
            "value_ints": [3, 1, 2],
            "value_float": 2.5,
            "value": helper.make_tensor("v", 1, [2, 2], [1.0, 2.0, 3.0, float("-inf")]),
        }
        name = d.pick(*held)
        return node(op, [], **{name: held[name]}), {"": 13}
    if op == "Range":
        dtype = d.pick(np.float32, np.int64, np.int32)
        numbers = d.between(-5, 5), d.between(-5, 9), d.pick(1, 2, -1, -3)
        factors = (0.37, 0.71, 0.31) if dtype is np.float32 else (1, 1, 1)
        return node(op, [np.array(a * b, dtype) for a, b in zip(numbers, factors)]), {"": 11}
    if op == "EyeLike":
        k, dtype = d.pick(None, d.between(-3, 4)), d.pick(None, 7, 1)
        return node(op, [d.floats(3, 4)], k=k, dtype=dtype), {"": 9}
    if op == "DepthToSpace":
        return node(op, [d.floats(2, 8, 2, 3)], blocksize=2, mode=d.pick(None, "DCR", "CRD")), {
            "": 13
        }
    return node(op, [d.floats(2, 2, 4, 6)], blocksize=2), {"": 13}


@family
def pads(d):
    rank, mode = d.between(1, 4), d.pick("constant", "reflect", "edge", "wrap")
    x = d.floats(*d.several(rank, 2, 5))
    opset = 19 if mode == "wrap" else d.pick(2, 11, 13, 18, 19, 21)
    least = -1 if mode == "constant" else 0
    sizes = [d.between(least, min(3, x.shape[i % rank] - 1)) for i in range(2 * rank)]
    if opset == 2:
        return node("Pad", [x], mode=mode, pads=sizes, value=1.5), {"": 2}
    operands = [x, ints(*sizes), d.maybe(np.array(2.5, np.float32))]
    if opset >= 18 and d.flags():
        axes = d.axes(rank, 1)
        operands[1] = ints(*(sizes[a] for a in axes), *(sizes[a + rank] for a in axes))
        operands.append(ints(*axes))
    return node("Pad", trimmed(operands), mode=mode), {"": opset}


@family
def slices(d):
    rank = d.between(1, 4)
    x, axes = d.floats(*d.several(rank, 1, 6)), d.axes(rank, 1)
    starts = [d.between(-8, 8) for _ in axes]
    if d.pick(True, False, False):
        ends = [d.between(-8, 8) for _ in axes]
        return node("Slice", [x], starts=starts, ends=ends, axes=axes), {"": d.pick(1, 9)}
    steps = [d.pick(1, 1, 2, -1, -2, 3) for _ in axes]
    ends = [d.pick(d.between(-8, 8), -(2**63), 2**63 - 1 if s > 0 else -9) for s in steps]
    axes = [a - d.pick(0, rank) for a in axes]
    return node("Slice", [x, ints(*starts), ints(*ends), ints(*axes), ints(*steps)]), {
        "": d.pick(10, 13)
    }


# ---- picking and putting


@family
def gathers(d):
    op = d.pick("Gather", "GatherElements", "GatherND")
    rank = d.between(1, 4)
    x, axis = d.floats(*d.several(rank, 1, 5)), d.between(-rank, rank - 1)
    extent = x.shape[axis]
    if op == "Gather":
        shape = d.several(d.between(0, 3), 1, 3)
        return node(op, [x, d.whole(-extent, extent, shape, d.pick(np.int32, np.int64))],
                    axis=axis), {"": 13}  # fmt: skip
    if op == "GatherElements":
        shape = [d.between(1, n) for n in x.shape]
        shape[axis] = d.between(1, 6)
        return node(op, [x, d.whole(-extent, extent, shape)], axis=axis), {"": 13}
    batch = d.between(0, rank - 1)
    count = d.between(1, rank - batch)
    rows = [*x.shape[:batch], 3]
    columns = [d.whole(-x.shape[batch + i], x.shape[batch + i], rows) for i in range(count)]
    return node(op, [x, np.stack(columns, -1)], batch_dims=batch), {"": 13}


@family
def scatters(d):
    op, rank = d.pick("ScatterElements", "ScatterND", "Scatter"), d.between(1, 4)
    x = d.floats(*d.several(rank, 1, 5))
    reduction = d.pick(None, "add", "mul", "max", "min") if op != "Scatter" else None
    if op == "ScatterND":
        count, rows = d.between(1, rank), 1 if reduction is None else d.between(1, 4)
        columns = [d.whole(-x.shape[i], x.shape[i], [rows]) for i in range(count)]
        updates = d.floats(rows, *x.shape[count:])
        return node(op, [x, np.stack(columns, -1), updates], reduction=reduction), {"": 18}
    axis = d.between(-rank, rank - 1)
    shape = [d.between(1, n) for n in x.shape]
    indices = d.whole(-x.shape[axis], x.shape[axis], shape)
    if reduction is None:  # which of two equal numbers wins is not defined
        along = np.arange(shape[axis]).reshape([-1] + [1] * (rank - 1))
        indices = np.broadcast_to(np.moveaxis(along, 0, axis), shape).astype(np.int64)
    opset = 9 if op == "Scatter" else 18
    axis = axis % rank if op == "Scatter" else axis
    return node(op, [x, indices, d.floats(*shape)], axis=axis, reduction=reduction), {"": opset}


@family
def picks(d):
    op = d.pick("OneHot", "NonZero", "Compress", "ReverseSequence", "TopK")
    if op == "OneHot":
        depth = np.array(5, np.int64).reshape(d.pick((), (1,)))
        indices = d.whole(-5, 6, (2, 3), d.pick(np.int64, np.float32))
        values = np.array([0.5, 2.5], np.float32)
        return node(op, [indices, depth, values], axis=d.pick(None, 0, 1, -1)), {"": 11}
    if op == "NonZero":
        return node(op, [d.flags(*d.several(3, 1, 4)).astype(np.float32)]), {"": 13}
    if op == "Compress":
        return node(op, [d.floats(3, 4), np.array([1, 0, 1], bool)], axis=d.pick(None, 0, 1)), {
            "": 11
        }
    if op == "ReverseSequence":
        batch = d.between(0, 1)
        return node(op, [d.floats(4, 4, 2), d.whole(1, 5, 4)], batch_axis=batch,
                    time_axis=1 - batch), {"": 10}  # fmt: skip
    rank = d.between(1, 3)
    x, axis = d.whole(0, 5, d.several(rank, 2, 5), d.pick(np.float32, np.int64)), d.between(0, 0)
    axis = d.between(-rank, rank - 1)
    k = d.between(1, x.shape[axis])
    return node(op, [x, ints(k)], 2, axis=axis, largest=d.pick(None, 0, 1)), {"": 11}


# ---- along axes


@family
def reductions(d):
    op = d.pick(*(f"Reduce{n}" for n in (
        "Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "LogSum", "LogSumExp", "SumSquare")
    ))  # fmt: skip
    rank, opset = d.between(0, 4), d.pick(8, 11, 13, 18)
    x = d.positive(*d.several(rank, 1, 4))
    if d.pick(True, False, False):
        x = d.whole(1, 2 if op == "ReduceProd" else 20, x.shape, d.pick(np.int32, np.int64))
    axes = [a - d.pick(0, rank) if opset >= 11 else a for a in d.axes(rank)]
    as_input = opset >= 18 or (op == "ReduceSum" and opset >= 13)
    given = [ints(*axes)] if as_input and d.flags() else []
    return node(
        op,
        [x, *given],
        keepdims=d.pick(None, 0, 1),
        noop_with_empty_axes=d.pick(None, 0, 1) if as_input else None,
        axes=None if as_input else axes or None,
    ), {"": opset}


@family
def along(d):
    op = d.pick("ArgMax", "ArgMin", "CumSum", "Softmax", "LogSoftmax", "Hardmax")
    rank = d.between(1, 4)
    x, axis = d.floats(*d.several(rank, 1, 4)), d.between(-rank, rank - 1)
    if op.startswith("Arg"):
        x, opset = d.whole(0, 4, x.shape, d.pick(np.float32, np.int32)), d.pick(11, 12, 13)
        last = d.pick(None, 0, 1) if opset >= 12 else None
        return node(op, [x], axis=axis, keepdims=d.pick(None, 0, 1), select_last_index=last), {
            "": opset
        }
    if op == "CumSum":
        flags = {"exclusive": d.between(0, 1), "reverse": d.between(0, 1)}
        return node(op, [x, np.array(axis, np.int64)], **flags), {"": 14}
    opset = d.pick(1, 11, 13)
    return node(op, [x], axis=axis if opset >= 11 else axis % rank), {"": opset}


@family
def norms(d):
    op = d.pick(
        *[
            "LayerNormalization",
            "InstanceNormalization",
            "GroupNormalization",
            "LpNormalization",
            "LRN",
            "BatchNormalization",
            "MeanVarianceNormalization",
            "RMSNormalization",
            "SimplifiedLayerNormalization",
        ]
    )
    rank, epsilon = d.between(3, 5), d.pick(None, 0.1)
    x = d.floats(2, d.pick(4, 6), *d.several(rank - 2, 2, 5))
    channels, axis = x.shape[1], d.between(-rank, -1)
    inner = x.shape[axis:]
    if op == "LayerNormalization":
        operands = [x, d.floats(*inner), *d.pick([], [d.floats(*inner)])]
        return node(op, operands, d.pick(1, 3), axis=axis, epsilon=epsilon), {"": 17}
    if op == "SimplifiedLayerNormalization":
        operands = [x, d.floats(x.shape[-1])]
        return node(op, operands, d.pick(1, 2), axis=-1, epsilon=epsilon or 1e-6), {"": 17}
    if op == "RMSNormalization":
        return node(op, [x, d.floats(*inner)], axis=axis, epsilon=epsilon), {"": 23}
    if op == "InstanceNormalization":
        operands = [x, d.floats(channels), d.floats(channels)]
        return node(op, operands, epsilon=epsilon), {"": d.pick(6, 22)}
    if op == "GroupNormalization":
        groups, opset = d.pick(1, 2), d.pick(18, 21)
        count = groups if opset == 18 else channels
        operands = [x, d.floats(count), d.floats(count)]
        return node(op, operands, num_groups=groups, epsilon=epsilon), {"": opset}
    if op == "LpNormalization":
        return node(op, [x], axis=axis, p=d.pick(1, 2)), {"": d.pick(1, 22)}
    if op == "LRN":
        x = d.floats(2, channels, 3, 3)
        return node(op, [x], size=d.pick(1, 3, 5), alpha=0.3, beta=0.6, bias=1.5), {"": 13}
    if op == "BatchNormalization":
        operands = [x, *(d.floats(channels) for _ in range(3)), d.positive(channels)]
        return node(op, operands, epsilon=epsilon), {"": d.pick(7, 9, 14, 15)}
    return node(op, [d.floats(2, 3, 4, 4)], axes=d.pick(None, [0, 2, 3], [1, 2])), {"": 13}


# ---- products


@family
def products(d):
    op = d.pick("MatMul", "Gemm", "FusedGemm", "FusedMatMul", "TransposeMatMul", "Einsum", "Det")
    m, k, n = d.several(3, 1, 5)
    if op == "MatMul":
        batch = d.several(d.between(0, 2), 1, 2)
        smaller = [d.pick(1, b) for b in batch][d.between(0, len(batch)) :]
        a, b = d.floats(*batch, m, k), d.floats(*smaller, k, n)
        a, b = d.pick((a, b), (a, b), (d.floats(k), b), (a, d.floats(k)))
        return node(op, [a, b]), {"": 13}
    if op == "Det":
        return node(op, [d.floats(2, 3, 3)]), {"": 22}
    if op == "Einsum":
        equation, shapes = d.pick(
            ("bhqd,bhkd->bhqk", [(2, 3, 4, 5), (2, 3, 6, 5)]),
            ("ij,jk", [(3, 4), (4, 2)]),
            ("...ij,...jk->...ik", [(2, 3, 4), (2, 4, 5)]),
            ("ii->i", [(3, 3)]),
            ("abc,cd->abd", [(2, 3, 4), (4, 5)]),
            ("bij->bji", [(2, 3, 4)]),
        )
        return node(op, [d.floats(*s) for s in shapes], equation=equation), {"": 12}
    swap_a, swap_b, factor = d.between(0, 1), d.between(0, 1), d.pick(None, 0.5)
    a, b = (k, m) if swap_a else (m, k), (n, k) if swap_b else (k, n)
    flags = {"transA": swap_a, "transB": swap_b, "alpha": factor}
    if op.endswith("Gemm"):
        addend = d.pick([], [d.pick(d.floats(n), d.floats(m, n), d.floats(m, 1), d.floats(1))])
        flags["beta"] = d.pick(None, 0.3)
        if op == "FusedGemm":
            flags |= {"activation": d.pick("Relu", "Sigmoid", "Tanh", "LeakyRelu")} | RUNTIME
            leaks = flags["activation"] == "LeakyRelu"
            flags["activation_alpha"] = 0.2 if leaks else None
        return node(op, [d.floats(*a), d.floats(*b), *addend], **flags), {**BOTH, "": 13}
    batch = [2, 3][: d.between(1, 2)]
    a, b = [*batch, *a], [*batch, *b]
    if op == "FusedMatMul":
        moved = d.between(0, 1), d.between(0, 1)
        a, b = ([s[-2], *batch, s[-1]] if move else s for s, move in zip((a, b), moved))
        flags |= {"transBatchA": moved[0], "transBatchB": moved[1]}
    return node(op, [d.floats(*a), d.floats(*b)], **flags, **RUNTIME), BOTH


def _windows(d, count, *, dilated=True):
    """Kernel, strides, dilations, auto_pad and pads that go together."""
    auto = d.pick(None, None, "SAME_UPPER", "SAME_LOWER", "VALID", "NOTSET")
    same = auto in ("SAME_UPPER", "SAME_LOWER")
    return {
        "kernel_shape": d.several(count, 1, 3),
        "strides": d.several(count, 1, 3),
        "dilations": [1] * count if same or not dilated else d.several(count, 1, 2),
        "auto_pad": auto,
    }


@family
def convolutions(d):
    count, group = d.between(1, 3), d.pick(1, 1, 2, 3)
    channels, made = group * d.between(1, 2), group * d.between(1, 2)
    windows = _windows(d, count)
    if windows["auto_pad"] in (None, "NOTSET") and d.flags():
        windows["pads"] = d.several(2 * count, 0, 2)
    x = d.floats(d.between(1, 2), channels, *d.several(count, 5, 9))
    weight = d.floats(made, channels // group, *windows["kernel_shape"])
    operands = [x, weight, *d.pick([], [d.floats(made)])]
    return node("Conv", operands, group=group, **windows), {"": d.pick(1, 11, 22)}


@family
def transposed_convolutions(d):
    count, group = d.between(1, 3), d.pick(1, 1, 2)
    channels, each = group * d.between(1, 2), d.between(1, 2)
    windows = _windows(d, count)
    kernel, strides, dilations = (windows[k] for k in ("kernel_shape", "strides", "dilations"))
    x = d.floats(d.between(1, 2), channels, *d.several(count, 3, 6))
    extra = d.maybe([d.between(0, max(min(s, n) - 1, 0)) for s, n in zip(strides, dilations)])
    wanted = [
        (x.shape[2 + i] - 1) * strides[i] + (kernel[i] - 1) * dilations[i] + 1
        + (extra[i] if extra else 0) - d.between(0, 2)
        for i in range(count)
    ]  # fmt: skip
    if d.pick(True, False, False) and min(wanted) > 0:
        windows["output_shape"] = wanted
    elif windows["auto_pad"] in (None, "NOTSET"):
        windows["pads"] = d.several(2 * count, 0, 1)
    operands = [x, d.floats(channels, each, *kernel), *d.pick([], [d.floats(each * group)])]
    return node("ConvTranspose", operands, group=group, output_padding=extra, **windows), {
        "": d.pick(1, 11, 22)
    }


@family
def pools(d):
    op, count = d.pick("MaxPool", "AveragePool", "LpPool"), d.between(1, 3)
    opset = d.pick(10, 11, 12, 18, 19, 22)
    dilated = opset >= {"MaxPool": 10, "AveragePool": 19, "LpPool": 18}[op]
    windows = _windows(d, count, dilated=dilated)
    if not dilated:
        del windows["dilations"]
    if windows["auto_pad"] in (None, "NOTSET") and d.flags():
        kernel = windows["kernel_shape"]
        windows["pads"] = [d.between(0, kernel[i % count] - 1) for i in range(2 * count)]
    if op != "LpPool" or opset >= 18:
        windows["ceil_mode"] = d.between(0, 1)
    x, outputs = d.floats(d.between(1, 2), d.between(1, 3), *d.several(count, 5, 9)), 1
    if op == "AveragePool":
        windows["count_include_pad"] = d.between(0, 1)
    elif op == "LpPool":
        windows["p"] = d.between(1, 3)
    else:
        outputs, windows["storage_order"] = d.pick(1, 2), d.between(0, 1)
        x = d.codes(*x.shape, dtype=np.int8) if opset >= 12 and d.flags() else x
    return node(op, [x], outputs, **windows), {"": opset}


@family
def global_pools(d):
    op = d.pick("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool", "MaxUnpool", "Col2Im")
    if op == "MaxUnpool":
        indices = ints(0, 3, 9, 14).reshape(1, 1, 2, 2)
        return node(op, [d.floats(1, 1, 2, 2), indices], kernel_shape=[2, 2], strides=[2, 2]), {
            "": 11
        }
    if op == "Col2Im":
        return node(op, [d.floats(1, 8, 12), ints(4, 5), ints(2, 2)]), {"": 18}
    p = d.pick(None, 1, 3) if op == "GlobalLpPool" else None
    return node(op, [d.floats(2, 3, *d.several(d.between(1, 3), 1, 4))], p=p), {"": 11}


# ---- resizing


@family
def resizes(d):
    mode, opset = d.pick("nearest", "linear", "cubic"), d.pick(10, 11, 13, 18, 19)
    count = 2 if mode == "cubic" else d.pick(1, 2, 2, 3)
    x = d.floats(1, 2, *d.several(count, 2, 7))
    scales = np.array([1, 1, *(d.pick(0.5, 0.6, 1, 1.5, 2, 2.3) for _ in range(count))], np.float32)
    if opset == 10:
        return node("Resize", [x, scales], mode="linear" if mode == "cubic" else mode), {"": 10}
    places = ["half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric"]
    places += ["half_pixel_symmetric"] if opset >= 19 else []
    places += ["tf_half_pixel_for_nn"] if opset == 11 else []
    flags = {"mode": mode, "coordinate_transformation_mode": d.pick(*places)}
    if mode == "nearest":
        flags["nearest_mode"] = d.pick("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
    if mode == "cubic":
        flags |= {"cubic_coeff_a": d.pick(-0.5, -0.75), "exclude_outside": d.between(0, 1)}
    nothing = np.array([], np.float32) if opset < 13 else None
    if d.flags():
        return node("Resize", [x, nothing, scales], **flags), {"": opset}
    sizes = ints(*x.shape[:2], *d.several(count, 1, 11))
    if opset >= 18 and d.flags():
        flags["keep_aspect_ratio_policy"] = d.pick("not_larger", "not_smaller")
        flags["axes"], sizes = list(range(2, 2 + count)), sizes[2:]
    return node("Resize", [x, nothing, nothing, sizes], **flags), {"": opset}


@family
def samples(d):
    op = d.pick("Upsample", "GridSample", "AffineGrid")
    if op == "Upsample":
        scales = [1.0, 1.0, *(d.pick(1.0, 1.5, 2.0, 2.3, 3.0) for _ in range(2))]
        x, mode = d.floats(1, 2, *d.several(2, 2, 7)), d.pick("nearest", "linear")
        if d.flags():
            return node(op, [x], mode=mode, scales=scales), {"": 7}
        return node(op, [x, np.array(scales, np.float32)], mode=mode), {"": 9}
    corners = d.between(0, 1)
    if op == "AffineGrid":
        return node(op, [d.floats(2, 2, 3), ints(2, 3, 4, 5)], align_corners=corners), {"": 20}
    opset = d.pick(16, 20, 22)
    count = 2 if opset == 16 else d.pick(2, 2, 3)
    kinds = ("bilinear", "nearest", "bicubic") if opset == 16 else ("linear", "nearest", "cubic")
    grid = d.floats(2, *d.several(count, 2, 5), count) * np.float32(1.2)
    padding = d.pick("zeros", "border", "reflection")
    operands = [d.floats(2, 2, *d.several(count, 2, 6)), grid]
    return node(op, operands, mode=d.pick(*kinds), padding_mode=padding, align_corners=corners), {
        "": opset
    }
