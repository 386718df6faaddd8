"""`whence ranks` on runs made by hand: what ranks must agree in, and what proves nothing."""

import json

import pytest

from inside import whence as run_whence
from whence.comparison.ranks.report import report
from whence.comparison.ranks.target_alone import found_in_target
from whence.records import (
    Call,
    Collective,
    CollectiveKind,
    MemoryRun,
    Record,
    Ref,
    Sketch,
    Statistics,
    collectives_of,
)
from whence.report.ranks import ranks_text
from whence.results import RankCause, RankVerdict

SUM = CollectiveKind.ALL_REDUCE


class Made:
    """A run of two ranks, call by call. A tensor is a number: equal ones are equal tensors."""

    def __init__(self):
        self.calls, self.records, self.collectives = [], [], []

    def call(self, rank, slots, scope="fc", phase="forward", op="", step=0, **fields):
        refs = []
        for slot, value in slots.items():
            constant = isinstance(value, str)
            figures = Statistics(32, 0.0, 0.0 if constant else 1.0, 0.5, 0.1, 1.0, 0, 0, 0)
            number = len(self.records)
            sketch = Sketch(hash(str(value)) & 0xFFFF, 1.0, 1.0, 1.0)
            digest = f"{hash(str(value)) & (2**128 - 1):032x}"
            record = Record(
                number, "float32", (4, 8), hash=digest, statistics=figures, sketch=sketch
            )
            self.records.append(record)
            refs.append(Ref(slot, number))
        number = len(self.calls)
        self.calls.append(
            Call(
                number, scope, "Net", step, number, rank, phase=phase, op=op, refs=tuple(refs),
                op_type=fields.pop("op_type", "Linear"), leaf=fields.pop("leaf", True),
                training=True, **fields,
            )
        )  # fmt: skip

    def step(self, rank, *, step=0, weight=1, gradient=2, left=3, rows=None, lr=0.1):
        """A forward pass and a step of an optimiser."""
        rows = 10 + rank if rows is None else rows
        self.call(rank, {"input.0": rows}, "", step=step, leaf=False, op_type="Net")
        read = {"param.weight": weight, "input.0": rows, "output.0": rows + 100}
        self.call(rank, read, step=step)
        slots = {"input.param": weight, "input.grad": gradient, "output.param": left}
        self.call(rank, slots, phase="optimizer", op="weight", step=step, op_type="SGD",
                  arguments={"lr": lr})  # fmt: skip

    def send(self, rank, number, *, op="sum", size=4, step=0, source="a.py:1", kind=SUM, **fields):
        self.collectives.append(
            Collective(
                kind, rank, len(self.collectives), number, "0", (0, 1), op=op, dtype="float32",
                given=((size,),), taken=((size,),), step=step, source=source, **fields,
            )
        )  # fmt: skip

    def run(self):
        return MemoryRun(self.calls, self.records, {}, collectives=self.collectives)

    def first(self):
        found = report(self.run()).findings
        return found[0] if found else None


def test_ranks_that_agree_have_no_finding():
    made = Made()
    for rank in (0, 1):
        made.step(rank)
        made.step(rank, step=1, weight=3, left=4)
        made.send(rank, 0)
    found = report(made.run())
    assert found.findings == ()
    assert found.verdict == RankVerdict.FINE
    assert "equal" in ranks_text(found)


@pytest.mark.parametrize(
    ("of_rank_1", "cause", "words"),
    [
        ({"gradient": 9, "left": 8}, RankCause.NOT_REDUCED, "gradient of fc.weight: each of ranks"),
        ({"weight": 7, "left": 8}, RankCause.OTHER_START, "fc.weight: ranks 0 and 1 start from"),
        ({"lr": 0.2, "left": 8}, RankCause.OTHER_SETTING, "lr is 0.1 on rank 0, 0.2 on rank 1"),
        ({"left": 8}, RankCause.OTHER_STEP, "step of the optimizer"),
        ({"rows": 10}, RankCause.SAME_ROWS, "ranks 0 and 1 train on the same rows"),
    ],
)
def test_the_first_thing_that_parts_is_named(of_rank_1, cause, words):
    made = Made()
    made.step(0)
    made.step(1, **of_rank_1)
    first = made.first()
    assert (first.cause, first.verdict) == (cause, RankVerdict.FAULT)
    assert words in first.sentence


def test_a_parameter_that_one_rank_changes_between_steps_is_named_with_the_rank():
    made = Made()
    for rank in (0, 1):
        made.step(rank)
        made.step(rank, step=1, weight=3 + rank, left=5 + rank)
    assert (
        made.first().sentence == "fc.weight: changed on rank 1 between the steps of the optimizer"
    )


def test_constants_that_begin_alike_are_no_copies():
    """Pieces of a bias, all zero: their gradients differ rightly."""
    made = Made()
    for rank in (0, 1):
        read = {"param.weight": 20 + rank, "param.bias": "zero", "input.0": 1}
        made.call(rank, {**read, "output.0": 30 + rank})
        slots = {"input.param": "zero", "input.grad": 40 + rank, "output.param": 50 + rank}
        made.call(rank, slots, phase="optimizer", op="bias", op_type="SGD")
    assert made.first() is None


def test_draws_are_judged_by_what_they_are_drawn_for():
    def drawing(rows, weights, drawn):
        made = Made()
        for rank in (0, 1):
            read = {"param.weight": weights[rank], "input.0": rows[rank], "output.0": 5}
            made.call(rank, read, "first")
            made.call(rank, {"input.0": rows[rank], "input.drawn.0": drawn[rank]}, "drop")
        found = made.first()
        return found and found.cause

    assert drawing((1, 2), (3, 3), (4, 5)) is None
    assert drawing((1, 2), (3, 3), (4, 4)) == RankCause.SAME_SEED
    assert drawing((1, 1), (3, 6), (4, 4)) is None
    assert drawing((1, 1), (3, 6), (4, 5)) == RankCause.OTHER_SEED


def sequences(*ranks):
    made = Made()
    for rank, listed in enumerate(ranks):
        for number, fields in enumerate(listed):
            made.send(rank, number, **fields)
    return made.first()


def test_sequences_are_compared_in_order():
    a, b = {"size": 4, "source": "a.py:1"}, {"size": 8, "source": "a.py:2"}
    assert sequences((a, b), (a, b)) is None
    assert "all_reduce (max)" in sequences((a, b), (a, {**b, "op": "max"})).sentence
    swapped = sequences((a, b, a), (b, a, a))
    assert swapped.evidence == ("the same two in another order",)
    alike = {"size": 4, "source": "a.py:3"}
    assert sequences((a, alike), (alike, a)).cause == RankCause.MIXED_UP
    more = sequences((a, b, a), (a, {"size": 4, "source": "b.py:9"}, b, a))
    assert more.sentence.startswith("rank 1 issues one more than rank 0")
    assert "b.py:9" in more.sentence


def test_a_rank_that_never_comes_is_named():
    a = {"size": 4}
    found = sequences((a, a), (a,))
    assert (found.cause, found.verdict) == (RankCause.NOT_JOINED, RankVerdict.FAULT)
    assert found.sentence.startswith("rank 1 does not join all_reduce (sum)")


def test_messages_meet_in_order():
    made = Made()
    made.send(0, 0, kind=CollectiveKind.SEND, op="", peer=1)
    made.send(1, 0, kind=CollectiveKind.RECEIVE, op="", peer=0, size=5)
    assert "message 0 from rank 0 to rank 1 is float32 [4]" in made.first().sentence


def test_what_both_runs_have_is_not_the_targets():
    def run(*, lr):
        made = Made()
        made.step(0)
        made.step(1, lr=lr, left=8)
        return made.run()

    assert found_in_target(run(lr=0.2), run(lr=0.2)) == ()
    assert [f.cause for f in found_in_target(run(lr=0.1), run(lr=0.2))] == ["other setting"]


def test_the_command_says_it_is_no_run(tmp_path):
    (tmp_path / "empty").mkdir()
    assert run_whence(tmp_path, "ranks", "empty").returncode == 3
    assert "RUN" in run_whence(tmp_path, "ranks", "--help").stdout


def test_the_report_goes_through_json():
    import msgspec

    made = Made()
    made.step(0)
    made.step(1, gradient=9)
    found = report(made.run())
    text = msgspec.json.encode(found)
    assert json.loads(text)["checks"][0]["findings"][0]["cause"] == "not reduced"
    assert msgspec.json.decode(text, type=type(found)) == found


def test_a_run_of_a_kind_that_knows_no_collectives_has_none():
    class Older:
        """A run of a reader that was written before collectives were recorded."""

    assert collectives_of(Older()) == ()
