"""msprobe: `step<N>/rank<R>/{dump.json, construct.json, stack.json, dump_tensor_data/*.pt}`, as
MindStudio-Probe 26.2.0 writes them.

A module is `Module.<path>.<Class>.forward.<n>`, another call `<Kind>.<name>.<n>.forward`; n counts
within its step. Tensors are files of torch.save of their own dtype; a run without elements becomes
a dump of statistics. What msprobe has no words for (the root module, exact names) is told under
"whence" in dump.json.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from whence.records import Call, Ref, Run
from whence.records.slots import is_input, split_slot
from whence.writers.support import encodings, job
from whence.writers.support.job import Tell, Writing, Written, file_name, silent
from whence.writers.support.msprobe_arguments import leaves, listed, put, scalar, tensor
from whence.writers.support.sidecar_index import Marks

_API = re.compile(
    r"(?:^|\.)(Functional|Torch|Tensor|Distributed|NPU|VF|Aten|MindSpeed|Triton|Mint\w*|Jit|Primitive)\.([^.]+)$"
)
_LINE = re.compile(r"(.+):(\d+)")


def write(run: Run, destination: Path, *, tell: Tell = silent) -> Written:
    """Write a run into the folder `destination`, which is made: every call, and a file for each
    sight of a tensor. Raises OSError.
    """
    moments = job.by_moment(run.calls)
    work = Writing(run, tell, sum(len(call.refs) for calls in moments.values() for call in calls))
    for (rank, step), calls in moments.items():
        _Dump(work, destination / f"step{step}" / f"rank{rank}", calls).write()
    return work.done()


class _Dump:
    """One step of one rank."""

    def __init__(self, work: Writing, folder: Path, calls: list[Call]) -> None:
        self.work, self.folder, self.calls = work, folder, calls
        self.names = dict(zip((call.id for call in calls), _names(calls), strict=True))

    def write(self) -> None:
        """Tensors first, then what speaks of them."""
        (self.folder / "dump_tensor_data").mkdir(parents=True)
        data, cards, marks = {}, {}, Marks(self.work.run, self.calls)
        for call in self.calls:
            name = self.names[call.id]
            data[name], slots = self._call(call, name)
            cards[name] = {"card": marks.card(call), "slots": slots}
        kinds = {call.kind == "module" for call in self.calls}
        level = "mix" if len(kinds) > 1 else "L0" if True in kinds else "L1"
        has_elements = any((self.folder / "dump_tensor_data").iterdir())
        about = {
            "task": "tensor" if has_elements else "statistics",
            "level": level,
            "framework": "pytorch",
            "dump_data_dir": "dump_tensor_data",
        }
        above = {
            name: self.names.get(self.work.run.calls[number].parent)
            for number, name in self.names.items()
        }
        self._json("stack.json", _stacks(self.calls, self.names))
        self._json("construct.json", above)
        self._json("dump.json", {**about, "data": data, "whence": {"version": 1, "calls": cards}})

    def _json(self, file: str, value: Any) -> None:
        with (self.folder / file).open("w", encoding="utf-8") as out:
            json.dump(value, out, indent=1, default=repr)
        self.work.files.append(self.folder / file)

    def _call(self, call: Call, name: str) -> tuple[dict[str, Any], list[str]]:
        """What dump.json says of a call, and the slots of its tensors in the order in which they
        stand there.
        """
        positional, keywords = (
            ("input", "input") if call.phase == "backward" else ("input_args", "input_kwargs")
        )
        sides: dict[str, dict[str, Any]] = {
            positional: {},
            keywords: {},
            "output": {},
            "parameters": {},
        }
        slot_of: dict[int, str] = {}
        files = Counter[str]()
        for ref in job.refs(call):
            kind, slot = split_slot(ref.slot)
            if kind == "param":
                side, category, path = "parameters", "parameters", [slot]
            elif kind == "input":
                side, category = (
                    (positional, "input") if slot[:1].isdigit() else (keywords, "kwargs")
                )
                path = slot.split(".")
            else:  # what it changed in place stands with what it returned
                side, category, path = (
                    "output",
                    "output",
                    slot.split(".") if kind == "output" else ref.slot.split("."),
                )
            stem = f"{name}.{category}.{file_name('.'.join(path), 60) or '0'}"
            files[stem.lower()] += 1
            leaf = self._leaf(
                call, ref, stem if files[stem.lower()] == 1 else f"{stem}_{files[stem.lower()]}"
            )
            slot_of[id(leaf)] = ref.slot
            put(sides[side], path, leaf)
        for slot, value in call.arguments.items():
            if is_input(slot):
                path = slot.split(".")[1:]
                put(sides[positional if path[0].isdigit() else keywords], path, scalar(value))
        keep = (positional, keywords, "output", *(("parameters",) if sides["parameters"] else ()))
        tree = {side: listed(sides[side], is_list=side in (positional, "output")) for side in keep}
        return tree, [slot_of[leaf] for leaf in leaves(tree) if leaf in slot_of]

    def _leaf(self, call: Call, ref: Ref, stem: str) -> dict[str, Any]:
        """One tensor: its file, and what dump.json says of it."""
        record = self.work.run.records[ref.record]
        array = self.work.array(
            ref.record, f"{self.folder.parent.name}/{self.folder.name}/{job.name(call, ref.slot)}"
        )
        leaf = tensor(record, self.work.figures(ref.record, array), array)
        if array is not None:
            path = self.folder / "dump_tensor_data" / f"{stem}.pt"
            encodings.write_torch(path, array)
            self.work.wrote(array)
            self.work.files.append(path)
            leaf["data_name"] = path.name
        elif leaf["Max"] is not None:
            self.work.described()
        return leaf


def _names(calls: list[Call]) -> Iterator[str]:
    """The names of calls in dump.json: all different, also where small and capital letters are
    one.
    """
    counts, used = Counter[tuple[str, ...]](), set[str]()
    for call in calls:
        phase = "backward" if call.phase == "backward" else "forward"
        words = _words(call)
        while True:
            number = str(counts[*words, phase])
            counts[*words, phase] += 1
            name = ".".join(
                (*words, phase, number) if call.kind == "module" else (*words, number, phase)
            )
            if name.lower() not in used:
                break
        used.add(name.lower())
        yield name


def _words(call: Call) -> tuple[str, ...]:
    """What a name begins with: "Module", path and class, or kind and name of an operator."""
    if call.kind == "module":
        return (
            "Module",
            file_name(call.module_name, 100) or "model",
            file_name(call.op_type, 50).replace(".", "_") or "Module",
        )
    if api := _API.search(call.scope if not call.op else ""):
        return api[1], file_name(api[2], 100) or "call"
    space, _, op = call.op.partition(".")
    kind = file_name(space if op else call.kind, 30).capitalize().replace(".", "_")
    return kind or "Call", file_name(op or call.op or call.scope, 100) or "call"


def _stacks(calls: list[Call], names: Mapping[int, str]) -> dict[str, Any]:
    """Calls by the line that made them, where the run knows it."""
    lines: dict[tuple[str, str], list[str]] = {}
    for call in calls:
        if match := _LINE.fullmatch(call.source):
            lines.setdefault((match[1], match[2]), []).append(names[call.id])
    return {
        str(i): [called, [f"File {file}, line {line}, in \n"]]
        for i, ((file, line), called) in enumerate(lines.items())
    }
