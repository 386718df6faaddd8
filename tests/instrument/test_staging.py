"""The ring that brings device tensors to the host, with CPU tensors sent through it: order, bounds,
errors, and the same run as without.
"""

import contextlib
import threading

import numpy as np
import pytest
import torch
from live_torch import bits, seeded
from torch import nn

from whence import _kernels, store
from whence.frameworks import host, torch_arrays
from whence.instrument import options
from whence.instrument.session import Session
from whence.instrument.torch import tensor_identity
from whence.instrument.torch.modules import Listener
from whence.instrument.torch.tensor_identity import StagingRing
from whence.records import RunInfo
from whence.store import open_run

pytestmark = pytest.mark.torch


def fail(error):
    raise AssertionError(error)


def test_bytes_arrive_in_order_on_one_other_thread():
    got, threads = [], set()
    ring = StagingRing(fail)
    for n in range(50):

        def arrived(arrival, n=n):
            got.append((n, arrival.nbytes, float(arrival.copied[0])))
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
    ring.submit(torch.ones(3), lambda _: got.append("late"))
    ring.then(lambda: got.append("late"))
    ring.close()
    assert "late" not in got


def test_writes_after_submit_do_not_reach_the_copy():
    gate, got = threading.Event(), []
    ring = StagingRing(fail)
    ring.then(gate.wait)
    value = torch.ones(4)
    ring.submit(value, lambda arrival: got.append(arrival.copied.tolist()))
    value.zero_()
    gate.set()
    ring.close()
    assert got == [[1.0] * 4]


def test_submit_waits_for_room():
    gate, third = threading.Event(), threading.Event()
    ring = StagingRing(fail, limit_bytes=1000)
    ring.then(gate.wait)
    ring.submit(torch.zeros(100), lambda _: None)
    ring.submit(torch.zeros(100), lambda _: None)

    def more():
        ring.submit(torch.zeros(100), lambda _: None)
        third.set()

    thread = threading.Thread(target=more)
    thread.start()
    assert not third.wait(0.05)
    assert ring.waiting_bytes == 800
    gate.set()
    thread.join()
    ring.submit(torch.zeros(10_000), lambda _: None)  # larger than the ring: alone
    ring.close()


def test_an_error_ends_the_ring_and_frees_who_waits():
    told, ran = [], []
    gate = threading.Event()
    ring = StagingRing(told.append, limit_bytes=1000)
    ring.then(gate.wait)
    ring.then(lambda: 1 / 0)
    ring.submit(torch.zeros(200), lambda _: ran.append(1))
    threading.Timer(0.02, gate.set).start()
    ring.submit(torch.zeros(200), lambda _: ran.append(2))
    ring.drain()
    ring.close()
    assert [type(e) for e in told] == [ZeroDivisionError]
    assert ran == []
    assert not ring.pending


def test_what_nothing_ends_is_handed_over_all_the_same():
    came = threading.Event()
    ring = StagingRing(fail)
    ring.submit(torch.ones(3), lambda _: came.set())
    assert came.wait(10)
    ring.close()


def test_flush_hands_over_without_waiting(monkeypatch):
    monkeypatch.setattr(tensor_identity, "AGE_S", 3600)
    came = threading.Event()
    ring = StagingRing(fail)
    ring.flush()
    ring.submit(torch.ones(3), lambda _: came.set())
    ring.flush()
    assert came.wait(10)
    ring.close()


@pytest.mark.parametrize("kernels", [False, True])
def test_chunks_are_filled_again_and_other_threads_describe_them(kernels, monkeypatch):
    monkeypatch.setattr(tensor_identity, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(tensor_identity, "SHARED_BYTES", 1)
    monkeypatch.setattr(tensor_identity, "_processors", lambda: 4)
    made, threads, got = [], set(), []
    chunk, describe = tensor_identity.Chunk, host.describe_many
    monkeypatch.setattr(tensor_identity, "Chunk", lambda n: made.append(n) or chunk(n))

    def describing(contents):
        threads.add(threading.current_thread().name)
        return describe(contents)

    monkeypatch.setattr(host, "describe_many", describing)
    if not kernels:
        monkeypatch.setattr(_kernels, "compiled", None)
    gate = threading.Event()
    ring = StagingRing(fail, limit_bytes=40_000)
    ring.then(gate.wait)
    values = [torch.randn(n % 700 + 1) for n in range(0, 70_000, 331)]
    threading.Timer(0.05, gate.set).start()
    for value in values:
        ring.submit(value, lambda a: got.append((a.digest, a.figures, a.nbytes)), "float32")
    ring.close()
    expected = [host.statistics(v.numpy().view(np.uint8), "float32") for v in values]
    assert [d for d, _, _ in got] == [host.digest(v.numpy().view(np.uint8)) for v in values]
    assert [f for _, f, _ in got] == (expected if kernels else [None] * len(values))
    assert "whence-figures" in threads
    assert sum(made) <= 40_000 < sum(n for _, _, n in got)


def test_an_error_on_a_describing_thread_ends_the_ring(monkeypatch):
    def failing(contents):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(host, "describe_many", failing)
    told, ran = [], []
    ring = StagingRing(told.append)
    ring.submit(torch.ones(3), ran.append)
    ring.drain()
    ring.close()
    assert [str(e) for e in told] == ["an illegal memory access was encountered"]
    assert ran == []


def test_a_ctrl_c_inside_a_copy_loses_that_tensor_only(monkeypatch):
    copy, got = tensor_identity.Chunk.copy, []

    def interrupted(chunk, tensor, *more):
        out = copy(chunk, tensor, *more)
        if tensor.numel() == 5:
            raise KeyboardInterrupt
        return out

    monkeypatch.setattr(tensor_identity.Chunk, "copy", interrupted)
    ring = StagingRing(fail)
    for n in (4, 5, 6):
        with contextlib.suppress(KeyboardInterrupt):
            ring.submit(torch.full((n,), float(n)), lambda a: got.append(a.copied.tolist()))
    assert ring.waiting_bytes == 40
    ring.drain()
    ring.close()
    assert got == [[4.0] * 4, [6.0] * 6]


def test_the_bytes_are_read_behind_an_event_of_every_stream(monkeypatch):
    log = []

    class Event:
        def __init__(self, device, blocking):
            self.stream, self.recorded = stream[0], 0

        def record(self):
            self.recorded += 1

        def synchronize(self):
            log.append((self.stream, self.recorded))

    stream = ["one"]
    monkeypatch.setattr(tensor_identity, "copies_in_the_background", lambda device: True)
    monkeypatch.setattr(tensor_identity, "stream_of", lambda device: stream[0])
    monkeypatch.setattr(torch, "Event", Event)
    ring = StagingRing(fail)
    for stream[0] in ("one", "two", "one"):
        ring.submit(torch.ones(3), lambda _: log.append("arrived"))
    ring.drain()
    ring.submit(torch.ones(3), lambda _: log.append("arrived"))
    ring.close()
    assert log == [("one", 2), ("two", 1), *["arrived"] * 3, ("one", 3), "arrived"]


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(6).expand(4, 6),
        torch.randn(3, 2, dtype=torch.complex64).conj(),
        torch.randn(3, dtype=torch.complex128).conj().imag,
        torch.tensor(2.5, dtype=torch.bfloat16, requires_grad=True),
        torch.zeros(0, 3, dtype=torch.int16),
        torch.tensor([True, False]),
        torch.randn(5).to(torch.float8_e4m3fn),
    ],
)
def test_what_arrives_is_the_canonical_bytes(value):
    got = []
    ring = StagingRing(fail)
    ring.submit(torch.ones(3), lambda _: None)
    ring.submit(
        value,
        lambda a: got.append((host.bytes_at(a.address, a.nbytes).tobytes(), a.copied.clone())),
    )
    ring.close()
    ((data, copied),) = got
    assert data == torch_arrays.canonical(value).tobytes()
    assert copied.shape == value.shape
    assert not copied.requires_grad


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


def run_of(path, use, *, staged, any_model=False, **more):
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
    listener = Listener(session, None if any_model or use is hand_on else model, staged=staged)
    listener.install()
    try:
        out = bits(use(model))
    finally:
        listener.remove()
        session.close()
    return open_run(path), out, said


class Writes(nn.Module):
    """Writes into what it is given past torch's count of versions, as a kernel of one's own may."""

    def forward(self, x):
        x.numpy()[0] += 1
        return x


class HandsOn(nn.Module):
    def __init__(self):
        super().__init__()
        self.keep, self.write, self.act = nn.Identity(), Writes(), nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.keep(self.write(self.keep(x)))
        y = self.act(self.keep(y))
        y.data = y.data.flip(0)
        return self.keep(self.keep(y) * 2)


def hand_on(_):
    model = HandsOn()
    with torch.no_grad():
        out = [model(torch.randn(3, 6))]
    with torch.inference_mode():
        return [*out, model(torch.randn(3, 6))]


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


@pytest.mark.parametrize("use", [infer, infer_inference_mode, train, hand_on])
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


def test_on_record_may_keep_what_it_gets(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_identity, "CHUNK_BYTES", 64)
    kept = []
    store.create(tmp_path / "run", RunInfo())
    session = Session(
        lambda rank: store.Writer(tmp_path / "run", rank),
        options.make(),
        max_bytes=10**9,
        on_record=lambda op_type, name, value: kept.append(value) and None,
        say=lambda _: None,
    )
    listener = Listener(session, None, staged=True)
    listener.install()
    relu = nn.ReLU()
    for n in range(1, 40):
        relu(torch.full((16,), float(n)))
    listener.remove()
    session.close()
    # of input and output each
    assert [float(v[-1]) for v in kept] == [float(n) for n in range(1, 40) for _ in range(2)]


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
    assert [n.text for n in run.notes if n.kind == "stopped"]
    assert all(run.array(r.id).shape == r.shape for r in run.records)


def test_nothing_is_read_while_a_graph_is_recorded(tmp_path, monkeypatch):
    recording = []
    for module in (tensor_identity, tensor_identity):
        monkeypatch.setattr(module, "is_recorded_as_graph", lambda device: bool(recording))
    relu = nn.ReLU()

    def use(_):
        x = torch.randn(3)
        relu(x)
        recording.append(True)
        relu(x)
        recording.clear()
        return [relu(x)]

    run, _, said = run_of(tmp_path / "run", lambda _: use(_), staged=True, any_model=True)
    assert not [line for line in said if "stopped" in line]
    reasons = [[run.records[r.record].why for r in call.refs] for call in run.calls]
    assert reasons[0] == reasons[2] == ["", ""]
    assert all("CUDA graph" in why for why in reasons[1])
