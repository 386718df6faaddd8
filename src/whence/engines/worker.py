"""The process of a worker of the engine `processes`: it reads requests on its standard input and
writes results, both in frames, until the input ends.

A frame is eight bytes of length and a message of msgpack.
"""

from __future__ import annotations

import os
import struct
import sys
from typing import IO

import msgspec

from whence.engines.task import Request, in_words, perform

LENGTH = struct.Struct("<Q")


class Answer(msgspec.Struct, frozen=True):
    """A result, or an error in words."""

    result: bytes = b""
    error: str = ""


def read_frame(file: IO[bytes]) -> bytes:
    """The next message; b"" at the end of the input, or after an incomplete message."""
    head = file.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return b""
    (nbytes,) = LENGTH.unpack(head)
    message = file.read(nbytes)
    return message if len(message) == nbytes else b""


def write_frame(file: IO[bytes], message: bytes) -> None:
    """Write a message. Raises OSError when the reader is gone."""
    file.write(LENGTH.pack(len(message)))
    file.write(message)
    file.flush()


def main() -> None:
    """Answer requests until the input ends."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a task prints is no answer
    decode = msgspec.msgpack.Decoder(Request).decode
    while message := read_frame(requests):
        try:
            answer = Answer(perform(decode(message)))
        except Exception as error:  # noqa: BLE001 - whatever a task raises is the answer to it
            answer = Answer(error=in_words(error))
        try:
            write_frame(answers, msgspec.msgpack.encode(answer))
        except OSError:  # the comparison is gone
            return
