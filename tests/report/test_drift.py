"""How far a run moved, in one line."""

import numpy as np

from handmade import bfloat16, net
from whence import api
from whence.report.markdown import drift


def test_nothing_moved():
    assert drift(api.compare(net(), net())) == "none, bitwise identical"


def test_rounding_begins_in_a_leaf_and_is_counted_in_units_of_the_last_place():
    def change(name, value):
        if name == "h":
            value = value.copy()
            value[2, 3] = np.nextafter(np.float32(value[2, 3]), np.float32(9))
        return value

    text = drift(api.compare(net(), net(change=change)))
    assert text.startswith("rounding, from fc1 (1 ulp) on; Net output.0: rel_l2 ")
    assert drift(api.compare(net(), net(bfloat16))).startswith("rounding, from fc1 on; ")


def test_a_fault_and_what_cannot_be_told():
    fault = api.compare(net(), net(change=lambda n, v: v * 1.5 if n == "h" else v))
    assert drift(fault) == "a fault in fc1"
    inputs = api.compare(net(), net(change=lambda n, v: v[::-1] if n == "ids" else v))
    assert drift(inputs) == "not known, whence cannot tell"
