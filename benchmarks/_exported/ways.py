"""Ways in which a file is treated, and the engines that run both sides."""

from __future__ import annotations

import contextlib
import io
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, numpy_helper

import whence
from _exported.nets import NETS, Values

LEVELS = onnxruntime.GraphOptimizationLevel
Treatment = Callable[[Path, Path, list[Values]], None]


@dataclass(frozen=True)
class Engine:
    """What runs a file: ONNX Runtime at a level, or OpenVINO with a precision."""

    name: str
    level: Any = None
    precision: str = ""

    def capture(self, file: Path, feeds: list[Values], folder: Path) -> None:
        if self.precision:
            import openvino

            core = openvino.Core()
            model = core.read_model(str(file))
            with whence.capture(model, folder):
                hint = {"INFERENCE_PRECISION_HINT": self.precision}
                compiled = core.compile_model(model, "CPU", hint)
                for feed in feeds:
                    compiled(dict(feed))
            return
        session = self.session(file)
        with whence.capture(session, folder):
            for feed in feeds:
                session.run(None, feed)

    def session(self, file: Path) -> Any:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        options.graph_optimization_level = self.level
        return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


OFF = Engine("off", LEVELS.ORT_DISABLE_ALL)
ALL = Engine("all", LEVELS.ORT_ENABLE_ALL)
BASIC = Engine("basic", LEVELS.ORT_ENABLE_BASIC)
OPENVINO = Engine("openvino", precision="f32")
OPENVINO_BF16 = Engine("openvino-bf16", precision="bf16")


@dataclass(frozen=True)
class Way:
    """How the target's side comes about. rewrites: does it write another file, which is compared as
    a file too? family: needs a transformer.
    """

    treat: Treatment
    engine: Engine = ALL
    reference: Engine = OFF
    suffix: str = ".onnx"
    rewrites: bool = True
    family: bool = False

    def feeds(self, file: Path, feeds: list[Values]) -> list[Values]:
        """The same inputs in the types that the treated file takes."""
        if self.suffix != ".onnx":
            return feeds
        wanted = {
            i.name: i.type.tensor_type.elem_type
            for i in onnx.load(str(file), load_external_data=False).graph.input
        }
        return [
            {
                n: v.astype(np.float16) if wanted.get(n) == TensorProto.FLOAT16 else v
                for n, v in feed.items()
            }
            for feed in feeds
        ]


def fits(net: str, way: str) -> bool:
    """Is the way one for this net?"""
    return not WAYS[way].family or bool(NETS[net].family)


def _same(source: Path, treated: Path, _: list[Values]) -> None:
    shutil.copy(source, treated)


def _half(keep: bool) -> Treatment:
    def treat(source: Path, treated: Path, _: list[Values]) -> None:
        from onnxconverter_common import float16

        with contextlib.redirect_stdout(io.StringIO()):
            model = float16.convert_float_to_float16(onnx.load(str(source)), keep_io_types=keep)
        onnx.save(model, str(treated))

    return treat


def _rounded(to: str) -> Treatment:
    """Weights rounded to 16 bits and stored in 32."""

    def treat(source: Path, treated: Path, _: list[Values]) -> None:
        import torch

        model = onnx.load(str(source))
        for tensor in model.graph.initializer:
            if tensor.data_type == TensorProto.FLOAT:
                exact = torch.from_numpy(numpy_helper.to_array(tensor).copy())
                rounded = exact.to(getattr(torch, to)).float().numpy()
                tensor.CopyFrom(numpy_helper.from_array(rounded, tensor.name))
        onnx.save(model, str(treated))

    return treat


def _compressed(source: Path, treated: Path, _: list[Values]) -> None:
    import openvino

    openvino.save_model(
        openvino.Core().read_model(str(source)), str(treated), compress_to_fp16=True
    )


def _simplified(source: Path, treated: Path, _: list[Values]) -> None:
    import onnxsim

    onnx.save(onnxsim.simplify(onnx.load(str(source)))[0], str(treated))


def _slimmed(source: Path, treated: Path, _: list[Values]) -> None:
    import onnxslim

    onnx.save(onnxslim.slim(onnx.load(str(source))), str(treated))


def _converted(source: Path, treated: Path, _: list[Values]) -> None:
    from onnx import version_converter

    onnx.save(version_converter.convert_version(onnx.load(str(source)), 21), str(treated))


def _dynamic(source: Path, treated: Path, _: list[Values]) -> None:
    from onnxruntime.quantization import quantize_dynamic

    quantize_dynamic(str(source), str(treated))


def _static(form: str) -> Treatment:
    def treat(source: Path, treated: Path, feeds: list[Values]) -> None:
        from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static

        class Reader(CalibrationDataReader):
            def __init__(self) -> None:
                self.feeds = iter(feeds)

            def get_next(self) -> Any:
                return next(self.feeds, None)

        quantize_static(
            str(source),
            str(treated),
            Reader(),
            quant_format=getattr(QuantFormat, form),
            per_channel=True,
        )

    return treat


def _blocks(source: Path, treated: Path, _: list[Values]) -> None:
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    quantizer = MatMulNBitsQuantizer(onnx.load(str(source)), block_size=32, is_symmetric=False)
    quantizer.process()
    onnx.save(quantizer.model.model, str(treated))


def _fused(source: Path, treated: Path, _: list[Values]) -> None:
    from onnxruntime.transformers.fusion_options import FusionOptions
    from onnxruntime.transformers.optimizer import optimize_model

    optimised = optimize_model(
        str(source),
        model_type="bert",
        num_heads=4,
        hidden_size=64,
        opt_level=0,
        optimization_options=FusionOptions("bert"),
    )
    optimised.save_model_to_file(str(treated))


WAYS = {
    "all": Way(_same, rewrites=False),
    "basic": Way(_same, engine=BASIC, rewrites=False),
    "openvino": Way(_same, engine=OPENVINO, rewrites=False),
    "openvino-all": Way(_same, engine=OPENVINO, reference=ALL, rewrites=False),
    "openvino-bf16": Way(_same, engine=OPENVINO_BF16, rewrites=False),
    "openvino-fp16": Way(_compressed, engine=OPENVINO, suffix=".xml"),
    "fp16-keep": Way(_half(True)),
    "fp16-io": Way(_half(False)),
    "fp16-off": Way(_half(True), engine=OFF),
    "half-float": Way(_rounded("float16")),
    "bf16-float": Way(_rounded("bfloat16")),
    "onnxsim": Way(_simplified),
    "onnxslim": Way(_slimmed),
    "opset21": Way(_converted),
    "dynamic": Way(_dynamic),
    "dynamic-off": Way(_dynamic, engine=OFF),
    "static-qdq": Way(_static("QDQ"), engine=OFF),
    "static-qop": Way(_static("QOperator")),
    "int4": Way(_blocks),
    "fused": Way(_fused, family=True),
}
