"""A small convolutional net in float and quantised by ONNX Runtime, and runs of both."""

import contextlib
import io
import logging

import numpy as np
from onnx import TensorProto as T
from onnx import helper as h
from onnx import load, numpy_helper, save

import whence

SHAPE = [2, 3, 8, 8]


def inputs(seed):
    return {"x": np.random.default_rng(seed).standard_normal(SHAPE).astype("f4")}


class Net:
    """Two convolutions with a residual sum, a pool and a head."""

    def __init__(self):
        self.random = np.random.default_rng(3)
        self.nodes, self.initializers = [], []
        x = self.convolution("x", "a", 3, relu=True)
        y = self.convolution(x, "b", 8, relu=False)
        x = self.node("Add", [x, y], "/sum/Add_output_0")
        x = self.node("GlobalAveragePool", [x], "/pool/Pool_output_0")
        x = self.node("Flatten", [x], "/flat/Flatten_output_0")
        self.node("Gemm", [x, self.drawn("head.weight", 5, 8), self.drawn("head.bias", 5)], "y",
                  transB=1)  # fmt: skip

    def drawn(self, name, *shape):
        size = np.sqrt(2 / max(np.prod(shape[1:]), 1)) if len(shape) > 1 else 0.1
        array = (self.random.standard_normal(shape) * size).astype("f4")
        self.initializers.append(numpy_helper.from_array(array, name))
        return name

    def node(self, kind, reads, makes, **attributes):
        self.nodes.append(h.make_node(kind, reads, [makes], f"{makes}_node", **attributes))
        return makes

    def convolution(self, x, name, channels, *, relu):
        reads = [x, self.drawn(f"{name}.weight", 8, channels, 3, 3), self.drawn(f"{name}.bias", 8)]
        x = self.node("Conv", reads, f"/{name}/Conv_output_0", pads=[1] * 4, kernel_shape=[3, 3])
        return self.node("Relu", [x], f"/{name}/Relu_output_0") if relu else x

    def model(self):
        value = h.make_tensor_value_info
        ends = [value("x", T.FLOAT, SHAPE)], [value("y", T.FLOAT, [2, 5])]
        graph = h.make_graph(self.nodes, "graph", *ends, self.initializers)
        return h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=9)


def quantised(source, path, feeds=None, **options):
    """Quantise a file with what `quantize_static` takes, calibrated on some inputs."""
    from onnxruntime.quantization import CalibrationDataReader, quantize_static

    class Reader(CalibrationDataReader):
        def __init__(self):
            self.batches = iter(feeds or [inputs(seed) for seed in range(3)])

        def get_next(self):
            return next(self.batches, None)

    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            quantize_static(str(source), str(path), Reader(), **options)
    finally:
        logging.disable(logging.NOTSET)
    return path


def edited(source, path, **changed):
    """A model with initialisers replaced by what functions make of them; "__" stands for "." in a
    name.
    """
    model = load(str(source))
    by_name = {i.name: i for i in model.graph.initializer}
    for name, change in changed.items():
        name = name.replace("__", ".")
        array = np.asarray(change(numpy_helper.to_array(by_name[name]).copy()))
        by_name[name].CopyFrom(numpy_helper.from_array(array, name))
    save(model, str(path))
    return path


def captured(path, folder, level="off", feeds=None):
    """A run of a model file on inputs that it was not calibrated on, or on `feeds`."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    levels = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = (
        levels.ORT_DISABLE_ALL if level == "off" else levels.ORT_ENABLE_ALL
    )
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    with whence.capture(session, folder):
        session.run(None, feeds or inputs(9))
    return folder
