"""The answer as a person sees it: exact texts."""

import csv
import io
import json

import msgspec
import numpy as np

from handmade import bfloat16, net
from whence import api
from whence.report.answer import answer
from whence.report.files import table_csv
from whence.report.summary import summary
from whence.results import Visible


def without_timing(text):
    return "\n".join(line.rstrip() for line in text.splitlines())


def test_same():
    assert without_timing(answer(api.compare(net(), net()))) == (
        "SAME               bitwise identical\n"
        "  how sure         all 3 calls compared bit by bit\n"
        "3 of 3 calls paired: 3 identical; 0 unmatched, 0 incomparable"
    )


def test_rounding():
    assert without_timing(answer(api.compare(net(), net(bfloat16)), output="cmp")) == (
        "SAME               no fault: every difference is rounding\n"
        "  how sure         the two dumps alone, nothing was replayed; all 3 calls measured; could not "
        "have seen errors below 5 times what came in\n"
        "  would have seen  a scale error above 1.2 % (median of 2 calls; 1.2 % at most, fc2), one "
        "element off by 21 % of the rms (32 % at most)\n"
        "  at the outputs   Net output.0: rel_l2 0.0031; argmax unchanged in all 5 rows\n"
        "3 of 3 calls paired: 2 noise, 1 inherited; 0 unmatched, 0 incomparable\n"
        "written to cmp: summary.json, report.csv, report.json"
    )


def test_how_large_a_fault_would_have_been_named():
    same = api.compare(net(), net(bfloat16))
    sizes = (
        Visible("scale", 1.2e-4, 0.0156, "fc2", 80),
        Visible("channel", 0.008, 0.07, "fc1", 80),
        Visible("element", 0.068, 0.137, "fc1", 80),
        Visible("noise", 0.0155, 0.045, "fc1", 80),
    )
    told = msgspec.structs.replace(same, visible=sizes)
    assert (
        "  would have seen  a scale error above 0.012 % (median of 80 calls; 1.6 % at most, fc2), one "
        "element off by 6.8 % of the rms (14 % at most)\n" in answer(told)
    )
    assert [v["kind"] for v in json.loads(summary(told))["visible"]] == [s.kind for s in sizes]
    dumps = Visible("scale", 0.031, 0.25, "fc1", 3, "two dumps")
    mixed = msgspec.structs.replace(told, evidence="replay", visible=(*sizes, dumps))
    assert (
        "(14 % at most); a scale error above 3.1 % (median of 3 calls without replay; 25 % at most, "
        "fc1)\n" in answer(mixed)
    )
    undecided = msgspec.structs.replace(told, status="undecided")
    assert "would have seen" not in answer(undecided)


def test_how_rare_rounding_comes_as_far_is_said_of_likely_findings():
    def change(name, value):
        return value * 1.5 if name == "w2" else value

    result = api.compare(net(), net(change=change))
    (finding,) = result.findings

    def shown(confidence, chance):
        other = msgspec.structs.replace(
            finding, confidence=confidence, numbers={**finding.numbers, "chance": chance}
        )
        return answer(msgspec.structs.replace(result, findings=(other,)))

    assert "  how sure         likely; by rounding alone once in 20 000 comparisons: " in shown(
        "likely", 5e-5
    )
    rare = "likely; by rounding alone less than once in a billion comparisons: "
    assert rare in shown("likely", 0.0)
    assert "by rounding alone" not in shown("likely", 0.2)
    assert "by rounding alone" not in shown("certain", 0.0)


def test_a_changed_weight():
    def change(name, value):
        if name == "w2":
            value = value.copy()
            value[3, 5] = 0.25
        return value

    lines = without_timing(answer(api.compare(net(), net(change=change)))).splitlines()
    assert lines[0] == "FAULT              fc2   Linear   param.weight   step 0, rank 0"
    assert lines[1] == "  cause            parameter: the parameters differ"
    assert lines[2].startswith(
        "  evidence         weight: 1 of 256 elements differs, in row 3; first at [3, 5]: "
    )
    assert lines[2].endswith(" against 0.25")
    assert lines[3].startswith("  how sure         certain: ")


def test_an_operator():
    result = api.compare(net(), net(change=lambda n, v: v * 1.5 if n == "h" else v))
    lines = without_timing(answer(result)).splitlines()
    assert lines[0] == "FAULT              fc1   Linear   output.0   step 0, rank 0"
    assert lines[1] == "  verdict          introduced"
    assert any(line.startswith("  how sure         likely: ") for line in lines)
    assert lines[2].startswith(
        "  evidence         error grows 3.5e+06 times: 0 at its inputs, 0.5 at its outputs (two "
        "dumps)"
    )
    assert "  inputs           bitwise equal" in lines
    assert "  output           rel_l2 0.5" in lines


def test_differing_inputs_come_first():
    result = api.compare(net(), net(change=lambda n, v: v[::-1] if n == "ids" else v))
    assert answer(result).startswith(
        "INPUTS DIFFER      Net step 0: 0 at [0]: 0 against 4 (4 of 5 differ)\nUNDECIDED "
    )


def test_names_are_not_obeyed_by_a_terminal_or_a_spreadsheet():
    evil = ("=cmd|' /C calc'!A0", "\x1b[31mred\x1b[0m")
    result = api.compare(
        net(names=evil), net(names=evil, change=lambda n, v: v * 1.5 if n in ("h", "y") else v)
    )
    assert "\x1b" not in answer(result)
    rows = list(csv.reader(io.StringIO("".join(table_csv(result)))))
    names = {row[1] for row in rows[1:]}
    assert "'" + evil[0] in names
    assert not any("\x1b" in cell for row in rows for cell in row)


def test_summary_has_the_fields_scripts_read():
    result = api.compare(net(), net(change=lambda n, v: v * 1.5 if n == "h" else v))
    data = json.loads(summary(result))
    fields = (
        "status evidence findings first_difference counts coverage unmatched incomparable "
        "inputs_differ versions"
    )
    assert set(data) >= set(fields.split())
    finding = data["findings"][0]
    assert set(finding) >= {
        "name",
        "op_type",
        "cause",
        "verdict",
        "confidence",
        "step",
        "rank",
        "evidence",
        "numbers",
        "sentence",
    }
    assert (data["status"], finding["name"], data["first_difference"]["name"]) == (
        "different",
        "fc1",
        "fc1",
    )


def test_csv_has_a_line_per_pair_and_empty_cells_for_numbers_that_do_not_exist():
    result = api.compare(net(), net(keep=False))
    rows = list(csv.DictReader(io.StringIO("".join(table_csv(result)))))
    assert len(rows) == len(result.rows) == 9
    changed = api.compare(net(), net(change=lambda n, v: v * np.nan if n == "h" else v))
    row = next(
        r
        for r in csv.DictReader(io.StringIO("".join(table_csv(changed))))
        if r["name"] == "fc1" and r["reference_slot"] == "output.0"
    )
    assert row["rel_l2"] == ""
    assert "finite" in row["why"]


def test_inputs_that_were_not_recorded_are_not_called_equal():
    result = api.compare(net(), net(change=lambda n, v: v * 1.5 if n == "h" else v))
    pairs = [
        msgspec.structs.replace(
            pair, slots=tuple(s for s in pair.slots if not s.reference_slot.startswith("input"))
        )
        for pair in result.plan.pairs
    ]
    plan = msgspec.structs.replace(result.plan, pairs=type(result.plan.pairs)(pairs))
    lines = without_timing(answer(msgspec.structs.replace(result, plan=plan))).splitlines()
    assert "  inputs           none of this call was recorded" in lines
