"""Both sides of a model, captured: the torch module, and the session of ONNX Runtime."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch

import whence
from _exported.subjects import Tensors, driven, made
from whence.records import Run

Results = list[tuple[np.ndarray, ...]]
"""The tensors that each step returns."""
LEVELS = onnxruntime.GraphOptimizationLevel


def session(path: Path, *, optimised: bool = True, rewritten: Path | None = None) -> Any:
    """A session on one thread. optimised: with all optimisations, else with none. rewritten: where
    the runtime saves the graph that it runs.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    level = LEVELS.ORT_ENABLE_ALL if optimised else LEVELS.ORT_DISABLE_ALL
    options.graph_optimization_level = level
    if rewritten is not None:
        options.optimized_model_filepath = str(rewritten)
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def given(name: str, engine: Any) -> list[dict[str, np.ndarray]]:
    """What a session is given at each step of the model, the states that it returns included."""
    feeds: list[dict[str, np.ndarray]] = []
    for _ in _steps(name, engine, feeds):
        pass
    return feeds


def served(name: str, engine: Any) -> Results:
    """What a session returns at each step of the model."""
    return [tuple(t.numpy() for t in step) for step in _steps(name, engine, [])]


def _steps(name: str, engine: Any, feeds: list[dict[str, np.ndarray]]) -> Iterator[Tensors]:
    """The results of each step; notes what it was given."""
    module, steps = made(name)
    names = [i.name for i in engine.get_inputs()]

    def call(*tensors: torch.Tensor) -> Tensors:
        feeds.append(dict(zip(names, (t.numpy() for t in tensors), strict=True)))
        return tuple(torch.from_numpy(result) for result in engine.run(None, feeds[-1]))

    return driven(name, module, steps, call)


def capture_module(name: str, folder: Path) -> Path:
    """The torch side, with all modules."""
    if not folder.exists():
        module, steps = made(name)
        with _silent(), torch.no_grad(), whence.capture(module, folder):
            for _ in driven(name, module, steps, module):
                pass
    return folder


def capture_session(name: str, engine: Any, folder: Path) -> Results:
    """The engine's side, with all nodes of the graph that runs; what it returned meanwhile."""
    with _silent(), whence.capture(engine, folder, force=True):
        return served(name, engine)


def observer_effect(run: Run) -> str:
    """What the capture says that looking changed: "none", or a sentence."""
    said = [n.text for n in run.notes if n.text.startswith("observer effect: ")]
    return said[0].removeprefix("observer effect: ") if said else "not stated"


def bit_equal(first: Results, second: Results) -> bool:
    """Are all results the same bytes?"""
    return len(first) == len(second) and all(
        len(a) == len(b) and all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))
        for a, b in zip(first, second, strict=True)
    )


def _silent() -> Any:
    """What a capture says to a user as it goes would drown the table."""
    return contextlib.redirect_stderr(io.StringIO())
