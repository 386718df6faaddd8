"""Prints, as JSON, the requirements of a distribution that what is installed does not meet."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from typing import Any


def unmet(name: str) -> list[str]:
    """Requirements, without extras, that no installed distribution meets; of a distribution that
    is not there, none.
    """
    from pip._vendor.packaging.requirements import Requirement

    found: list[str] = []
    try:
        lines = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return found
    for line in lines:
        requirement: Any = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            version = ""
        if not version or not requirement.specifier.contains(version, prereleases=True):
            found.append(f"{requirement.name}{requirement.specifier}")
    return found


if __name__ == "__main__":
    print(json.dumps([line for name in sys.argv[1:] for line in unmet(name)]))
