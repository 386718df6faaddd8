"""Layouts that came later and set nothing: other names, containers, orders and words of steps and
ranks than those of `_hand_made.py`, as people write them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from _hand_made import (
    H5,
    NPY,
    NPZ,
    PKL,
    PT,
    Layout,
    Tap,
    Way,
    each,
    first,
    grouped,
    layer_of,
    lined,
    named,
    sides,
    to_numpy,
)  # fmt: skip


def _camel(tap: Tap) -> str:
    """Layer3_SelfAttn_OProj."""
    words = tap.name.replace(".", "_").split("_")
    return "".join(
        f"{'' if word.isdigit() and n else '_' * bool(n)}{word.title()}"
        for n, word in enumerate(words)
    )


def _calls(folder: Path, taps: list[Tap]) -> None:
    """(inputs, output) of each call, called by when it ended."""
    for tap in taps:
        PT.write(folder / f"{tap.number:04d}-{tap.name}", (tap.inputs, tap.outputs[0]))


def _entries(folder: Path, taps: list[Tap]) -> None:
    """One list for a run, each call a dictionary with its step."""
    PKL.write(
        folder / "trace",
        [
            {
                "iter": tap.step, "module": tap.name, "args": [to_numpy(x) for x in tap.inputs],
                "ret": to_numpy(tap.outputs[0]),
            }
            for tap in taps
        ],
    )  # fmt: skip


def _by_layer(folder: Path, taps: list[Tap]) -> None:
    """Dictionaries by the number of the layer, and what stands around the layers."""
    tree: dict[Any, Any] = {}
    for tap in taps:
        layer, inner = layer_of(tap.name)
        key = int(layer.removeprefix("layer_")) if layer.startswith("layer_") else layer
        tree.setdefault(key, {})[inner] = tap.outputs[0]
    PT.write(folder / "acts", tree)


def _groups(folder: Path, taps: list[Tap]) -> None:
    """A group for each step and module, datasets called x and y."""
    folder.mkdir(parents=True, exist_ok=True)
    with h5py.File(folder / "trace.h5", "w") as file:
        for tap in taps:
            group = file.require_group(f"fwd_{tap.step}/{lined(tap)}")
            group["x"], group["y"] = to_numpy(tap.inputs[0]), to_numpy(tap.outputs[0])


def _raw(folder: Path, taps: list[Tap]) -> None:
    """Elements alone, all forms in one table."""
    folder.mkdir(parents=True, exist_ok=True)
    forms = {}
    for tap in taps:
        array = to_numpy(tap.outputs[0])
        array.tofile(folder / f"{tap.name}.bin")
        forms[tap.name] = {"shape": array.shape, "dtype": str(array.dtype)}
    (folder / "meta.json").write_text(json.dumps(forms))


def _rows(folder: Path, taps: list[Tap]) -> None:
    """A matrix a file, leading axes as rows."""
    folder.mkdir(parents=True, exist_ok=True)
    for tap in taps:
        array = to_numpy(tap.outputs[0])
        np.savetxt(folder / f"{tap.number:02d}.{tap.name}.txt", array.reshape(len(array), -1))


def _lines(folder: Path, taps: list[Tap]) -> None:
    """A line of JSON a call."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "trace.jsonl").open("w") as file:
        for tap in taps:
            line = {"step": tap.step, "op": tap.name, "value": tap.outputs[0].float().tolist()}
            file.write(json.dumps(line) + "\n")


def _printed(folder: Path, taps: list[Tap]) -> None:
    """What print(f"{name}: {tensor}") leaves, all elements."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_printoptions(threshold=10**9, precision=6)
    lines = [f"[rank0] {tap.name} output: {tap.outputs[0]}\n" for tap in taps]
    torch.set_printoptions(profile="default")
    (folder / "run.log").write_text("".join(lines))


def _own_word(write: Way) -> Any:
    """Names begin with which run it is, another word on each side."""

    def dump(folder: Path, taps: list[Tap]) -> None:
        side = "hf" if folder.name == "ref" else "vllm"
        each(write, lambda tap: f"{side}_{lined(tap)}", first)(folder, taps)

    return dump


def further() -> Iterable[Layout]:
    """The layouts."""
    yield Layout("npy CamelCase", each(NPY, _camel, first), touched="equal")
    yield Layout("pt calls as tuples", _calls, touched="sorted")
    yield Layout("pkl list of calls", _entries, steps=2)
    yield Layout("pt dict by number of layer", _by_layer)
    yield Layout("h5 groups with x and y", _groups, steps=2)
    yield Layout("raw bytes, one table", _raw)
    yield Layout("txt rows, number first", _rows, touched="equal")
    yield Layout("jsonl op and value", _lines, steps=2)
    yield Layout("printed with a rank", _printed)
    yield Layout("npy name of the run in front", _own_word(NPY), touched="sorted")
    yield Layout(
        "npy double underscores",
        each(NPY, lambda t: f"{t.number:06d}__{t.name.replace('.', '-')}__out0", first),
        touched="sorted",
    )
    yield Layout(
        "npy pre and post", sides(NPY, named("{name}_pre"), named("{name}_post")), touched="equal"
    )
    yield Layout(
        "pt frames and shards",
        each(PT, named("frame_{step}/shard_{rank}/{name}"), first),
        steps=2,
        ranks=2,
        touched="equal",
    )
    yield Layout(
        "npz t= and card",
        grouped(NPZ, named("t={step}/card{rank}"), lambda w, t: {t.name: first(w, t)}),
        steps=2,
        ranks=2,
    )
    yield Layout(
        "npy before and after folders of layers",
        sides(NPY, named("{layer}/{inner}/before"), named("{layer}/{inner}/after")),
        touched="equal",
    )
    yield Layout(
        "h5 a file a module",
        each(H5, lined, lambda w, t: {"activation": first(w, t)}),
        touched="written",
    )
    yield Layout(
        "pt chunks, times in front",
        each(PT, lambda t: f"{1_700_000_000_000 + 37 * t.number}_{t.name}_chunk{t.step}", first),
        touched="sorted",
    )
