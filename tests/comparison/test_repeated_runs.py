"""Further runs of the reference: what does not repeat itself there is no fault of the target, what
lies beyond it is.
"""

import numpy as np
import pytest
from test_root_inputs import VOCABULARY, generation, near_tie

from handmade import net
from whence import api
from whence.errors import UsageError
from whence.records import MemoryRun
from whence.report.answer import answer

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import whence  # noqa: E402

pytestmark = pytest.mark.torch


class AnyOrder(nn.Module):
    """Sums its input's rows in an order nobody fixes, as atomic additions in a kernel do; `grain`
    makes the order matter as much as wished.
    """

    def __init__(self, grain=1e4):
        super().__init__()
        self.order = np.random.default_rng()
        self.grain = grain

    def forward(self, x):
        # Large numbers that cancel: what is left of the small ones depends on the order.
        large = self.grain * torch.cos(
            torch.arange(x.shape[0] * x.shape[1]).reshape(x.shape[0], -1, 1) * 2.39996
        )
        terms = torch.cat([large.expand_as(x), x, -large.expand_as(x)], 1).numpy()
        total = np.zeros_like(terms[:, 0])
        for i in self.order.permutation(terms.shape[1]).tolist():
            total += terms[:, i]
        return torch.from_numpy(total)


class Net(nn.Module):
    def __init__(self, middle):
        super().__init__()
        self.first = nn.Linear(48, 64)
        self.middle = middle
        self.last = nn.Linear(64, 64)
        self.scale, self.gain = 1.0, 1.0

    def forward(self, x):
        return self.last(self.middle(self.first(x)) * self.gain).tanh() * self.scale


def captured(path, middle, draw, change=None):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Net(middle()).eval()
    x = torch.randn(32, 20, 48)
    if change:
        change(model)
    model.middle.order = np.random.default_rng(draw)
    with torch.no_grad(), whence.capture(model, path):
        model(x)
    return path


class Unrecorded(nn.Module):
    """Drops one in five by a generator that no capture sees."""

    def forward(self, x):
        return x * torch.from_numpy(self.order.random(x.shape) > 0.2) / 0.8


@pytest.fixture(
    params=[AnyOrder, Unrecorded], ids=["sum in any order", "dropout that is not recorded"]
)
def runs(request, tmp_path):
    """(reference, further runs, target(change))"""
    middle = request.param
    made = [captured(tmp_path / f"r{n}", middle, n) for n in range(3)]

    def target(change=None, draw=77):
        return captured(tmp_path / f"t{draw}", middle, draw, change)

    return made[0], made[1:], target


def scaled(module, factor):
    """A fault in a module's own output."""

    def change(model):
        model.get_submodule(module).register_forward_hook(lambda mod, args, out: out * factor)

    return change


def by_name(result):
    pairs = {row.pair: row.name for row in result.rows}
    return {pairs[v.pair]: v.verdict for v in result.verdicts if v.stretch < 0}


def test_without_further_runs_it_is_blamed(runs):
    reference, _, target = runs
    result = whence.compare(reference, target())
    assert result.status == "different"
    assert result.findings[0].name == "middle"


def test_a_benign_target_is_silent_and_the_call_is_listed(runs, tmp_path):
    reference, again, target = runs
    result = whence.compare(reference, target(), again=again, output=tmp_path / "cmp")
    assert (result.status, result.findings) == ("same", ())
    assert by_name(result)["middle"] == "nondeterministic"
    assert result.counts["nondeterministic"] == 1
    assert result.repetition.calls == 1
    assert result.repetition.names == ("middle",)
    spreads = []
    for other in again:
        g, h = (out_of(run, "middle") for run in (reference, other))
        spreads.append(np.linalg.norm(h - g) / np.linalg.norm(g))
    assert result.repetition.own == pytest.approx(max(spreads), rel=1e-6)
    text = answer(result)
    assert "nondeterministic 1 call; first middle (" in text
    assert "run-to-run spread" in text.splitlines()[0]
    assert api.load_comparison(tmp_path / "cmp").repetition == result.repetition


def out_of(path, scope):
    run = whence.open_run(str(path))
    call = next(c for c in run.calls if c.scope == scope)
    return run.array(call.slots("output")[0].record).astype(np.float64)


def test_one_further_run_is_enough(runs):
    reference, again, target = runs
    assert whence.compare(reference, target(), again=again[:1]).status == "same"


def test_a_fault_above_the_spread_is_named(runs):
    reference, again, target = runs
    own = whence.compare(reference, target(), again=again).repetition.own
    result = whence.compare(reference, target(scaled("middle", 1 + 15 * own), draw=5), again=again)
    assert result.status == "different"
    assert result.findings[0].name == "middle"


def test_a_fault_below_the_spread_is_not_blamed(runs):
    reference, again, target = runs
    own = whence.compare(reference, target(), again=again).repetition.own
    result = whence.compare(
        reference, target(scaled("middle", 1 + 0.5 * min(own, 1)), draw=5), again=again
    )
    assert (result.status, result.findings) == ("same", ())


def test_behind_it_replay_still_sees_what_is_far_below_the_spread(runs):
    reference, again, target = runs
    result = whence.compare(reference, target(scaled("last", 1.0002)), again=again)
    assert [(f.name, f.evidence) for f in result.findings] == [("last", "replay")]
    assert result.repetition.own > 5 * 0.0002


def test_between_modules_the_spread_that_came_in_is_no_fault_and_more_is(runs):
    reference, again, target = runs
    clean = whence.compare(reference, target(), again=again, replay=False)
    assert (clean.status, clean.findings) == ("same", ())

    def change(model):
        model.scale = 30.0

    broken = whence.compare(reference, target(change, draw=6), again=again)
    assert [f.name for f in broken.findings] == ["Net"]
    assert "after last" in broken.findings[0].sentence


class Drawn(nn.Module):
    """Draws outside torch, so the program holds what its recording drew, and replay believes in
    it.
    """

    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, x):
        return x * torch.tensor((1 + 1e-3 * self.draw.standard_normal(64)).tolist())


def test_where_inputs_part_too_the_further_runs_are_replayed_on_their_own(tmp_path):
    def run(name, draw, change=None):
        torch.set_num_threads(1)
        torch.manual_seed(0)
        rng = np.random.default_rng(draw)
        model = nn.Sequential(
            nn.Linear(64, 64), Drawn(rng), nn.Tanh(), Drawn(rng), nn.Tanh()
        ).eval()
        x = torch.randn(40, 64)
        if change:
            change(model)
        with torch.no_grad(), whence.capture(model, tmp_path / name):
            model(x)
        return tmp_path / name

    reference, again = run("r", 0), run("a", 1)
    alone = whence.compare(reference, run("t", 2))
    assert by_name(alone)["1"] == by_name(alone)["3"] == "introduced"
    result = whence.compare(reference, run("u", 3), again=[again])
    assert by_name(result)["1"] == by_name(result)["3"] == "nondeterministic"
    assert result.repetition.names == ("1",)
    assert result.status == "same"
    broken = whence.compare(reference, run("b", 4, scaled("3", 1.01)), again=[again])
    assert [f.name for f in broken.findings] == ["3"]


def test_a_reference_that_repeats_itself_is_said_to_and_excuses_nothing(tmp_path):
    reference, again = (captured(tmp_path / name, nn.Identity, 1) for name in ("r", "a"))
    result = whence.compare(
        reference, captured(tmp_path / "t", nn.Identity, 1, scaled("last", 1.001)), again=[again]
    )
    assert (result.status, result.findings[0].name) == ("different", "last")
    assert result.repetition.calls == 0
    assert "bitwise equal to the reference" in answer(result)


def test_other_inputs_are_an_error():
    def other(name, value):
        return value[::-1] if name == "ids" else value

    with pytest.raises(
        UsageError, match=r"--again did not get the same inputs: Net step 0: 0 of <Net>"
    ):
        api.compare(net(), net(), again=[net(change=other)])


def test_other_parameters_are_an_error():
    with pytest.raises(UsageError, match=r"other parameters than <Net> \(Net.fc1 step 0: weight\)"):
        api.compare(net(), net(), again=[net(change=lambda n, v: v * 1.1 if n == "w1" else v)])


def test_another_program_is_an_error_or_noted():
    with pytest.raises(UsageError, match="none of its calls could be paired"):
        api.compare(net(), net(), again=[MemoryRun([], [], {})])
    result = api.compare(net(), net(), again=[net(drop=("fc1",))])
    assert any(
        "1 calls have no partner between it and the reference" in n and "fc1" in n
        for n in result.notes
    )


def test_from_the_step_where_tokens_part_there_is_no_spread():
    other = near_tie(1e-6)
    other[7] += 3e-6
    reference, again = (
        generation(4, logits={1: near_tie(1e-6)}),
        generation(4, noise=1e-7, logits={1: other}),
    )
    assert reference.array(4)[0, 0] != again.array(4)[0, 0], "the runs must part at step 2"
    scores = {3: np.linspace(0, 1, VOCABULARY)}
    result = api.compare(
        reference, generation(4, logits={1: near_tie(1e-6), **scores}), again=[again]
    )
    assert any("goes another way from step 2 on" in note for note in result.notes)
    assert result.repetition.largest < 1e-4
    assert [f.step for f in result.findings] == [3]


def test_one_path_instead_of_a_list_is_an_error():
    with pytest.raises(UsageError, match=r"again takes a list of runs: again=\['runs/ref2'\]"):
        api.compare("runs/ref", "runs/tgt", again="runs/ref2")


def test_a_nan_that_comes_and_goes_excuses_nothing():
    def broken(name, value):
        if name == "h":
            value = value.copy()
            value[0, 0] = np.nan
        return value

    wrong = net(change=lambda n, v: v * 1.5 if n == "h" else v)
    result = api.compare(net(), wrong, again=[net(change=broken)])
    assert result.findings[0].name == "fc1"
    assert any("without a spread" in n for n in result.notes)
