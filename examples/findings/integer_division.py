"""1 / a * b in integers."""

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

nodes = [
    helper.make_node("Div", ["one", "a"], ["share"], "share"),
    helper.make_node("Mul", ["share", "b"], ["y"], "product"),
]
one = numpy_helper.from_array(np.ones((1, 1), np.int64), "one")
ends = [helper.make_tensor_value_info(name, TensorProto.INT64, None) for name in "aby"]
graph = helper.make_graph(nodes, "graph", ends[:2], ends[2:], [one])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
session = onnxruntime.InferenceSession(
    model.SerializeToString(), providers=["CPUExecutionProvider"]
)
print(session.run(None, {"a": np.full((2, 1), 2), "b": np.array([[3, 4], [-3, 6]])})[0].tolist())
