"""Listens to a live program and hands calls to a `Sink`."""

FRAMEWORKS = ("torch", "paddle", "onnxruntime", "openvino")
"""What can be listened to, by the name under which programs import it. The package of that name in
here is a `framework.Framework`.
"""
