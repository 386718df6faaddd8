"""Finds the line of the program that is running: the first frame outside torch, whence and the
standard library.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path
from types import CodeType, FrameType

import torch

_OURS = str(Path(__file__).parents[2]) + os.sep
_SKIPPED = (str(Path(torch.__file__).parent) + os.sep, _OURS, "<eval_with_key", "<frozen ")
_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep
_PACKAGES = tuple({sysconfig.get_paths()[name] + os.sep for name in ("purelib", "platlib")})
_DEMO = _OURS + "demo" + os.sep

# By the id of a code object, which is kept: hashing one takes as long as all the rest.
_codes: dict[int, tuple[CodeType, dict[int, str] | None]] = {}


def source_here() -> str:
    """ "file:line" of the innermost frame of the program, "" where there is none (a thread of
    torch's).
    """
    frame: FrameType | None = sys._getframe(1)
    codes = _codes
    while frame is not None:
        code = frame.f_code
        entry = codes.get(id(code))
        if entry is None:
            entry = codes[id(code)] = code, {} if is_the_program(code.co_filename) else None
        lines = entry[1]
        if lines is not None:
            offset = frame.f_lasti
            line = lines.get(offset)
            if line is None:
                line = lines[offset] = f"{code.co_filename}:{frame.f_lineno}"
            return line
        frame = frame.f_back
    return ""


def is_the_program(file: str) -> bool:
    """Whether this file is the user's code."""
    if file.startswith(_DEMO):
        return True
    return not file.startswith(_SKIPPED) and (
        not file.startswith(_STANDARD) or file.startswith(_PACKAGES)
    )
