"""Nodes of ONNX models as whence takes them, and what their programs compute."""

import numpy as np
import onnx
from onnx import numpy_helper

from whence import dtypes
from whence.replay import validation
from whence.replay.onnx_translation.translation import program
from whence.replay.onnx_translation.writer import Node, Operand, Result


def attribute(proto):
    """The plain value of an attribute."""
    value = onnx.helper.get_attribute_value(proto)
    if proto.type == onnx.AttributeProto.TENSOR:
        return numpy_helper.to_array(value)
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, onnx.GraphProto):
        return {"graph": True}
    listed = proto.type in (
        onnx.AttributeProto.INTS, onnx.AttributeProto.FLOATS, onnx.AttributeProto.STRINGS
    )  # fmt: skip
    return [v.decode() if isinstance(v, bytes) else v for v in value] if listed else value


def dtype_of(array):
    try:
        return dtypes.of(array).name
    except Exception:  # a dtype that whence does not have
        return str(array.dtype)


def as_node(proto, opset, arrays, expected, params=()):
    """The node that whence sees. arrays: by name; expected: its outputs by name. params: names of
    inputs that are parameters.
    """
    inputs = [
        Operand(
            f"param.{name}" if name in params else f"input.{k}",
            dtype_of(arrays[name]),
            arrays[name].shape,
            lambda name=name: arrays[name],
        )
        if name
        else None
        for k, name in enumerate(proto.input)
    ]
    outputs = [
        Result(f"output.{k}", dtype_of(expected[name]), expected[name].shape)
        if name and expected.get(name) is not None
        else None
        for k, name in enumerate(proto.output)
    ]
    attributes = {a.name: attribute(a) for a in proto.attribute}
    return Node(proto.op_type, proto.domain, opset, attributes, inputs, outputs)


def computed(proto, opset, arrays, expected, working="recorded", params=()):
    """The outputs of a node by name, as its program computes them."""
    node = as_node(proto, opset, arrays, expected, params)
    made = program(node)
    loaded = validation.load(made, [])
    by_slot = {o.slot: arrays[n] for o, n in zip(node.inputs, proto.input) if o is not None}
    results = loaded.run(
        {slot: by_slot[slot] for slot in made.inputs},
        {slot: by_slot[slot] for slot in made.params},
        working=working,
    )
    return {proto.output[int(slot[7:])]: array for slot, array in results.items()}


WIDER = {"bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
         "float8_e5m2fnuz"}  # fmt: skip


def difference(found, expected, rtol, atol):
    """Why two arrays differ, "" where they do not."""
    if found.shape != expected.shape:
        return f"shape {found.shape}, not {expected.shape}"
    if found.dtype != expected.dtype and not (
        dtypes.of(found).is_floating and dtypes.of(expected).is_floating
    ):
        return f"dtype {found.dtype}, not {expected.dtype}"
    with np.errstate(invalid="ignore"):  # not a number of eight bits
        a, b = (
            x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)
            for x in (found, expected)
        )
    if not np.allclose(a, b, rtol, atol, equal_nan=True):
        return f"values differ: {a.reshape(-1)[:8]}, not {b.reshape(-1)[:8]}"
    return ""


def loaded(value):
    """A value of a test of ONNX as an array; a sequence as one of objects."""
    if isinstance(value, onnx.TensorProto):
        return numpy_helper.to_array(value)
    return np.array(None) if value is None or isinstance(value, list) else np.asarray(value)


def tolerance(dtype):
    """What rounding may change in a result of this dtype."""
    return {"bfloat16": 2e-2, "float16": 4e-3, "float8_e4m3fn": 0.07, "float8_e4m3fnuz": 0.07,
            "float8_e5m2": 0.13, "float8_e5m2fnuz": 0.13}.get(str(dtype), 1e-3)  # fmt: skip


def by_runtime(proto, opsets, arrays, ir=10):
    """The outputs of a node by name, as ONNX Runtime computes them without optimisation."""
    import onnxruntime as ort

    def info(name, array=None):
        code = onnx.helper.np_dtype_to_tensor_dtype(array.dtype) if array is not None else 0
        shape = list(array.shape) if array is not None else None
        return onnx.helper.make_tensor_value_info(name, code, shape)

    inputs = [info(name, arrays[name]) for name in dict.fromkeys(proto.input) if name]
    outputs = [onnx.helper.make_empty_tensor_value_info(n) for n in proto.output if n]
    graph = onnx.helper.make_graph([proto], "one", inputs, outputs)
    imports = [onnx.helper.make_opsetid(domain, version) for domain, version in opsets.items()]
    model = onnx.helper.make_model(graph, opset_imports=imports, ir_version=ir)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    values = {i.name: arrays[i.name] for i in session.get_inputs()}
    return dict(zip([n for n in proto.output if n], session.run(None, values)))


def node(op_type, arrays, outputs=1, domain="", **attributes):
    """A node whose inputs are these arrays ("" for an absent one), and the arrays by name."""
    names = [f"x{k}" if array is not None else "" for k, array in enumerate(arrays)]
    made = outputs if isinstance(outputs, list) else [f"y{k}" for k in range(outputs)]
    kept = {k: v for k, v in attributes.items() if v is not None}
    proto = onnx.helper.make_node(op_type, names, made, domain=domain, **kept)
    return proto, {n: np.asarray(a) for n, a in zip(names, arrays) if n}
