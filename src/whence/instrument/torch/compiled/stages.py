"""Replaces the backend that a program gives to `torch.compile` by that of one rung of the ladder of
compile stages.

The program is not edited: `torch.compile` itself is wrapped while a capture with the option `rung`
is active.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from whence.instrument.session import Session
from whence.instrument.torch.compiled.cuts import Cut, CutBackend
from whence.instrument.torch.compiled.what_compiled import Compiled, note
from whence.instrument.wording import counted
from whence.results import GraphOperator

SHELL = "_whence_shell"
"""Attribute of a function compiled on a rung: the module that represents it."""

ROUNDED = "rounded"
"""Rung that runs eagerly and rounds the floating-point results of every module once more, randomly
up or down: it shows how far rounding alone changes this program.
"""

# Rung of `RUNGS["torch"]` -> torch's name of its backend. "eager" compiles nothing. "inductor" and
# the two rungs before it use the program's own backend; those two switch some features off.
_BACKENDS = {
    "dynamo": "eager",
    "aot_eager": "aot_eager",
    "aot_eager_decomp_partition": "aot_eager_decomp_partition",
}
_UNCOMPILED = ("eager", ROUNDED)
_STATIC = "inductor_dynamic_off"
_UNCACHED = (_STATIC, "inductor_caches_off")


class Rung:
    """While installed, `torch.compile` uses the backend of one rung. remove() restores torch and
    returns what was compiled.

    These options of the program are kept: dynamic, fullgraph, disable and the guard filter; from
    the rung "inductor_dynamic_off" on, the backend and its options too. "inductor_caches_off" uses
    no cache of whole graphs; "inductor_dynamic_off" also compiles for every shape and number
    separately. Random numbers are drawn as in eager mode (inductor's `fallback_random`); otherwise
    dropout would differ on every rung.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._requests = 0
        self._backends: dict[str, None] = {}
        self._original: Any = None
        self._of_modules: Any = None
        self._hook: Any = None
        self._random: bool | None = None
        self._operators: list[GraphOperator] = []
        self._values: list[str] = []
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
        """Restore torch, and return what was compiled until now. Call it once only."""
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
            tuple(self._operators),
            tuple(self._values),
        )

    def finish(self, session: Session) -> None:
        """Restore torch, and note in a run what was compiled. Call it once only."""
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
        if (cut := Cut.of_environment()) is not None:
            arguments = self._in_part(arguments, cut)
        return _seen(original(model, **arguments), model)

    def _in_part(self, arguments: dict[str, Any], cut: Cut) -> dict[str, Any]:
        """The arguments of a compilation of the operators of a cut alone."""
        names = ("mode", "options", "dynamic")
        backend, how = arguments.get("backend") or "inductor", map(arguments.get, names)
        whole = (
            torch._TorchCompileInductorWrapper(*how)
            if backend == "inductor"
            else torch._TorchCompileWrapper(backend, *how)
        )
        part = CutBackend(whole, cut, self._operators, self._values)
        return {**arguments, "backend": part, "mode": None, "options": None}

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
        """Apply the settings of the rung when the program first compiles, since importing inductor
        takes seconds.
        """
        if self._random is not None:
            return
        import torch._inductor.config as inductor

        self._random = inductor.fallback_random
        inductor.fallback_random = True
        if self._name in _UNCACHED:
            from whence.instrument.torch.compiled.inductor_taps import CACHES, off

            self._switched.enter_context(off((CACHES,)))


class _Rounding:
    """A forward hook that multiplies floating-point results by 1 + u * xi, with xi uniform in -1..1
    and u the unit roundoff. It uses random generators of its own.
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
    """Wraps a plain function as a module, so that its arguments and results are captured."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The function's own result."""
        return self._function(*args, **kwargs)


def _seen(compiled: Any, model: Any) -> Any:
    """Wraps a compiled plain function so that its calls are those of a module. A module, or a
    method of one, is returned unchanged: its calls are captured anyway.
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
    """If dynamo compiled something but no module was called, note why nothing was captured and how
    to capture it.
    """
    graphs, _ = _counted()
    if graphs and session.active and not session.begun:
        session.note(
            "error",
            f"the model ran in {counted(graphs, 'graph')} that torch.compile made of a function, "
            "and capture sees only modules that are compiled themselves; capture it uncompiled "
            "with --rung eager",
        )


def _counted() -> tuple[int, dict[str, int]]:
    """Dynamo's counts in this process: the number of graphs, and by reason the number of graph
    breaks.
    """
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    if counters is None:
        return 0, {}
    return int(counters["stats"]["unique_graphs"]), dict(counters["graph_break"])
