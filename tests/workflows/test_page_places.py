"""Code, operators, calls without a partner and texts of tokens: what a page takes from beside the
comparison, and what it leaves alone.
"""

import dataclasses
import json
import os
import socket
from types import SimpleNamespace

import pytest

import whence
from whence.comparison.replays.program_difference import difference
from whence.records import Operation, Program, RunInfo
from whence.results import Generation, Prompted, Token
from whence.workflows.page.measure import page_of
from whence.workflows.page.places import Listed, differing, excerpt, page_places, side_by_side
from whence.workflows.page.vocabulary import is_tokenizer, vocabulary
from whence.workflows.reopen import reopened


def run_in(folder, **given):
    info = {
        "cwd": str(folder),
        "host": socket.gethostname(),
        "started": "2100-01-01T00:00:00+00:00",
    }
    return SimpleNamespace(info=RunInfo(**(info | given)))


@pytest.fixture
def code(tmp_path):
    (tmp_path / "infer.py").write_text("\n".join(f"line {n}" for n in range(1, 21)))
    return tmp_path


def test_a_few_lines_around_the_one_that_is_meant(code):
    shown = excerpt(f"{code}/infer.py:10", run_in(code), "target")
    assert (shown.side, shown.file, shown.line, shown.first) == ("target", "infer.py", 10, 7)
    assert shown.lines == tuple(f"line {n}" for n in range(7, 14))
    assert not shown.changed
    assert excerpt("infer.py:1", run_in(code), "target").lines[0] == "line 1"
    assert excerpt("infer.py:20", run_in(code), "target").lines[-1] == "line 20"


def test_a_file_that_is_newer_than_the_run_is_said_to_be(code):
    old = run_in(code, started="2001-01-01T00:00:00+00:00")
    assert excerpt("infer.py:10", old, "target").changed
    assert not excerpt("infer.py:10", run_in(code, started="no time"), "target").changed


@pytest.mark.parametrize(
    "source",
    ["", "infer.py", "infer.py:0", "infer.py:21", "gone.py:1", "infer.py:x", "torch.nn.Linear"],
)
def test_nothing_where_there_is_no_such_line(code, source):
    assert excerpt(source, run_in(code), "target") is None


def test_no_file_but_python_code_of_this_machine_is_read(code):
    (code / "secret.txt").write_text("password\n" * 9)
    (code / "folder.py").mkdir()
    (code / "bytes.py").write_bytes(b"\xff\xfe\x00" * 9)
    os.mkfifo(code / "pipe.py")
    (code / "null.py").symlink_to("/dev/zero")
    for name in ("secret.txt", "folder.py", "bytes.py", "pipe.py", "null.py", "/etc/passwd"):
        assert excerpt(f"{name}:1", run_in(code), "target") is None
    assert excerpt("infer.py:1", run_in(code, host="elsewhere"), "target") is None


def program(*operations):
    return Listed(Program("p", tuple(operations), ("input.0",), (), ("param.weight",)))


A = Operation("own.scale.default", ({"in": 0}, 1.0))
B = Operation("own.norm.default", ({"op": [0, 0]}, {"param": "param.weight"}, 1e-5))
C = Operation("own.add.default", ({"op": [1, 0]}, {"op": [0, 0]}))


def test_operators_side_by_side():
    other = Operation(B.name, (*B.args[:2], 1e-2))
    rows = side_by_side(program(A, B, C), program(A, other, C))
    assert [row.mark for row in rows] == ["", "differs", ""]
    assert rows[0].reference == "%0 = own.scale(input.0, 1.0)"
    assert rows[1].target == "%1 = own.norm(%0, weight, 0.01)"
    assert differing(program(A, B, C), program(A, other, C)) == (1, 1)
    assert differing(program(A, B, C), program(A, other, C), B.name) == (1, 1)
    assert differing(program(A, B, C), program(A, other, C), C.name) == (-1, -1)
    assert differing(program(A, B, C), program(A, B, C)) == (-1, -1)


def test_an_extent_is_the_same_whatever_its_input_is_called():
    def view(slot):
        made = Operation("own.view.default", ({"in": 0}, [{"dim": [0, 1]}, 4]))
        return Listed(Program("p", (made,), (slot,), ()))

    (row,) = side_by_side(view("input.0"), view("input.x"))
    assert row.mark == ""
    assert row.reference == "%0 = own.view(input.0, [input.0.shape[1], 4])"


def test_what_only_moved_is_the_same_and_what_reads_another_differs():
    shifted = Operation(C.name, ({"op": [2, 0]}, {"op": [0, 0]}))
    extra = Operation("own.relu.default", ({"op": [0, 0]},))
    moved = Operation(B.name, ({"op": [0, 0]}, *B.args[1:]))
    rows = side_by_side(program(A, B, C), program(A, extra, moved, shifted))
    assert [row.mark for row in rows] == ["", "only target", "", ""]
    swapped = Operation(C.name, ({"op": [0, 0]}, {"op": [1, 0]}))
    assert side_by_side(program(A, B, C), program(A, B, swapped))[2].mark == "differs"
    assert side_by_side(program(A, B, C), program(A, B))[2].mark == "only reference"


def test_operators_are_paired_as_the_answer_pairs_them():
    again = Operation(A.name, ({"op": [0, 0]}, *A.args[1:]))
    shifted = Operation(C.name, ({"op": [2, 0]}, {"op": [0, 0]}))
    reference, target = program(A, B, C), program(A, again, B, shifted)
    assert [row.mark for row in side_by_side(reference, target)] == ["", "only target", "", ""]
    said = difference(reference.program, target.program).words
    assert said == "the reference runs own.norm where the target runs own.scale"


def test_of_long_programs_what_differs_is_shown_with_its_neighbours():
    long = [Operation("own.step.default", ({"in": 0}, k)) for k in range(500)]
    other = [*long[:250], Operation("own.step.default", ({"in": 0}, -1)), *long[251:]]
    rows = side_by_side(program(*long), program(*other))
    assert [row.mark for row in rows] == ["left out", "", "", "", "differs", "", "", "", "left out"]
    assert [row.reference for row in rows if row.mark == "left out"] == ["247", "246"]
    every = [Operation("own.step.default", ({"in": 0}, -k - 1)) for k in range(500)]
    assert len(side_by_side(program(*long), program(*every))) < 60


def test_defaults_have_their_names_and_values():
    pytest.importorskip("torch")
    norm = "aten.native_layer_norm.default"
    args = ({"in": 0}, [4], None, None)
    rows = side_by_side(
        program(Operation(norm, (*args, 1e-5))), program(Operation(norm, (*args, 0.01)))
    )
    assert "normalized_shape=[4], weight=None, bias=None, eps=1e-05)" in rows[0].reference
    assert "eps=0.01)" in rows[0].target


def test_calls_inside_are_lines_of_the_program_around_them():
    add = Operation("own.add.default", ({"in": 0}, {"in": 1}))

    def around(names, outputs, inputs, calls):
        made = Program("p", (add,), inputs, outputs, calls=calls)
        return Listed(made, names)

    reference = around(
        ["norm", "mlp"],
        (("0:input.0", {"in": 0}), ("1:input.0", {"in": 1}), ("output.0", {"op": [0, 0]})),
        ("input.0", "0:output.0"),
        ((0, 0), (1, 0)),
    )
    target = around(
        ["norm", "clip", "mlp"],
        (("0:input.0", {"in": 0}), ("1:input.0", {"in": 1}), ("2:input.0", {"in": 2})),
        ("input.0", "0:output.0", "1:output.0"),
        ((0, 0), (1, 0), (2, 0)),
    )
    rows = [(row.reference, row.target, row.mark) for row in side_by_side(reference, target)]
    assert rows == [
        ("norm(input.0)", "norm(input.0)", ""),
        ("", "clip(norm)", "only target"),
        ("mlp(norm)", "mlp(clip)", "differs"),
        ("%0 = own.add(input.0, norm)", "%0 = own.add(input.0, norm)", ""),
    ]


def generated(*tokens):
    return SimpleNamespace(
        generation=Generation(
            False,
            (Prompted((1, 2), "m", 0, 0, 0, 0, 0, 1, 1, 1, 1, "equal", number=1),),
            tuple(Token(1, k, k, 0, k, 0, a, b, "noise") for k, (a, b) in enumerate(tokens)),
            1,
            1,
        )
    )


BYTE_LEVEL = {
    "model": {
        "type": "BPE",
        "vocab": {"the": 1, "\u0120cat": 2, "\u010a": 3, "\u00c3\u00a9": 4, "x": 5},
    },
    "decoder": {"type": "ByteLevel"},
    "added_tokens": [{"id": 6, "content": "<|end|>"}],
}
PIECES = {
    "model": {"type": "Unigram", "vocab": [["<unk>", 0.0], ["\u2581the", -1.0], ["<0x0A>", -2.0]]}
}


def test_tokens_have_text_where_a_tokenizer_is_at_hand(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(BYTE_LEVEL))
    made = generated((3, 4), (6, 99))
    texts = dict(vocabulary(made, None, tmp_path))
    assert texts == {1: "the", 2: " cat", 3: "\n", 4: "\u00e9", 6: "<|end|>"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(PIECES))
    assert dict(vocabulary(made, None, tmp_path)) == {1: " the", 2: "\n"}
    run = run_in(tmp_path.parent, command=("python", "go.py", f"--model={tmp_path}"))
    assert dict(vocabulary(made, (run, run))) == {1: " the", 2: "\n"}
    assert vocabulary(made, (run_in(tmp_path.parent),) * 2) == ()
    assert vocabulary(SimpleNamespace(generation=None), None, tmp_path) == ()


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"model": {}}', '{"model": {"vocab": 3}}', "{" * 9999]
)
def test_what_is_no_tokenizer_is_none(tmp_path, text):
    (tmp_path / "tokenizer.json").write_text(text)
    assert not is_tokenizer(tmp_path)
    assert not is_tokenizer(tmp_path / "nothing")
    assert vocabulary(generated((1, 2)), None, tmp_path) == ()


torch = pytest.importorskip("torch")


class Net(torch.nn.Module):
    def __init__(self, scale=1.0, clip=False):
        super().__init__()
        self.up, self.norm, self.down = (
            torch.nn.Linear(16, 32),
            torch.nn.LayerNorm(32, eps=1e-5 if scale == 1.0 else 1e-2),
            torch.nn.Linear(32, 8),
        )
        self.clip = torch.nn.Hardtanh(-0.1, 0.1) if clip else None

    def forward(self, x):
        h = self.up(x)
        h = self.norm(h)
        if self.clip is not None:
            h = self.clip(h)
        return self.down(h)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    place = tmp_path_factory.mktemp("places")
    torch.manual_seed(0)
    state, x = Net().state_dict(), torch.randn(4, 16)
    for name, given in (("ref", {}), ("eps", {"scale": 2.0}), ("clip", {"clip": True})):
        model = Net(**given).eval()
        model.load_state_dict(state)
        with torch.no_grad(), whence.capture(model, place / name):
            model(x)
    return place


@pytest.mark.torch
def test_a_finding_has_its_line_and_both_programs(runs):
    page = page_of(whence.compare(runs / "ref", runs / "eps"))
    (place,) = page.places
    (code,) = place.excerpts
    assert code.lines[code.line - code.first].strip() == "h = self.norm(h)"
    assert code.file.endswith("test_page_places.py")
    (row,) = [row for row in place.operators if row.mark]
    assert row.mark == "differs"
    assert ("eps=1e-05" in row.reference, "eps=0.01" in row.target) == (True, True)
    assert not place.same
    assert place.arguments == "native_layer_norm: eps is 1e-05 in the reference, 0.01 in the target"
    call = next(call for call in page.calls if call.name == "norm")
    assert call.added == pytest.approx(call.error, rel=0.1)
    assert next(c for c in page.calls if c.name == "down").added < 1e-5 < 0.01 < call.error
    assert next(c for c in page.calls if c.name == "up").added == 0.0


@pytest.mark.torch
def test_calls_without_a_partner_stand_between_those_that_have_one(runs):
    page = page_of(whence.compare(runs / "ref", runs / "clip"))
    names = [call.name for call in page.calls]
    (alone,) = page.unpaired
    assert (alone.side, alone.name, alone.op_type) == ("target", "clip", "Hardtanh")
    assert names[alone.parent] == "Net"
    assert names[alone.after] == "norm"
    assert [names[k] for k in alone.reads] == ["norm"]
    assert [names[k] for k in alone.readers] == ["down"]
    assert page_of(whence.compare(runs / "ref", runs / "eps")).unpaired == ()


class Patched:
    """A run whose programs are others."""

    def __init__(self, run, program):
        self._run, self._program = run, program

    def __getattr__(self, name):
        return getattr(self._run, name)

    @property
    def programs(self):
        return dict.fromkeys(self._run.programs, self._program)


@pytest.mark.torch
@pytest.mark.parametrize(
    "arguments",
    [
        ({"op": 5},),
        ({"op": []}, {"in": "x"}),
        ({"param": None}, {"mul": 3}, {}),
        ({"in": 1e9},),
        ({"unknown": {"a": 1}}, "text"),
    ],
)
def test_a_program_that_makes_no_sense_ends_no_page(runs, arguments):
    """A run is data that anybody may have written."""
    compared = whence.compare(runs / "ref", runs / "eps")
    aligned, _ = reopened(compared)
    broken = Program(
        "p",
        (Operation("aten.mul.Tensor", arguments),),
        ("\u00b2:output.0",),
        (("9:input.0", {"in": 7}), ("0:input.0", {"op": "x"})),
        calls=((0, 0), (9, 0)),
    )
    (place,) = page_places(
        compared, dataclasses.replace(aligned, target=Patched(aligned.target, broken))
    )
    assert place.excerpts
