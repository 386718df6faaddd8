"""The ring that brings device tensors to the host, with CPU tensors sent through it: order, bounds,
errors, and the same run as without.
"""

import threading

import numpy as np
import pytest
import torch
from live_torch import bits, seeded
from torch import nn

from whence import store
from whence.instrument import options
from whence.instrument.session import Session
from whence.instrument.torch.modules import Listener
from whence.instrument.torch.staging import StagingRing
from whence.records import RunInfo
from whence.store import open_run

pytestmark = pytest.mark.torch


def fail(error):
    raise AssertionError(error)


def test_bytes_arrive_in_order_on_one_other_thread():
    got, threads = [], set()
    ring = StagingRing(fail)
    for n in range(50):

        def arrived(data, copied, n=n):
            got.append((n, data.size, float(copied[0])))
            threads.add(threading.get_ident())

        ring.submit(torch.full((n + 1,), float(n)), arrived)
        ring.then(lambda n=n: got.append(("then", n)))
    ring.close()
    assert got == [item for n in range(50) for item in ((n, 4 * (n + 1), float(n)), ("then", n))]
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    assert not ring.pending
    assert ring.waiting_bytes == 0
    ring.close()
    ring.submit(torch.ones(3), lambda *_: got.append("late"))
    ring.then(lambda: got.append("late"))
    ring.close()
    assert "late" not in got


def test_writes_after_submit_do_not_reach_the_copy():
    gate, got = threading.Event(), []
    ring = StagingRing(fail)
    ring.then(gate.wait)
    value = torch.ones(4)
    ring.submit(value, lambda data, _: got.append(data.view(np.float32).tolist()))
    value.zero_()
    gate.set()
    ring.close()
    assert got == [[1.0] * 4]


def test_submit_waits_for_room():
    gate, third = threading.Event(), threading.Event()
    ring = StagingRing(fail, limit_bytes=1000)
    ring.then(gate.wait)
    ring.submit(torch.zeros(100), lambda *_: None)
    ring.submit(torch.zeros(100), lambda *_: None)

    def more():
        ring.submit(torch.zeros(100), lambda *_: None)
        third.set()

    thread = threading.Thread(target=more)
    thread.start()
    assert not third.wait(0.05)
    assert ring.waiting_bytes == 800
    gate.set()
    thread.join()
    ring.submit(torch.zeros(10_000), lambda *_: None)  # larger than the ring: alone
    ring.close()


def test_an_error_ends_the_ring_and_frees_who_waits():
    told, ran = [], []
    gate = threading.Event()
    ring = StagingRing(told.append, limit_bytes=1000)
    ring.then(gate.wait)
    ring.then(lambda: 1 / 0)
    ring.submit(torch.zeros(200), lambda *_: ran.append(1))
    threading.Timer(0.02, gate.set).start()
    ring.submit(torch.zeros(200), lambda *_: ran.append(2))
    ring.drain()
    ring.close()
    assert [type(e) for e in told] == [ZeroDivisionError]
    assert ran == []
    assert not ring.pending


# ---- a whole capture through the ring


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.norm, self.act, self.big = (
            nn.Linear(6, 8),
            nn.BatchNorm1d(8),
            nn.ReLU(inplace=True),
            nn.Linear(8, 400),
        )

    def forward(self, x, cache):
        y = self.act(self.norm(self.fc(x)))
        cache.k = y if cache.k is None else torch.cat([cache.k, y])
        if not torch.is_grad_enabled():
            x.add_(1)
        return {"out": self.big(y.t().t()), "strided": y[:, ::2]}


class Cache:
    k = None

    def __init__(self):
        self.k = None


def run_of(path, use, *, staged, **more):
    seeded()
    store.create(path, RunInfo())
    model = Net()
    said = []
    session = Session(
        lambda rank: store.Writer(path, rank),
        options.make(**more),
        max_bytes=more.get("max_bytes", 10**9),
        say=said.append,
    )
    listener = Listener(session, model, staged=staged)
    listener.install()
    try:
        out = bits(use(model))
    finally:
        listener.remove()
        session.close()
    return open_run(path), out, said


def infer(model):
    cache = Cache()
    with torch.no_grad():
        return [model.eval()(torch.randn(3, 6), cache) for _ in range(3)]


def infer_inference_mode(model):
    cache = Cache()
    with torch.inference_mode():
        return [model.eval()(torch.randn(3, 6), cache) for _ in range(3)]


def train(model):
    opt = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        model(torch.randn(3, 6), Cache())["out"].sum().backward()
        opt.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("use", [infer, infer_inference_mode, train])
def test_the_same_run_as_without_the_ring(use, tmp_path):
    (one, out_one, _), (two, out_two, _) = (
        run_of(tmp_path / str(s), use, staged=s) for s in (False, True)
    )
    assert out_one == out_two
    assert one.ended == two.ended == ""
    assert [n.kind for n in two.notes if n.kind == "error"] == []
    assert len(one.records) == len(two.records)
    assert [c.key() for c in one.calls] == [c.key() for c in two.calls]
    for a, b in zip(one.calls, two.calls):
        assert [(r.slot, r.record, r.edge) for r in a.refs] == [
            (r.slot, r.record, r.edge) for r in b.refs
        ], a.scope
        assert bool(a.program) == bool(b.program)
    for a, b in zip(one.records, two.records):
        for field in ("dtype", "shape", "stride", "storage_offset", "hash", "statistics", "sketch"):
            assert getattr(a, field) == getattr(b, field)
        assert type(a.elements) is type(b.elements)
        if a.elements is not None:
            assert one.array(a.id).tobytes() == two.array(b.id).tobytes()


@pytest.mark.parametrize("staged", [False, True])
def test_the_budget_never_splits_a_call(staged, tmp_path):
    run, _, _ = run_of(tmp_path / "run", infer, staged=staged, max_bytes=26_000)
    kept = {s.step: s.kept for s in run.steps}
    assert kept[0]
    assert not kept[2]
    for c in run.calls:
        new = {
            run.records[r.record].elements is not None
            for r in c.refs
            if r.edge == "" and not r.slot.startswith("param")
        }
        assert len(new) <= 1, c.scope


def test_on_record_gets_a_tensor(tmp_path):
    seeded()
    seen = []
    store.create(tmp_path / "run", RunInfo())
    inner = nn.Linear(2, 2)

    def on_record(op_type, name, value):
        inner(torch.ones(1, 2))  # a module of the user's: not the program's
        seen.append((name, tuple(value.shape)))

    session = Session(
        lambda rank: store.Writer(tmp_path / "run", rank),
        options.make(),
        max_bytes=10**9,
        on_record=on_record,
        say=lambda _: None,
    )
    listener = Listener(session, None, staged=True)
    listener.install()
    nn.Linear(6, 4)(torch.ones(3, 6))
    listener.remove()
    session.close()
    assert (":input.0", (3, 6)) in seen
    assert len(open_run(tmp_path / "run").calls) == 1


def test_a_failing_disk_ends_the_capture_not_the_program(tmp_path):
    class Full(store.Writer):
        def record(self, *args, **kwargs):
            if self.count > 8:
                raise MemoryError("no room")
            return super().record(*args, **kwargs)

    seeded()
    store.create(tmp_path / "run", RunInfo())
    model, said = Net(), []
    session = Session(
        lambda rank: Full(tmp_path / "run", rank), options.make(), max_bytes=10**9, say=said.append
    )
    listener = Listener(session, model, staged=True)
    listener.install()
    with torch.no_grad():
        out = model.eval()(torch.ones(3, 6), Cache())
        again = model(torch.ones(3, 6), Cache())
    listener.remove()
    session.close()
    assert torch.equal(out["out"], again["out"])
    assert [line for line in said if "capture stopped" in line and "MemoryError: no room" in line]
    run = open_run(tmp_path / "run")
    assert [n.text for n in run.notes if n.kind == "error"]
    assert all(run.array(r.id).shape == r.shape for r in run.records)
