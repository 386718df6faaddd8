"""Helpers of the program tests: record what leaf modules ran, without the capture session."""

from __future__ import annotations

import contextlib

import ml_dtypes
import msgspec
import torch

from whence.comparison.replays import self_check
from whence.frameworks.torch_arrays import to_host
from whence.instrument.torch import caller_code
from whence.instrument.torch import program_recorder as tp
from whence.records import Program
from whence.replay import validation

BF16 = ml_dtypes.bfloat16

torch.set_num_threads(1)


def flat(value, prefix):
    """(slot, tensor) of everything in nested containers."""
    if isinstance(value, torch.Tensor):
        yield prefix, value
    elif isinstance(value, dict):
        for k, v in value.items():
            yield from flat(v, f"{prefix}.{k}")
    elif isinstance(value, (list, tuple)):
        for i, v in enumerate(value):
            yield from flat(v, f"{prefix}.{i}")


def host(tensor):
    return to_host(tensor.detach()).copy()


class Recorded:
    """One recorded call: the recording, and its tensors by slot as host arrays (inputs and params
    as before the call).
    """

    def __init__(self, recording, inputs, params, outputs, strides):
        self.recording, self.inputs, self.params, self.outputs, self.strides = (
            recording,
            inputs,
            params,
            outputs,
            strides,
        )

    @property
    def reason(self):
        return self.recording.reason

    def program(self):
        assert self.recording.program is not None, self.recording.reason
        again = msgspec.json.decode(msgspec.json.encode(self.recording.program), type=Program)
        assert again == self.recording.program
        return again

    def load(self, **options):
        return validation.load(
            self.program(), [host(c) for c in self.recording.constants], **options
        )

    def check(self, loaded=None):
        return self_check.check(
            loaded or self.load(), self.inputs, self.params, self.outputs, self.strides
        )

    def run(self, working="recorded", inputs=None, params=None, **options):
        return self.load().run(
            inputs or self.inputs,
            params or self.params,
            working=working,
            strides=self.strides,
            **options,
        )


def record(module, *args, forward=None, **kwargs):
    """Record one call of a module as the capture would; returns (what the module returned,
    Recorded).
    """
    inputs = list(flat({**{str(i): a for i, a in enumerate(args)}, **kwargs}, "input"))
    params = caller_code.tensors_of(module)
    slots = [*inputs, *params]
    before = {slot: host(t) for slot, t in slots}
    strides = {slot: t.stride() for slot, t in slots}
    recorder = tp.Recorder(inputs, params, casts=not caller_code.asks_for_listeners(module))
    with recorder:
        out = (forward or module)(*args, **kwargs)
    outputs = list(flat(out if isinstance(out, (tuple, list, dict)) else (out,), "output"))
    after = {slot: host(t) for slot, t in slots}
    outputs += [(f"mutated.{slot}", t) for slot, t in slots if not same(before[slot], after[slot])]
    recording = recorder.finish(outputs)
    return out, Recorded(
        recording,
        {s: before[s] for s, _ in inputs},
        {s: before[s] for s, _ in params},
        {s: host(t) for s, t in outputs},
        strides,
    )


def same(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


@contextlib.contextmanager
def leaves(model, first_only=True):
    """Record the calls of modules that call no other; yields {name: [Recorded, ...]}. first_only:
    one call per module and signature.
    """
    found, stack, seen, undo = {}, [], set(), []

    def wrap(name, module):
        original = module.forward

        def forward(*args, **kwargs):
            if stack:
                stack[-1].abandon()
            inputs = list(flat({**{str(i): a for i, a in enumerate(args)}, **kwargs}, "input"))
            signature = (name, tuple((s, t.shape, t.dtype) for s, t in inputs))
            if first_only and signature in seen:
                return original(*args, **kwargs)
            seen.add(signature)
            params = caller_code.tensors_of(module)
            slots = [*inputs, *params]
            before = {slot: host(t) for slot, t in slots}
            strides = {slot: t.stride() for slot, t in slots}
            recorder = tp.Recorder(
                inputs,
                params,
                casts=not caller_code.asks_for_listeners(
                    type("x", (), {"__dict__": {}, "forward": original})()
                ),
            )
            stack.append(recorder)
            try:
                with recorder:
                    out = original(*args, **kwargs)
            finally:
                stack.pop()
            if recorder.reason == "calls other modules":
                return out
            outputs = list(flat(out if isinstance(out, (tuple, list, dict)) else (out,), "output"))
            outputs += [
                (f"mutated.{slot}", t) for slot, t in slots if not same(before[slot], host(t))
            ]
            recording = recorder.finish(outputs)
            found.setdefault(name, []).append(
                Recorded(
                    recording,
                    {s: before[s] for s, _ in inputs},
                    {s: before[s] for s, _ in params},
                    {s: host(t) for s, t in outputs},
                    strides,
                )
            )
            return out

        module.forward = forward
        undo.append(lambda: module.__dict__.pop("forward"))

    for name, module in model.named_modules():
        if "forward" not in module.__dict__:
            wrap(name, module)
    try:
        yield found
    finally:
        for f in undo:
            f()
