"""Pools of which a call touches a few rows: these rows are recorded, not the memory."""

import math

import live_torch
import pytest
import torch
from torch import nn

import whence
from whence.store import open_run

pytestmark = pytest.mark.torch

ROWS, WIDTH = 1 << 14, 32  # 2 MiB


class Carved:
    """One memory with a view of its own for keys and one for values, as paged caches are cut."""

    def __init__(self):
        self.memory = torch.zeros(2 * ROWS, WIDTH)
        self.keys, self.values = self.memory[:ROWS], self.memory[ROWS:]


class Ring:
    """Two memories of which a call reads a window."""

    def __init__(self):
        self.keys, self.values = torch.zeros(ROWS, WIDTH), torch.zeros(ROWS, WIDTH)


class Attention(nn.Module):
    """Writes its keys and values into rows of a pool, and attends to rows of it."""

    def __init__(self, slices=False, fault=0):
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.slices, self.fault = slices, fault

    def forward(self, x, write, read, pool):
        query, key, value = self.project(x).chunk(3, -1)
        if self.slices:
            start = int(write[0])
            pool.keys[start : start + len(x)] = key
            pool.values[start : start + len(x)] = value
        else:
            pool.keys.index_copy_(0, write, key)
            pool.values.index_put_((write,), value)
        keys, values = pool.keys[read - self.fault], torch.index_select(pool.values, 0, read)
        return torch.softmax(query @ keys.T / WIDTH**0.5, -1) @ values


class Decoder(nn.Module):
    def __init__(self, **settings):
        super().__init__()
        self.first, self.second = Attention(**settings), Attention(slices=settings.get("slices"))

    def forward(self, x, write, read, pool):
        x = x + self.first(x, write, read, pool=pool)
        return x + self.second(x, write + 4096, read + 4096, pool=pool)


def decoded(path, pool=Carved, first=64, **settings):
    """Six steps of one token after a prompt of five; what they return."""
    torch.manual_seed(0)
    model, memory = Decoder(**settings).eval(), pool()
    tokens = torch.randn(11, WIDTH)

    def steps():
        outs, end = [], 0
        for length in (5, *[1] * 6):
            write = torch.arange(first + end, first + end + length)
            end += length
            read = torch.arange(first, first + end)
            with torch.no_grad():
                outs.append(model(tokens[end - length : end], write, read, pool=memory))
        return [*outs, memory.keys, memory.values]

    if path is None:
        return steps()
    with whence.capture(model, path):
        return steps()


def sizes(run):
    """Elements of the largest record, by kind of slot, of tensors that hang in the pool."""
    largest = {}
    for call in run.calls:
        for ref in call.refs:
            if ".pool" in ref.slot:
                kind = ref.slot.split(".")[0]
                size = math.prod(run.records[ref.record].shape)
                largest[kind] = max(size, largest.get(kind, 0))
    return largest


@pytest.mark.parametrize("slices", [False, True])
def test_rows_of_a_pool_are_recorded_and_not_the_pool(tmp_path, slices):
    captured = decoded(tmp_path / "run", slices=slices)
    assert live_torch.bits(captured) == live_torch.bits(decoded(None, slices=slices))
    run = open_run(tmp_path / "run")
    assert sizes(run) == {"mutated": 5 * WIDTH, "input": 11 * WIDTH}
    attention = [call for call in run.calls if call.scope == "first"]
    for call in attention:
        rows = [ref.slot for ref in call.refs if ".rows." in ref.slot]
        assert rows == [
            "mutated.pool.rows.0",
            "mutated.pool.rows.1",
            "input.pool.rows.2",
            "input.pool.rows.3",
        ]
    assert all(call.program for call in attention)


def test_a_pool_is_known_by_how_it_is_read(tmp_path):
    decoded(tmp_path / "run", pool=Ring)
    run = open_run(tmp_path / "run")
    late = [call for call in run.calls if call.step > 0 and call.scope in ("first", "second")]
    assert late
    for call in late:
        assert all(
            math.prod(run.records[ref.record].shape) <= 11 * WIDTH
            for ref in call.refs
            if ".pool" in ref.slot
        )


def test_where_rows_lie_makes_no_difference(tmp_path):
    decoded(tmp_path / "reference")
    decoded(tmp_path / "target", first=1024)
    assert whence.compare(tmp_path / "reference", tmp_path / "target").status == "same"


def test_a_call_that_reads_the_wrong_row_is_at_fault(tmp_path):
    decoded(tmp_path / "reference")
    decoded(tmp_path / "target", fault=1)
    result = whence.compare(tmp_path / "reference", tmp_path / "target")
    assert result.status == "different"
    assert [finding.slot for finding in result.findings] == ["first:input.pool.rows.2"]
