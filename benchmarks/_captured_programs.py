"""Small programs, one for each level of a capture, for tests of what a failing disk does to them.

Each takes a `Capturing`, computes, and returns the bytes of what it computed.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
from collections.abc import Callable

import numpy as np

Capturing = Callable[..., object]
"""(model, **options) -> a context manager: captured, or not."""


def _net():
    import torch

    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(24, 32), torch.nn.GELU(), torch.nn.LayerNorm(32), torch.nn.Linear(32, 8)
    )


def _inputs(steps: int = 3):
    import torch

    torch.manual_seed(5)
    return [torch.randn(4, 24) for _ in range(steps)]


def _bytes(values) -> bytes:
    return b"".join(np.ascontiguousarray(v.detach().numpy()).tobytes() for v in values)


def torch_forward(level: str, **options):
    def program(capturing):
        import torch

        model, inputs = _net(), _inputs()
        with capturing(model, level=level, **options), torch.no_grad():
            return _bytes([model(x) for x in inputs])

    return program


def torch_ring(capturing):
    """The last steps are kept in memory and written when the program fails."""
    import torch

    model, out = _net(), []
    try:
        with capturing(model, ring=2), torch.no_grad():
            out += [model(x) for x in _inputs()]
            raise FloatingPointError("the loss is not finite")
    except FloatingPointError:
        return _bytes(out)


def torch_large(capturing):
    """Tensors that are written from where they are, and more than one shard's worth of header."""
    import torch

    torch.manual_seed(3)
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 128)
    )
    x = torch.randn(128, 256)
    with capturing(model), torch.no_grad():
        return _bytes([model(x), model(2 * x)])


def torch_training(capturing):
    import torch

    model, inputs = _net(), _inputs(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    with capturing(model, gradients=True):
        for x in inputs:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), torch.ones(4, 8))
            loss.backward()
            optimizer.step()
            losses.append(loss)
    return _bytes([*losses, *model.parameters()])


def torch_logits(capturing):
    import torch

    class Words(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = torch.nn.Embedding(11, 8), torch.nn.Linear(8, 11)

        def forward(self, input_ids):
            return self.head(self.embed(input_ids))

    torch.manual_seed(3)
    model = Words()
    with capturing(model, level="logits"), torch.no_grad():
        return _bytes([model(torch.arange(n, n + 4)[None]) for n in range(3)])


def torch_graph(capturing):
    import torch

    model = torch.compile(_net(), backend="aot_eager")
    with capturing(model, level="graph"), torch.no_grad():
        return _bytes([model(x) for x in _inputs(2)])


def recorded(capturing):
    """Arrays under names, by `whence.recording`."""
    draw = np.random.default_rng(1)
    arrays = [draw.normal(size=(40, 30)).astype("f4") for _ in range(12)]
    with capturing(None) as run:
        if run is not None:
            for n, array in enumerate(arrays):
                run.add(f"a{n}", array, step=n // 4)
    return b"".join(a.tobytes() for a in arrays)


def _onnx_model():
    from onnx import TensorProto, helper, numpy_helper

    draw = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array(draw.normal(size=s).astype("f4"), n)
        for n, s in (("w", (8, 8)), ("v", (8, 4)))
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], "first"),
        helper.make_node("Relu", ["h"], ["r"], "relu"),
        helper.make_node("MatMul", ["r", "v"], ["y"], "second"),
    ]
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 4])],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def onnxruntime_level(level: str):
    def program(capturing):
        import onnxruntime as ort

        ort.set_default_logger_severity(4)
        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        session = ort.InferenceSession(
            _onnx_model().SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        out = []
        with capturing(session, level=level):
            for n in range(2):
                x = np.random.default_rng(n).normal(size=(2, 8)).astype("f4")
                out.append(session.run(None, {"x": x})[0].tobytes())
        return b"".join(out)

    return program


def openvino_level(level: str):
    def program(capturing):
        import openvino as ov

        core = ov.Core()
        steady = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32"}
        model = core.compile_model(
            core.read_model(_onnx_model().SerializeToString()), "CPU", steady
        )
        out = []
        with capturing(model, level=level):
            for n in range(2):
                x = np.random.default_rng(n).normal(size=(2, 8)).astype("f4")
                out.append(np.array(model({"x": x})[0]).tobytes())
        return b"".join(out)

    return program


def paddle_level(level: str):
    def program(capturing):
        import paddle

        paddle.seed(3)
        model = paddle.nn.Sequential(
            paddle.nn.Linear(8, 8), paddle.nn.ReLU(), paddle.nn.Linear(8, 4)
        )
        out = []
        with capturing(model, level=level), paddle.no_grad():
            for n in range(2):
                x = paddle.to_tensor(np.random.default_rng(n).normal(size=(2, 8)).astype("f4"))
                out.append(model(x).numpy().tobytes())
        return b"".join(out)

    return program


TORCH = {
    "torch modules": torch_forward("modules"),
    "torch modules, statistics only": torch_forward("modules", keep="stats"),
    "torch modules, large tensors": torch_large,
    "torch modules, last steps in memory": torch_ring,
    "torch logits": torch_logits,
    "torch op": torch_forward("op"),
    "torch graph": torch_graph,
    "torch training with backward": torch_training,
    "one of two ranks": torch_forward("modules"),
    "whence.record": recorded,
}
ENGINES = {
    **{
        f"onnxruntime {level}": onnxruntime_level(level)
        for level in ("modules", "op", "graph", "logits", "io")
    },
    **{
        f"openvino {level}": openvino_level(level)
        for level in ("modules", "op", "graph", "logits", "io")
    },
}
PADDLE = {f"paddle {level}": paddle_level(level) for level in ("modules", "op", "logits")}
GROUPS = {"torch": TORCH, "onnxruntime": ENGINES, "paddle": PADDLE}
"""By what a warm process imports first."""


def warm(group: str) -> None:
    """Load in this process what every program of a group loads: what is forked off it starts
    faster. Engines with threads of their own are imported only.
    """
    import tempfile

    import whence

    number = itertools.count()
    with tempfile.TemporaryDirectory() as folder:

        def capturing(model, **options):
            place = f"{folder}/{next(number)}"
            return (
                whence.recording(place)
                if model is None
                else whence.capture(model, place, **options)
            )

        recorded(capturing)
        for program in TORCH.values() if group == "torch" else ():
            program(capturing)
        if group == "onnxruntime":
            pass
        if group == "paddle":
            PADDLE["paddle modules"](capturing)


def program_of(name: str):
    return next(programs[name] for programs in GROUPS.values() if name in programs)


def is_here(group: str) -> bool:
    needed = {
        "torch": ["torch"],
        "onnxruntime": ["onnx", "onnxruntime", "openvino"],
        "paddle": ["paddle"],
    }
    return all(importlib.util.find_spec(name) is not None for name in needed[group])


def calm() -> None:
    """One thread each: processes are forked."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("MKL_NUM_THREADS", "1")
