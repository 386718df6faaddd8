"""Compresses the bytes of a tensor without losing one bit: as steps from the tensor they are paired
with, then shuffled and compressed by Blosc.

Two results of one computation differ by a few units in the last place. If the bits of a float are
mapped to integers in the order of the numbers, their difference is that count, a small integer:
almost all of its bits are zero.
"""

from __future__ import annotations

from enum import IntEnum
from types import ModuleType

import numpy as np

from whence import extras
from whence.store.shards import Bytes

CHUNK_BYTES = 1 << 20
"""Bytes that are compressed at once; a multiple of every element width."""
MOST_RATIO = 4096
"""Largest compression ratio of a chunk (smaller results are padded), so that the size of a file
bounds the memory that a reader allocates.
"""
WIDTHS = (1, 2, 4, 8)
_LEVEL, _BIT_SHUFFLE = 3, 2
_HEADER_BYTES = 16  # of a Blosc frame: sizes at 4 and 12, little endian
_PAYS = 0.97  # of the size, above which bytes are kept as they are
_SURELY = 0.5  # of the size, below which nothing else is tried


class Codec(IntEnum):
    """The form of the bytes of a piece: as they are, compressed, as steps from the reference's, or
    omitted because the reference's are equal.
    """

    RAW = 0
    COMPRESSED = 1
    DELTA = 2
    SAME = 3


def blosc() -> ModuleType:
    """Returns the compressor. Raises MissingDependency where numcodecs is not installed."""
    module: ModuleType = extras.needed("numcodecs", "a packed run").blosc
    return module


def encode(data: Bytes, width: int, base: Bytes | None) -> tuple[Codec, list[Bytes]]:
    """Returns the smallest form of some bytes, in chunks. width: bytes of an element. base: as many
    bytes of the reference.
    """
    nbytes = data.size
    candidates: list[tuple[int, Codec, list[Bytes]]] = []
    if base is not None:
        if data.data == base.data:
            return Codec.SAME, []
        candidates.append(_compressed(Codec.DELTA, data, width, base))
    if not candidates or candidates[0][0] > nbytes * _SURELY:
        candidates.append(_compressed(Codec.COMPRESSED, data, width, None))
    size, codec, frames = min(candidates, key=lambda candidate: candidate[0])
    return (codec, frames) if size < nbytes * _PAYS else (Codec.RAW, [data])


def _compressed(
    codec: Codec, data: Bytes, width: int, base: Bytes | None
) -> tuple[int, Codec, list[Bytes]]:
    compressor, frames = blosc(), []
    for start in range(0, data.size, CHUNK_BYTES):
        chunk = data[start : start + CHUNK_BYTES].view(f"u{width}")
        if base is not None:
            chunk = _steps(chunk, base[start : start + CHUNK_BYTES].view(f"u{width}"))
        frame = np.frombuffer(
            compressor.compress(np.ascontiguousarray(chunk), b"zstd", _LEVEL, _BIT_SHUFFLE),
            np.uint8,
        )
        least = -(-chunk.nbytes // MOST_RATIO)
        frames.append(np.pad(frame, (0, max(0, least - frame.size))))
    return sum(frame.size for frame in frames), codec, frames


def decode_frame(frame: Bytes, nbytes: int) -> Bytes:
    """Decompresses one chunk. The chunk is untrusted: raises ValueError unless its header states
    exactly `nbytes`, which is checked before anything is allocated.
    """
    if frame.size < _HEADER_BYTES:
        raise ValueError(f"a compressed chunk of {frame.size} bytes")
    header = frame[:_HEADER_BYTES].tobytes()
    makes, takes = (int.from_bytes(header[at : at + 4], "little") for at in (4, 12))
    if makes != nbytes or not _HEADER_BYTES <= takes <= frame.size:
        raise ValueError(
            f"a compressed chunk says {makes} bytes out of {takes}, expected {nbytes} out of at "
            f"most {frame.size}"
        )
    if nbytes > MOST_RATIO * frame.size:
        raise ValueError(f"{frame.size} bytes claim to make {nbytes}")
    decoded = np.empty(nbytes, np.uint8)
    try:
        blosc().decompress(frame[:takes].tobytes(), decoded)
    except RuntimeError as error:
        raise ValueError(f"a chunk cannot be decompressed: {error}") from error
    return decoded


def add_steps(steps: Bytes, base: Bytes, width: int) -> Bytes:
    """Returns the bytes that are so many steps from those of the reference."""
    folded = steps.view(f"u{width}")
    one = folded.dtype.type(1)
    unfolded = (folded >> one) ^ (~(folded & one) + one)
    return _ordered_back(unfolded + _ordered(base.view(folded.dtype))).view(np.uint8)


def _steps(values: Bytes, base: Bytes) -> Bytes:
    """Returns the number of representable numbers between each value and its base, small for both
    signs: 0, -1, 1, -2, 2 become 0, 1, 2, 3, 4.
    """
    difference = _ordered(values) - _ordered(base)
    sign = _sign(difference)
    difference <<= difference.dtype.type(1)
    difference ^= sign
    return difference


def _ordered(bits: Bytes) -> Bytes:
    """Maps bits of floats to integers in the order of the numbers. The map is a permutation of all
    integers, so that it is lossless for any type; only for floats does it make differences small.
    """
    top = bits.dtype.type(1 << (8 * bits.itemsize - 1))
    return bits ^ (_sign(bits) | top)


def _ordered_back(ordered: Bytes) -> Bytes:
    top = ordered.dtype.type(1 << (8 * ordered.itemsize - 1))
    return ordered ^ (~_sign(ordered) | top)


def _sign(bits: Bytes) -> Bytes:
    """Returns all ones where the highest bit is one, else zero."""
    signed = bits.view(f"i{bits.itemsize}")
    signs: Bytes = (signed >> signed.dtype.type(8 * bits.itemsize - 1)).view(bits.dtype)
    return signs
