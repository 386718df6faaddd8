"""What may be done otherwise in a training: without another result than rounding, or as a fault
from one step on.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from _diverging.models import Attention, batch_of, is_language
from _diverging.training import Training
from whence.results import Parting, PartKind


class Harmless(NamedTuple):
    """A change that leaves nothing but rounding. fits: models that it can be made in."""

    title: str
    make: Callable[[Training], None]
    fits: Callable[[Training], bool] = lambda training: True
    both: Callable[[Training], None] = lambda training: None


class Fault(NamedTuple):
    """A fault from step k on. make: prepares a training. is_named: does an answer name its place?
    later: steps after k at which it can be seen first.
    """

    title: str
    make: Callable[[Training, int], None]
    is_named: Callable[[Parting], bool]
    fits: Callable[[Training], bool] = lambda training: True
    later: int = 0
    both: Callable[[Training], None] = lambda training: None


def _set(**values: Any) -> Callable[[Training], None]:
    def make(training: Training) -> None:
        for name, value in values.items():
            setattr(training, name, value)

    return make


def _options(**values: Any) -> Callable[[Training], None]:
    return lambda training: training.options.update(values)


def _draws(training: Training) -> bool:
    return training.model_name in ("mlp", "gpt")


def _eager(training: Training) -> None:
    def at_step(training: Training, step: int) -> None:
        for module in training.model.modules():
            if isinstance(module, Attention):
                module.eager = True

    training.at_step = at_step


def _permuted(training: Training) -> None:
    name, seed = training.model_name, training.seed

    def batch(step: int) -> tuple[Any, Any]:
        x, labels = batch_of(name, seed, step)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(step))
        return x[order], labels[order]

    training.batch = batch


def _other_products(training: Training) -> None:
    """Linear layers that add up in two halves, as another kernel would."""

    def at_step(training: Training, step: int) -> None:
        if step >= 0:
            return
        for module in training.model.modules():
            if type(module) is nn.Linear:
                module.forward = _Halves(module)  # type: ignore[method-assign]

    training.at_step = at_step


class _Halves:
    def __init__(self, module: nn.Linear) -> None:
        self._module = module

    def __call__(self, x: Any) -> Any:
        weight, bias = self._module.weight, self._module.bias
        half = weight.shape[1] // 2
        out = x[..., :half] @ weight[:, :half].T + x[..., half:] @ weight[:, half:].T
        return out if bias is None else out + bias


def _attends(training: Training) -> bool:
    return training.model_name in ("llama", "gpt", "vit", "moe")


HARMLESS = (
    Harmless("two threads", _set(threads=2)),
    Harmless("foreach", _options(foreach=True), both=_options(foreach=False)),
    Harmless("fused", _options(fused=True), lambda t: t.optimizer_name != "lion"),
    Harmless("eager attention", _eager, _attends),
    Harmless("compiled", _set(compiled="aot_eager"), lambda t: not _draws(t)),
    Harmless("other matrix products", _other_products),
    Harmless(
        "other matrix products under autocast",
        _other_products,
        lambda t: t.model_name != "moe",  # its sum over experts is in float32
        both=_set(autocast=True),
    ),
    Harmless(
        "eager attention under autocast",
        _eager,
        lambda t: _attends(t) and t.model_name != "moe",
        both=_set(autocast=True),
    ),
    Harmless(
        "micro-batches of half the size",
        _set(micro=4),
        lambda t: not _draws(t) and t.model_name not in ("conv", "moe"),
        both=_set(micro=2),
    ),
    Harmless("rows in another order", _permuted, lambda t: not _draws(t)),
)


# ---- faults


def _from(change: Callable[[Training, int], None]) -> Callable[[Training, int], None]:
    """A change that is made once, at the beginning of step k."""

    def make(training: Training, k: int) -> None:
        before = training.at_step

        def at_step(training: Training, step: int) -> None:
            before(training, step)
            if step == k:
                change(training, k)

        training.at_step = at_step

    return make


def _rate_off_by_one(training: Training, k: int) -> None:
    training.rate = lambda step: training.learning_rate(step + (step >= k))


def _warm_up_ends_late(training: Training, k: int) -> None:
    base = training.learning_rate

    def rate(step: int) -> float:
        return base(step - 1) if step == training.warm_up else base(step)

    training.rate = rate


def _other_batches(which: Callable[[int, int], int]) -> Callable[[Training, int], None]:
    def make(training: Training, k: int) -> None:
        name, seed = training.model_name, training.seed
        training.batch = lambda step: batch_of(name, seed, which(step, k))

    return make


def _shuffled_labels(training: Training, k: int) -> None:
    name, seed = training.model_name, training.seed

    def batch(step: int) -> tuple[Any, Any]:
        x, labels = batch_of(name, seed, step)
        return x, labels.roll(1, 0) if step >= k else labels

    training.batch = batch


def _shuffled_rows(training: Training, k: int) -> None:
    name, seed = training.model_name, training.seed

    def batch(step: int) -> tuple[Any, Any]:
        x, labels = batch_of(name, seed, step)
        return x.roll(1, 0) if step >= k else x, labels

    training.batch = batch


def _one_sample(training: Training, k: int) -> None:
    name, seed = training.model_name, training.seed

    def batch(step: int) -> tuple[Any, Any]:
        x, labels = batch_of(name, seed, step)
        if step == k:
            x, labels = x.clone(), labels.clone()
            x[0], labels[0] = x[1], labels[1]
        return x, labels

    training.batch = batch


def chosen(training: Training, kinds: Any = (nn.Linear, nn.Conv2d)) -> tuple[str, nn.Module]:
    """A module in the middle of a model."""
    named = [(n, m) for n, m in training.model.named_modules() if isinstance(m, kinds)]
    return named[len(named) // 2]


def _wrapped(after: Callable[[Any], Any], kinds: Any = (nn.Linear, nn.Conv2d)) -> Any:
    def change(training: Training, k: int) -> None:
        _, module = chosen(training, kinds)
        forward = module.forward
        module.forward = lambda *x: after(forward(*x))  # type: ignore[method-assign]

    return _from(change)


def _in_bf16(out: Any) -> Any:
    return out.bfloat16().float()


def _no_gradient(training: Training, k: int) -> None:
    def before_step(training: Training, step: int) -> None:
        if step >= k:
            chosen(training)[1].weight.grad = None  # type: ignore[assignment]

    training.before_step = before_step


def _zero_gradient(training: Training, k: int) -> None:
    def before_step(training: Training, step: int) -> None:
        if step == k:
            chosen(training)[1].weight.grad.zero_()  # type: ignore[union-attr]

    training.before_step = before_step


def _noisy_gradient(training: Training, k: int) -> None:
    def before_step(training: Training, step: int) -> None:
        if step == k:
            chosen(training)[1].weight.grad.mul_(1.01)  # type: ignore[union-attr]

    training.before_step = before_step


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 1.05


def _reset_state(training: Training, k: int) -> None:
    state = training.optimizer.state[chosen(training)[1].weight]
    name = "exp_avg" if "exp_avg" in state else "momentum_buffer"
    state[name].zero_()


def _clobbered(training: Training, k: int) -> None:
    kinds = (nn.Embedding,) if is_language(training.model_name) else (nn.Linear, nn.Conv2d)
    with torch.no_grad():
        chosen(training, kinds)[1].weight[3].zero_()  # type: ignore[union-attr]


def _nudged(training: Training, k: int) -> None:
    with torch.no_grad():
        chosen(training)[1].weight.mul_(1.001)  # type: ignore[operator, union-attr]


def _nan(training: Training, k: int) -> None:
    _, module = chosen(training)
    forward = module.forward

    def broken(x: Any) -> Any:
        out = forward(x).clone()
        out.flatten()[0] = float("nan")
        return out

    module.forward = broken  # type: ignore[method-assign]


def _group(**values: Any) -> Callable[[Training, int], None]:
    def change(training: Training, k: int) -> None:
        for group in training.optimizer.param_groups:
            group.update(values)

    return _from(change)


def _now(**values: Any) -> Callable[[Training, int], None]:
    def change(training: Training, k: int) -> None:
        for name, value in values.items():
            setattr(training, name, value)

    return _from(change)


def _dropout(training: Training, k: int) -> None:
    for module in training.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.12


def _reseeded(training: Training, k: int) -> None:
    _, module = chosen(training, nn.Dropout)
    forward = module.forward

    def drawn(x: Any) -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return forward(x)

    module.forward = drawn  # type: ignore[method-assign]


def _skipped_step(training: Training, k: int) -> None:
    def zeroed(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.zero_()
        hook.remove()

    hook = training.optimizer.register_step_pre_hook(zeroed)


def _decayed(training: Training, k: int) -> None:
    """Weight decay that the program adds by itself to parameters after the step."""
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.mul_(1 - 1e-3)


def _is(kind: PartKind, place: str = "") -> Callable[[Parting], bool]:
    return lambda part: part.kind == kind and place in f"{part.name} {part.slot} {part.words}"


def _at_chosen(kind: PartKind, *, kinds: Any = (nn.Linear, nn.Conv2d)) -> Callable[..., bool]:
    def is_named(part: Parting, training: Training | None = None) -> bool:
        if training is None:
            return part.kind == kind
        return (part.kind == kind and part.scope == f"model.{chosen(training, kinds)[0]}") or (
            part.kind == kind and chosen(training, kinds)[0] in f"{part.name} {part.slot}"
        )

    return is_named


def _steps(training: Training) -> bool:
    return training.optimizer_name in ("adamw", "sgd", "adam")


FAULTS = (
    Fault("learning rate one step ahead", _rate_off_by_one, _is(PartKind.SETTING, "lr")),
    Fault("weight decay changed", _group(weight_decay=0.02), _is(PartKind.SETTING, "weight_decay")),
    Fault(
        "momentum changed",
        _group(momentum=0.85),
        _is(PartKind.SETTING, "momentum"),
        lambda t: t.optimizer_name == "sgd",
    ),
    Fault(
        "betas changed",
        _group(betas=(0.9, 0.99)),
        _is(PartKind.SETTING, "betas"),
        lambda t: t.optimizer_name != "sgd",
    ),
    Fault("batch repeated", _other_batches(lambda s, k: s - (s >= k)), _is(PartKind.BATCH)),
    Fault("batch skipped", _other_batches(lambda s, k: s + (s >= k)), _is(PartKind.BATCH)),
    Fault(
        "batches in another order",
        _other_batches(lambda s, k: {k: k + 1, k + 1: k}.get(s, s)),
        _is(PartKind.BATCH),
    ),
    Fault("one sample twice", _one_sample, _is(PartKind.BATCH)),
    Fault("labels of other rows", _shuffled_labels, _is(PartKind.LOSS)),
    Fault("rows of other labels", _shuffled_rows, _is(PartKind.BATCH), lambda t: not _draws(t)),
    Fault("a module in bf16", _wrapped(_in_bf16), _at_chosen(PartKind.FORWARD)),
    Fault("a module 0.2 % too large", _wrapped(lambda x: x * 1.002), _at_chosen(PartKind.FORWARD)),
    Fault(
        "a norm that is clamped",
        _wrapped(lambda x: x.clamp(max=1.5), (nn.LayerNorm, nn.BatchNorm2d)),
        _at_chosen(PartKind.FORWARD, kinds=(nn.LayerNorm, nn.BatchNorm2d)),
        lambda t: t.model_name in ("gpt", "vit", "gru", "conv"),
    ),
    Fault("a wrong derivative", _wrapped(_Scaled.apply), _at_chosen(PartKind.BACKWARD)),
    Fault("dropout of another chance", _from(_dropout), _is(PartKind.RANDOM), _draws),
    Fault("dropout of another seed", _from(_reseeded), _is(PartKind.RANDOM), _draws),
    Fault("a gradient is None", _no_gradient, lambda p: True),
    Fault("a gradient is zero", _zero_gradient, _at_chosen(PartKind.GRADIENTS)),
    Fault("a gradient is 1 % too large", _noisy_gradient, _at_chosen(PartKind.GRADIENTS)),
    Fault("clipping at another norm", _now(clip=0.5), _is(PartKind.SETTING, "max_norm")),
    Fault("momentum of a parameter reset", _from(_reset_state), _at_chosen(PartKind.STATE)),
    Fault("a row of weights is lost", _from(_clobbered), _is(PartKind.PARAMETER)),
    Fault("a weight is 0.1 % larger", _from(_nudged), _at_chosen(PartKind.PARAMETER)),
    Fault("weights decayed by hand", _from(_decayed), _is(PartKind.PARAMETER)),
    Fault("label smoothing", _now(smoothing=0.05), _is(PartKind.LOSS)),
    Fault("loss 1 % too large", _now(scale=1.01), _is(PartKind.LOSS)),
    Fault("NaN in one element", _from(_nan), _at_chosen(PartKind.FORWARD)),
    Fault(
        "gradients of zero in one step",
        _from(_skipped_step),
        lambda p: p.kind in (PartKind.GRADIENTS, PartKind.OPTIMIZER),
    ),
    Fault("warm-up ends a step late", _warm_up_ends_late, _is(PartKind.SETTING, "lr")),
    Fault(
        "another decay of the averaged model",
        _now(decay=0.85),
        _is(PartKind.PARAMETER, "averaged"),
        later=10,
        both=_set(has_average=True),
    ),
)
"""`random` picks k for each."""


def step_of(fault: Fault, seed: int, steps: int) -> int:
    """The step from which on a fault is there."""
    if fault.title.startswith("warm-up"):
        return 20
    return random.Random(f"{fault.title} {seed}").randrange(steps // 4, 3 * steps // 4)
