"""Recognises files that whence wrote, by how they begin or end: --force replaces these and no
others.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from whence.errors import OutputExists

MARK = "written by whence"
"""Files contain this text in a comment or in a field beside their content."""
_LOOKED_AT = 1 << 12  # bytes read at either end
_STARTS = re.compile(
    rb"[^\n]*   \S[^\n]* run   |index,rank,root,|\{\"(?:path|call)\": |Index +Step |"  # show
    rb"[^\n]*   step -?\d+, rank \d+, call |[^\n]*   rank \d+   step|"
    rb"(?:<!doctype html>|<svg |\x89PNG|<\?xml |PAR1)[\s\S]*?written by whence|"
    rb'<\?xml version="1.0" encoding="utf-8"\?>\n<testsuite name="whence" |'
    rb"[^\n]*,whence_call,whence_verdict,|"  # views
    rb"name,op_name,dtype,shape,min-val,max-val,is_pass,|"  # ops diff
    rb"Index,Step,Rank,Module,Min,Max,Mean,Std\n|\+-[-+]+\n\| +Index \| +Step \| +Rank \| Module |"
    rb"# what is paired: |# [\d,]+ parameters? paired, |"
    rb'\{"status":"[a-z]+","evidence":|'  # report.json
    rb'\{"whence: relative error":|'  # Model Explorer
    rb"\x08[\s\S]*?written by whence\Z|"  # a copy of an ONNX model
    rb"# zsh has a builtin of this name|_whence_completion\(\)|function _whence_completion;"
)


def check_replaceable(path: str | os.PathLike[str], force: bool) -> None:
    """Raise OutputExists where a file exists and `force` does not allow replacing it, or whence did
    not write it. Anything that is not a regular file, such as a pipe, may be written to.
    """
    file = Path(path)
    if not file.is_file():
        return
    if not force:
        raise OutputExists(f"{file} exists; --force replaces it, or choose another name")
    if not is_own(file):
        raise OutputExists(
            f"{file} was not written by whence, and --force replaces nothing else; choose another "
            "name"
        )


def is_own(file: Path) -> bool:
    """Whether whence wrote this file. An empty file counts as not written by whence."""
    try:
        with file.open("rb") as content:
            size = os.fstat(content.fileno()).st_size
            ends = content.read(_LOOKED_AT)
            if size > _LOOKED_AT:
                content.seek(max(_LOOKED_AT, size - _LOOKED_AT))
                ends += content.read(_LOOKED_AT)
    except OSError:
        return False
    return not ends or _STARTS.match(ends) is not None
