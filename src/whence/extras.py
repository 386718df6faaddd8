"""Packages that whence does without: whether one is here, and one clear sentence where something
needs it and it is not.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import shlex
import sys
from types import ModuleType
from urllib.parse import unquote, urlsplit

from whence.errors import MissingDependency, Unsupported

_REQUIREMENTS = {
    "torch": "torch>=2.6,<2.14",
    "paddle": "paddlepaddle>=3.0",
    "h5py": "h5py>=3.11",
    "matplotlib": "matplotlib>=3.9",
    "mcp": "mcp>=2",
    "ray": "ray>=2.40",
    "numcodecs": "numcodecs>=0.13",
    "pyarrow": "pyarrow>=17",
    "duckdb": "duckdb>=1.1",
    "fsspec": "fsspec>=2024.6",
}
"""What each extra of pyproject.toml asks for, by the name that is imported. pip is given this and
not the extra: no package index has whence.
"""
_NUMPY = "numpy>=2.0"
"""What pyproject.toml asks for."""


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
    if (
        isinstance(error, ModuleNotFoundError)
        and (error.name or "").partition(".")[0] == (name.partition(".")[0])
    ):
        why = "not installed here"
    else:
        why = f"here, but cannot be imported ({type(error).__name__}: {error})"
    package = name.partition(".")[0]
    return MissingDependency(f"{what} needs {package}, which is {why}: {install(package)}")


def install(name: str) -> str:
    """The command that installs an optional package."""
    return f"pip install '{_REQUIREMENTS.get(name, name)}'"


def check_release(name: str, version: str) -> None:
    """Raise Unsupported where this release of a package is older than whence needs. A version that
    does not begin with two numbers passes: someone built it.
    """
    requirement = _NUMPY if name == "numpy" else _REQUIREMENTS.get(name, "")
    bound = requirement.partition(">=")[2].partition(",")[0]
    release, least = _release(version), _release(bound)
    if release and least and release < least:
        raise Unsupported(
            f"{name} {version} is installed, and whence needs {name} {bound} or newer: "
            f"pip install '{requirement}'"
        )


def check_imported(name: str) -> None:
    """The same for a framework that this process has imported; one that it has not passes."""
    check_release(name, str(getattr(sys.modules.get(name), "__version__", "")))


def _release(version: str) -> tuple[int, int] | None:
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else None


def whence_source() -> str:
    """What to give pip for this whence: the checkout, Git URL or wheel that it was given here, or a
    word for these where it kept none.
    """
    from importlib import metadata

    try:
        origin = json.loads(metadata.distribution("whence").read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        origin = {}
    url = origin.get("url", "")
    if "vcs_info" in origin:
        url = f"{origin['vcs_info'].get('vcs', 'git')}+{url}"
    elif url.startswith("file://"):
        url = unquote(urlsplit(url).path)
    return shlex.quote(url) if url else "WHENCE, its checkout, Git URL or wheel"


def of_import(error: ModuleNotFoundError, what: str) -> MissingDependency | None:
    """The same for an import that failed anywhere; None where it was none of these frameworks."""
    name = (error.name or "").partition(".")[0]
    return missing(name, what, error) if name in _REQUIREMENTS and not is_here(name) else None
