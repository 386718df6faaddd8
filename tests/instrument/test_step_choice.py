"""Which steps a long run records: numbers, conditions, requests; and the ring of the last ones."""

import math
import os
import random

import pytest
import xxhash

from whence.errors import UsageError
from whence.instrument.options import make
from whence.instrument.step_choice.conditions import (
    Condition,
    Kind,
    Quantity,
    Watcher,
    parse_condition,
)
from whence.instrument.step_choice.gate import gate_of
from whence.instrument.step_choice.requests import Asked, Request, RequestFile, ask
from whence.instrument.step_choice.ring import StepRing
from whence.instrument.step_choice.windows import holds, read_steps
from whence.records import Call, Ref, RunInfo, Step
from whence.store import Writer, create, open_run

# ---- numbers


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("0:3", [0, 1, 2]),
        ("::4", [0, 4, 8]),
        ("1:8:3", [1, 4, 7]),
        ("0-1,5-6", [0, 1, 5, 6]),
        ("8:", [8, 9]),
    ],
)
def test_ranges_hold_steps(text, steps):
    assert [n for n in range(10) if holds(read_steps(text), n)] == steps


def test_every_adds_to_the_steps():
    ranges = make(steps="1:3", every=5).ranges
    assert [n for n in range(11) if holds(ranges, n)] == [0, 1, 2, 5, 10]


@pytest.mark.parametrize("text", ["3-1", "5:5", "a", "1:2:0", "-3", "1,,2"])
def test_what_holds_no_step_is_refused(text):
    with pytest.raises(UsageError, match="steps"):
        read_steps(text)


# ---- conditions


@pytest.mark.parametrize(
    ("text", "condition"),
    [
        ("nan", Condition(Kind.NAN)),
        ("Loss NaN", Condition(Kind.NAN, Quantity.LOSS)),
        ("norm spike", Condition(Kind.SPIKE, Quantity.NORM)),
        ("loss > 10", Condition(Kind.ABOVE, Quantity.LOSS, 10.0)),
        ("norm>1e3", Condition(Kind.ABOVE, Quantity.NORM, 1000.0)),
        ("asked", Condition(Kind.ASKED)),
    ],
)
def test_conditions_are_read(text, condition):
    assert parse_condition(text) == condition


@pytest.mark.parametrize(
    "text", ["", "loss", "> 3", "loss < 3", "loss > much", "loss > 1e", "nan loss"]
)
def test_other_conditions_are_refused(text):
    with pytest.raises(UsageError, match="when"):
        make(when=[text])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ring": 0}, "less than 1"),
        ({"every": 0}, "less than 1"),
        ({"ring_size": "1GB"}, "needs ring"),
        ({"ring": 2, "level": "op"}, "--level modules"),
        ({"when": "nan", "inject": "scale@0"}, "leave one of them out"),
    ],
)
def test_options_that_contradict_are_refused(options, words):
    with pytest.raises(UsageError, match=words):
        make(**options)


def followed(conditions, values, quantity=Quantity.LOSS):
    """Steps in which a condition began to hold."""
    watcher, steps = Watcher(map(parse_condition, conditions)), []
    for step, value in enumerate(values):
        watcher.saw(quantity, value)
        if watcher.step_ended():
            steps.append(step)
    return steps


def test_a_condition_is_told_when_it_begins_to_hold():
    assert followed(["nan"], [1, math.nan, math.nan, 1, math.inf]) == [1, 4]
    assert followed(["loss > 2"], [1, 3, 4, 1, 3]) == [1, 4]
    assert followed(["norm > 2"], [1, 3, 4, 1, 3]) == []


def test_a_spike_stands_out_of_its_own_past():
    draw = random.Random(1)
    falling = [5 * math.exp(-n / 300) + 0.1 * draw.gauss(0, 1) ** 2 for n in range(600)]
    assert followed(["spike"], falling) == []
    planted = [*falling[:400], 9.0, *falling[401:]]
    assert followed(["spike"], planted) == [400]
    assert followed(["spike"], [1.0] * 50 + [1.2] * 50) == []


def test_micro_batches_are_compared_with_their_own_kind():
    watcher = Watcher([parse_condition("spike")])
    for _ in range(100):
        for value in (1.0, 50.0):
            watcher.saw(Quantity.LOSS, value)
        assert watcher.step_ended() == ""


# ---- the gate


class Ring:
    def __init__(self):
        self.through, self.ended, self.written, self.cleared = False, 0, 0, 0

    def end_step(self):
        self.ended += 1

    def write(self):
        self.written += 1
        return 2

    def clear(self):
        self.cleared += 1


def gate(tmp_path, **options):
    told = []
    made = gate_of(make(**options), str(tmp_path), told.append)
    return made, told


def recorded(gate, steps, losses=None):
    taken = []
    for step in range(steps):
        if gate.takes(step):
            taken.append(step)
        if losses:
            gate.watcher.saw(Quantity.LOSS, losses.get(step, 1.0))
        gate.step_ended()
    return taken


def test_windows_alone(tmp_path):
    made, _ = gate(tmp_path, steps="1:3", every=5)
    assert recorded(made, 11) == [0, 1, 2, 5, 10]


def test_a_condition_records_what_follows(tmp_path):
    made, told = gate(tmp_path, when="loss > 5", for_steps=2)
    assert recorded(made, 12, {3: 9.0, 8: 9.0}) == [4, 5, 9, 10]
    assert told == ["loss is 9: recording the next 2 steps"] * 2


def test_a_condition_adds_to_the_windows(tmp_path):
    made, _ = gate(tmp_path, every=10, when="nan", for_steps=2)
    assert recorded(made, 12, {4: math.nan}) == [0, 5, 6, 10]


def test_a_ring_is_written_for_nan_and_spikes(tmp_path):
    made, told = gate(tmp_path, ring=2)
    made.ring = ring = Ring()
    assert recorded(made, 6, {2: math.nan}) == [3, 4, 5]
    assert (ring.ended, ring.written) == (6, 1)
    assert told == ["loss is nan: recording the next 3 steps; written: 2 steps before"]


def test_requests_switch_on_and_off(tmp_path):
    made, told = gate(tmp_path, when="asked")
    made.ring = ring = Ring()

    def after(request):
        ask(tmp_path, request)
        os.utime(tmp_path / "trigger.json", ns=(len(told) + 1, len(told) + 1))
        made._control._looked = -1e9
        return recorded(made, 4)

    assert recorded(made, 2) == []
    assert after(Request(Asked.STEPS, 2)) == [1, 2]
    assert after(Request(Asked.ON)) == [1, 2, 3]
    assert after(Request(Asked.OFF)) == [0]
    assert made.is_off and ring.cleared == 1
    assert after(Request()) == [1, 2, 3]
    assert not made.is_off
    made.close()
    assert not (tmp_path / "trigger.json").exists()


def test_a_request_is_taken_once(tmp_path):
    file = RequestFile(tmp_path / "asked")
    assert not file.take()
    (tmp_path / "asked").write_text("not ours")
    file._looked = -1e9
    assert file.take() and file.request() == Request()
    file._looked = -1e9
    assert not file.take()


# ---- the ring


def record(sink, value, nbytes=64):
    import numpy as np

    data = np.full(nbytes, value, np.uint8)
    digest = xxhash.xxh3_128_digest(data.tobytes())
    return sink.record("uint8", (nbytes,), data, digest, None, None)


def call(sink, number, step, *records, **more):
    refs = tuple(Ref(f"input.{k}", r) for k, r in enumerate(records))
    sink.call(Call(number, "a", "a", step, number, refs=refs, **more))


def ring_of(tmp_path, steps, **options):
    create(tmp_path / "run", RunInfo(), force=True)
    return StepRing(Writer(tmp_path / "run"), steps, **options)


def read(tmp_path):
    run = open_run(tmp_path / "run")
    return run, [(c.step, [int(run.array(r.record)[0]) for r in c.refs]) for c in run.calls]


def test_the_last_steps_are_written_with_what_they_refer_to(tmp_path):
    ring = ring_of(tmp_path, 2)
    frozen = record(ring, 200)
    for step in range(6):
        call(ring, step, step, frozen, record(ring, step))
        ring.step(Step("a", step, 0, True))
        ring.end_step()
    assert ring.write() == 2
    ring.through = True
    call(ring, 6, 6, frozen, record(ring, 6))
    ring.close()
    run, calls = read(tmp_path)
    assert calls == [(4, [200, 4]), (5, [200, 5]), (6, [200, 6])]
    assert len(run.records) == 4 and [s.step for s in run.steps] == [4, 5]


def test_what_is_written_is_written_once(tmp_path):
    ring = ring_of(tmp_path, 3)
    for step in range(4):
        call(ring, step, step, record(ring, step))
        ring.end_step()
        ring.write()
    ring.close()
    assert [step for step, _ in read(tmp_path)[1]] == [0, 1, 2, 3]


def test_memory_of_a_ring_is_flat(tmp_path):
    ring = ring_of(tmp_path, 3)
    sizes = []
    for step in range(50):
        call(ring, step, step, *(record(ring, k) for k in range(5)))
        ring.end_step()
        sizes.append((ring.held_bytes, len(ring._held), len(ring._ended)))
    assert len(set(sizes[3:])) == 1
    ring.clear()
    assert ring.held_bytes == 0


def test_old_steps_leave_early_where_there_is_no_room(tmp_path):
    ring = ring_of(tmp_path, 10, max_bytes=40_000)
    for step in range(8):
        call(ring, step, step, record(ring, step, nbytes=10_000))
        ring.end_step()
    assert ring.held_bytes <= 40_000
    ring.write()
    ring.close()
    run, calls = read(tmp_path)
    assert [step for step, _ in calls] == [5, 6, 7]
    assert any("left the ring early" in note.text for note in run.notes)


def test_a_step_larger_than_the_ring_keeps_its_statistics(tmp_path):
    ring = ring_of(tmp_path, 2, max_bytes=20_000)
    call(ring, 0, 0, record(ring, 1, nbytes=50_000))
    ring.end_step()
    ring.write()
    ring.close()
    run = open_run(tmp_path / "run")
    assert run.records[0].elements is None and "--ring-size" in run.records[0].why


def test_a_record_that_is_gone_leaves_a_reason(tmp_path):
    ring = ring_of(tmp_path, 1)
    old = record(ring, 1)
    for step in range(3):
        call(ring, step, step, record(ring, step))
        ring.end_step()
    call(ring, 9, 9, old)
    ring.end_step()
    ring.write()
    ring.close()
    run = open_run(tmp_path / "run")
    assert "no longer" in run.records[run.calls[0].refs[0].record].why


def test_arguments_are_kept_as_they_were(tmp_path):
    ring, arguments = ring_of(tmp_path, 1), {"n": [1, math.inf]}
    call(ring, 0, 0, record(ring, 1), arguments=arguments)
    arguments["n"][0] = 2
    ring.end_step()
    ring.write()
    ring.close()
    assert open_run(tmp_path / "run").calls[0].arguments == {"n": [1, "inf"]}


def test_elements_of_a_ring_keep_to_the_budget_of_the_run(tmp_path):
    ring = ring_of(tmp_path, 4, budget=150)
    for step in range(4):
        call(ring, step, step, record(ring, step))
        ring.end_step()
    ring.write()
    ring.close()
    run = open_run(tmp_path / "run")
    assert [r.elements is not None for r in run.records] == [True, True, False, False]
    assert run.records[3].why == "over --max-bytes"


def test_a_kill_in_the_middle_of_writing_loses_nothing_written(tmp_path):
    """The process dies while the ring is written: what was written stays readable."""
    pid = os.fork()
    if pid == 0:
        ring = ring_of(tmp_path, 20)
        for step in range(20):
            call(ring, step, step, record(ring, step))
            ring.step(Step("a", step, 0, True))
            ring.end_step()
        writes, one = [], ring._sink.step

        def dies(step):
            one(step)
            writes.append(step)
            if len(writes) == 12:
                os._exit(9)

        ring._sink.step = dies
        ring.write()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    _, calls = read(tmp_path)
    assert calls == [(step, [step]) for step in range(12)]
