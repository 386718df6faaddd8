"""`msit llm compare`: the table of that tool at one of its levels, beside whence's own answer."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from whence.errors import StoreFailed, UsageError

if TYPE_CHECKING:
    from whence.results import Comparison, Shown, ViewRow

LEVELS = ("token", "logits", "layer", "module", "api")
_LAYER = re.compile(r"(.*\.)?\d+")


def cmp_report(
    golden: str,
    mine: str,
    *,
    level: str = "",
    tool: str = "msit",
    output: str = ".",
    progress: Callable[[int, int, str], None] | None = None,
) -> tuple[Comparison, Path]:
    """Compare two dumps and write `<tool>_cmp_report_<UTC time>.csv` into `output`; (whence's comparison, the file).

    level: rows of it: "token" or "logits" (what the model returned), "layer" (members of a list of modules), "module", "api" (operators),
    "" for all. Raises UsageError where a level has no rows, UnreadableRun, StoreFailed.
    """
    from whence import report
    from whence.api.results import compare

    if level and level not in LEVELS:
        raise UsageError(f"level {level!r}: {', '.join(LEVELS)}")
    result = compare(golden, mine, view="msit", progress=progress)
    every: Sequence[ViewRow] = result.views.get("msit", ())
    if "msit" not in result.views:
        every = _of_logits(golden, mine)
        result = msgspec.structs.replace(result, notes=tuple(note for note in result.notes if not note.startswith("--view")))
    rows = _chosen(every, level)
    if not rows:
        kinds = ", ".join(sorted({_side(row).kind for row in every})) or "nothing"
        hint = ": dump with --type op (mode 'api')" if level == "api" else ""
        raise UsageError(f"{golden} and {mine} have nothing at level {level or 'any'}; they hold {kinds}{hint}")
    path = Path(output) / f"{tool}_cmp_report_{time.strftime('%Y%m%d%H%M%S', time.gmtime())}.csv"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(report.view_csv("msit", rows), encoding="utf-8")
    except OSError as error:
        raise StoreFailed(f"cannot write {path}: {error.strerror or error}; choose another -o") from error
    return result, path


def _of_logits(golden: str, mine: str) -> Sequence[ViewRow]:
    """The rows of captures of logits alone, which `compare` judges token by token and without views."""
    from whence.api.again import Again
    from whence.api.comparing import CompareOptions, brought_face_to_face
    from whence.api.faces import Faces, Read
    from whence.api.runs import open_run
    from whence.api.viewing import viewed

    def tell(done: int, of: int, what: str) -> None:
        """Two dumps of logits are soon read."""

    options = CompareOptions(replay=False, views=("msit",))
    _, _, aligned = brought_face_to_face(open_run(golden), open_run(mine), options)
    left, right = Read(aligned.reference), Read(aligned.target)
    faces = Faces(left, right, aligned.plan, options, Again(left, [], tell=tell), tell)
    faces.measure()
    return viewed(faces, options.views, {}, tell)["msit"]


def _side(row: ViewRow) -> Shown:
    found = row.reference or row.target
    assert found is not None
    return found


def _chosen(rows: Sequence[ViewRow], level: str) -> list[ViewRow]:
    if not level:
        return list(rows)
    if level == "api":
        return [row for row in rows if _side(row).kind == "operator"]
    modules = [row for row in rows if _side(row).kind == "module"]
    if level == "module":
        return modules
    if level == "layer":
        return [row for row in modules if _LAYER.fullmatch(_side(row).name)]
    return _returned([row for row in rows if row.slot.startswith("output.")])


def _is_logits(shown: Shown) -> bool:
    return shown.slot == "output.logits"


def _is_outermost(shown: Shown) -> bool:
    return shown.kind == "module" and shown.name.partition("#")[0] == shown.op_type


def _returned(outputs: list[ViewRow]) -> list[ViewRow]:
    """What the model returned at each token: its logits, else what the outermost call did, else the last tensor."""
    for is_it in (_is_logits, _is_outermost):
        if found := [row for row in outputs if is_it(_side(row))]:
            return found
    last: dict[Any, ViewRow] = {(_side(row).rank, _side(row).step): row for row in outputs}
    return list(last.values())
