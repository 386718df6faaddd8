"""Every module of the zoo: recorded, reproduced bitwise, run in float64 and in 16 bit; or refused
with the reason.
"""

import contextlib
import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import program_recording as recording  # noqa: E402
import program_zoo as modules  # noqa: E402

from processors import skip_without_bfloat16_lstm  # noqa: E402
from whence.errors import ReplayRefused  # noqa: E402

pytestmark = pytest.mark.torch
MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}


def built(name, table=modules.USABLE):
    torch.manual_seed(0)
    return table[name]()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", modules.USABLE)
def test_reproduces_bitwise_and_runs_wide(name, mode):
    module, inputs = built(name)
    with MODES[mode]():
        _, recorded = recording.record(module, *copy.deepcopy(inputs))
    loaded = recorded.load()
    assert recorded.check(loaded) == ""
    assert loaded.check_note == ""
    wide = loaded.run(recorded.inputs, recorded.params, working="float64", strides=recorded.strides)
    for slot, want in recorded.outputs.items():
        if want.dtype.kind == "f" and want.size:
            assert wide[slot].dtype == np.float64
            np.testing.assert_allclose(wide[slot], want, rtol=2e-4, atol=2e-5)
        elif want.dtype.kind != "c":
            np.testing.assert_array_equal(wide[slot], want)
    assert not any("float32" in n for n in loaded.notes), loaded.notes
    if name == "bilinear":
        return  # oneDNN has no bf16 kernel for it on every CPU
    rounded = {
        s: a.astype(recording.BF16) if a.dtype == np.float32 else a
        for s, a in recorded.params.items()
    }
    for steps in (False, True):
        low = loaded.run(
            recorded.inputs, rounded, working="bfloat16", strides=recorded.strides, stepwise=steps
        )
        for slot, want in recorded.outputs.items():
            if want.dtype.kind == "f" and want.size:
                scale = np.abs(want).max() + 1e-3
                assert np.abs(low[slot].astype(np.float64) - want).max() < 0.1 * scale, slot


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", modules.REFUSED)
def test_refused_with_the_reason(name, mode):
    module, inputs, reason = built(name, modules.REFUSED)
    with MODES[mode]():
        _, recorded = recording.record(module, *inputs)
    assert recorded.recording.program is None
    assert reason in recorded.reason


@pytest.mark.parametrize("mode", [*MODES, "autocast"])
@pytest.mark.parametrize("name", [*modules.USABLE, *modules.REFUSED])
def test_recording_changes_nothing(name, mode):
    table = modules.USABLE if name in modules.USABLE else modules.REFUSED
    if name == "lstm" and mode == "autocast":
        skip_without_bfloat16_lstm()

    def go(listen):
        module, inputs, *_ = built(name, table)
        grad = (
            mode in ("grad", "autocast")
            and "in place" not in name
            and name != "in place on the input"
        )
        inputs = [
            t.requires_grad_()
            if grad and isinstance(t, torch.Tensor) and t.is_floating_point()
            else t
            for t in inputs
        ]
        context = MODES.get(mode, contextlib.nullcontext)
        cast = (
            torch.autocast("cpu", torch.bfloat16)
            if mode == "autocast"
            else contextlib.nullcontext()
        )
        torch.manual_seed(5)
        with context(), cast:
            out = recording.record(module, *inputs)[0] if listen else module(*inputs)
        tensors = [
            t for _, t in recording.flat(out if isinstance(out, (tuple, list)) else (out,), "")
        ]
        grads = []
        if grad and any(t.requires_grad for t in tensors):
            sum(t.float().pow(2).sum() for t in tensors if t.requires_grad).backward()
            grads = [
                t.grad
                for t in [*inputs, *module.parameters()]
                if isinstance(t, torch.Tensor) and t.grad is not None
            ]
            assert grads
        state = [*module.state_dict().values(), torch.get_rng_state()]
        return [recording.host(t) for t in [*tensors, *grads, *state]], [
            t.requires_grad for t in tensors
        ]

    bare, bare_grad = go(False)
    seen, seen_grad = go(True)
    assert len(bare) == len(seen)
    assert bare_grad == seen_grad
    assert all(recording.same(a, b) for a, b in zip(bare, seen))


def test_guard_sees_another_number():
    _, recorded = recording.record(modules.Item(), modules.g(3, 4))
    loaded = recorded.load()
    assert recorded.check(loaded) == ""
    with pytest.raises(ReplayRefused, match=r"^guard: aten._local_scalar_dense.default read"):
        loaded.run({"input.0": recorded.inputs["input.0"] * 2}, {})


def test_guard_of_the_same_branch():
    _, recorded = recording.record(modules.Branch(), modules.g(3, 4).abs())
    loaded = recorded.load()
    other = np.abs(recorded.inputs["input.0"]) + 1
    np.testing.assert_array_equal(loaded.run({"input.0": other}, {})["output.0"], other * 2)
    with pytest.raises(ReplayRefused, match="guard"):
        loaded.run({"input.0": -other}, {})


def test_guard_of_a_size_that_depends_on_data():
    _, recorded = recording.record(modules.Counts(), modules.g(3, 4))
    loaded = recorded.load()
    assert recorded.check(loaded) == ""
    with pytest.raises(ReplayRefused, match="guard"):
        loaded.run({"input.0": -np.abs(recorded.inputs["input.0"])}, {})


@pytest.mark.parametrize("name", modules.USABLE)
def test_other_activations(name):
    """A value baked into the program survives the self-check on its own call, not one on other
    activations.
    """
    module, inputs = built(name)
    state = copy.deepcopy(module.state_dict())
    other = copy.deepcopy(inputs)
    other = [t * 1.5 if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in other]
    with torch.no_grad():
        _, recorded = recording.record(module, *copy.deepcopy(inputs))
        module.load_state_dict(state)
        _, second = recording.record(module, *other)
    assert second.check(recorded.load()) == ""
    assert second.recording.program.id == recorded.recording.program.id
