"""Records one session of the program: inputs, outputs, and the values of its graph.

Weights of convolutions in blocks of channels, the layout of ONNX Runtime's CPU kernels, are
restored to the order of their shape.

Source: onnxruntime/core/mlas/lib/reorder.cpp: OIHWBiBo where the input is in blocks too, else
OIHWBo, with the channels padded by zeros to whole blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from whence.instrument.engines.effect import Shown
from whence.instrument.engines.tensors import FindExternal, Tensors
from whence.instrument.engines.values import Seen, of_array
from whence.instrument.engines.watched import ModelRoot, StepInProgress, Watched
from whence.instrument.engines.watched import NodeForm as AnyForm
from whence.instrument.onnxruntime.blocked_values import Convolution
from whence.instrument.onnxruntime.graph_plan import GraphPlan, NodeForm
from whence.instrument.onnxruntime.model_edits import one_reorder
from whence.instrument.onnxruntime.values import seen_values
from whence.instrument.session import Session
from whence.records.marks import EngineModel


class Inside(NamedTuple):
    """The graph that a session runs. initializer: returns an initialiser's elements by name, None
    where they cannot be read. find: finds their place in the user's file.
    """

    plan: GraphPlan
    observer: Any
    initializer: Callable[[str], Any]
    find: FindExternal | None


class RunInProgress(StepInProgress):
    """One run of a session. feeds: inputs of the second session. names: outputs that the program
    asked for.
    """

    def __init__(self, order: int, step: int, run_options: Any) -> None:
        super().__init__(order, step)
        self.feeds: dict[str, Any] = {}
        self.names: list[str] = []
        self.run_options = run_options


class WatchedSession(Watched):
    """Records the runs of one session. disabled: names of optimisers that it does without."""

    KIND = EngineModel.ONNX_RUNTIME.value
    NO_PROGRAM = "nodes of ONNX are not recorded as programs"

    def __init__(
        self,
        session: Session,
        tensors: Tensors,
        root: ModelRoot,
        python_session: Any,
        disabled: tuple[str, ...],
    ) -> None:
        super().__init__(session, tensors, root)
        self.disabled = disabled
        self._input_types = {v.name: str(v.type) for v in python_session.get_inputs()}
        self.output_names = [v.name for v in python_session.get_outputs()]
        # of the runtime itself: another one when the program changes providers
        self.native = python_session._sess

    # ---- a step

    def begin(self, feeds: Mapping[str, Any], run_options: Any) -> RunInProgress:
        """Begin a run. feeds: values by input name; a list of (slot, `Seen`) for a bound value."""
        session = self.session
        step = RunInProgress(session.next_order(), self.root.steps, run_options)
        self.started(step)
        for name, value in feeds.items():
            bound = isinstance(value, list) and bool(value) and isinstance(value[0], tuple)
            members = (
                value
                if bound
                else list(seen_values(value, f"input.{name}", self._input_types.get(name, "")))
            )
            if self.is_observed(step.step):
                step.feeds[name] = self._feed(value, members, bound)
            if step.selected and session.selector.slots("input"):
                for slot, seen in members:
                    self.take(step, name, slot, seen)
        return step

    def end(self, step: RunInProgress, results: Sequence[tuple[str, Any]], error: str) -> None:
        """End a run. results: (name, value). error: what the session raised, "" for nothing."""
        step.names = [name for name, _ in results]
        # a member of a sequence by its place
        seen = {slot: value for name, v in results for slot, value in seen_values(v, name)}
        self.ended(step, seen, error)

    @staticmethod
    def _feed(value: Any, members: list[tuple[str, Seen]], bound: bool) -> Any:
        """An input for the second session, copied where the run may overwrite its memory."""
        if not bound and not hasattr(value, "_ortvalue"):
            return value
        seen = members[0][1]
        return value if seen.why else seen.kept().array()

    # ---- nodes

    def why_hidden(self, value: str) -> str:
        """Why a value cannot be brought into its plain form."""
        if self.inside is None or value not in self.inside.observer.hidden:
            return ""
        return "it lies in blocks of channels, and how many channels it has is not known"

    def constant(
        self, form: AnyForm, name: str, shown: Shown
    ) -> tuple[Seen, FindExternal | None] | None:
        """An initialiser, or a value that nodes compute from initialisers alone."""
        inside: Inside = self.inside
        if name in inside.plan.constants:
            return (shown[name][0][1], inside.find) if name in shown else None
        convolution = cast(NodeForm, form).convolution
        array = inside.initializer(name)
        if convolution is not None and not isinstance(array, str):
            array = _plain_parameter(array, convolution, is_weight=name == convolution.weight)
        seen = Seen("", (), why=array) if isinstance(array, str) else of_array(array)
        return seen, inside.find


def _plain_parameter(array: Any, convolution: Convolution, *, is_weight: bool) -> Any:
    """A weight or bias in the plain layout of the convolution, or a text with the reason why it is
    unknown.
    """
    _, outputs, inputs, is_blocked, group = convolution
    plain = None
    if outputs and is_weight:
        plain = _plain_weight(array, outputs, inputs, is_blocked=is_blocked, group=group)
    elif outputs:
        plain = _plain_bias(array, outputs)
    return "it lies in blocks of channels" if plain is None else plain


_CHANNELS = 64


@functools.cache
def block_size() -> int:
    """Number of channels in a block on this processor, measured with the runtime itself; 0 where
    that fails.
    """
    from onnxruntime.capi import _pybind_state

    options = _pybind_state.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        native = _pybind_state.InferenceSession(options, one_reorder(_CHANNELS), False, False)
        native.initialize_session(["CPUExecutionProvider"], [{}], set())
        given = np.arange(2 * _CHANNELS, dtype=np.float32).reshape(1, _CHANNELS, 1, 2)
        laid = native.run(["y"], {"x": given}, None)[0].reshape(-1)
    except Exception:  # noqa: BLE001 - a release or processor without such kernels
        return 0
    # in memory, position 1 of channel 0 follows position 0 of all channels of a block
    return int(np.flatnonzero(laid == 1)[0])


def _plain_weight(
    array: np.ndarray[Any, Any], outputs: int, inputs: int, *, is_blocked: bool, group: int
) -> np.ndarray[Any, Any] | None:
    """A weight as [outputs, inputs, height, width]; None where its form is not what is expected.

    is_blocked: whether the input of the convolution lies in blocks. inputs: channels of the input
    in all.
    """
    block = block_size()
    if not block or array.ndim != 4 or array.shape[0] % block:
        return None
    o, i, h, w = array.shape
    depthwise = group == outputs and i == 1
    if is_blocked and not depthwise:
        if i % block:
            return None
        laid = array.reshape(o // block, i // block, h, w, block, block)
        plain = laid.transpose(0, 5, 1, 4, 2, 3).reshape(o, i, h, w)
    else:
        laid = array.reshape(o // block, i, h, w, block)
        plain = laid.transpose(0, 4, 1, 2, 3).reshape(o, i, h, w)
    each = i if depthwise or not is_blocked else inputs // group
    padding = np.count_nonzero(plain[outputs:]) + np.count_nonzero(plain[:, each:])
    return None if padding or each > i or outputs > o else plain[:outputs, :each]


def _plain_bias(array: np.ndarray[Any, Any], outputs: int) -> np.ndarray[Any, Any] | None:
    """A bias without its padding."""
    if array.ndim != 1 or array.shape[0] < outputs or np.count_nonzero(array[outputs:]):
        return None
    return array[:outputs]
