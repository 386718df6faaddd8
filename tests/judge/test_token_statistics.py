"""Outputs of a prompt, rates, intervals, the sign test and thresholds, against oracles written
apart from the code.
"""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whence.errors import UsageError
from whence.workflows.tokens import statistics
from whence.workflows.tokens.statistics import Thresholds


def by_hand(a, b):
    """(prefix, full, half) element by element."""
    prefix = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b))))
    m = min(len(a), len(b))
    if m == 0:
        return prefix, None, None
    return prefix, a[:m] == b[:m], a[: max(m // 2, 1)] == b[: max(m // 2, 1)]


@given(
    st.one_of(
        st.tuples(*[st.text("ab é\u0301\ud800\n", max_size=9)] * 2),
        st.tuples(*[st.lists(st.integers(0, 2), max_size=9)] * 2),
    )
)
def test_match_is_what_a_loop_finds(pair):
    a, b = pair
    found = statistics.match(a, b)
    prefix, full, half = by_hand(a, b)
    assert (found.prefix_length, found.full, found.half) == (prefix, full, half)
    assert (found.reference_length, found.target_length) == (len(a), len(b))
    parts = full is False
    assert found.first_character == (prefix if parts and isinstance(a, str) else None)
    assert (found.first_token is not None) == parts
    if parts and isinstance(a, list):
        assert found.first_token == prefix
    assert found.longer == (
        "" if not full or len(a) == len(b) else "reference" if len(a) > len(b) else "target"
    )


@pytest.mark.parametrize(
    ("a", "b", "word"),
    [
        ("one two three", "one two four", 2),
        ("one two", "one twenty", 1),
        ("one two", "onetwo", 0),
        ("one two", "one\ntwo", 1),
        ("one  two", "one two", 1),
        ("  one", "  two", 0),
        ("x", "y", 0),
        ("one two", "one two three", None),
    ],
)
def test_the_token_of_a_text_is_its_word(a, b, word):
    assert statistics.match(a, b).first_token == word


def test_one_character_is_not_halved_to_nothing():
    assert statistics.match("a", "b").half is False


def test_text_against_tokens_is_refused():
    with pytest.raises(UsageError, match="list of tokens"):
        statistics.match("a", [1])


def test_wilson_against_scipy():
    stats = pytest.importorskip("scipy.stats")
    for count, of in [(0, 1), (1, 1), (17, 20), (10, 20), (3, 1000), (1000, 1000), (0, 30)]:
        interval = stats.binomtest(count, of).proportion_ci(0.95, method="wilson")
        assert statistics.wilson(count, of) == pytest.approx(
            (interval.low, interval.high), abs=1e-12
        )
    assert statistics.wilson(0, 0) == (0.0, 1.0)


def test_sign_test_against_scipy():
    stats = pytest.importorskip("scipy.stats")
    pairs = [
        (8, 1),
        (1, 8),
        (0, 0),
        (1, 0),
        (5, 5),
        (5, 6),
        (0, 40),
        (480, 520),
        (0, 1000),
        (500, 501),
        (900, 1100),
        (10000, 10400),
        (3, 4000),
    ]
    for one, other in pairs:
        expected = stats.binomtest(one, one + other, 0.5).pvalue if one + other else 1.0
        assert statistics.sign_test(one, other) == pytest.approx(expected, rel=1e-8), (one, other)


def test_rates_at_the_threshold_reach_it():
    assert Thresholds(0.1, 0.3).reached(3 / 30, 6 / 20)
    assert not Thresholds(0.1, 0.3).reached(3 / 31, 0.3)
    assert not Thresholds(0.0, 0.0).reached(None, None)


YAML = (
    "full: 0.6\nmodels:\n  chat*: {half: 0.3}\n  chat-6b: {full: 0.1, half: 0.2}\n  '*6b': "
    "{half: 0.9}\n"
)


@pytest.mark.parametrize(
    ("model", "given", "expected"),
    [
        ("", {}, (0.6, 0.4)),
        ("other", {}, (0.6, 0.4)),
        ("chat-7b", {}, (0.6, 0.3)),
        ("chat-6b", {}, (0.1, 0.2)),
        ("bert-6b", {}, (0.6, 0.9)),
        ("CHAT-7b", {}, (0.6, 0.4)),
        ("chat-6b", {"full": 1.0}, (1.0, 0.2)),
        ("chat-6b", {"full": 0.5, "half": 0.0}, (0.5, 0.0)),
    ],
)
def test_thresholds_of_a_model(tmp_path, model, given, expected):
    path = tmp_path / "t.yaml"
    path.write_text(YAML)
    found = statistics.thresholds(given.get("full"), given.get("half"), path, model)
    assert (found.full, found.half) == expected


def test_thresholds_in_toml_and_where_they_come_from(tmp_path):
    path = tmp_path / "t.toml"
    path.write_text('half = 0.5\n[models."a b"]\nfull = 0.2\n')
    found = statistics.thresholds(None, None, path, "a b")
    assert (found.full, found.half, found.origin) == (0.2, 0.5, f"{path}, model a b")
    assert statistics.thresholds(None, None, path, "c").origin == f"{path}; no entry for model c"
    assert (
        statistics.thresholds(None, None, path, "").origin == f"{path}; no model is named (--model)"
    )
    assert (
        statistics.thresholds(0.5, None, path, "a b").origin == f"as given; half: {path}, model a b"
    )
    assert statistics.thresholds(None, None, None, "").origin == "default"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("t.yaml", "ful: 0.5", "no key 'ful'; known: full, half, models"),
        ("t.yaml", "models: {a: {fulll: 1}}", "model a: no key 'fulll'"),
        ("t.yaml", "full: 75", "full: 75 is not a share between 0 and 1"),
        ("t.yaml", "full: .nan", "is not a share"),
        ("t.yaml", "full: true", "is not a share"),
        ("t.yaml", "models: [a]", "`models` is a table"),
        ("t.yaml", "models: {a: 0.5}", "model a: a table"),
        ("t.yaml", "", "a table with"),
        ("t.yaml", "{", "not YAML"),
        ("t.toml", "full: 0.5", "not TOML"),
        ("t.json", "{}", "ends in .toml, .yaml or .yml"),
    ],
)
def test_a_wrong_thresholds_file_is_told(tmp_path, name, text, said):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UsageError, match="(?s)" + said.replace(".", r"\.").replace("|", r"\|")):
        statistics.thresholds(None, None, path, "a")
    with pytest.raises(UsageError, match="cannot be read"):
        statistics.thresholds(None, None, tmp_path / "absent.toml", "")
