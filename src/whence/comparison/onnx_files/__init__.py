"""Two ONNX graphs held against each other before anything is computed."""
