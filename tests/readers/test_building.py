"""Building: what a reader says of a tensor is in its record."""

import numpy as np

from whence.readers import Building


def test_a_record_says_which_file_of_the_dump_keeps_it():
    building = Building("dump", "npy")
    building.call("linear", outputs=[building.array(np.ones((2, 3), np.float32), file="0/linear.npy")])
    assert [r.file for r in building.run().records] == ["0/linear.npy"]
