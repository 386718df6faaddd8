"""Frameworks that whence does without: whether one is here, and one clear sentence where something
needs it and it is not.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

from whence.errors import MissingDependency

_EXTRAS = {
    "torch": "torch",
    "paddle": "paddle",
    "h5py": "h5",
    "matplotlib": "plots",
}


def is_here(name: str) -> bool:
    """Can a framework be imported, as far as can be told without doing so?"""
    if name in sys.modules:
        return sys.modules[name] is not None
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def needed(name: str, what: str) -> ModuleType:
    """The framework that `what` ("replay", "whence doctor") needs. Raises MissingDependency where
    it cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:  # OSError: one of its libraries does not load
        raise missing(name, what, error) from error


def missing(name: str, what: str, error: Exception) -> MissingDependency:
    """What to raise where a framework cannot be imported."""
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == name:
        why = "not installed here"
    else:
        why = f"here, but cannot be imported ({type(error).__name__}: {error})"
    return MissingDependency(
        f"{what} needs {name}, which is {why}: pip install 'whence[{_EXTRAS.get(name, name)}]'"
    )


def of_import(error: ModuleNotFoundError, what: str) -> MissingDependency | None:
    """The same for an import that failed anywhere; None where it was none of these frameworks."""
    name = (error.name or "").partition(".")[0]
    return missing(name, what, error) if name in _EXTRAS and not is_here(name) else None
