"""A packed shard: the pieces of a shard, each compressed or as steps from a piece of the reference
run. It is read in place of the shard, and the shard is made again from it byte by byte.

The file is a safetensors file: columns over the pieces in the order in which they lie in the shard,
the compressed chunks behind each other in `data`, and the header area of the shard in `head`.
Where nothing lies, the shard has zeros.
"""

from __future__ import annotations

import itertools
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from whence.errors import ElementsMissing
from whence.store.columns import Column, check_lengths, load, save, whole_column
from whence.store.delta import CHUNK_BYTES, WIDTHS, Codec, add_steps, decode_frame, encode
from whence.store.shards import MAX_HEADER_BYTES, PAGE, Bytes, ReadShard

FORMAT = 1
_KEPT_BYTES = 32 << 20  # of decoded pieces that are kept for the next look
_PART_BYTES = 8 << 20
_LIMIT = 1 << 62
MOST_GAP_BYTES = PAGE
"""What lies between two pieces is zeros, and less than this: more is a piece of its own, so that
the size of the file bounds the size of the shard.
"""

# name -> (dtype, which length it has)
_COLUMNS = {
    "offset": ("<i8", "pieces"), "nbytes": ("<i8", "pieces"), "codec": ("|u1", "pieces"),
    "width": ("|u1", "pieces"), "base": ("<i8", "pieces"), "hash": ("<u8", "pieces"),
    "chunks_at": ("<i8", "pieces+1"), "chunk_at": ("<i8", "chunks+1"), "head": ("|u1", "free"),
    "sizes": ("<i8", "free"), "data": ("|u1", "free"),
}  # fmt: skip

Base = tuple[int, int, int]
"""(process folder, shard, offset) of a piece of the reference; the first is a place in the list of
its process folders.
"""
BasePiece = Callable[[Base, int], Bytes]
"""Returns so many bytes of the reference. Raises ElementsMissing that says where it was
searched.
"""


class Piece(NamedTuple):
    """The content of one position of a shard. width: bytes of an element. base: position of its
    partner.
    """

    offset: int
    nbytes: int
    width: int
    base: Base | None
    read: Callable[[], Bytes]


def packed_name(shard: int) -> str:
    """Returns the file name of a packed shard."""
    return f"shard-{shard:05d}.packed"


def write_packed(
    path: Path, head: Bytes, data_bytes: int, pieces: Iterator[Piece], base_piece: BasePiece
) -> None:
    """Writes a packed shard: `head`, then a data area of `data_bytes` with these pieces in it, in
    ascending order.

    Every piece is decoded again and compared with its hash before the file is complete. Raises
    OSError, ElementsMissing; ValueError when pieces overlap or lie outside.
    """
    columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
    columns["chunks_at"].append(0)
    columns["chunk_at"].append(0)
    end = 0
    with tempfile.TemporaryFile(dir=path.parent, buffering=1 << 20) as spool:

        def put(frames: list[Bytes]) -> None:
            for frame in frames:
                spool.write(frame.data)
                columns["chunk_at"].append(columns["chunk_at"][-1] + frame.size)

        for piece in pieces:
            if piece.offset < end or piece.offset + piece.nbytes > data_bytes:
                raise ValueError(f"pieces overlap at byte {piece.offset} of its data area")
            end = piece.offset + piece.nbytes
            data = piece.read()
            base = base_piece(piece.base, piece.nbytes) if piece.base is not None else None
            codec, frames = encode(data, piece.width, base)
            digest = xxhash.xxh3_128_digest(data.data)
            parts = _decoded(codec, frames, piece.nbytes, piece.width, base)
            if xxhash.xxh3_128_digest(parts.data) != digest:
                raise ValueError(f"the piece at byte {piece.offset} does not come back as it was")
            put(frames)
            columns["chunks_at"].append(len(columns["chunk_at"]) - 1)
            columns["offset"].append(piece.offset)
            columns["nbytes"].append(piece.nbytes)
            columns["codec"].append(codec)
            columns["width"].append(piece.width)
            columns["base"].append(piece.base if codec in _WITH_BASE else (-1, -1, -1))
            columns["hash"].append(np.frombuffer(digest, "<u8"))
        _, head_frames = encode(head, 1, None)
        columns["sizes"] = [data_bytes, head.size]
        spool.flush()
        file_columns = {
            name: whole_column(_array(name, values))
            for name, values in columns.items()
            if name not in ("head", "data")
        }
        file_columns["head"] = whole_column(np.concatenate(head_frames))
        file_columns["data"] = Column(
            np.dtype("|u1"), (columns["chunk_at"][-1],), _parts_of(spool, columns["chunk_at"][-1])
        )
        save(path, file_columns, {"format": str(FORMAT)})


_WITH_BASE = (Codec.DELTA, Codec.SAME)
_PLACES = {"base": 3, "hash": 2}


def _array(name: str, values: list[Any]) -> np.ndarray[Any, np.dtype[Any]]:
    array = np.array(values, _COLUMNS[name][0])
    return array.reshape(-1, _PLACES[name]) if name in _PLACES else array


def _parts_of(file: Any, nbytes: int) -> Iterator[Bytes]:
    file.seek(0)
    for start in range(0, nbytes, _PART_BYTES):
        yield np.frombuffer(file.read(min(_PART_BYTES, nbytes - start)), np.uint8)


def _decoded(codec: int, frames: list[Bytes], nbytes: int, width: int, base: Bytes | None) -> Bytes:
    """Returns the bytes of a piece. Raises ValueError for contradictory columns."""
    if codec == Codec.RAW:
        if len(frames) != 1 or frames[0].size != nbytes:
            raise ValueError(f"{nbytes} bytes are not there as they are")
        return frames[0].copy()  # aligned, and no view of a file that may go
    if codec in _WITH_BASE and base is None:
        raise ValueError("it has no place in the reference")
    if codec == Codec.SAME and base is not None:
        return base
    starts = range(0, nbytes, CHUNK_BYTES)
    if len(frames) != len(starts):
        raise ValueError(f"{len(frames)} chunks for {nbytes} bytes")
    # Each chunk is checked and made before the next, so memory grows only as far as it is sound.
    parts = []
    for start, frame in zip(starts, frames, strict=True):
        part = decode_frame(frame, min(CHUNK_BYTES, nbytes - start))
        if codec == Codec.DELTA and base is not None:
            part = add_steps(part, base[start : start + part.size], width)
        parts.append(part)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


class PackedShard(ReadShard):
    """A packed shard that is read like the original shard: opened at first use, each piece decoded
    on request and compared with its hash.
    """

    path: Path

    def __init__(self, path: Path, base_piece: BasePiece) -> None:
        self.path = path
        self._base_piece = base_piece
        self._columns: dict[str, Any] = {}
        self._known: dict[int, Bytes] = {}
        self._known_bytes = 0
        self._lock = threading.Lock()

    def data(self, offset: int, nbytes: int) -> Bytes:
        """As `ReadShard.data`, for bytes within one piece. Raises ElementsMissing when they are
        damaged too, or when the reference of their steps is missing or is another run.
        """
        columns = self._opened()
        if not nbytes:
            return np.empty(0, np.uint8)
        number = int(np.searchsorted(columns["offset"], offset, side="right")) - 1
        start = int(columns["offset"][number]) if number >= 0 else 0
        if number < 0 or offset + nbytes > start + int(columns["nbytes"][number]):
            raise ElementsMissing(
                f"{self.path}: holds no piece with bytes {offset} to {offset + nbytes}; it is "
                "damaged: pack the run again"
            )
        piece = self._piece(number)
        return piece[offset - start : offset - start + nbytes]

    def require(self, stop: int) -> None:
        if stop > self.available():
            self._opened()
            raise ElementsMissing(f"{self.path}: has {self.available()} bytes, {stop} are wanted")
        bases = self._opened()["base"]
        with_base = np.flatnonzero(bases[:, 0] >= 0)
        if with_base.size:
            self._piece(int(with_base[0]))

    def available(self) -> int:
        try:
            return int(self._opened()["sizes"][0])
        except ElementsMissing:
            return 0

    def lost(self, offsets: Any, ends: Any) -> int:
        columns = self._columns
        if not columns:
            return len(offsets)
        numbers = np.searchsorted(columns["offset"], offsets, side="right") - 1
        return int(((columns["base"][numbers, 0] >= 0) | (ends > self.available())).sum())

    def forget(self) -> None:
        with self._lock:
            self._known.clear()
            self._known_bytes = 0

    def whole_nbytes(self) -> int:
        """Size of the shard that it stands for. Raises ElementsMissing."""
        return int(self._opened()["sizes"].sum())

    def restore(self) -> Iterator[Bytes]:
        """Yields the bytes of the shard file, in order. Raises ElementsMissing."""
        columns = self._opened()
        data_bytes, head_bytes = columns["sizes"].tolist()
        yield self._head(columns["head"], head_bytes)
        end = 0
        for number, offset in enumerate([*columns["offset"].tolist(), data_bytes]):
            while end < offset:
                gap = np.zeros(min(_PART_BYTES, offset - end), np.uint8)
                end += gap.size
                yield gap
            if number < columns["offset"].size:
                piece = self._piece(number)
                end += piece.size
                yield piece
                self.forget()

    def _head(self, stored: Bytes, nbytes: int) -> Bytes:
        try:
            if stored.size == nbytes:
                return stored
            chunks = -(-nbytes // CHUNK_BYTES)
            if chunks != 1:
                raise ValueError(f"a header area of {nbytes} bytes")
            return decode_frame(stored, nbytes)
        except ValueError as error:
            raise ElementsMissing(f"{self.path}: {error}; it is damaged") from error

    def _piece(self, number: int) -> Bytes:
        if (known := self._known.get(number)) is not None:
            return known
        columns = self._columns
        nbytes, codec, width = (int(columns[c][number]) for c in ("nbytes", "codec", "width"))
        place = tuple(columns["base"][number].tolist())
        base = self._base_piece(place, nbytes) if codec in _WITH_BASE else None
        first, last = columns["chunks_at"][number : number + 2].tolist()
        ends = columns["chunk_at"][first : last + 1].tolist()
        frames = [columns["data"][a:b] for a, b in itertools.pairwise(ends)]
        try:
            piece = _decoded(codec, frames, nbytes, width, base)
            if xxhash.xxh3_128_digest(piece.data) != columns["hash"][number].tobytes():
                raise ValueError(
                    "the hash differs" + (": the reference was changed" if base is not None else "")
                )
        except ValueError as error:
            at = int(columns["offset"][number])
            raise ElementsMissing(
                f"{self.path}: the piece at byte {at} cannot be unpacked: {error}; nothing of it "
                "is used"
            ) from error
        piece.flags.writeable = False
        with self._lock:
            if number not in self._known:
                self._known[number] = piece
                self._known_bytes += piece.size
            while self._known_bytes > _KEPT_BYTES and len(self._known) > 1:
                self._known_bytes -= self._known.pop(next(iter(self._known))).size
        return piece

    def _opened(self) -> dict[str, Any]:
        if not self._columns:
            try:
                self._columns = _load(self.path)
            except OSError as error:
                raise ElementsMissing(
                    f"cannot read {self.path}: {error.strerror or error}"
                ) from error
            except (ValueError, KeyError) as error:
                raise ElementsMissing(
                    f"{self.path} is damaged: {error}; pack the run again"
                ) from error
        return self._columns


def _load(path: Path) -> dict[str, Any]:
    """The columns of a packed shard. Untrusted: raises ValueError, KeyError for what contradicts
    itself or leads outside the file, before anything of the size it states is allocated.
    """
    columns = load(path, _COLUMNS, _PLACES)
    pieces, chunks = len(columns["offset"]), max(0, len(columns["chunk_at"]) - 1)
    check_lengths(columns, _COLUMNS, {"pieces": pieces, "chunks": chunks})
    if len(columns["sizes"]) != 2:
        raise ValueError("it does not say how large the shard is")
    data_bytes, head_bytes = columns["sizes"].tolist()
    if not 0 <= head_bytes <= MAX_HEADER_BYTES or not 0 <= data_bytes < _LIMIT:
        raise ValueError(f"a shard of {head_bytes} and {data_bytes} bytes")
    _check_rising(columns["chunks_at"], chunks)
    _check_rising(columns["chunk_at"], columns["data"].size)
    offsets, sizes = columns["offset"], columns["nbytes"]
    if pieces and not (
        (sizes >= 0).all()
        and (sizes <= data_bytes).all()
        and (offsets >= 0).all()
        and (offsets <= data_bytes).all()
        and (offsets[1:] >= offsets[:-1] + sizes[:-1]).all()
        and int(offsets[-1]) + int(sizes[-1]) <= data_bytes
    ):
        raise ValueError("its pieces overlap or lie outside the shard")
    if data_bytes - int(sizes.sum()) > (pieces + 1) * MOST_GAP_BYTES:
        raise ValueError(f"{data_bytes} bytes of a shard, of which most are nowhere")
    if not (
        np.isin(columns["codec"], list(Codec)).all()
        and np.isin(columns["width"], WIDTHS).all()
        and (sizes % np.maximum(columns["width"], 1) == 0).all()
    ):
        raise ValueError("a piece of a kind that this whence does not know")
    return columns


def _check_rising(ends: Any, last: int) -> None:
    if int(ends[0]) != 0 or int(ends[-1]) != last or (np.diff(ends) < 0).any():
        raise ValueError("its chunks lie outside of it")
