"""One captured program on a disk that fails: what it computed, what it was told, and what is left.

A record is acknowledged when the writer returned from it. A disk that is full, that fails once, is
interrupted or writes short loses none of these. A kill, and a disk that takes nothing more at all
(EIO or EROFS from then on), may lose what the run format says it may (docs/dev/format.md): what was
added since the last step or flush; everything before is kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import _captured_programs as programs
import numpy as np
import xxhash
from _faulty_disk import Fault, FaultyDisk

import whence
from whence import disk, store
from whence.errors import ElementsMissing, StoreFailed, UnreadableRun

EXIT = 7
SECONDS = 120


class Report(NamedTuple):
    """What a process said before it ended. acks: what the writer returned from, in order:
    ("record", folder, id, digest, whether it has elements), ("call", folder, scope, order),
    ("flush", folder). refused: why the capture did not begin.
    """

    output: bytes
    acks: list[tuple]
    calls: Counter
    happened: bool
    refused: str
    error: str
    exit_code: int
    stderr: str


class Case(NamedTuple):
    """What one fault did. wrong: what must not be, empty where all is well."""

    program: str
    fault: Fault
    happened: bool
    acknowledged: int
    kept: int
    unflushed_lost: int
    wrong: tuple[str, ...]


def run(name: str, place: Path, fault: Fault | None, captured: bool = True) -> list[Report]:
    """Run a program in forked processes; the first of them has the faulty disk."""
    count = 2 if name == "one of two ranks" else 1
    begun, begin = os.pipe()
    children = []
    for rank in range(count):
        faulty = fault if rank == 0 else None
        children.append(_start(name, place, faulty, captured, (rank, count), (begun, begin)))
    os.close(begin)  # all of them have started: none is there before another was
    os.close(begun)
    return [_ended(*child) for child in children]


def _start(name, place, fault, captured, rank_of, pipe):
    out, log = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 - `_ended` does
    pid = os.fork()
    if pid:
        return pid, out, log
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # a library may have set its own
        signal.alarm(SECONDS)
        os.dup2(log.fileno(), 2)
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115 - until the end
        rank, count = rank_of
        os.close(pipe[1])
        os.read(pipe[0], 1)
        if count > 1:
            os.environ.update(WORLD_SIZE=str(count), RANK=str(rank))
            time.sleep(0.03)  # starts are told apart by ticks of 10 ms
        _child(name, place, fault, captured, out)
    except BaseException:  # noqa: BLE001 - whatever it is, the child ends here
        traceback.print_exc()
        os._exit(99)
    os._exit(EXIT)


def _child(name, place, fault, captured, out):
    def say(*what):
        os.write(out.fileno(), pickle.dumps(what))

    _acknowledging(say, place)
    broken = disk.system = FaultyDisk(fault)

    @contextlib.contextmanager
    def capturing(model, **options):
        if not captured:
            yield None
            return
        with contextlib.ExitStack() as stack:
            try:
                listening = stack.enter_context(
                    whence.recording(place)
                    if model is None
                    else whence.capture(model, place, **options)
                )
            except StoreFailed as error:  # before the block: the program is told and decides
                say("refused", str(error))
                listening = None
            if model is not None:
                yield listening
                return
            try:
                yield listening
                stack.close()
            except StoreFailed as error:  # of a recording each call is the user's own
                say("told", str(error))

    output = programs.program_of(name)(capturing)
    say("output", hashlib.sha256(output or b"").digest())
    say("disk", broken.calls, broken.happened)


def _acknowledging(say, place):
    """Have the writer say what it returned from."""

    def of_run(folder):
        return folder.relative_to(place).as_posix()

    writer = store.Writer
    real = {n: getattr(writer, n) for n in ("record", "call", "step", "flush")}

    def record(self, dtype, shape, data, digest, *rest, **more):
        number = real["record"](self, dtype, shape, data, digest, *rest, **more)
        has = data is not None or more.get("external") is not None
        say("record", of_run(self.folder), number, digest.hex(), has)
        return number

    def call(self, line):
        real["call"](self, line)
        say("call", of_run(self.folder), line.scope, line.order)

    def flushing(name):
        def method(self, *args):
            real[name](self, *args)
            if self.folder is not None:
                say("flush", of_run(self.folder))

        return method

    writer.record, writer.call = record, call
    writer.step, writer.flush = flushing("step"), flushing("flush")


def _ended(pid, out, log):
    _, status = os.waitpid(pid, 0)
    out.seek(0)
    said, acks = {}, []
    with contextlib.suppress(EOFError):
        while True:
            kind, *rest = pickle.load(out)  # noqa: S301 - our own child wrote it
            if kind in ("record", "call", "flush"):
                acks.append((kind, *rest))
            else:
                said[kind] = rest
    log.seek(0)
    stderr = log.read().decode("utf-8", "replace")
    out.close()
    log.close()
    return Report(
        *said.get("output", [b""]),
        acks,
        *said.get("disk", [Counter(), True]),
        *said.get("refused", [""]),
        *said.get("told", [""]),
        os.waitstatus_to_exitcode(status),
        stderr,
    )


def judged(name: str, fault: Fault, place: Path, plain: Report, undisturbed: list[Report]) -> Case:
    """Run one case and look at what is left. plain: the program uncaptured. undisturbed: what the
    processes of a capture without a fault said.
    """
    whole = [sum(ack[0] == "call" for ack in report.acks) for report in undisturbed]
    reports = run(name, place, fault)
    wrong: list[str] = []
    acknowledged = kept = lost_unflushed = 0
    for number, report in enumerate(reports):
        dies = number == 0 and fault.kills and report.happened
        if report.exit_code != (-signal.SIGKILL if dies else EXIT) and not (
            fault.kills and report.exit_code == EXIT
        ):
            wrong.append(f"exit code {report.exit_code}: {report.stderr[-300:]}")
        if report.output != plain.output and report.exit_code == EXIT:
            wrong.append("the program computed something else")
        wrong += _told(report, whole[number])
        if len(reports) == 1 and fault.kills and not report.happened:
            wrong.append("the kill never came")
    if not fault.kills and (leftovers := [*place.rglob("*.tmp")]):
        wrong.append(f"left behind: {leftovers}")
    readable, read_errors = _left(place, fault, reports, sum(whole))
    wrong += read_errors
    for number, report in enumerate(reports):
        promised, only_returned = _promised(report, fault if number == 0 else None)
        missing = [ack for ack in promised if ack not in readable]
        if missing:
            wrong.append(f"{len(missing)} acknowledged lost, first {missing[0]}")
        acknowledged += len(promised)
        kept += len(promised) - len(missing)
        lost_unflushed += sum(ack not in readable for ack in only_returned)
    happened = reports[0].happened
    return Case(name, fault, happened, acknowledged, kept, lost_unflushed, tuple(wrong))


def _told(report: Report, whole: int) -> list[str]:
    """Told once if anything is missing, at most once in any case; never a traceback."""
    lines = [line for line in report.stderr.splitlines() if "capture stopped" in line]
    told = len(lines) + bool(report.refused) + bool(report.error)
    wrong = [] if told <= 1 else [f"told {told} times: {lines} {report.refused} {report.error}"]
    calls = sum(ack[0] == "call" for ack in report.acks)
    if report.exit_code == EXIT and calls < whole and not told:
        wrong.append(f"{whole - calls} calls are missing, and nobody was told")
    if "Traceback" in report.stderr or "whence failed" in report.stderr:
        wrong.append(f"on stderr: {report.stderr[-400:]}")
    return wrong


def _promised(report: Report, fault: Fault | None) -> tuple[list[tuple], list[tuple]]:
    """(what has to be there, what the writer returned from besides)."""
    hard = fault is not None and (fault.kills or fault.what in ("EIO for good", "EROFS for good"))
    acks = [ack for ack in report.acks if ack[0] != "flush"]
    if not hard:
        return acks, []
    flushed = max((n for n, ack in enumerate(report.acks) if ack[0] == "flush"), default=-1)
    before = [ack for ack in report.acks[: flushed + 1] if ack[0] != "flush"]
    return before, acks[len(before) :]


def _left(place, fault, reports, whole):
    """What can be read of the run, after `whence recover`, and what is wrong with it."""
    readable: set[tuple] = set()
    wrong: list[str] = []
    acked = any(ack[0] != "flush" for report in reports for ack in report.acks)
    if not (place / "run.json").exists():
        if acked:
            wrong.append("no run is left")
        return readable, wrong
    try:
        store.recover(place)
        opened = store.open_run(place)
    except UnreadableRun as error:
        if any(_promised(report, fault if n == 0 else None)[0] for n, report in enumerate(reports)):
            wrong.append(f"unreadable: {error}")
        return readable, wrong
    except Exception as error:  # noqa: BLE001 - that is what is looked for
        wrong.append(f"{type(error).__name__} on reading: {error}")
        return readable, wrong
    for process in sorted(p.parent for p in place.glob("**/rank*/journal.jsonl")):
        name = process.relative_to(place).as_posix()
        try:
            alone = store.open_run(process.parent, ranks={int(process.name[4:9])})
        except UnreadableRun:  # it has no line
            continue
        for record in alone.records:
            has = record.elements is not None
            if has:
                try:
                    raw = np.ascontiguousarray(alone.array(record.id)).tobytes()
                    if record.hash and xxhash.xxh3_128_digest(raw).hex() != record.hash:
                        wrong.append(f"record {record.id} of {name} reads as other bytes")
                except ElementsMissing as error:
                    wrong.append(f"record {record.id} claims what is not there: {error}")
            readable.add(("record", name, record.id, record.hash, has))
        for call in alone.calls:
            readable.add(("call", name, call.scope, call.order))
    said = bool(opened.ended) or any(n.kind in ("error", "ranks", "stopped") for n in opened.notes)
    if len(opened.calls) < whole and not said:
        wrong.append(f"{len(opened.calls)} of {whole} calls, and the run says nothing of it")
    return readable, wrong
