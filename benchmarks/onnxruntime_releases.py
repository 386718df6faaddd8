"""Faults that optimisers of ONNX Runtime made in shipped releases, climbed with `whence ladder`.

    python benchmarks/onnxruntime_releases.py --table DIR [DIR ...] [--json FILE]
    python benchmarks/onnxruntime_releases.py --release OLD --release NEW [--fault NAME]
    python benchmarks/onnxruntime_releases.py --fault NAME

Folders of releases are made by

    pip install --no-deps --target DIR onnxruntime==1.19.2

The first form runs every fault with optimisations off and on under each release, and prints which
releases are wrong, by numpy alone: what whence says does not count there. The second runs each
fault under releases side by side; the third climbs the levels of the release that is installed.
Both say what was named, against what should be.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

SEED = 20
SHOWN = 1e-3  # of the largest element: what rounding does not do

Values = dict[str, np.ndarray]


class Fault(NamedTuple):
    """A graph that an optimiser changes. make() -> (model as bytes, inputs by name). optimizer:
    that must be named. what: in words.
    """

    make: Callable[[], tuple[bytes, Values]]
    optimizer: str
    level: str
    what: str


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng([SEED, *shape]).normal(size=shape).astype(np.float32)


def model(
    nodes: list[tuple[str, list[str], str, dict[str, object]]],
    inputs: Values,
    weights: dict[str, object],
    opset: int = 17,
) -> tuple[bytes, Values]:
    """A model whose last node makes its output y. nodes: (type, reads, makes, attributes)."""
    from onnx import TensorProto, helper, numpy_helper

    made = [helper.make_node(kind, reads, [makes], **more) for kind, reads, makes, more in nodes]
    kinds = {np.dtype("f4"): TensorProto.FLOAT, np.dtype("i8"): TensorProto.INT64}
    dtype = next(iter(inputs.values())).dtype
    y = helper.make_tensor_value_info("y", kinds[dtype], None)
    graph = helper.make_graph(
        made,
        "graph",
        [
            helper.make_tensor_value_info(n, kinds[v.dtype], list(v.shape))
            for n, v in inputs.items()
        ],
        [y],
        [numpy_helper.from_array(np.asarray(v), n) for n, v in weights.items()],
    )
    imports = [helper.make_opsetid("", opset)]
    proto = helper.make_model(graph, opset_imports=imports, ir_version=8)
    return bytes(proto.SerializeToString()), inputs


def integer_division() -> tuple[bytes, Values]:
    """1 / a * b becomes b / a, which in integers is another number."""
    nodes = [("Div", ["one", "a"], "d", {}), ("Mul", ["d", "b"], "y", {})]
    inputs = {"a": np.full((2, 1), 2), "b": np.array([[3, 4], [-3, 6]])}
    return model(nodes, inputs, {"one": np.ones((1, 1), "i8")})


def third_power() -> tuple[bytes, Values]:
    """A norm that divides by the third moment becomes one that divides by the second."""
    mean = {"axes": [-1], "keepdims": 1}
    nodes = [
        ("ReduceMean", ["x"], "m", mean),
        ("Sub", ["x", "m"], "d", {}),
        ("Pow", ["d", "three"], "p", {}),
        ("ReduceMean", ["p"], "v", mean),
        ("Add", ["v", "epsilon"], "e", {}),
        ("Sqrt", ["e"], "s", {}),
        ("Div", ["d", "s"], "n", {}),
        ("Mul", ["n", "scale"], "g", {}),
        ("Add", ["g", "bias"], "y", {}),
    ]
    weights = {
        "three": np.float32(3),
        "epsilon": np.float32(20),
        "scale": 1 + drawn(8),
        "bias": drawn(1, 8)[0],
    }
    return model(nodes, {"x": drawn(2, 4, 8)}, weights)


def root_of_third_power() -> tuple[bytes, Values]:
    """The same without a mean: the norm is simplified."""
    nodes = [
        ("Pow", ["x", "three"], "p", {}),
        ("ReduceMean", ["p"], "v", {"axes": [-1], "keepdims": 1}),
        ("Add", ["v", "epsilon"], "e", {}),
        ("Sqrt", ["e"], "s", {}),
        ("Div", ["x", "s"], "n", {}),
        ("Mul", ["n", "scale"], "y", {}),
    ]
    weights = {"three": np.float32(3), "epsilon": np.float32(20), "scale": 1 + drawn(8)}
    return model(nodes, {"x": drawn(2, 4, 8)}, weights)


def two_scales() -> tuple[bytes, Values]:
    """Two pairs of QuantizeLinear and DequantizeLinear with scales of their own become one."""
    nodes = []
    value = "x"
    for k, scale in enumerate(("fine", "coarse")):
        zero = f"{scale}0"
        nodes += [
            ("QuantizeLinear", [value, scale, zero], f"q{k}", {}),
            ("DequantizeLinear", [f"q{k}", scale, zero], f"d{k}" if not k else "y", {}),
        ]
        value = f"d{k}"
    weights = {
        "fine": np.float32(0.01),
        "fine0": np.uint8(0),
        "coarse": np.float32(0.2),
        "coarse0": np.uint8(3),
    }
    return model(nodes, {"x": 2 * drawn(4, 16)}, weights)


def transposed_norm() -> tuple[bytes, Values]:
    """A batch norm behind a transposed product is folded into the wrong axis of its weight."""
    nodes = [
        ("MatMul", ["x", "w"], "m", {}),
        ("Transpose", ["m"], "t", {"perm": [1, 0]}),
        ("BatchNormalization", ["t", "scale", "bias", "mean", "var"], "y", {}),
    ]
    weights = {
        "w": drawn(6, 4),
        "scale": drawn(4),
        "bias": drawn(1, 4)[0],
        "mean": drawn(2, 4)[0],
        "var": 1 + np.abs(drawn(3, 4)[0]),
    }
    return model(nodes, {"x": drawn(4, 6)}, weights)


def padded_maximum() -> tuple[bytes, Values]:
    """Zeros before a maximum pool become its own padding, which never wins."""
    nodes = [
        ("Pad", ["x", "pads"], "p", {}),
        ("MaxPool", ["p"], "y", {"kernel_shape": [3, 3]}),
    ]
    pads = np.array([0, 0, 1, 1, 0, 0, 1, 1])
    return model(nodes, {"x": drawn(1, 3, 8, 8) - 2}, {"pads": pads})


def padded_average() -> tuple[bytes, Values]:
    """Zeros before an average that leaves out its own padding are left out too."""
    pool = {"kernel_shape": [3, 3], "pads": [1] * 4, "count_include_pad": 0}
    nodes = [("Pad", ["x", "pads"], "p", {}), ("AveragePool", ["p"], "y", pool)]
    pads = np.array([0, 0, 0, 1, 0, 0, 1, 0])
    return model(nodes, {"x": drawn(1, 3, 8, 8)}, {"pads": pads})


def lost_axis() -> tuple[bytes, Values]:
    """A factor with three axes is taken into a product of two, whose result then has two."""
    nodes = [("Mul", ["a", "half"], "s", {}), ("MatMul", ["s", "b"], "y", {})]
    inputs = {"a": drawn(2, 4), "b": drawn(4, 3)}
    return model(nodes, inputs, {"half": np.full((1, 1, 1), 0.5, "f4")})


def ceiled_maximum() -> tuple[bytes, Values]:
    """A maximum pool behind a convolution takes windows that lie in its padding alone."""
    pool = {"kernel_shape": [2, 2], "pads": [1] * 4, "strides": [2, 2], "ceil_mode": 1}
    nodes = [("Conv", ["x", "w"], "c", {"pads": [1] * 4}), ("MaxPool", ["c"], "y", pool)]
    return model(nodes, {"x": drawn(1, 16, 7, 10)}, {"w": drawn(16, 16, 3, 3)})


FAULTS = {
    "integer-division": Fault(integer_division, "DivMulFusion", "basic", "1 / a * b in integers"),
    "third-power": Fault(third_power, "LayerNormFusionL1", "basic", "a norm of third moments"),
    "two-scales": Fault(two_scales, "DoubleQDQPairsRemover", "basic", "a second rounding is lost"),
    "root-of-third-power": Fault(
        root_of_third_power, "SimplifiedLayerNormFusion", "extended", "a norm of third moments"
    ),
    "transposed-norm": Fault(
        transposed_norm, "MatMul_BatchNormalization_Fusion", "basic", "folded over a transpose"
    ),
    "padded-maximum": Fault(padded_maximum, "Pad_Fusion", "basic", "zeros that never win"),
    "padded-average": Fault(padded_average, "Pad_Fusion", "basic", "zeros that do not count"),
    "lost-axis": Fault(lost_axis, "MatMulScaleFusion", "extended", "an output loses an axis"),
    "ceiled-maximum": Fault(ceiled_maximum, "NchwcTransformer", "layout", "windows of padding"),
}

SERVE = """
import sys
import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
session.run(None, dict(np.load("inputs.npz")))
"""
# Under one release: the results of every fault with optimisations off and on.
ALONE = """
import sys
import numpy as np
import onnxruntime
from pathlib import Path

for folder in Path(".").iterdir():
    for level in ("ORT_DISABLE_ALL", "ORT_ENABLE_ALL"):
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
        session = onnxruntime.InferenceSession(
            str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"]
        )
        y = session.run(None, dict(np.load(folder / "inputs.npz")))[0]
        np.save(folder / f"{sys.argv[1]}-{level}.npy", y)
"""


def write(folder: Path, fault: Fault) -> None:
    """The model, its inputs and a program that runs it."""
    folder.mkdir(parents=True)
    data, inputs = fault.make()
    (folder / "model.onnx").write_bytes(data)
    np.savez(folder / "inputs.npz", **inputs)
    (folder / "serve.py").write_text(SERVE)


def differs(off: np.ndarray, on: np.ndarray) -> bool:
    """By more than rounding, in shape, or in what is finite."""
    if off.shape != on.shape or (np.isfinite(off) != np.isfinite(on)).any():
        return True
    wide = off.astype(np.float64)
    return bool(np.abs(wide - on).max() > SHOWN * max(np.abs(wide).max(), 1e-30))


def table(folders: list[str]) -> dict[str, dict[str, str]]:
    """Fault -> release -> "wrong", "right" or "fails", by numpy."""
    answer: dict[str, dict[str, str]] = {name: {} for name in FAULTS}
    with tempfile.TemporaryDirectory() as place:
        for name, fault in FAULTS.items():
            write(Path(place, name), fault)
        for folder in folders:
            environment = {**os.environ, "PYTHONPATH": str(Path(folder).absolute())}
            release = Path(folder).name
            subprocess.run(
                [sys.executable, "-c", ALONE, release], cwd=place, env=environment, check=False
            )
            for name, row in answer.items():
                results = [
                    Path(place, name, f"{release}-{level}.npy")
                    for level in ("ORT_DISABLE_ALL", "ORT_ENABLE_ALL")
                ]
                if not all(path.is_file() for path in results):
                    row[release] = "fails"
                    continue
                row[release] = "wrong" if differs(*map(np.load, results)) else "right"
    return answer


def climb(names: list[str], releases: list[str]) -> dict[str, dict[str, object]]:
    """Fault -> what `whence ladder` says: by releases, or by levels without any."""
    answer = {}
    for name in names:
        with tempfile.TemporaryDirectory() as place:
            write(Path(place, "program"), FAULTS[name])
            words = [word for folder in releases for word in ("--release", Path(folder).absolute())]
            whence = [sys.executable, "-m", "whence", "ladder", "-o", "ladder", "--format", "json"]
            done = subprocess.run(
                [*whence, *map(str, words), "--", sys.executable, "serve.py"],
                cwd=Path(place, "program"),
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode > 2:
                raise SystemExit(done.stderr)
            result = json.loads(done.stdout)
        named = result.get("compiler_pass") or {}
        rungs = [r.get("node", "") for r in result["rungs"]]
        answer[name] = {
            "status": result["status"],
            "named": result.get("stages", []),
            "optimiser": named.get("info", ""),
            "node": named.get("node") or next(filter(None, rungs), ""),
            "runs": named.get("runs", 0),
            "expected": FAULTS[name].optimizer,
        }
        print(f"{name:<20} {json.dumps(answer[name])}", flush=True)
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", nargs="+", metavar="DIR")
    parser.add_argument("--release", action="append", default=[], metavar="DIR")
    parser.add_argument("--fault", action="append", choices=list(FAULTS))
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    if arguments.table:
        answer = table(arguments.table)
        for name, row in answer.items():
            print(f"{name:<20} " + "  ".join(f"{r} {v}" for r, v in row.items()))
    else:
        answer = climb(arguments.fault or list(FAULTS), arguments.release)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(answer, indent=1))


if __name__ == "__main__":
    main()
