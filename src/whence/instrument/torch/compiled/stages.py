"""Puts another backend in the place of the one a program gives to `torch.compile`: one rung of the
ladder of compile stages.

Nothing of the program is edited: `torch.compile` itself is wrapped while a capture with the option
`rung` is active.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from whence.instrument.session import Session
from whence.instrument.torch.compiled.what_compiled import Compiled, note
from whence.instrument.wording import counted

SHELL = "_whence_shell"
"""Attribute of a function that was compiled on a rung: the module that stands for it."""

ROUNDED = "rounded"
"""Eager too, and what every module returns is rounded once more, up or down by chance: how far
rounding alone takes this program.
"""

# The rung of `RUNGS["torch"]` -> the backend of that name in torch. "eager" compiles
# nothing; "inductor" is what the program asks for, and so are the two before it, but for what they
# switch off.
_BACKENDS = {
    "dynamo": "eager",
    "aot_eager": "aot_eager",
    "aot_eager_decomp_partition": "aot_eager_decomp_partition",
}
_UNCOMPILED = ("eager", ROUNDED)
_STATIC = "inductor_dynamic_off"
_UNCACHED = (_STATIC, "inductor_caches_off")


class Rung:
    """While installed, `torch.compile` uses the backend of one rung. remove() puts torch back and
    notes what was compiled.

    Kept of the program's own options: dynamic, fullgraph, disable and the guard filter; on the rung
    "inductor" all, backend too. On "inductor_caches_off" no cache of whole graphs is read or
    written, on "inductor_dynamic_off" every shape and number is compiled for itself too. Random
    numbers are drawn as eager draws them (inductor's `fallback_random`), or dropout would differ on
    every rung.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._requests = 0
        self._backends: dict[str, None] = {}
        self._original: Any = None
        self._of_modules: Any = None
        self._hook: Any = None
        self._random: bool | None = None
        self._switched = contextlib.ExitStack()
        self._counts_before: tuple[int, dict[str, int]] = (0, {})

    def install(self) -> None:
        """Wrap `torch.compile` and `nn.Module.compile`."""
        self._original, self._of_modules = torch.compile, torch.nn.Module.compile
        self._counts_before = _counted()
        original, rung = self._original, self

        def compile(model: Any = None, **options: Any) -> Any:  # noqa: A001 - it stands for torch's
            if model is None:
                return lambda function: compile(function, **options)
            return rung._compile(original, model, options)

        def of_modules(module: Any, **options: Any) -> None:
            if rung._name in _UNCOMPILED:
                rung._met(options)
            else:
                rung._of_modules(module, **options)

        if self._name == ROUNDED:
            self._hook = torch.nn.modules.module.register_module_forward_hook(_Rounding())
        compile.__wrapped__ = original  # type: ignore[attr-defined]
        torch.compile = compile
        torch.nn.Module.compile = of_modules

    def remove(self) -> Compiled:
        """Put torch back, and say what was compiled until now. Once only."""
        torch.compile, torch.nn.Module.compile = self._original, self._of_modules
        if self._hook is not None:
            self._hook.remove()
        if self._random is not None:
            torch._inductor.config.fallback_random = self._random
        self._switched.close()
        (graphs, breaks), (graphs_before, broken) = _counted(), self._counts_before
        reasons = sum(count > broken.get(reason, 0) for reason, count in breaks.items())
        return Compiled(
            self._name,
            self._requests,
            tuple(self._backends),
            max(graphs - graphs_before, 0),
            reasons,
        )

    def finish(self, session: Session) -> None:
        """Put torch back, and note in a run what was compiled. Once only."""
        note(session, self.remove())

    def _compile(self, original: Callable[..., Any], model: Any, arguments: dict[str, Any]) -> Any:
        self._met(arguments)
        if self._name in _UNCOMPILED:
            return _seen(model, model)
        self._set()
        if self._name in _BACKENDS:
            options = {
                k: v for k, v in (arguments.get("options") or {}).items() if k == "guard_filter_fn"
            }
            arguments = {
                **arguments,
                "backend": _BACKENDS[self._name],
                "mode": None,
                "options": options or None,
            }
        if self._name == _STATIC:
            arguments = {**arguments, "dynamic": False}
        return _seen(original(model, **arguments), model)

    def _met(self, options: dict[str, Any]) -> None:
        if options.get("disable"):
            return
        self._requests += 1
        backend = options.get("backend") or "inductor"
        self._backends[
            backend
            if isinstance(backend, str)
            else getattr(backend, "__name__", type(backend).__name__)
        ] = None

    def _set(self) -> None:
        """Settings of the rung, once the program compiles: inductor takes seconds to import."""
        if self._random is not None:
            return
        import torch._inductor.config as inductor

        self._random = inductor.fallback_random
        inductor.fallback_random = True
        if self._name in _UNCACHED:
            from whence.instrument.torch.compiled.inductor_taps import CACHES, off

            self._switched.enter_context(off((CACHES,)))


class _Rounding:
    """A forward hook: floating results times 1 + u * xi, xi uniform in -1..1, u the unit roundoff.
    Draws nothing of the program's.
    """

    def __init__(self) -> None:
        self._generators: dict[torch.device, torch.Generator] = {}

    def __call__(self, module: Any, args: Any, out: Any) -> Any:
        return self._rounded(out)

    def _rounded(self, value: Any) -> Any:
        if type(value) is torch.Tensor and value.is_floating_point() and value.dtype.itemsize > 1:
            wide = torch.float64 if value.dtype in (torch.float64, torch.float32) else torch.float32
            if value.device not in self._generators:
                self._generators[value.device] = torch.Generator(value.device).manual_seed(0)
            xi = torch.rand(
                value.shape,
                dtype=wide,
                device=value.device,
                generator=self._generators[value.device],
            )
            return (value.to(wide) * (1 + (2 * xi - 1) * torch.finfo(value.dtype).eps / 2)).to(
                value.dtype
            )
        if type(value) in (tuple, list):
            return type(value)(self._rounded(v) for v in value)
        return {k: self._rounded(v) for k, v in value.items()} if type(value) is dict else value


class Function(torch.nn.Module):  # type: ignore[misc]
    """A plain function as a module, so that what it is given and returns is captured."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The function's own result."""
        return self._function(*args, **kwargs)


def _seen(compiled: Any, model: Any) -> Any:
    """A compiled plain function, such that its calls are those of a module; anything of a module is
    seen without.
    """
    if isinstance(model, (torch.nn.Module, type)) or isinstance(
        getattr(model, "__self__", None), torch.nn.Module
    ):
        return compiled
    shell = type(getattr(model, "__name__", type(model).__name__), (Function,), {})(compiled)

    @functools.wraps(compiled)
    def called(*args: Any, **kwargs: Any) -> Any:
        # a method of a module: that one's call is seen
        if any(isinstance(value, torch.nn.Module) for value in args):
            return compiled(*args, **kwargs)
        return shell(*args, **kwargs)

    setattr(called, SHELL, shell)
    return called


def note_unseen(session: Session) -> None:
    """Where no module was called, but dynamo compiled: note why, and what captures it."""
    graphs, _ = _counted()
    if graphs and session.active and not session.begun:
        session.note(
            "error",
            f"the model ran in {counted(graphs, 'graph')} that torch.compile made of a function, "
            "and capture sees only modules that are compiled themselves; capture it uncompiled "
            "with --rung eager",
        )


def _counted() -> tuple[int, dict[str, int]]:
    """What dynamo has counted in this process so far: graphs, and how often for each reason it
    broke one.
    """
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    if counters is None:
        return 0, {}
    return int(counters["stats"]["unique_graphs"]), dict(counters["graph_break"])
