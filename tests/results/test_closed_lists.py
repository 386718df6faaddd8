"""Words of closed lists: written as text, read back as members, and open to words of later
versions.
"""

import json
import pickle

import msgspec
import pytest

from whence.results import (
    GUILTY,
    VERDICTS,
    CauseKind,
    Confidence,
    Evidence,
    Finding,
    Status,
    Verdict,
    VerdictKind,
    severity,
)

FINDING = ("fc1", "Linear", "kernel", "introduced", "certain", 0, 0, "replay")


def test_plain_text_becomes_a_member():
    verdict = Verdict(3, "introduced", evidence="replay", confidence="certain", cause="kernel")
    assert verdict.verdict is VerdictKind.INTRODUCED
    assert verdict.evidence is Evidence.REPLAY
    assert verdict.confidence is Confidence.CERTAIN
    assert verdict.cause is CauseKind.KERNEL
    assert Finding(*FINDING).cause is CauseKind.KERNEL


@pytest.mark.parametrize("empty", ["", Evidence.NONE, "".join(())])
def test_an_empty_word_is_omitted_from_json(empty):
    verdict = Verdict(0, "noise", evidence=empty, confidence=str(Confidence.NONE), cause="")
    assert msgspec.json.encode(verdict) == b'{"pair":0,"verdict":"noise"}'


def test_a_replaced_verdict_is_written_like_one_made_at_once():
    verdict = Verdict(0, "introduced", confidence="likely", cause="input", score=2.0)
    quiet = verdict.replace(verdict="inherited", confidence="", cause="", score=None)
    assert quiet == Verdict(0, VerdictKind.INHERITED)
    assert msgspec.json.encode(quiet) == b'{"pair":0,"verdict":"inherited"}'
    assert verdict.verdict is VerdictKind.INTRODUCED


@pytest.mark.parametrize("kind", [VerdictKind, Evidence, Confidence, CauseKind, Status])
def test_words_equal_print_and_encode_as_their_text(kind):
    for word in kind:
        text = word.value
        assert type(text) is str
        assert word == text and hash(word) == hash(text) and {word: 1}[text] == 1
        assert f"{word}" == text and repr(word) == repr(text) and f"{word:>20}" == f"{text:>20}"
        assert json.dumps({word: [word]}) == json.dumps({text: [text]})
        assert msgspec.json.encode({word: word}) == msgspec.json.encode({text: text})
        assert pickle.loads(pickle.dumps(word)) is word  # noqa: S301


def test_a_struct_shows_its_words_as_text():
    assert repr(Verdict(0, "introduced")) == "<Verdict introduced>"


def test_a_word_of_a_later_version_is_kept():
    line = b'{"pair":0,"verdict":"foreseen","evidence":"oracle","cause":"weather"}'
    verdict = msgspec.json.decode(line, type=Verdict)
    assert (verdict.verdict, verdict.evidence, verdict.cause) == ("foreseen", "oracle", "weather")
    assert msgspec.json.encode(verdict) == line
    assert pickle.loads(pickle.dumps(verdict.verdict)) == "foreseen"  # noqa: S301
    with pytest.raises(ValueError):
        severity(verdict.verdict)


def test_no_word_is_made_of_anything_but_text():
    with pytest.raises(ValueError, match="3 is not a valid VerdictKind"):
        VerdictKind(3)


def test_every_verdict_has_a_severity_of_its_own():
    assert {severity(verdict) for verdict in VERDICTS} == set(range(len(VerdictKind)))
    assert severity("identical") == VerdictKind.IDENTICAL.severity == 0
    passing = (VerdictKind.NOISE, VerdictKind.INHERITED, VerdictKind.PRECISION)
    assert min(kind.severity for kind in GUILTY) > max(kind.severity for kind in passing)
