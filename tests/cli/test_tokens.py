"""`whence tokens`: exit codes, text, JSON, csv."""

import csv
import io
import json

import pytest

import inside


def whence(place, *words):
    return inside.whence(place, "tokens", *words)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")

    def put(name, outputs):
        items = [{"src": f"prompt {i + 1}", "tgt": "", "output": o} for i, o in enumerate(outputs)]
        (folder / name).write_text("".join(json.dumps(r) + "\n" for r in items))

    good = [f"the answer number {i} is long" for i in range(8)]
    put("ref.json", good)
    put("same.json", good)
    put("three.json", ["no" if i < 3 else o for i, o in enumerate(good)])
    put("nasty.json", ["\x1b[31m=1+1\u202e", "e\u0301 the", "the\u0301 answer", *good[3:]])
    put("wide.json", ["\u6771\u4eac", *good[1:]])
    put("many.json", good * 20)
    (folder / "empty.json").write_text("")
    (folder / "t.yaml").write_text("models: {tiny: {full: 0.5}}")
    return folder


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("ref.json", "same.json"), 0),
        (("ref.json", "three.json"), 1),
        (("ref.json", "three.json", "--full", "0.6"), 0),
        (("ref.json", "three.json", "--full", "0.6", "--half", "0.7"), 1),
        (("ref.json", "three.json", "--thresholds", "t.yaml", "--model", "tiny"), 0),
        (("ref.json", "three.json", "--thresholds", "t.yaml"), 1),
        (("ref.json", "empty.json"), 2),
        (("--before", "ref.json", "three.json", "--after", "ref.json", "same.json"), 0),
        (("--before", "ref.json", "same.json", "--after", "ref.json", "three.json"), 1),
        (("ref.json", "absent.json"), 3),
        (("ref.json", "same.json", "--full", "75"), 3),
        (("ref.json",), 3),
        (("ref.json", "same.json", "--before", "ref.json", "same.json"), 3),
        (("ref.json", "same.json", "--output-key", "text"), 3),
    ],
)
def test_exit_codes(place, words, code):
    done = whence(place, *words)
    assert done.returncode == code, done.stderr
    assert bool(done.stderr) == (code == 3)
    assert bool(done.stdout) == (code != 3)


def test_text(place):
    lines = whence(place, "ref.json", "three.json").stdout.splitlines()
    assert lines[0] == "FAIL               full match below the threshold"
    assert lines[1] == (
        "  full match       5 of 8 = 0.625, 95 % interval 0.306 to 0.863; threshold 0.75: not "
        "reached; too few prompts to be sure"
    )
    at = lines.index(
        "no  verdict  half  char  token  prefix  ref  tgt  prompt      first difference"
    )
    assert (
        lines[at + 1]
        == ' 1  FAIL     no       0      0       0   27    2  "prompt 1"  after "": "the answer '
        'numbe" | "no"'
    )
    assert lines[at + 4] == ' 4  PASS     yes      -      -      27   27   27  "prompt 4"'
    assert len(lines) == at + 9


def test_two_commits_in_text(place):
    out = whence(
        place, "--before", "ref.json", "same.json", "--after", "ref.json", "three.json"
    ).stdout
    assert out.startswith(
        "FAIL               full match below the threshold; 3 newly failing, 0 newly passing, p "
        "= 0.25\n"
    )
    assert "prompts            5 pass at both, 3 only before, 0 only after, 0 at neither" in out
    assert '  newly failing    1 "prompt 1", 2 "prompt 2", 3 "prompt 3"\n' in out
    assert " 1  FAIL     PASS    no " in out


def test_what_a_terminal_would_obey_is_shown_as_codes(place):
    out = whence(place, "ref.json", "nasty.json").stdout
    assert "\x1b" not in out
    assert "\u202e" not in out
    assert '"the answer numbe" | "\\x1b[31m=1+1\\u202e"' in out
    # An accent that stands first would sit on the quote before it.
    assert 'after "the": " answer number 2" | "\\u0301 answer"' in out


def test_columns_are_straight_for_wide_letters(place):
    (place / "wideref.json").write_text(
        json.dumps({"src": "\u6771\u4eac", "output": "a"})
        + "\n"
        + json.dumps({"src": "four", "output": "b"})
    )
    rows = whence(place, "wideref.json", "wideref.json").stdout.splitlines()
    assert [r for r in rows if r.endswith(('"\u6771\u4eac"', '"four"'))] == [
        ' 1  PASS     yes      -      -       1    1    1  "\u6771\u4eac"',
        ' 2  PASS     yes      -      -       1    1    1  "four"',
    ]


def test_rows_that_pass_are_left_out_first(place):
    out = whence(place, "many.json", "three.json", "--match", "position", "--rows", "4").stdout
    assert "155" not in out.split("first difference")[0].split("threshold")[0]
    table = out[out.index("first difference") :].splitlines()[1:]
    assert [r.split()[1] for r in table[:4]] == ["FAIL", "FAIL", "FAIL", "NO"]
    assert table[4] == "156 more prompts: --rows 0 shows all, --format csv too"
    every = whence(place, "many.json", "three.json", "--match", "position", "--rows", "0").stdout
    assert every.count("\n") > 160


def test_json(place):
    done = whence(
        place,
        "--before",
        "ref.json",
        "same.json",
        "--after",
        "ref.json",
        "nasty.json",
        "--format",
        "json",
    )
    data = json.loads(done.stdout)
    assert done.stdout.isascii()
    assert {k: data[k] for k in ("full_match", "half_match", "p_value")} == {
        "full_match": 5 / 8,
        "half_match": 5 / 8,
        "p_value": 0.25,
    }
    assert data["table"] == {"both": 5, "only_before": 3, "only_after": 0, "neither": 0}
    assert data["prompts"][0]["target_at"] == "\x1b[31m=1+1\u202e"
    assert data["before"]["full_match"] == 1.0
    alone = json.loads(whence(place, "ref.json", "same.json", "--format", "json").stdout)
    assert (alone["status"], alone["table"], alone["p_value"], alone["before"]) == (
        "pass",
        None,
        None,
        None,
    )


def test_csv(place):
    (place / "formula.json").write_text(json.dumps({"src": "=1+1", "output": "a=b\nc"}))
    (place / "other.json").write_text(json.dumps({"src": "=1+1", "output": "a+b"}))
    rows = list(
        csv.DictReader(
            io.StringIO(whence(place, "formula.json", "other.json", "--format", "csv").stdout)
        )
    )
    assert len(rows) == 1
    assert (rows[0]["verdict"], rows[0]["half"], rows[0]["first_character"], rows[0]["longer"]) == (
        "FAIL",
        "yes",
        "1",
        "",
    )
    assert (rows[0]["prompt"], rows[0]["reference_at"], rows[0]["target_at"]) == (
        "'=1+1",
        "'=b\\nc",
        "'+b",
    )
