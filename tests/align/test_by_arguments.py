"""A module called several times in a step, in another order in the other run."""

import pytest
import torch

import whence
from whence import align
from whence.store import open_run

KINDS = ("full", "sliding", "none")


class Rotary(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x, kind="full"):
        return self.inner(x * (2 + KINDS.index(kind))).cos()


class Caller(torch.nn.Module):
    """Calls `rotary` once for each of its kinds. exchange: two of the tables change places."""

    def __init__(self, kinds, exchange=False, chained=False):
        super().__init__()
        torch.manual_seed(0)
        self.rotary = Rotary()
        self.last = torch.nn.Linear(4, 4)
        self.kinds, self.exchange, self.chained = kinds, exchange, chained

    def forward(self, x):
        if self.chained:
            for kind in self.kinds:
                x = self.rotary(x, kind)
            return self.last(x)
        tables = {kind: self.rotary(x, kind) for kind in self.kinds}
        a, b = ("sliding", "full") if self.exchange else ("full", "sliding")
        return self.last(tables[a]) + tables.get(b, 0.0)


def captured(model, path, level="modules", dtype=torch.float32):
    with torch.no_grad(), whence.capture(model.eval().to(dtype), path, level=level):
        for step in (1.0, 2.0):
            model(torch.linspace(-step, step, 8).reshape(2, 4).to(dtype))
    return path


def compared(tmp_path, one, other, level="modules", dtype=torch.float32):
    reference = captured(one, tmp_path / "ref", level)
    return whence.compare(reference, captured(other, tmp_path / "tgt", level, dtype))


@pytest.mark.parametrize("level", ["modules", "op"])
def test_calls_in_another_order_are_the_same(tmp_path, level):
    result = compared(tmp_path, Caller(KINDS), Caller(("none", "full", "sliding")), level)
    assert result.status == "same"
    reference, target = open_run(tmp_path / "ref"), open_run(tmp_path / "tgt")
    plan = align.plan(reference, target)
    assert not plan.unmatched_reference and not plan.unmatched_target and not plan.ambiguous
    partners = {p.reference: p.target for p in plan.pairs}
    for a, b in partners.items():
        call, partner = reference.calls[a], target.calls[b]
        assert call.arguments == partner.arguments
        assert partners.get(call.parent, -1) == partner.parent  # what they call goes with them


def test_exact_keys_alone_keep_the_order(tmp_path):
    paths = [
        captured(Caller(kinds), tmp_path / str(i))
        for i, kinds in enumerate([("full", "sliding"), ("sliding", "full")])
    ]
    reference, target = map(open_run, paths)
    for pair in align.plan(reference, target, "exact").pairs:
        a, b = reference.calls[pair.reference], target.calls[pair.target]
        assert a.occurrence == b.occurrence


def test_another_precision_in_another_order_is_no_fault(tmp_path):
    kinds = ("full", "sliding"), ("sliding", "full")
    result = compared(tmp_path, *map(Caller, kinds), dtype=torch.float64)
    assert not result.findings


@pytest.mark.parametrize("level", ["modules", "op"])
@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_a_fault_in_one_of_the_calls_is_named_there(tmp_path, level, kind):
    target = Caller(("sliding", "full"))
    count = 0

    def wrong(module, args, output):
        nonlocal count
        count += 1
        return output + 0.1 if target.kinds[(count - 1) % 2] == kind else output

    target.rotary.inner.register_forward_hook(wrong)
    result = compared(tmp_path, Caller(("full", "sliding")), target, level)
    assert result.findings[0].name.startswith("rotary.inner")
    assert result.findings[0].occurrence == ("full", "sliding").index(kind)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("full", "sliding"), ("none", "full")),
        (("full",), ("none",)),
        (("full", "sliding"), ("full", "none")),
    ],
)
def test_another_value_is_still_found(tmp_path, one, other):
    one, other = Caller(one), Caller(other)
    one.forward = lambda x: sum(one.rotary(x, kind) for kind in one.kinds)
    other.forward = lambda x: sum(other.rotary(x, kind) for kind in other.kinds)
    result = compared(tmp_path, one, other)
    assert result.findings[0].name.startswith("rotary")
    assert "argument 1 is " in str(result.findings[0])


def test_results_that_change_places_are_found(tmp_path):
    kinds = ("full", "sliding"), ("sliding", "full")
    result = compared(tmp_path, Caller(kinds[0]), Caller(kinds[1], exchange=True))
    assert result.status != "same"
    assert not result.findings[0].name.startswith("rotary")


def test_calls_that_read_each_other_keep_their_order(tmp_path):
    kinds = ("full", "sliding"), ("sliding", "full")
    result = compared(tmp_path, *(Caller(order, chained=True) for order in kinds))
    assert result.findings[0].name.startswith("rotary")
    assert "argument 1 is 'full' in the reference, 'sliding'" in str(result.findings[0])
