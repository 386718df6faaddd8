"""The diff of two tables of operator tests as text and csv. Computes nothing."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any

from whence.report.document import Document, Table, answering
from whence.report.tables import cell, clean, count, csv_text, listed, number, shortened, size
from whence.results import CauseKind, Comparison, Finding

SHOWN = 20
WHY = 160  # characters of a reason that are shown


def tested_csv(diff: Any, *, xray: bool = False) -> str:
    """A line per test; cells of a side without a row are empty. diff: of `api.diff_results`.

    xray: in the format of torch_xray's summary_diff_check: sides xpu and gpu, operators by their
    number in dump.json, `pass` and `fail`; the name of the test comes last.
    """
    sides = ("xpu", "gpu") if xray else ("tgt", "ref")
    beyond = [f"{side}_1e-{k}" for k in range(1, 9) for side in sides]
    columns_ = (
        "name",
        "op_name",
        "dtype",
        "shape",
        "min-val",
        "max-val",
        "is_pass",
        *(f"{side}_max" for side in sides),
        *beyond,
        "why",
    )
    lines: list[tuple[object, ...]] = [(*columns_, "test") if xray else columns_]
    for row in diff.rows:
        result = row.either
        pairs = [
            "" if side is None or side.beyond[k] is None else side.beyond[k]
            for k in range(8)
            for side in (row.target, row.reference)
        ]
        passed: object = "" if row.passed is None else row.passed
        name, dtype, test_name = row.name, result.dtype, [cell(row.name)] if xray else []
        if xray:
            name = _xray_name(row.name, result.op)
            dtypes = (f"torch.{each}" for each in result.dtype.split("; ") if each)
            dtype = "; ".join("torch.float" if d == "torch.float32" else d for d in dtypes)
            passed = {None: "", True: "pass", False: "fail"}[row.passed]
        lines.append(
            (
                cell(name),
                cell(result.op),
                cell(dtype),
                cell(result.shape),
                _number(result.low),
                _number(result.high),
                passed,
                _worst(row.target),
                _worst(row.reference),
                *pairs,
                cell(row.why),
                *test_name,
            )
        )
    return csv_text(lines)


def _xray_name(test: str, op: str) -> str:
    """`gelu_default_0[12]` as `00012-aten`, the operator's name in dump.json; tests of a backward
    pass have a suffix that says so.
    """
    match = re.fullmatch(r"(.*)\[(\d+)\]", test)
    if match is None:
        return test
    return f"{int(match[2]):05d}-{op.partition('.')[0]}" + (
        "-backward" if match[1].endswith("_backward") else ""
    )


@answering
def tested_text(diff: Any, recorded: Comparison | None = None) -> Document:
    """First the answer, then the operators at fault with their worst test, then the counts.

    recorded: comparison of the two dumps, whose findings the tests confirm or not.
    """
    failed = diff.failed
    by_operator: dict[str, list[Any]] = {}
    for row in failed:
        if not row.through:
            by_operator.setdefault(row.either.op, []).append(row)
    if diff.status == "same":
        yield "TESTS" if recorded is not None else "SAME", "every operator passes on the target"
    elif diff.status == "undecided":
        yield "UNDECIDED", "no test has a result on both sides"
    else:
        yield "DIFFERENT", f"{count(len(diff.operators), 'operator')}, worst first"
    findings = recorded.findings if recorded is not None else ()
    yield from (f"  {line}" for line in dict.fromkeys(_of_finding(f, diff) for f in findings))
    if by_operator:
        tests = Counter(row.either.op for row in diff.rows)
        table = [("operator", "fails", "local error", "worst", "why")]
        for op, rows in list(by_operator.items())[:SHOWN]:
            error = "-" if math.isinf(rows[0].severity) else number(rows[0].severity)
            why = shortened(clean(rows[0].why), WHY)
            fails = f"{len(rows)} of {count(tests[op], 'test')}"
            table.append((op, fails, error, rows[0].name, why))
        yield Table(table, indent="  ")
        if len(by_operator) > SHOWN:
            yield f"  and {count(len(by_operator) - SHOWN, 'operator')} more"
    if indirect := [row.either.op for row in failed if row.through]:
        names = list(dict.fromkeys(indirect))
        through = ", ".join(names[:6]) + (" ..." if len(names) > 6 else "")
        yield f"  {count(len(indirect), 'test')} fail that run these: {through}"
    places = (diff.reference, diff.target)
    for title, place, device in zip(("reference", "target"), places, diff.devices):
        yield f"  {title:<16} {place}" + (f" ({device})" if device else "")
    missing = sum(r.target is None or r.reference is None for r in diff.rows)
    passed = [r.passed for r in diff.rows]
    yield (
        f"{count(len(diff.rows), 'test')}: {count(passed.count(True))} pass, "
        f"{count(len(failed))} fail ({count(missing)} of them missing on one side), "
        f"{count(passed.count(None))} not compared"
    )
    yield from (f"  {note}" for note in diff.notes)


def _of_finding(finding: Finding, diff: Any) -> str:
    """What the tests of an operator at fault say of it."""
    rows = [r for r in diff.rows if finding.op_type in r.either.op.split(".")]
    passed = [row.passed for row in rows]
    if not rows or None in passed:
        return f"{finding.op_type}: no test of it was compared"
    where = f" on {diff.devices[1]}" if diff.devices[1] else ""
    tests = f"{finding.op_type}: {passed.count(True)} of {count(len(rows), 'test')} pass{where}"
    if False in passed:
        return f"{tests}: the operator itself is at fault there"
    asked = ": what it is asked to compute differs" if finding.cause == CauseKind.SEMANTIC else ""
    return f"{tests}, so the operator computes what it is asked{asked}"


def _worst(row: Any) -> str:
    return "" if row is None or math.isnan(row.worst) else repr(row.worst)


def _number(text: str) -> str:
    try:
        return repr(float(text)) if text else ""
    except ValueError:
        return cell(text)


def written(result: Any) -> list[str]:
    """Lines on what `api.generate_tests` wrote, what it left out and why."""
    lines = [
        f"{count(result.tests, 'test')} in {count(result.files, 'file')}, {size(result.nbytes)} "
        f"of data: {clean(result.folder)}",
        f"  pytest {clean(result.folder)} --device cuda:0 --seed 42 --detail_compare_path out.csv",
    ]
    for reason, names in result.left_out.items():
        lines.append(f"  left out: {clean(reason)}: {listed(names, 6)}")
    return lines
