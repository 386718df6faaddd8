"""Prints constraints that hold every dependency of pyproject.toml at its lower bound.

    python .ci/lower_bounds.py            name==bound, a line each
    python .ci/lower_bounds.py --names    what to install: the same names without versions

The extras `docs`, `demo` and `dev` are left out, and requirements that are pinned to one version:
they serve the tests of the newest releases.
"""

import re
import sys
import tomllib
from pathlib import Path

EXTRAS = ("torch", "h5", "plots", "test")
WITH = {"pyparsing": "<3.3"}
"""What a lower bound needs besides: matplotlib 3.9 calls names that pyparsing 3.3 deprecates."""


def bounds(project: dict) -> dict[str, str]:
    """Lower bound by name. Raises ValueError for a requirement without one."""
    listed = list(project["dependencies"])
    for extra in EXTRAS:
        listed += project["optional-dependencies"][extra]
    out: dict[str, str] = {}
    for requirement in listed:
        name, operator, version = re.fullmatch(
            r"([\w.-]+(?:\[\w+\])?)\s*([=<>~!]*)([^,;]*).*", requirement
        ).groups()
        if operator == "==" or name.startswith("whence["):
            continue
        if operator != ">=":
            raise ValueError(f"{requirement!r} states no lower bound")
        out[name] = version
    return out


if __name__ == "__main__":
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    for name, version in bounds(tomllib.loads(text)["project"]).items():
        print(name if "--names" in sys.argv else f"{name}=={version}")
    if "--names" not in sys.argv:
        print(*(f"{name}{version}" for name, version in WITH.items()), sep="\n")
