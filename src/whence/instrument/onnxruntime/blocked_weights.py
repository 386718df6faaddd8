"""Weights of convolutions in blocks of channels, as kernels of ONNX Runtime on a processor take
them, brought back to the order that their shape says.

Source: onnxruntime/core/mlas/lib/reorder.cpp: OIHWBiBo where the input lies in blocks too, else
OIHWBo, with the channels padded by zeros to whole blocks.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from whence.instrument.onnxruntime.model_edits import one_reorder

_CHANNELS = 64


@functools.cache
def block_size() -> int:
    """How many channels a block has on this processor, as the runtime itself shows; 0 where it does
    not.
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
    # the second place of the first channel follows the first place of a whole block
    return int(np.flatnonzero(laid == 1)[0])


def plain_weight(
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


def plain_bias(array: np.ndarray[Any, Any], outputs: int) -> np.ndarray[Any, Any] | None:
    """A bias without its padding."""
    if array.ndim != 1 or array.shape[0] < outputs or np.count_nonzero(array[outputs:]):
        return None
    return array[:outputs]
