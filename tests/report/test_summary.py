"""summary.json: of the form that its published schema says, and of bounded size."""

import json
from pathlib import Path

import msgspec
import pytest

from handmade import bfloat16, net
from whence import api
from whence.report.summary import MOST, summary, summary_data
from whence.results import Counted, Occurrences
from whence.results.summary import SCHEMA, Summary, json_schema

PUBLISHED = Path(__file__).parents[2] / "docs" / "schema" / f"summary-{SCHEMA}.json"


def doubled(name):
    return lambda n, value: value * 2 if n == name else value


def test_the_published_schema_is_the_one_of_the_code():
    """After a change: `python -m whence.results.summary > docs/schema/summary-1.json`."""
    assert json.loads(PUBLISHED.read_text(encoding="utf-8")) == json.loads(
        json.dumps(json_schema())
    )


@pytest.mark.parametrize("change", ["", "w2", "h", "x", "ids"])
def test_a_summary_is_of_the_form_of_its_schema(change):
    result = api.compare(net(), net(bfloat16 if not change else "float32", change=doubled(change)))
    read = msgspec.json.decode(summary(result), type=Summary)
    assert read.schema == SCHEMA and not read.omitted
    assert read.status == result.status
    assert read.next == result.next and read.effect == result.effect
    assert read.coverage.share == result.coverage.share
    assert set(json.loads(summary(result))) == set(Summary.__struct_fields__)


def test_long_lists_are_cut_and_counted():
    result = api.compare(net(), net(change=doubled("h")))
    (finding,) = result.findings
    names = tuple(f"layers.{i}.mlp" for i in range(5000))
    row = Counted("op", "add", 1, 1, 0, 0, None, None)
    long = msgspec.structs.replace(
        result,
        findings=(msgspec.structs.replace(finding, also=names),) * 3000,
        without_partner={"target": names},
        notes=names,
        occurrences=Occurrences(None, None, (row,) * 300),
    )
    data = summary_data(long)
    assert len(data["findings"]) == len(data["notes"]) == len(data["occurrences"]["rows"]) == MOST
    assert data["findings"][0]["also"] == names[:MOST]
    assert data["omitted"]["findings"] == 3000 - MOST
    assert data["omitted"]["without_partner.target"] == 5000 - MOST
    assert data["omitted"]["findings.0.also"] == 5000 - MOST
    assert data["omitted"]["occurrences"] == 200
    assert len(summary(long)) < 500_000
