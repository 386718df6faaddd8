"""How often does whence tell noise from a fault, and name the operator? Scores it on a folder of
planted faults and benign pairs.

    python benchmarks/faultbench.py --bench DIR --split NAME [--only REGEX] [--part i/n] [--rule replay,model,dumps,statistics]
                                    [--json OUT] [--work DIR] [--effects FILE | --no-effects] [--peers] [--shuffle SEED]
                                    [--new-seeds N] [--ablation] [--fresh] [--verbose]

DIR holds `run_case.py` (`build`), `<split>/cases.py` (`CASES`), and for effect classes and peers
`fb/` and `analyze.py`. Both sides of every case are captured to disk with the public API, and
`whence.compare` is given the two folders, named by number, and nothing else: neither the case's id,
nor its background, nor a model (the rule `model` is given what makes the reference's). What is
scored and how: docs/dev/faultbench.md. A run may be interrupted: cases already in `--work` are not
repeated.
"""  # noqa: E501

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import importlib
import inspect
import io
import json
import os
import random
import re
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _stages
import msgspec

import whence
from whence import judge
from whence.dtypes import Array
from whence.errors import ElementsMissing
from whence.judge import error_structure, noise_model, replay_error
from whence.judge.limits import LIMITS
from whence.judge.noise_model import Tail
from whence.records import Call, Note, Program, Record, Run, RunInfo, Step
from whence.results import Comparison

CLASSES = ("clear", "near", "sub")
# Local size of the fault in units of the operator's own rounding noise, as the bench's README
# defines it.
CLEAR, NEAR = 6.0, 1.5
CAUSE_OF_KIND = {
    "module": ("semantic", "structural"),
    "param": ("parameter",),
    "kernel": ("kernel",),
}
SURE = ("certain", "likely")
# share of differing leaf calls that must be replayed for the silence about a benign pair to rest on
# replay
ENOUGH = 0.9
_LARGEST = 1e300  # stands for an infinite effect (another shape, NaN): JSON has no infinity
# What a capture with keep="stats" says of its records and leaf calls; only words, nothing is
# decided by them.
_WITHHELD = "statistics only (--keep stats)"
_NO_PROGRAM = "programs were not recorded"
_REPLAYS = ("replay", "model")  # rules whose silence should rest on replay


# ---- the bench


class Bench:
    """A folder of cases, imported by path. Only one can be imported in a process: its packages have
    plain names (`fb`, `public`).
    """

    def __init__(self, folder: Path, split: str, new_seeds: int = 0) -> None:
        self.folder, self.split = folder.resolve(), split
        if str(self.folder) not in sys.path:
            sys.path.insert(0, str(self.folder))
        self._build: Callable[[str], Any] = importlib.import_module("run_case").build
        self._cases: dict[str, Callable[..., Any]] = importlib.import_module(f"{split}.cases").CASES
        self._listed: dict[str, tuple[str, int]] = {}
        for case_id in self._cases if new_seeds else ():
            name, _, seed = case_id.rpartition("/s")
            if seed.isdigit() and "seed" in inspect.signature(self._cases[case_id]).parameters:
                other = int(seed) + 1000 * new_seeds
                self._listed[f"{name}/s{other}"] = case_id, other
        self.ids: list[str] = list(self._listed or self._cases)

    def build(self, case_id: str) -> Any:
        """The case: two ordinary programs, and the truth about them. With new seeds, of other
        weights and inputs than the case that is listed.
        """
        if case_id in self._listed:
            listed, seed = self._listed[case_id]
            return self._cases[listed](seed=seed)
        return self._build(case_id)

    def judged_by_oracle(self, case_id: str) -> dict[str, Any]:
        """{"effect": size of the fault, "peers": published rule of another tool -> names it flags,
        in its order}.
        """
        with _arguments(
            "analyze", os.devnull
        ):  # it reads a folder name from the command line when it is imported
            analyze = importlib.import_module("analyze")
        rules, evaluate = (
            importlib.import_module("fb.rules"),
            importlib.import_module("fb.metrics").evaluate,
        )
        record = evaluate(self.build(case_id))
        effect = analyze.effect(record) if record["culprits"] else 0.0
        peers = {}
        for name, (_, threshold, mode, _) in rules.RULES.items():
            if threshold is not None:
                scores = [0.0 if score != score else score for score in rules.scores(name, record)]
                peers[name] = rules.rank(record, scores, mode, threshold)[1]
        return {"effect": min(float(effect), _LARGEST), "peers": peers}


@contextlib.contextmanager
def _arguments(*words: str) -> Iterator[None]:
    """`sys.argv` is `words` inside: a capture writes it down, and it may hold the name of the
    case.
    """
    before, sys.argv = sys.argv, list(words)
    try:
        yield
    finally:
        sys.argv = before


def shuffle_names(model: Any, seed: int) -> dict[str, str]:
    """Give every submodule another name, the same for equal names and seeds; the model computes as
    before. Returns old -> new.

    Digits stay, so that siblings stay siblings and lists stay lists. The old attributes still lead
    to the modules.
    """
    from torch import nn

    before = {module: name for name, module in model.named_modules()}
    for module in list(before):
        if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            continue
        children = dict(module._modules)
        module._modules.clear()
        for name, child in children.items():
            stem = name.rstrip("0123456789")
            module._modules[(_word(stem, seed) if stem else "") + name[len(stem) :]] = child
            # Set past nn.Module's own setter: the forward finds it, the list of submodules does
            # not.
            module.__dict__[name] = child
    return {before[module]: name for name, module in model.named_modules()}


def _word(stem: str, seed: int) -> str:
    choose = random.Random(f"{seed}/{stem}")
    return "".join(choose.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(10))


# ---- one case


@dataclass(frozen=True, slots=True)
class Truth:
    """What is known of a case and never told to whence. culprits: names of which any counts; empty
    for a benign pair.
    """

    kind: str
    culprits: tuple[str, ...]
    names: dict[str, str]


def capture(
    bench: Bench,
    case_id: str,
    reference: Path,
    target: Path,
    *,
    shuffle: int | None = None,
    keep: str = "full",
) -> Truth:
    """Capture both sides of a case into two folders. shuffle: seed of other module names. Returns
    the truth; the models are dropped.
    """
    import torch

    case = bench.build(case_id)
    names: dict[str, str] = {}
    # What a capture tells a user as it goes (sizes, steps) would drown the progress; what went
    # wrong is a note in the run, too.
    with torch.no_grad(), _arguments("program"), contextlib.redirect_stderr(io.StringIO()):
        if shuffle is not None:
            names |= shuffle_names(case.golden, shuffle)
        with whence.capture(case.golden, reference, force=True, keep=keep):
            case.golden(*case.inputs)
        with case.target_context():
            if shuffle is not None:  # inside: entering the context looks its modules up by name
                names |= shuffle_names(case.target, shuffle)
            with whence.capture(case.target, target, force=True, keep=keep):
                case.target(*case.target_inputs)
    return Truth(case.kind, tuple(names.get(name, name) for name in case.culprits), names)


class WithoutPrograms:
    """A run that withholds its programs: what a capture with `programs=False` would have left,
    without running it again.
    """

    def __init__(self, run: Run) -> None:
        self.path: str = run.path
        self.info: RunInfo = run.info
        self.ended: str = run.ended
        self.notes: Sequence[Note] = run.notes
        self.steps: Sequence[Step] = run.steps
        self.programs: Mapping[str, Program] = {}
        self.calls: Sequence[Call] = tuple(_without_program(c) for c in run.calls)
        self.records: Sequence[Record] = run.records
        self.array = run.array


class StatisticsOnly(WithoutPrograms):
    """A run that withholds its elements: what `keep="stats"` would have left of the same program,
    without running it again.

    Records have the same shapes, hashes and statistics and no elements; no program was recorded, as
    then.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        constants = {record for program in run.programs.values() for record in program.constants}
        self.records = tuple(_withheld(r, r.id in constants) for r in run.records)
        self.array = self._none

    def _none(self, record: int) -> Array:
        raise ElementsMissing(self.records[record].why)


def _withheld(record: Record, constant: bool) -> Record:
    # The constants of programs are no tensors of a call; a capture without programs never sees
    # them.
    seen: dict[str, Any] = {"statistics": None, "sketch": None, "hash": ""} if constant else {}
    return msgspec.structs.replace(record, elements=None, why=record.why or _WITHHELD, **seen)


def _without_program(call: Call) -> Call:
    return msgspec.structs.replace(
        call, program="", no_program=call.no_program if call.notes else _NO_PROGRAM
    )


Make = Callable[[], Any]
"""Makes the reference's model, as its user would."""


def _replay(reference: Path, target: Path, make: Make) -> Comparison:
    return whence.compare(reference, target)


def _model(reference: Path, target: Path, make: Make) -> Comparison:
    runs = [WithoutPrograms(whence.open_run(str(path))) for path in (reference, target)]
    return whence.compare(*runs, model=make)


def _dumps(reference: Path, target: Path, make: Make) -> Comparison:
    return whence.compare(reference, target, replay=False)


def _statistics(reference: Path, target: Path, make: Make) -> Comparison:
    return whence.compare(
        StatisticsOnly(whence.open_run(str(reference))),
        StatisticsOnly(whence.open_run(str(target))),
    )


_NEVER = float("inf")


def _blind_to(**fields: Any) -> Callable[..., Any]:
    """`judge.error_structure.structure` that does not see one pattern."""
    return lambda *a: dataclasses.replace(error_structure.structure(*a), **fields)


# What a rule of the verdict is switched off by: (owner, attribute, value in its place). First
# evidence, then what keeps evidence from counting.
EVIDENCE: dict[str, list[tuple[Any, str, Any]]] = {
    "size": [(LIMITS, "rho", _NEVER), (LIMITS, "rho_16", _NEVER)],
    "element": [(noise_model, "ELEMENT", dict.fromkeys((False, True), Tail(_NEVER, 1.0)))],
    "scale": [(replay_error, "structure", _blind_to(slope=0.0, slope_error=0.0))],
    "row": [(LIMITS, "row", _NEVER)],
    "channel": [(replay_error, "structure", _blind_to(channel=0.0))],
    "value": [(replay_error, "structure", _blind_to(value=0.0))],
    "stands_out": [(LIMITS, "stands_out", _NEVER)],
    "formula": [(LIMITS, "formula", _NEVER), (LIMITS, "formula_written_anew", _NEVER)],
}
KEEPS_BACK: dict[str, list[tuple[Any, str, Any]]] = {
    "effect": [(LIMITS, "effect", 0.0), (LIMITS, "effect_16", 0.0)],
    "precision_rho": [(LIMITS, "precision_rho", 0.0)],
    "row_16": [(LIMITS, "row_16", 0.0)],
    "weaker": [(replay_error, "weaker", lambda a, _: a)],
    "beyond_own": [(replay_error, "beyond_own", lambda structure, *_, **__: structure)],
    "written_out": [(judge, "less_suspect", lambda error, _: error)],
    "several_draws": [(judge, "steadier", lambda error, *_: error)],
}


@contextlib.contextmanager
def without(name: str) -> Iterator[None]:
    """whence without one rule inside: a name in `EVIDENCE` or in `KEEPS_BACK`."""
    changes = (EVIDENCE | KEEPS_BACK)[name]
    before = [(owner, attribute, getattr(owner, attribute)) for owner, attribute, _ in changes]
    try:
        for owner, attribute, value in changes:
            object.__setattr__(owner, attribute, value)  # the limits are one frozen object
        yield
    finally:
        for owner, attribute, value in before:
            object.__setattr__(owner, attribute, value)


def _replay_without(name: str) -> Callable[[Path, Path, Make], Comparison]:
    def compare(reference: Path, target: Path, make: Make) -> Comparison:
        with without(name):
            return _replay(reference, target, make)

    return compare


ABLATION = {f"without {name}": _replay_without(name) for name in (*EVIDENCE, *KEEPS_BACK)}
RULES: dict[str, Callable[[Path, Path, Make], Comparison]] = {
    "replay": _replay,
    "model": _model,
    "dumps": _dumps,
    "statistics": _statistics,
}


def run_case(
    bench: Bench, case_id: str, rules: Iterable[str], folder: Path, shuffle: int | None = None
) -> dict[str, Any]:
    """Capture one case into `folder`, compare by each rule, remove the folder. An exception of
    whence becomes the rule's answer.
    """
    row: dict[str, Any] = {"id": case_id, "rules": {}}
    reference, target = folder / "0", folder / "1"

    def make() -> Any:
        golden = bench.build(case_id).golden
        if shuffle is not None:
            shuffle_names(golden, shuffle)
        return golden

    folder.mkdir(parents=True, exist_ok=True)
    try:
        start = time.process_time()
        truth = capture(bench, case_id, reference, target, shuffle=shuffle)
        row |= {
            "kind": truth.kind,
            "culprits": truth.culprits,
            "capture_s": time.process_time() - start,
        }
        for rule in rules:
            start = time.process_time()
            try:
                with _stages.watched() as stages:
                    answer = _answer((RULES | ABLATION)[rule](reference, target, make))
                answer["stages"] = sorted(stages)
            except Exception:  # noqa: BLE001 - whatever whence raises on a case is its answer to that case
                answer = {"status": "error", "found": [], "error": traceback.format_exc()[-2000:]}
            row["rules"][rule] = {**answer, "compare_s": time.process_time() - start}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return row


def _answer(result: Comparison) -> dict[str, Any]:
    found = [
        {
            "name": f.name,
            "also": f.also,
            "cause": f.cause,
            "confidence": f.confidence,
            "sentence": f.sentence,
        }
        for f in result.findings
    ]
    differing = [v for v in result.verdicts if v.stretch < 0 and v.verdict != "identical"]
    replayed = sum(v.evidence == "replay" for v in differing)
    return {
        "status": result.status,
        "headline": result.headline,
        "found": found,
        "differing": len(differing),
        "replayed": replayed,
    }


# ---- what is remembered between runs


class Results:
    """Rows of earlier runs, one line of JSON a case, appended whole; of two lines for one case the
    rules are put together.
    """

    def __init__(self, file: Path, *, fresh: bool = False) -> None:
        self.file = file
        self.rows: dict[str, dict[str, Any]] = {}
        file.parent.mkdir(parents=True, exist_ok=True)
        if fresh:
            file.unlink(missing_ok=True)
        if file.exists():
            for line in file.read_text(encoding="utf-8").splitlines():
                with contextlib.suppress(
                    json.JSONDecodeError
                ):  # the torn last line of a killed run: that case is done again
                    self._take(json.loads(line))

    def _take(self, row: dict[str, Any]) -> None:
        old = self.rows.get(row["id"], {})
        merged = {**old, **row}
        if "rules" in old and "rules" in row:
            merged["rules"] = {**old["rules"], **row["rules"]}
        self.rows[row["id"]] = merged

    def add(self, row: dict[str, Any]) -> None:
        """Remember a row, on disk first. One write, so that several processes may share the
        file.
        """
        line = (json.dumps(row) + "\n").encode()
        handle = os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(handle, line)
        finally:
            os.close(handle)
        self._take(json.loads(line))


def state_of_whence() -> str:
    """A short name for the source that is running, to tell results of another state."""
    package = Path(whence.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


# ---- scores


@dataclass(frozen=True, slots=True)
class Told:
    """What one rule said of one case, against the truth. ranked: names of the findings in order,
    each once. named: with `also`.

    replayed: share of the leaf calls that are not bitwise equal whose verdict rests on a replay;
    None when there is none.
    """

    kind: str
    culprits: frozenset[str]
    effect: str
    flagged: bool
    ranked: tuple[str, ...]
    named: frozenset[str]
    cause: str | None = None
    capture_s: float | None = None
    compare_s: float | None = None
    error: bool = False
    undecided: bool = False
    replayed: float | None = None

    @property
    def bug(self) -> bool:
        """Was a fault planted?"""
        return bool(self.culprits)

    def first(self, n: int) -> bool:
        """Is a culprit among the first n names? Only of a case that was flagged."""
        return self.flagged and not self.culprits.isdisjoint(self.ranked[:n])


def told_by_whence(row: Mapping[str, Any], rule: str, effect: str) -> Told:
    """One row, one of whence's rules. Flagged: a finding that is likely or certain. An error never
    counts for whence.
    """
    answer, culprits = row["rules"][rule], frozenset(row["culprits"])
    found, error = answer["found"], answer["status"] == "error"
    ranked = tuple(dict.fromkeys(f["name"] for f in found))
    return Told(
        row["kind"],
        culprits,
        effect,
        any(f["confidence"] in SURE for f in found) or (error and not culprits),
        ranked,
        frozenset(ranked).union(*(f["also"] for f in found)),
        found[0]["cause"] if found else None,
        row["capture_s"],
        answer["compare_s"],
        error,
        answer["status"] == "undecided",
        answer["replayed"] / answer["differing"]
        if rule in _REPLAYS and answer.get("differing")
        else None,
    )


def told_by_peer(row: Mapping[str, Any], names: Sequence[str], effect: str) -> Told:
    """One row, a published rule of another tool."""
    return Told(
        row["kind"], frozenset(row["culprits"]), effect, bool(names), tuple(names), frozenset(names)
    )


def score(cases: Sequence[Told]) -> dict[str, Any]:
    """The figures of one rule over its cases. Shares are 0..1, None where there is no case to take
    a share of; seconds are CPU medians.
    """
    bugs, benign = [c for c in cases if c.bug], [c for c in cases if not c.bug]
    by_class = {"all": bugs, **{name: [c for c in bugs if c.effect == name] for name in CLASSES}}
    causes = [
        (c.kind, c.cause)
        for c in bugs
        if c.flagged and c.kind in CAUSE_OF_KIND and c.cause is not None
    ]
    return {
        "false_alarm_rate": _share(benign, lambda c: c.flagged),
        "recall": _share(bugs, lambda c: c.flagged),
        "top1": {name: _share(group, lambda c: c.first(1)) for name, group in by_class.items()},
        "top3": {name: _share(group, lambda c: c.first(3)) for name, group in by_class.items()},
        "innocents_per_case": sum(len(c.named - c.culprits) for c in bugs) / len(bugs)
        if bugs
        else None,
        "cause_right": _share(causes, lambda c: c[1] in CAUSE_OF_KIND[c[0]]),
        "seconds_per_case": {
            "capture": _median(c.capture_s for c in cases),
            "compare": _median(c.compare_s for c in cases),
        },
        "counts": {
            "benign": len(benign),
            "bugs": len(bugs),
            **{name: len(by_class[name]) for name in CLASSES},
            "false_alarms": sum(c.flagged for c in benign),
            "benign_undecided": sum(c.undecided for c in benign),
            "benign_hardly_replayed": sum(
                c.replayed is not None and c.replayed < ENOUGH for c in benign
            ),
            "detected": sum(c.flagged for c in bugs),
            **{f"detected_{name}": sum(c.flagged for c in by_class[name]) for name in CLASSES},
            "named_first": sum(c.first(1) for c in bugs),
            "only_suspects": sum(bool(c.ranked) and not c.flagged for c in bugs),
            "innocents": sum(len(c.named - c.culprits) for c in bugs),
            "errors": sum(c.error for c in cases),
        },
    }


def _share(cases: Sequence[Any], is_so: Callable[[Any], bool]) -> float | None:
    return sum(map(is_so, cases)) / len(cases) if cases else None


def _median(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.median(known) if known else None


def class_of(effect: float | None) -> str:
    """The class of an effect, "" when it was not taken."""
    if effect is None:
        return ""
    return "clear" if effect >= CLEAR else "near" if effect >= NEAR else "sub"


# ---- what is shown


def table(scores: Mapping[str, Mapping[str, Any]]) -> str:
    """One line a rule; shares in percent."""
    width = max(map(len, scores), default=4)
    head = (
        f"{'rule':{width}}  false   found | named first: all clear  near   sub |  top3 | "
        "innocents  cause | capture   compare"
    )
    lines = [head]
    for rule, s in scores.items():
        first, seconds = s["top1"], s["seconds_per_case"]
        lines.append(
            f"{rule:{width}} {_percent(s['false_alarm_rate'])}  {_percent(s['recall'])} |        "
            "    "
            f"{' '.join(_percent(first[name]) for name in ('all', *CLASSES))} "
            f"|{_percent(s['top3']['all'])} |"
            f" {_number(s['innocents_per_case'], '.3f')}    {_percent(s['cause_right'])} |"
            f" {_number(seconds['capture'], '.2f')} s {_number(seconds['compare'], '.2f')} s"
        )
    counts = next(iter(scores.values()))["counts"] if scores else {}
    if counts:
        classes = ", ".join(f"{counts[name]} {name}" for name in CLASSES)
        lines.append(
            f"{counts['benign']} benign pairs, {counts['bugs']} planted faults ({classes})"
        )
    return "\n".join(lines)


def _percent(share: float | None) -> str:
    return "    -" if share is None else f"{100 * share:5.1f}"


def _number(value: float | None, how: str) -> str:
    return f"{'-' if value is None else format(value, how):>6}"


def complaints(
    rows: Iterable[Mapping[str, Any]], effects: Mapping[str, Mapping[str, Any]], rule: str
) -> Iterator[str]:
    """Every false alarm, every error, every clear fault that is not named first, every innocent
    (also of suspects) and wrong cause.
    """
    for row in rows:
        effect = effects.get(row["id"], {}).get("effect")
        told, answer = told_by_whence(row, rule, class_of(effect)), row["rules"][rule]
        said = "; ".join(
            f"{f['name']} ({f['cause'] or 'no cause'}, {f['confidence']}): {f['sentence']}"
            for f in answer["found"][:2]
        )
        said = (
            said or answer["headline"] or answer["status"]
            if not told.error
            else answer["error"].strip().splitlines()[-1]
        )
        size = "" if effect is None else f" effect {effect:.3g}"
        if told.error:
            yield f"{rule}: ERROR {row['id']}: {said}"
        elif not told.bug and told.flagged:
            yield f"{rule}: FALSE ALARM {row['id']}: {said}"
        elif not told.bug and told.undecided:
            yield f"{rule}: benign undecided {row['id']}: {said}"
        elif told.bug and told.effect == "clear" and not told.first(1):
            yield (
                f"{rule}: MISS{size} {row['id']} ({told.kind} "
                f"{', '.join(sorted(told.culprits))}): {said}"
            )
        if told.bug and told.named - told.culprits:
            yield (
                f"{rule}: INNOCENT {row['id']} ({', '.join(sorted(told.culprits))}): "
                f"{', '.join(sorted(told.named - told.culprits))}"
            )
        # Without a replay no cause can be known but a parameter; silence about it is not worth a
        # line.
        if (
            told.flagged
            and told.bug
            and told.cause not in CAUSE_OF_KIND.get(told.kind, (told.cause,))
            and (told.cause or rule == "replay")
        ):
            yield f"{rule}: CAUSE {row['id']}: {told.kind}, said {told.cause or 'nothing'}"


# ---- the command


def main(argv: Sequence[str] | None = None) -> int:
    """Score, print, write. Returns 1 when whence failed with an exception on some case."""
    options = _options(argv)
    import torch

    torch.set_num_threads(1)
    if options.ablation:
        options.rule += ["replay", *ABLATION]
        options.rule = [r for r in dict.fromkeys(options.rule) if r == "replay" or r in ABLATION]
    bench = Bench(options.bench, options.split, options.new_seeds)
    chosen = _chosen(bench.ids, options.only, options.part)
    if not chosen:
        sys.exit(
            f"no case of {options.split} matches --only {options.only!r} in part {options.part}; "
            f"{len(bench.ids)} cases are there"
        )
    work = options.work or _default_work(bench)
    shuffled = "" if options.shuffle is None else f"-shuffled{options.shuffle}"
    results = Results(work / f"results{shuffled}.jsonl", fresh=options.fresh)
    _capture_and_compare(bench, chosen, results, options.rule, work, options.shuffle)
    oracle = Results(options.effects or work / "effects.jsonl")
    if options.no_effects:
        oracle.rows.clear()
    else:
        _ask_oracle(bench, chosen, results, oracle, every=options.peers)
    rows = [results.rows[case_id] for case_id in chosen]
    scores = _scores(rows, options.rule, oracle.rows, peers=options.peers)
    print(table(scores))
    if options.verbose:
        for rule in options.rule:
            print(*complaints(rows, oracle.rows, rule), sep="\n")
    if options.json:
        options.json.write_text(json.dumps(scores, indent=1) + "\n", encoding="utf-8")
    return int(
        any(row["rules"][rule]["status"] == "error" for row in rows for rule in options.rule)
    )


def _scores(
    rows: Sequence[Mapping[str, Any]],
    rules: Iterable[str],
    oracle: Mapping[str, Mapping[str, Any]],
    *,
    peers: bool,
) -> dict[str, dict[str, Any]]:
    effect = {row["id"]: class_of(oracle.get(row["id"], {}).get("effect")) for row in rows}
    scores = {
        rule: score([told_by_whence(row, rule, effect[row["id"]]) for row in rows])
        for rule in rules
    }
    if peers:
        names = dict.fromkeys(
            name for row in rows for name in oracle.get(row["id"], {}).get("peers", ())
        )
        for name in names:
            scores[name] = score(
                [
                    told_by_peer(row, oracle[row["id"]]["peers"][name], effect[row["id"]])
                    for row in rows
                ]
            )
    return scores


def _capture_and_compare(
    bench: Bench,
    chosen: Sequence[str],
    results: Results,
    rules: Sequence[str],
    work: Path,
    shuffle: int | None,
) -> None:
    state = state_of_whence()
    if any(
        row.get("state") != state for case_id, row in results.rows.items() if case_id in set(chosen)
    ):
        print(
            f"some results in {results.file} are of another state of whence; --fresh takes them "
            "anew",
            file=sys.stderr,
        )
    place = {case_id: number for number, case_id in enumerate(bench.ids)}
    left = [c for c in chosen if not set(rules) <= set(results.rows.get(c, {}).get("rules", ()))]
    for case_id in _progress(left, "compared"):
        missing = [
            rule for rule in rules if rule not in results.rows.get(case_id, {}).get("rules", ())
        ]
        row = run_case(bench, case_id, missing, work / "runs" / str(place[case_id]), shuffle)
        results.add({**row, "state": state})


def _ask_oracle(
    bench: Bench, chosen: Sequence[str], results: Results, oracle: Results, *, every: bool
) -> None:
    """Effects of the planted faults; with `every` also of benign pairs, which only the peers
    need.
    """
    left = [c for c in chosen if c not in oracle.rows and (every or results.rows[c]["culprits"])]
    for case_id in _progress(left, "effects"):
        oracle.add({"id": case_id, **bench.judged_by_oracle(case_id)})


def _progress(ids: Sequence[str], what: str) -> Iterator[str]:
    start = time.monotonic()
    for number, case_id in enumerate(ids):
        yield case_id
        if (number + 1) % 20 == 0 or number + 1 == len(ids):
            print(
                f"{what} {number + 1} of {len(ids)}, {time.monotonic() - start:.0f} s, {case_id}",
                file=sys.stderr,
                flush=True,
            )


def _chosen(ids: Sequence[str], only: str, part: tuple[int, int]) -> list[str]:
    return [case_id for case_id in ids if re.search(only, case_id)][part[0] :: part[1]]


def _default_work(bench: Bench) -> Path:
    name = hashlib.sha256(str(bench.folder).encode()).hexdigest()[:8]
    return Path(tempfile.gettempdir()) / f"whence-faultbench-{bench.split}-{name}"


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bench", type=Path, required=True, help="the bench's folder")
    parser.add_argument(
        "--split", required=True, help="which of its cases: a folder in it with cases.py"
    )
    parser.add_argument("--only", default="", help="regular expression on case ids")
    parser.add_argument(
        "--part", type=_part, default=(0, 1), help="i/n: the i-th of n interleaved parts, i from 0"
    )
    parser.add_argument(
        "--rule", type=_rules, default=list(RULES), help=f"of {','.join(RULES)} (default: all)"
    )
    parser.add_argument("--json", type=Path, help="write the scores here, by rule")
    parser.add_argument(
        "--work",
        type=Path,
        help="for results and passing captures (default: in the temporary folder)",
    )
    parser.add_argument(
        "--effects",
        type=Path,
        help="file with the effects of earlier runs, added to (default: effects.jsonl in --work)",
    )
    parser.add_argument(
        "--no-effects", action="store_true", help="do not ask the bench's oracle; no effect classes"
    )
    parser.add_argument(
        "--peers",
        action="store_true",
        help="also score the published rules of other tools (needs the effects)",
    )
    parser.add_argument(
        "--shuffle",
        type=int,
        metavar="SEED",
        help="give the modules of both sides other names, the same on both",
    )
    parser.add_argument(
        "--new-seeds",
        type=int,
        default=0,
        metavar="N",
        help="the cases with other weights and inputs: the N-th set of seeds that is not listed",
    )
    parser.add_argument(
        "--ablation",
        action="store_true",
        help="the rule replay, whole and without each of its kinds of evidence and of what keeps "
        "evidence back",
    )
    parser.add_argument(
        "--fresh", action="store_true", help="forget the results of earlier runs (effects stay)"
    )
    parser.add_argument(
        "--verbose",
        action="store_true",
        help="list false alarms, clear misses, innocents and wrong causes",
    )
    options = parser.parse_args(argv)
    if options.peers and options.no_effects:
        parser.error("--peers are scored from the oracle's figures; leave --no-effects out")
    return options


def _part(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or int(found[1]) >= int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not i/n with 0 <= i < n, like 0/2")
    return int(found[1]), int(found[2])


def _rules(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in RULES]
    if unknown or not names:
        raise argparse.ArgumentTypeError(
            f"{', '.join(unknown) or 'nothing'}: known are {', '.join(RULES)}"
        )
    return list(dict.fromkeys(names))


if __name__ == "__main__":
    sys.exit(main())
