"""Small models of ONNX for tests, each with its inputs."""

import numpy as np
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper

OPSET = 17


def value(name, kind, shape):
    return h.make_tensor_value_info(name, kind, shape)


def constant(array, name):
    return numpy_helper.from_array(np.asarray(array), name)


def drawn(*shape, seed=0):
    draw = np.random.default_rng([seed, *shape]).normal(size=shape)
    return (draw / np.sqrt(max(shape[-1], 1))).astype("f4")


def model(nodes, inputs, outputs, initializers=(), opset=OPSET):
    graph = h.make_graph(nodes, "graph", inputs, outputs, list(initializers))
    return h.make_model(
        graph,
        opset_imports=[h.make_opsetid("", opset)],
        ir_version=9,
        producer_name="tests",
        producer_version="1",
    )


def convolutions():
    """A residual block with odd numbers of channels; node names as torch's exporter gives them."""
    nodes = [
        h.make_node("Conv", ["x", "w1", "b1"], ["/a/Conv_output_0"], pads=[1, 1, 1, 1]),
        h.make_node("Relu", ["/a/Conv_output_0"], ["/a/Relu_output_0"]),
        h.make_node("Conv", ["/a/Relu_output_0", "w2"], ["/b/Conv_output_0"], pads=[1, 1, 1, 1]),
        h.make_node("Add", ["/b/Conv_output_0", "/a/Relu_output_0"], ["/b/Add_output_0"]),
        h.make_node("Relu", ["/b/Add_output_0"], ["/b/Relu_output_0"]),
        h.make_node(
            "MaxPool",
            ["/b/Relu_output_0"],
            ["/c/MaxPool_output_0"],
            kernel_shape=[2, 2],
            strides=[2, 2],
        ),
        h.make_node("Conv", ["/c/MaxPool_output_0", "w3"], ["/d/Conv_output_0"], group=20),
        h.make_node("GlobalAveragePool", ["/d/Conv_output_0"], ["/e/Pool_output_0"]),
        h.make_node("Flatten", ["/e/Pool_output_0"], ["y"]),
    ]
    made = model(
        nodes,
        [value("x", T.FLOAT, ["n", 3, 8, 8])],
        [value("y", T.FLOAT, ["n", 20])],
        [
            constant(drawn(20, 3, 3, 3), "w1"),
            constant(drawn(20), "b1"),
            constant(drawn(20, 20, 3, 3), "w2"),
            constant(drawn(20, 1, 1, 1), "w3"),
        ],
    )
    return made, {"x": drawn(2, 3, 8, 8, seed=1)}


def attention():
    """A layer norm and a GELU that the runtime fuses."""
    nodes = [
        h.make_node("LayerNormalization", ["x", "g", "b"], ["n"], axis=-1, epsilon=1e-5),
        h.make_node("MatMul", ["n", "w"], ["m"]),
        h.make_node("Add", ["m", "c"], ["a"]),
        h.make_node("Div", ["a", "root"], ["d"]),
        h.make_node("Erf", ["d"], ["e"]),
        h.make_node("Add", ["e", "one"], ["o"]),
        h.make_node("Mul", ["a", "o"], ["q"]),
        h.make_node("Mul", ["q", "half"], ["r"]),
        h.make_node("Softmax", ["r"], ["y"], axis=-1),
    ]
    made = model(
        nodes,
        [value("x", T.FLOAT, [2, 4, 16])],
        [value("y", T.FLOAT, [2, 4, 24])],
        [
            constant(1 + drawn(16), "g"),
            constant(drawn(16, seed=2), "b"),
            constant(drawn(16, 24), "w"),
            constant(drawn(24), "c"),
            constant(np.float32(2**0.5), "root"),
            constant(np.float32(1), "one"),
            constant(np.float32(0.5), "half"),
        ],
    )
    return made, {"x": drawn(2, 4, 16, seed=3)}


def recurrent():
    """An LSTM whose states the program hands from step to step; one optional input is absent."""
    made = model(
        [
            h.make_node(
                "LSTM", ["x", "w", "r", "b", "", "h", "c"], ["s", "h2", "c2"], hidden_size=8
            ),
            h.make_node("Squeeze", ["s", "axes"], ["y"]),
        ],
        [
            value("x", T.FLOAT, [5, 2, 4]),
            value("h", T.FLOAT, [1, 2, 8]),
            value("c", T.FLOAT, [1, 2, 8]),
        ],
        [
            value("y", T.FLOAT, [5, 2, 8]),
            value("h2", T.FLOAT, [1, 2, 8]),
            value("c2", T.FLOAT, [1, 2, 8]),
        ],
        [
            constant(drawn(1, 32, 4), "w"),
            constant(drawn(1, 32, 8), "r"),
            constant(drawn(1, 64), "b"),
            constant(np.array([1]), "axes"),
        ],
    )
    zeros = np.zeros((1, 2, 8), "f4")
    return made, {"x": drawn(5, 2, 4, seed=4), "h": zeros, "c": zeros.copy()}


def control():
    """If and Loop, whose graphs read values from outside."""
    doubled = h.make_graph(
        [h.make_node("Mul", ["x", "two"], ["t"])], "then", [], [value("t", T.FLOAT, None)]
    )
    negative = h.make_graph(
        [h.make_node("Neg", ["a"], ["f"])], "else", [], [value("f", T.FLOAT, None)]
    )
    body = h.make_graph(
        [h.make_node("Add", ["v", "x"], ["v2"]), h.make_node("Identity", ["go"], ["go2"])],
        "body",
        [value("i", T.INT64, []), value("go", T.BOOL, []), value("v", T.FLOAT, [3])],
        [value("go2", T.BOOL, []), value("v2", T.FLOAT, [3])],
    )
    made = model(
        [
            h.make_node("Abs", ["x"], ["a"]),
            h.make_node("ReduceSum", ["x"], ["s"], keepdims=0),
            h.make_node("Greater", ["s", "zero"], ["positive"]),
            h.make_node("If", ["positive"], ["y"], then_branch=doubled, else_branch=negative),
            h.make_node("Loop", ["n", "yes", "y"], ["z"], body=body),
        ],
        [value("x", T.FLOAT, [3])],
        [value("z", T.FLOAT, [3])],
        [
            constant(np.float32(2), "two"),
            constant(np.float32(0), "zero"),
            constant(np.int64(3), "n"),
            constant(np.bool_(True), "yes"),
        ],
    )
    return made, {"x": drawn(3)}


def texts_and_sequences():
    made = model(
        [
            h.make_node("Identity", ["s"], ["t"]),
            h.make_node("SequenceConstruct", ["x", "y"], ["q"]),
            h.make_node("ConcatFromSequence", ["q"], ["c"], axis=0),
            h.make_node("Exp", ["c"], ["e"]),
        ],
        [value("s", T.STRING, ["n"]), value("x", T.FLOAT, ["a"]), value("y", T.FLOAT, ["b"])],
        [
            value("t", T.STRING, ["n"]),
            h.make_tensor_sequence_value_info("q", T.FLOAT, None),
            value("e", T.FLOAT, ["m"]),
        ],
    )
    return made, {"s": np.array(["one", "two"]), "x": drawn(3), "y": drawn(2)}


def narrow():
    """bfloat16 and float16 inside, which numpy has no name for and which it has one for."""
    made = model(
        [
            h.make_node("Cast", ["x"], ["b"], to=T.BFLOAT16),
            h.make_node("Cast", ["b"], ["f"], to=T.FLOAT),
            h.make_node("Cast", ["f"], ["h"], to=T.FLOAT16),
            h.make_node("Cast", ["h"], ["y"], to=T.FLOAT),
        ],
        [value("x", T.FLOAT, [8])],
        [value("y", T.FLOAT, [8])],
    )
    return made, {"x": drawn(8)}


def quantised():
    codes = np.random.default_rng(5).integers(-127, 127, size=(8, 8)).astype("i1")
    made = model(
        [
            h.make_node("QuantizeLinear", ["x", "xs", "xz"], ["xq"]),
            h.make_node("DequantizeLinear", ["xq", "xs", "xz"], ["xd"]),
            h.make_node("DequantizeLinear", ["w", "ws", "wz"], ["wd"]),
            h.make_node("MatMul", ["xd", "wd"], ["m"]),
            h.make_node("QuantizeLinear", ["m", "ys", "yz"], ["yq"]),
            h.make_node("DequantizeLinear", ["yq", "ys", "yz"], ["y"]),
        ],
        [value("x", T.FLOAT, [2, 8])],
        [value("y", T.FLOAT, [2, 8])],
        [
            constant(codes, "w"),
            constant(np.float32(0.02), "xs"),
            constant(np.uint8(128), "xz"),
            constant(np.float32(0.01), "ws"),
            constant(np.int8(0), "wz"),
            constant(np.float32(0.05), "ys"),
            constant(np.uint8(128), "yz"),
        ],
    )
    return made, {"x": drawn(2, 8)}


def drawing():
    """Draws random numbers."""
    made = model(
        [h.make_node("RandomNormalLike", ["x"], ["n"]), h.make_node("Add", ["x", "n"], ["y"])],
        [value("x", T.FLOAT, [4])],
        [value("y", T.FLOAT, [4])],
    )
    return made, {"x": drawn(4)}


def accumulating():
    """A state that is read and written, and a product of it."""
    made = model(
        [h.make_node("Add", ["x", "state"], ["next"]), h.make_node("Mul", ["next", "x"], ["y"])],
        [value("x", T.FLOAT, [4, 8]), value("state", T.FLOAT, [4, 8])],
        [value("y", T.FLOAT, [4, 8]), value("next", T.FLOAT, [4, 8])],
    )
    return made, {"x": drawn(4, 8), "state": drawn(4, 8, seed=6)}


def dense(size=64):
    """One product with a weight, and what follows."""
    made = model(
        [h.make_node("MatMul", ["x", "w"], ["m"]), h.make_node("Relu", ["m"], ["y"])],
        [value("x", T.FLOAT, [2, size])],
        [value("y", T.FLOAT, [2, size])],
        [constant(drawn(size, size), "w")],
    )
    return made, {"x": drawn(2, size, seed=7)}


MODELS = {
    made.__name__: made
    for made in (
        convolutions, attention, recurrent, control, texts_and_sequences, narrow, quantised,
        accumulating, dense,
    )
}  # fmt: skip
