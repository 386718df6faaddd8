"""Runs of the target in which outputs of the reference replace its own."""

from __future__ import annotations

import glob
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from whence.display import listed
from whence.instrument.patch_points import parse_point, results_of
from whence.readers.opening import open_run
from whence.records import Run
from whence.records.marks import Mark, has_mark, mark_values
from whence.results import Comparison, Explained, Finding
from whence.workflows.rerun import Subject


class PatchedRuns:
    """Captures the program again and compares it with the reference. keep: leave the runs in
    `place`. seed: None for that of the reference.
    """

    def __init__(
        self,
        path: str,
        subject: Subject,
        place: Path,
        *,
        keep: bool,
        seed: int | None,
        tell: Callable[[str], None],
    ) -> None:
        self.path, self.subject, self.place = path, subject, place
        self.keep, self.tell = keep, tell
        self.reference: Run = open_run(path)
        self.count = 0
        info = self.reference.info
        seed = info.seed if seed is None else seed
        self._options: dict[str, Any] = {"deterministic": info.deterministic} | (
            {} if seed is None else {"seed": seed}
        )
        self._several_roots = len({c.root for c in self.reference.calls}) > 1

    def capture(self, name: str, points: tuple[str, ...] = (), **options: Any) -> Path:
        """Run the program, patched at these points."""
        path = self.place / name
        self.count += 1
        if points:
            options |= {"patch": points, "patch_from": self.path}
        self.subject.capture(path, **self._options, **options)
        return path

    def compare(self, target: str | Path) -> Comparison:
        from whence.workflows.compare import compare

        self.tell("comparing")
        return compare(self.reference, str(target))

    def drop(self, path: Path) -> None:
        """Remove a run that is not kept."""
        if not self.keep:
            shutil.rmtree(path, ignore_errors=True)

    def point(self, root: str, name: str) -> str:
        """The patch point of the calls of a module."""
        return (f"{root}/" if self._several_roots else "") + glob.escape(name)

    def points_of(self, finding: Finding) -> tuple[str, ...]:
        """The patch points of a finding."""
        return tuple(self.point(finding.root, name) for name in (finding.name, *finding.also))

    def why_not(self, points: tuple[str, ...], target: Run) -> str:
        """Why a patch at these points can replace nothing, as far as a run of the target tells;
        "" where it may replace something.
        """
        parsed = [parse_point(p) for p in points]
        partners = {c.key(): c for c in target.calls}
        reason = ""
        for call in self.reference.calls:
            fitting = [p for p in parsed if p.fits_call(call)]
            if not fitting:
                continue
            partner = partners.get(call.key())
            if partner is None or has_mark(partner, Mark.NOT_SELECTED):
                return ""  # it may be called elsewhere
            chosen = {p.slot for p in fitting}
            slots = [s for s in results_of(call) if "" in chosen or s in chosen]
            returned = results_of(partner)
            if any(slot in returned for slot in slots):
                return ""
            name = call.scope or call.root
            reason = reason or (
                f"{name} returns {listed(slots, 3) or 'nothing'} in the reference and "
                f"{listed(returned, 3) or 'nothing'} in the target, so no run was made for it"
            )
        return reason

    def returns_whole_output(self, points: tuple[str, ...]) -> str:
        """What a patch at these points cannot tell, in words: a call that returns what the model
        returns leaves no error behind.
        """
        parsed = [parse_point(p) for p in points]
        calls = self.reference.calls
        roots = {
            (c.root, c.rank, c.step, c.micro): c
            for c in calls
            if c.parent == -1 and c.phase == "forward"
        }
        for call in calls:
            root = roots.get((call.root, call.rank, call.step, call.micro))
            if root is None or not any(p.fits_call(call) for p in parsed):
                continue
            returned = {r.record for r in root.refs if r.slot in results_of(root)}
            if returned and returned <= {r.record for r in call.slots("output")}:
                if call.leaf:
                    return (
                        "it returns what the model returns, so patching it takes away all "
                        "error, wherever that arises"
                    )
                return (
                    "it is the whole model: it returns what the model returns, so patching it "
                    "explains everything and locates nothing"
                )
        return ""


def explained(name: str, points: tuple[str, ...], run: Run) -> Explained:
    """What a patch at these points did in a run, without errors: calls patched, and why others were
    not.
    """
    parsed = [parse_point(p) for p in points]
    patched_as = {
        c.id: mark_values(c, Mark.PATCHED_AS)[-1] for c in run.calls if has_mark(c, Mark.PATCHED_AS)
    }
    calls = [
        c
        for c in run.calls
        if any(p.fits(c.root, patched_as.get(c.id, c.scope), c.step, c.occurrence) for p in parsed)
    ]
    notes_of_patch = [n for n in run.notes if n.kind == "patch"]
    noted = {n.scope for n in notes_of_patch}
    # Calls that were not selected carry no note of their own.
    patched = [
        c
        for c in calls
        if has_mark(c, Mark.PATCHED)
        or (has_mark(c, Mark.NOT_SELECTED) and (c.scope or c.root) in noted)
    ]
    scopes = {c.scope or c.root for c in calls}
    notes = list(
        dict.fromkeys(n.text for n in notes_of_patch if "replaced" in n.text and n.scope in scopes)
    )
    if any(not c.leaf for c in patched):
        notes.append("its whole output was replaced: what its modules and its own code computed")
    refused = tuple(
        n.text
        for n in run.notes
        if n.kind == "patch-refused"
        and any(p.fits(p.root, n.scope, n.step, p.occurrence or 0) for p in parsed)
    )
    if not patched and not refused:
        refused = (
            f"the target made no call {', '.join(points)}"
            if not calls
            else "none of its calls was given the reference's outputs",
        )
    return Explained(
        name, points, len(patched), None, None, None, refused=refused, notes=tuple(notes)
    )
