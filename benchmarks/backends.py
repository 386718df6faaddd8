"""Is whence silent between correct backends, with nearly every call replayed, and does it name what
is wrong in one?

    python benchmarks/backends.py [--model NAME] [--only REGEX] [--json FILE] [--work DIR] [--list]
    python benchmarks/backends.py --programs [--model NAME] [--json FILE]

Models with real weights, installed by pip, and one that is trained on the spot; a model whose
package is missing is skipped and said so. Each pair captures both sides into folders, compares the
folders, and prints a line. A clean pair must be `same` with nine tenths of the calls replayed, a
planted fault must be named first. Exit code 1 when one is not. With `--programs`: which regions
have a program that can be used, and why not the others (docs/dev/programs.md).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from _subjects import NEEDS, SUBJECTS, Side, running

import whence
from whence.comparison.replays.self_check import check
from whence.comparison.replays.side import ReplaySource as Programs
from whence.dtypes import Array
from whence.errors import ElementsMissing, ReplayRefused
from whence.judge import rounded
from whence.records import Call, Region, Run, children, regions
from whence.results import Comparison

ENOUGH = 0.9
_F32, _BF16, _F16 = Side(), Side(dtype="bfloat16"), Side(dtype="float16")


@dataclass(frozen=True)
class Pair:
    """Two ways to run a model. name: what must be named first where the target has a fault; "" for
    a clean pair.

    unseen: the reference itself shows no inside, so that there is nothing to replay: the right
    answer is `undecided`.
    """

    model: str
    words: str
    reference: Side
    target: Side
    name: str = ""
    unseen: bool = False

    @property
    def title(self) -> str:
        """Unique in the matrix."""
        return f"{self.model}: {self.words}"


def clean() -> Iterator[Pair]:
    """Every pair that must be `same`."""
    for model in ("smollm2", "minilm", "crepe", "voice", "copier", "long"):
        yield Pair(model, "eager / inductor, whole model", _F32, replace(_F32, backend="inductor"))
        if SUBJECTS[model].blocks:
            yield Pair(
                model,
                "eager / inductor, each layer",
                _F32,
                replace(_F32, backend="inductor layers"),
            )
            yield Pair(model, "sdpa / eager attention", _F32, replace(_F32, attention="eager"))
            yield Pair(
                model, "sdpa / eager attention, bf16", _BF16, replace(_BF16, attention="eager")
            )
            yield Pair(
                model, "eager / sdpa attention, bf16", replace(_BF16, attention="eager"), _BF16
            )
        engine = "prefill" if model == "smollm2" else model
        if SUBJECTS[engine].exported:
            words = "torch / ONNX Runtime"
            yield Pair(engine, words, _F32, replace(_F32, backend="onnxruntime"))
        yield Pair(model, "1 / 2 threads", _F32, replace(_F32, threads=2))
        yield Pair(model, "oneDNN on / off", _F32, replace(_F32, onednn=False))
        yield Pair(model, "fp32 / bf16", _F32, _BF16)
        yield Pair(model, "fp32 / fp16", _F32, _F16)
        yield Pair(model, "no_grad / inference_mode", _F32, replace(_F32, mode="inference_mode"))
        yield Pair(
            model, "inference_mode / no_grad, bf16", replace(_F32, mode="inference_mode"), _BF16
        )
    yield Pair(
        "silero",
        "TorchScript / ONNX Runtime",
        _F32,
        replace(_F32, backend="onnxruntime"),
        unseen=True,
    )


def faults() -> Iterator[Pair]:
    """Every pair whose target is wrong in a known place."""
    places = {
        "smollm2": {
            "weight": "model.layers.7.mlp.up_proj",
            "scale": "model.layers.5.self_attn",
            "mask": "model.layers.5.self_attn",
            "residual": "model.layers.9",
        },
        "minilm": {
            "weight": "encoder.layer.3.output.dense",
            "eps": "encoder.layer.3.output.LayerNorm",
            "scale": "encoder.layer.2.attention.self",
            "residual": "encoder.layer.3.output",
        },
        "crepe": {"weight": "classifier"},
        "copier": {
            "weight": "blocks.1.up",
            "eps": "blocks.1.norm2",
            "scale": "blocks.0.attention",
            "mask": "blocks.0.attention",
        },
        "long": {
            "weight": "layers.2.mlp.up_proj",
            "scale": "layers.1.self_attn",
            "mask": "layers.1.self_attn",
            "residual": "layers.2",
        },
    }
    roots = {"minilm": "BertModel"}
    for model, found in places.items():
        for fault, place in found.items():
            wrong = Side(fault=f"{model} {fault}")
            if fault == "weight":
                yield Pair(
                    model,
                    "FAULT one weight, inductor",
                    _F32,
                    replace(wrong, backend="inductor"),
                    place,
                )
                continue
            if fault == "eps" and model in roots:
                # Nobody sees inside: at the ends is where it can be seen.
                yield Pair(
                    model,
                    f"FAULT {fault}, dynamo",
                    _F32,
                    replace(wrong, backend="dynamo"),
                    roots[model],
                )
                yield Pair(
                    model,
                    f"FAULT {fault}, inductor",
                    _F32,
                    replace(wrong, backend="inductor"),
                    roots[model],
                )
                layer = ".".join(place.split(".")[:3])
                yield Pair(
                    model,
                    f"FAULT {fault}, inductor each layer",
                    _F32,
                    replace(wrong, backend="inductor layers"),
                    layer,
                )
                yield Pair(
                    model,
                    f"FAULT {fault}, ONNX Runtime",
                    _F32,
                    replace(wrong, backend="onnxruntime"),
                    roots[model],
                )
            yield Pair(model, f"FAULT {fault}", _F32, wrong, place)
            yield Pair(model, f"FAULT {fault}, bf16", _F32, replace(wrong, dtype="bfloat16"), place)


# ---- one pair


class Captures:
    """Captured sides in a folder; references are kept for the next pair, the disk is not filled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._kept: dict[tuple[str, Side], Path] = {}

    def reference(self, model: str, side: Side) -> Path:
        """The side as captured before, or now."""
        for other in [k for k in self._kept if k[0] != model]:
            shutil.rmtree(self._kept.pop(other), ignore_errors=True)
        key = (model, side)
        if key not in self._kept:
            self._kept[key] = self.capture(model, side, self.folder / f"reference{len(self._kept)}")
        return self._kept[key]

    def capture(self, model: str, side: Side, path: Path) -> Path:
        """Capture a side into `path`."""
        # What a capture and a loader tell a user as they go would drown the table.
        with (
            contextlib.redirect_stderr(io.StringIO()),
            running(SUBJECTS[model], side) as (module, drive),
            whence.capture(module, path, force=True),
        ):
            drive()
        return path


def measured(pair: Pair, captures: Captures) -> dict[str, Any]:
    """One row: what whence says of a pair, and whether that is right."""
    start = time.perf_counter()
    reference = captures.reference(pair.model, pair.reference)
    target = captures.capture(pair.model, pair.target, captures.folder / "target")
    captured = time.perf_counter()
    result = whence.compare(str(reference), str(target))
    row = {
        "pair": pair.title,
        **answer(result),
        "capture_s": captured - start,
        "compare_s": time.perf_counter() - captured,
    }
    shutil.rmtree(target, ignore_errors=True)
    return {**row, "right": right(pair, row)}


def answer(result: Comparison) -> dict[str, Any]:
    """What a comparison says, in plain values. score: the largest of any replay; whole: rho and z
    of calls that show no inside.
    """
    coverage = result.coverage
    judged = [
        (v.score, v) for v in result.verdicts if v.evidence == "replay" and v.score is not None
    ]
    largest, worst = max(judged, key=lambda item: item[0], default=(None, None))
    whole = [v.numbers for v in result.verdicts if v.numbers.get("whole")]
    names = {row.pair: row.name for row in result.rows}
    return {
        "status": result.status,
        "calls": coverage.calls,
        "replayed": coverage.replayed / coverage.calls if coverage.calls else 0.0,
        "inside": coverage.inside,
        "findings": [f.name or f.root for f in result.findings],
        "sentences": [f.sentence for f in result.findings],
        "counts": result.counts,
        "score": largest,
        "where": names.get(worst.pair, "") if worst is not None else "",
        "numbers": worst.numbers if worst is not None else {},
        "evidence": result.evidence,
        "headline": result.headline,
        "whole_rho": max((n.get("rho") or 0.0 for n in whole), default=None),
        "whole_z": max((n.get("z") or 0.0 for n in whole), default=None),
        "not_replayed": dict(
            Counter(v.sentence for v in result.verdicts if "no replay" in v.sentence).most_common(5)
        ),
        "inputs_differ": list(result.inputs_differ),
    }


def right(pair: Pair, row: Mapping[str, Any]) -> bool:
    """Is this what a user must be told? `same` with enough replayed; or the fault, first."""
    if pair.name:
        return row["status"] == "different" and row["findings"][:1] == [pair.name]
    if pair.unseen:
        return row["status"] == "undecided" and not row["findings"]
    return row["status"] == "same" and row["replayed"] >= ENOUGH


# ---- which regions have a program


def programs(model: str, mode: str, captures: Captures) -> dict[str, Any]:
    """How many regions of a model have a program that can be used, and why the others have none.

    Usable: the program gives what was recorded from what was recorded, at every call it is recorded
    for; and it runs on the tensors that a bfloat16 run of the same model had there, giving outputs
    of the right shape.
    """
    side = Side(mode=mode)
    with contextlib.redirect_stderr(io.StringIO()):
        reference = whence.open_run(str(captures.reference(model, side)))
        other = captures.capture(model, replace(side, dtype="bfloat16"), captures.folder / "target")
    found = _usable(reference, whence.open_run(str(other)))
    shutil.rmtree(other, ignore_errors=True)
    kinds = {
        "leaves": [w for r, w in found if r.stretch < 0],
        "stretches": [w for r, w in found if r.stretch >= 0],
    }
    row: dict[str, Any] = {"model": model, "mode": mode}
    for kind, whys in kinds.items():
        row |= {kind: len(whys), f"{kind}_usable": sum(not w for w in whys)}
    return {**row, "why_not": dict(Counter(why for _, why in found if why).most_common())}


def _usable(reference: Run, target: Run) -> list[tuple[Region, str]]:
    """(region, why its program cannot be used, "" when it can) of every region that made
    something.
    """
    side, theirs = Programs(reference), Programs(target)
    twins = {call.key(): call for call in target.calls}
    below = children(reference.calls)
    whys: dict[int, dict[str, str]] = {}
    out = []
    for region in regions(reference.calls):
        if not region.outputs:
            continue
        call = reference.calls[region.call]
        if call.id not in whys:
            whys[call.id] = _call_usable(side, theirs, call, twins.get(call.key()))
        slots = _slots_of(reference.calls, below, region)
        why = next(
            (
                why
                for slot in slots
                if (
                    why := whys[call.id].get(
                        slot, whys[call.id].get("", "the program does not make it")
                    )
                )
            ),
            "",
        )
        out.append((region, why))
    return out


def _slots_of(
    calls: Sequence[Call], below: Mapping[int, Sequence[int]], region: Region
) -> list[str]:
    """The slots of its call's program in which a region's outputs lie."""
    call, kids = calls[region.call], below.get(region.call, ())
    if 0 <= region.stretch < len(kids):
        found = [
            (f"{region.stretch}:{r.slot}", r.record)
            for r in calls[kids[region.stretch]].slots("input")
        ]
    else:
        found = [(r.slot, r.record) for r in (*call.slots("output"), *call.slots("mutated"))]
    return [slot for slot, record in found if record in region.outputs]


def _call_usable(side: Programs, theirs: Programs, call: Call, twin: Call | None) -> dict[str, str]:
    """By slot of the call's program, why it cannot be used, "" when it can; under "" why none of it
    can.
    """
    try:
        loaded = side.load(call)
        program = loaded.program
        own = side.records(call, (*program.inputs, *program.params))
        outputs = side.records(call, loaded.determined(own))
        arrays, strides = side.arrays(own)
        made, _ = side.arrays(outputs)
        why = check(loaded, arrays, arrays, made, strides)
        if why:
            return {"": f"self-check: {why}"}
        found = dict(program.lost) | {
            s: "an input was not captured" for s, _ in program.outputs if s not in outputs
        }
        if twin is None:
            return {"": "the other run has no such call"}
        given, steps = theirs.arrays(theirs.records(twin, program.inputs))
        lent = {
            s: a
            for s in program.inputs
            if s not in given and (a := side.lent(own.get(s))) is not None
        }
        held = {s: _like(arrays[s], twin, theirs, s) for s in program.params}
        able = [s for s in loaded.determined({*given, *lent, *held}) if s in outputs]
        again = loaded.run({**given, **lent}, held, working="bfloat16", strides=steps, outputs=able)
    except (ReplayRefused, ElementsMissing) as error:
        return {"": str(error)}
    for slot in outputs:
        if slot not in able:
            found[slot] = "an input is missing in the other run"
        else:
            found[slot] = (
                ""
                if again[slot].shape == made[slot].shape
                else "another shape on other activations"
            )
    return found


def _like(ours: Array, twin: Call, theirs: Programs, slot: str) -> Array:
    record = theirs.record(twin, slot)
    return ours if record is None else rounded(ours, theirs.run.records[record].dtype)


# ---- tables


def _line(row: Mapping[str, Any]) -> str:
    if "error" in row:
        return f"ERROR  {row['pair']:<52} {row['error'].splitlines()[-1]}"
    score = f"{row['score']:.2f}" if row["score"] is not None else "-"
    whole = (
        f"  whole rho {row['whole_rho']:.2f} z {row['whole_z']:.1f}"
        if row["whole_rho"] is not None
        else ""
    )
    found = f"  {', '.join(row['findings'][:3])}" if row["findings"] else ""
    said = (
        f"{row['status']:<10} {row['calls']:>5} calls  replayed {row['replayed']:>6.1%}  "
        f"score {score:>6}"
    )
    seconds = row["capture_s"] + row["compare_s"]
    return (
        f"{'ok' if row['right'] else 'WRONG':<6} {row['pair']:<52} {said}  {seconds:>5.1f} "
        f"s{whole}{found}"
    )


def _missing(models: Iterable[str]) -> dict[str, str]:
    """Models that cannot be made here, with what to install."""
    out = {}
    for model in models:
        with contextlib.redirect_stderr(io.StringIO()):
            try:
                SUBJECTS[model].model(Side())
            except ImportError:
                out[model] = NEEDS.get(model, NEEDS["smollm2"])
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", action="append", choices=list(SUBJECTS), help="only this model (repeatable)"
    )
    parser.add_argument(
        "--only", default="", help="only pairs whose line matches this regular expression"
    )
    parser.add_argument(
        "--programs", action="store_true", help="which regions have a program that can be used"
    )
    parser.add_argument("--list", action="store_true", help="print the pairs and stop")
    parser.add_argument("--json", type=Path, help="write all rows there")
    parser.add_argument(
        "--work", type=Path, help="folder for the captured runs (default: a temporary one)"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    pairs = [
        p
        for p in (*clean(), *faults())
        if (not options.model or p.model in options.model) and re.search(options.only, p.title)
    ]
    pairs.sort(key=lambda p: list(SUBJECTS).index(p.model))
    if options.list:
        print("\n".join(p.title for p in pairs))
        return 0
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        work = options.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        captures = Captures(work)
        if options.programs:
            for model in options.model or ("smollm2", "minilm", "mixtral", "vit"):
                for mode in ("no_grad", "inference_mode"):
                    rows.append(programs(model, mode, captures))
                    print(json.dumps(rows[-1]), flush=True)
        else:
            gone = _missing(dict.fromkeys(p.model for p in pairs))
            for model, what in gone.items():
                print(f"skipped {model}: pip install {what}", file=sys.stderr)
            for pair in (p for p in pairs if p.model not in gone):
                try:
                    rows.append(measured(pair, captures))
                except Exception:  # noqa: BLE001 - a pair that fails is a row of its own, the others still count
                    rows.append(
                        {
                            "pair": pair.title,
                            "right": False,
                            "error": traceback.format_exc()[-2000:],
                        }
                    )
                print(_line(rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if options.programs or all(row["right"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
