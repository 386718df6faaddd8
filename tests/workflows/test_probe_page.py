"""The page of one run: everything that the text says, in a file that needs nothing else."""

import json
import re

import pytest
import torch

import whence
from whence.report.document import text
from whence.report.html import escaped
from whence.report.html.probed import probed_html
from whence.report.own_files import is_own
from whence.report.probe import details
from whence.results import Held, Probed, Property, PropertyAnswer, Status, Variant
from whence.results.probe import OperatorPlace, SpreadShare

PLACE = OperatorPlace("aten._softmax", "layers.0.attn", "Attention", "/code/model.py:7")
BROKEN = PropertyAnswer(
    Property.CAUSALITY,
    Held.VIOLATED,
    (
        Variant("changed from position 3 on", Held.VIOLATED, 0.25, 4e5, 0.25, 1.5, 12, 64, PLACE),
        Variant("changed from position 1 on", Held.EXACT, effect=0.5, count=16),
    ),
    cause="a position sees <all> that come after it",
    power="64 elements: 1 ulp",
    notes=("declared",),
)
UNCLEAR = PropertyAnswer(
    Property.CHUNKING,
    Held.UNKNOWN,
    (Variant("a token at a time", Held.UNKNOWN, why="the model does not run so"),),
    why="the model does not run so",
    next="whence probe --causal",
)
ROUNDED = PropertyAnswer(
    Property.BATCH,
    Held.ROUNDING,
    (Variant("last in a batch of 8", Held.ROUNDING, 1e-7, 3.0, 0.0, None, 5, 64, PLACE),),
    shares=(SpreadShare("aten.mm", 2, 0.75, "layers.0"),),
)
ABSENT = PropertyAnswer(Property.PADDING, Held.ABSENT, why="it takes no mask")
RESULT = Probed(
    Status.DIFFERENT,
    "Net</script><b>",
    "x [1, 4]",
    (ROUNDED, ABSENT, BROKEN, UNCLEAR),
    ("python", "infer.py"),
    ("the command failed",),
)


@pytest.fixture
def page():
    return probed_html(RESULT)


def test_the_page_says_what_the_text_says(page):
    for words in (
        "causality",
        "a position sees &lt;all&gt; that come after it",
        "changed from position 3 on",
        "12 of 64",
        "aten._softmax",
        "layers.0.attn (Attention)",
        "model.py:7",
        "64 elements: 1 ulp",
        "whence probe --causal",
        "aten.mm in layers.0 75 % (2 calls)",
        "it takes no mask",
        "python infer.py",
        "the command failed",
    ):
        assert words in page
    assert page.index("changed from position 3") < page.index("last in a batch of 8")


def test_the_page_needs_nothing_else_and_runs_no_text_of_a_model(page):
    assert not re.search(r"(src|href)=\"(?!#)", page)
    assert "Net</script>" not in page
    assert "Net&lt;/script&gt;" in page
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert json.loads(data[1])["answers"][2]["cause"] == BROKEN.cause


def test_numbers_that_are_lost_and_plans_are_on_the_page():
    """They have no variants: what the text says of them is shown as it is."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    inputs = torch.randn(4, 16)
    result = whence.probe(model.eval(), inputs, properties=("health", "precision"))
    page = probed_html(result)
    lines = [line for answer in result.answers for line in text(details(answer)).splitlines()]
    assert any("predicted" in line for line in lines)
    assert all(escaped(line) in page for line in lines)


def test_every_answer_has_a_colour_and_a_shape(tmp_path):
    for held in Held:
        answer = PropertyAnswer(Property.REPEAT, held, (Variant("again", held),))
        page = probed_html(Probed(Status.SAME, "Net", "x [1]", (answer,)))
        assert f"</svg>{held}</span>" in page
        (tmp_path / "page.html").write_text(page)
        assert is_own(tmp_path / "page.html")


def test_a_file_that_exists_is_kept(tmp_path, capsys):
    from whence.cli import execute

    file = tmp_path / "page.html"
    file.write_text("mine")
    assert execute(["probe", "--html", str(file), "--", "python", "-c", "0"]) == 3
    assert "--force" in capsys.readouterr().err
    assert execute(["probe", "--html", str(file), "--force", "--", "python", "-c", "0"]) == 3
    assert file.read_text() == "mine"
