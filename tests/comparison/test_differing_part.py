"""Of runs that differ in some tensors alone the stages look at a part; the answer is that about
the whole.
"""

import random

import msgspec
import numpy as np
import pytest
import torch
import xxhash
from torch import nn

import whence
from whence import store
from whence.comparison import pipeline
from whence.comparison.call_columns import CallColumns
from whence.comparison.options import CompareOptions
from whence.comparison.pipeline import kept_calls
from whence.records import Call, Ref, RunInfo, Statistics
from whence.results.sequence import MadeOnDemand

_STEPS, _BLOCKS, _LEAVES = 20, 4, 3
_STALE_BACK = _BLOCKS * (2 * _LEAVES) + 1  # records from one step to the next


def _changed(values, how, earlier):
    values = values.copy()
    if how == "rounding":
        values[3] = np.nextafter(values[3], np.float32(9))
    elif how == "fault":
        values += values // 2 + 1 if values.dtype.kind == "i" else values * np.float32(0.01)
    elif how == "nan":
        values[0] = np.nan
    elif how == "stale" and earlier is not None:
        values = earlier
    return values


def _written(
    path, *, how="", share=0.01, seed=1, hashed=True, which=lambda slot: True, kind="float32"
):
    """Steps of blocks of leaves; a tensor of one block is read in the next, past its result, and
    blocks have operators of their own. how: what a share of the tensors differs by.
    """
    chosen, numbers = random.Random(seed), np.random.default_rng(0)
    made = []
    with store.Writer(store.create(path, RunInfo())) as writer:

        def add(slot):
            values = numbers.standard_normal(16).astype(kind)
            if how and chosen.random() < share and which(slot):
                earlier = made[-_STALE_BACK] if len(made) > _STALE_BACK else None
                values = _changed(values, how, earlier)
            made.append(values)
            data = values.view(np.uint8)
            figures = Statistics(16, -3.0, 3.0, 0.0, 1.0, 4.0, int(np.isnan(values).sum()), 0, 0)
            digest = xxhash.xxh3_128_digest(data) if hashed else b""
            return writer.record(kind, (16,), data, digest, figures, None)

        weights = {
            (block, leaf): add("param") for block in range(_BLOCKS) for leaf in range(_LEAVES)
        }
        order = 0
        for step in range(_STEPS):
            root, given = order, add("given")
            order, last, kept = order + 1, given, None
            for block in range(_BLOCKS):
                top, first = order, last
                order += 1
                for leaf in range(_LEAVES):
                    read = (Ref("input.0", add("own") if leaf == 1 else last),)
                    if block == 2 and leaf == 0:  # past the result of the block before
                        read = (*read, Ref("input.1", kept))
                    result = add("output")
                    weight = (Ref("param.weight", weights[block, leaf]),)
                    refs = (*read, *weight, Ref("output.0", result))
                    writer.call(
                        _call(order, top, f"b.{block}.{leaf}", step, f"0_{block}_{leaf}", refs)
                    )
                    kept = result if leaf == 0 else kept
                    order, last = order + 1, result
                for _ in range(_LEAVES - 1):
                    last = add("own")
                refs = (Ref("input.0", first), Ref("output.0", last))
                writer.call(_call(top, root, f"b.{block}", step, f"0_{block}", refs))
            refs = (Ref("input.0", given), Ref("output.0", last))
            writer.call(_call(root, -1, "", step, "0", refs))
    return path


def _call(order, parent, scope, step, number, refs):
    leaf = any(ref.slot.startswith("param") for ref in refs)
    kind = "Linear" if leaf else "Block"
    return Call(
        *(order, scope, "net", step, order),
        parent=parent,
        number=number,
        op_type=kind,
        leaf=leaf,
        refs=refs,
        no_program="not recorded",
    )


class _Block(nn.Module):
    """A container with code of its own before, between and behind its children."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, hidden, mask):
        return hidden + self.down(self.up(self.norm(hidden * 2.0)).relu()) * mask


class _Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.turned, self.head = nn.Sequential(nn.Tanh()), nn.Linear(8, 11)
        self.blocks = nn.ModuleList(_Block() for _ in range(6))

    def forward(self, hidden, mask):
        turned = self.turned(hidden)
        for block in self.blocks:
            hidden = block(hidden, mask) + turned
        return self.head(hidden)


def _captured(path, fault=None):
    torch.manual_seed(0)
    model, mask = _Model().eval(), torch.ones(1, 4, 1)
    with torch.no_grad(), whence.capture(model, path):
        for step in range(18):
            torch.manual_seed(step)
            hidden = torch.randn(1, 4, 8)
            hook = fault(model) if fault is not None and step == 5 else None
            model(hidden, mask)
            if hook is not None:
                hook.remove()
    return path


def _scaled(model):
    return model.blocks[4].down.register_forward_hook(lambda _m, _i, out: out * 1.01)


def _rolled(model):
    return model.blocks[3].register_forward_hook(lambda _m, _i, out: torch.roll(out, 1, -1))


def _in_part(monkeypatch):
    """A list that gets a truth for each comparison of a part: was it the answer?"""
    compared, answered = pipeline._compared_in_part, []

    def seen(*runs):
        result = compared(*runs)
        answered.append(result is not None)
        return result

    monkeypatch.setattr(pipeline, "_compared_in_part", seen)
    return answered


def _answers(reference, target, monkeypatch, **how):
    """(the answer, that of the whole, was the first one about a part?)"""
    answered = _in_part(monkeypatch)
    quick = whence.compare(reference, target, **how)
    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "differing_part", lambda *_: None)
        slow = whence.compare(reference, target, **how)
    return (*(msgspec.structs.replace(r, timing={}) for r in (quick, slow)), answered == [True])


@pytest.mark.parametrize("how", ["rounding", "fault", "nan", "stale"])
@pytest.mark.parametrize("share", [0.002, 0.02])
def test_the_answer_is_that_about_the_whole(how, share, tmp_path, monkeypatch):
    reference = _written(tmp_path / "a")
    target = _written(tmp_path / "b", how=how, share=share, which=lambda slot: slot != "param")
    for asked in ({}, {"replay": False, "strict": True}, {"match": "exact", "tier": "core"}):
        quick, slow, is_part = _answers(reference, target, monkeypatch, **asked)
        assert is_part
        assert isinstance(quick.rows, MadeOnDemand)
        assert quick == slow
        assert list(quick.counts) == list(slow.counts)  # the order is that of the files


def test_a_stale_tensor_is_one_of_a_step_that_is_left_out(tmp_path, monkeypatch):
    reference = _written(tmp_path / "a")
    target = _written(tmp_path / "b", how="stale", share=0.02, which=lambda slot: slot != "param")
    quick, slow, is_part = _answers(reference, target, monkeypatch)
    assert is_part
    stale = [verdict.sentence for verdict in slow.verdicts if "stale" in verdict.sentence]
    assert stale == [v.sentence for v in quick.verdicts if "stale" in v.sentence] != []
    monkeypatch.setattr(pipeline._Beside, "_target_elements", lambda *_: None)
    blind, _, _ = _answers(reference, target, monkeypatch)
    assert sum("stale" in v.sentence for v in blind.verdicts) < len(stale)


def test_what_both_parts_say_is_held_once(tmp_path):
    reference = _written(tmp_path / "a")
    target = _written(tmp_path / "b", how="rounding", which=lambda slot: slot == "output")
    runs = store.open_run(reference), store.open_run(target)
    part = pipeline.differing_part(*runs, CompareOptions())
    assert all(
        ours.refs is theirs.refs
        for ours, theirs in zip(part.reference.calls, part.target.calls, strict=True)
    )
    for side in (part.reference, part.target):
        slots = [ref.slot for call in side.calls for ref in call.refs]
        for texts in (slots, [c.scope for c in side.calls], [c.root for c in side.calls]):
            assert len({id(text) for text in texts}) == len(set(texts))
        shapes = [record.shape for record in side.records]
        assert len({id(shape) for shape in shapes}) == len(set(shapes))


@pytest.mark.parametrize("fault", [_scaled, _rolled])
def test_programs_are_replayed_in_the_part(fault, tmp_path, monkeypatch):
    reference, target = _captured(tmp_path / "a"), _captured(tmp_path / "b", fault)
    for asked in ({}, {"sample": "all"}, {"replay": False}):
        quick, slow, is_part = _answers(reference, target, monkeypatch, **asked)
        assert is_part
        assert quick == slow
        assert slow.status == "different"


def test_files_are_those_of_the_whole(tmp_path, monkeypatch):
    reference = _written(tmp_path / "a")
    target = _written(tmp_path / "b", how="rounding", which=lambda slot: slot == "output")
    quick, slow, is_part = _answers(reference, target, monkeypatch)
    assert is_part
    whence.api.write(quick, tmp_path / "quick")
    whence.api.write(slow, tmp_path / "slow")
    names = {file.name for file in (tmp_path / "slow").iterdir()}
    assert {"report.csv", "report.json", "summary.json"} <= names
    for name in names:
        assert (tmp_path / "quick" / name).read_bytes() == (tmp_path / "slow" / name).read_bytes()
    assert "ulp_max" in (tmp_path / "quick" / "report.csv").read_text().partition("\n")[0]


@pytest.mark.parametrize(
    "other",
    [
        {"which": lambda slot: slot == "param", "share": 0.2},  # parameters
        {"share": 0.9},  # most of the run
        {"hashed": False},  # no hash to tell by
    ],
)
def test_what_is_more_than_a_part_is_looked_at_whole(other, tmp_path, monkeypatch):
    answered = _in_part(monkeypatch)
    reference = _written(tmp_path / "a", hashed=other.get("hashed", True))
    target = _written(tmp_path / "b", how="rounding", **other)
    assert whence.compare(reference, target).coverage.calls == _STEPS * (1 + _BLOCKS * 4)
    assert not answered


def test_integers_that_differ_are_looked_at_whole(tmp_path, monkeypatch):
    answered = _in_part(monkeypatch)
    reference = _written(tmp_path / "a", kind="int64")
    target = _written(tmp_path / "b", kind="int64", how="fault", which=lambda slot: slot == "own")
    whence.compare(reference, target)
    assert not answered


def test_a_container_that_hides_what_others_read_is_opened(tmp_path):
    run = store.open_run(_written(tmp_path / "a"))
    columns = CallColumns(run)
    assert columns.are_plain()
    differ = np.zeros(len(run.records), bool)
    differ[next(r.record for r in _named(run, "b.2.1").refs if r.slot == "output.0")] = True
    kept = kept_calls(columns, differ, makers=False)
    scopes = {run.calls[n].scope for n in np.flatnonzero(kept.is_kept).tolist()}
    assert {"", "b.0", "b.1", "b.2", "b.3", "b.2.0", "b.2.1", "b.2.2"} <= scopes
    assert "b.1.0" in scopes  # its result is read past its block
    assert not {"b.0.0", "b.3.0"} & scopes
    with_makers = kept_calls(columns, differ, makers=True)
    assert (with_makers.is_kept >= kept.is_kept).all()


def _named(run, scope):
    return next(call for call in run.calls if call.scope == scope)
