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
    [lambda r: r, lambda r: r.findings[0], lambda r: r[EVIL[0]], lambda r: net(names=EVIL)],
    ids=["comparison", "finding", "module", "run"],
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
        str(result)
        == "<Comparison different: fc1 (Linear), step 0, rank 0: introduced (likely); <Net> "
        "against <Net>>"
    )
    assert result._repr_markdown_().startswith("### whence: DIFFERENT\n")
    assert repr(result.findings[0]).startswith(
        "<Finding fc1 (Linear), step 0, rank 0: introduced (likely): "
    )


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


def test_modules_of_a_comparison_by_name():
    result = bad()
    assert result._ipython_key_completions_() == ["fc1", "Net", "fc2"]
    module = result["fc1"]
    assert (module.verdict, module.introduced, module.inherited) == ("introduced", True, False)
    assert [row.reference_slot for row in module] == module._ipython_key_completions_()
    assert set(module._ipython_key_completions_()) == {"param.weight", "input.0", "output.0"}
    assert module["output.0"] is module.worst is module.calls[0]["output.0"]
    assert module.error == module.worst.measured.values["rel_l2"] == pytest.approx(0.5)
    assert (module.findings, module.inside) == (result.findings, ())
    assert module.evidence == result.findings[0].evidence
    assert module.sentence == result.findings[0].sentence
    after = result["fc2"]
    assert (after.verdict, after.introduced, after.inherited) == ("inherited", False, True)
    assert after.calls[0].worst_input.reference_slot == "input.0"
    assert result["Net"].inside == result.findings
    with pytest.raises(KeyError, match="nearest: fc2, fc1"):
        result["fc"]
    with pytest.raises(KeyError, match=r"no 'output.1' among the tensors of fc1: .*output.0"):
        module["output.1"]


def test_a_name_that_only_one_run_has_is_told():
    result = api.compare(
        net(names=("only", "fc2")), net(names=("another", "fc2"), drop=("another",))
    )
    with pytest.raises(KeyError, match="'only' is in the reference alone"):
        result["only"]


def test_a_module_of_several_calls_shows_the_worst():
    """Two steps of which the second is wrong."""
    from handmade import Builder

    def run(factor):
        made = Builder()
        x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
        for step, by in enumerate((np.float32(1), factor)):
            root = made.call("", {"input.0": x}, op_type="Net", step=step)
            made.call("fc", {"input.0": x, "output.0": x * by}, parent=root, step=step)
        return made.run()

    module = api.compare(run(np.float32(1)), run(np.float32(2)))["fc"]
    assert [call.verdict for call in module.calls] == ["identical", "introduced"]
    assert (module.call.step, module.introduced, module["output.0"].step) == (1, True, 0)
    assert "1 identical, 1 introduced; this is step 1, rank 0" in repr(module)


def test_at_a_prompt_nothing_is_a_dump_of_fields():
    """Every public object that a person sees says what it is, in one to ten lines."""
    from whence import records, results
    from whence.report.prompt import _WORDS

    result = bad(names=EVIL)
    run = net(names=EVIL)
    module = result[EVIL[0]]
    seen = [
        *(result, module, module.calls[0], module["output.0"], result.findings[0]),
        *(result.verdicts[0], result.next[0], result.effect, result.coverage, result.plan),
        *(run, run.calls[1], run.records[0], run.info),
        results.Remark("suspect", EVIL[0], "Op", 0, 0, "replay", EVIL[1]),
        results.Undecided(EVIL[0], "Op", "output.0", why=EVIL[1]),
        results.Location("same", EVIL[0], "t", (), 0.0, 0.0, (), (), 1),
        results.Explained(EVIL[0], (), 3, 0.1, 0.0, 0.9),
        results.Rung(EVIL[0], "failed", why=EVIL[1]),
        results.Ladder("net", "same", EVIL[1]),
        results.Checkup("net", (), (), 3, 3, {}, 1.0, 1.0, 10, True),
        results.Reproduction(EVIL[0], EVIL[1], (), "kernel", "target", None, "x"),
        results.WeightMap((), tuple(f"w{i}" for i in range(40)), ()),
        results.Origin((results.TracedStep(0, EVIL[0], "Op", 0, 0, "identical", None, ()),), 0),
        records.Note("budget", "x" * 5000, EVIL[0]),
        records.Program("ab" * 16, (records.Operation("aten.add.Tensor"),), (), ()),
    ]
    assert {kind for kind in _WORDS if not any(isinstance(item, kind) for item in seen)} == {
        results.TokenComparison,  # tests/cli/test_tokens.py has one
        results.Ranges,  # tests/workflows/test_ranges.py has one
        results.Nans,  # tests/workflows/test_nans.py has one
        results.Diverged,  # tests/workflows/test_diverge.py has one
        results.RankReport,  # tests/comparison/test_rank_checks.py has one
        results.Repeated,  # tests/workflows/test_repeat.py has one
        results.Probed,  # tests/workflows/test_probe.py has one
        results.Upgrade,  # tests/workflows/test_upgrade.py has one
        results.ServingCheck,  # tests/workflows/test_serve_check.py has one
        results.Acceptance,  # tests/workflows/test_accept.py has one
        results.Fuzzed,  # tests/workflows/test_fuzz.py has one
    }
    for item in seen:
        text = repr(item)
        assert 1 <= len(text.splitlines()) <= 10, text
        assert "\x1b" not in text
        assert "Struct" not in text and "numbers=" not in text and len(text) < 2500, text
    assert repr(result.next[0]).startswith("<NextStep whence ")
    assert repr(run.calls[1]).endswith(
        "(Linear), step 0, rank 0: param.weight, input.0 -> output.0>"
    )
    assert repr(run.records[1]).startswith("<Record #1 float32 [5, 16], mean -0.09907, from ")
    assert repr(results.WeightMap((), ("w",) * 40, ())).endswith("... 33 more lines")


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
