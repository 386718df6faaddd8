"""Plots as files: which there are, that they are pictures of the numbers, and that names in them
are only names.
"""

import math
import re
from xml.etree import ElementTree

import msgspec
import pytest

from whence import api
from whence.errors import MissingDependency, OutputExists
from whence.report.own_files import is_own
from whence.results import VERDICTS, Comparison, Coverage, Finding, Plan
from whence.results.page import Page, PageCall, PageDetail, PageHeatmap, PageSide

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
    cells = tuple(0.0 if i < 6 else None if i == 7 else 0.01 * i for i in range(24))
    detail = PageDetail(
        guilty,
        "output.0",
        "output.0",
        "float32",
        "float32",
        (4, 6),
        (4, 6),
        figures={"rel_l2": 0.3},
        elements=24,
        zeros=3,
        edges=(1e-3, 1e-2, 1e-1),
        counts=(5, 16),
        magnitude=((0.5, 1e-2), (2.0, 5e-2), (0.0, 0.0)),
        noise=1e-7,
        quantiles=((0.0, 0.0), (1e-8, 1e-3), (1e-7, 5e-2)),
        heatmap=PageHeatmap((4, 6), cells, 4, 6, (("row", 3, 4),), "row 3"),
    )
    made = Page(
        result, PageSide("ref"), PageSide("tgt"), tuple(calls), (detail,) if guilty >= 0 else ()
    )
    return msgspec.structs.replace(made, **changes)


def figure_of(made, name):
    draw = next(draw for found, _, draw in plots.plots(made) if found == name)
    figure = Figure()
    draw(figure)
    return figure


ALL = [
    "error-along-the-run",
    "histogram",
    "error-against-magnitude",
    "quantiles",
    "heatmap",
    "step-by-layer",
]


def test_every_plot_is_a_png_and_an_svg(tmp_path):
    written = plots.write(page(ranks=2), tmp_path / "p")
    assert [path.name for path in written] == [
        f"{name}.{form}" for name in [*ALL, "rank-by-layer"] for form in ("png", "svg")
    ]
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


def test_what_there_is_no_number_for_is_not_drawn():
    bare = PageDetail(4, "output.0", "output.0", "int64", "int64", (4,), (4,))
    assert [name for name, *_ in plots.plots(page(details=(bare,)))] == [
        "error-along-the-run",
        "step-by-layer",
    ]
    assert [name for name, *_ in plots.plots(page(steps=1))] == ["error-along-the-run"]
    assert list(plots.plots(page(calls=(), details=()))) == []


def test_the_error_along_the_run_shows_every_call_where_it_is():
    made = page()
    figure = figure_of(made, "error-along-the-run")
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


def test_one_tensor_is_drawn_by_its_numbers():
    made = page()
    (bars,) = figure_of(made, "histogram").axes
    assert [(patch.get_x(), patch.get_height()) for patch in bars.patches] == [
        (1e-3, 5),
        (1e-2, 16),
    ]
    assert bars.get_xlabel() == "|target - reference|   (3 of 24 equal)"
    (scatter,) = figure_of(made, "error-against-magnitude").axes
    assert scatter.collections[0].get_offsets().tolist() == [[0.5, 1e-2], [2.0, 5e-2]]
    rounding = next(line for line in scatter.lines if line.get_label() == "rounding of float32")
    assert rounding.get_ydata()[1] == 2.0 * 2.0**-24
    (quantile,) = figure_of(made, "quantiles").axes
    assert quantile.lines[1].get_xydata().tolist() == [[1e-8, 1e-3], [1e-7, 5e-2]]
    picture = figure_of(made, "heatmap").axes[0]
    values = picture.images[1].get_array()
    assert values.shape == (4, 6)
    assert (float(values[3, 5]), bool(values.mask[1, 1]), bool(values.mask[0, 0])) == (
        0.23,
        True,
        True,
    )
    assert picture.images[0].get_array()[0, 0] == 1.0, (
        "equal elements are white, unknown ones are not"
    )
    assert math.isnan(picture.images[0].get_array().filled(math.nan)[1, 1])


@pytest.mark.slow
def test_names_are_only_names(tmp_path):
    made = page(name=EVIL)
    plots.write(made, tmp_path / "p")  # an unbalanced formula would raise
    texts = [text.get_text() for text in figure_of(made, "step-by-layer").axes[0].get_yticklabels()]
    assert texts[0] == "a\\$\\frac{\\$<b>&\\x1b[31m.q_proj0"
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


def test_a_module_that_holds_others_is_in_the_maps_where_it_is_at_fault():
    made = page(layers=2, steps=2)
    for verdict, shown in (("inherited", False), ("introduced", True)):
        root = msgspec.structs.replace(made.calls[0], leaf=False, name="outer", verdict=verdict)
        figure = figure_of(
            msgspec.structs.replace(made, calls=(root, *made.calls[1:])), "step-by-layer"
        )
        labels = [tick.get_text() for tick in figure.axes[0].get_yticklabels()]
        assert ("outer" in labels) is shown


def test_the_band_is_left_out_where_there_is_nothing_to_explain():
    from matplotlib.figure import Figure

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
