"""Names of a module that are imported when they are first asked for.

Such a module lists what it offers as imports under `if TYPE_CHECKING`. Type checkers follow them,
no program runs them; here the list is read, and a name is imported when somebody uses it.
"""

from __future__ import annotations

import ast
import gc
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def importing() -> Iterator[None]:
    """Leaves garbage alone within the block. What modules are made of stays, and is enough for a
    collection of everything: 80 ms beside torch alone, by as much more as the program holds.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def lazily(module: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module, called there with its `__name__`.

    It raises AttributeError for a name that the module does not list. No submodule may have a
    listed name: it would stand there once it is imported.
    """
    homes: dict[str, tuple[str, str]] = {}

    def load(name: str) -> Any:
        if not homes and not name.startswith("__"):
            homes.update(_listed(module))
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home, name_there = homes[name]
        with importing():
            value = getattr(__import__(home, fromlist=[name_there]), name_there)
        setattr(sys.modules[module], name, value)
        return value

    return load


def _listed(module: str) -> dict[str, tuple[str, str]]:
    """The module and the name there of everything that is imported for type checkers."""
    source = inspect.getsource(sys.modules[module])
    return {
        alias.asname or alias.name: (node.module or "", alias.name)
        for block in ast.parse(source).body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
