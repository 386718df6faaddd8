"""Prints, as JSON, the requirements of a distribution that the installed distributions do not
satisfy.
"""

from __future__ import annotations

import json
import sys
from importlib import metadata
from typing import Any


def unmet(wanted: str) -> list[str]:
    """Requirements of a distribution that no installed distribution satisfies, including those of
    the extras named in it.

    The distribution is "torch", or "cuda-toolkit[cufile]" with an extra. Empty for a distribution
    that is not installed.
    """
    from pip._vendor.packaging.requirements import Requirement

    distribution: Any = Requirement(wanted)
    missing: list[str] = []
    try:
        lines = metadata.requires(distribution.name) or []
    except metadata.PackageNotFoundError:
        return missing
    for line in lines:
        requirement: Any = Requirement(line)
        extras = ("", *distribution.extras)
        marker = requirement.marker
        if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in extras):
            continue
        named = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            version = ""
        if not version or not requirement.specifier.contains(version, prereleases=True):
            missing.append(f"{requirement.name}{named}{requirement.specifier}")
        elif named:
            missing += unmet(f"{requirement.name}{named}")
    return missing


if __name__ == "__main__":
    print(json.dumps([line for wanted in sys.argv[1:] for line in unmet(wanted)]))
