"""Zeros before an average that leaves its own padding out."""

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

nodes = [
    helper.make_node("Pad", ["x", "pads"], ["padded"], "pad"),
    helper.make_node(
        "AveragePool",
        ["padded"],
        ["y"],
        "average",
        kernel_shape=[3, 3],
        pads=[1, 1, 1, 1],
        count_include_pad=0,
    ),
]
pads = numpy_helper.from_array(np.array([0, 0, 0, 1, 0, 0, 1, 0]), "pads")
ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "xy"]
graph = helper.make_graph(nodes, "graph", ends[:1], ends[1:], [pads])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
session = onnxruntime.InferenceSession(
    model.SerializeToString(), providers=["CPUExecutionProvider"]
)
x = np.random.default_rng(0).normal(size=(1, 3, 8, 8)).astype(np.float32)
print(session.run(None, {"x": x})[0].std())
