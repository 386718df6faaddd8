"""Dumps that were damaged or made to do harm, for the tests of all readers.

`variants` gives copies of a dump in which one file is spoilt, `survives` opens one and reads all of
it under guard.
"""

import contextlib
import functools
import io
import os
import pickle
import random
import shutil
import struct
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from counting import counted
from whence.errors import ElementsMissing, WhenceError
from whence.readers import Place, known
from whence.readers import open_run as open_any
from whence.records import Run

# Names that a dump may give and that lead out of it.
ESCAPES = ("../../../../etc/passwd", "/etc/passwd", "a/../../b", "..", "x\0y", "file:///etc/passwd")
# How many ways of cutting a file and of flipping a byte in it are tried: all of them where
# WHENCE_TESTS=all is set.
_CUTS, _FLIPS = (24, 48) if os.environ.get("WHENCE_TESTS") == "all" else (8, 16)
_PEAK_BYTES = 64 << 20
# 25 for each byte of the largest variant; what grows with the square of its size needs thousands of
# times as many
_CALLS = 5_000_000


def truncations(data: bytes, count: int = _CUTS) -> Iterator[tuple[str, bytes]]:
    """Cut at many lengths, the first bytes one by one."""
    for length in sorted(
        {
            *range(min(8, len(data))),
            *(len(data) * i // count for i in range(count)),
            max(len(data) - 1, 0),
        }
    ):
        yield f"cut at {length}", data[:length]


def flips(data: bytes, count: int = _FLIPS) -> Iterator[tuple[str, bytes]]:
    """One byte changed, at places that are the same each time; half of them near the start, where
    headers are.
    """
    draw = random.Random(len(data))
    for i in range(count if data else 0):
        place = draw.randrange(min(len(data), 256) if i % 2 else len(data))
        yield (
            f"byte {place} flipped",
            data[:place]
            + bytes([data[place] ^ draw.choice((1, 0x80, 0xFF, 0x10))])
            + data[place + 1 :],
        )


def strangers(marker: Path) -> Iterator[tuple[str, bytes]]:
    """Files of another kind than what a reader expects, each asking for too much. marker: what the
    pickle would write if it ran.
    """
    yield "empty", b""
    yield "zeros", b"\0" * 4096
    yield "a pickle that writes a file", evil_pickle(marker)
    for dtype in ("<f4", "|O"):
        yield (
            f"npy header of {dtype} with a huge shape",
            npy_header((1 << 40, 1 << 20), dtype) + b"\0" * 64,
        )
    yield "npy with a negative shape", npy_header((-5, 4)) + b"\0" * 64
    yield "safetensors with a huge header", struct.pack("<Q", 1 << 60) + b"{" * 100
    yield "deep JSON", b"[" * 200_000
    yield "deep JSON in a dict", b'{"a":' * 100_000
    yield "JSON with a huge number", b'{"shape": [' + b"9" * 10_000 + b"]}"
    yield "a zip bomb", zip_bomb()
    yield "protobuf with a huge length", b"\x0a" + b"\xff" * 9 + b"\x01"


def evil_pickle(marker: Path) -> bytes:
    """A pickle that creates a file when it is executed."""

    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (marker,)

    return pickle.dumps({"tensor": Evil()})


def npy_header(shape: tuple[int, ...], dtype: str = "<f4", fortran: bool = False) -> bytes:
    """The header of a .npy file that says so, without elements."""
    text = repr({"descr": dtype, "fortran_order": fortran, "shape": shape})
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text) + 1) + text.encode() + b"\n"


@functools.cache
def zip_bomb(name: str = "x.npy", nbytes: int = 1 << 29) -> bytes:
    """Half a megabyte that unpacks to 512 MiB of zeros behind a valid .npy header."""
    out = io.BytesIO()
    with (
        zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open(name, "w", force_zip64=True) as file,
    ):
        file.write(npy_header((nbytes // 4,)))
        for _ in range(nbytes >> 22):
            file.write(bytes(1 << 22))
    return out.getvalue()


def variants(
    sample: Path, folder: Path, *, among: Callable[[str], bool] = lambda name: True
) -> Iterator[tuple[str, Path]]:
    """(what was done, the dump) for many ways of spoiling one file of a dump; the dump is the same
    path each time.

    sample: a file or a folder. folder: an empty one to work in. among: which files of a folder are
    spoilt, by relative name.
    """
    dump = folder / sample.name
    if sample.is_dir():
        shutil.copytree(sample, dump)
        names = sorted(p.relative_to(dump).as_posix() for p in dump.rglob("*") if p.is_file())
    else:
        shutil.copy(sample, dump)
        names = [""]
    with contextlib.suppress(
        WhenceError
    ):  # what is imported with the first dump of its kind is not what survives() measures
        run = open_any(dump)
        for record in run.records:
            run.array(record.id)
    bad = [*strangers(folder / "marker")]
    for name in filter(among, names):
        file = dump / name if name else dump
        whole = file.read_bytes()
        for what, data in (*truncations(whole), *flips(whole), *bad):
            file.write_bytes(data)
            yield f"{name or dump.name}: {what}", dump
        file.write_bytes(whole)
        if name:
            file.unlink()
            yield f"{name}: gone", dump
            file.write_bytes(whole)
    assert not (folder / "marker").exists()


def survives(what: str, path: Path, reader: str = "") -> Run | None:
    """Open a dump and read every tensor, as a comparison does; the run, or None when it was refused
    as a WhenceError.

    reader: whose open_run to call, "" for whoever recognises it. Fails the test on any other
    exception, on more than 64 MiB of memory or unpacked, on more calls of functions than a small
    dump can need, and when a file appears.
    """
    before = _listed(path.parent)
    tracemalloc.start()
    run = None
    try:
        with counted() as work:
            run = known()[reader].open_run(Place(path)) if reader else open_any(path)
            for record in run.records:
                try:
                    np.ascontiguousarray(run.array(record.id))
                except ElementsMissing as error:
                    assert str(error), what
    except WhenceError as error:
        assert str(error), what
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert work.calls < _CALLS, f"{what}: {work.calls} calls"
    assert max(peak, work.unpacked) < _PEAK_BYTES, (
        f"{what}: {peak >> 20} MiB held, {work.unpacked >> 20} MiB unpacked"
    )
    assert _listed(path.parent) == before, f"{what}: files appeared"
    return run


def _listed(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*"))
