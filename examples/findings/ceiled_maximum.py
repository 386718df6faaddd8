"""A maximum whose last window would begin in its padding."""

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

node = helper.make_node(
    "MaxPool",
    ["x"],
    ["y"],
    "maximum",
    kernel_shape=[3] * 3,
    pads=[1] * 6,
    strides=[3] * 3,
    ceil_mode=1,
)
ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "xy"]
graph = helper.make_graph([node], "graph", ends[:1], ends[1:])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)
session = onnxruntime.InferenceSession(
    model.SerializeToString(), providers=["CPUExecutionProvider"]
)
x = np.random.default_rng(0).normal(size=(1, 2, 3, 6, 5)).astype(np.float32)
print(session.run(None, {"x": x})[0].min())
