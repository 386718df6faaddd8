"""A program may close every descriptor, and give their numbers to files of its own: nothing of a
run is written there, and nothing of the program's is closed.
"""

import errno
import fcntl
import os
from pathlib import Path

import by_hand_store as hand
import pytest

from whence import disk, store
from whence.errors import StoreFailed
from whence.store.folder import JOURNAL
from whence.store.shards import map_file

LARGE = 40_000  # elements that are written at once
NUMBERS = Path("/proc/self/fd")
pytestmark = pytest.mark.skipif(not NUMBERS.exists(), reason="no /proc")


def held(run):
    """Descriptors of this process by what they stand for in a run."""
    found = {}
    for entry in NUMBERS.iterdir():
        try:
            name = str(entry.readlink())
        except OSError:
            continue
        if name.startswith(str(run)):
            found[name.rpartition("/")[2]] = int(entry.name)
    return found


def add(writer, seed, size=LARGE):
    hand.add(writer, hand.bits("float32", (size,), seed), "float32")


def begun(tmp_path):
    run = hand.new(tmp_path / "run")
    writer = store.Writer(run, header_bytes=16 << 10)
    add(writer, 0)
    add(writer, 1, 8)
    writer.flush()
    return run, writer


def is_whole(run):
    """Is all there that `begun` and one more `add` wrote?"""
    opened, sizes = store.open_run(run), (LARGE, 8, LARGE)
    wanted = [hand.bits("float32", (size,), n) for n, size in enumerate(sizes)]
    return not opened.ended and all(hand.same(opened.array(n), w) for n, w in enumerate(wanted))


@pytest.fixture
def mine(tmp_path):
    """A file of the program's. It is closed at the end, by whatever numbers it has."""
    path = tmp_path / "mine"
    fd = os.open(path, os.O_CREAT | os.O_RDWR)
    os.write(fd, b"user\n")
    yield path, fd
    os.close(fd)


def test_descriptors_lie_out_of_the_way_and_are_not_inherited(tmp_path):
    run, writer = begun(tmp_path)
    with writer:
        numbers = held(run)
        assert {JOURNAL, "shard-00000.safetensors"} == set(numbers)
        assert min(numbers.values()) >= disk.HIGH
        assert all(fcntl.fcntl(n, fcntl.F_GETFD) & fcntl.FD_CLOEXEC for n in numbers.values())
    assert not held(run)


@pytest.mark.parametrize("taken", [False, True])
def test_a_run_goes_on_where_the_program_closed_its_descriptors(tmp_path, mine, taken):
    path, fd = mine
    run, writer = begun(tmp_path)
    numbers = list(held(run).values())
    for number in numbers:
        os.dup2(fd, number) if taken else os.close(number)
    add(writer, 2)
    writer.flush()
    assert min(held(run).values()) >= disk.HIGH
    writer.close()
    assert path.read_bytes() == b"user\n"
    assert is_whole(run)
    assert not held(run)
    if taken:
        for number in numbers:
            os.close(number)  # the program's own are still open


def test_a_writer_that_is_closed_closes_nothing_else(tmp_path, mine):
    run, writer = begun(tmp_path)
    numbers = list(held(run).values())
    for number in numbers:
        os.dup2(mine[1], number)
    for file in run.glob("rank*/*"):
        file.unlink()
    with pytest.raises(StoreFailed, match="leave the folder as it is"):
        add(writer, 2)
    for number in numbers:
        os.close(number)
    assert mine[0].read_bytes() == b"user\n"


def test_another_file_at_the_place_is_left_alone(tmp_path):
    run, writer = begun(tmp_path)
    for name, number in held(run).items():
        os.close(number)
        (file,) = run.glob(f"rank*/{name}")
        (tmp_path / "another").write_bytes(b"another's")
        (tmp_path / "another").replace(file)
    with pytest.raises(StoreFailed, match="another file"):
        add(writer, 2)
        writer.flush()
    assert [f.read_bytes() for f in run.glob("rank*/shard-*")] == [b"another's"]
    assert [f.read_bytes() for f in run.glob(f"rank*/{JOURNAL}")] == [b"another's"]


def test_a_child_that_nobody_announced_writes_nothing(tmp_path, monkeypatch):
    run, writer = begun(tmp_path)
    (status,) = run.glob("rank*/status.json")
    before = status.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 1)  # forked by C, without Python's hooks
        with pytest.raises(StoreFailed, match="process that forked"):
            add(writer, 2)
    assert status.read_bytes() == before


def test_below_a_low_limit_nothing_stays_open(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "HIGH", 1 << 30)
    run, writer = begun(tmp_path)
    assert not held(run)
    add(writer, 2)
    writer.close()
    assert is_whole(run)


def test_what_cannot_be_written_for_want_of_a_descriptor_waits(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "HIGH", 1 << 30)
    run, writer = begun(tmp_path)

    def none_left(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    add(writer, 1, 8)
    with monkeypatch.context() as patch:
        patch.setattr(disk.system, "open", none_left)
        writer.flush()
    writer.close()
    assert len(store.open_run(run).records) == 3


def test_a_capture_that_got_no_descriptor_says_so_once_there_is_one(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "HIGH", 1 << 30)
    run, writer = begun(tmp_path)

    def none_left(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(disk.system, "open", none_left)
        with pytest.raises(StoreFailed, match="ulimit -n"):
            add(writer, 2)
    writer.close()
    assert "ulimit -n" in store.open_run(run).ended


def test_a_mapping_holds_no_descriptor(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(bytes(range(256)) * 40)
    before = len(list(NUMBERS.iterdir()))
    mapped = map_file(file)
    assert len(list(NUMBERS.iterdir())) == before
    file.unlink()
    assert mapped.tobytes() == bytes(range(256)) * 40
    with pytest.raises(ValueError, match="read-only"):
        mapped[0] = 1
