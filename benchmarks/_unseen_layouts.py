"""Layouts written after the rules and measured once before any change: what public snippets and
debugging threads save, in shapes that neither `_hand_made.py` nor `_further_layouts.py` has.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from _hand_made import (
    NPY,
    NPZ,
    PKL,
    PT,
    SAFE,
    Layout,
    Tap,
    each,
    first,
    grouped,
    in_and_out,
    layer_of,
    model_of,
    named,
    sides,
    to_numpy,
)  # fmt: skip

Write = Callable[[Path, list[Tap]], None]


def _lists_by_name(folder: Path, taps: list[Tap]) -> None:
    """A defaultdict(list): one tensor a step behind each name."""
    kept: dict[str, list[torch.Tensor]] = defaultdict(list)
    for tap in taps:
        kept[tap.name].append(tap.outputs[0])
    PT.write(folder / "activations", kept)


def _outputs_in_a_list(folder: Path, taps: list[Tap]) -> None:
    """(name, array) appended by a hook, names as labels of people."""
    outputs = []
    for tap in taps:
        layer, inner = layer_of(tap.name)
        label = layer.replace("_", " ").title()
        outputs.append((f"{label}: {inner}", to_numpy(tap.outputs[0])))
    PKL.write(folder / "outputs", outputs)


def _hidden_states(folder: Path, taps: list[Tap]) -> None:
    """out.hidden_states alone: a tuple without names."""
    PT.write(folder / "hidden_states", tuple(tap.outputs[0] for tap in taps))


def _class_names(folder: Path, taps: list[Tap]) -> None:
    """The files of a precision tool, without its index: class, direction and number of the call."""
    classes = {name: type(m).__name__ for name, m in model_of(folder.parent.name).named_modules()}
    for tap in taps:
        stem = ".".join(filter(None, ("Module", tap.name, classes[tap.name])))
        for side, tensors in (("input", tap.inputs), ("output", tap.outputs)):
            for place, tensor in enumerate(tensors):
                PT.write(folder / f"{stem}.forward.{tap.step}.{side}.{place}", tensor)


def _class_paths(folder: Path, taps: list[Tap]) -> None:
    """Classes on the way from the root, each with its place among its siblings."""
    paths = _paths(folder.parent.name)
    for tap in taps:
        PT.write(folder / f"rank0/{paths[tap.name]}-output.0", tap.outputs[0])


def _paths(subject: str) -> dict[str, str]:
    """Module -> classes on the way to it."""
    model = model_of(subject)
    paths = {"": f"1.{type(model).__name__}"}
    for name, module in model.named_modules():
        for number, (child, sub) in enumerate(module.named_children()):
            inner = f"{name}.{child}" if name else child
            paths[inner] = f"{paths[name]}-{number}.{type(sub).__name__}"
    return paths


def _form_in_name(folder: Path, taps: list[Tap]) -> None:
    """Raw elements, the form in the name of the file."""
    folder.mkdir(parents=True, exist_ok=True)
    for tap in taps:
        array = to_numpy(tap.outputs[0])
        form = "x".join(map(str, array.shape))
        array.tofile(folder / f"{tap.number}_{tap.name}_{form}_{array.dtype}.bin")


def _shape_and_dtype(tap: Tap) -> str:
    shape = "_".join(map(str, tap.outputs[0].shape))
    dtype = str(tap.outputs[0].dtype).removeprefix("torch.")
    return f"{tap.name}-{shape}-{dtype}"


def _flat_text(folder: Path, taps: list[Tap]) -> None:
    """np.savetxt of all elements in one column, a folder a step."""
    for tap in taps:
        place = folder / f"iter{tap.step}"
        place.mkdir(parents=True, exist_ok=True)
        np.savetxt(place / f"{tap.name}.txt", to_numpy(tap.outputs[0]).ravel())


def _json_layers(folder: Path, taps: list[Tap]) -> None:
    """A file of JSON a layer."""
    folder.mkdir(parents=True, exist_ok=True)
    layers: dict[str, dict[str, Any]] = defaultdict(dict)
    for tap in taps:
        layer, inner = layer_of(tap.name)
        layers[layer][inner] = tap.outputs[0].float().tolist()
    for layer, held in layers.items():
        (folder / f"{layer}.json").write_text(json.dumps(held))


def _calls_by_name(folder: Path, taps: list[Tap]) -> None:
    """{name: (inputs, outputs)} of tuples, a file a forward."""
    passes: dict[int, dict[str, Any]] = defaultdict(dict)
    for tap in taps:
        passes[tap.step][tap.name] = (tap.inputs, tap.outputs)
    for step, held in passes.items():
        PT.write(folder / f"Pass{step:05d}", held)


def _run_folder(folder: Path, taps: list[Tap]) -> None:
    """A folder of the moment in which the run began, then ranks."""
    moment = f"2026-01-0{1 + len(folder.name) % 9}_10-11-12"
    for tap in taps:
        NPY.write(folder / moment / f"rank_{tap.rank}" / tap.name, to_numpy(tap.outputs[0]))


def _log(folder: Path, taps: list[Tap]) -> None:
    """Arrays printed by a logger, whole."""
    folder.mkdir(parents=True, exist_ok=True)
    with np.printoptions(threshold=10**9, precision=7), (folder / "debug.log").open("w") as file:
        for tap in taps:
            head = f"2026-01-02 10:11:{tap.number % 60:02d},{tap.number:03d} INFO hooks.py:17]"
            file.write(f"{head} {tap.name}: {to_numpy(tap.outputs[0])}\n")


def _numbers_and_index(folder: Path, taps: list[Tap]) -> None:
    """Files called by numbers; what each is stands in a list beside them."""
    for number, tap in enumerate(taps):
        NPY.write(folder / str(number), to_numpy(tap.outputs[0]))
    (folder / "names.json").write_text(json.dumps([tap.name for tap in taps]))


def _positional(folder: Path, taps: list[Tap]) -> None:
    """np.savez(file, *arrays, names=names)."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = [to_numpy(tap.outputs[0]) for tap in taps]
    np.savez(folder / "layers.npz", *arrays, names=np.array([tap.name for tap in taps]))


def _own_wrapper(folder: Path, taps: list[Tap]) -> None:
    """Names below a wrapper on one side, below the model on the other."""
    head = "model." if folder.name == "ref" else "module.module."
    PT.write(folder / "acts", {f"{head}{tap.name}": tap.outputs[0] for tap in taps})


def block(_subject: str, name: str) -> str:
    """blk.3.self_attn.o_proj."""
    layer, inner = layer_of(name)
    return f"{layer.replace('layer_', 'blk.')}.{inner}"


def _nested_groups(folder: Path, taps: list[Tap]) -> None:
    """Sides above modules, a file a step."""
    folder.mkdir(parents=True, exist_ok=True)
    for tap in taps:
        with h5py.File(folder / f"batch{tap.step}.h5", "a") as file:
            for side, tensor in (("inputs", tap.inputs[0]), ("outputs", tap.outputs[0])):
                file[f"{side}/{tap.name.replace('.', '/')}/__value__"] = to_numpy(tensor)


def unseen() -> Iterable[Layout]:
    """The layouts."""
    yield Layout("pt defaultdict of lists", _lists_by_name, steps=3)
    yield Layout("pkl labels of people", _outputs_in_a_list)
    yield Layout(
        "pt hidden_states alone",
        _hidden_states,
        keep="layers",
        own=lambda _, name: layer_of(name)[0].removeprefix("layer_"),
    )
    yield Layout("pt class and number of the call", _class_names, steps=2, touched="equal")
    yield Layout(
        "pt paths of classes",
        _class_paths,
        touched="equal",
        own=lambda subject, name: _paths(subject)[name],
    )
    yield Layout("raw bytes, form in the name", _form_in_name, touched="sorted")
    yield Layout("pt shape and dtype in the name", each(PT, _shape_and_dtype, first))
    yield Layout("txt one column", _flat_text, steps=2, touched="equal")
    yield Layout("json a layer", _json_layers, touched="equal")
    yield Layout("pt calls by name", _calls_by_name, steps=2)
    yield Layout("npy moment and rank", _run_folder, ranks=2, touched="equal")
    yield Layout("printed by a logger", _log)
    yield Layout("npy numbers and an index", _numbers_and_index, touched="equal")
    yield Layout("npz positional and names", _positional)
    yield Layout("pt another wrapper", _own_wrapper)
    yield Layout(
        "npy blk", each(NPY, lambda tap: block("", tap.name), first), touched="sorted", own=block
    )
    yield Layout("h5 sides above modules", _nested_groups, steps=2)
    yield Layout(
        "pt micro-batches and pipeline",
        each(PT, named("step{next}/mb{rank}_{name}"), first),
        steps=2,
        ranks=2,
        touched="equal",
    )
    yield Layout(
        "safetensors fwd_in fwd_out",
        grouped(
            SAFE,
            named("step-{step}-rank-{rank}"),
            in_and_out(named("{name}/fwd_in"), named("{name}/fwd_out")),
        ),
        steps=2,
        ranks=2,
    )
    yield Layout(
        "npz a module, step last",
        each(NPZ, named("{line}@{step}"), first),
        steps=2,
        touched="sorted",
    )
    yield Layout(
        "npy arg and res",
        sides(
            NPY, named("{number:04d}/{name}.arg{hashes}"), named("{number:04d}/{name}.res{hashes}")
        ),
        touched="equal",
    )
