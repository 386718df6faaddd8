"""May a moved expectation be renewed?"""

import json
import sys

import numpy as np
import pytest
import torch
from torch import nn

import whence
from whence.api import renew_expectation
from whence.cli import execute
from whence.errors import UnreadableRun, UsageError
from whence.results import AcceptKind
from whence.workflows.accept import golden_files
from whence.workflows.accept.comparisons import accept_comparison
from whence.workflows.rounding import run_ways

pytestmark = pytest.mark.torch
torch.set_num_threads(1)


def losses(lr=1e-2, eps=1e-8, steps=12):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(net.parameters(), lr, eps=eps)
    x, y = torch.randn(32, 8), torch.randint(0, 4, (32,))
    curve = {}
    for step in range(steps):
        loss = nn.functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        curve[step + 1] = loss.item()
    return {"lm loss": {"start_step": 1, "values": curve}}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.norm, self.head = nn.Embedding(40, 16), nn.LayerNorm(16), nn.Linear(16, 40)

    def forward(self, ids, mask=None):
        return self.head(self.norm(self.words(ids)))[0, :3, :3]


IDS = {"ids": torch.arange(10)[None], "mask": torch.ones(1, 10, dtype=torch.long)}


def net(ids, mask=None):
    with torch.no_grad():
        return Net().eval()(ids, mask)


def moved(values, change):
    tree = json.loads(json.dumps(values))
    curve = tree["lm loss"]["values"]
    for step, key in enumerate(curve):
        curve[key] = change(step, curve[key])
    return tree


def kept(path, tree):
    path.write_text(json.dumps(tree, indent=2))
    return path


def test_the_float64_run_draws_the_same_numbers_and_widens_all_else():
    ways = run_ways(losses, None)
    own, exact = ways.own["lm loss.values"], ways.exact["lm loss.values"]
    assert 0 < np.abs(own - exact).max() < 1e-6, "the same training, and no float32 in it"
    assert not np.array_equal(exact, exact.astype(np.float32))
    assert ways.notes == []


def test_running_in_many_ways_leaves_the_random_numbers_where_they_were():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    run_ways(lambda: torch.randn(3), None)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_benign_drift_is_noise(tmp_path):
    noise = np.random.default_rng(0)
    drift = moved(losses(), lambda _, x: float(np.float32(x * (1 + 1e-7 * noise.uniform(-1, 1)))))
    answer = whence.accept(kept(tmp_path / "golden.json", drift), program=losses)
    assert answer.verdict in (AcceptKind.NOISE, AcceptKind.CLOSER), answer
    value = next(v for v in answer.values if v.name == "lm loss.values")
    assert 1e-7 < value.relative_tolerance < 1e-4
    assert "which rounding explains" in answer.sentence


@pytest.mark.parametrize("change", [{"lr": 1.01e-2}, {"eps": 1e-6}])
def test_a_changed_program_is_refused(tmp_path, change):
    golden = kept(tmp_path / "golden.json", losses(**change))
    answer = whence.accept(golden, program=losses)
    assert answer.verdict == AcceptKind.CHANGED and answer.status == "different"
    assert "whence commits" in answer.next and not answer.expectation


def test_a_value_that_the_program_does_not_give_is_a_fault(tmp_path):
    golden, now = losses(), moved(losses(), lambda step, x: x * (1 + 1e-4 * (step == 4)))
    answer = whence.accept(kept(tmp_path / "golden.json", golden), now, program=losses)
    assert answer.verdict == AcceptKind.FAULT and answer.values[0].index == "5"


def test_a_program_that_ignores_its_input_is_refused(tmp_path):
    def deaf(ids, mask):
        return net(torch.ones_like(ids), mask)

    answer = whence.accept(net(**IDS), program=deaf, inputs=IDS)
    assert answer.verdict == AcceptKind.IGNORES_INPUT and "ids" in answer.values[0].words
    assert whence.accept(net(**IDS), program=net, inputs=IDS).verdict == AcceptKind.UNCHANGED


def test_closer_to_an_exact_result_of_another_source():
    exact = np.linspace(1, 2, 16)
    old, new = (exact * 1.01).astype(np.float32), exact.astype(np.float32)
    again = [exact.astype(np.float32) * np.float32(1 + k * 6e-8) for k in (-2, -1, 1, 2)]
    answer = whence.accept(old, new, exact=exact, again=again)
    assert answer.verdict == AcceptKind.CLOSER
    assert whence.accept(new, old, exact=exact, again=again).verdict == AcceptKind.FAULT


def test_an_expectation_of_a_coarser_precision_is_refused_unless_it_is_declared():
    def product(x):
        return x @ x.T

    x = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
    half = product(x.bfloat16()).float()
    plain = whence.accept(half, program=product, inputs=(x,))
    assert plain.verdict == AcceptKind.CHANGED
    declared = whence.accept(half, program=product, inputs=(x,), was="bfloat16")
    assert declared.verdict == AcceptKind.CLOSER


@pytest.mark.parametrize("again", [0, 1, 2])
def test_too_little_evidence_does_not_decide(again):
    runs = [1.0 + 1e-7 * k for k in range(1, again + 1)]
    answer = whence.accept(1.0, 1.0 + 3e-7, again=runs)
    assert answer.verdict == AcceptKind.CANNOT_TELL and answer.next


def test_equal_repetitions_are_no_way_of_rounding():
    answer = whence.accept(1.0, 1.0 + 3e-7, again=[1.0 + 3e-7] * 9)
    assert answer.verdict == AcceptKind.CANNOT_TELL


def test_repetitions_that_stray_decide():
    noise = np.random.default_rng(0)
    runs = [np.full(4, 2.0) + 1e-6 * noise.normal(size=4) for _ in range(9)]
    assert whence.accept(np.full(4, 2.0), runs[0], again=runs[1:]).verdict == AcceptKind.NOISE
    assert whence.accept(np.full(4, 2.1), runs[0], again=runs[1:]).verdict == AcceptKind.CHANGED


def test_chaos_that_hides_every_fault_is_no_proof():
    def chaos():
        x = torch.tensor(0.3)
        points = []
        for _ in range(60):
            x = 4 * x * (1 - x)
            points.append(x.item())
        return points[-20:]

    now = chaos()
    answer = whence.accept([1 - x for x in now], program=chaos)
    assert answer.verdict != AcceptKind.NOISE


def table():
    """Three rows of two numbers, as lists."""
    x = torch.linspace(-1, 1, 24).view(3, 8)
    return (x @ torch.linspace(0, 1, 16).view(8, 2)).tolist()


@pytest.mark.parametrize("kind", ["file", "lists", "tensors"])
def test_lists_of_lists_are_one_value_on_both_sides(tmp_path, kind):
    old = np.float32(table())
    (tmp_path / "golden.json").write_text(json.dumps((old * 1.01).tolist()))
    expected = {"file": tmp_path / "golden.json", "lists": (old * 1.01).tolist()}.get(kind)
    program = table
    if kind == "tensors":  # a list of numbers that are tensors still
        expected, program = (old[0] * 1.01).tolist(), lambda: [torch.tensor(v) for v in table()[0]]
    answer = whence.accept(expected, program=program)
    assert answer.verdict == AcceptKind.CHANGED
    (value,) = answer.values
    assert value.size == (2 if kind == "tensors" else 6)


def words(last="end"):
    scores = torch.linspace(0, 1, 8) @ torch.eye(8)
    return {"text": f"{'abcdefgh'[int(scores.argmax())]} {last}", "rows": [["x", "y"], ["z", last]]}


def test_a_text_that_no_rounding_changes_is_refused_where_it_moved():
    answer = whence.accept(words(last="stop"), program=words)
    assert answer.verdict == AcceptKind.CHANGED
    assert {value.name for value in answer.values if value.verdict == "changed"} == {
        "text",
        "rows.1.1",
    }
    assert "commits" in answer.next
    assert whence.accept(words(), program=words).verdict == AcceptKind.UNCHANGED


def coin(seed=0):
    """A text that follows the sign of a sum that cancels: rounding alone turns it."""
    x = torch.randn(4096, generator=torch.Generator().manual_seed(seed))
    total = torch.cat((x, -x.flip(0))).sum() + 0.0
    parts = sum(torch.cat((x, -x)).view(-1, 64).sum(1).tolist())
    return "heads" if float(total) + parts > 0 else "tails"


def test_a_text_that_other_roundings_give_too_may_be_renewed(tmp_path):
    other = {"heads": "tails", "tails": "heads"}[coin()]
    golden = tmp_path / "golden.yaml"
    golden.write_text(f"# toss\nface: '{other}'   # of the old kernels\n")
    answer = whence.accept(golden, program=lambda: {"face": coin()})
    assert answer.verdict == AcceptKind.NOISE, answer
    assert "tolerance" not in answer.sentence
    renew_expectation(golden, answer)
    assert golden.read_text() == f'# toss\nface: "{coin()}"   # of the old kernels\n'


def test_a_text_that_no_way_gives_although_rounding_changes_it_is_undecided():
    answer = whence.accept({"face": "edge"}, program=lambda: {"face": coin()})
    assert answer.verdict == AcceptKind.CANNOT_TELL
    assert "logits" in answer.next


def test_a_test_that_compares_texts_is_left_open():
    texts = {"actual": "a dog", "expected": "a cat"}
    answer = accept_comparison(texts["expected"], texts["actual"], lambda: texts, {})
    assert answer.verdict == AcceptKind.CANNOT_TELL


def test_a_number_where_a_text_is_expected_is_refused():
    answer = whence.accept({"loss": "low"}, program=lambda: {"loss": 1.5})
    assert answer.verdict == AcceptKind.CHANGED


def test_texts_and_whole_numbers_have_no_band():
    assert whence.accept({"text": "a cat"}, {"text": "a dog"}).verdict == AcceptKind.CANNOT_TELL
    runs = [np.array([3, 1, 2])] * 4
    assert whence.accept(np.array([3, 2, 1]), runs[0], again=runs).verdict == AcceptKind.CHANGED
    tied = [np.array([3, 1, 2]), np.array([3, 2, 1]), np.array([3, 1, 2]), np.array([3, 1, 2])]
    assert whence.accept(np.array([3, 2, 1]), tied[0], again=tied).verdict == AcceptKind.NOISE


def test_a_whole_number_of_the_exact_program_is_explained():
    now, tie = np.array([3, 7, 2]), np.array([3, 8, 2])
    runs = [now] * 4
    assert whence.accept(tie, now, again=runs, exact=tie).verdict == AcceptKind.NOISE
    assert whence.accept(tie + 1, now, again=runs, exact=tie).verdict == AcceptKind.CHANGED


@pytest.mark.parametrize(("at_zero", "verdict"), [(4e-7, "noise"), (4e-5, "changed")])
def test_what_is_zero_in_every_way_rounds_as_the_elements_beside_it(at_zero, verdict):
    noise = np.random.default_rng(1)
    runs = [np.array([0.0, *(1 + 2e-7 * noise.normal(size=7))]) for _ in range(9)]
    old = np.array([at_zero, *np.ones(7)])
    assert whence.accept(old, runs[0], again=runs[1:]).verdict == verdict


def test_a_value_that_is_gone_or_has_another_shape_is_not_accepted():
    assert whence.accept({"a": 1.0, "b": 2.0}, {"a": 1.0}).status == "undecided"
    assert whence.accept(np.zeros(3), np.zeros(4)).verdict == AcceptKind.CHANGED


def test_printed_numbers_are_read_to_their_last_digit(tmp_path):
    path = tmp_path / "golden.json"
    path.write_text('{"loss": {"1": 10.86058, "2": 9.12345}, "half": 0.5, "bad": "nan"}')
    values = golden_files.read(path)
    assert values["loss"].resolution == 0.5e-5 and values["loss"].steps == ("1", "2")
    assert values["half"].resolution == 0 and np.isnan(values["bad"].content)
    now = {"loss": {1: 10.860581, 2: 9.123454}, "half": 0.5, "bad": float("nan")}
    assert whence.accept(path, now).verdict == AcceptKind.UNCHANGED


def test_renewing_changes_the_numbers_and_nothing_else(tmp_path):
    path = tmp_path / "golden.yaml"
    path.write_text("# of release 3\nlogits:  [1.00000, 2.00000]   # two\nname: net\n")
    again = [[1.0 + 1e-5 * k, 2.0 - 1e-5 * k] for k in (-2, -1, 1, 2)]
    now = {"logits": [1.00002, 2.00001], "name": "net"}
    answer = whence.accept(path, now, again=[{"logits": a, "name": "net"} for a in again])
    assert answer.verdict == AcceptKind.NOISE
    assert renew_expectation(path, answer).written == str(path)
    assert path.read_text() == "# of release 3\nlogits:  [1.00002, 2.00001]   # two\nname: net\n"


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".safetensors"])
def test_files_of_arrays_are_read_and_renewed(tmp_path, suffix):
    from safetensors.numpy import save_file

    path, old = tmp_path / f"golden{suffix}", np.ones(4, np.float32)
    if suffix == ".npy":
        np.save(path, old)
    elif suffix == ".npz":
        np.savez(path, logits=old)
    else:
        save_file({"logits": old}, path)
    again = [old * np.float32(1 + k * 1.2e-7) for k in (-2, -1, 2, 3)]
    answer = whence.accept(path, old * np.float32(1 + 1.2e-7), again=again)
    assert answer.verdict == AcceptKind.NOISE, answer
    renew_expectation(path, answer)
    (value,) = golden_files.read(path).values()
    assert value.content.dtype == np.float32 and (value.content > 1).all()


def test_bad_files_say_what_was_tried(tmp_path):
    with pytest.raises(UnreadableRun, match="does not exist"):
        whence.accept(tmp_path / "none.json", 1.0)
    (tmp_path / "cut.json").write_text('{"a": [1.0, 2.')
    with pytest.raises(UnreadableRun, match=r"cut\.json cannot be read"):
        whence.accept(tmp_path / "cut.json", 1.0)
    with pytest.raises(UsageError, match="give the actual values, or the program"):
        whence.accept(1.0)


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "accepted_program.py").write_text(
        "import torch\n\ndef values():\n    torch.manual_seed(0)\n"
        "    x = torch.randn(64, 64)\n    return {'sums': (x @ x.T).sum(0).tolist()}\n"
    )
    monkeypatch.delitem(sys.modules, "accepted_program", raising=False)
    torch.manual_seed(0)
    x = torch.randn(64, 64)
    near = (x @ x.T).sum(0) * (1 + 1e-7)
    kept(tmp_path / "golden.json", {"sums": near.tolist()})
    words = ["accept", "golden.json", "--program", "accepted_program:values"]
    assert execute(words) == 0
    out = capsys.readouterr().out
    assert "tolerance" in out and "pull request" in out and "written" not in out
    assert execute([*words, "--write", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["written"] == "golden.json"
    kept(tmp_path / "golden.json", {"sums": (near * 1.01).tolist()})
    assert execute([*words, "--write"]) == 1
    assert "REFUSED" in capsys.readouterr().out
    assert json.loads((tmp_path / "golden.json").read_text())["sums"] == (near * 1.01).tolist()
    assert execute(["accept", "golden.json", "golden.json"]) == 0


def test_an_input_that_cannot_be_replaced_is_not_counted_as_heard():
    x = np.arange(6.0)

    def program(values):
        if not np.allclose(values, x, rtol=1e-3):
            raise ValueError("another table")
        return {"sum": values.sum()}

    result = whence.accept({"sum": 15.0}, program=program, inputs=(x,))
    assert any("input 0 is not known" in note and "ValueError" in note for note in result.notes)
