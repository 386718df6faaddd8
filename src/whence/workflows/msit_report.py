"""`msit llm compare`: the table of that tool at one of its levels, next to whence's own result."""

from __future__ import annotations

import glob
import re
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import msgspec

from whence.errors import UsageError
from whence.readers.opening import open_run
from whence.results import Comparison, Shown, ViewRow
from whence.workflows.compare import compare
from whence.workflows.notebook_progress import Count, Tell
from whence.workflows.saved import write_file

LEVELS = ("token", "logits", "layer", "module", "api")
_LAYER = re.compile(r"(.*\.)?\d+")


def cmp_report(
    reference: str,
    target: str,
    *,
    level: str = "",
    tool: str = "msit",
    output: str = ".",
    say: Tell | None = None,
    show: Callable[[Comparison], None] | None = None,
    progress: Count | None = None,
) -> tuple[Comparison, Path]:
    """Compare two dumps and write `<tool>_cmp_report_<UTC time>.csv` into `output`; (whence's
    comparison, the file).

    level: rows of it: "token" or "logits" (what the model returned at each token, one tensor of
    each dump), "layer" (members of a list of modules), "module", "api" (operators), "" for all.
    say: takes what the tool's log says. show: takes the comparison before anything is written.
    Raises UsageError where a level has no rows, UnreadableRun, StoreFailed.
    """
    from whence.report.views import view_csv

    if level and level not in LEVELS:
        raise UsageError(f"level {level!r}: {', '.join(LEVELS)}")
    if say is not None:
        say(f"Comparing {_kind(target)} with {_kind(reference)}")
    result, rows = (
        _tokens(reference, target, progress)
        if level in ("token", "logits")
        else _levelled(reference, target, level, progress)
    )
    if show is not None:
        show(result)
    path = Path(output) / f"{tool}_cmp_report_{time.strftime('%Y%m%d%H%M%S', time.gmtime())}.csv"
    folders = _folder(reference), _folder(target)
    rows = [_with_files(row, *folders) for row in rows]
    write_file(path, view_csv("msit", rows), advice="; choose another -o")
    if say is not None:
        tokens = sorted({row.target.step for row in rows if row.target is not None})
        say(f"All token ids in my_dump_data: dict_keys({tokens})")
        say(f"Saved comparing results: {path if path.is_absolute() else f'./{path}'}")
    return result, path


def _kind(path: str) -> str:
    """The name that the tool gives this kind of dump."""

    info = open_run(path).info
    if info.options.get("level") == "graph":
        return "FX" if info.options.get("graph_mode") == "fx" else "GE"
    return {"fx": "FX", "ge": "GE", "atb": "ATB"}.get(info.kind, "Torch")


def _folder(path: str) -> tuple[Path, Collection[str]]:
    """The folder of the tool's own dump files, in the run or around it; and its models."""

    run = open_run(path)
    place = Path(run.path)
    roots = {call.root for call in run.calls}
    return place.parent if place.name == "whence-run" else place, roots


def _with_files(row: ViewRow, *folders: tuple[Path, Collection[str]]) -> ViewRow:
    """The row with the paths of the tool's own tensor files."""
    sides = [
        msgspec.structs.replace(side, path=side.path or _file(side, *folder))
        if side is not None
        else None
        for side, folder in zip((row.reference, row.target), folders, strict=True)
    ]
    return msgspec.structs.replace(row, reference=sides[0], target=sides[1])


def _file(side: Shown, folder: Path, roots: Collection[str]) -> str:
    """The file that contains a tensor of a run, in the layout of msit or ATB.

    "" when there is none, or several match.
    """
    kind, _, place = side.slot.partition(".")
    token, op_type = side.step, glob.escape(side.op_type)
    call = "root" if side.name in roots else f"root.{glob.escape(side.name)}"
    when, stem = ("after", "outtensor") if kind == "output" else ("before", "intensor")
    number = "0" if place == "logits" else place
    patterns = (
        f"{token}/{call}/{kind}_{place}.pth",
        f"{token}/{'root.*' if place == 'logits' else call}/{kind}.pth",
        f"weights/{call}.{place}.pth",
        f"{token}/**/*_{op_type}/{when}/{stem}{number}.bin",
    )
    for pattern in patterns:
        files = list(folder.glob(pattern))
        if len(files) == 1:
            return str(files[0])
    return ""


def _of_logits(reference: str, target: str) -> Sequence[ViewRow]:
    """The rows of captures of logits only, which `compare` judges token by token and
    without views.
    """
    from whence.comparison.context import prepare
    from whence.comparison.options import CompareOptions
    from whence.comparison.paired_runs import PairedRuns
    from whence.comparison.views.rows import viewed

    def progress(count: int, of: int, text: str) -> None:
        """A callback without effect: two dumps of logits are read quickly."""

    options = CompareOptions(replay=False, views=("msit",))
    prepared = prepare(open_run(reference), open_run(target), options)
    plan = prepared.aligned.plan
    paired = PairedRuns(prepared.reference, prepared.target, plan, options, progress)
    paired.measure()
    return viewed(paired, options.views, {}, progress)["msit"]


def _levelled(
    reference: str, target: str, level: str, progress: Count | None
) -> tuple[Comparison, Sequence[ViewRow]]:
    """The whole comparison, and the rows of one level."""

    result = compare(reference, target, view="msit", progress=progress)
    every: Sequence[ViewRow] = result.views.get("msit", ())
    if "msit" not in result.views:
        every = _of_logits(reference, target)
        result = _without_view_note(result)
    rows = _chosen(every, level)
    if not rows:
        kinds = ", ".join(sorted({_side(row).kind for row in every})) or "nothing"
        hint = ": dump with --type op (mode 'api')" if level == "api" else ""
        raise UsageError(
            f"{reference} and {target} have nothing at level {level or 'any'}; they hold "
            f"{kinds}{hint}"
        )
    return result, rows


def _tokens(
    reference: str, target: str, progress: Count | None
) -> tuple[Comparison, Sequence[ViewRow]]:
    """One row for each token.

    The answer is that of the two dumps if they can be compared otherwise, else that of the logits
    alone.
    """
    from whence.comparison.answer import token_logits
    from whence.comparison.answer.runs import ended
    from whence.comparison.options import CompareOptions
    from whence.comparison.prepare import bare_logits

    reference_run, target_run = (
        bare_logits.of_run(run) or run for run in (open_run(reference), open_run(target))
    )
    *tensors, logits_only = token_logits.found(reference_run, target_run)
    for path, side in zip((reference, target), tensors, strict=True):
        if not side:
            raise UsageError(
                f"{path} holds no output of any token: dump the logits (dump_last_logits=True) "
                "or the outputs of modules"
            )
    options = CompareOptions(replay=False)
    answer, rows = token_logits.compared(
        reference_run, target_run, (tensors[0], tensors[1]), options
    )
    if logits_only and not token_logits.have_ids(reference_run, target_run):
        return ended(answer, reference_run, target_run, options), rows
    result = _without_view_note(compare(reference, target, view="msit", progress=progress))
    return (result if result.coverage.measured else answer), rows


def _without_view_note(result: Comparison) -> Comparison:
    return msgspec.structs.replace(
        result, notes=tuple(note for note in result.notes if not note.startswith("--view"))
    )


def _side(row: ViewRow) -> Shown:
    cell = row.reference or row.target
    assert cell is not None
    return cell


def _chosen(rows: Sequence[ViewRow], level: str) -> list[ViewRow]:
    if not level:
        return list(rows)
    if level == "api":
        return [row for row in rows if _side(row).kind == "operator"]
    modules = [row for row in rows if _side(row).kind == "module"]
    if level == "module":
        return modules
    return [row for row in modules if _LAYER.fullmatch(_side(row).name)]
