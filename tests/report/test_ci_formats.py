"""What build machines read: Markdown, JUnit XML and annotations, each taken apart again by a reader
of its own.
"""

import re
from collections import Counter
from html.parser import HTMLParser
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest
from markdown_it import MarkdownIt

from handmade import Builder, bfloat16, net
from whence import api
from whence.report.answer import headline
from whence.report.github import github_annotations
from whence.report.junit import junit_xml
from whence.report.markdown import markdown

EVIL = ("a|b`c``d* <script>@you [x](http://y)", "q_\x1b[31m%0A::error::x\n::error::y]]>&amp;\ud800")


def bad(**more):
    return api.compare(net(**more), net(change=lambda n, v: v * 1.5 if n == "h" else v, **more))


def grown(outputs):
    """A call with one more output than its partner has."""
    made = Builder()
    x = np.linspace(1, 2, 8, dtype=np.float32)
    made.call("", {"input.0": x, "output.0": x * 2}, op_type="Net")
    made.call(
        "pair",
        {"input.0": x, "output.0": x * 2, **{f"output.{i}": x * i for i in range(1, outputs)}},
        parent=0,
    )
    return made.run()


def cases(result):
    suite = ElementTree.fromstring(junit_xml(result).encode())
    found = [(c.get("classname"), c.get("name"), c[0].tag if len(c) else "passed") for c in suite]
    told = {tag: sum(kind == tag for *_, kind in found) for tag in ("failure", "skipped")}
    assert [int(suite.get(k)) for k in ("tests", "failures", "errors", "skipped")] == [
        len(found),
        told["failure"],
        0,
        told["skipped"],
    ]
    return found


def test_a_case_for_the_answer_and_one_per_call():
    assert cases(bad()) == [
        ("whence.answer", "<Net> against <Net>", "failure"),
        ("whence.rank0.step0", "Net (Net)", "passed"),
        ("whence.rank0.step0", "fc1 (Linear)", "failure"),
        ("whence.rank0.step0", "fc2 (Linear)", "passed"),
    ]
    assert {kind for *_, kind in cases(api.compare(net(), net(bfloat16)))} == {"passed"}


@pytest.mark.parametrize(
    ("result", "skipped"),
    [
        (lambda: api.compare(net(), net(drop=("fc1",))), "fc1"),  # no partner
        (
            lambda: api.compare(
                net(), net(change=lambda n, v: np.full_like(v, np.nan) if n == "y" else v)
            ),
            None,
        ),
        (
            lambda: api.compare(net(keep=False), net(change=lambda n, v: v[:3] if n == "h" else v)),
            "fc2 (Linear)",
        ),
        (lambda: api.compare(grown(2), grown(1)), "pair (Linear)"),  # an output without a partner
    ],
    ids=["unmatched", "nan", "shapes", "output"],
)
def test_what_was_not_compared_never_passes(result, skipped):
    compared = result()
    found = cases(compared)
    assert (
        found[0][2]
        == {"same": "passed", "different": "failure", "undecided": "skipped"}[compared.status]
    )
    assert found[0][2] != "passed"
    if skipped is not None:
        assert (
            {kind for _, name, kind in found if name == skipped} <= {"skipped", "failure"} != set()
        )


def test_downstream_of_differing_inputs_nothing_passes_that_is_not_equal():
    result = api.compare(net(), net(change=lambda n, v: v + 1 if n == "x" else v))
    assert result.inputs_differ
    verdicts = Counter(row.verdict for row in result.rows)
    assert {kind for *_, kind in cases(result)[1:]} == {"skipped"}, verdicts


def test_a_suspicion_is_no_failure():
    result = bad()
    doubted = msgspec.structs.replace(
        result,
        status="undecided",
        verdicts=tuple(msgspec.structs.replace(v, confidence="suspect") for v in result.verdicts),
    )
    assert Counter(kind for *_, kind in cases(doubted)) == {"passed": 2, "skipped": 2}


def test_xml_holds_any_name():
    names = [name for _, name, _ in cases(bad(names=EVIL))]
    assert f"{EVIL[0]} (Linear)" in names
    assert r"q_\x1b[31m%0A::error::x\n::error::y]]>&amp;\ud800 (Linear)" in names


class Text(HTMLParser):
    """Tags, and text of what was rendered."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.said = Counter(), []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1

    def handle_data(self, data):
        self.said.append(data)


def rendered(text):
    # The folded part is HTML of our own; what is inside of it is in a fence.
    return Text(MarkdownIt("commonmark", {"html": False}).enable("table").render(text))


def test_markdown_says_the_answer_first_and_shows_names_as_they_are():
    result = bad(names=EVIL)
    page = rendered(markdown(result))
    assert page.said[0] == "whence: DIFFERENT"
    assert headline(result) in "".join(page.said)
    assert EVIL[0] in page.said  # as code, in a cell
    assert page.tags["a"] == page.tags["script"] == 0
    assert page.tags["table"] == 2
    assert page.tags["tr"] == 2 + 1 + len(result.counts)
    assert "@" not in markdown(result).splitlines()[2]  # in prose nobody is mentioned


def read_annotation(line):
    """A workflow command as its documentation says it is read."""
    level, properties, message = re.fullmatch(r"::(\w+) ([^:]*)::(.*)", line).groups()
    found = dict(part.split("=", 1) for part in properties.split(","))

    def plain(text, codes):
        for code, character in codes:
            text = text.replace(code, character)
        return text

    data = [("%0D", "\r"), ("%0A", "\n"), ("%25", "%")]
    return (
        level,
        {k: plain(v, [("%3A", ":"), ("%2C", ","), *data]) for k, v in found.items()},
        plain(message, data),
    )


def test_annotations_stand_at_their_lines_and_begin_no_other_command(tmp_path):
    result = bad(names=EVIL)
    source = str(tmp_path / "a,b:c.py") + ":12"
    placed = msgspec.structs.replace(
        result, findings=tuple(msgspec.structs.replace(f, source=source) for f in result.findings)
    )
    (line,) = github_annotations(placed, tmp_path).splitlines()
    level, properties, message = read_annotation(line)
    assert level == "error"
    assert properties == {"file": "a,b:c.py", "line": "12", "title": f"whence: {EVIL[0]}"}
    assert message.startswith(
        f"{EVIL[0]} (Linear) step 0, rank 0: introduced (likely). error grows "
    )
    assert github_annotations(placed, tmp_path / "elsewhere").startswith(
        f"::error file={tmp_path.as_posix()}/a%2Cb%3Ac.py,line=12,"
    )


def test_annotations_without_a_finding():
    assert (
        github_annotations(api.compare(net(), net()))
        == "::notice title=whence%3A same::bitwise identical\n"
    )
    undecided = github_annotations(api.compare(net(), net(drop=("fc1",)))).splitlines()
    assert [read_annotation(line)[0] for line in undecided] == ["warning"]
    inputs = github_annotations(
        api.compare(net(), net(change=lambda n, v: v[::-1] if n == "ids" else v))
    ).splitlines()
    assert [read_annotation(line)[1]["title"] for line in inputs] == [
        "whence: inputs differ",
        "whence: undecided",
    ]
