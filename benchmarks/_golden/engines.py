"""Sessions of ONNX Runtime and models of OpenVINO, their files, and quantised graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import whence
from _golden.nets import Record
from _golden.place import ROOT, Answers, Case, Place, interpreter, pair

Edit = Callable[[Any], object]
READABLE = ("convolutions", "attention", "recurrent", "control", "narrow", "quantised", "dense")


def _model(name: str, change: Edit | None = None) -> tuple[Any, dict[str, Any]]:
    import onnx_models

    made, feeds = onnx_models.MODELS[name]()
    if change is not None:
        change(made)
    return made, feeds


def _saved(name: str, change: Edit | None = None) -> Record:
    def save(path: Path) -> None:
        import onnx

        onnx.save(_model(name, change)[0], str(path))

    return save


def session(name: str, change: Edit | None = None, *, optimised: bool = True, **how: Any) -> Record:
    """The run of a session of ONNX Runtime."""

    def record(path: Path) -> None:
        import onnxruntime as ort

        made, feeds = _model(name, change)
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        if not optimised:
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        engine = ort.InferenceSession(
            made.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        with whence.capture(engine, path, **how):
            engine.run(None, feeds)

    return record


def weight(name: str, factor: float) -> Edit:
    """An initialiser times a number."""

    def change(model: Any) -> None:
        from onnx import numpy_helper

        for tensor in model.graph.initializer:
            if tensor.name == name:
                array = numpy_helper.to_array(tensor)
                tensor.CopyFrom(numpy_helper.from_array((array * factor).astype(array.dtype), name))

    return change


def attribute(node: str, **values: Any) -> Edit:
    """Attributes of the nodes of one type."""

    def change(model: Any) -> None:
        from onnx import helper

        for one in model.graph.node:
            if one.op_type == node:
                for name, value in values.items():
                    kept = [a for a in one.attribute if a.name != name]
                    del one.attribute[:]
                    one.attribute.extend([*kept, helper.make_attribute(name, value)])

    return change


def _operator(old: str, new: str) -> Edit:
    def change(model: Any) -> None:
        for one in model.graph.node:
            if one.op_type == old:
                one.op_type = new

    return change


def _sessions(name: str, **how: Any) -> Case:
    """The graph as it is written against the graph that the runtime optimised."""
    return pair(session(name, optimised=False, **how), session(name, **how))


def _files(name: str, change: Edit) -> Case:
    def case(place: Place) -> Answers:
        place.once("ref.onnx", _saved(name))
        place.once("tgt.onnx", _saved(name, change))
        yield from place.compare("ref.onnx", "tgt.onnx")

    return case


def _renamed(model: Any) -> None:
    """Other names of everything inside, and the nodes in float16's stead untouched."""
    ends = {v.name for v in (*model.graph.input, *model.graph.output)}
    for one in model.graph.node:
        one.name = ""
        for names in (one.input, one.output):
            for k, name in enumerate(names):
                if name and name not in ends:
                    names[k] = f"value {name}"
    for tensor in model.graph.initializer:
        tensor.name = f"value {tensor.name}"


OPENVINO = """
import sys

import numpy as np

sys.path[:0] = [{builders!r}, {benchmarks!r}]
import openvino as ov
import onnx_models
from _golden.engines import attribute, weight

core = ov.Core()
for name in sys.argv[1].split(","):
    made, feeds = onnx_models.MODELS[name]()
    if "bad" in sys.argv:
        weight("w", 1.125)(made), weight("w2", 1.125)(made), attribute("Softmax", axis=1)(made)
    model = core.compile_model(
        core.read_model(made.SerializeToString()), "CPU",
        {{"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32"}},
    )
    model(feeds)
"""
_FOR_OPENVINO = ("convolutions", "attention", "recurrent", "dense")


def _openvino(place: Place) -> Answers:
    """Runs of OpenVINO against each other and against ONNX Runtime."""
    program = OPENVINO.format(
        builders=str(ROOT / "tests/instrument"), benchmarks=str(ROOT / "benchmarks")
    )
    (place.folder / "program.py").write_text(program)

    def run(*words: str) -> Record:
        def record(path: Path) -> None:
            said = place.whence("run", "-o", path.name, "--", interpreter(), "program.py", *words)
            if "exit code 0" not in said:
                raise RuntimeError(said)

        return record

    names = ",".join(_FOR_OPENVINO)
    place.once("ref", run(names))
    place.once("tgt", run(names, "bad"))
    yield from place.compare("ref", "tgt")
    yield "show.here.txt", place.whence("show", "ref")
    place.once("ort", session("dense"))
    place.once("one", run("dense"))
    yield from place.compare("ort", "one", to="across")


def _float_model(path: Path) -> None:
    import onnx
    from quantised_models import Net

    onnx.save(Net().model(), str(path))


def _quantised(form: str, **change: Callable[[Any], Any]) -> Case:
    """A quantised graph against the float one; what is given changes initialisers."""

    def quantise(path: Path) -> None:
        import quantised_models as qm
        from onnxruntime.quantization import QuantFormat, QuantType

        qm.quantised(
            "float.onnx",
            path,
            per_channel=False,
            weight_type=QuantType.QUInt8,
            activation_type=QuantType.QUInt8,
            quant_format=getattr(QuantFormat, form),
        )
        if change:
            qm.edited(path, path, **change)

    def case(place: Place) -> Answers:
        import quantised_models as qm

        place.once("float.onnx", _float_model)
        place.once("quantised.onnx", quantise)
        place.once("ref", lambda path: qm.captured("float.onnx", path))
        place.once("tgt", lambda path: qm.captured("quantised.onnx", path))
        yield from place.compare("ref", "tgt")

    return case


def _module_against_session(fault: bool) -> Case:
    """A torch module against a session of the file that it would be exported to."""

    def module(path: Path) -> None:
        import onnx_models
        import torch
        from torch import nn

        made, feeds = onnx_models.dense()
        from onnx import numpy_helper

        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU()).eval()
        held = numpy_helper.to_array(made.graph.initializer[0])
        model[0].weight.data = torch.from_numpy(held.T.copy())
        with torch.no_grad(), whence.capture(model, path):
            model(torch.from_numpy(feeds["x"]))

    return pair(module, session("dense", weight("w", 1.125) if fault else None))


_OPERATORS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    *(
        (name, "v", {})
        for name in (
            "Sigmoid",
            "Tanh",
            "HardSwish",
            "Elu",
            "LeakyRelu",
            "Softplus",
            "Softsign",
            "Erf",
            "Gelu",
            "Mish",
            "Selu",
            "Celu",
            "HardSigmoid",
            "Abs",
            "Neg",
            "Exp",
            "Ceil",
            "Floor",
            "Round",
            "Sign",
            "Sin",
            "Cos",
            "Atan",
            "Sinh",
            "GlobalMaxPool",
            "GlobalAveragePool",
            "Softmax",
            "LogSoftmax",
            "Hardmax",
            "Flatten",
            "Shape",
            "Size",
            "IsNaN",
            "ThresholdedRelu",
        )
    ),
    *(
        (name, "v", {"keepdims": 0})
        for name in (
            "ReduceMean",
            "ReduceMax",
            "ReduceMin",
            "ReduceSum",
            "ReduceL1",
            "ReduceL2",
            "ReduceProd",
            "ReduceLogSumExp",
            "ReduceSumSquare",
            "ReduceLogSum",
        )
    ),
    *(
        (name, "v half", {})
        for name in (
            "Add",
            "Sub",
            "Mul",
            "Div",
            "Max",
            "Min",
            "PRelu",
            "Greater",
            "LessOrEqual",
            "Equal",
        )
    ),
    ("Clip", "v zero half", {}),
    ("ArgMax", "v", {"axis": 1}),
    ("TopK", "v two", {"axis": -1}),
    ("Transpose", "v", {"perm": [0, 2, 3, 1]}),
    ("Reshape", "v shape", {}),
    ("Slice", "v starts ends axes", {}),
    ("Concat", "v v", {"axis": 1}),
    ("Gather", "v picks", {"axis": 2}),
    ("Pad", "v pads", {}),
    ("Resize", "v empty scales", {"mode": "linear"}),
    ("AveragePool", "v", {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "strides": [2, 2]}),
    ("MaxPool", "v", {"kernel_shape": [2, 2], "strides": [2, 2]}),
    ("LpPool", "v", {"kernel_shape": [2, 2], "p": 2}),
    ("InstanceNormalization", "v four four", {"epsilon": 1e-3}),
    ("BatchNormalization", "v four four four four", {"epsilon": 1e-3}),
    ("GroupNormalization", "v two_groups two_groups", {"num_groups": 2}),
    ("LayerNormalization", "v eight", {"axis": -1}),
    ("LpNormalization", "v", {"axis": -1, "p": 2}),
    ("MeanVarianceNormalization", "v", {}),
    ("LRN", "v", {"size": 3}),
    ("Conv", "v kernel", {"pads": [1, 1, 1, 1], "strides": [2, 2]}),
    ("ConvTranspose", "v kernel", {"strides": [2, 2]}),
    ("MatMul", "v square", {}),
    ("Einsum", "v square", {"equation": "bchw,wd->bchd"}),
    ("CumSum", "v axis", {}),
    ("DepthToSpace", "v", {"blocksize": 2}),
    ("SpaceToDepth", "v", {"blocksize": 2}),
    ("Split", "v", {"axis": 1, "num_outputs": 2}),
    ("Tile", "v repeats", {}),
    ("Expand", "v wide", {}),
    ("Unsqueeze", "v axes", {}),
    ("Trilu", "v", {"upper": 0}),
    ("GatherElements", "v places", {"axis": 3}),
    ("ScatterElements", "v places half_like", {"axis": 3}),
    ("QuantizeLinear", "v half_scale code", {}),
    ("Cast", "v", {"to": 10}),
    ("Dropout", "v", {}),
    ("Mean", "v v", {}),
    ("Sum", "v v v", {}),
)
"""Operators, what each reads, and its attributes; `v` is what all of them share."""


def _many(factor: float) -> Record:
    """One operator of each type beside the others, all of one value that a first product makes."""

    def record(path: Path) -> None:
        import onnxruntime as ort
        from onnx import TensorProto, helper, numpy_helper

        draw = np.random.default_rng(0).integers(-8, 9, size=(1, 4, 8, 8)).astype(np.float32) / 4
        held = {
            "factor": np.float32(factor), "half": np.float32([0.5]), "zero": np.float32(0),
            "two": np.array([2]), "shape": np.array([1, 4, 64]), "starts": np.array([1]),
            "ends": np.array([7]), "axes": np.array([2]), "picks": np.array([3, 1]),
            "pads": np.array([0, 0, 1, 1, 0, 0, 1, 1]), "empty": np.zeros(0, np.float32),
            "scales": np.float32([1, 1, 2, 2]), "four": np.float32([1, 0.5, 2, 1]),
            "two_groups": np.float32([1, 0.5, 2, 1]), "eight": np.ones(8, np.float32) / 2,
            "kernel": draw[:, :, :3, :3].repeat(4, 0) / 4, "square": draw[0, 0] / 4,
            "axis": np.int64(3), "repeats": np.array([1, 2, 1, 1]), "wide": np.array([2, 4, 8, 8]),
            "places": np.arange(32).reshape(1, 4, 8, 1) % 8,
            "half_like": np.full((1, 4, 8, 1), 0.5, np.float32), "half_scale": np.float32(0.5),
            "code": np.uint8(128),
        }  # fmt: skip
        held["half"] = held["half"][0]
        nodes = [helper.make_node("Mul", ["x", "factor"], ["v"], "first")]
        outputs = []
        for number, (kind, reads, attributes) in enumerate(_OPERATORS):
            made = [f"{kind}_{number}"]
            if kind in ("TopK", "Split"):
                made.append(f"{kind}_{number}_b")
            reads_of = ["half_row" if r == "half" and kind == "PRelu" else r for r in reads.split()]
            nodes.append(helper.make_node(kind, reads_of, made, f"{kind}_node", **attributes))
            outputs += made
        held["half_row"] = np.full((4, 1, 1), 0.5, np.float32)
        value = helper.make_empty_tensor_value_info
        graph = helper.make_graph(
            nodes,
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4, 8, 8])],
            [value(name) for name in outputs],
            [numpy_helper.from_array(np.asarray(a), k) for k, a in held.items()],
        )
        made_model = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10
        )
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        engine = ort.InferenceSession(
            made_model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        with whence.capture(engine, path):
            engine.run(None, {"x": draw.astype(np.float32)})

    return record


def _checkpoint_against_file(place: Place) -> Answers:
    """Which weights of a checkpoint are which initialisers of a file."""
    import onnx_models
    from onnx import numpy_helper

    def checkpoint(path: Path) -> None:
        held = {
            t.name: numpy_helper.to_array(t) for t in onnx_models.attention()[0].graph.initializer
        }
        np.savez(path, **{"norm.weight": held["g"], "norm.bias": held["b"],
                          "fc.weight": held["w"].T.copy(), "fc.bias": held["c"]})  # fmt: skip

    place.once("weights.npz", checkpoint)
    place.once("model.onnx", _saved("attention"))
    yield "map.txt", place.whence("map-weights", "weights.npz", "model.onnx", "-o", "out/map.yaml")
    yield from place.read("out/map.yaml")


CASES: dict[str, Case] = {
    **{f"session_{name}": _sessions(name) for name in READABLE},
    "session_same": pair(session("attention"), session("attention")),
    "session_weight": pair(session("convolutions"), session("convolutions", weight("w2", 1.125))),
    "session_attribute": pair(
        session("attention"), session("attention", attribute("LayerNormalization", epsilon=0.25))
    ),
    "session_operator": pair(
        session("convolutions"), session("convolutions", _operator("MaxPool", "AveragePool"))
    ),
    "session_state": pair(session("accumulating"), session("accumulating")),
    "session_io": pair(
        session("recurrent", level="io"),
        session("recurrent", weight("r", 1.25), level="io"),
    ),
    "session_operators": pair(_many(1.0), _many(1.0 + 2.0**-20)),
    "module": _module_against_session(fault=False),
    "module_fault": _module_against_session(fault=True),
    "file_same": _files("convolutions", lambda model: None),
    "file_renamed": _files("convolutions", _renamed),
    "file_weight": _files("attention", weight("w", 1.125)),
    "file_attribute": _files("convolutions", attribute("Conv", pads=[0, 0, 2, 2])),
    "file_operator": _files("attention", _operator("Softmax", "LogSoftmax")),
    "file_recurrent": _files("recurrent", weight("r", 1.125)),
    "openvino": _openvino,
    "quantised_pairs_of_nodes": _quantised("QDQ"),
    "quantised_operators": _quantised("QOperator"),
    "quantised_scale": _quantised("QDQ", b__weight_scale=lambda scale: scale * 1.25),
    "checkpoint_against_file": _checkpoint_against_file,
}
