"""`whence show` on a run made by hand: exact text, and every view safe against names nobody should
trust.
"""

import csv
import io
import json
import math

import ml_dtypes
import numpy as np
import pytest

from whence.errors import UsageError
from whence.records import (
    Call,
    External,
    Increment,
    Kept,
    MemoryRun,
    Note,
    Program,
    Record,
    Ref,
    RunInfo,
    Statistics,
    Step,
)
from whence.report import run as show
from whence.report import tables
from whence.report.run import Choice

EVERYTHING = Choice()


def statistics(array):
    wide = np.asarray(array, np.float64)
    finite = wide[np.isfinite(wide)]
    figures = (
        (finite.min(), finite.max(), finite.mean(), finite.std(), math.sqrt((finite**2).sum()))
        if finite.size
        else (None,) * 5
    )
    return Statistics(
        wide.size,
        *(None if f is None else float(f) for f in figures),
        int(np.isnan(wide).sum()),
        int(np.isinf(wide).sum()),
        int((wide == 0).sum()),
    )


@pytest.fixture
def run():
    arrays = {
        0: np.array([[1, 2, 3]], np.int64),
        1: np.arange(8, dtype=np.float32).reshape(1, 8) / 4,
        2: np.linspace(-1, 1, 24, dtype=np.float32).reshape(1, 3, 8).astype(ml_dtypes.bfloat16),
        3: np.array([[1.0, np.nan], [np.inf, -2.0]], np.float32),
    }
    records = [
        Record(
            0,
            "int64",
            (1, 3),
            hash="0" * 32,
            statistics=statistics(arrays[0]),
            elements=Kept(0, 0, 24),
        ),
        Record(
            1,
            "float32",
            (1, 8),
            statistics=statistics(arrays[1]),
            elements=External("model.safetensors", 64, 32),
        ),
        Record(
            2,
            "bfloat16",
            (1, 3, 8),
            statistics=statistics(arrays[2]),
            elements=Kept(0, 64, 48),
            columns={"kurtosis": 1.5},
        ),
        Record(3, "float32", (2, 2), statistics=statistics(arrays[3]), elements=Kept(0, 128, 16)),
        Record(4, "float16", (0, 4), why="over --max-bytes"),
    ]
    calls = []
    for step in (0, 1):
        first = 3 * step
        calls += [
            Call(
                first,
                "",
                "model",
                step,
                first,
                op_type="Tiny",
                refs=(Ref("input.ids", 0), Ref("output.0", 3)),
                source="m.Tiny",
            ),
            Call(
                first + 1,
                "embed",
                "model",
                step,
                first + 1,
                op_type="Embedding",
                parent=first,
                number="1",
                leaf=True,
                program="p1",
                refs=(Ref("param.weight", 1), Ref("input.0", 0, "identity"), Ref("output.0", 2)),
                arguments={"padding": None},
            ),
            Call(
                first + 2,
                "head.proj",
                "model",
                step,
                first + 2,
                op_type="Linear",
                parent=first,
                number="2_1",
                leaf=True,
                no_program="random numbers",
                refs=(Ref("input.0", 2, "content"), Ref("output.0", 3), Ref("output.1", 4)),
            ),
        ]
    info = RunInfo(
        command=("python", "infer.py", "--text", "two words"),
        started="2026-11-20T18:00:00+00:00",
        user="ada",
        host="h1",
        cwd="/work",
        versions={"python": "3.11.7", "torch": "2.13.0"},
        git="abc123 (dirty)",
        seed=7,
        deterministic=True,
        options={"keep": "full", "steps": [0, 2]},
        environment={"OMP_NUM_THREADS": "2"},
        settings={"exit_code": 0, "duration_s": 1.5},
    )
    return MemoryRun(
        calls,
        records,
        arrays,
        path="runs/ref",
        info=info,
        programs={"p1": Program("p1", (), ("input.0",), ())},
        notes=[
            Note("budget", "elements of step 1 not kept", "", 1),
            Note("hook-error", "x", "head"),
            Note("hook-error", "x", "tail"),
        ],
        steps=[Step("model", 0, 88, True), Step("model", 1, 0, False)],
    )


HEADING = """\
runs/ref   whence run   complete
  command      python infer.py --text 'two words'
  started      2026-11-20T18:00:00+00:00 by ada on h1 in /work
  exit code    0 after 1.5 s
  versions     python 3.11.7, torch 2.13.0
  git          abc123 (dirty)
  seed         7, deterministic
  options      keep=full steps='[0, 2]'
  environment  OMP_NUM_THREADS=2
  steps        model, rank 0: 2 steps, 0 B to 88 B of new elements each; no elements kept of step 1
  calls        6 calls
  records      5 tensors, 120 B; elements of 120 B are kept
               param   1  32 B  32 B kept
               output  3  64 B  64 B kept
               input   1  24 B  24 B kept
  programs     2 of 4 leaf calls can be replayed (1 program recorded)
               2 calls cannot: random numbers
  notes        budget: elements of step 1 not kept
               hook-error at head and 1 more: x"""


def test_heading(run):
    assert "\n".join(show.heading(run)) == HEADING


def test_a_command_that_failed_is_said_first(run):
    run.info.settings["exit_code"] = 130
    assert (
        next(show.heading(run))
        == "runs/ref   whence run   complete, but the command ended with exit code 130"
    )


def test_text_lists_calls_and_records(run):
    expected = """\
2_1   head.proj   Linear   step 1, rank 0
  input.0   bfloat16  [1, 3, 8]  min -1  max 1  mean 0  std 0.60188  norm 2.9486  nan 0  inf 0  #2 (content) kurtosis 1.5
  output.0  float32   [2, 2]     min -2  max 1  mean -0.5  std 1.5  norm 2.23607  nan 1  inf 1  #3
  output.1  float16   [0, 4]     min -  max -  mean -  std -  norm -                  #4 [over --max-bytes]"""
    lines = list(show.text(run, Choice("head.*", step=1)))
    assert "\n".join(lines[: HEADING.count("\n") + 1]) == HEADING
    body = "\n".join(lines[HEADING.count("\n") + 2 :])
    assert [line.split() for line in body.splitlines()] == [
        line.split() for line in expected.splitlines()
    ]


def test_a_limit_says_how_many_more(run):
    lines = list(show.text(run, EVERYTHING, limit=3))
    assert (
        lines[-1]
        == "... 11 more records: show them with --all, or select some with --name PATTERN, --ids or --step"
    )


def test_tree_is_written_once_for_equal_steps(run):
    assert (
        "\n".join(show.tree(run, EVERYTHING))
        == """\
model   rank 0   steps 0-1
0    model          Tiny       float32 [2, 2]
1      embed        Embedding  bfloat16 [1, 3, 8]
2_1      head.proj  Linear     float32 [2, 2], float16 [0, 4]
"""
    )


def test_table(run):
    assert (
        "\n".join(show.table(run, Choice("embed", step=0)))
        == """\
Index  Step  Rank  Module              Min   Max   Mean       Std
    0     0     0  embed:param.weight    0  1.75  0.875  0.572822
    1     0     0  embed:input.0         1     3      2  0.816497
    2     0     0  embed:output.0       -1     1      0   0.60188"""
    )


def test_table_names_are_whole(run):
    name = "a" * 300
    calls = [Call(0, name, "model", 0, 0, refs=(Ref("output.0", 0),))]
    long = MemoryRun(calls, run.records[:1], {})
    assert name in "\n".join(show.table(long, EVERYTHING))


def test_csv(run):
    rows = list(csv.DictReader(io.StringIO("\n".join(show.csv(run, Choice(ids=("2",), step=0))))))
    assert [r["slot"] for r in rows] == ["input.0", "output.0", "output.1"]
    assert rows[0]["scope"] == "head.proj"
    assert rows[0]["kurtosis"] == "1.5"
    assert float(rows[1]["std"]) == 1.5
    assert (rows[1]["nan"], rows[1]["inf"], rows[1]["shape"]) == ("1", "1", "2x2")
    assert (rows[2]["nan"], rows[2]["kept"], rows[2]["why"]) == ("", "no", "over --max-bytes")


def test_json_is_one_object_with_everything(run):
    whole = json.loads("\n".join(show.json(run, EVERYTHING)))
    assert whole["info"]["command"][0] == "python"
    assert whole["bytes"]["output"] == {"records": 3, "bytes": 64, "kept_bytes": 64}
    assert len(whole["calls"]) == 6
    assert whole["calls"][2]["refs"][1]["record"]["statistics"]["nan"] == 1
    assert whole["programs"]["usable_calls"] == 2
    assert json.loads("\n".join(show.json(run, Choice("nothing"))))["calls"] == []


def test_json_of_arguments_that_json_cannot_hold():
    calls = [Call(0, "", "model", 0, 0, arguments={"fill": float("-inf"), "many": [float("nan")]})]
    whole = json.loads("\n".join(show.json(MemoryRun(calls, [], {}), EVERYTHING)))
    assert whole["calls"][0]["arguments"] == {"fill": "-inf", "many": ["nan"]}


def test_one_record(run):
    assert (
        "\n".join(show.one(run, "head.proj", EVERYTHING))
        == """\
head.proj:output.0   Linear   step 0, rank 0, call 2_1
  record      #3  float32 [2, 2]  on cpu
  elements    kept, 16 B (shard 0, offset 128)
  seen as     output.0 of model (call 0, step 0)
              output.0 of head.proj (call 2_1, step 0)
              output.0 of model (call 0, step 1)
              output.0 of head.proj (call 2_1, step 1)
  slots       input.0, output.0, output.1
  program     cannot be replayed: random numbers
  statistics  min -2  max 1  mean -0.5  std 1.5  norm 2.23607
              4 elements: NaN 1, Inf 1, zero 0

  values at [:, :]
    1  nan
  inf   -2

  histogram
       -2 .. -1.8125 1 ########################################
  -1.8125 ..  -1.625 0
   -1.625 .. -1.4375 0
  -1.4375 ..   -1.25 0
    -1.25 .. -1.0625 0
  -1.0625 ..  -0.875 0
   -0.875 .. -0.6875 0
  -0.6875 ..    -0.5 0
     -0.5 .. -0.3125 0
  -0.3125 ..  -0.125 0
   -0.125 ..  0.0625 0
   0.0625 ..    0.25 0
     0.25 ..  0.4375 0
   0.4375 ..   0.625 0
    0.625 ..  0.8125 0
   0.8125 ..       1 1 ########################################
  NaN 1, Inf 1"""
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("embed", ("embed", "output.0")),
        ("embed:input.0", ("embed", "input.0")),
        ("embed:param", ("embed", "param.weight")),
        ("2_1", ("head.proj", "output.0")),
        ("2_1:output.1", ("head.proj", "output.1")),
        ("model", ("", "output.0")),
        ("model:input", ("", "input.ids")),
        ("0", ("", "output.0")),
    ],
)
def test_names_that_mean_a_record(run, name, expected):
    call, ref = show.find(run, name, Choice(step=1))
    assert (call.scope, ref.slot) == expected
    assert call.step == 1


def test_a_tree_number_goes_before_a_name():
    calls = [
        Call(0, "", "model", 0, 0, op_type="Net", refs=(Ref("output.0", 0),)),
        Call(1, "0", "model", 0, 1, op_type="Up", parent=0, number="1", refs=(Ref("output.0", 0),)),
        Call(
            2, "1", "model", 0, 2, op_type="Down", parent=0, number="2", refs=(Ref("output.0", 0),)
        ),
        Call(
            3, "7", "model", 0, 3, op_type="End", parent=0, number="3", refs=(Ref("output.0", 0),)
        ),
    ]
    sequential = MemoryRun(calls, [Record(0, "float32", ())], {}, path="runs/ref")
    printed = [line.split() for line in show.tree(sequential, EVERYTHING)][1:-1]
    for number, name, *_ in printed:
        call, _ = show.find(sequential, number, EVERYTHING)
        assert (call.number, show.find(sequential, f"{number}:output", EVERYTHING)[0]) == (
            number,
            call,
        )
        assert name in (call.scope, call.root), "what the tree prints as this number"
    assert show.find(sequential, "7", EVERYTHING)[0].id == 3, "a name that is not a number here"
    said = show.other_meaning(sequential, "1", EVERYTHING)
    assert said == (
        "1 is taken as the tree number of 0 (Up); the module named 1 (Down) has number 2: whence "
        "show runs/ref 2"
    )
    assert show.other_meaning(sequential, "1:output.0", EVERYTHING).endswith(" 2:output.0")
    for name in ("2", "3", "7", "nothing", "model"):
        assert show.other_meaning(sequential, name, EVERYTHING) == "", name


def test_a_tree_number_that_is_the_modules_own_name_is_no_riddle():
    calls = [Call(0, "1", "model", 0, 0, number="1", refs=(Ref("output.0", 0),))]
    run = MemoryRun(calls, [Record(0, "float32", ())], {})
    assert show.find(run, "1", EVERYTHING)[0].id == 0
    assert show.other_meaning(run, "1", EVERYTHING) == ""


def test_calls_are_shown_in_the_order_they_began():
    calls = [
        Call(0, "a.b", "m", 0, 2, number="1_1"),
        Call(1, "a", "m", 0, 1, number="1"),
        Call(2, "", "m", 0, 0),
    ]
    assert [call.id for call in EVERYTHING.calls(MemoryRun(calls, [], {}))] == [2, 1, 0]


def test_names_that_mean_nothing_say_what_is_near(run):
    with pytest.raises(UsageError, match=r"no call named haed\.proj; nearest: head\.proj"):
        show.find(run, "haed.proj", EVERYTHING)
    with pytest.raises(
        UsageError, match=r"has no slot grad; slots: param\.weight, input\.0, output\.0"
    ):
        show.find(run, "embed:grad", EVERYTHING)
    with pytest.raises(UsageError, match="in step 9"):
        show.find(run, "embed", Choice(step=9))
    with pytest.raises(UsageError, match="not a regular expression"):
        list(show.table(run, Choice("re:(")))
    assert (
        list(show.text(run, Choice("nothing")))[-1]
        == "none of 6 calls in steps 0-1 matches; `--tree` lists names and numbers"
    )


def test_a_record_without_elements_says_why(run):
    assert (
        list(show.one(run, "head.proj:output.1", EVERYTHING))[-1] == "  no values: over --max-bytes"
    )


def test_increment_and_empty_run():
    record = Record(0, "float32", (2, 3), elements=Increment(4, 1, 0, 0, 8))
    lines = "\n".join(
        show.one(
            MemoryRun([Call(0, "a", "m", 0, 0, refs=(Ref("output.0", 0),))], [record], {}),
            "a",
            EVERYTHING,
        )
    )
    assert "kept as 8 B appended to record #4 along axis 1" in lines
    empty = MemoryRun([], [], {}, ended="killed in step 0")
    assert "killed in step 0" in next(show.heading(empty))
    assert list(show.tree(empty, EVERYTHING)) == ["no call was captured"]
    assert len(list(show.table(empty, EVERYTHING))) == 1


NASTY = "=cmd|' /C calc'!A0\x1b[31m\u202egnp\x07\x9b2J"


def test_nothing_a_terminal_or_spreadsheet_obeys_comes_through():
    calls = [
        Call(
            0,
            NASTY,
            NASTY,
            0,
            0,
            op=NASTY,
            op_type=NASTY,
            number=NASTY,
            refs=(Ref(NASTY, 0),),
            notes=(NASTY,),
            error=NASTY,
            source=NASTY,
            no_program=NASTY,
            arguments={NASTY: NASTY},
        )
    ]
    record = Record(
        0,
        NASTY,
        (2,),
        device=NASTY,
        why=NASTY,
        columns={NASTY: 1.0},
        subclass=NASTY,
        hash=NASTY,
        elements=External(NASTY, 0, 8),
    )
    info = RunInfo(
        command=(NASTY,),
        user=NASTY,
        started=NASTY,
        versions={NASTY: NASTY},
        settings={NASTY: NASTY},
        environment={NASTY: NASTY},
    )
    run = MemoryRun(
        calls,
        [record],
        {},
        path=NASTY,
        info=info,
        notes=[Note(NASTY, NASTY, NASTY)],
        steps=[Step(NASTY, 0, 0, False)],
        ended=NASTY,
    )
    views = [
        show.text(run, EVERYTHING),
        show.tree(run, EVERYTHING),
        show.table(run, EVERYTHING),
        show.csv(run, EVERYTHING),
    ]
    views += [
        show.json(run, EVERYTHING),
        show.one(run, NASTY + "/" + NASTY, EVERYTHING),
        show.one_json(run, NASTY, EVERYTHING),
    ]
    for view in views:
        for line in view:
            assert line.isprintable(), line
    for row in csv.reader(io.StringIO("\n".join(show.csv(run, EVERYTHING)))):
        assert not any(cell.startswith(("=", "+", "-", "@")) for cell in row)


@pytest.mark.parametrize(
    "array",
    [
        np.float32(3.5).reshape(()),
        np.zeros((0, 3), np.float32),
        np.zeros(5, np.bool_),
        np.array([1 + 2j, 3 - 4j], np.complex64),
        np.array([2**63 - 1, -(2**63)], np.int64),
        np.full((2, 2), np.nan, np.float16),
        np.array([1.7e308, -1.7e308]),
        np.arange(10_000, dtype=np.float32).reshape(2, 5, 1000).astype(ml_dtypes.float8_e4m3fn),
    ],
)
def test_every_kind_of_values_is_shown(array):
    lines = [*show.corners(array), *show.histogram(array)]
    assert lines
    assert all(line.isprintable() for line in lines)
    counted = sum(
        int(line.split(" .. ")[1].split(" #")[0].split(maxsplit=1)[1].replace(" ", ""))
        for line in lines
        if " .. " in line
    )
    assert counted == int(np.isfinite(np.asarray(array).astype(np.complex128)).sum())


def test_corners_of_a_large_array():
    array = np.arange(2 * 10 * 100, dtype=np.int32).reshape(2, 10, 100)
    assert list(show.corners(array)) == [
        "  values at [0, :, :]",
        "    0    1    2  ...   97   98   99",
        "  100  101  102  ...  197  198  199",
        "  200  201  202  ...  297  298  299",
        "  ...",
        "  700  701  702  ...  797  798  799",
        "  800  801  802  ...  897  898  899",
        "  900  901  902  ...  997  998  999",
        "  values at [1, :, :]",
        "  1000  1001  1002  ...  1097  1098  1099",
        "  1100  1101  1102  ...  1197  1198  1199",
        "  1200  1201  1202  ...  1297  1298  1299",
        "   ...",
        "  1700  1701  1702  ...  1797  1798  1799",
        "  1800  1801  1802  ...  1897  1898  1899",
        "  1900  1901  1902  ...  1997  1998  1999",
    ]


def test_small_words():
    assert tables.size(0) == "0 B"
    assert tables.size(412_000_000) == "412 MB"
    assert tables.size(1_250_000_000) == "1.25 GB"
    assert tables.size(5e15) == "5e+03 TB"
    assert tables.count(1204, "call") == "1 204 calls"
    assert tables.count(1, "call") == "1 call"
    assert tables.number(None) == "-"
    assert tables.cell("-1+2") == "'-1+2"
    assert tables.clean("a\x1bb") == "a\\x1bb"
