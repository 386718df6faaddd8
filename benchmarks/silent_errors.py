"""Silent training errors of a public list: are they named, within one step of the first wrong
number, by the commands that are there?

    python benchmarks/silent_errors.py [--clean | --faults] [--only REGEX] [--json FILE] [-v]

The list is that of "Training with Confidence" (OSDI 2025), whose workloads are public at
https://github.com/OrderLab/TrainCheck-Evaluation-Workloads: 18 errors, and two that its authors
found beside them. Each is rebuilt here as a small program with the error and one without. An
error of two runs is asked of `compare` or `diverge`, one of one run of `ranks`, one of a model of
`probe`. It is "named" where the first answer has its place and its words, "placed" where another
has the place or the words are missing, "late" where it is at a step behind the next one, else
"wrong" or "missed". A clean program, compared with itself or asked alone, must have no finding.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _cases import CLEAN, FAULT, Case, main
from _silent import one_process as one
from _silent import over_ranks as ranks
from _training_ranks import layouts
from _training_ranks.launch import captured
from rank_checks import _quiet

import whence
from whence.report.diverge import diverged_text
from whence.results import RankVerdict

_HANGS_S = 20.0
WORKLOADS = "https://github.com/OrderLab/TrainCheck-Evaluation-Workloads"
DEEPSPEED = "https://github.com/deepspeedai/DeepSpeed/issues/"
HF = "https://github.com/huggingface/"
TORCH = "https://github.com/pytorch/pytorch/issues/"


@dataclass(frozen=True)
class Error:
    """One of the list. thread: where it was reported. where, words: patterns of the first answer's
    place and sentence. step: of the first wrong number, -1 outside of steps. hangs: it does not
    end.
    """

    name: str
    thread: str
    clean: Callable[..., Any]
    faulty: Callable[..., Any]
    where: str
    words: str
    step: int = 0
    asks: str = "compare"
    hangs: bool = False
    reference: Callable[..., Any] | None = None


ERRORS = (
    Error(
        "PyTorch-Forum-84911",
        "https://discuss.pytorch.org/t/obtaining-abnormal-changes-in-loss-and-accuracy/84911",
        one.clean,
        one.layers_frozen,
        r"stem|stage|fc\d",
        r"gradient|frozen|not trained|no update|requires_grad",
    ),
    Error(
        "StackOverflow-60335387",
        "https://stackoverflow.com/questions/60335387/pytorch-mnist-example-not-converge",
        one.clean,
        one.gradients_not_zeroed,
        r"grad|param|fc|stem|stage|bn",
        r"zeroed|added to|accumulat|earlier gradient",
        step=1,
    ),
    Error(
        "StackOverflow-67180955",
        "https://stackoverflow.com/questions/67180955",
        one.augmented,
        partial(one.augmented, apart=False),
        "",
        r"input",
        step=1,
    ),
    Error(
        "Accelerate-2665",
        f"{HF}accelerate/issues/3209",
        one.clean,
        one.rates_of_others,
        r"stem|stage|fc|bn",
        r"no step changed|updat",
        asks="diverge",
    ),
    Error(
        "MMPretrain-702",
        "https://github.com/open-mmlab/mmpretrain/issues/702",
        one.stage_frozen,
        partial(one.stage_frozen, frozen=False),
        r"stem|bn0",
        r"gradient|frozen|trained|updat|requires_grad",
    ),
    Error(
        "LightningThunder-725",
        "https://github.com/Lightning-AI/lightning-thunder/issues/725",
        one.under_autocast,
        partial(one.under_autocast, applied=False),
        r"fc1",
        r"bfloat16|float32|autocast|precision",
    ),
    Error(
        "PyTorch-115607",
        f"{TORCH}115607",
        one.paused,
        partial(one.paused, stuck=True),
        "",
        r"updates its parameters after 1 of 4 backward passes.* in step 2",
        step=1,
    ),
    Error(
        "PyTorch-51800",
        f"{TORCH}51800",
        one.spectral,
        partial(one.spectral, trained_first=False),
        r"fc1",
        r"weight_u|weight_v|parameter|buffer",
    ),
    Error(
        "DeepSpeed-6771",
        f"{DEEPSPEED}6771",
        one.resumed,
        partial(one.resumed, whole=False),
        r"stem",
        r"parameter|weight",
    ),
    Error(
        "Transformers-17877",
        f"{HF}transformers/pull/17877",
        one.initialized,
        partial(one.initialized, repeated=True),
        r"blocks|head|qkv|proj",
        r"parameter|weight",
    ),
    Error(
        "Transformers-23723",
        f"{HF}transformers/issues/23723",
        one.generated,
        partial(one.generated, limited=False),
        "",
        r"generates 9 tokens and the reference 3",
        step=3,
    ),
    Error(
        "Transformers-34204",
        f"{HF}transformers/issues/34204",
        one.processed,
        partial(one.processed, as_batch=False),
        "",
        r"no sequence of the target has the tokens of step 0",
    ),
    Error(
        "Transformers-33844",
        f"{HF}transformers/pull/33844",
        partial(one.evaluated, always=False),
        partial(one.evaluated, always=True),
        r"blocks\.0",
        r"dropout|random|scaled_dot_product",
        step=-1,
        asks="probe",
    ),
    Error(
        "DeepSpeed-1801",
        "https://github.com/deepspeedai/DeepSpeed/pull/1801",
        ranks.clipped,
        ranks.clipped_on_one_rank,
        r"",
        r"norm|embed|head",
        asks="ranks",
    ),
    Error(
        "DeepSpeed-5794",
        f"{DEEPSPEED}5794",
        layouts.ep,
        ranks.capacity_of_each_rank,
        r"",
        r"all_reduce|all_to_all|collective",
        asks="ranks",
        hangs=True,
    ),
    Error(
        "PyTorch-104336",
        f"{TORCH}104336",
        layouts.ddp,
        ranks.moved_after_wrapping,
        r"",
        r"grad",
        asks="ranks",
    ),
    Error(
        "X-jxmnop-ddp-out-of-sync",
        "https://x.com/jxmnop/status/1778520637193240892",
        layouts.ddp,
        ranks.wrapped_now_and_then,
        r"",
        r"grad",
        step=1,
        asks="ranks",
    ),
    Error(
        "PyTorch-84803",
        f"{TORCH}84803",
        layouts.dp,
        ranks.sums_lost,
        r"",
        r"layers\.1\.mlp\.up",
        step=1,
        asks="ranks",
    ),
    Error(
        "PyTorch-96600",
        f"{TORCH}96600",
        layouts.dp,
        ranks.copy_lost,
        r"",
        r"layers\.0\.attn\.o",
        asks="ranks",
    ),
    Error(
        "Baichuan2-86",
        "https://github.com/baichuan-inc/Baichuan2/issues/86",
        layouts.pp,
        ranks.received_nothing,
        r"Net:1:input",
        r"between layers\.0 and layers\.1",
        reference=layouts.one,
    ),
)


def _run(error: Error, program: Callable[..., Any], folder: Path) -> Path:
    """The run of one program of an error."""
    if error.asks == "ranks" or error.reference is not None:
        with _quiet() if error.hangs else contextlib.nullcontext():
            return captured(program, folder, 2, _HANGS_S if error.hangs else None)
    return Path(program(folder))


def _answer(error: Error, program: Callable[..., Any], folder: Path) -> dict[str, Any]:
    """What is said of a program: status, headline, findings as (step, place, sentence)."""
    if error.asks == "probe":
        said = whence.probe(program(), {"ids": one.IDS}, properties=("repeat",))
        repeat = said["repeat"]
        found = [(-1, str(repeat), str(repeat))] if said.status == "different" else []
        return {"status": str(said.status), "headline": str(repeat), "found": found}
    target = _run(error, program, folder / "target")
    if error.asks == "ranks":
        report = whence.ranks(target)
        found = [
            (f.step, str(f.cause), "; ".join((f.sentence, *f.evidence))) for f in report.findings
        ]
        headline = "; ".join(f"{check.kind}: {check.verdict}" for check in report.checks)
        return {"status": str(report.verdict), "headline": headline, "found": found}
    if error.reference is not None:
        reference = captured(error.reference, folder / "reference", 1)
    else:
        reference = _run(error, error.clean, folder / "reference")
    if error.asks == "diverge":
        parted = whence.diverge(reference, target)
        part = parted.part
        found = (
            []
            if part is None
            else [(part.step, f"{part.name}:{part.slot}", str(diverged_text(parted)))]
        )
        return {"status": str(parted.status), "headline": "; ".join(parted.why), "found": found}
    result = whence.compare(reference, target)
    found = [
        (f.step, f"{f.name}:{f.slot} {f.phase or 'forward'}", f.sentence) for f in result.findings
    ]
    return {"status": str(result.status), "headline": result.headline or "", "found": found}


def _row(answer: dict[str, Any], verdict: str) -> dict[str, Any]:
    return {
        "answer": verdict,
        "status": answer["status"],
        "headline": answer["headline"],
        "findings": [f"{place} (step {step})" for step, place, _ in answer["found"]],
        "sentences": [sentence for _, _, sentence in answer["found"]],
    }


def clean(error: Error, folder: Path) -> dict[str, Any]:
    """One line of the table."""
    answer = _answer(error, error.clean, folder)
    silent = answer["status"] in ("same", RankVerdict.FINE)
    return _row(answer, "flagged" if answer["found"] else "same" if silent else answer["status"])


def faulty(error: Error, folder: Path) -> dict[str, Any]:
    """One line of the table."""
    answer = _answer(error, error.faulty, folder)
    return _row(answer, _verdict(error, answer))


def _verdict(error: Error, answer: dict[str, Any]) -> str:
    found = answer["found"]
    if not error.where and error.asks == "compare":
        # what differs is what the model was given: the headline says it
        return "named" if re.search(error.words, answer["headline"]) else answer["status"]
    if not found:
        return "missed" if answer["status"] in ("same", "nothing") else answer["status"]
    step, place, sentence = found[0]
    if error.step >= 0 and step > error.step + 1:
        return "late"
    if not re.search(error.where, place):
        return "placed" if any(re.search(error.where, p) for _, p, _ in found) else "wrong"
    return "named" if re.search(error.words, sentence) else "placed"


def cases(folder: Path) -> Iterator[Case]:
    """Clean programs, then those with an error."""
    seen = set()
    for error in ERRORS:
        key = (error.clean, error.asks)
        if key not in seen:
            seen.add(key)
            yield Case(CLEAN, f"{error.name}, without", partial(clean, error))
    for error in ERRORS:
        yield Case(FAULT, f"{error.name}", partial(faulty, error))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    main(__doc__, cases, "same")
