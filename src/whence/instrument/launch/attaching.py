"""What the site hook calls in a child of a command, once a framework was imported there."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from typing import Any

from whence.instrument.framework import set_determinism
from whence.instrument.launch import interpreter
from whence.instrument.options import decode


def attach_here(config: Mapping[str, Any], framework: str) -> dict[str, Any]:
    """Set determinism, then call the attach function that the configuration names.

    Returns what the launcher's journal keeps (versions). Whatever goes wrong is raised: the hook
    tells it.
    """
    options = decode(json.dumps(config["options"]))
    set_determinism(options, framework, framework_only=True)
    module, _, name = str(config["attach"]).partition(":")
    getattr(importlib.import_module(module), name)(options, config["run"], framework)
    return {"versions": interpreter.versions_here()}
