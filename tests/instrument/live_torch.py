"""Small live programs for the capture tests, and everything that can be seen of one from outside,
bit by bit.
"""

import contextlib
import dataclasses
import random
import warnings
from collections.abc import Mapping

import numpy as np
import torch

import whence
from whence.frameworks import torch_arrays as tensors
from whence.store import open_run

torch.set_num_threads(1)


def bits(value):
    """Everything visible of a value: nesting, classes, and of tensors dtype, shape, strides, grad
    and every bit.
    """
    if isinstance(value, torch.Tensor):
        facts = (type(value).__name__, str(value.dtype), tuple(value.shape), str(value.device))
        facts += (value.requires_grad, value.grad_fn is not None)
        if (
            value.layout is torch.strided
            and value.device.type == "cpu"
            and type(value) in (torch.Tensor, torch.nn.Parameter)
        ):
            facts += (
                value.stride(),
                value.storage_offset(),
                value.is_conj(),
                value.is_neg(),
                value._is_view(),
            )
            if value.dtype in tensors.NAMES:
                return (*facts, tensors.canonical(value).tobytes())
        return facts
    if isinstance(value, Mapping):
        return (type(value).__name__, {k: bits(v) for k, v in value.items()})
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, [bits(v) for v in value])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return (
            type(value).__name__,
            {f.name: bits(getattr(value, f.name)) for f in dataclasses.fields(value)},
        )
    if hasattr(value, "__dict__") and not callable(value):
        return (type(value).__name__, bits(vars(value)))
    return repr(value) if not callable(value) else type(value).__name__


def random_states():
    state = np.random.get_state()
    return (
        torch.get_rng_state().numpy().tobytes(),
        (state[0], state[1].tobytes(), *state[2:]),
        random.getstate(),
    )


def insides(model):
    """What a module tree holds: parameters, gradients, buffers, hooks, attributes, training
    flags.
    """
    seen = {}
    for name, module in model.named_modules():
        hooks = {
            k: [getattr(f, "__qualname__", type(f).__name__) for f in v.values()]
            for k, v in vars(module).items()
            if "hooks" in k
        }
        held = {
            k: bits(t)
            for table in (module._parameters, module._buffers)
            for k, t in table.items()
            if t is not None
        }
        grads = {
            k: bits(t.grad)
            for k, t in module._parameters.items()
            if t is not None and t.grad is not None
        }
        seen[name] = (
            type(module).__qualname__,
            module.training,
            sorted(vars(module)),
            hooks,
            held,
            grads,
        )
    return seen


def process():
    """What a capture could leave behind in this process."""
    from torch.optim import optimizer

    return (
        torch.nn.Module.__call__,
        len(optimizer._global_optimizer_post_hooks),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
    )


def seeded(seed=0):
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def observed(make, use, around):
    """All that one execution of `use(model)` shows, `around` being what is held open meanwhile."""
    seeded()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = make()
        with around(model):
            out = use(model)
            hooks = {
                name: {k: id(v) for k, v in vars(m).items() if "hooks" in k}
                for name, m in model.named_modules()
            }
    assert hooks == {
        name: {k: id(v) for k, v in vars(m).items() if "hooks" in k}
        for name, m in model.named_modules()
    }
    return bits(out), random_states(), insides(model)


def unchanged(make, use, path, **options):
    """Assert that `use(make())` shows the same bits with and without a capture; return the run."""
    before = process()
    bare = observed(make, use, lambda model: contextlib.nullcontext())
    assert process() == before
    with_capture = observed(make, use, lambda model: whence.capture(model, path, **options))
    assert process() == before
    assert with_capture[0] == bare[0], "outputs"
    assert with_capture[1] == bare[1], "random states"
    assert with_capture[2] == bare[2], "the module tree"
    run = open_run(path)
    assert run.ended == "", run.ended
    assert [n for n in run.notes if n.kind == "error"] == []
    assert len(run.calls) > 0
    for i, record in enumerate(run.records):
        if record.elements is not None:
            run.array(i)
    return run


def captured(model, path, use, **options):
    """The run of `use(model)`."""
    with whence.capture(model, path, **options):
        use(model)
    run = open_run(path)
    assert run.ended == "", run.ended
    assert [n for n in run.notes if n.kind == "error"] == []
    return run


def call(run, scope, at=0, **wanted):
    """The `at`-th call of a scope, in order, with these fields."""
    return [
        c
        for c in run.calls
        if c.scope == scope and all(getattr(c, k) == v for k, v in wanted.items())
    ][at]


def slots(run_call):
    return [r.slot for r in run_call.refs]


def ref(run_call, slot):
    return next(r for r in run_call.refs if r.slot == slot)


def tensor(run, run_call, slot):
    return tensors.from_host(run.array(ref(run_call, slot).record))
