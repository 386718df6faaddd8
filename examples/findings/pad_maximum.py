"""Zeros before a maximum: written to model.onnx, and simplified to simplified.onnx."""

import numpy as np
import onnx
import onnxsim
from onnx import TensorProto, helper, numpy_helper

nodes = [
    helper.make_node("Pad", ["x", "pads"], ["padded"], "pad"),
    helper.make_node("MaxPool", ["padded"], ["y"], "maximum", kernel_shape=[3, 3], strides=[3, 3]),
]
pads = numpy_helper.from_array(np.array([0, 0, 1, 1, 0, 0, 1, 1]), "pads")
shapes = {"x": [1, 3, 7, 7], "y": [1, 3, 3, 3]}
ends = [
    helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()
]
graph = helper.make_graph(nodes, "graph", ends[:1], ends[1:], [pads])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
onnx.save(model, "model.onnx")
onnx.save(onnxsim.simplify(model)[0], "simplified.onnx")
