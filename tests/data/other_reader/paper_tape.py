"""A reader of another package: paper tape, one line a tensor, `name: 1 2 3`."""

import numpy as np

from whence.errors import UnreadableRun
from whence.readers import Building

LOOKS_LIKE = "a text that begins with PAPER TAPE"
ORDER = 50


def sniff(place):
    return place.head.startswith(b"PAPER TAPE\n")


def open_run(place):
    run = Building(place.path, "paper-tape")
    for line in place.path.read_text().splitlines()[1:]:
        name, colon, numbers = line.partition(":")
        if not colon:
            raise UnreadableRun(f"line {line!r} has no name")
        run.call(name, outputs=[run.array(np.array(numbers.split(), np.float32))])
    return run.run()
