"""`whence.tokens` on files: who faces whom, what cannot be read, two commits, A/A, and files of any
shape and size.
"""

import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest

import whence
from whence import api
from whence.errors import UnreadableRun, UsageError
from whence.workflows.tokens import predictions


def records(n=6, **more):
    return [
        {"src": f"p{i}", "tgt": "", "output": f"word{i} and more of it", **more} for i in range(n)
    ]


def lines(items):
    return "".join(json.dumps(r) + "\n" for r in items).encode()


@pytest.fixture
def put(tmp_path):
    """A file of outputs: records, or bytes as they are."""

    def write(name, content):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else lines(content))
        return path

    return write


def verdicts(result):
    return [p.verdict for p in result.prompts]


def test_every_layout_of_the_same_records_agrees(put):
    items = records()
    reference = put("ref.json", items)
    pretty = json.dumps(items, indent=2)
    layouts = {
        "array": json.dumps(items).encode(),
        "pretty": pretty.encode(),
        "crlf": pretty.replace("\n", "\r\n").encode(),
        "lines crlf": lines(items).replace(b"\n", b"\r\n"),
        "bom": b"\xef\xbb\xbf" + lines(items),
        "bom array": b"\xef\xbb\xbf  \n" + pretty.encode() + b"\n\n",
        "no newline at the end": lines(items)[:-1],
        "blank lines": b"\n \r\n" + lines(items).replace(b"\n", b"\n\n"),
    }
    for name, content in layouts.items():
        result = whence.tokens(reference, put("tgt.json", content))
        assert (result.status, result.full_match, result.half_match, verdicts(result)) == (
            "pass",
            1.0,
            1.0,
            ["PASS"] * 6,
        ), name
        assert result.unreadable == (), name
    assert whence.tokens(items, items).full_match == 1.0


def test_a_line_is_found_at_its_place_however_the_chunks_fall(put, monkeypatch):
    # Quotes, brackets and escapes inside strings, cut anywhere by a chunk of a few bytes.
    items = [{"src": f'"]}},{i}\\', "output": f'a\\"[{{,é\u2028{i}\\\\'} for i in range(5)]
    reference = put("ref.json", items)
    array = put("tgt.json", json.dumps(items, ensure_ascii=False, indent=1).encode())
    for chunk in (1, 2, 3, 7, 64):
        monkeypatch.setattr(predictions, "_CHUNK", chunk)
        result = whence.tokens(reference, array)
        assert (result.full_match, result.unreadable) == (1.0, ()), chunk
        assert [p.target_line for p in result.prompts] == [1, 2, 3, 4, 5]


def test_bad_lines_are_named_and_never_pass(put):
    items = records(12)
    good = lines(items).split(b"\n")
    good[1] = b'{"src": "p1", "output": '
    good[2] = b'{"src": "p2", "output": "\xff"}'
    good[3] = b"[1, 2]"
    good[4] = b'{"src": "p4"}'
    good[5] = b'{"src": "p5", "output": null}'
    good[6] = b'{"src": "p6", "output": [1, NaN]}'
    good[7] = b'{"src": "p7", "output": [[1], [2]]}'
    good[8] = b'{"src": "p8", "output": [1, "a"]}'
    good[9] = b'{"src": "p9", "output": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    good[10] = b'{"src": "p10", "output": [true]}'
    result = whence.tokens(put("ref.json", items), put("tgt.json", b"\n".join(good)))
    assert verdicts(result) == ["PASS", *["NO"] * 10, "PASS"]
    assert (result.count, result.full_count, result.full_match, result.not_compared) == (
        12,
        2,
        2 / 12,
        10,
    )
    said = [u.split(": ", 1)[1] for u in result.unreadable]
    expected = (
        "line 2: not JSON",
        "line 3: not UTF-8 at byte 25",
        "line 4: a list, not an object",
        "line 5: no key 'output' (it has 'src')",
        "line 6: 'output' is null",
        "line 7: 'output' holds nan at 1",
        "line 8: 'output' holds a list at 0",
        "line 9: 'output' mixes token ids and text",
        "line 10: nested too deeply",
        "line 11: 'output' holds True at 0",
    )
    assert [s for s, e in zip(said, expected, strict=True) if not s.startswith(e)] == []
    assert "line 2: not JSON" in result.prompts[1].why.replace(",", "").replace("target ", "")
    assert [p.prompt for p in result.prompts] == [f"p{i}" for i in range(12)]
    # The other way round the same ten do not pass.
    back = whence.tokens(put("tgt.json", b"\n".join(good)), put("ref.json", items))
    assert (verdicts(back), back.full_match) == (verdicts(result), result.full_match)


def test_nan_elsewhere_and_surrogates_are_no_trouble(put):
    content = (
        b'{"src": "a", "score": NaN, "n": 123456789012345678901234567890, "output": "\\ud800 x"}\n'
    )
    content += b'{"src": "\\udfff", "output": "\\ud83d\\ude00"}'
    result = whence.tokens(put("ref.json", content), put("tgt.json", content))
    assert verdicts(result) == ["PASS", "PASS"]
    assert [p.reference_length for p in result.prompts] == [3, 1]


def test_arrays_that_are_broken(put):
    items = records()
    reference = put("ref.json", items)
    whole = json.dumps(items)

    def said(content):
        result = whence.tokens(reference, put("tgt.json", content.encode()))
        return result.full_count, [u.split(": ", 1)[1] for u in result.unreadable]

    assert said(whole[:-20]) == (
        5,
        ["element 6: the file ends inside the array: it was cut short, in a string"],
    )
    assert said(whole[:-1]) == (5, ["element 6: the file ends inside the array: it was cut short"])
    assert said(whole.replace('"word1 and more of it"', "")) == (
        5,
        ["element 2: not JSON: expecting value at character 36"],
    )
    assert said(whole + " x") == (6, ["element 7: the array ends, and after it comes 'x'"])
    assert said(whole[:-1] + ",]") == (6, ["element 7: nothing after the last comma"])
    assert said(whole[:-1] + "}") == (6, ["element 7: the array ends, and after it comes '}'"])


def test_a_cut_array_is_counted_against_it(put):
    # All six prompts are there, and yet the file says that more was to come: seven, of which six
    # pass.
    result = whence.tokens(records(), put("tgt.json", (json.dumps([*records(), {}])[:-2]).encode()))
    assert (result.count, result.full_count) == (7, 6)


def test_a_record_too_long_is_named_and_the_rest_is_read(put, monkeypatch):
    items = records()
    monkeypatch.setattr(predictions, "RECORD_BYTES", 200)
    monkeypatch.setattr(predictions, "_CHUNK", 64)
    long = [*items[:2], {**items[2], "output": "x" * 5000}, *items[3:]]
    for content in (lines(long), json.dumps(long).encode()):
        result = whence.tokens(put("ref.json", items), put("tgt.json", content))
        assert verdicts(result) == ["PASS", "PASS", "NO", "PASS", "PASS", "PASS"]
        assert next(u.split(": ", 1)[1] for u in result.unreadable).startswith(
            ("line 3: 50", "element 3: 50")
        )
    one = put("one.json", b'{"src": "p0", "output": "' + b"x" * 5000)
    with pytest.raises(UnreadableRun, match="none of 1 lines holds an output; line 1: 5025 bytes"):
        whence.tokens(items, one)


def test_outputs_are_not_held(put):
    """What is kept of a file does not grow with the length of its outputs."""
    import tracemalloc

    def peak(length):
        items = [{"src": f"p{i}", "output": "x" * length} for i in range(200)]
        reference, target = put("ref.json", items), put("tgt.json", json.dumps(items).encode())
        del items
        tracemalloc.start()
        assert whence.tokens(reference, target).full_match == 1.0
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    peak(10)
    assert peak(100_000) < peak(10) + 8_000_000  # both files together: 40 MB


def test_files_that_are_no_outputs(put, tmp_path):
    good = put("ref.json", records())
    for name, content, said in [
        ("u.json", "x".encode("utf-16"), "is UTF-16"),
        ("t.json", b"hello\nworld\n", "none of 2 lines holds an output; line 1: not JSON"),
        (
            "k.json",
            lines([{"prompt": "a", "text": "b"}]),
            "no key 'output' (it has 'prompt', 'text'); --output-key names another",
        ),
        ("d.json", b"[" * 100_000, "the file ends inside the array"),
    ]:
        with pytest.raises(UnreadableRun) as error:
            whence.tokens(good, put(name, content))
        assert said in str(error.value)
        assert str(tmp_path / name) in str(error.value)
    with pytest.raises(UnreadableRun, match="is a folder"):
        whence.tokens(good, tmp_path)
    with pytest.raises(UnreadableRun, match=r"absent\.json cannot be read: No such file"):
        whence.tokens(good, tmp_path / "absent.json")


def test_nothing_to_compare_is_undecided(put):
    good = put("ref.json", records())
    for content in (b"", b"\n\n", b"[]", b"[ ]\n"):
        empty = put("tgt.json", content)
        result = whence.tokens(good, empty)
        assert (result.status, result.count, result.full_match) == ("undecided", 6, 0.0)
        nothing = whence.tokens(empty, put("other.json", content))
        assert (nothing.status, nothing.count, nothing.full_match) == ("undecided", 0, None)
    ids = whence.tokens(good, put("ids.json", [{**r, "output": [1]} for r in records()]))
    assert (ids.status, set(verdicts(ids))) == ("undecided", {"NO"})
    assert ids.prompts[0].why == "the reference is text, the target a list of tokens"


def test_empty_outputs_never_pass():
    full = [{"src": "a", "output": "x"}, {"src": "b", "output": [1]}]
    empty = [{"src": "a", "output": ""}, {"src": "b", "output": []}]
    for reference, target, verdict in (
        (full, empty, "FAIL"),
        (empty, full, "FAIL"),
        (empty, empty, "NO"),
    ):
        result = whence.tokens(reference, target, full=0.01, half=0.01)
        assert (result.status, result.full_match, result.half_match, verdicts(result)) == (
            "fail",
            0.0,
            0.0,
            [verdict] * 2,
        )


def test_longer_with_an_equal_prefix_is_reported_apart():
    reference = [{"src": c, "output": o} for c, o in zip("abcd", ["xy", "xy", "xyz", "xy"])]
    target = [{"src": c, "output": o} for c, o in zip("abcd", ["xy", "xyz", "xy", "xz"])]
    result = whence.tokens(reference, target)
    assert verdicts(result) == ["PASS", "PASS", "PASS", "FAIL"]
    assert [p.longer for p in result.prompts] == ["", "target", "reference", ""]
    assert (result.full_count, result.longer_target, result.longer_reference) == (3, 1, 1)


def test_prompts_find_each_other_in_any_order():
    items = records()
    result = whence.tokens(items, items[::-1])
    assert (result.full_match, [p.matched_by for p in result.prompts]) == (1.0, ["prompt"] * 6)
    assert [(p.reference_line, p.target_line) for p in result.prompts][:2] == [(1, 6), (2, 5)]
    by_position = whence.tokens(items, items[::-1], match="position")
    assert by_position.full_match == 0.0
    assert "6 of 6 matched by position hold different prompts" in by_position.notes


def test_a_prompt_may_be_ids_or_messages():
    for make in (
        lambda i: [i, i + 1],
        lambda i: [{"role": "user", "content": f"p{i}"}],
        lambda i: {"b": 1, "a": i},
    ):
        items = [{"src": make(i), "output": f"w{i}"} for i in range(4)]
        other = [
            {
                "src": dict(reversed(r["src"].items())) if isinstance(r["src"], dict) else r["src"],
                "output": r["output"],
            }
            for r in items
        ]
        assert whence.tokens(items, other[::-1]).full_match == 1.0


def test_without_a_partner():
    items = records()
    result = whence.tokens(items, [*items[:4], {"src": "new", "output": "x"}])
    assert verdicts(result) == ["PASS"] * 4 + ["NO"] * 3
    assert [p.prompt for p in result.prompts][4:] == ["p4", "p5", "new"]
    assert [p.why for p in result.prompts][4:] == ["the target has no such prompt"] * 2 + [
        "the reference has no such prompt"
    ]
    assert result.full_match == 4 / 7
    assert "2 only in <reference>: record 5, 6" in result.notes
    none = whence.tokens(items, [{**r, "src": r["src"] + "x"} for r in items])
    assert none.status == "undecided"
    assert any("--match position" in n for n in none.notes)


def test_without_prompts_the_position_counts():
    items = [{"output": r["output"]} for r in records()]
    for target in (items, records()):
        result = whence.tokens(items, target)
        assert (result.full_match, {p.matched_by for p in result.prompts}) == (1.0, {"position"})
        assert any(n.startswith("6 of 6 matched by position") for n in result.notes)
    alone = whence.tokens(items, records(), match="prompt")
    assert (alone.status, alone.count) == ("undecided", 12)
    empty = [{"src": "", "output": r["output"]} for r in records()]
    assert whence.tokens(empty, empty).repeated == 0


def test_a_prompt_asked_twice_is_a_check_of_the_run_itself():
    items = records()
    twice = [*items, items[0], {**items[1], "output": "word1 then"}]
    result = whence.tokens(twice, items)
    assert (result.repeated, result.count, result.full_match) == (2, 6, 1.0)
    assert [(d.side, d.prompt, d.lines, d.match.first_token) for d in result.disagreements] == [
        ("reference", "p1", (2, 8), 1)
    ]
    assert "2 further occurrences of a prompt only check that a run repeats itself" in result.notes
    # The n-th occurrence faces the n-th, and its row says that the run does not repeat itself.
    both = whence.tokens(twice, [*items, items[0], items[1]])
    assert (both.count, both.full_count) == (8, 7)
    assert both.prompts[7].why == "the reference itself answers it in two ways"
    assert [d.side for d in whence.tokens(items, twice).disagreements] == ["target"]


def test_how_rows_differ_is_said():
    pairs = [("caf\u00e9 x", "cafe\u0301 x"), ("a b", "a  b"), ("a b", "a c")]
    reference, target = (
        [{"src": str(i), "output": p[side]} for i, p in enumerate(pairs)] for side in (0, 1)
    )
    result = whence.tokens(reference, target)
    assert [p.why for p in result.prompts] == [
        "equal but for Unicode normalisation",
        "equal but for blanks",
        "",
    ]
    assert [(p.first_character, p.common, p.reference_at, p.target_at) for p in result.prompts] == [
        (3, "caf", "\u00e9 x", "e\u0301 x"),
        (2, "a ", "b", " b"),
        (2, "a ", "b", "c"),
    ]
    ids = whence.tokens(
        [{"src": "a", "output": list(range(40))}], [{"src": "a", "output": [*range(30), 99, 31]}]
    )
    row = ids.prompts[0]
    assert (row.unit, row.first_token, row.first_character, row.half) == ("token", 30, None, True)
    assert (row.common[-8:], row.target_at) == ("27 28 29", "99 31")


def test_outputs_in_arrays_and_other_keys(put):
    reference = [{"q": "a", "choices": [{"ids": np.array([1, 2, 3])}]}]
    target = put("tgt.json", [{"q": "a", "choices": [{"ids": [1, 2, 4]}]}])
    result = whence.tokens(reference, target, prompt_key="q", output_key="choices.0.ids")
    assert (result.prompts[0].prompt, result.prompts[0].first_token) == ("a", 2)
    with pytest.raises(UsageError, match="no line has a prompt under 'qq'; without --prompt-key"):
        whence.tokens(target, target, prompt_key="qq", output_key="choices.0.ids")
    dotted = [{"src": "a", "x.y": "b"}]
    assert whence.tokens(dotted, dotted, output_key="x.y").full_match == 1.0
    assert api.first_difference([1, 2, 3], [1, 5, 3]).first_token == 1
    assert api.first_difference("a b", "a b").first_token is None


def commit(passing, of=20, output="a b c d", drop=()):
    reference = [{"src": f"p{i}", "output": output} for i in range(of)]
    target = [
        {"src": f"p{i}", "output": output if i in passing else "z"}
        for i in range(of)
        if i not in drop
    ]
    return reference, target


def test_two_commits():
    before, after = (
        commit(set(range(20)) - {8, 12, 14}),
        commit(set(range(20)) - {0, 2, 3, 5, 6, 8, 10, 11, 12, 16}),
    )
    result = whence.tokens(before=before, after=after)
    assert (result.status, result.full_match, result.before.full_match, result.before.status) == (
        "fail",
        0.5,
        0.85,
        "pass",
    )
    assert result.table == {"both": 9, "only_before": 8, "only_after": 1, "neither": 2}
    assert result.newly_failing == (1, 3, 4, 6, 7, 11, 12, 17)
    assert result.newly_passing == (15,)
    assert result.p_value == pytest.approx(0.0390625)
    changed = [
        (p.number, p.before, p.verdict) for p in result.prompts if p.change == "newly passing"
    ]
    assert changed == [(15, "FAIL", "PASS")]
    back = whence.tokens(before=after, after=before)
    assert (back.status, back.table["only_after"], back.newly_passing) == (
        "pass",
        8,
        (1, 3, 4, 6, 7, 11, 12, 17),
    )
    same = whence.tokens(before=before, after=before)
    assert (same.status, same.p_value, same.newly_failing) == ("pass", 1.0, ())


def test_a_commit_that_is_significantly_worse_fails_within_its_thresholds():
    before, six, five = commit(range(40), 40), commit(range(6, 40), 40), commit(range(5, 40), 40)
    worse = whence.tokens(before=before, after=six)
    assert (worse.status, worse.full_match) == ("fail", 0.85)
    assert worse.p_value == pytest.approx(2 / 64)
    assert whence.tokens(before=before, after=five).status == "pass"
    assert whence.tokens(before=six, after=before).status == "pass"


def test_prompts_that_a_commit_lacks_are_not_in_the_table():
    before = commit(range(20))
    shorter = tuple(side[:15] for side in before)
    result = whence.tokens(before=before, after=shorter)
    assert sum(result.table.values()) == 15
    assert "not in the table: 0 prompts only after, 5 only before" in result.notes
    # A prompt whose target is gone is still one of the commit, and does not pass.
    gone = whence.tokens(before=before, after=commit(range(20), drop={3}))
    assert (gone.newly_failing, gone.prompts[3].verdict) == ((4,), "NO")
    moved = whence.tokens(before=before, after=commit(range(20), output="a b c e"))
    assert moved.table["both"] == 20
    assert any("the reference itself answers 20 prompts differently" in n for n in moved.notes)
    other = [{"src": "other", "output": "x"}]
    assert whence.tokens(before=before, after=(other, other)).status == "undecided"
    assert whence.tokens(before=(before[0], []), after=before).status == "undecided"


def test_a_model_named_in_the_records_chooses_its_thresholds(put):
    path = put("t.yaml", b"models: {small*: {full: 0.1}}")
    reference, target = commit({0, 1, 2, 3, 4, 5, 6, 7})
    assert whence.tokens(reference, target, thresholds=path).full_threshold == 0.75
    named = [{**r, "model": "small-1b"} for r in reference]
    result = whence.tokens(named, target, thresholds=path)
    assert (result.status, result.full_threshold, result.thresholds_from) == (
        "pass",
        0.1,
        f"{path}, model small*",
    )
    assert whence.tokens(named, target, thresholds=path, model="other").full_threshold == 0.75
    mixed = whence.tokens([{**named[0], "model": "big"}, *named[1:]], target, thresholds=path)
    assert (mixed.full_threshold, any("2 models" in n for n in mixed.notes)) == (0.75, True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "two files are compared"),
        ({"before": ([], [])}, "go together"),
        ({"before": ([], []), "after": ([], []), "reference": []}, "not both"),
        ({"reference": [], "target": [], "match": "exact"}, "auto, prompt or position"),
        ({"reference": [], "target": [], "full": 75}, "--full: 75 is not a share"),
        ({"reference": 5, "target": []}, "not int"),
    ],
)
def test_wrong_calls_are_told(options, said):
    with pytest.raises(UsageError, match=said):
        whence.tokens(**options)


def test_a_pipe_is_read(put, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    feeder = threading.Thread(target=lambda: pipe.write_bytes(lines(records())))
    feeder.start()
    result = whence.tokens(put("ref.json", records()), pipe)
    feeder.join()
    assert result.full_match == 1.0


def test_one_file_on_both_sides_is_said(put):
    path = put("ref.json", records())
    assert "reference and target are one file" in whence.tokens(path, Path(path)).notes


@pytest.mark.shared
def test_the_samples_of_two_commits(shared, put):
    folder = shared / "samples" / "paddle" / "tokens"
    files = {
        c: (folder / f"commit{c}_ref_predict.json", folder / f"commit{c}_fused_predict.json")
        for c in "AB"
    }

    def as_ids(path):
        words = {}
        items = [json.loads(line) for line in path.read_text().splitlines()]
        return [
            {
                **r,
                "output": [
                    words.setdefault(w, sum(map(ord, w)) * 31 + len(w)) for w in r["output"].split()
                ],
            }
            for r in items
        ]

    for a, b in ((files["A"], files["B"]), *[tuple(tuple(map(as_ids, files[c])) for c in "AB")]):
        result = whence.tokens(before=a, after=b)
        assert (result.before.full_count, result.before.half_count, result.before.status) == (
            17,
            19,
            "pass",
        )
        assert (result.full_count, result.half_count, result.status) == (10, 16, "fail")
        assert (len(result.newly_failing), len(result.newly_passing), round(result.p_value, 3)) == (
            8,
            1,
            0.039,
        )
        assert [p.number for p in result.before.prompts if p.verdict == "FAIL"] == [9, 13, 15]
        assert [p.number for p in result.prompts if p.verdict == "FAIL"] == [
            1,
            3,
            4,
            6,
            7,
            9,
            11,
            12,
            13,
            17,
        ]
        assert {p.first_token for p in result.prompts} == {None, 4, 18}


def test_ids_that_the_files_give_name_their_prompts():
    reference = [{"id": f"q{n}", "src": str(n), "output": [n, 2, 3]} for n in range(3)]
    target = [{**row, "output": [row["output"][0], 2, 4]} for row in reversed(reference)]
    found = whence.tokens(reference, target)
    assert [(p.number, p.id) for p in found.prompts] == [(1, "q0"), (2, "q1"), (3, "q2")]
    twice = [{**row, "id": 7} for row in reference]
    assert {p.id for p in whence.tokens(twice, twice).prompts} == {""}


def sample(number, requests, answers):
    """A line as lm-evaluation-harness logs it."""
    arguments = {
        f"gen_args_{i}": {f"arg_{j}": a for j, a in enumerate(request)}
        for i, request in enumerate(requests)
    }
    return {"doc_id": number, "arguments": arguments, "resps": answers, "filter": "none"}


def test_samples_of_lm_evaluation_harness(put):
    def scored(number, *scores, contexts=("Which?",), endings=(" a", " b", " c")):
        requests = [(c, e) for c in contexts for e in endings]
        return sample(number, requests, [[[str(s), "False"]] for s in scores])

    two = {"contexts": ("It is hot", "It is cold"), "endings": (" today",)}
    reference = put("ref.jsonl", [
        sample(0, [("Say it.", {"until": ["."]})], [["it is said"]]),
        scored(1, -3.5, -2.0, -9.0),
        scored(2, -3.5, -2.0, -9.0),
        scored(3, -1.0, -2.0, **two),
        sample(4, [("the whole text",)], [["-120.5"]]),
    ])  # fmt: skip
    target = put("tgt.jsonl", [
        sample(0, [("Say it.", {"until": ["."]})], [["it is sung"]]),
        scored(1, -3.4, -2.1, -9.5),
        scored(2, -2.0, -3.5, -9.0),
        scored(3, -2.0, -1.0, **two),
        sample(4, [("the whole text",)], [["-120.6"]]),
    ])  # fmt: skip
    prompts = whence.tokens(reference, target).prompts
    assert [(p.id, p.verdict) for p in prompts] == [
        ("0", "FAIL"), ("1", "PASS"), ("2", "FAIL"), ("3", "FAIL"), ("4", "NO"),
    ]  # fmt: skip
    assert (prompts[0].prompt, prompts[0].reference_at) == ("Say it.", "aid")
    assert (prompts[2].reference_at, prompts[2].target_at) == ("b", "a")
    assert prompts[3].reference_at == "hot"
    assert "no key 'output'" in prompts[4].why
