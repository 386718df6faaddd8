"""A Comparison as SARIF 2.1.0, which code scanners of build servers and editors show: a result for
each finding, at its file and line.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

import msgspec

from whence._version import __version__
from whence.report.answer import CAUSES
from whence.report.remarks import Remark, remarks
from whence.report.tables import clean
from whence.results import Comparison

_RULES = {
    "inputs": "the inputs of the two models differ",
    "different": "the two runs differ",
    "undecided": "whence cannot tell whether there is a fault",
    "same": "no fault",
}


def sarif(result: Comparison, root: Path | None = None) -> str:
    """The whole file. root: the checkout to which file names are relative."""
    noted = list(remarks(result, root))
    driver = {
        "name": "whence",
        "version": __version__,
        "rules": [
            {
                "id": name,
                "shortDescription": {
                    "text": CAUSES.get(name) or _RULES.get(name, f"the error is {name} here")
                },
            }
            for name in dict.fromkeys(remark.rule for remark in noted)
        ],
    }
    run = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "results": [_result(remark) for remark in noted],
    }
    return msgspec.json.encode({"version": "2.1.0", "runs": [run]}).decode() + "\n"


def _result(remark: Remark) -> dict[str, Any]:
    result: dict[str, Any] = {
        "ruleId": remark.rule,
        "level": remark.level,
        "message": {"text": clean(remark.text)},
    }
    location: dict[str, Any] = {}
    if remark.kind == "finding":
        location["logicalLocations"] = [
            {"fullyQualifiedName": clean(remark.title), "kind": "module"}
        ]
    if remark.file:
        scheme = "file://" if PurePosixPath(remark.file).is_absolute() else ""
        location["physicalLocation"] = {
            "artifactLocation": {"uri": scheme + quote(remark.file)},
            "region": {"startLine": max(1, remark.line)},
        }
    if location:
        result["locations"] = [location]
    return result
