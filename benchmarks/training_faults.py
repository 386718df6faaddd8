"""Is whence silent about trainings that are done otherwise and compute the same, and does it name
what is wrong in one?

    python benchmarks/training_faults.py [--clean | --faults] [--later] [--only REGEX] [--json FILE]
        [--fresh | --places | --wrapped | --checkpoints] [-v]
    python benchmarks/training_faults.py --device cuda    # and clean pairs of processor and device

Four small models (Llama, Mixtral, ViT, ResNet of transformers, random weights) train two steps of
two micro-batches under `whence.capture`, with AdamW or SGD with momentum, in fp32 or under bf16
autocast. A clean pair must have no finding; where it is `undecided` it says so. A planted fault
must be the first finding, at the module, phase and operation where it was planted: "first"; "named"
is at that place among others, "wider" where the answer is undecided there, "wrong" where findings
are elsewhere alone, "missed" where there is none.

--fresh takes a second set, of models and optimisers that no rule was set with when it was drawn: a
GPT-2 with a tied head, T5, ConvNeXt, a U-Net and an LSTM, with AdamW, Adafactor, Lion, RMSprop and
Nesterov's momentum.

--places takes a third set, of losses that one training computes inside the model and the other
behind it.

--wrapped takes a fourth set, of such losses in models that one training, or both, call through
something around them: DistributedDataParallel on one and two ranks, AveragedModel, LoRA of peft
(where that is installed), modules of a user's own, among them one that computes the loss.

--checkpoints takes the first two sets, with reentrant checkpoints in the target.

--later captures the second step alone, whose parameters the first one made: what parted there is no
fault of the step that is captured.

Needs transformers, and a C++ compiler for the compiled pairs. Exit code 1 where a clean pair has a
finding or something crashes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from _training.clean import Clean, device_pairs, pairs
from _training.faults import Fault, faults
from _training.fresh import fresh_faults, fresh_pairs
from _training.loss_places import place_faults, place_pairs
from _training.recomputed import recomputed_faults, recomputed_pairs
from _training.training import train, training_of
from _training.wrapped import wrapped_faults, wrapped_pairs

import whence
from whence.results import Comparison

SECOND_STEP = "1:"
"""The steps that --later captures."""


def compared(
    case: Clean | Fault, folder: Path, device: str, steps: str | None
) -> tuple[Comparison, list[str]]:
    """The comparison of these steps of both trainings of a case, and warnings of the captures."""
    sides = []
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for twist, name in ((case.reference, "reference"), (case.target, "target")):
            options = dict(case.options)
            training = training_of(
                case.model, case.optimizer, autocast=case.autocast, device=device, **options
            )
            twist(training)
            training.steps = steps
            sides.append(train(training, folder / name))
    said = [str(w.message) for w in heard if "whence" in str(w.message)]
    return whence.compare(*sides), said


def judged(
    case: Clean | Fault, folder: Path, device: str = "cpu", steps: str | None = None
) -> dict[str, Any]:
    """One line of the table."""
    began = time.perf_counter()
    row: dict[str, Any] = {"case": case.title, "kind": type(case).__name__.lower()}
    try:
        result, said = compared(case, folder, device, steps)
    except Exception as error:  # noqa: BLE001 - the other cases are of interest too
        return {**row, "answer": "crashed", "error": f"{error!r}", "trace": traceback.format_exc()}
    row |= {
        "status": str(result.status),
        "headline": result.headline,
        "findings": [_place(finding) for finding in result.findings],
        "sentences": [finding.sentence for finding in result.findings],
        "warnings": said,
        "seconds": round(time.perf_counter() - began, 1),
    }
    return {**row, "answer": _of_clean(result) if isinstance(case, Clean) else case.answer(result)}


def _of_clean(result: Comparison) -> str:
    if result.findings:
        return "flagged"
    return "silent" if result.status == "same" else str(result.status)


def _place(finding: Any) -> str:
    return f"{finding.name} ({finding.phase or 'forward'}, step {finding.step})"


def _line(row: dict[str, Any], *, verbose: bool) -> str:
    words = f"{row['case']:<76} {row['answer']:<10}"
    if row["answer"] == "crashed":
        return f"{words} {row['trace'] if verbose else row['error']}"
    found = row["findings"]
    words += f" {found[0]}" if found else ""
    words += f" and {len(found) - 1} more" if len(found) > 1 else ""
    if row["answer"] not in ("silent", "first") or verbose:
        words += f"\n    {row['status']}: {row['headline'] or ' '.join(row['sentences'][:1])}"
    if verbose:
        words += "".join(f"\n    {at}: {s}" for at, s in zip(found, row["sentences"]))
    return words + "".join(f"\n    warning: {said}" for said in row["warnings"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--clean", action="store_true", help="clean pairs only")
    which.add_argument("--faults", action="store_true", help="planted faults only")
    sets = parser.add_mutually_exclusive_group()
    sets.add_argument("--fresh", action="store_true", help="the second set of trainings")
    sets.add_argument("--places", action="store_true", help="losses in two places")
    sets.add_argument("--wrapped", action="store_true", help="such losses of wrapped models")
    sets.add_argument("--checkpoints", action="store_true", help="the first two in checkpoints")
    parser.add_argument("--only", metavar="REGEX", default="")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("-v", "--verbose", action="store_true", help="every finding in words")
    parser.add_argument("--device", default="cpu", help="where the trainings run")
    parser.add_argument("--later", action="store_true", help="capture the second step alone")
    chosen = parser.parse_args()
    steps = SECOND_STEP if chosen.later else None
    if chosen.places:
        clean, wrong = place_pairs(), place_faults()
    elif chosen.checkpoints:
        clean, wrong = recomputed_pairs(), recomputed_faults()
    elif chosen.wrapped:
        clean, wrong = wrapped_pairs(), wrapped_faults()
    else:
        clean, wrong = (fresh_pairs(), fresh_faults()) if chosen.fresh else (pairs(), faults())
    cases: list[Clean | Fault] = [
        *(() if chosen.faults else clean),
        *(() if chosen.faults or chosen.device == "cpu" else device_pairs()),
        *(() if chosen.clean else wrong),
    ]
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for case in cases:
            if re.search(chosen.only, case.title):
                if chosen.later and isinstance(case, Fault):
                    case = dataclasses.replace(case, step=-1)
                rows.append(judged(case, Path(scratch), chosen.device, steps))
                print(_line(rows[-1], verbose=chosen.verbose), flush=True)
    for kind in ("clean", "fault"):
        counts = Counter(row["answer"] for row in rows if row["kind"] == kind)
        if counts:
            told = ", ".join(f"{answer} {count}" for answer, count in counts.most_common())
            print(f"{kind}: {counts.total()}: {told}")
    if chosen.json:
        Path(chosen.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    answers = [row["answer"] for row in rows]
    sys.exit("flagged" in answers or "crashed" in answers)


if __name__ == "__main__":
    main()
