"""Recurrent, quantised and fused nodes with attributes and operands drawn at random."""

import numpy as np
from onnx_draws import BOTH, RUNTIME, family, ints, trimmed
from onnx_nodes import node

_ONE = {"LeakyRelu", "Elu", "ThresholdedRelu"}
_TWO = {"HardSigmoid", "ScaledTanh"}


@family
def recurrent(d):
    op = d.pick("RNN", "GRU", "LSTM")
    steps, batch, width, hidden = d.several(4, 1, 4)
    direction = d.pick("forward", "reverse", "bidirectional")
    turns = 2 if direction == "bidirectional" else 1
    rows = {"RNN": 1, "GRU": 3, "LSTM": 4}[op] * hidden
    state = (turns, batch, hidden)
    operands = [
        d.floats(steps, batch, width),
        d.floats(turns, rows, width),
        d.floats(turns, rows, hidden),
        d.maybe(d.floats(turns, 2 * rows)),
        d.maybe(d.whole(1, steps + 1, batch, np.int32)),
        d.maybe(d.floats(*state)),
    ]
    if op == "LSTM":
        operands += [d.maybe(d.floats(*state)), d.maybe(d.floats(turns, 3 * hidden))]
    flags = {
        "direction": direction,
        "hidden_size": hidden,
        "clip": d.pick(None, None, float(d.random.uniform(0.3, 1))),
        "linear_before_reset": d.between(0, 1) if op == "GRU" else None,
        "input_forget": d.pick(None, None, 1) if op == "LSTM" else None,
    }
    if d.flags():
        count = {"RNN": 1, "GRU": 2, "LSTM": 3}[op] * turns
        names = [d.pick("Relu", "Tanh", "Sigmoid", "Softsign", *_ONE, *_TWO) for _ in range(count)]
        with_beta = [n for n in names if n in _TWO]
        with_alpha = [n for n in names if n in _ONE | _TWO]
        flags["activations"] = names
        flags["activation_alpha"] = [float(d.random.uniform(0.1, 0.9)) for _ in with_alpha] or None
        flags["activation_beta"] = [float(d.random.uniform(0.1, 0.9)) for _ in with_beta] or None
    outputs = 3 if op == "LSTM" else 2
    return node(op, trimmed(operands), outputs, **flags), {"": d.pick(7, 14, 22)}


@family
def coded_recurrent(d):
    steps, batch, width, hidden = d.between(1, 4), d.between(1, 3), d.between(2, 6), d.between(2, 5)
    turns, dtype = d.between(1, 2), d.pick(np.int8, np.uint8)
    columns = 4 * hidden if d.flags() else None

    def factors(shape):
        zero = d.codes(*shape, dtype=dtype) if columns is None else np.zeros(shape, dtype)
        return [d.scale(*shape), zero]

    shape = (turns, columns) if columns and dtype is np.int8 else (turns,)
    operands = [
        d.floats(steps, batch, width),
        d.weights(turns, width, 4 * hidden, dtype=dtype),
        d.weights(turns, hidden, 4 * hidden, dtype=dtype),
        d.maybe(d.floats(turns, 8 * hidden)),
        None,
        *(d.maybe(d.floats(turns, batch, hidden)) for _ in "hc"),
        None,
        *factors(shape),
        *factors(shape),
    ]
    flags = {"hidden_size": hidden, "direction": "bidirectional" if turns == 2 else "forward"}
    return node("DynamicQuantizeLSTM", operands, 3, **flags, **RUNTIME), BOTH


# ---- codes


@family
def codes(d):
    op = d.pick("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear")
    if op == "DynamicQuantizeLinear":
        return node(op, [d.floats(3, 4) * np.float32(d.pick(0, 1, 3))], 3), {"": 11}
    opset = d.pick(10, 13, 19, 21)
    dtypes = (np.uint8, np.int8, np.int16, np.uint16) if opset >= 21 else (np.uint8, np.int8)
    dtype, axis = d.pick(*dtypes), d.between(-3, 2)
    by = d.pick("all", "axis", "block") if opset >= 21 else d.pick("all", "axis")
    by = "all" if opset < 13 else by
    axis = 2 if by == "block" else axis
    shape = {"all": (), "axis": ((2, 3, 8)[axis],), "block": (2, 3, 2)}[by]
    x = d.codes(2, 3, 8, dtype=dtype) if op == "DequantizeLinear" else d.floats(2, 3, 8)
    bare = dtype is np.uint8 or op == "DequantizeLinear"
    zero = [] if bare and d.flags() else [d.codes(*shape, dtype=dtype)]
    flags = {"axis": axis if opset >= 13 else None, "block_size": 4 if by == "block" else None}
    return node(op, [x, d.scale(*shape), *zero], **flags), {"": opset}


@family
def products_of_codes(d):
    op = d.pick("MatMulInteger", "QLinearMatMul", "ConvInteger", "QLinearConv")
    dtype, by_channel = d.pick(np.uint8, np.int8), d.flags()
    if op.endswith(("MatMul", "MatMulInteger")):
        m, k, n = d.between(1, 5), d.between(1, 9), d.between(1, 5)
        a, b = d.codes(m, k), d.weights(k, n, dtype=dtype)
        shape = (n,) if by_channel else ()
        zero = d.codes(*shape, dtype=dtype)
        if op == "MatMulInteger":
            return node(op, [a, b, *d.pick([], [d.codes(), zero])]), {"": 10}
        operands = [a, d.scale(), d.codes(), b, d.scale(*shape), zero, d.scale(), d.codes()]
        return node(op, operands), {"": d.pick(10, 21)}
    group = d.pick(1, 2)
    channels, made = group * d.between(1, 2), group * d.between(1, 2)
    x = d.codes(1, channels, 6, 6)
    weight = d.weights(made, channels // group, *d.several(2, 1, 3), dtype=dtype)
    windows = {"group": group, "pads": d.several(4, 0, 2), "strides": d.several(2, 1, 2),
               "dilations": d.several(2, 1, 2)}  # fmt: skip
    if op == "ConvInteger":
        zeros = d.pick([], [d.codes()], [d.codes(), d.codes(dtype=dtype)])
        return node(op, [x, weight, *zeros], **windows), {"": 10}
    shape = (made,) if by_channel else ()
    zero = np.full(shape, 0 if dtype is np.int8 else d.codes(), dtype)
    operands = [x, d.scale(), d.codes(), weight, d.scale(*shape), zero, d.scale() * 5, d.codes()]
    operands += d.pick([], [d.whole(-1000, 1000, made, np.int32)])
    return node(op, operands, **windows), {"": 10}


@family
def runtime_codes(d):
    """Operators of ONNX Runtime on codes."""
    op = d.pick(
        *[
            "QLinearAdd",
            "QLinearMul",
            "QLinearSigmoid",
            "QLinearLeakyRelu",
            "QLinearSoftmax",
            "QLinearWhere",
            "QLinearGlobalAveragePool",
            "QLinearAveragePool",
            "QLinearConcat",
            "QLinearConv",
            "QuantizeLinear",
            "DequantizeLinear",
            "NhwcMaxPool",
        ]
    )
    dtype = d.pick(np.uint8, np.int8)

    def some(*shape):
        return d.codes(*shape, dtype=dtype)

    small = [np.array(1 / 256, np.float32), np.array(0 if dtype is np.uint8 else -128, dtype)]
    flags, last = {}, d.between(0, 1)
    if op in ("QLinearAdd", "QLinearMul"):
        other = some(*d.pick((2, 3, 4), (4,), ()))
        operands = [some(2, 3, 4), d.scale(), some(), other, d.scale(), some(), d.scale(), some()]
    elif op in ("QLinearSigmoid", "QLinearSoftmax"):
        operands = [some(3, 4), d.scale(), some(), *small]
        flags = {"axis": -1, "opset": 13} if op == "QLinearSoftmax" else {}
    elif op == "QLinearLeakyRelu":
        operands, flags = [some(3, 4), d.scale(), some(), d.scale(), some()], {"alpha": 0.2}
    elif op == "QLinearGlobalAveragePool":
        shape = (2, 5, 5, 3) if last else (2, 3, 5, 5)
        operands = [some(*shape), d.scale(), some(), d.scale(), some()]
        flags = {"channels_last": last}
    elif op == "QLinearAveragePool":
        operands = [some(2, 3, 5, 5), d.scale(), some(), d.scale(), some()]
        flags = {"kernel_shape": [3, 2], "pads": d.pick([0] * 4, [1, 0, 1, 1]),
                 "strides": [d.between(1, 2)] * 2, "count_include_pad": last}  # fmt: skip
    elif op == "QLinearConcat":
        operands = [d.scale(), some(), some(2, 3), d.scale(), some(), some(2, 2), d.scale(), some()]
        flags = {"axis": 1}
    elif op == "QLinearWhere":
        operands = [d.flags(2, 3), some(2, 3), d.scale(), some(), some(2, 3), d.scale(), some(),
                    d.scale(), some()]  # fmt: skip
    elif op == "QLinearConv":
        shape = (1, 6, 6, 2) if last else (1, 2, 6, 6)
        weight = d.weights(3, 2, 3, 3, dtype=np.int8)
        operands = [d.codes(*shape), d.scale(), d.codes(), weight, d.scale(3), np.zeros(3, np.int8),
                    d.scale() * 5, d.codes()]  # fmt: skip
        flags = {"channels_last": last, "pads": [1, 0, 1, 1]}
    elif op == "NhwcMaxPool":
        operands = [some(1, 6, 5, 3)]
        flags = {"kernel_shape": [3, 2], "pads": [1, 0, 1, 1], "strides": [2, 1]}
    else:
        x = d.floats(2, 3) if op == "QuantizeLinear" else some(2, 3)
        operands, flags = [x, d.scale(3), some(3)], {"axis": 1}
    return node(op, operands, **flags, **RUNTIME), BOTH


@family
def runtime_products(d):
    """Products of ONNX Runtime with codes."""
    op = d.pick("QGemm", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "MatMulNBits")
    b, no_zero = d.weights(5, 4, dtype=np.int8), np.zeros((), np.int8)
    scale = d.pick(d.scale(), d.scale(4))
    bias = d.pick([], [d.floats(4)])
    if op == "MatMulIntegerToFloat":
        operands = [d.codes(3, 5), b, d.scale(), scale, d.codes(), no_zero, *bias]
        return node(op, operands, **RUNTIME), BOTH
    if op == "DynamicQuantizeMatMul":
        return node(op, [d.floats(3, 5), b, scale, no_zero, *bias], **RUNTIME), BOTH
    if op == "QGemm":
        swap_a, swap_b = d.between(0, 1), d.between(0, 1)
        a = d.codes(*((5, 3) if swap_a else (3, 5)))
        b = b.T.copy() if swap_b else b
        made = d.pick([], [d.scale() * 9, d.codes()])
        addend = d.whole(-99, 99, 4, np.int32) if made else d.maybe(d.whole(-99, 99, 4, np.int32))
        operands = [a, d.scale(), d.codes(), b, d.scale(), no_zero, addend, *made]
        flags = {"transA": swap_a, "transB": swap_b, "alpha": d.pick(1.0, 0.5)}
        return node(op, trimmed(operands), **flags, **RUNTIME), BOTH
    bits, block = d.pick(2, 4, 8), d.pick(16, 32)
    columns, rows = d.pick(16, 32, 40, 64), d.between(1, 5)
    blocks = -(-columns // block)
    zero = d.pick([], [d.codes(rows, -(-blocks * bits // 8))], [d.floats(rows, blocks)])
    operands = [d.floats(2, 3, columns), d.codes(rows, blocks, block * bits // 8),
                d.scale(rows, blocks), *zero]  # fmt: skip
    flags = {"bits": bits, "block_size": block, "N": rows, "K": columns,
             "accuracy_level": d.between(0, 1)}  # fmt: skip
    return node(op, operands, **flags, **RUNTIME), BOTH


# ---- fused


@family
def fused(d):
    op = d.pick("Gelu", "BiasGelu", "FastGelu", "QuickGelu", "FusedConv", "Trilu", "Inverse")
    x, flags = d.floats(2, 3, 4), {}
    if op == "BiasGelu":
        operands = [x, d.floats(4)]
    elif op == "FastGelu":
        operands = [x, *d.pick([], [d.floats(4)])]
    elif op == "QuickGelu":
        operands, flags = [x], {"alpha": d.pick(None, 1.0, 1.702)}
    elif op == "Trilu":
        operands, flags = [x, ints(d.between(-3, 3)).reshape(())], {"upper": d.between(0, 1)}
    elif op == "Inverse":
        operands = [d.floats(2, 3, 3) + 4 * np.eye(3, dtype=np.float32)]
    elif op == "FusedConv":
        name = d.pick("Relu", "Tanh", "Sigmoid", "LeakyRelu", "Clip", "HardSigmoid")
        numbers = {"LeakyRelu": [0.2], "Clip": [-0.5, 0.5], "HardSigmoid": [0.3, 0.4]}.get(name)
        operands = [d.floats(1, 2, 5, 5), d.floats(3, 2, 3, 3), d.floats(3),
                    *d.pick([], [d.floats(1, 3, 3, 3)])]  # fmt: skip
        flags = {"activation": name, "activation_params": numbers}
    else:
        operands = [x * 3]
    return node(op, operands, **flags, **RUNTIME), BOTH


@family
def fused_norms(d):
    op = d.pick("SkipLayerNormalization", "SkipSimplifiedLayerNormalization",
                "EmbedLayerNormalization")  # fmt: skip
    batch, tokens, width = 2, 3, 8
    flags = {"epsilon": d.pick(1e-5, 0.1)} | RUNTIME
    x, row = d.floats(batch, tokens, width), d.floats(width)
    outputs = d.pick(1, ["y0", "", "", "y3"])
    if op == "SkipLayerNormalization":
        skip = d.floats(*d.pick(x.shape, (1, tokens, width), (tokens, width)))
        operands = [x, skip, row, *d.pick([], [row], [row, d.floats(width)], [None, row])]
    elif op == "SkipSimplifiedLayerNormalization":
        operands = [x, d.floats(*x.shape), row, *d.pick([], [d.floats(width)])]
    else:
        segments, outputs = d.flags(), 3
        ids = d.whole(0, 9, (batch, tokens), np.int32)
        operands = trimmed(
            [
                ids,
                ids % 2 if segments else None,
                d.floats(9, width),
                d.floats(7, width),
                d.floats(2, width) if segments else None,
                row,
                d.floats(width),
                d.maybe(np.tril(np.ones((batch, tokens), np.int32))),
                d.maybe(ids % 7),
            ]
        )
    return node(op, operands, outputs, **flags), BOTH


@family
def rotations(d):
    heads, tokens, batch = 2, d.between(1, 4), 2
    split, part = d.flags(), d.flags()
    width = 4 if part else 8
    x = d.floats(batch, heads, tokens, 8) if split else d.floats(batch, tokens, heads * 8)
    flags = {"interleaved": d.between(0, 1), "rotary_embedding_dim": 4 if part else None}
    if d.flags():
        positions = d.pick(ints(2), d.whole(0, 9, (batch, tokens)))
        flags["num_heads"] = heads if part else d.pick(None, heads)
        operands = [x, positions, d.floats(12, width // 2), d.floats(12, width // 2)]
        return node("RotaryEmbedding", operands, **flags, **RUNTIME), BOTH
    flags["num_heads"] = None if split else heads
    shape, positions = (batch, tokens, width // 2), []
    if d.flags():
        shape, positions = (12, width // 2), [d.whole(0, 12, (batch, tokens))]
    operands = [x, d.floats(*shape), d.floats(*shape), *positions]
    return node("RotaryEmbedding", operands, **flags), {"": 23}


@family
def attention(d):
    """Attention of ONNX."""
    batch, rows, groups, channels = d.between(1, 2), d.between(1, 4), d.pick(1, 2), 4
    heads, past, causal = 2 * groups, d.pick(0, 0, 3), d.between(0, 1)
    keys = rows if past and causal else d.between(1, 5)
    total, joined = past + keys, d.flags()

    def some(count, length):
        if joined:
            return d.floats(batch, length, count * channels)
        return d.floats(batch, count, length, channels)

    allowed = d.flags(rows, total) | np.eye(rows, total, dtype=bool)
    mask = d.pick(None, d.floats(rows, total), allowed, d.floats(batch, heads, rows, total))
    cache = [d.floats(batch, groups, past, channels) for _ in "kv"] if past else []
    operands = [some(heads, rows), some(groups, keys), some(groups, keys), mask, *cache]
    flags = {
        "q_num_heads": heads if joined else None,
        "kv_num_heads": groups if joined else None,
        "is_causal": causal,
        "scale": d.pick(None, 0.3),
        "softcap": d.pick(None, 3.0),
    }
    return node("Attention", trimmed(operands), 3 if past else 1, **flags), {"": 23}


@family
def runtime_attention(d):
    """Attention of ONNX Runtime."""
    op = d.pick("Attention", "MultiHeadAttention")
    batch, rows, heads, channels = d.between(1, 2), d.between(1, 4), 2, 4
    past, width = d.pick(0, 0, 3), heads * channels
    keys = rows if op == "Attention" else d.between(1, 5)
    total = past + keys
    by_key = np.tril(np.ones((batch, total), np.int32), d.between(0, 2))
    by_row = np.tril(np.ones((batch, rows, total), np.int32), d.between(0, 2))
    flags = {
        "num_heads": heads,
        "scale": d.pick(None, 0.3),
        "mask_filter_value": d.pick(None, -50.0),
        "unidirectional": d.between(0, 1) if keys == rows else 0,
    } | RUNTIME
    bias = d.maybe(d.floats(batch, heads, rows, total))
    if op == "Attention":
        mask = d.pick(None, by_key, by_row, d.whole(1, total + 1, batch, np.int32))
        cache = d.floats(2, batch, heads, past, channels) if past else None
        operands = [d.floats(batch, rows, 5), d.floats(5, 3 * width), d.floats(3 * width), mask,
                    cache, bias]  # fmt: skip
        return node(op, trimmed(operands), 2, **flags), BOTH
    values = width if past else d.pick(width, heads * 3)
    cache = [d.floats(batch, heads, past, channels) if past else None for _ in "kv"]
    operands = [d.floats(batch, rows, width), d.floats(batch, keys, width),
                d.floats(batch, keys, values), d.maybe(d.floats(2 * width + values)),
                d.pick(None, by_key, by_row), bias, *cache]  # fmt: skip
    return node(op, trimmed(operands), 3, **flags), BOTH


@family
def coded_attention(d):
    batch, rows, heads, width, inner = d.between(1, 2), d.between(1, 4), 2, 8, 5
    past = d.pick(0, 0, 3)
    total, by_column = past + rows, d.flags()
    weight = d.weights(inner, 3 * width, dtype=np.int8)
    scale = d.scale(3 * width) if by_column else d.scale()
    cache = d.floats(2, batch, heads, past, width // heads) if past else None
    mask = d.pick(None, np.tril(np.ones((batch, total), np.int32), 1))
    operands = [d.codes(batch, rows, inner), weight, d.floats(3 * width), d.scale() / 9, scale / 9,
                mask, d.codes(), np.zeros((), np.int8), cache]  # fmt: skip
    flags = {"num_heads": heads, "unidirectional": d.between(0, 1)} | RUNTIME
    return node("QAttention", trimmed(operands), 2, **flags), BOTH


@family
def grouped_attention(d):
    batch, heads, channels, groups = d.between(1, 2), 2, 16, d.pick(1, 2)
    past = d.pick(0, 0, 3)
    rows = 1 if past else d.between(1, 4)
    total, room = past + rows, past + d.pick(0, 0, 2)
    packed, turned = d.flags(), d.flags()
    if packed:
        sides = [d.floats(batch, rows, (heads + 2 * groups) * channels), None, None]
    else:
        sides = [d.floats(batch, rows, n * channels) for n in (heads, groups, groups)]
    cache = [d.floats(batch, groups, room, channels) if past else None for _ in "kv"]
    tables = [d.floats(12, channels // 2) if turned else None for _ in "cs"]
    bias = None if turned else d.maybe(d.floats(batch, d.pick(1, heads), rows, total))
    lengths = [np.full(batch, total - 1, np.int32), np.array(total, np.int32)]
    flags = {
        "num_heads": heads,
        "kv_num_heads": groups,
        "do_rotary": int(turned),
        "rotary_interleaved": d.between(0, 1) if turned else None,
        "scale": d.pick(None, 0.3),
        "local_window_size": d.pick(None, 2),
        "softcap": d.pick(None, 3.0),
    }
    operands = trimmed([*sides, *cache, *lengths, *tables, None, bias])
    return node("GroupQueryAttention", operands, 3, **flags, **RUNTIME), BOTH


@family
def signal(d):
    op = d.pick("DFT", "STFT", "HannWindow", "HammingWindow", "BlackmanWindow")
    if op == "DFT":
        opset, inverse = d.pick(17, 20), d.between(0, 1)
        parts = 2 if inverse else d.pick(1, 2)
        length = d.maybe(np.array(d.pick(4, 6, 8), np.int64))
        axis = [np.array(1, np.int64)] if opset == 20 and d.flags() else []
        operands = trimmed([d.floats(2, 6, parts), length, *axis])
        onesided = d.between(0, 1) if parts == 1 else 0
        return node(op, operands, inverse=inverse, onesided=onesided), {"": opset}
    if op == "STFT":
        operands = [d.floats(2, 20, 1), np.array(3, np.int64), d.maybe(d.floats(8)),
                    np.array(8, np.int64)]  # fmt: skip
        return node(op, operands, onesided=d.between(0, 1)), {"": 17}
    return node(op, [np.array(d.between(2, 9), np.int64)], periodic=d.between(0, 1)), {"": 17}
