"""What a notebook shows, data frames, and names that are completed."""

import sys
from html.parser import HTMLParser

import numpy as np
import pytest

from handmade import bfloat16, net
from whence import api, store
from whence.errors import ElementsMissing, MissingDependency, UsageError
from whence.results import Finding

EVIL = ("<script>alert(1)</script>|`x`", "\x1b[31m<img src=x onerror=y>@you")


def bad(**more):
    return api.compare(net(**more), net(change=lambda n, v: v * 1.5 if n == "h" else v, **more))


class Text(HTMLParser):
    def __init__(self, html):
        super().__init__()
        self.tags, self.said = set(), []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        assert {name for name, _ in attrs} <= {"style"}

    def handle_data(self, data):
        self.said.append(data)


@pytest.mark.parametrize(
    "item",
    [lambda r: r, lambda r: r.findings[0], lambda r: net(names=EVIL)],
    ids=["comparison", "finding", "run"],
)
def test_names_are_text_in_html_and_in_markdown(item):
    shown = item(bad(names=EVIL))
    page = Text(shown._repr_html_())
    assert page.tags <= {
        "div",
        "span",
        "b",
        "code",
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "details",
        "summary",
        "pre",
    }
    assert EVIL[0] in "".join(page.said)
    assert "\x1b" not in shown._repr_html_() + shown._repr_markdown_() + repr(shown)
    assert (
        EVIL[0].replace("|", "\\|") in shown._repr_markdown_() or EVIL[0] in shown._repr_markdown_()
    )


def test_a_comparison_says_the_answer_first():
    result = bad()
    assert Text(result._repr_html_()).said[:3] == [
        "✗ DIFFERENT",
        " ",
        "fc1 (Linear), step 0, rank 0: introduced (likely)",
    ]
    assert Text(api.compare(net(), net(bfloat16))._repr_html_()).said[0] == "✓ SAME"
    assert (
        repr(result)
        == "<Comparison different: fc1 (Linear), step 0, rank 0: introduced (likely); <Net> "
        "against <Net>>"
    )
    assert result._repr_markdown_().startswith("### whence: DIFFERENT\n")
    assert repr(result.findings[0]) == "<Finding fc1 (Linear), step 0, rank 0: introduced (likely)>"


def stored(path, run):
    """A hand-made run on disk, read back."""
    import xxhash

    from whence.records import RunInfo

    store.create(path, RunInfo())
    with store.Writer(path, 0) as writer:
        for record in run.records:
            data = np.ascontiguousarray(run.array(record.id)).reshape(-1).view(np.uint8)
            writer.record(
                record.dtype,
                record.shape,
                data,
                xxhash.xxh3_128_digest(data.tobytes()),
                record.statistics,
                record.sketch,
            )
        for call in run.calls:
            writer.call(call)
    return store.open_run(path)


def test_calls_and_tensors_of_a_run_by_name(tmp_path):
    made = net()
    for run in (made, stored(tmp_path / "run", made)):
        assert [call.op_type for call in run["fc1"]] == ["Linear"]
        assert run["fc1:output.0"].tobytes() == made.array(3).tobytes()
        names = run._ipython_key_completions_()
        assert names[:3] == ["Net", "fc1", "fc2"]
        assert "fc2:param.weight" in names
        with pytest.raises(KeyError, match=r"no 'fc11' here; nearest: fc1"):
            run["fc11"]
        with pytest.raises(KeyError):
            run["fc1:output.7"]
        assert repr(run).endswith(": 3 calls, 6 records>")
    with pytest.raises(ElementsMissing):
        net(keep=False)["fc1:output.0"]


def test_rows_of_a_comparison_by_name():
    result = bad()
    assert result._ipython_key_completions_() == ["fc1", "Net", "fc2"]
    assert {row.reference_slot for row in result["fc1"]} == {"param.weight", "input.0", "output.0"}
    with pytest.raises(KeyError, match="nearest: fc2, fc1"):
        result["fc"]


def frame_of(package, result, *table):
    return getattr(result, f"to_{package}")(*table)


@pytest.mark.parametrize("package", ["pandas", "polars"])
def test_data_frames_have_every_pair_and_every_figure(package):
    pytest.importorskip(package, reason=f"{package} is not installed")
    result = bad()
    frame = frame_of(package, result)
    assert len(frame) == len(result.rows)
    assert [
        c
        for c in ("name", "verdict", "rel_l2", "max_abs_err", "reference_shape", "max_abs_index")
        if c not in frame.columns
    ] == []
    for at, row in enumerate(result.rows):
        assert (frame["name"][at], frame["verdict"][at]) == (row.name, row.verdict)
        assert list(frame["reference_shape"][at]) == list(row.reference_shape)
        for metric, value in row.measured.values.items():
            seen = frame[metric][at]
            assert (seen is None or np.isnan(seen)) if value is None else seen == value
    assert str(frame["rel_l2"].dtype).lower() == "float64"
    findings = frame_of(package, result, "findings")
    assert list(findings["name"]) == ["fc1"]
    assert findings["e_out"][0] == result.findings[0].numbers["e_out"]
    with pytest.raises(UsageError, match="pairs, findings, tokens"):
        frame_of(package, result, "rows")
    with pytest.raises(UsageError, match="no tokens"):
        frame_of(package, result, "tokens")


@pytest.mark.parametrize("package", ["pandas", "polars"])
def test_a_missing_package_is_named(package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependency, match=f"pip install {package}"):
        frame_of(package, bad())


def test_completion_in_ipython():
    completer = pytest.importorskip("IPython.core.completer", reason="IPython is not installed")
    made = completer.IPCompleter(namespace={"run": net()}, use_jedi=False)
    with completer.provisionalcompleter():
        assert {"fc1", "fc2"} <= {c.text for c in made.completions('run["f', 6)}
        assert [c.text for c in made.completions('run["fc1:o', 10)] == [
            "output.0"
        ]  # a colon ends a word


def test_a_finding_without_a_cause():
    alone = Finding("a|b", "Op", "", "structural", "likely", 0, 0, "text", sentence="x")
    assert "structural (likely)" in alone._repr_html_()
    assert "`a\\|b`" in alone._repr_markdown_()
