"""Runs that are equal in every line are answered from columns: as the stages would, and without
decoding a call.
"""

import copy
import random

import msgspec
import numpy as np
import pytest
import torch
import xxhash
from torch import nn

import whence
from whence import store
from whence.comparison import equal_runs
from whence.records import Call, Ref, RunInfo
from whence.results.sequence import MadeOnDemand
from whence.store import StoredRun


class _Block(nn.Module):
    """A container with code of its own before, between and behind its children."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, hidden, mask):
        hidden = self.first(hidden * 2.0) + hidden
        return self.second(hidden.relu()) * mask


class _Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(11, 6), nn.ModuleList([_Block(), _Block()])
        self.head = nn.Linear(6, 11)

    def forward(self, ids, mask):
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden, mask)
        return self.head(hidden)


def _captured(path, level="modules"):
    torch.manual_seed(0)
    model = _Model().eval()
    with torch.no_grad(), whence.capture(model, path, level=level):
        for step in range(3):
            model(torch.arange(4)[None] + step, torch.tensor([[[1.0], [1.0], [0.0], [1.0]]]))


def _recorded(path):
    with whence.recording(path) as run:
        for step in range(20):
            for name in ("a", "b", "a"):
                run.add(name, np.linspace(0, 1 + step, 9, dtype=np.float32) ** 0.5, step=step)


def _by_hand(path, *, argument=1, seconds=0.5, hashed=True, notes=()):
    with store.Writer(store.create(path, RunInfo())) as writer:
        for number in range(3):
            data = np.full(4, number, np.float32).view(np.uint8)
            digest = xxhash.xxh3_128_digest(data) if hashed or number else b""
            writer.record("float32", (4,), data, digest, None, None)
        writer.call(
            Call(
                *(1, "inner", "net", 0, 1),
                parent=0,
                leaf=True,
                refs=(Ref("input.0", 1), Ref("output.0", 2)),
                arguments={"p": argument},
                seconds=seconds,
                notes=notes,
            )
        )
        writer.call(Call(0, "", "net", 0, 0, refs=(Ref("input.0", 0), Ref("output.0", 2))))


def _answers(reference, target, monkeypatch, **how):
    """(the answer, that of the stages, was the first read off columns?)"""
    answer, given = equal_runs.answer, []

    def seen(*runs):
        given.append(answer(*runs))
        return given[-1]

    monkeypatch.setattr(equal_runs, "answer", seen)
    quick = whence.compare(reference, target, **how)
    monkeypatch.setattr(equal_runs, "answer", lambda *_: None)
    slow = whence.compare(reference, target, **how)
    monkeypatch.setattr(equal_runs, "answer", answer)
    return quick, slow, any(made is not None for made in given)


@pytest.mark.parametrize("write", [_captured, _recorded, _by_hand])
def test_the_answer_is_that_of_the_stages(write, tmp_path, monkeypatch):
    write(tmp_path / "a")
    write(tmp_path / "b")
    for how in ({}, {"replay": False}, {"match": "exact", "sample": "all"}):
        quick, slow, is_quick = _answers(tmp_path / "a", tmp_path / "b", monkeypatch, **how)
        assert is_quick
        assert isinstance(quick.rows, MadeOnDemand)
        assert isinstance(slow.rows, tuple)
        assert msgspec.structs.replace(quick, timing={}) == msgspec.structs.replace(slow, timing={})
        assert slow.status == "same"


def test_its_files_are_those_of_the_stages(tmp_path, monkeypatch):
    _captured(tmp_path / "a")
    quick, slow, _ = _answers(tmp_path / "a", tmp_path / "a", monkeypatch)
    whence.api.write(msgspec.structs.replace(quick, timing={}), tmp_path / "quick")
    whence.api.write(msgspec.structs.replace(slow, timing={}), tmp_path / "slow")
    names = {file.name for file in (tmp_path / "slow").iterdir()}
    assert {"report.csv", "report.json", "summary.json"} <= names
    for name in names:
        assert (tmp_path / "quick" / name).read_bytes() == (tmp_path / "slow" / name).read_bytes()
    again = whence.load_comparison(tmp_path / "quick")
    assert again == msgspec.structs.replace(slow, timing={})
    assert copy.copy(quick.rows) == slow.rows


def test_no_call_is_decoded(tmp_path, monkeypatch):
    _recorded(tmp_path / "a")
    decoded = []
    for name in ("_call", "_record"):
        made = getattr(StoredRun, name)
        monkeypatch.setattr(
            StoredRun, name, lambda self, n, made=made: decoded.append(n) or made(self, n)
        )
    result = whence.compare(tmp_path / "a", tmp_path / "a", output=tmp_path / "out")
    assert result.counts == {"identical": 60}
    assert result.notes[0] == f"both are one run, compared with itself: {tmp_path / 'a'}"
    assert decoded == []


@pytest.mark.parametrize(
    ("change", "is_quick"),
    [
        ({}, True),
        ({"seconds": 0.75}, True),
        ({"argument": 2}, False),
        ({"hashed": False}, False),
        ({"notes": ("not selected",)}, False),
    ],
)
def test_what_may_differ(change, is_quick, tmp_path, monkeypatch):
    _by_hand(tmp_path / "a", **({} if "hashed" not in change else change))
    _by_hand(tmp_path / "b", **change)
    assert _answers(tmp_path / "a", tmp_path / "b", monkeypatch)[2] is is_quick


def test_runs_of_operators_and_what_is_declared_are_left_to_the_stages(tmp_path, monkeypatch):
    _captured(tmp_path / "a", level="op")
    assert not _answers(tmp_path / "a", tmp_path / "a", monkeypatch)[2]
    for name in "bc":
        _by_hand(tmp_path / name)
    for how in ({"occurrences": True}, {"again": [tmp_path / "c"]}, {"match": "order"}):
        assert not _answers(tmp_path / "b", tmp_path / "b", monkeypatch, **how)[2]


def test_a_sequence_made_on_demand_is_like_its_tuple():
    squares = MadeOnDemand(10_000, lambda start, stop: (n * n for n in range(start, stop)))
    plain = tuple(n * n for n in range(10_000))
    assert squares == plain
    assert squares != plain[:-1]
    assert (squares[7], squares[-1], squares[4095:4098]) == (49, 9999**2, plain[4095:4098])
    with pytest.raises(IndexError):
        squares[10_000]


def _grown(path, seed):
    """A run of random trees: containers and leaves read what was made anywhere before, and return
    tensors that are new, handed on or changed in place.
    """
    draw = random.Random(seed)
    with store.Writer(store.create(path, RunInfo())) as writer:
        made = []
        order = iter(range(1000))

        def record():
            dtype = draw.choice(["float32", "float32", "int64"])
            data = np.full(4, len(made), dtype).view(np.uint8)
            digest = xxhash.xxh3_128_digest(data)
            made.append(writer.record(dtype, (4,), data, digest, None, None))
            return made[-1]

        def some(kind, most):
            numbers = [
                draw.choice(made) if made and draw.random() < 0.7 else record()
                for _ in range(draw.randint(0, most))
            ]
            return [Ref(f"{kind}.{n}", number) for n, number in enumerate(numbers)]

        def call(scope, step, parent, depth):
            number = next(order)
            read = [*some("input", 3), *some("param", 1)]
            for child in range(draw.randint(0, 3) if depth else 0):
                call(f"{scope}.{child}".strip("."), step, number, depth - 1)
            left = [*some("output", 2), *some("mutated", 1)]
            refs = (*read, *left) or (Ref("input.0", record()),)
            writer.call(Call(number, scope, "net", step, number, parent=parent, refs=refs))

        for step in range(2):
            call("", step, -1, 3)


@pytest.mark.parametrize("seed", range(12))
def test_whatever_containers_make_is_found_from_columns(seed, tmp_path, monkeypatch):
    _grown(tmp_path / "a", seed)
    quick, slow, is_quick = _answers(tmp_path / "a", tmp_path / "a", monkeypatch)
    assert is_quick
    assert msgspec.structs.replace(quick, timing={}) == msgspec.structs.replace(slow, timing={})
