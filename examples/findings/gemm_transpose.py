"""A product behind a Transpose that leaves the axes where they are."""

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

draw = np.random.default_rng(0)
nodes = [
    helper.make_node("Transpose", ["x"], ["t"], "keep_axes", perm=[0, 1]),
    helper.make_node("MatMul", ["t", "w"], ["m"], "product"),
    helper.make_node("Add", ["m", "b"], ["y"], "bias"),
]
weights = [
    numpy_helper.from_array(draw.normal(size=s).astype("f4"), n)
    for n, s in (("w", (4, 8)), ("b", (8,)))
]
ends = [
    helper.make_tensor_value_info(n, TensorProto.FLOAT, s)
    for n, s in (("x", (4, 4)), ("y", (4, 8)))
]
graph = helper.make_graph(nodes, "graph", ends[:1], ends[1:], weights)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
session = onnxruntime.InferenceSession(
    model.SerializeToString(), providers=["CPUExecutionProvider"]
)
print(session.run(None, {"x": draw.normal(size=(4, 4)).astype("f4")})[0].sum())
