"""The exported model in ONNX Runtime."""

import onnxruntime
from net import make

session = onnxruntime.InferenceSession("net.onnx")
session.run(None, {"image": make()[1].numpy()})
