"""msit: `<token>/root.<module>/{input_<i>.pth, output.pth}`, `weights/`, `model_tree.json` and
`statistics.csv`, as `msit llm` dumps torch.

What that tool itself does not dump stays out: keyword inputs, what a call changed in place, and of
a module that is called again in one token all but the last call. Operators are
`root.<module>.<operator>.<n>`. Files are those of torch.save, in the tensor's own dtype.
"""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from whence.records import Call, Ref, Run
from whence.records.logits import maker_of
from whence.records.slots import is_input, is_output, is_param
from whence.writers.support import encodings, job
from whence.writers.support.job import Tell, Writing, Written, cell, silent

COLUMNS = (
    "NodeName", "NodeType", "InputOutput", "Index", "DataType", "Shape", "Max", "Min", "Mean",
    "L2Norm",
)  # fmt: skip
_UNSAFE = re.compile(r"[^\w.<>#-]")
_PLACES = re.compile(r"(input|output)((?:\.\d{1,6})+)")


def write(
    run: Run,
    destination: Path,
    *,
    tell: Tell = silent,
    weights: bool = False,
    statistics: bool = False,
    tensors: bool = True,
) -> Written:
    """Write a run into the folder `destination`, which is made; files of the same names there are
    replaced.

    weights: parameters too, once. statistics: `statistics.csv` too. tensors: elements; without them
    the statistics alone. The logits of a run of these alone lie under the module that made them.
    Several ranks lie in folders `cpu_<rank>`. Raises OSError.
    """
    work = Writing(run, tell, sum(len(call.refs) for call in run.calls))
    ranks = dict.fromkeys(call.rank for call in run.calls)
    for rank in ranks:
        folder = destination if len(ranks) == 1 else destination / f"cpu_{rank}"
        calls = [call for call in run.calls if call.rank == rank]
        _Process(work, folder, calls, tensors=tensors).write(weights=weights, statistics=statistics)
    return work.done()


class _Process:
    """What one process dumps."""

    def __init__(self, work: Writing, folder: Path, calls: list[Call], *, tensors: bool) -> None:
        self.work, self.folder, self.calls, self.tensors = work, folder, calls, tensors
        self.head = maker_of(work.run)
        self.rows: list[tuple[object, ...]] = []

    def write(self, *, weights: bool, statistics: bool) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        tree = self.folder / "model_tree.json"
        tree.write_text(json.dumps(_tree(self.calls), indent=1), encoding="utf-8")
        self.work.files.append(tree)
        counts: Counter[tuple[int, str]] = Counter()
        last = {
            (call.step, call.scope): call.id
            for call in self.calls
            if call.kind == "module" and call.phase == "forward"
        }
        for call in self.calls:
            name = _name(call)
            if call.phase != "forward":
                self.work.leave("the tool dumps the forward pass", job.name(call))
            elif call.kind == "module" and last[call.step, call.scope] != call.id:
                self.work.leave("called again in the same token", job.name(call))
            elif call.kind in ("module", "operator"):
                if call.kind == "operator":
                    name, operator = f"{name}.{counts[call.step, name]}", name
                    counts[call.step, operator] += 1
                self._call(call, name)
            elif call.refs:
                self.work.leave(f"a {call.kind}", job.name(call))
        if weights:
            self._weights()
        if statistics or not self.tensors:
            self._statistics()

    def _call(self, call: Call, name: str) -> None:
        single = sum(is_output(ref.slot) for ref in call.refs) == 1
        inputs = [ref.slot for ref in call.refs if is_input(ref.slot)]
        for ref in call.refs:
            # theirs have names; the tool numbers them
            if call.kind == "operator" and ref.slot in inputs:
                stem: str | None = f"input_{inputs.index(ref.slot)}"
            else:
                stem = _stem(ref.slot, single=single)
            if stem is None:
                if not is_param(ref.slot):
                    self.work.leave(
                        "a keyword input, a named output, or changed in place",
                        job.name(call, ref.slot),
                    )
                continue
            array = self.work.array(ref.record, job.name(call, ref.slot)) if self.tensors else None
            self._row(call, name, ref, stem, array)
            made_by = (
                f"root.{_safe(self.head)}" if self.head and ref.slot == "output.logits" else name
            )
            if array is not None:
                self._file(self.folder / str(call.step) / made_by / f"{stem}.pth", array)

    def _file(self, path: Path, array: Any) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        encodings.write_torch(path, array)
        self.work.wrote(array)
        self.work.files.append(path)

    def _weights(self) -> None:
        names: set[str] = set()
        for call in self.calls:
            for ref in call.slots("param"):
                name = _safe(
                    ".".join(
                        part for part in ("root", call.scope, ref.slot.partition(".")[2]) if part
                    )
                )
                if name not in names and (array := self.work.array(ref.record, name)) is not None:
                    self._file(self.folder / "weights" / f"{name}.pth", array)
                names.add(name)

    def _row(self, call: Call, name: str, ref: Ref, stem: str, array: Any) -> None:
        record = self.work.run.records[ref.record]
        figures = self.work.figures(ref.record, array)
        if figures is not None:
            kind, _, index = stem.partition("_")
            numbers = (figures.max, figures.min, figures.mean, figures.norm)
            self.rows.append(
                (
                    cell(name),
                    cell(call.op_type),
                    kind,
                    index,
                    f"torch.{record.dtype}",
                    str(list(record.shape)),
                    *numbers,
                )
            )

    def _statistics(self) -> None:
        path = self.folder / "statistics.csv"
        with path.open("w", encoding="utf-8", newline="") as file:
            out = csv.writer(file, lineterminator="\n")
            out.writerow(COLUMNS)
            out.writerows(row for row in self.rows if None not in row)
        self.work.files.append(path)


def _stem(slot: str, *, single: bool) -> str | None:
    """The file of a tensor, None for what the tool does not dump."""
    if slot == "output.logits":
        return "output"
    match = _PLACES.fullmatch(slot)
    if not match:
        return None
    places = match[2].replace(".", "_")
    return "output" if single and match[1] == "output" and places == "_0" else match[1] + places


def _name(call: Call) -> str:
    """root.layers.0, and of an operator with its own name behind: root.layers.0.addmm."""
    operator = (
        call.op.split(".")[1]
        if call.kind == "operator" and "." in call.op
        else call.op
        if call.kind == "operator"
        else ""
    )
    return _safe(".".join(part for part in ("root", call.scope, operator) if part))


def _safe(name: str) -> str:
    """A name as one part of a path: names of a run are untrusted."""
    return _UNSAFE.sub("_", name)[:200]


def _tree(calls: list[Call]) -> dict[str, Any]:
    """The modules that were called, as the tool nests them."""
    nodes: dict[str, dict[str, Any]] = {"root": {"name": "root", "type": "", "children": []}}
    for call in sorted((c for c in calls if c.kind == "module"), key=lambda c: c.order):
        whole = _name(call)
        node = _node(nodes, whole)
        node["type"] = node["type"] or call.op_type
    return nodes["root"]


def _node(nodes: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    if name not in nodes:
        nodes[name] = {"name": name, "type": "", "children": []}
        _node(nodes, name.rpartition(".")[0] or "root")["children"].append(nodes[name])
    return nodes[name]
