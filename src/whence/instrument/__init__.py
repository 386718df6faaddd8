"""Observes a running program and passes its calls to a `Sink`."""

FRAMEWORKS = ("torch", "paddle", "onnxruntime", "openvino")
"""The supported frameworks, by their import name. The subpackage with that name is a
`framework.Framework`.
"""
