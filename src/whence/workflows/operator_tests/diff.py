"""Two tables of operator tests, of a reference device and a target device, joined and judged row by
row.

A row passes when the target is not further from the CPU than the reference allows (more elements
beyond a threshold than twice the reference's, or a largest error beyond twice the reference's and
rounding), and its own test passed, which judges by the noise floor.
"""

from __future__ import annotations

import csv
import math
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from whence.dtypes import unit_roundoff
from whence.errors import UnreadableRun

THRESHOLDS = tuple(f"1e-{k}" for k in range(1, 9))
_NEEDED = ("name", "op_name", "max")
_STATUSES = {
    "passed": "pass",
    "failed": "fail",
    "xfail": "skipped",
    "skip": "skipped",
    "success": "pass",
}
# Absolute and relative tolerance by dtype, those of torch.testing.assert_close.
_TOLERANCE = {
    "float16": (1e-5, 1e-3),
    "bfloat16": (1e-5, 1.6e-2),
    "float32": (1e-5, 1.3e-6),
    "float64": (1e-7, 1e-7),
    "complex64": (1e-5, 1.3e-6),
    "complex128": (1e-7, 1e-7),
}


@dataclass(frozen=True, slots=True)
class Tested:
    """One row of a table.

    worst: largest absolute error against the CPU, NaN without one. beyond: numbers of elements with
    an error above 1e-1 .. 1e-8, None when the table lacks them. local: error relative to the noise
    floor, or None. calls: operators that a test of a backward pass or of a module ran.
    """

    name: str
    op: str
    dtype: str
    shape: str
    low: str
    high: str
    worst: float
    beyond: tuple[int | None, ...]
    mismatches: int = 0
    local: float | None = None
    status: str = ""
    reason: str = ""
    device: str = ""
    numel: int = 0
    calls: tuple[str, ...] = ()

    @property
    def done(self) -> bool:
        """Whether the test produced results to compare."""
        return self.status not in ("error", "skipped") and not math.isnan(self.worst)

    @property
    def tolerance(self) -> float:
        """Absolute error that rounding explains for values of this size: 1e-5 + 1.3e-6 of the
        largest for float32, and so on.
        """
        absolute, relative = 0.0, 0.0
        for name in re.findall(r"[a-z]+\d+(?:_e\dm\d\w*)?", self.dtype):
            parts = _TOLERANCE.get(name, (1e-5, 2 * unit_roundoff(name)))
            absolute, relative = max(absolute, parts[0]), max(relative, parts[1])
        ends = [abs(v) for v in (_float(self.low), _float(self.high)) if math.isfinite(v)]
        return absolute + relative * max(ends, default=1.0) if relative else 0.0


@dataclass(frozen=True, slots=True)
class JoinedResults:
    """One test on both devices.

    passed: None when there was nothing to compare. why: reasons for a failure, in words. through:
    operators that the test ran and that fail in tests of their own; the test's own operator is then
    not blamed.
    """

    name: str
    reference: Tested | None
    target: Tested | None
    passed: bool | None
    why: str = ""
    through: tuple[str, ...] = ()

    @property
    def either(self) -> Tested:
        """The target's row, or the reference's when the target has none."""
        row = self.target or self.reference
        assert row is not None
        return row

    @property
    def severity(self) -> float:
        """Sort key for the size of the error: the larger local error of both sides; inf when there
        is none or a row is missing.
        """
        errors = [
            r.local for r in (self.reference, self.target) if r is not None and r.local is not None
        ]
        return (
            max(errors)
            if errors and self.reference is not None and self.target is not None
            else math.inf
        )


@dataclass(frozen=True, slots=True)
class Diff:
    """Two tables joined by name, in the order of the reference's. status: "same", "different", or
    "undecided" when nothing was compared.
    """

    reference: str
    target: str
    devices: tuple[str, str]
    rows: tuple[JoinedResults, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def failed(self) -> tuple[JoinedResults, ...]:
        """Rows that do not pass, worst first."""
        return tuple(sorted((r for r in self.rows if r.passed is False), key=lambda r: -r.severity))

    @property
    def operators(self) -> tuple[str, ...]:
        """Names of the operators at fault, worst first."""
        return tuple(dict.fromkeys(r.either.op for r in self.failed if not r.through))

    @property
    def status(self) -> str:
        if self.failed:
            return "different"
        return "same" if any(r.passed for r in self.rows) else "undecided"


@dataclass(frozen=True, slots=True)
class Table:
    """The rows of one csv by name, in order."""

    path: str
    rows: dict[str, Tested]
    repeated: int = 0


def read(path: Path) -> Table:
    """Read a table that tests wrote. Columns may be in any order; unknown ones are ignored.

    Raises UnreadableRun for a file that is no such table.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            columns = [c.strip() for c in reader.fieldnames or ()]
            if missing := [c for c in _NEEDED if c not in columns]:
                raise UnreadableRun(
                    f"{path} is not a table of operator tests: it has no column "
                    f"{', '.join(missing)}; write one with "
                    "pytest TESTS --detail_compare_path FILE.csv"
                )
            reader.fieldnames = columns
            rows: dict[str, Tested] = {}
            repeated = 0
            for line in reader:
                row = _row(
                    {
                        k: (v or "").strip()
                        for k, v in line.items()
                        if isinstance(k, str) and not isinstance(v, list)
                    },
                    path,
                    reader.line_num,
                )
                repeated += row.name in rows
                rows[row.name] = row
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UnreadableRun(f"{path} cannot be read: {error}") from error
    return Table(str(path), rows, repeated)


def _row(cells: dict[str, str], path: Path, line: int) -> Tested:
    name = _unquoted(cells.get("name", ""))
    if not name:
        raise UnreadableRun(f"{path}, line {line}: a row without a name")
    worst = _float(cells.get("max", ""))
    if cells.get("max") and math.isnan(worst) and cells["max"].lower() != "nan":
        raise UnreadableRun(f"{path}, line {line}: max {cells['max'][:40]!r} is not a number")
    mismatches = sum(_count(cells.get(c, "")) or 0 for c in ("nan_mismatch", "inf_mismatch"))
    status = cells.get("status", "").lower()
    numel = _count(cells.get("numel", ""))
    return Tested(
        name,
        _unquoted(cells.get("op_name", "")),
        cells.get("dtype", ""),
        cells.get("shape", ""),
        cells.get("min-val", ""),
        cells.get("max-val", ""),
        worst,
        tuple(_count(cells.get(t, "")) for t in THRESHOLDS),
        mismatches,
        local=_float(cells["local_error"]) if cells.get("local_error") else None,
        status=_STATUSES.get(status, status),
        reason=_unquoted(cells.get("reason", "")),
        device=_unquoted(cells.get("device", "")),
        numel=_elements(cells.get("shape", "")) if numel is None else numel,
        calls=tuple(cells.get("calls", "").split()),
    )


def _unquoted(text: str) -> str:
    return text[1:] if text[:1] == "'" and text[1:2] in ("=", "+", "-", "@") else text


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _count(text: str) -> int | None:
    value = _float(text)
    return max(-_MOST, min(int(value), _MOST)) if math.isfinite(value) else None


_MOST = 1 << 63  # more elements has no tensor


def _elements(shape: str) -> int:
    """Number of elements of shapes written as "[2, 3]; [4]", "(2, 3)" or "2x3"."""
    parts = re.findall(r"[\[(]([\d,\sx]*)[\])]", shape) or [shape]
    counts = (math.prod(int(n[:18]) for n in re.findall(r"\d+", part)) for part in parts)
    return min(sum(counts), _MOST)


def diff(reference: Table, target: Table) -> Diff:
    """Join both tables by test name and judge each pair of rows."""
    names = [*reference.rows, *(n for n in target.rows if n not in reference.rows)]
    rows = tuple(_joined(name, reference.rows.get(name), target.rows.get(name)) for name in names)
    notes = [
        f"{t.path}: {t.repeated} names more than once, the last row of each counts"
        for t in (reference, target)
        if t.repeated
    ]
    failing = {r.either.op for r in rows if r.passed is False and not r.either.calls}
    rows = tuple(_through(r, failing) for r in rows)
    devices = tuple(
        ", ".join(dict.fromkeys(r.device for r in t.rows.values() if r.device))
        for t in (reference, target)
    )
    return Diff(reference.path, target.path, (devices[0], devices[1]), rows, tuple(notes))


def _through(row: JoinedResults, failing: set[str]) -> JoinedResults:
    """Attribute a failing row to operators that it runs and that fail in tests of their own.

    failing: operators with a failing test that runs nothing else.
    """
    culprits = tuple(c for c in row.either.calls if c in failing) if row.passed is False else ()
    return (
        replace(row, through=culprits, why=f"runs {', '.join(culprits)}; {row.why}")
        if culprits
        else row
    )


def _joined(name: str, reference: Tested | None, target: Tested | None) -> JoinedResults:
    if reference is None or target is None:
        return JoinedResults(
            name,
            reference,
            target,
            False,
            f"missing in the {'reference' if reference is None else 'target'}'s table",
        )
    if reference.status == target.status == "skipped":
        return JoinedResults(name, reference, target, None, target.reason or "skipped on both")
    for side, row in (("target", target), ("reference", reference)):
        if not row.done:
            return JoinedResults(
                name,
                reference,
                target,
                False,
                f"{side}: {row.status or 'no result'}{': ' + row.reason if row.reason else ''}",
            )
    whys = [
        f"{side}: {row.reason or 'its test failed'}"
        for side, row in (("target", target), ("reference", reference))
        if row.status == "fail"
    ]
    whys += _by_rule(reference, target)
    return JoinedResults(name, reference, target, not whys, "; ".join(whys))


def _by_rule(reference: Tested, target: Tested) -> list[str]:
    """The rules by which the target is too far off, in words, compared with the reference.

    When the noise floor was judged, thresholds that rounding alone reaches are skipped; a table
    without noise floor is judged by all thresholds.
    """
    whys = []
    judged = reference.local is not None and target.local is not None and bool(target.status)
    tolerance = max(reference.tolerance, target.tolerance)
    if target.mismatches:
        whys.append(f"{target.mismatches} elements NaN or Inf on one side")
    if not target.worst <= max(2 * reference.worst, tolerance):
        whys.append(f"largest error {target.worst:.3g}, the reference's {reference.worst:.3g}")
    allowed = max(1.0, 1e-4 * max(reference.numel, target.numel))
    for k, (t, g) in enumerate(zip(target.beyond, reference.beyond), 1):
        if (
            t is not None
            and g is not None
            and t > 2 * g + allowed
            and not (judged and 10.0**-k <= tolerance)
        ):
            whys.append(f"{t} elements beyond 1e-{k}, the reference's {g}")
            break
    return whys
