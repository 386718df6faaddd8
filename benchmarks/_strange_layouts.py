"""Dump loops as engineers of other houses write them."""

from __future__ import annotations

import csv
import functools
import hashlib
import json
from collections import Counter, defaultdict
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
    SAFE,
    Layout,
    Tap,
    Way,
    each,
    first,
    grouped,
    layer_of,
    lined,
    model_of,
    named,
    sides,
    taps_of,
    to_numpy,
)  # fmt: skip


def _vllm(folder: Path, taps: list[Tap]) -> None:
    """A list of forwards, keys NAME#in0 and NAME#out0, a file a worker with its pid."""
    ranks: dict[int, dict[int, dict[str, Any]]] = defaultdict(lambda: defaultdict(dict))
    for tap in taps:
        held = ranks[tap.rank][tap.step]
        held[f"{tap.name}#in0"], held[f"{tap.name}#out0"] = tap.inputs[0], tap.outputs[0]
    for rank, steps in ranks.items():
        pid = 3100 + sum(map(ord, folder.name)) % 800 + rank
        forwards = [{"num_tokens": 24, "tensors": held} for held in steps.values()]
        PT.write(folder / f"worker_{rank}_pid{pid}", forwards)


def _keystr(folder: Path, taps: list[Tap]) -> None:
    """Leaves of a tree by jax.tree_util.keystr, in the order of the alphabet."""
    held = {}
    for tap in taps:
        key = "".join(f"[{part}]" if part.isdigit() else f"['{part}']" for part in tap.name.split("."))
        held[key + "['y']"] = to_numpy(tap.outputs[0])
    PKL.write(folder / "intermediates", dict(sorted(held.items())))


def _cell(tap: Tap) -> str:
    array = to_numpy(tap.outputs[0])
    return f"{tap.number:04d}_network-backbone-{tap.name.replace('.', '-')}_output_{array.dtype}"


def _bindings(folder: Path, taps: list[Tap]) -> None:
    """Buffers and a list of bindings."""
    folder.mkdir(parents=True, exist_ok=True)
    listed = []
    for n, tap in enumerate(taps):
        array = to_numpy(tap.outputs[0])
        array.tofile(folder / f"binding_{n}.raw")
        listed.append({"file": f"binding_{n}.raw", "name": tap.name, "dims": list(array.shape),
                       "type": str(array.dtype)})  # fmt: skip
    (folder / "bindings.json").write_text(json.dumps({"bindings": listed}))


def _shapes_in_text(folder: Path, taps: list[Tap]) -> None:
    """Raw floats, and shapes.txt with a line a file."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for tap in taps:
        array = to_numpy(tap.outputs[0]).astype(np.float32)
        array.tofile(folder / f"{lined(tap)}.f32")
        lines.append(f"{lined(tap)}.f32 {'x'.join(map(str, array.shape))}\n")
    (folder / "shapes.txt").write_text("".join(lines))


@functools.cache
def _listed(subject: str) -> dict[str, str]:
    """Module -> 07_linear_3: its place in the list of layers and its class, counted."""
    seen: Counter[str] = Counter()
    names = {}
    leaves = [(n, m) for n, m in model_of(subject).named_modules() if n and not [*m.children()]]
    for place, (name, module) in enumerate(leaves):
        word = type(module).__name__.lower()
        names[name] = f"{place:02d}_{word}_{seen[word]}" if seen[word] else f"{place:02d}_{word}"
        seen[word] += 1
    return names


def _keras(folder: Path, taps: list[Tap]) -> None:
    for tap in taps:
        NPY.write(folder / _listed(folder.parent.name)[tap.name], to_numpy(tap.outputs[0]))


def _timesteps(folder: Path, taps: list[Tap]) -> None:
    """{"t=981": {name: tensor}}: times of a scheduler, falling."""
    held: dict[str, dict[str, Any]] = defaultdict(dict)
    for tap in taps:
        held[f"t={981 - 20 * tap.step}"][tap.name] = tap.outputs[0]
    PT.write(folder / "unet_acts", dict(held))


def _nested(folder: Path, taps: list[Tap]) -> None:
    """{name: {"in": {"0": x}, "out": {"0": y}}} by the name of the module."""
    held = {
        tap.name: {
            side: {str(k): t for k, t in enumerate(tensors)}
            for side, tensors in (("in", tap.inputs), ("out", tap.outputs))
        }
        for tap in taps
    }
    PT.write(folder / "events" / "acts", held)


@functools.cache
def _notebook(subject: str) -> dict[str, str]:
    return {tap.name: f"out{n + 1}" for n, tap in enumerate(taps_of(subject, "", 1, 1))}


def _student(folder: Path, taps: list[Tap]) -> None:
    """out1.npy, out2.npy, ..."""
    for tap in taps:
        NPY.write(folder / _notebook(folder.parent.name)[tap.name], to_numpy(tap.outputs[0]))


def _hashed(folder: Path, taps: list[Tap]) -> None:
    """Files called by a hash of the name, and an index."""
    index = {}
    for tap in taps:
        key = hashlib.md5(tap.name.encode()).hexdigest()[:10]
        index[key] = tap.name
        NPY.write(folder / key, to_numpy(tap.outputs[0]))
    (folder / "index.json").write_text(json.dumps(index))


def _pid_and_moment(folder: Path, taps: list[Tap]) -> None:
    """NAME-PID-NANOSECONDS."""
    pid = 70000 + sum(map(ord, folder.name))
    for n, tap in enumerate(taps):
        moment = 1_764_000_000_123_456_789 + n * 1_370_011
        NPY.write(folder / f"{tap.name}-{pid}-{moment}", to_numpy(tap.outputs[0]))


@functools.cache
def _of_class(subject: str) -> dict[str, str]:
    """Module -> Linear_12: how often its class was called before."""
    kinds = {name: type(m).__name__ for name, m in model_of(subject).named_modules()}
    seen: Counter[str] = Counter()
    names = {}
    for tap in taps_of(subject, "", 1, 1):
        names[tap.name] = f"{kinds[tap.name]}_{seen[kinds[tap.name]]}"
        seen[kinds[tap.name]] += 1
    return names


def _calls_of_classes(folder: Path, taps: list[Tap]) -> None:
    for tap in taps:
        stem = _of_class(folder.parent.name)[tap.name]
        PT.write(folder / f"{stem}_input", tap.inputs[0])
        PT.write(folder / f"{stem}_output", tap.outputs[0])


def mixed_separators(_subject: str, name: str) -> str:
    """layers-3/self_attn__o_proj."""
    layer, inner = layer_of(name)
    return f"{layer.replace('_', '-')}/{inner.replace('.', '__')}"


def _trees(folder: Path, taps: list[Tap]) -> None:
    """{"iteration": 3, "around": {...}, "layers": [{"self_attn": {"o_proj": x}}]}, a file a step."""
    steps: dict[int, dict[str, Any]] = defaultdict(lambda: {"around": {}, "layers": []})
    for tap in taps:
        layer, inner = layer_of(tap.name)
        tree = steps[tap.step]
        number = layer.removeprefix("layer_")
        if not number.isdigit():
            tree["around"][tap.name] = to_numpy(tap.outputs[0])
            continue
        while len(tree["layers"]) <= int(number):
            tree["layers"].append({})
        tree["layers"][int(number)][inner] = to_numpy(tap.outputs[0])
    for step, tree in steps.items():
        PKL.write(folder / f"dump{step}", {"iteration": step, **tree})


def _long_rows(folder: Path, taps: list[Tap]) -> None:
    """A row an element: name, index, value."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "activations.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("layer", "index", "value"))
        for tap in taps:
            flat = to_numpy(tap.outputs[0]).ravel().tolist()
            rows.writerows((tap.name, n, repr(x)) for n, x in enumerate(flat))


def _first_values(folder: Path, taps: list[Tap]) -> None:
    """print(name, tensor.flatten()[:64])."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_printoptions(precision=8, sci_mode=False)
    lines = [f"{tap.name} {tap.outputs[0].flatten()[:64]}\n" for tap in taps]
    torch.set_printoptions(profile="default")
    (folder / "out.log").write_text("".join(lines))


def _one_side_narrow(folder: Path, taps: list[Tap]) -> None:
    """bfloat16 in one run, the same widened in the other."""
    held = {}
    for tap in taps:
        tensor = tap.outputs[0]
        narrow = tensor.bfloat16() if tensor.is_floating_point() else tensor
        held[tap.name] = narrow.float() if folder.name == "ref" else narrow
    PT.write(folder / "hidden", held)


def _iterations_below(folder: Path, taps: list[Tap]) -> None:
    """A group a module, in it a group an iteration, a file a rank."""
    folder.mkdir(parents=True, exist_ok=True)
    for tap in taps:
        with h5py.File(folder / f"rank-{tap.rank}.h5", "a") as file:
            place = f"{tap.name.replace('.', '/')}/iter{tap.step}/output"
            file[place] = to_numpy(tap.outputs[0])


_GGUF = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn": "attn",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.act_fn": "ffn_act", "mlp.down_proj": "ffn_down", "mlp": "ffn", "embed_tokens": "token_embd",
    "norm": "output_norm", "lm_head": "output",
}  # fmt: skip


def _two_tongues(folder: Path, taps: list[Tap]) -> None:
    """Names of transformers in one run, of GGUF in the other."""
    held = {}
    for tap in taps:
        layer, inner = layer_of(tap.name)
        name = _GGUF.get(tap.name, tap.name)
        if layer.startswith("layer_"):
            own = _GGUF.get(inner, inner)
            name = f"blk.{layer[6:]}" + (f".{own}" if inner != "out" else "")
        held[f"model.{tap.name}" if folder.name == "ref" else name] = to_numpy(tap.outputs[0])
    NPZ.write(folder / "taps", held)


def _some(tap: Tap) -> bool:
    """Wholes in and of every other layer."""
    layer, inner = layer_of(tap.name)
    number = layer.removeprefix("layer_")
    return number.isdigit() and not int(number) % 2 and "." not in inner and "norm" not in inner


def _hosts(folder: Path, taps: list[Tap]) -> None:
    host = "a100-node3" if folder.name == "ref" else "h200-node11"
    for tap in taps:
        place = folder / f"{host}_{41000 + len(folder.name)}/rank{tap.rank}/fwd{tap.step}"
        PT.write(place / tap.name, tap.outputs[0])


def _hf(folder: Path, taps: list[Tap]) -> None:
    """hidden_states as transformers gives them: what is embedded, then each layer."""
    stack = tuple(tap.outputs[0] for tap in taps)
    PT.write(folder / "output", {"hidden_states": stack, "last_hidden_state": stack[-1] * 2})


@functools.cache
def _stack(subject: str) -> dict[str, str]:
    kept = [t.name for t in taps_of(subject, "", 1, 1) if _stream(t)]
    return {name: f"hidden_states.{n}" for n, name in enumerate(kept)}


def _stream(tap: Tap) -> bool:
    layer, inner = layer_of(tap.name)
    return inner == "out" and (layer.startswith("layer_") or layer in ("stem", "embed_tokens", "embeddings"))


def _objects(folder: Path, taps: list[Tap]) -> None:
    """np.save of an array of objects: (name, array)."""
    rows = np.empty((len(taps), 2), dtype=object)
    for n, tap in enumerate(taps):
        rows[n, 0], rows[n, 1] = tap.name, to_numpy(tap.outputs[0])
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "acts.npy", rows, allow_pickle=True)


def spoken(_subject: str, name: str) -> str:
    """Layer 3 - Self Attn - O Proj."""
    layer, inner = layer_of(name)
    words = [part.replace("_", " ").title() for part in (layer, *inner.split("."))]
    return " - ".join(words)


def shouted(_subject: str, name: str) -> str:
    """LAYER_03_SELF_ATTN_O_PROJ."""
    layer, inner = layer_of(name)
    number = layer.removeprefix("layer_")
    head = f"LAYER_{int(number):02d}" if number.isdigit() else layer.upper()
    return f"{head}_{inner.replace('.', '_').upper()}"


def _never_reset(folder: Path, taps: list[Tap]) -> None:
    """A number that counts all calls of all forwards."""
    for n, tap in enumerate(taps):
        NPY.write(folder / f"{n:06d}_{tap.name}", to_numpy(tap.outputs[0]))


def _half_bytes(folder: Path, taps: list[Tap]) -> None:
    """bfloat16 as raw bytes, described in a file beside each."""
    folder.mkdir(parents=True, exist_ok=True)
    for tap in taps:
        tensor = tap.outputs[0]
        is_float = tensor.is_floating_point()
        bits = tensor.bfloat16().view(torch.int16).numpy() if is_float else tensor.numpy()
        bits.tofile(folder / f"{tap.name}.bin")
        form = {"dtype": "bfloat16" if is_float else str(bits.dtype), "shape": list(tensor.shape)}
        (folder / f"{tap.name}.json").write_text(json.dumps(form))


def strange() -> Iterable[Layout]:
    """The layouts."""
    yield Layout("pt worker, pid and forwards", _vllm, steps=2, ranks=2)
    yield Layout(
        "pt iteration and two ranks in the name",
        each(PT, lambda t: f"it{100 + t.step}_tp{t.rank}_pp0_{lined(t)}", first),
        steps=2, ranks=2, touched="equal",
    )  # fmt: skip
    yield Layout("pkl paths of a tree, sorted", _keystr)
    yield Layout("npy cell hooks", each(NPY, _cell, first), touched="equal")
    yield Layout("raw bindings", _bindings, touched="equal")
    yield Layout("raw floats, shapes in a text", _shapes_in_text, touched="written")
    yield Layout("npy list of layers", _keras, keep="leaves", touched="equal",
                 own=lambda s, n: _listed(s).get(n, n).partition("_")[2])  # fmt: skip
    yield Layout("pt falling times", _timesteps, steps=3)
    yield Layout("pt sides as dictionaries", _nested)
    yield Layout("npy out1", _student, touched="equal", own=lambda s, n: _notebook(s).get(n, n))
    yield Layout("npy hashes and an index", _hashed, touched="equal")
    yield Layout("npy pid and nanoseconds", _pid_and_moment, touched="equal")
    yield Layout("pt calls of classes", _calls_of_classes, touched="equal",
                 own=lambda s, n: _of_class(s).get(n, n))  # fmt: skip
    yield Layout(
        "npy ouput", sides(NPY, named("{line}_input"), named("{line}_ouput")), touched="equal"
    )
    yield Layout(
        "pt mixed separators", each(PT, lambda t: mixed_separators("", t.name), first),
        touched="equal", own=mixed_separators,
    )  # fmt: skip
    yield Layout("pkl trees", _trees, steps=2)
    yield Layout("csv a row an element", _long_rows)
    yield Layout("printed first values", _first_values)
    yield Layout("pt narrow on one side", _one_side_narrow)
    yield Layout("h5 iterations below modules", _iterations_below, steps=2, ranks=2)
    yield Layout("npz two tongues", _two_tongues)
    yield Layout("npy some layers", each(NPY, named("{layer}_{inner}"), first), keep=_some,
                 touched="equal")  # fmt: skip
    yield Layout("pt hosts", _hosts, steps=2, ranks=2, touched="equal")
    yield Layout("pt hidden_states of transformers", _hf, keep=_stream,
                 own=lambda s, n: _stack(s).get(n, n))  # fmt: skip
    yield Layout("npy array of objects", _objects)
    yield Layout(
        "safetensors name:output[0]",
        grouped(SAFE, named("fwd{step}"), lambda w, t: {
            f"{t.name}:input[0]": w.of(t.inputs[0]), f"{t.name}:output[0]": w.of(t.outputs[0])}),
        steps=2,
    )  # fmt: skip
    yield Layout("npy spoken", each(NPY, lambda t: spoken("", t.name), first), touched="equal",
                 own=spoken)  # fmt: skip
    yield Layout("npy shouted", each(NPY, lambda t: shouted("", t.name) + "_OUT", first),
                 touched="sorted", own=shouted)  # fmt: skip
    yield Layout("pt a folder a module, a file a step",
                 each(PT, lambda t: f"{t.name}/{t.step:04d}", first), steps=2, touched="equal")  # fmt: skip
    yield Layout(
        "npy rank, number and side",
        sides(NPY, named("rank{rank}_{number}_{name}_in"), named("rank{rank}_{number}_{name}_out")),
        ranks=2, touched="equal",
    )  # fmt: skip
    yield Layout("npy number never reset", _never_reset, steps=2, touched="equal")
    yield Layout("raw bfloat16, described", _half_bytes, touched="equal")
