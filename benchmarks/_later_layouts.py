"""Layouts written after those of `_hook_layouts.py` were mended, and measured once: what mends of
kinds are worth on dumps that set nothing.
"""

from __future__ import annotations

import collections
import functools
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from _hand_made import (
    NPY,
    NPZ,
    PT,
    SAFE,
    Layout,
    Tap,
    Way,
    each,
    first,
    grouped,
    layer_of,
    lined,
    named,
    taps_of,
    to_numpy,
)  # fmt: skip
from _unseen_layouts import block


@functools.cache
def _numbered(subject: str) -> dict[str, str]:
    """Module -> layer_03/02_mlp_gate_proj: the number begins anew in each layer."""
    seen: collections.Counter[str] = collections.Counter()
    names = {}
    for tap in taps_of(subject, "", 1, 1):
        layer, inner = layer_of(tap.name)
        number = layer.removeprefix("layer_")
        place = f"layer_{int(number):02d}" if number.isdigit() else layer
        names[tap.name] = f"{place}/{seen[place]:02d}_{inner.replace('.', '_')}"
        seen[place] += 1
    return names


def _numbered_in_layers(folder: Path, taps: list[Tap]) -> None:
    for tap in taps:
        NPY.write(folder / _numbered(folder.parent.name)[tap.name], to_numpy(tap.outputs[0]))


def _ranks_of_two(folder: Path, taps: list[Tap]) -> None:
    """iter_0000100/mp_rank_00_000/acts.pt, sorted."""
    files: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for tap in taps:
        name = f"iter_{100 * (tap.step + 1):07d}/mp_rank_{tap.rank:02d}_000/acts"
        files[name][f"decoder.{tap.name}"] = tap.outputs[0]
    for name, held in files.items():
        PT.write(folder / name, dict(sorted(held.items())))


class Record:
    """What a hook keeps of a call."""

    def __init__(self, tap: Tap) -> None:
        self.name, self.step = tap.name, tap.step
        self.value = to_numpy(tap.outputs[0])


def _objects(folder: Path, taps: list[Tap]) -> None:
    """A pickled list of objects of a class of one's own."""
    Way("pkl").write(folder / "records", [Record(tap) for tap in taps])


def _saved_dict(folder: Path, taps: list[Tap]) -> None:
    """np.save of a dictionary of arrays, a file a rank."""
    ranks: dict[int, dict[str, np.ndarray]] = defaultdict(dict)
    for tap in taps:
        ranks[tap.rank][lined(tap)] = to_numpy(tap.outputs[0])
    for rank, held in ranks.items():
        NPY.write(folder / f"acts_dev{rank}", held)


def _json_of_prompts(folder: Path, taps: list[Tap]) -> None:
    """{"prompt_0": {name: nested list}}."""
    tree: dict[str, dict[str, Any]] = defaultdict(dict)
    for tap in taps:
        tree[f"prompt_{tap.step}"][tap.name] = tap.outputs[0].float().tolist()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "hidden.json").write_text(json.dumps(tree))


def _printed_files(folder: Path, taps: list[Tap]) -> None:
    """str(tensor), a file a tap."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_printoptions(threshold=10**9, precision=7, sci_mode=False)
    for tap in taps:
        (folder / f"{tap.number:03d}-{tap.name}.txt").write_text(f"{tap.outputs[0]}\n")
    torch.set_printoptions(profile="default")


def _tree_of_groups(folder: Path, taps: list[Tap]) -> None:
    """A group a module with a dataset `activation`, listed by the alphabet."""
    folder.mkdir(parents=True, exist_ok=True)
    with h5py.File(folder / "model.h5", "w") as file:
        for tap in taps:
            group = file.require_group(tap.name.replace(".", "/"))
            group.create_dataset("activation", data=to_numpy(tap.outputs[0]))
            group.attrs["class"] = "Module"


def _directions(folder: Path, taps: list[Tap]) -> None:
    """{name: {"fwd": {"in": [...], "out": [...]}}}."""
    held = {tap.name: {"fwd": {"in": list(tap.inputs), "out": list(tap.outputs)}} for tap in taps}
    PT.write(folder / "trace", held)


_SHORT = {
    "input_layernorm": "ln1", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_o", "self_attn": "attn",
    "post_attention_layernorm": "ln2", "mlp.gate_proj": "mlp_gate", "mlp.up_proj": "mlp_up",
    "mlp.act_fn": "mlp_act", "mlp.down_proj": "mlp_down", "out": "out",
}  # fmt: skip


def short(_subject: str, name: str) -> str:
    """L03_attn_o."""
    layer, inner = layer_of(name)
    number = layer.removeprefix("layer_")
    head = f"L{int(number):02d}" if number.isdigit() else layer
    return f"{head}_{_SHORT.get(inner, inner.replace('.', '_'))}"


def _described_numbers(folder: Path, taps: list[Tap]) -> None:
    """0007.bin beside 0007.json, which says name, shape and dtype."""
    folder.mkdir(parents=True, exist_ok=True)
    for tap in taps:
        array = to_numpy(tap.outputs[0])
        array.tofile(folder / f"{tap.number:04d}.bin")
        form = {"name": tap.name, "shape": array.shape, "dtype": str(array.dtype)}
        (folder / f"{tap.number:04d}.json").write_text(json.dumps(form))


def _rows_of_taps(folder: Path, taps: list[Tap]) -> None:
    """A matrix a tap in .csv, the layer behind."""
    folder.mkdir(parents=True, exist_ok=True)
    for tap in taps:
        array = to_numpy(tap.outputs[0])
        path = folder / f"{behind('', tap.name)}.csv"
        np.savetxt(path, array.reshape(len(array), -1), delimiter=",")


def behind(_subject: str, name: str) -> str:
    """self_attn.o_proj@layer_3."""
    layer, inner = layer_of(name)
    return f"{inner}@{layer}"


def _older_files(folder: Path, taps: list[Tap]) -> None:
    """An OrderedDict in the format before torch 1.6, below a wrapper on one side."""
    head = "module." if folder.name == "ref" else ""
    files: dict[int, Any] = defaultdict(collections.OrderedDict)
    for tap in taps:
        files[tap.step][f"{head}{tap.name}"] = tap.outputs[0]
    folder.mkdir(parents=True, exist_ok=True)
    for step, held in files.items():
        path = folder / f"acts-{100 + step}.pth"
        torch.save(held, path, _use_new_zipfile_serialization=False)


def later() -> Iterable[Layout]:
    """The layouts."""
    yield Layout(
        "npy numbered in layers",
        _numbered_in_layers,
        touched="equal",
        own=lambda subject, name: _numbered(subject)[name],
    )
    yield Layout("pt ranks of two, sorted", _ranks_of_two, steps=2, ranks=2)
    yield Layout("pkl objects", _objects, steps=2)
    yield Layout("npy saved dict", _saved_dict, ranks=2)
    yield Layout("json prompts", _json_of_prompts, steps=2)
    yield Layout("txt printed a file a tap", _printed_files, touched="sorted")
    yield Layout(
        "safetensors number of the call",
        each(SAFE, named("{name}#{step}"), first),
        steps=2,
        touched="equal",
    )
    yield Layout("h5 tree of groups", _tree_of_groups)
    yield Layout("pt directions", _directions)
    yield Layout(
        "npy short words",
        each(NPY, lambda tap: short("", tap.name), first),
        touched="equal",
        own=short,
    )
    yield Layout("raw bytes, described one by one", _described_numbers, touched="equal")
    yield Layout(
        "npz tokens in float16",
        grouped(
            Way("npz", "float16"),
            named("tok{step}"),
            lambda w, t: {block("", t.name): first(w, t)},
        ),
        steps=3,
        own=block,
    )
    yield Layout("csv a file a tap, layer behind", _rows_of_taps, touched="equal", own=behind)
    yield Layout("pth older, another wrapper", _older_files, steps=2)
    yield Layout(
        "npz a rank, sides above names",
        grouped(
            NPZ,
            named("proc{rank}"),
            lambda w, t: {
                f"inputs/{t.name}": w.of(t.inputs[0]),
                f"outputs/{t.name}": w.of(t.outputs[0]),
            },
            lambda held: dict(sorted(held.items())),
        ),
        ranks=2,
    )
