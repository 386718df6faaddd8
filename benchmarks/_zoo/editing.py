"""Changing a model's code as a programmer would: other classes, edited source, who feeds whom."""

from __future__ import annotations

import copy
import inspect
import itertools
import linecache
import re
import textwrap
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from _zoo.sides import NotHere, Side, call, tensors

_COUNT = itertools.count()


def become(module: nn.Module, forward: Callable[..., Any], **attributes: Any) -> None:
    """Give one module another forward, in a class of the same name."""
    kind = type(module)
    module.__class__ = type(
        kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__, **attributes}
    )


def edit(module: nn.Module, *changes: tuple[str, str], **names: Any) -> None:
    """Replace texts (regular expressions) in the source of a module's forward. names: what names
    in it mean, beside those of its file. NotHere where a text is not found.
    """
    function = inspect.unwrap(type(module).forward)
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError) as error:
        raise NotHere(str(error)) from error
    source = source[source.index("def ") :]
    for old, new in changes:
        source, count = re.subn(old, new, source, flags=re.DOTALL)
        if not count:
            raise NotHere(f"{type(module).__name__} has no {old}")
    become(module, _compiled(source, function, type(module), names))


def _compiled(source: str, function: Any, kind: type, more: dict[str, Any]) -> Callable[..., Any]:
    file = f"<zoo {next(_COUNT)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    within = "from __future__ import annotations\ndef _make(__class__):\n"
    within += textwrap.indent(source, "    ") + f"\n    return {function.__name__}\n"
    linecache.cache[file] = (len(within), None, within.splitlines(True), file)
    names = {**function.__globals__, **more}
    exec(compile(within, file, "exec"), names)  # noqa: S102 - the source of an installed package
    made: Callable[..., Any] = names["_make"](kind)
    return made


def named(side: Side, *kinds: type[nn.Module]) -> list[str]:
    """Names of the modules of these classes."""
    return [n for n, m in side.model.named_modules() if isinstance(m, kinds)]


def pick(names: list[str], seed: int) -> str:
    """One of the names; NotHere where there is none."""
    if not names:
        raise NotHere("no such module")
    return names[seed % len(names)]


def is_norm(module: nn.Module) -> bool:
    """Does it normalise the last axis, with a weight?"""
    kind = type(module).__name__
    return (
        ("RMSNorm" in kind or "LayerNorm" in kind)
        and "Gated" not in kind
        and isinstance(getattr(module, "weight", None), Tensor)
        and module.weight.dim() == 1
        and not list(module.children())
    )


def norms(side: Side) -> list[str]:
    """Names of norms over the last axis."""
    return [n for n, m in side.model.named_modules() if is_norm(m)]


def gemma_like(module: nn.Module) -> bool:
    """Is a norm's weight the difference from one?"""
    kind = type(module).__name__
    return any(w in kind for w in ("Gemma", "Qwen3Next", "Qwen3_5")) and "Gemma4" not in kind


def linears(side: Side) -> list[str]:
    """Names of linear layers that are called as such."""
    called = {name for name, *_ in calls(side)}
    return [
        n
        for n, m in side.model.named_modules()
        if isinstance(m, nn.Linear) and type(m).__name__ == "Linear" and n in called
    ]


def calls(side: Side) -> list[tuple[str, list[Tensor], list[Tensor]]]:
    """Name, inputs and outputs of every call of a module, in order of completion."""
    out: list[tuple[str, list[Tensor], list[Tensor]]] = []
    side = forward_alone(side)
    for name, module in side.model.named_modules():

        def hook(m: Any, a: Any, k: Any, o: Any, name: str = name) -> None:
            out.append((name, tensors([list(a), list(k.values())]), tensors(o)))

        module.register_forward_hook(hook, with_kwargs=True)
    side.run()
    return out


def forward_alone(side: Side) -> Side:
    """A copy of the side that does not train."""
    side = side.copied()
    if side.recipe is not None:
        side.drive, side.around, side.recipe = call, torch.no_grad, None
    return side


def readers(side: Side) -> dict[str, list[str]]:
    """Leaf module -> leaf modules that are handed its output itself. Each is called once."""
    leaves = {n for n, m in side.model.named_modules() if not list(m.children())}
    seen = [c for c in calls(side) if c[0] in leaves]
    times: dict[str, int] = {}
    for name, *_ in seen:
        times[name] = times.get(name, 0) + 1
    out: dict[str, list[str]] = {}
    for name, _, made in seen:
        if times[name] > 1 or not made:
            continue
        for other, given, _ in seen:
            if any(g is made[0] or _same(g, made[0]) for g in given) and times[other] == 1:
                out.setdefault(name, []).append(other)
    return out


def _same(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.numel() == b.numel() and a.shape[-1] == b.shape[-1]


def chosen(links: dict[str, list[str]], seed: int) -> tuple[str, list[str]]:
    """One of the links."""
    name = pick(list(links), seed)
    return name, links[name]


def scale_rows(layer: nn.Module, factor: Tensor) -> None:
    """Multiply what a linear makes by a factor per output."""
    with torch.no_grad():
        layer.weight.mul_(factor[:, None])
        if layer.bias is not None:
            layer.bias.mul_(factor)


def scale_columns(layer: nn.Module, factor: Tensor) -> None:
    """Multiply what a linear reads by a factor per input."""
    with torch.no_grad():
        layer.weight.mul_(factor[None, :])


class FirstCall:
    """What a module was handed and what it made of it."""

    def __init__(self, given: Any, made: list[Tensor]) -> None:
        self.given, self.made = given, made

    def against(self, module: nn.Module) -> float:
        """The relative 2-norm between what was made and what another module makes of the same."""
        from _zoo.sides import apart, widely

        args, kwargs = self.given
        with torch.no_grad(), widely():
            own = copy.deepcopy(module).double()
            return apart(tensors(own(*args, **kwargs))[:1], self.made[:1])


def first_call(side: Side, name: str) -> FirstCall:
    """The first call of a module in float64."""
    from _zoo.sides import widely

    wide = forward_alone(side.to(torch.float64))
    seen: list[FirstCall] = []

    def before(m: Any, a: Any, k: Any) -> None:
        seen.append(FirstCall(copy.deepcopy((a, k)), []))

    def after(m: Any, a: Any, k: Any, o: Any) -> None:
        seen[0].made = seen[0].made or [t.clone() for t in tensors(o)]

    module = wide.only(name)
    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after, with_kwargs=True)
    with widely():
        wide.run()
    return seen[0]
