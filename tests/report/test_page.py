"""The file of a page: its data comes back from it, nothing in it is markup, it holds nothing that
is fetched, and it is small.
"""

import base64
import hashlib
import json
import re

import msgspec
import pytest
from by_hand_page import OPERATORS, page, with_places

from whence.report.html import page_html
from whence.results.page import Page

EVIL = (
    "</script><script>window.hacked = 1</script><!-- <script> \u2028 & \"x\" 'y' <img src=x "
    "onerror=alert(1)>"
)


def data(html):
    return json.loads(
        re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)[1]
    )


def test_a_page_survives_json():
    made = page()
    assert msgspec.json.decode(msgspec.json.encode(made), type=Page) == made


def test_calls_and_tensors_come_back_from_the_columns():
    made = page(layers=3, steps=2)
    found = data(page_html(made))
    strings, calls, tensors = found["strings"], found["calls"], found["tensors"]
    assert [strings[k] for k in calls["name"]] == [c.name for c in made.calls]
    assert [strings[k] for k in calls["verdict"]] == [c.verdict for c in made.calls]
    assert calls["error"] == [pytest.approx(c.error, rel=1e-4) for c in made.calls]
    assert calls["reads"] == [list(c.reads) for c in made.calls]
    rows = made.comparison.rows
    assert [(c, strings[s]) for c, s in zip(tensors["call"], tensors["reference_slot"])] == [
        (r.pair, r.reference_slot) for r in rows
    ]
    assert tensors["rel_l2"] == [pytest.approx(r.measured.values["rel_l2"], rel=1e-4) for r in rows]
    assert found["details"][0]["worst"][0] == [[1, 6, 63], 0.123456789, 0.323456789]
    assert found["answer"]["findings"][0]["call"] == made.comparison.findings[0].pair


def test_every_string_from_a_run_is_data():
    made = page(guilty=EVIL, sentence=EVIL)
    html = page_html(made)
    assert html.count("</script>") == html.count("<script") == 2
    assert "<!--" not in html
    assert "\u2028" not in html
    found = data(html)
    assert EVIL in found["strings"]
    titled = page_html(
        msgspec.structs.replace(
            made, comparison=msgspec.structs.replace(made.comparison, target="runs/<b>x</b>")
        )
    )
    assert "<b>" not in titled
    assert "&lt;b&gt;" in titled or "b&gt;" in titled


def test_nothing_is_fetched_and_only_its_own_script_and_style_may_run():
    html = page_html(page())
    assert re.findall(r"""(?:src|href)=["']?(?!#)[^"' >]+""", html.split('id="data"')[0]) == []
    assert "innerHTML" not in html
    assert "eval(" not in html
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', html)[1]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    script = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)[0]
    style = re.search(r"<style>(.*?)</style>", html, re.DOTALL)[1]
    for text, kind in ((script, "script"), (style, "style")):
        assert (
            f"{kind}-src "
            f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
            in policy
        )


def test_ten_thousand_pairs_are_less_than_ten_megabytes():
    made = page(layers=63, steps=16)
    assert len(made.calls) >= 10_000
    assert len(made.comparison.rows) == 3 * len(made.calls)
    assert len(page_html(made).encode()) < 10_000_000


def test_what_is_missing_is_said():
    made = msgspec.structs.replace(
        page(), missing=("the runs could not be read again",), details=()
    )
    assert data(page_html(made))["missing"] == ["the runs could not be read again"]


def test_numbers_that_json_has_no_word_for_are_none():
    made = page()
    calls = (
        msgspec.structs.replace(made.calls[0], error=float("inf"), noise=float("nan")),
        *made.calls[1:],
    )
    found = data(page_html(msgspec.structs.replace(made, calls=calls)))
    assert found["calls"]["error"][0] is None
    assert found["calls"]["noise"][0] is None
    assert len(OPERATORS) * 4 + 1 == len(calls) // 2


def test_why_begins_with_the_arguments_that_differ():
    """Those of the finding's sentence, else those of the two programs."""
    made = with_places(page())
    places = tuple(
        msgspec.structs.replace(
            p, arguments="mul.Tensor: other is 1.0 in the reference, 1.5 in the target"
        )
        for p in made.places
    )
    why = data(page_html(msgspec.structs.replace(made, places=places)))["head"]["why"]
    assert why[0] == places[0].arguments
    assert why[1] == "The code computes something else"
    own = with_places(
        page(sentence="introduced here; norm: eps is 1 in the reference, 2 in the target")
    )
    why = data(page_html(msgspec.structs.replace(own, places=places)))["head"]["why"]
    assert why[0] == "norm: eps is 1 in the reference, 2 in the target"
    assert places[0].arguments not in why
