"""Two ONNX graphs compared before anything is computed."""
