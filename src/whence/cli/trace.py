"""Follow a difference back to the operator it comes from.

\b
    whence trace cmp                                   from the first significant tensor
    whence trace                                       the same, of the last comparison made in this folder
    whence trace cmp softmax_1.tmp_0
    whence trace cmp inner_var.40@3 --format json      of step 3

The trace goes back through the program to the first operator whose inputs agree. Every operator on
the way is shown with its inputs; the last one also with its attributes, weights, what its kernel
logged, which inputs were not captured, and what replay says about it.

CMP is a folder written by `whence compare -o CMP`; a single word that is not a path is a TENSOR of the
last comparison made in this folder. Both runs must still be in their places. TENSOR is
NAME[@STEP[.OCCURRENCE]], a call of the reference.

Exit code: 0 when it was traced, 3 when the tensor or a run is not there.
"""  # noqa: E501

from __future__ import annotations

import sys
from pathlib import Path

from whence.cli import _answers
from whence.cli._options import TEXT_OR_JSON, argument, verb


@verb(
    argument("comparison", "[CMP]", default=""),
    argument("tensor", "[TENSOR]", str, default=""),
    TEXT_OR_JSON,
)
def command(comparison: str, tensor: str, form: str) -> None:
    """Words -> `api.trace` -> report."""
    from whence import api
    from whence.report.origin import origin_json, origin_text

    if not tensor and comparison and not _is_path(comparison):
        comparison, tensor = "", comparison
    origin = api.trace(comparison or _answers.latest(), tensor)
    sys.stdout.write(origin_json(origin) if form == "json" else origin_text(origin))


def _is_path(word: str) -> bool:
    """Is a word a path or a URL, or meant as one, and no tensor (which may have / in its name
    too)?
    """
    place = Path(word)
    return "://" in word or place.exists() or (place.parent != Path() and place.parent.exists())
