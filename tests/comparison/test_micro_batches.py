"""Gradients that one training makes of a batch at once, and the other of its parts or otherwise."""

import contextlib
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import whence
from whence.align.batches.align import align_batches
from whence.comparison.verdicts import operator_forms
from whence.records import Ref
from whence.results import SlotPair, Verdict, VerdictKind

pytestmark = pytest.mark.torch


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.b(self.a(x).tanh())


def trained(path, parts):
    torch.manual_seed(0)
    model, x = Two(), torch.randn(4, 4)
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    with whence.capture(model, path):
        for _ in range(2):
            optimiser.zero_grad()
            for part in x.chunk(parts):
                (model(part).square().mean() / parts).backward()
            optimiser.step()
    return whence.open_run(path)


def test_backward_passes_stay_with_the_calls_that_their_forward_calls_went_to(tmp_path):
    runs = trained(tmp_path / "whole", 1), trained(tmp_path / "parts", 2)
    aligned = align_batches(*runs)
    target = aligned.target.calls
    by_order = {call.order: call for call in target}
    backward = [c for c in target if c.phase == "backward" and c.op_type == "Linear"]
    assert len(backward) == 8
    for call in backward:
        forward = by_order[call.forward]
        assert (forward.scope, forward.phase, forward.step) == (call.scope, "forward", call.step)
    assert whence.compare(tmp_path / "whole", tmp_path / "parts").status == "same"


@pytest.mark.parametrize(("added", "is_same"), [(0.0, True), (0.05, False)])
def test_losses_may_be_summed_before_one_backward_pass(tmp_path, added, is_same):
    """A constant in the sum has no gradient, and still is another loss."""
    torch.manual_seed(0)
    model, x = Two(), torch.randn(4, 4)
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    with whence.capture(model, tmp_path / "summed"):
        for _ in range(2):
            optimiser.zero_grad()
            losses = [model(part).square().mean() / 2 for part in x.chunk(2)]
            (torch.stack(losses).sum() + added).backward()
            optimiser.step()
    trained(tmp_path / "parts", 2)
    for runs in (("parts", "summed"), ("summed", "parts")):
        result = whence.compare(*(tmp_path / run for run in runs))
        assert (result.status == "same") == is_same


@pytest.mark.parametrize(("factor", "is_same"), [(1.0, True), (2.0, False)])
def test_gradients_without_a_backward_pass_are_held_to_the_step(tmp_path, factor, is_same):
    for name in ("backward", "grad"):
        torch.manual_seed(0)
        model, x = Two(), torch.randn(4, 4)
        optimiser = torch.optim.SGD(model.parameters(), 0.1)
        with whence.capture(model, tmp_path / name):
            for _ in range(2):
                optimiser.zero_grad()
                loss = model(x).square().mean()
                if name == "backward":
                    loss.backward()
                else:
                    parameters = list(model.parameters())
                    gradients = torch.autograd.grad(loss, parameters)
                    for parameter, gradient in zip(parameters, gradients, strict=True):
                        parameter.grad = gradient
                    model.b.weight.grad *= factor
                optimiser.step()
    result = whence.compare(tmp_path / "backward", tmp_path / "grad")
    assert (result.status == "same") == is_same


def trained_on_rows(path, order, labels=slice(None)):
    """The second batch is the first with its rows turned round. order: of the rows, which the
    labels follow.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 4), Two())
    ids, wanted = torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.randn(2, 3, 4)
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    with whence.capture(model, path):
        for batch, right in ((ids, wanted), (ids.flip(0), wanted.flip(0) * 2)):
            optimiser.zero_grad()
            difference = model(batch[order]) - right[order][labels]
            difference.square().mean().backward()
            optimiser.step()
    return whence.open_run(path)


@pytest.mark.parametrize(("labels", "is_same"), [(slice(None), True), ([1, 0], False)])
def test_a_batch_with_its_rows_in_another_order_is_the_same_step(tmp_path, labels, is_same):
    trained_on_rows(tmp_path / "rows", [0, 1])
    trained_on_rows(tmp_path / "turned", [1, 0], labels)
    result = whence.compare(tmp_path / "rows", tmp_path / "turned")
    assert (result.status == "same") == is_same
    assert not any("are moved by" in note for note in result.plan.notes)


def changed_between(path, change, level="modules"):
    """Parameters after two steps of three micro-batches, with `change` after each backward pass."""
    torch.manual_seed(0)
    model, x = Two(), torch.randn(6, 4)
    optimiser = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with whence.capture(model, path, level=level) if path else contextlib.nullcontext():
        for _ in range(2):
            optimiser.zero_grad()
            for part in x.chunk(3):
                (model(part).square().mean() / 3).backward()
                change(list(model.parameters()))
            optimiser.step()
    return list(model.parameters())


def scaled(parameters):
    for parameter in parameters:
        parameter.grad.mul_(0.5)


CHANGES = {
    "norm": (lambda p: torch.nn.utils.clip_grad_norm_(p, 0.01), "clip_grad_norm_.max_norm"),
    "value": (lambda p: torch.nn.utils.clip_grad_value_(p, 1e-3), "clip_grad_value_.clip_value"),
    "scaled": (scaled, "mul_.Tensor"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_code_between_two_backward_passes_is_named(tmp_path, name):
    change, words = CHANGES[name]
    alone = changed_between(None, change)
    assert all(map(torch.equal, alone, changed_between(tmp_path / "target", change)))
    changed_between(tmp_path / "reference", lambda parameters: None)
    result = whence.compare(tmp_path / "reference", tmp_path / "target")
    first = result.findings[0]
    assert (first.op_type, first.phase, first.step) == ("gradients", "backward", 0)
    assert words in first.sentence


def test_code_between_two_backward_passes_that_undoes_itself_is_none(tmp_path):
    def undone(parameters):
        for parameter in parameters:
            parameter.grad.mul_(3.0).div_(3.0)

    changed_between(tmp_path / "reference", lambda parameters: None)
    changed_between(tmp_path / "target", undone)
    assert whence.compare(tmp_path / "reference", tmp_path / "target").status == "same"


def test_an_operator_between_two_backward_passes_is_named(tmp_path):
    changed_between(tmp_path / "reference", lambda parameters: None, "op")
    changed_between(tmp_path / "target", scaled, "op")
    first = whence.compare(tmp_path / "reference", tmp_path / "target").findings[0]
    assert "mul_, which only the target runs" in first.sentence


@pytest.mark.parametrize(
    ("slots", "is_named"),
    [({1: "output.0"}, True), ({1: "input.self"}, False), ({0: "output.0", 1: "output.0"}, False)],
)
def test_an_operator_that_reads_or_hands_on_a_tensor_did_not_make_it(slots, is_named):
    calls = [
        SimpleNamespace(
            id=k,
            kind="operator",
            op_type="mul_",
            refs=[Ref(slots[k], 7)] if k in slots else [],
        )
        for k in (0, 1)
    ]
    paired = SimpleNamespace(
        slot=lambda index, slot: SlotPair("input.0", "input.0", 3, 7),
        maker=lambda slot: calls[1],
        plan=SimpleNamespace(unmatched_target=(1,)),
        target=SimpleNamespace(calls=calls),
    )
    verdict = Verdict(0, VerdictKind.INTRODUCED, slot="input.0")
    assert bool(operator_forms._made_alone(verdict, paired)) == is_named


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(20, 6), nn.Linear(6, 20)

    def forward(self, ids):
        return self.head(self.words(ids))


def taught(path, ids):
    """Two steps on the same tokens, with other parameters in the second."""
    torch.manual_seed(0)
    model = Words()
    optimiser = torch.optim.SGD(model.parameters(), 0.5)
    with whence.capture(model, path):
        for _ in range(2):
            model(ids).square().mean().backward()
            optimiser.step()
            optimiser.zero_grad()
    return path


def test_a_sequence_of_a_training_is_paired_within_its_step_alone(tmp_path):
    ids = torch.arange(14).reshape(2, 7)
    runs = taught(tmp_path / "rows", ids), taught(tmp_path / "one", ids.reshape(1, -1))
    result = whence.compare(*runs)
    assert (result.status, result.findings) == ("undecided", ())
    assert "no sequence of the target has the tokens of step 0 row 1" in result.headline


def updated(path, updates):
    torch.manual_seed(0)
    model = Two()
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    with whence.capture(model, path):
        for step in range(4):
            model(torch.ones(2, 4)).square().mean().backward()
            if step in updates:
                optimiser.step()
                optimiser.zero_grad()
    return path


@pytest.mark.parametrize("side", ["target", "reference"])
def test_a_training_that_stops_to_update_is_told_from_one_that_ends(tmp_path, side):
    runs = [updated(tmp_path / "all", range(4)), updated(tmp_path / "one", range(1))]
    if side == "reference":
        runs.reverse()
    words = f"the {side} updates its parameters after 1 of 4 backward passes, the other after 4"
    for answer in (whence.compare, whence.diverge):
        result = answer(*runs)
        assert result.status == "undecided"
        assert words in getattr(result, "headline", "") + " ".join(getattr(result, "why", ()))


class Long:
    """An optimiser of one long parameter that those of the model are copied into and out of."""

    def __init__(self, model, last):
        self.own, self.left = list(model.parameters()), last
        self.long = nn.Parameter(torch.cat([p.detach().flatten() for p in self.own]))
        self.inner = torch.optim.SGD([self.long], 0.1)

    @torch.no_grad()
    def step(self):
        self.long.grad = torch.cat([p.grad.flatten() for p in self.own])
        self.inner.step()
        for p, new in zip(self.own, self.long.split([p.numel() for p in self.own]), strict=True):
            if self.left:
                p.copy_(new.view_as(p))
        self.left -= 1


@pytest.mark.parametrize(("updates", "status"), [(9, "same"), (2, "undecided"), (0, "undecided")])
def test_an_update_that_no_optimiser_shows_is_seen_by_what_the_next_pass_reads(
    tmp_path, updates, status
):
    for name in ("reference", "target"):
        torch.manual_seed(0)
        model = Two()
        own = torch.optim.SGD(model.parameters(), 0.1)
        optimiser = own if name == "reference" else Long(model, updates)
        with whence.capture(model, tmp_path / name):
            for _ in range(4):
                model(torch.ones(2, 4)).square().mean().backward()
                optimiser.step()
                own.zero_grad()
    runs = tmp_path / "reference", tmp_path / "target"
    result = whence.compare(*runs, min_coverage=0.5)
    assert result.status == status, result.headline
    assert status == "same" or f"it does not in step {updates}" in result.headline
