"""Whether a program repeats itself: runs of one command in fresh processes, bit for bit."""

import tempfile
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from torch import nn

import inside
import warm
import whence
from whence.records.marks import EMPTY_IS_READ
from whence.report.repeat import repeated_text
from whence.results import Repeated, SourceKind, Status
from whence.workflows.repeat import programs
from whence.workflows.repeat.repeat import Repetition, Walk, words_and_advice

pytestmark = pytest.mark.torch

# A setting and a loop, with the number of the run; `BEFORE` of the setting is what differs.
TRAIN = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(8, 16), nn.Dropout(DROP), nn.Linear(16, 3)

    def forward(self, x):
        return self.down(self.drop(torch.relu(self.up(x))))

net = Net()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
data, labels = torch.randn(12, 8), torch.arange(12) % 3
BEFORE
# loop
for rows in torch.arange(12).split(4):
    loss = nn.functional.cross_entropy(net(data[rows]), labels[rows])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
MIXER = """
class Mixer(nn.Module):
    def forward(self, x):
        CODE

net = nn.Sequential(nn.Linear(8, 8), Mixer(), nn.Linear(8, 3))
x = torch.randn(4, 8)
# loop
with torch.no_grad():
    net(x)
    net(x)
"""
NUMPY = "return x + torch.from_numpy(x.numpy().sum(0) + run)"


def repeated(folder, text, *, times=2, level="modules", seed=0) -> Repeated:
    """The answer about a program that runs several times; `run` is the number of the run in it."""
    place = Path(tempfile.mkdtemp(dir=folder))
    script = place / "script.py"
    script.write_text(text)
    before, loop = text.split("# loop\n")
    runs = []
    for number in range(times):
        names = {"torch": torch, "nn": nn, "run": number}
        torch.manual_seed(seed)
        exec(compile(before, str(script), "exec"), names)  # noqa: S102 - a script of this test
        lines = "\n" * before.count("\n") + loop
        with whence.capture(names["net"], place / f"run-{number}", level=level):
            exec(compile(lines, str(script), "exec"), names)  # noqa: S102 - the same
        runs.append(whence.open_run(str(place / f"run-{number}")))
    return Repetition(runs, ("python", "script.py"), {"level": level}).result()


def training(*, drop=0.0, before="") -> str:
    return TRAIN.replace("DROP", str(drop)).replace("BEFORE", before)


def inference(code) -> str:
    return MIXER.replace("CODE", code)


def test_a_seeded_training_repeats(tmp_path):
    result = repeated(tmp_path, training(drop=0.3))
    assert result.status == Status.SAME
    assert result.groups == ((1, 2),)
    assert result.sources == ()
    assert result.tensors > 100
    assert result.gradient is None
    assert result.losses == ()


@pytest.mark.parametrize("level", ["modules", "op"])
def test_a_seeded_inference_repeats(level, tmp_path):
    code = "return x + torch.empty(4, 8).fill_(2.0)"
    result = repeated(tmp_path, inference(code), level=level)
    assert result.status == Status.SAME


def test_dropout_without_a_seed_is_named_with_what_it_touches(tmp_path):
    result = repeated(tmp_path, training(drop=0.3, before="torch.manual_seed(run)"))
    first = result.first
    assert (first.kind, first.scope, first.slot) == (SourceKind.RANDOM, "drop", "input.drawn.0")
    assert first.is_certain
    assert "other random numbers (aten.bernoulli_" in first.words
    assert result.next.startswith("whence repeat --seed 0 -- ")
    assert result.gradient.step == 0
    assert 0.9 < result.gradient.share <= 1
    assert 0 < result.gradient.error < 2
    assert [loss.step for loss in result.losses] == [0, 2]
    assert result.losses[0].first != result.losses[0].second
    assert result.end[0] == "parameters after step 2"
    assert result.end[1] > 0


def test_a_draw_that_may_not_be_what_differs_is_no_certain_cause(tmp_path):
    """The numbers drawn are equal, and something else in the call is not."""
    result = repeated(tmp_path, inference("return x + torch.rand(4, 8) * 0 + run"))
    assert result.first.kind == SourceKind.CODE and result.first.is_certain
    # By chances that are computed: not recorded.
    code = "return x + torch.bernoulli(torch.sigmoid(x)) * 0 + run"
    result = repeated(tmp_path, inference(code))
    assert (result.first.kind, result.first.is_certain) == (SourceKind.RANDOM, False)
    assert "these differ, or an operator" in result.first.words
    assert result.next.startswith("whence repeat --level op -- ")
    result = repeated(tmp_path, inference(code), level="op")
    assert (result.first.kind, result.first.op_type) == (SourceKind.ARGUMENT, "add")


def test_another_order_of_the_data_is_told_from_other_data(tmp_path):
    shuffled = "data = data[torch.arange(12) if run else torch.arange(12).flip(0)]"
    result = repeated(tmp_path, training(before=shuffled))
    assert (result.first.kind, result.first.slot) == (SourceKind.INPUT, "input.0")
    assert "another order: all 4 of its rows" in result.first.words
    result = repeated(tmp_path, training(before="data = data + run"))
    assert result.first.kind == SourceKind.INPUT
    assert result.first.words == "the program gives it other data"


def test_labels_that_differ_are_named_at_the_loss(tmp_path):
    result = repeated(tmp_path, training(before="labels = (labels + run) % 3"))
    assert (result.first.kind, result.first.op_type) == (SourceKind.INPUT, "loss")


def test_values_that_were_drawn_in_another_order_are_told_from_other_values(tmp_path):
    order = """
layers = [net.up, nn.Linear(8, 16)]
net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
for layer in list(net)[:: -1 if run else 1]:
    nn.init.normal_(layer.weight)
net.append(nn.Linear(8, 3))
"""
    result = repeated(tmp_path, training(before=order))
    assert (result.first.kind, result.first.slot) == (SourceKind.STATE, "param.weight")
    assert "drawn in another order" in result.first.words
    assert any("PYTHONHASHSEED" in advice for advice in result.first.repeats_with)
    result = repeated(tmp_path, training(before="nn.init.constant_(net.up.bias, run)"))
    assert (result.first.scope, result.first.slot) == ("up", "param.bias")
    assert result.first.words == "it begins with other values"
    assert len(result.sources) == 1


def test_another_number_in_the_code_is_named_with_its_line(tmp_path):
    result = repeated(tmp_path, inference("return x * (1 + run * 1e-6)"))
    first = result.first
    assert (first.kind, first.scope, first.operator) == (SourceKind.CODE, "1", "aten.mul.Tensor")
    assert first.line.endswith(":4")
    assert "is given 1.0 in one run and 1.000001 in the other" in first.words


def test_another_order_of_summation_is_named(tmp_path):
    code = "return x + sum(x.unbind()[:: 1 if run else -1])"
    result = repeated(tmp_path, inference(code))
    assert (result.first.kind, result.first.scope) == (SourceKind.CODE, "1")
    assert result.first.words == "aten.add.Tensor is given another of the tensors at hand"
    assert result.first.error < 1e-6


def test_an_operator_that_torch_does_not_see_is_named(tmp_path):
    code = NUMPY
    result = repeated(tmp_path, inference(code))
    assert (result.first.kind, result.first.scope) == (SourceKind.OPERATOR, "1")
    result = repeated(tmp_path, inference(code), level="op")
    assert "torch does not see" in result.first.words
    assert result.first.line.endswith(":4")


def test_a_backward_of_its_own_is_named(tmp_path):
    own = """
class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * (2 + run)

net.drop.forward = lambda x: Own.apply(x)
"""
    result = repeated(tmp_path, training(before=own))
    first = result.first
    assert (first.kind, first.scope, first.phase) == (SourceKind.OPERATOR, "drop", "backward")
    assert "a backward of its own" in first.words
    assert result.gradient.differing == 2  # of the layer before it: those behind it are equal
    assert 0 < result.gradient.share < 1


def test_a_call_that_one_run_makes_is_named(tmp_path):
    text = inference("return x").replace(
        "    net(x)\n    net(x)", "    [net(x) for _ in range(1 + run)]"
    )
    result = repeated(tmp_path, text)
    assert (result.first.kind, result.first.step) == (SourceKind.CALLS, 1)
    assert result.first.words == "only the second run makes this call"


def test_a_first_run_that_differs_is_told_from_runs_that_all_do(tmp_path):
    result = repeated(tmp_path, inference("return x + (run == 0)"), times=3)
    assert result.groups == ((1,), (2, 3))
    result = repeated(tmp_path, inference("return x + run"), times=3)
    assert result.groups == ((1,), (2,), (3,))


def test_operators_that_torch_documents_are_found_in_a_program():
    from whence.records import Program
    from whence.records.program import Operation

    names = ("aten.mm.default", "aten.index_add_.default", "aten.embedding.default")
    operations = tuple(Operation(name) for name in names)
    program = Program("p", operations, (), ())
    assert programs.documented(program) == ("aten.index_add_.default",)
    backward = Program("b", (*operations, Operation("whence.gradients")), (), ())
    assert programs.documented(backward) == names[1:]


def test_memory_that_nothing_wrote_is_named(tmp_path):
    runs = [whence.open_run(path) for path in repeated(tmp_path, inference(NUMPY)).runs]
    walk = Walk(*runs)
    difference = walk.differences()[0]
    call = msgspec.structs.replace(difference.call, no_program=EMPTY_IS_READ)
    words, advice = words_and_advice(difference._replace(call=call), walk, None)
    assert words == "reads memory that torch.empty made and nothing wrote"
    assert "write it before it is read" in advice[0]


def test_what_was_not_compared_is_not_called_equal(tmp_path):
    """Without elements and hashes nothing tells that a tensor is equal."""
    net = nn.Linear(4, 4)
    with whence.capture(net, tmp_path / "run", keep="none"):
        net(torch.ones(2, 4))
    run = whence.open_run(str(tmp_path / "run"))
    unknown = [msgspec.structs.replace(r, hash="", sketch=None) for r in run.records]
    bare = SimpleNamespace(
        calls=run.calls, records=unknown, programs=run.programs, notes=run.notes,
        info=run.info, ended=run.ended, path=run.path, array=run.array,
    )  # fmt: skip
    result = Repetition([bare, bare]).result()
    assert result.status == Status.UNDECIDED
    assert result.uncompared == result.tensors == 4
    assert "4 tensors have neither a hash nor elements" in result.why[0]
    assert repeated_text(result).startswith(
        "CANNOT TELL        nothing differs of what was compared"
    )


def test_the_command_runs_the_program_in_processes_of_its_own(tmp_path):
    (tmp_path / "script.py").write_text(f"""
import sys
from pathlib import Path
import torch
from torch import nn

run = len(list(Path("state").iterdir()))
(Path("state") / str(run)).touch()
torch.manual_seed(0)
{training(drop=0.3, before="torch.manual_seed(run if 'drop' in sys.argv else 0)")}
""")
    (tmp_path / "state").mkdir()
    words = ("repeat", "--keep", "kept", "--steps", "0:1", "--", warm.TORCH, "script.py")
    ended = inside.or_outside(tmp_path, *words, "drop")
    assert ended.returncode == 1, ended.stderr
    assert ended.stdout.startswith(
        "DOES NOT REPEAT    drop   Dropout   input.drawn.0   step 0, rank 0\n"
    )
    assert "  inputs           bitwise equal in both runs\n" in ended.stdout
    assert "  gradient         all of its squared norm differs at step 0: 4 of 4" in ended.stdout
    assert "  runs             2 runs differ; --times 3 tells" in ended.stdout
    runs = [whence.open_run(str(tmp_path / "kept" / name)) for name in ("run-1", "run-2")]
    assert [d.call.scope for d in Walk(*runs).differences()] == ["drop"]
    again = inside.or_outside(tmp_path, *words[:1], "--format", "json", *words[3:])
    result = msgspec.json.decode(again.stdout, type=Repeated)
    assert (again.returncode, result.status, result.steps) == (0, Status.SAME, "0:1")
    assert result.runs == ()


def test_a_program_that_fails_is_an_error(tmp_path):
    (tmp_path / "script.py").write_text("raise SystemExit(4)")
    ended = inside.or_outside(tmp_path, "repeat", "--", warm.TORCH, "script.py")
    assert ended.returncode == 3
    assert "exit code 4" in ended.stderr
    assert inside.or_outside(tmp_path, "repeat", "--times", "3").returncode == 3
