"""Files beside a dump that no reader read: which of them may hold tensors."""

from __future__ import annotations

import json
import os
import zlib
from enum import Enum
from pathlib import Path, PurePosixPath

from whence.readers.encodings.raw_form import SUFFIXES
from whence.readers.source import Place
from whence.regular_files import is_regular

TENSOR_SUFFIXES = frozenset((
    ".npy", ".npz", ".pt", ".pth", ".ckpt", ".safetensors", ".pb", ".h5", ".hdf5", ".pkl",
    ".pickle", ".pk", ".bin", ".onnx", ".pdiparams", ".pdparams", ".msgpack", ".gguf", ".tflite",
    ".mat", ".parquet", ".arrow", ".feather", ".zarr", ".raw", ".dat",
))  # fmt: skip
"""Suffixes of files that hold tensors, whatever their first bytes."""
_WORDS = frozenset((
    ".py", ".pyi", ".ipynb", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".rs", ".go",
    ".js", ".ts", ".sh", ".md", ".rst", ".html", ".htm", ".css", ".yaml", ".yml", ".toml", ".ini",
    ".cfg", ".xml", ".svg", ".patch", ".diff", ".tex", ".lock",
))  # fmt: skip
"""Suffixes of texts that are never a dump: sources, notes, settings."""
_LOGS = frozenset((".txt", ".log", ".err", ".out", ".csv", ".jsonl"))
_OTHER_KINDS = (
    b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF8", b"%PDF", b"\x7fELF", b"!<arch>\n",
    b"wOFF", b"wOF2", b"OggS", b"fLaC",
)  # fmt: skip
"""First bytes of pictures, documents, programs and sounds."""
_OTHER_NAMES = {
    ".bmp": b"BM", ".ico": b"\0\0\1\0", ".exe": b"MZ", ".dll": b"MZ", ".tif": b"", ".tiff": b"",
    ".mp3": b"", ".mp4": b"", ".pyc": b"", ".dylib": b"",
}  # fmt: skip
"""Likewise by suffix, for first bytes that are ambiguous without the name."""
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_KINDS = (
    ((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"), "a Python pickle", "call it NAME.pkl"),
    ((b"\x1f\x8b",), "packed by gzip", "unpack it: gunzip NAME"),
    ((b"BZh",), "packed by bzip2", "unpack it: bunzip2 NAME"),
    ((b"\xfd7zXZ",), "packed by xz", "unpack it: unxz NAME"),
    ((b"(\xb5/\xfd",), "packed by zstd", "unpack it: unzstd NAME"),
    ((".tar",), "a tar archive", "unpack it, and give the folder: tar -xf NAME"),
    ((".7z", ".rar", b"7z\xbc\xaf", b"Rar!"), "an archive", "unpack it, and give the folder"),
    ((b"PK",), "a zip archive", "unpack it, and give the folder: unzip NAME"),
    ((b"GGUF",), "a model for llama.cpp", "run it: llama-eval-callback -m NAME 2> eval.log"),
    ((b"PAR1",), "a Parquet table", "np.savez(OUT, **pandas.read_parquet('NAME'))"),
    ((b"ARROW1",), "an Arrow table", "np.savez(OUT, **pandas.read_feather('NAME'))"),
    ((b"MATLAB",), "a file of MATLAB", "np.savez(OUT, **scipy.io.loadmat('NAME'))"),
    ((b"CDF\x01", b"CDF\x02"), "a netCDF file",
     "np.savez(OUT, **{k: v[:] for k, v in netCDF4.Dataset('NAME').variables.items()})"),
    ((b"TFL3", ".tflite"), "a model for LiteRT",
     "run it with experimental_preserve_all_tensors, and np.savez what get_tensor gives"),
    ((b"ORTM", ".ort"), "a model for ONNX Runtime", "run it: docs/onnxruntime.md"),
    ((b"ET12", ".pte"), "a program of ExecuTorch", "run it with enable_etdump: docs/formats.md"),
    ((b"ftrt", b"ptrt", ".engine", ".plan"), "an engine of TensorRT",
     "run it: polygraphy run NAME --model-type engine --trt --save-outputs OUT.json"),
    ((".msgpack",), "a checkpoint of flax", "np.savez(OUT, **traverse_util.flatten_dict("
     "serialization.msgpack_restore(open('NAME', 'rb').read()), sep='.'))"),
    ((".data-00000-of-00001", ".ckpt.index"), "a checkpoint of TensorFlow", "np.savez(OUT, "
     "**{n: tf.train.load_variable(CKPT, n) for n, _ in tf.train.list_variables(CKPT)})"),
    (("zarr.json", ".zarray", "/0.0", "/0.0.0"), "a part of a zarr array",
     "np.save(OUT, zarr.open(FOLDER)[:])"),
    (("manifest.ocdbt",), "a checkpoint of orbax", "np.savez(OUT, **traverse_util.flatten_dict("
     "orbax.checkpoint.PyTreeCheckpointer().restore(FOLDER), sep='.'))"),
    ((".mlmodel", ".om", ".mindir", ".mnn", ".rknn", ".dlc"), "a compiled model",
     "it holds no results: np.savez them where it runs"),
    ((b"SQLite format 3",), "a database", "np.savez what it holds"),
)  # fmt: skip
"""Kinds that are not read: (first bytes, or ends of names; description; remedy)."""
_BEHIND_LENGTH = frozenset((b"TFL3", b"ORTM", b"ET12"))
"""Identifiers of FlatBuffers, which stand behind the offset of the first table."""
_PARSED_BYTES = 16 << 20
_PIECE = 1 << 20


class Content(Enum):
    """What a file that no reader read may hold."""

    OTHER = "a picture, a document, a program"
    WORDS = "text that is not a dump"
    TEXT = "text that a reader may know"
    EMPTY = "nothing"
    CUT = "settings that end before their end"
    TENSORS = "tensors, for all that is known"


def may_hold(name: str) -> bool:
    """Whether a file of this name in a folder may hold tensors."""
    return not _is_hidden(name) and PurePosixPath(name).suffix.lower() not in _WORDS


def _is_hidden(name: str) -> bool:
    parts = PurePosixPath(name).parts
    return any(part.startswith(".") or part == "__pycache__" for part in parts)


def content_of(place: Place, name: str) -> Content:
    """Returns what the file `name` of a folder may hold, judged by its name and its first bytes."""
    if _is_hidden(name) or (not may_hold(name) and _is_text(place.head)):
        return Content.WORDS
    suffix = PurePosixPath(name).suffix.lower()
    if not place.size:
        # a file of such a name holds nothing that could be compared
        return Content.WORDS if suffix in _WORDS | _LOGS else Content.EMPTY
    if suffix in TENSOR_SUFFIXES:
        return Content.TENSORS
    if _is_text(_unpacked(place.head)):
        if suffix == ".json" and not _is_json(place):
            return Content.CUT
        return Content.TEXT
    return Content.OTHER if _is_other_kind(place.head, suffix) else Content.TENSORS


def described(name: str, head: bytes) -> str:
    """Describes a file that no reader recognises, and the remedy that makes it readable."""
    suffix = PurePosixPath(name).suffix.lower()
    for marks, words, remedy in _KINDS:
        if any(_shows(mark, name, head) for mark in marks):
            return f"{words}; {remedy.replace('NAME', name)}"
    if _is_other_kind(head, suffix):
        return f"{Content.OTHER.value}; it holds no tensors"
    if head and _is_text(head):
        return (
            "a text in which no tensor is known; print name and tensor, or write rows of numbers "
            "(np.savetxt) or lists (JSON)"
        )
    if suffix not in SUFFIXES:
        return (
            "bytes of no kind that is known; write its tensors by np.savez, or call it "
            f"{name}.bin where it is elements and nothing else"
        )
    return (
        "raw bytes: their shape is not known; give --shape "
        f"{PurePosixPath(name).name}=2x12x64:float32, or write it beside them: echo "
        f"2x12x64:float32 > {PurePosixPath(name).with_suffix('.shape')}"
    )


def _shows(mark: bytes | str, name: str, head: bytes) -> bool:
    if isinstance(mark, str):
        return name.lower().endswith(mark)
    return head.startswith(mark, 4 if mark in _BEHIND_LENGTH else 0)


def _is_other_kind(head: bytes, suffix: str) -> bool:
    riff = head[:4] == b"RIFF" and head[8:12] in (b"WEBP", b"WAVE", b"AVI ")
    by_name = suffix in _OTHER_NAMES and head.startswith(_OTHER_NAMES[suffix])
    return head.startswith(_OTHER_KINDS) or riff or by_name


def _unpacked(head: bytes) -> bytes:
    """Returns the first bytes of a gzip file decompressed; others unchanged."""
    if not head.startswith(b"\x1f\x8b"):
        return head
    try:
        return zlib.decompressobj(31).decompress(head, 1 << 12)
    except zlib.error:
        return head


def _is_text(head: bytes) -> bool:
    """Whether these first bytes could be text; the last character may be incomplete."""
    if head.startswith(_UTF16):
        return True
    if b"\0" in head:
        return False
    controls = sum(byte < 32 and byte not in (8, 9, 10, 12, 13, 27) for byte in head)
    try:
        head[:-4].decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(head) - 8:  # a table of another time, not numbers
            return controls == 0 and all(byte >= 160 or byte < 128 for byte in head)
    return controls * 100 <= len(head)


def _is_json(place: Place) -> bool:
    """Whether a file is complete JSON; a large file is not checked."""
    if place.size > _PARSED_BYTES:
        return True
    try:
        json.loads(place.path.read_bytes())
    except RecursionError:
        return True
    except (OSError, ValueError):
        return False
    return True


def not_read(name: str, error: Exception) -> str:
    """Returns the sentence that a file is not read, and why, with its name once."""
    before, _, rest = str(error).partition(name)
    is_subject = rest.startswith(" ") and (not before or before.endswith("/"))
    return f"{name} is not read: {'it' + rest if is_subject else error}"


def same_bytes(path: Path, other: Path) -> bool:
    """Whether two files hold the same bytes; False where one cannot be read."""
    try:
        if not (is_regular(path) and is_regular(other)):
            return False
        with path.open("rb") as file, other.open("rb") as second:
            if os.fstat(file.fileno()).st_size != os.fstat(second.fileno()).st_size:
                return False
            while piece := file.read(_PIECE):
                if piece != second.read(_PIECE):
                    return False
            return True
    except OSError:
        return False
