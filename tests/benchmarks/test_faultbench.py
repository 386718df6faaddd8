"""The scoring of faultbench: what reaches whence, what is counted how, and a few cases of the bench
beside the checkout.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest

import whence
from whence import judge

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "faultbench.py"
BUGS = {
    "public/layernorm_eps/vit/1e-3@mid/f32~/s1": "semantic",
    "public/lstm_gate_order/lstm/iofc@first/f32/bf16~/s1": "parameter",
    "public/k_tf32/vit/7bit@mid/f32~/s1": "kernel",
}
BENIGN = ["public/benign/lstm/none/f32/bf16~/s101", "public/benign/dec_s/none/f32~/s101"]
DECODER = "public/mask_one_head/dec_sharp/1head@mid/f32~/s1"


def _script() -> ModuleType:
    sys.path.insert(0, str(SCRIPT.parent))  # what it shares with other benchmarks
    spec = importlib.util.spec_from_file_location("whence_benchmark_faultbench", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


faultbench = _script()


@pytest.fixture
def bench(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The public cases; torch on one thread, the path of imports as it was afterwards."""
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    monkeypatch.setattr(sys, "path", list(sys.path))
    torch.set_num_threads(1)
    yield faultbench.Bench(shared / "faultbench", "public")
    torch.set_num_threads(threads)


def told(**changes: Any) -> Any:
    """A planted module fault that was found and named first, with its class clear, but for
    `changes`.
    """
    given = {
        "kind": "module",
        "culprits": frozenset({"a"}),
        "effect": "clear",
        "flagged": True,
        "ranked": ("a",),
        "named": frozenset({"a"}),
        "cause": "semantic",
        "capture_s": 1.0,
        "compare_s": 2.0,
    }
    return faultbench.Told(**(given | changes))


def quiet(**changes: Any) -> Any:
    """A benign pair about which nothing was said."""
    nothing = {
        "kind": "benign",
        "culprits": frozenset(),
        "flagged": False,
        "ranked": (),
        "named": frozenset(),
        "cause": None,
    }
    return told(**(nothing | changes))


# ---- scores, by hand


def test_scores_of_hand_made_cases():
    cases = [
        told(),
        told(
            effect="near", ranked=("b", "c", "a"), named=frozenset({"a", "b", "c"}), cause="kernel"
        ),
        told(effect="sub", flagged=False, ranked=(), named=frozenset(), cause=None),
        told(
            effect="clear",
            kind="param",
            ranked=("x", "y", "z", "a"),
            named=frozenset("xyza"),
            cause="parameter",
        ),
        quiet(),
        quiet(flagged=True, ranked=("b",), named=frozenset({"b"}), cause=""),
        quiet(undecided=True),
    ]
    scores = faultbench.score(cases)
    assert scores["false_alarm_rate"] == pytest.approx(1 / 3)
    assert scores["recall"] == 3 / 4
    assert scores["top1"] == {"all": 1 / 4, "clear": 1 / 2, "near": 0.0, "sub": 0.0}
    assert scores["top3"] == {"all": 1 / 2, "clear": 1 / 2, "near": 1.0, "sub": 0.0}
    assert scores["innocents_per_case"] == (2 + 3) / 4
    assert scores["cause_right"] == pytest.approx(2 / 3)
    assert scores["seconds_per_case"] == {"capture": 1.0, "compare": 2.0}
    assert scores["counts"]["benign_undecided"] == 1
    assert set(scores) == {
        "false_alarm_rate",
        "recall",
        "top1",
        "top3",
        "innocents_per_case",
        "cause_right",
        "seconds_per_case",
        "counts",
    }


def test_shares_of_nothing_are_none():
    scores = faultbench.score([quiet()])
    assert scores["recall"] is None
    assert scores["top1"]["clear"] is None
    assert scores["cause_right"] is None
    assert "-" in faultbench.table({"replay": scores})


def answer(*found: tuple[str, str, tuple[str, ...]], status: str = "different") -> dict[str, Any]:
    findings = [
        {"name": n, "also": also, "cause": "kernel", "confidence": c, "sentence": "s"}
        for n, c, also in found
    ]
    return {
        "status": status,
        "headline": "",
        "found": findings,
        "differing": 4,
        "replayed": 3,
        "compare_s": 1.0,
        "error": "Boom",
    }


def row(
    said: dict[str, Any], culprits: tuple[str, ...] = ("a",), kind: str = "kernel"
) -> dict[str, Any]:
    return {
        "id": "s/b/m/x/bg/s1",
        "kind": kind,
        "culprits": culprits,
        "capture_s": 1.0,
        "rules": {"replay": said},
    }


def test_names_count_once_and_also_counts_as_named():
    case = faultbench.told_by_whence(
        row(answer(("b", "certain", ("c",)), ("b", "certain", ()), ("a", "certain", ()))),
        "replay",
        "clear",
    )
    assert case.ranked == ("b", "a")
    assert case.named == {"a", "b", "c"}
    assert not case.first(1)
    assert case.first(3)


def test_a_suspect_is_no_detection_and_no_false_alarm():
    said = answer(("a", "suspect", ()), status="undecided")
    case = faultbench.told_by_whence(row(said), "replay", "clear")
    assert not case.flagged
    assert not case.first(1)
    assert faultbench.score([case])["counts"]["only_suspects"] == 1
    benign = faultbench.told_by_whence(row(said, (), "benign"), "replay", "")
    assert not benign.flagged
    assert faultbench.score([benign, quiet()])["counts"]["benign_hardly_replayed"] == 1


def test_an_error_of_whence_counts_against_it():
    bug = faultbench.told_by_whence(row(answer(status="error")), "replay", "clear")
    benign = faultbench.told_by_whence(row(answer(status="error"), (), "benign"), "replay", "")
    assert not bug.flagged
    assert benign.flagged
    assert "ERROR" in next(faultbench.complaints([row(answer(status="error"))], {}, "replay"))


def test_complaints_name_false_alarms_clear_misses_innocents_and_causes():
    def complaints(said: dict[str, Any], culprits: tuple[str, ...], effect: float) -> str:
        return "\n".join(
            faultbench.complaints(
                [row(said, culprits)], {"s/b/m/x/bg/s1": {"effect": effect}}, "replay"
            )
        )

    assert "FALSE ALARM" in complaints(answer(("a", "likely", ())), (), 0.0)
    assert "MISS effect 7" in complaints(answer(status="same"), ("a",), 7.0)
    assert complaints(answer(status="same"), ("a",), 5.0) == ""
    assert "INNOCENT" in complaints(answer(("a", "likely", ("b",))), ("a",), 7.0)
    assert complaints(answer(("a", "likely", ())), ("a",), 7.0) == ""


def test_classes_are_those_of_the_bench():
    assert [faultbench.class_of(e) for e in (0.0, 1.49, 1.5, 5.99, 6.0, 1e300, None)] == [
        "sub",
        "sub",
        "near",
        "near",
        "clear",
        "clear",
        "",
    ]


def test_results_survive_a_torn_line_and_are_put_together(tmp_path: Path):
    results = faultbench.Results(tmp_path / "results.jsonl")
    results.add({"id": "x", "rules": {"replay": 1}})
    results.add({"id": "x", "rules": {"dumps": 2}})
    with results.file.open("a") as file:
        file.write('{"id": "y", "rul')
    again = faultbench.Results(tmp_path / "results.jsonl")
    assert again.rows == {"x": {"id": "x", "rules": {"replay": 1, "dumps": 2}}}
    assert faultbench.Results(tmp_path / "results.jsonl", fresh=True).rows == {}


@pytest.mark.parametrize(
    "words", [["--part", "2/2"], ["--rule", "replays"], ["--rule", ""], ["--peers", "--no-effects"]]
)
def test_what_cannot_be_meant_fails_at_once(words: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        faultbench.main(["--bench", "x", "--split", "y", *words])
    assert "error" in capsys.readouterr().err


@pytest.mark.parametrize("name", [*faultbench.EVIDENCE, *faultbench.KEEPS_BACK])
def test_a_rule_is_switched_off_inside_only(name: str):
    changes = (faultbench.EVIDENCE | faultbench.KEEPS_BACK)[name]
    before = [getattr(owner, attribute) for owner, attribute, _ in changes]
    with faultbench.without(name):
        assert [getattr(owner, attribute) for owner, attribute, _ in changes] == [
            value for _, _, value in changes
        ]
        assert all(old is not new for old, (_, _, new) in zip(before, changes, strict=True))
    assert [getattr(owner, attribute) for owner, attribute, _ in changes] == before


@pytest.mark.parametrize(
    ("name", "part", "how"),
    [
        ("scale", "slope", lambda r: 1.005 * r),
        ("channel", "channel", lambda r: r + 0.02 * (np.arange(64) == 5)),
        ("value", "value", lambda r: np.where(abs(r) > 1, r + 0.01, r)),
        ("element", "z", lambda r: np.where(np.arange(4096).reshape(64, 64) == 7, r + 1, r)),
        ("size", "rho", lambda r: 1.1 * r),
    ],
)
def test_evidence_that_is_switched_off_is_not_seen(name: str, part: str, how: Callable[[Any], Any]):
    r = np.random.default_rng(0).standard_normal((64, 64))
    working, target = r.astype(np.float16), how(r).astype(np.float16)
    assert judge.local(target, r, working).parts()[part] > 1
    with faultbench.without(name):
        assert judge.local(target, r, working).parts()[part] == 0.0


# ---- cases of the bench


@pytest.mark.torch
@pytest.mark.shared
def test_new_seeds_are_cases_that_are_not_listed(bench: Any):
    other = faultbench.Bench(bench.folder, "public", new_seeds=2)
    assert not set(other.ids) & set(bench.ids)
    listed = "public/rmsnorm_eps/dec_m/1e-3@mid/f32~/s1"
    case_id = listed.replace("/s1", "/s2001")
    assert case_id in other.ids
    case, known = other.build(case_id), bench.build(listed)
    assert case.culprits == known.culprits
    weights, others = (next(c.golden.parameters()) for c in (case, known))
    assert weights.shape == others.shape
    assert not weights.equal(others)


@pytest.mark.torch
@pytest.mark.shared
@pytest.mark.parametrize("case_id", BUGS)
def test_a_clear_bug_of_each_kind_is_named_with_its_cause(bench: Any, case_id: str, tmp_path: Path):
    found = faultbench.run_case(bench, case_id, ["replay", "model"], tmp_path / "0")
    cases = [faultbench.told_by_whence(found, rule, "clear") for rule in ("replay", "model")]
    for case in cases:
        assert case.flagged
        assert case.first(1)
        assert case.named <= case.culprits
    assert cases[0].cause == BUGS[case_id]
    assert cases[1].replayed >= cases[0].replayed > 0.5
    assert not (tmp_path / "0").exists()


@pytest.mark.torch
@pytest.mark.shared
@pytest.mark.parametrize("case_id", BENIGN)
def test_benign_pairs_are_silent(bench: Any, case_id: str, tmp_path: Path):
    found = faultbench.run_case(bench, case_id, faultbench.RULES, tmp_path / "0")
    assert {
        rule: (said["status"], said["found"]) for rule, said in found["rules"].items()
    } == dict.fromkeys(faultbench.RULES, ("same", []))


@pytest.mark.torch
@pytest.mark.shared
@pytest.mark.parametrize(
    "case_id",
    [DECODER, "public/k_tf32/vit/7bit@mid/f32~/s1", "public/benign/dec_s/none/bf16~/s101"],
)
def test_other_module_names_change_nothing_but_the_names(bench: Any, case_id: str, tmp_path: Path):
    truth = faultbench.capture(bench, case_id, tmp_path / "0", tmp_path / "1")
    other = faultbench.capture(bench, case_id, tmp_path / "2", tmp_path / "3", shuffle=3)
    plain, renamed = (
        whence.compare(tmp_path / "0", tmp_path / "1"),
        whence.compare(tmp_path / "2", tmp_path / "3"),
    )
    assert other.culprits == tuple(other.names[name] for name in truth.culprits)
    assert not {part for name in other.names.values() for part in name.split(".")} & {
        "blocks",
        "attn",
        "mask",
        "fc1",
        "norm1",
    }
    assert renamed.status == plain.status == ("different" if truth.culprits else "same")
    assert [f.name for f in renamed.findings] == [other.names[f.name] for f in plain.findings]
    assert [(f.cause, f.confidence, f.numbers) for f in renamed.findings] == [
        (f.cause, f.confidence, f.numbers) for f in plain.findings
    ]
    assert renamed.counts == plain.counts
    # Leaves are judged module by module, by name; the order of verdicts is not a statement.
    scores = [
        sorted((v.pair, v.stretch, v.verdict, v.score or 0.0) for v in result.verdicts)
        for result in (plain, renamed)
    ]
    assert scores[0] == scores[1]


@pytest.mark.torch
@pytest.mark.shared
def test_nothing_of_the_truth_lies_in_the_captures(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "argv", ["faultbench.py", "--only", DECODER])
    faultbench.capture(bench, DECODER, tmp_path / "0", tmp_path / "1")
    assert sys.argv[-1] == DECODER
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert files
    found = [
        file.name
        for file in files
        for word in ("mask_one_head", "1head", DECODER, "f32~")
        if word.encode() in file.read_bytes()
    ]
    assert found == []


def _without_places(run: Any) -> list[Any]:
    """Calls with their records, as a comparison reads them, without where something lies and in
    which words a program is missing.
    """
    told = []
    for call in run.calls:
        records = [run.records[ref.record] for ref in call.refs]
        facts = [
            (r.dtype, r.shape, r.stride, r.hash, r.statistics, r.sketch, r.elements, r.why)
            for r in records
        ]
        slots = [(ref.slot, ref.edge) for ref in call.refs]
        told.append(
            (
                msgspec.structs.replace(call, refs=(), no_program="why" if call.no_program else ""),
                slots,
                facts,
            )
        )
    return told


def _without_words(judged: Any) -> list[Any]:
    """Verdicts or findings, without the reason why there was no replay."""
    return [
        msgspec.structs.replace(item, sentence=item.sentence.partition("; no replay")[0])
        for item in judged
    ]


@pytest.mark.torch
@pytest.mark.shared
@pytest.mark.parametrize("case_id", [DECODER, "public/channel_sign/dec_m/1ch@mid/f32/bf16~/s1"])
def test_withheld_elements_are_a_capture_of_statistics(bench: Any, case_id: str, tmp_path: Path):
    folders = [tmp_path / name for name in "0123"]
    faultbench.capture(bench, case_id, folders[0], folders[1])
    faultbench.capture(bench, case_id, folders[2], folders[3], keep="stats")
    withheld = [faultbench.StatisticsOnly(whence.open_run(str(folder))) for folder in folders[:2]]
    captured = [whence.open_run(str(folder)) for folder in folders[2:]]
    for ours, theirs in zip(withheld, captured):
        assert _without_places(ours) == _without_places(theirs)
        with pytest.raises(whence.errors.ElementsMissing):
            ours.array(0)
    ours, theirs = whence.compare(*withheld), whence.compare(*captured)
    assert _without_words(ours.findings) == _without_words(theirs.findings)
    assert _without_words(ours.verdicts) == _without_words(theirs.verdicts)
    assert (ours.status, ours.evidence) == (theirs.status, theirs.evidence)
    assert (ours.headline, ours.counts, ours.coverage) == (
        theirs.headline,
        theirs.counts,
        theirs.coverage,
    )


@pytest.mark.torch
@pytest.mark.shared
def test_the_command_scores_and_goes_on_where_it_ended(
    bench: Any,
    shared: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    words = [
        "--bench",
        str(shared / "faultbench"),
        "--split",
        "public",
        "--only",
        r"(lstm_gate_order|benign)/lstm/[^/]*/f32~/s1(01)?$",
    ]
    words += [
        "--work",
        str(tmp_path / "work"),
        "--json",
        str(tmp_path / "scores.json"),
        "--peers",
        "--verbose",
    ]
    assert faultbench.main([*words, "--rule", "replay,statistics"]) == 0
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert list(scores)[:3] == ["replay", "statistics", "cos<0.99"]
    assert scores["replay"]["top1"] == {"all": 1.0, "clear": 1.0, "near": None, "sub": None}
    assert scores["replay"]["false_alarm_rate"] == 0.0
    assert scores["replay"]["cause_right"] == 1.0
    assert scores["torch.testing.assert_close default"]["cause_right"] is None
    monkeypatch.setattr(
        faultbench, "capture", lambda *a, **k: pytest.fail("a case that is done was captured again")
    )
    monkeypatch.setattr(
        bench.__class__,
        "judged_by_oracle",
        lambda *a: pytest.fail("an effect that is known was taken again"),
    )
    assert faultbench.main([*words, "--rule", "statistics"]) == 0
    assert list(json.loads((tmp_path / "scores.json").read_text()))[:2] == [
        "statistics",
        "cos<0.99",
    ]
    assert "compared 3 of 3" in capsys.readouterr().err
