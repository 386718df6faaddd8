"""Nodes of ONNX graphs as programs of aten operators."""
