"""Runs of one process whose tensors differ, and what a comparison of them wrote."""

import json

import numpy as np
import xxhash

from whence import store
from whence.records import Call, Ref, RunInfo

DTYPES = ("float32", "float64", "int64", "float16", "uint8")


def write(path, seed):
    """A run of 40 tensors: of several dtypes, one without elements, one of its own shape, one with
    NaN, and one that is the same in every run.
    """
    random = np.random.default_rng(7)
    with store.Writer(store.create(path, RunInfo())) as writer:
        for number in range(40):
            dtype = DTYPES[number % len(DTYPES)]
            values = random.standard_normal((16, 33 + (number == 11) * seed)) * 50
            if number != 5:
                values += seed * random.standard_normal(values.shape)
            if number == 10:
                values[3, 4] = np.nan
            values = np.abs(values).astype(dtype)
            data = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
            digest = xxhash.xxh3_128_digest(data)
            kept, why = (None, "not wanted") if number == 20 else (data, "")
            record = writer.record(dtype, values.shape, kept, digest, None, None, why=why)
            refs, name = (Ref("output.0", record),), f"layers.{number}"
            writer.call(
                Call(number, name, "Net", 0, number, leaf=True, refs=refs, no_program="none")
            )


def files(folder):
    """What a comparison wrote, but for how long it took and where."""
    report = json.loads((folder / "report.json").read_text())
    report.pop("timing")
    text = json.dumps(report).replace(str(folder), "CMP")
    return text, (folder / "report.csv").read_bytes()
