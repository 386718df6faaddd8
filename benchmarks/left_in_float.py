"""Which quantised layers are worth leaving in float: models with one bad layer, planted.

Each model is quantised by ONNX Runtime's quantiser, statically or as it comes, after one layer was
made hard to quantise: in each row one weight far above the others, in one column or anywhere. Told
are the place of that layer in whence's table, that of the layer that gains most when it is measured
(an outlier also makes later layers coarser), and how far the estimated gain of every layer in the
table is from the gain measured with that layer in float.

    python benchmarks/left_in_float.py --models 20 --seed 0
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantType,
    quantize_dynamic,
    quantize_static,
)

import whence
from whence.instrument.onnxruntime.in_float import LayersInFloat

WORTH = 0.02
"""The answer shows layers from this estimated share on."""


class Model:
    """Residual blocks of products or convolutions, with one layer made hard to quantise."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.is_image = bool(seed % 2)
        self.way = ("static", "per tensor", "dynamic")[seed % 3]
        self.blocks = int(self.random.integers(3, 6))
        self.width = int(self.random.choice([16, 24, 32]))
        self.bad = f"{self.random.integers(self.blocks)}.{self.random.choice(['up', 'down'])}"
        self.fault = ("weight", "channel")[int(self.random.integers(2))]
        self.nodes: list[onnx.NodeProto] = []
        self.tensors: list[onnx.TensorProto] = []

    @property
    def shape(self) -> list[int]:
        return [2, self.width, 6, 6] if self.is_image else [12, self.width]

    def inputs(self, seed: int) -> dict[str, np.ndarray]:
        return {"x": np.random.default_rng(seed).standard_normal(self.shape).astype("f4")}

    def layer(self, x: str, name: str, rows: int, columns: int) -> str:
        weight = self.random.standard_normal((rows, columns)) / np.sqrt(columns)
        if name == self.bad:
            # One step serves a whole row: the weights beside an outlier lose their bits.
            chosen = self.random.integers(columns, size=rows)
            chosen[:] = chosen[0] if self.fault == "channel" else chosen
            weight[np.arange(rows), chosen] = 30 * np.abs(weight).mean()
        kind = "Conv" if self.is_image else "MatMul"
        weight = weight[:, :, None, None] if self.is_image else weight.T
        self.tensors.append(numpy_helper.from_array(weight.astype("f4"), f"{name}.weight"))
        return self.node(kind, [x, f"{name}.weight"], f"/{name.replace('.', '/')}/{kind}_output_0")

    def node(self, kind: str, reads: list[str], makes: str) -> str:
        self.nodes.append(h.make_node(kind, reads, [makes], makes.removesuffix("_output_0")))
        return makes

    def proto(self) -> onnx.ModelProto:
        x = "x"
        for k in range(self.blocks):
            inner = self.layer(x, f"{k}.up", 2 * self.width, self.width)
            inner = self.node("Relu", [inner], f"/{k}/act/Relu_output_0")
            inner = self.layer(inner, f"{k}.down", self.width, 2 * self.width)
            x = self.node("Add", [x, inner], "y" if k == self.blocks - 1 else f"/{k}/Add_output_0")
        value = h.make_tensor_value_info
        graph = h.make_graph(
            self.nodes, "graph", [value("x", T.FLOAT, self.shape)],
            [value("y", T.FLOAT, self.shape)], self.tensors,
        )  # fmt: skip
        return h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=9)


class Reader(CalibrationDataReader):
    def __init__(self, model: Model) -> None:
        self.batches = iter([model.inputs(seed) for seed in range(4)])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self.batches, None)


def quantised(model: Model, source: Path, target: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        if model.way == "dynamic":
            quantize_dynamic(str(source), str(target))
        else:
            quantize_static(
                str(source), str(target), Reader(model), per_channel=model.way == "static",
                weight_type=QuantType.QInt8, activation_type=QuantType.QInt8,
            )  # fmt: skip


def session(model: str | bytes) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


class Notes:
    """Takes the notes of `LayersInFloat`, which a capture keeps."""

    def note(self, *_: object) -> None:
        pass


def measured(seed: int, folder: Path) -> tuple[Model, list[tuple[str, float, float]]]:
    """(model, [(layer, estimated gain, measured gain)] of the layers that have weights)."""
    model = Model(seed)
    onnx.save(model.proto(), str(folder / "float.onnx"))
    quantised(model, folder / "float.onnx", folder / "int8.onnx")
    given = model.inputs(99)
    for name in ("float", "int8"):
        ran = session(str(folder / f"{name}.onnx"))
        with whence.capture(ran, folder / name):
            ran.run(None, given)
    result = whence.compare(folder / "float", folder / "int8")
    if result.status != "same":
        print(f"  {seed}: {result.status}: {result.headline}")
    right = session(str(folder / "float.onnx")).run(None, given)[0].astype("f8")

    def error(source: str | bytes) -> float:
        return float(np.square(session(source).run(None, given)[0] - right).sum())

    whole = error(str(folder / "int8.onnx"))
    reference = whence.open_run(folder / "float")
    rows = []
    for cost in result.layer_costs:
        estimated = cost.explains if cost.weights_explain is None else cost.weights_explain
        if estimated is None or not any(part in cost.name for part in (".up.", ".down.")):
            continue
        layers = LayersInFloat(Notes(), reference, cost.name.split("+"))  # type: ignore[arg-type]
        rows.append(
            (cost.name, estimated, 1 - error(layers.model(str(folder / "int8.onnx"))) / whole)
        )
    return model, sorted(rows, key=lambda row: -row[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    first, best, off, shown = 0, 0, [], 0
    for seed in range(options.seed, options.seed + options.models):
        with tempfile.TemporaryDirectory() as folder:
            model, rows = measured(seed, Path(folder))
        names = [name for name, _, _ in rows]
        place = next((k for k, name in enumerate(names, 1) if name.startswith(f"{model.bad}.")), 0)
        first += 1 <= place <= 3
        gains = [gain for _, _, gain in rows]
        best += gains.index(max(gains)) < 3
        for name, estimated, gain in rows:
            if estimated >= WORTH:
                shown += 1
                off.append(abs(estimated - gain) / max(abs(gain), 1e-9))
                if off[-1] > 0.2:
                    print(f"  {seed} {name}: estimated {estimated:.3f}, measured {gain:.3f}")
        print(f"{seed} {model.way} {model.fault} in {model.bad}: place {place} of {len(rows)}")
    near = sum(share <= 0.2 for share in off)
    print(
        f"among the first three: the planted layer {first} of {options.models}, the one that gains "
        f"most {best} of {options.models}; estimates within 20 %: {near} of {shown} rows"
    )


if __name__ == "__main__":
    main()
