"""A Comparison as JSON and CSV. Everything is written from the Comparison; nothing is computed."""

from __future__ import annotations

import csv
import io
import math
from typing import Any

import msgspec
import orjson

from whence.report.tables import cell
from whence.results import Comparison

_FIXED = (
    "verdict",
    "name",
    "op_type",
    "step",
    "rank",
    "occurrence",
    "reference_slot",
    "target_slot",
    "reference_dtype",
    "target_dtype",
    "reference_shape",
    "target_shape",
    "rule",
    "identical",
    "tier",
    "why",
)


def summary_data(result: Comparison) -> dict[str, Any]:
    """The fields that scripts read (DESIGN section 5a), as plain values."""
    keep = (
        "status",
        "evidence",
        "reference",
        "target",
        "findings",
        "first_difference",
        "counts",
        "coverage",
        "unmatched",
        "incomparable",
        "inputs_differ",
        "without_partner",
        "nearest",
        "declared",
        "versions",
        "headline",
        "notes",
        "environment",
        "timing",
        "repetition",
        "third",
        "generation",
        "programs",
        "occurrences",
    )
    data: dict[str, Any] = msgspec.to_builtins(result)
    out = {k: data[k] for k in keep}
    if out["generation"] is not None:  # every token is in report.json
        out["generation"] = {k: v for k, v in out["generation"].items() if k != "tokens"}
        suspect = out["generation"].get("suspect", -1)
        out["generation"]["first_unexplained"] = (
            data["generation"]["tokens"][suspect] if suspect >= 0 else None
        )
    out["coverage"]["share"] = result.coverage.share
    for finding in out["findings"]:
        for key in ("cause", "sentence", "numbers", "also"):
            finding.setdefault(key, [] if key == "also" else {} if key == "numbers" else "")
    return out


def summary(result: Comparison) -> str:
    """`summary.json`: the answer without the rows, indented."""
    return orjson.dumps(summary_data(result), option=orjson.OPT_INDENT_2).decode() + "\n"


def everything_json(result: Comparison) -> str:
    """`report.json`: the whole Comparison; `load_comparison` reads it back. Infinite figures become
    null.
    """
    return msgspec.json.encode(result).decode() + "\n"


def table_csv(result: Comparison) -> str:
    """`report.csv`: one line per pair of records; a cell holds a number, or is empty where there is
    none (`why` says why).
    """
    metrics = list(dict.fromkeys(name for row in result.rows for name in row.measured.values))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow((*_FIXED, *metrics, "max_abs_index"))
    for row in result.rows:
        measured = row.measured
        writer.writerow(
            (
                row.verdict,
                cell(row.name),
                cell(row.op_type),
                row.step,
                row.rank,
                row.occurrence,
                cell(row.reference_slot),
                cell(row.target_slot),
                row.reference_dtype,
                row.target_dtype,
                _shape(row.reference_shape),
                _shape(row.target_shape),
                row.rule,
                "yes" if measured.identical else "no",
                measured.tier,
                cell(measured.why or "; ".join(f"{k}: {v}" for k, v in measured.whys.items())),
                *(_figure(measured.values.get(m)) for m in metrics),
                _shape(measured.max_abs_index or ()),
            )
        )
    return out.getvalue()


def _shape(extents: tuple[int, ...]) -> str:
    return "x".join(map(str, extents))


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return repr(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(value)
