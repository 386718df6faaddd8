"""`--model module:factory`: the user's own model, for calls whose program cannot be used.

Reading the name imports the user's code and calls the factory; nothing else here does. Which module
stands for which call is decided by its scope, and it is used like a program: only after it
reproduced what was recorded.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whence import align, extras
from whence.display import listed
from whence.dtypes import Array
from whence.errors import ReplayRefused, UsageError
from whence.records import Call
from whence.records.slots import is_read

if TYPE_CHECKING:
    from whence.replay.module_arguments import Forms

_NAMED = 8  # modules, in the note


class Models:
    """The modules of a model by their scope. words: what the user called it. used: by call, which
    module stands for it, in words.
    """

    def __init__(self, model: Any, words: str) -> None:
        from whence.replay.module_copy import addresses

        self.words = words
        self.used: dict[int, str] = {}
        self._modules = {
            align.normal_scope(name): module
            for name, module in model.named_modules(remove_duplicate=False)
        }
        self._forbidden = addresses(model)
        self._returned: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._borrowed: dict[tuple[Any, ...], Any] = {}

    def borrowed(
        self,
        call: Call,
        kids: Sequence[Call],
        forms: Forms,
        arrays: Callable[[Call], Mapping[str, Array]],
        grad: str,
    ) -> Any:
        """The module that replaces a call of the reference, ready to run
        (`replay.user_module.Borrowed`).

        kids: the children of the call. forms: (dtype, shape) of its tensors by slot. arrays: call
        -> its recorded inputs by slot. grad: the recorded mode of autograd. Raises ReplayRefused if
        the model has no such module, or one that does not fit.
        """
        form = tuple((slot, dtype) for slot, (dtype, _) in forms.items())
        numbers: dict[int, int] = {}  # which of the tensors are one
        wiring = tuple(
            (c.scope, tuple((r.slot, numbers.setdefault(r.record, len(numbers))) for r in c.refs))
            for c in (call, *kids)
        )
        key = (
            call.root,
            call.scope,
            call.training,
            grad,
            form,
            tuple(sorted(call.arguments.items(), key=str)),
            wiring,
        )
        borrowed = self._borrowed.get(key)
        if borrowed is None:
            try:
                borrowed = self._make(
                    call, kids, forms, arrays, grad, f"{self.words} {len(self._borrowed)}"
                )
            except ReplayRefused as refused:
                borrowed = refused
            self._borrowed[key] = borrowed
        if isinstance(borrowed, ReplayRefused):
            raise ReplayRefused(str(borrowed))
        return borrowed

    def notes(self) -> list[str]:
        """A sentence about the calls that the model replaced; empty if there are none."""
        if not self.used:
            return []
        names = list(dict.fromkeys(self.used.values()))
        return [
            f"model {self.words}: replayed {len(self.used)} calls that have no usable program: "
            f"{listed(names, _NAMED)}"
        ]

    def _make(
        self,
        call: Call,
        kids: Sequence[Call],
        forms: Forms,
        arrays: Callable[[Call], Mapping[str, Array]],
        grad: str,
        name: str,
    ) -> Any:
        from whence.replay.module_arguments import Kid
        from whence.replay.user_module import Borrowed

        if call.error:
            raise ReplayRefused("the call raised")
        module = self._module(call)
        children, visible = ([], {r.record for r in call.refs if is_read(r.slot)})
        for kid in kids:
            fresh = tuple(r.slot for r in kid.slots("input") if r.record not in visible)
            visible.update(r.record for r in kid.refs)
            inputs, outputs = (
                tuple(r.slot for r in kid.refs if r.slot.startswith(kinds))
                for kinds in ("input", ("output", "mutated"))
            )
            below = self._module(kid)
            children.append(
                Kid(
                    kid.scope,
                    below,
                    inputs,
                    outputs,
                    self._what_returns(kid, below, arrays, outputs),
                    fresh,
                )
            )
        return Borrowed(
            module, call, forms, children, name=name, grad=grad, forbidden=self._forbidden
        )

    def _module(self, call: Call) -> Any:
        module = self._modules.get(align.normal_scope(call.scope))
        if module is None:
            raise ReplayRefused(f"the model has no module {call.scope}")
        return module

    def _what_returns(
        self,
        kid: Call,
        module: Any,
        arrays: Callable[[Call], Mapping[str, Array]],
        outputs: tuple[str, ...],
    ) -> Any:
        """A value with the structure of a module's return value. The module is run once to learn
        it, since slots do not tell a tensor from a tuple of one.
        """
        from whence.replay.module_arguments import form_of

        key = (kid.scope, outputs)
        if key not in self._returned:
            self._returned[key] = form_of(module, kid, arrays(kid))
        return self._returned[key]


def read(model: Any) -> Models:
    """The modules of a model that the user gave, as `made` takes it."""
    return Models(*made(model))


def made(model: Any, what: str = "replay") -> tuple[Any, str]:
    """(model, its name) from the user's option: "module:factory", a callable without arguments that
    returns the model, or the model itself. what: the purpose of torch, for the message.

    A name imports the module, from the current folder first, which runs the user's code. Raises
    UsageError with the import or call that failed; MissingDependency without torch.
    """
    if isinstance(model, str):
        words, factory = model, imported(model)
    else:
        words, factory = getattr(model, "__qualname__", type(model).__name__), model
    torch = extras.needed("torch", f"model {words}: {what}")
    instance = factory
    if not isinstance(factory, torch.nn.Module):
        if not callable(factory):
            raise UsageError(
                f"model {words}: a {type(factory).__name__} is neither a torch.nn.Module nor a "
                "function that returns one"
            )
        try:
            with torch.random.fork_rng(devices=[]), contextlib.redirect_stdout(sys.stderr):
                instance = factory()
        except (Exception, SystemExit) as error:  # the user's code
            raise UsageError(
                f"model {words}: {_call(words)} raised {_words(error)}; it is called without "
                "arguments"
            ) from error
    if not isinstance(instance, torch.nn.Module):
        raise UsageError(
            f"model {words}: {_call(words)} returned a {type(instance).__name__}, not a "
            "torch.nn.Module"
        )
    return instance, words


def imported(words: str) -> Any:
    """The object named by "module:name". Imports the module, from the current folder first. Raises
    UsageError.
    """
    name, colon, path = words.partition(":")
    if not colon or not name or not path:
        raise UsageError(
            f"model {words!r}: written module:factory, like infer:make_model for the function "
            "make_model in infer.py"
        )
    with _current_folder(), contextlib.redirect_stdout(sys.stderr):
        try:
            attribute: Any = importlib.import_module(name)
        except (
            Exception,
            SystemExit,
        ) as error:  # the user's code; a script without a guard ends with sys.exit
            where = "looked for in the current folder and among the installed packages"
            raise UsageError(
                f"model {words}: importing {name} failed: {_words(error)} ({where})"
            ) from error
    for part in path.split("."):
        try:
            attribute = getattr(attribute, part)
        except AttributeError:
            callables = [
                n
                for n, v in getattr(attribute, "__dict__", {}).items()
                if callable(v) and not n.startswith("_")
            ]
            raise UsageError(
                f"model {words}: {name} has no {part}; callable there: "
                f"{', '.join(callables)[:200] or 'nothing'}"
            ) from None
    return attribute


@contextlib.contextmanager
def _current_folder() -> Iterator[None]:
    """A context in which imports search the current folder first, as with `python -m`."""
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)


def _call(words: str) -> str:
    return f"{words.rpartition(':')[2]}()"


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}" if str(error) else type(error).__name__
