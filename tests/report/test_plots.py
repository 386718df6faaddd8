"""Plots as files: which there are, that they are pictures of the numbers, and that names in them
are only names.
"""

import re
from xml.etree import ElementTree

import msgspec
import pytest

from whence import api
from whence.errors import MissingDependency, OutputExists
from whence.report.own_files import is_own
from whence.results import VERDICTS, Comparison, Coverage, Finding, Plan
from whence.results.page import Page, PageCall, PageSide

matplotlib = pytest.importorskip("matplotlib", reason="plots need matplotlib")

from matplotlib.figure import Figure  # noqa: E402

from whence.report import plots  # noqa: E402

EVIL = "a$\\frac{$<b>&\x1b[31m.q_proj"


def page(*, steps=2, ranks=1, layers=3, name="fc", **changes):
    """Calls of every step and rank; the second of step 1 introduces an error."""
    calls = []
    for rank in range(ranks):
        for step in range(steps):
            for layer in range(layers):
                bad = (step, layer) >= (1, 1)
                verdict = (
                    "introduced"
                    if (step, layer) == (1, 1)
                    else "inherited"
                    if bad
                    else "identical"
                    if layer == 0
                    else "noise"
                )
                error = 0.3 if bad else 0.0 if layer == 0 else 1e-7
                calls.append(
                    PageCall(
                        len(calls),
                        f"{name}{layer}",
                        "Linear",
                        verdict,
                        step=step,
                        rank=rank,
                        error=error,
                        noise=2e-7 * (layer + 1),
                    )
                )
    guilty = next((i for i, call in enumerate(calls) if call.verdict == "introduced"), -1)
    findings = (
        (
            Finding(
                calls[guilty].name,
                "Linear",
                "kernel",
                "introduced",
                "certain",
                1,
                0,
                "replay",
                pair=guilty,
            ),
        )
        if guilty >= 0
        else ()
    )
    result = Comparison(
        "different" if findings else "same",
        "replay",
        "ref",
        "tgt",
        findings,
        None,
        {},
        Coverage(1, 1, 1, 1, 1, True),
        0,
        0,
        (),
        {},
        Plan(()),
        (),
        (),
    )
    made = Page(result, PageSide("ref"), PageSide("tgt"), tuple(calls))
    return msgspec.structs.replace(made, **changes)


def test_the_plot_is_a_png_and_an_svg(tmp_path):
    assert plots.write(page(calls=()), tmp_path / "none") == []
    written = plots.write(page(ranks=2), tmp_path / "p")
    assert [p.name for p in written] == ["error-along-the-run.png", "error-along-the-run.svg"]
    for path in written:
        if path.suffix == ".svg":
            assert ElementTree.parse(path).getroot().tag.endswith("svg")
        else:
            assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
            assert path.stat().st_size > 5000


@pytest.mark.slow
def test_the_same_page_gives_the_same_files(tmp_path):
    one, two = plots.write(page(), tmp_path / "a"), plots.write(page(), tmp_path / "b")
    assert [p.read_bytes() for p in one] == [p.read_bytes() for p in two]


def test_the_error_along_the_run_shows_every_call_where_it_is():
    made = page()
    figure = Figure()
    plots.along(made, figure)
    axes, strip = figure.axes
    shown = sorted((round(x), y) for points in axes.collections for x, y in _offsets(points))
    assert shown == sorted((at, call.error) for at, call in enumerate(made.calls) if call.error)
    assert sorted(round(x) for points in strip.collections for x, _ in _offsets(points)) == [0, 3]
    assert [text.get_text() for text in axes.texts if text.get_text().startswith("fc")] == [
        "fc1",
        "fc1 (Linear), step 1, rank 0: kernel: "
        "the kernel computes something else than its code says (certain)",
    ]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == [
        "explained by rounding and what came in",
        "identical (2)",
        "noise (2)",
        "inherited (1)",
        "introduced (1)",
    ]


def _offsets(points):
    return [] if type(points).__name__ != "PathCollection" else points.get_offsets().tolist()


@pytest.mark.slow
def test_names_are_only_names(tmp_path):
    made = page(name=EVIL)
    plots.write(made, tmp_path / "p")  # an unbalanced formula would raise
    svg = (tmp_path / "p" / "error-along-the-run.svg").read_text()
    assert not re.search(r"<b>|<script|\x1b", svg)


def test_every_verdict_has_a_shape_and_a_colour_of_its_own():
    assert set(plots.STYLES) == set(VERDICTS)
    looks = [(s.marker, s.filled, s.size) for s in plots.STYLES.values()]
    assert len(set(looks)) == len(looks), "told apart without colour"


def test_a_folder_is_kept_and_a_missing_package_named(tmp_path, monkeypatch):
    (tmp_path / "mine").write_text("x")
    with pytest.raises(OutputExists, match="--force"):
        api.plots(tmp_path, tmp_path)
    assert all(map(is_own, plots.write(page(), tmp_path)))
    plots.write(page(), tmp_path)
    (tmp_path / "error-along-the-run.svg").write_text("<svg>mine</svg>")
    with pytest.raises(OutputExists, match="was not written by whence"):
        plots.write(page(), tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(MissingDependency, match=r"pip install 'matplotlib>=3\.9'"):
        plots.write(page(), tmp_path / "new")


def test_the_band_is_left_out_where_there_is_nothing_to_explain():
    made = page(layers=2, steps=1)
    figure = Figure()
    plots.along(made, figure)
    band = next(
        patch for patch in figure.axes[0].patches if patch.get_label().startswith("explained")
    )
    drawn = [call for call in made.calls if call.leaf]
    values = band.get_data().values
    assert [v == v for v in values] == [call.noise is not None for call in drawn]
    assert [v for v in values if v == v] == [call.noise for call in drawn if call.noise is not None]
