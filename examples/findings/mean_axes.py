"""A mean over axes that are an input of the node, as opset 18 has it."""

import numpy as np
import openvino
from onnx import TensorProto, helper, numpy_helper

nodes = [
    helper.make_node("ReduceMean", ["x", "axes"], ["mean"], "mean", keepdims=1),
    helper.make_node("Sub", ["x", "mean"], ["y"], "centre"),
]
axes = numpy_helper.from_array(np.array([2, 3]), "axes")
ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 3, 4, 4]) for name in "xy"]
graph = helper.make_graph(nodes, "graph", ends[:1], ends[1:], [axes])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
core = openvino.Core()
compiled = core.compile_model(core.read_model(model.SerializeToString()), "CPU")
x = np.random.default_rng(0).normal(size=(2, 3, 4, 4)).astype(np.float32)
print(np.abs(compiled([x])[0].mean((2, 3))).max())
