"""How layouts of dumps are written that no simple pattern makes."""

from __future__ import annotations

import collections
import copy
import csv
import functools
import gzip
import hashlib
import json
import pickle
import random
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable
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
    Names,
    Tap,
    Way,
    dotted,
    each,
    entry,
    first,
    grouped,
    layer_of,
    lined,
    model_of,
    named,
    taps_of,
    to_numpy,
)


def mixed(folder: Path, taps: list[Tap]) -> None:
    NPY.write(folder / "input_ids", to_numpy(copy.copy(taps[0].inputs[0])))
    grouped(PT, named("activations"), entry(dotted))(folder, taps)


def camel(tap: Tap) -> str:
    """Layer3_SelfAttn_OProj."""
    words = tap.name.replace(".", "_").split("_")
    return "".join(
        f"{'' if word.isdigit() and n else '_' * bool(n)}{word.title()}"
        for n, word in enumerate(words)
    )


def calls(folder: Path, taps: list[Tap]) -> None:
    """(inputs, output) of each call, called by when it ended."""
    for tap in taps:
        PT.write(folder / f"{tap.number:04d}-{tap.name}", (tap.inputs, tap.outputs[0]))


def entries(folder: Path, taps: list[Tap]) -> None:
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


def by_layer(folder: Path, taps: list[Tap]) -> None:
    """Dictionaries by the number of the layer, and what stands around the layers."""
    tree: dict[Any, Any] = {}
    for tap in taps:
        layer, inner = layer_of(tap.name)
        key = int(layer.removeprefix("layer_")) if layer.startswith("layer_") else layer
        tree.setdefault(key, {})[inner] = tap.outputs[0]
    PT.write(folder / "acts", tree)


def groups(folder: Path, taps: list[Tap]) -> None:
    """A group for each step and module, datasets called x and y."""
    folder.mkdir(parents=True, exist_ok=True)
    with h5py.File(folder / "trace.h5", "w") as file:
        for tap in taps:
            group = file.require_group(f"fwd_{tap.step}/{lined(tap)}")
            group["x"], group["y"] = to_numpy(tap.inputs[0]), to_numpy(tap.outputs[0])


def raw(folder: Path, taps: list[Tap]) -> None:
    """Elements alone, all forms in one table."""
    folder.mkdir(parents=True, exist_ok=True)
    forms = {}
    for tap in taps:
        array = to_numpy(tap.outputs[0])
        array.tofile(folder / f"{tap.name}.bin")
        forms[tap.name] = {"shape": array.shape, "dtype": str(array.dtype)}
    (folder / "meta.json").write_text(json.dumps(forms))


def rows(folder: Path, taps: list[Tap]) -> None:
    """A matrix a file, leading axes as rows."""
    folder.mkdir(parents=True, exist_ok=True)
    for tap in taps:
        array = to_numpy(tap.outputs[0])
        np.savetxt(folder / f"{tap.number:02d}.{tap.name}.txt", array.reshape(len(array), -1))


def lines(folder: Path, taps: list[Tap]) -> None:
    """A line of JSON a call."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "trace.jsonl").open("w") as file:
        for tap in taps:
            line = {"step": tap.step, "op": tap.name, "value": tap.outputs[0].float().tolist()}
            file.write(json.dumps(line) + "\n")


def printed(folder: Path, taps: list[Tap]) -> None:
    """What print(f"{name}: {tensor}") leaves, all elements."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_printoptions(threshold=10**9, precision=6)
    lines = [f"[rank0] {tap.name} output: {tap.outputs[0]}\n" for tap in taps]
    torch.set_printoptions(profile="default")
    (folder / "run.log").write_text("".join(lines))


def own_word(write: Way) -> Any:
    """Names begin with which run it is, another word on each side."""

    def dump(folder: Path, taps: list[Tap]) -> None:
        side = "hf" if folder.name == "ref" else "vllm"
        each(write, lambda tap: f"{side}_{lined(tap)}", first)(folder, taps)

    return dump


Write = Callable[[Path, list[Tap]], None]


def lists_by_name(folder: Path, taps: list[Tap]) -> None:
    """A defaultdict(list): one tensor a step behind each name."""
    kept: dict[str, list[torch.Tensor]] = defaultdict(list)
    for tap in taps:
        kept[tap.name].append(tap.outputs[0])
    PT.write(folder / "activations", kept)


def outputs_in_a_list(folder: Path, taps: list[Tap]) -> None:
    """(name, array) appended by a hook, names as labels of people."""
    outputs = []
    for tap in taps:
        layer, inner = layer_of(tap.name)
        label = layer.replace("_", " ").title()
        outputs.append((f"{label}: {inner}", to_numpy(tap.outputs[0])))
    PKL.write(folder / "outputs", outputs)


def hidden_states(folder: Path, taps: list[Tap]) -> None:
    """out.hidden_states alone: a tuple without names."""
    PT.write(folder / "hidden_states", tuple(tap.outputs[0] for tap in taps))


def class_names(folder: Path, taps: list[Tap]) -> None:
    """The files of a precision tool, without its index: class, direction and number of the call."""
    classes = {name: type(m).__name__ for name, m in model_of(folder.parent.name).named_modules()}
    for tap in taps:
        stem = ".".join(filter(None, ("Module", tap.name, classes[tap.name])))
        for side, tensors in (("input", tap.inputs), ("output", tap.outputs)):
            for place, tensor in enumerate(tensors):
                PT.write(folder / f"{stem}.forward.{tap.step}.{side}.{place}", tensor)


def class_paths(folder: Path, taps: list[Tap]) -> None:
    """Classes on the way from the root, each with its place among its siblings."""
    paths = paths_of_classes(folder.parent.name)
    for tap in taps:
        PT.write(folder / f"rank0/{paths[tap.name]}-output.0", tap.outputs[0])


def paths_of_classes(subject: str) -> dict[str, str]:
    """Module -> classes on the way to it."""
    model = model_of(subject)
    paths = {"": f"1.{type(model).__name__}"}
    for name, module in model.named_modules():
        for number, (child, sub) in enumerate(module.named_children()):
            inner = f"{name}.{child}" if name else child
            paths[inner] = f"{paths[name]}-{number}.{type(sub).__name__}"
    return paths


def form_in_name(folder: Path, taps: list[Tap]) -> None:
    """Raw elements, the form in the name of the file."""
    folder.mkdir(parents=True, exist_ok=True)
    for tap in taps:
        array = to_numpy(tap.outputs[0])
        form = "x".join(map(str, array.shape))
        array.tofile(folder / f"{tap.number}_{tap.name}_{form}_{array.dtype}.bin")


def shape_and_dtype(tap: Tap) -> str:
    shape = "_".join(map(str, tap.outputs[0].shape))
    dtype = str(tap.outputs[0].dtype).removeprefix("torch.")
    return f"{tap.name}-{shape}-{dtype}"


def flat_text(folder: Path, taps: list[Tap]) -> None:
    """np.savetxt of all elements in one column, a folder a step."""
    for tap in taps:
        place = folder / f"iter{tap.step}"
        place.mkdir(parents=True, exist_ok=True)
        np.savetxt(place / f"{tap.name}.txt", to_numpy(tap.outputs[0]).ravel())


def json_layers(folder: Path, taps: list[Tap]) -> None:
    """A file of JSON a layer."""
    folder.mkdir(parents=True, exist_ok=True)
    layers: dict[str, dict[str, Any]] = defaultdict(dict)
    for tap in taps:
        layer, inner = layer_of(tap.name)
        layers[layer][inner] = tap.outputs[0].float().tolist()
    for layer, held in layers.items():
        (folder / f"{layer}.json").write_text(json.dumps(held))


def calls_by_name(folder: Path, taps: list[Tap]) -> None:
    """{name: (inputs, outputs)} of tuples, a file a forward."""
    passes: dict[int, dict[str, Any]] = defaultdict(dict)
    for tap in taps:
        passes[tap.step][tap.name] = (tap.inputs, tap.outputs)
    for step, held in passes.items():
        PT.write(folder / f"Pass{step:05d}", held)


def run_folder(folder: Path, taps: list[Tap]) -> None:
    """A folder of the moment in which the run began, then ranks."""
    moment = f"2026-01-0{1 + len(folder.name) % 9}_10-11-12"
    for tap in taps:
        NPY.write(folder / moment / f"rank_{tap.rank}" / tap.name, to_numpy(tap.outputs[0]))


def log(folder: Path, taps: list[Tap]) -> None:
    """Arrays printed by a logger, whole."""
    folder.mkdir(parents=True, exist_ok=True)
    with np.printoptions(threshold=10**9, precision=7), (folder / "debug.log").open("w") as file:
        for tap in taps:
            head = f"2026-01-02 10:11:{tap.number % 60:02d},{tap.number:03d} INFO hooks.py:17]"
            file.write(f"{head} {tap.name}: {to_numpy(tap.outputs[0])}\n")


def numbers_and_index(folder: Path, taps: list[Tap]) -> None:
    """Files called by numbers; what each is stands in a list beside them."""
    for number, tap in enumerate(taps):
        NPY.write(folder / str(number), to_numpy(tap.outputs[0]))
    (folder / "names.json").write_text(json.dumps([tap.name for tap in taps]))


def positional(folder: Path, taps: list[Tap]) -> None:
    """np.savez(file, *arrays, names=names)."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = [to_numpy(tap.outputs[0]) for tap in taps]
    np.savez(folder / "layers.npz", *arrays, names=np.array([tap.name for tap in taps]))


def own_wrapper(folder: Path, taps: list[Tap]) -> None:
    """Names below a wrapper on one side, below the model on the other."""
    head = "model." if folder.name == "ref" else "module.module."
    PT.write(folder / "acts", {f"{head}{tap.name}": tap.outputs[0] for tap in taps})


def block(_subject: str, name: str) -> str:
    """blk.3.self_attn.o_proj."""
    layer, inner = layer_of(name)
    return f"{layer.replace('layer_', 'blk.')}.{inner}"


def nested_groups(folder: Path, taps: list[Tap]) -> None:
    """Sides above modules, a file a step."""
    folder.mkdir(parents=True, exist_ok=True)
    for tap in taps:
        with h5py.File(folder / f"batch{tap.step}.h5", "a") as file:
            for side, tensor in (("inputs", tap.inputs[0]), ("outputs", tap.outputs[0])):
                file[f"{side}/{tap.name.replace('.', '/')}/__value__"] = to_numpy(tensor)


def arrays(folder: Path, taps: list[Tap]) -> None:
    """Arrays of numpy on one side; elements alone, as a program in C writes them, on the other."""
    for tap in taps:
        array = to_numpy(tap.outputs[0])
        if folder.name == "ref":
            NPY.write(folder / tap.name, array)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            array.astype(np.float32).tofile(folder / f"{tap.name}.bin")


def processes(folder: Path, taps: list[Tap]) -> None:
    """A folder of the process, of the number of the forward, of the module."""
    pid = 4000 + sum(map(ord, folder.name)) % 997
    for tap in taps:
        NPY.write(folder / f"{pid}/{tap.step}/{tap.name}/output_0", to_numpy(tap.outputs[0]))


def hook_point_of_all(tap: Tap) -> str:
    """blocks.3.attn.hook_q."""
    return hook_point("", tap.name)


def hook_point(_subject: str, name: str) -> str:
    """A module as TransformerLens calls its hooks."""
    layer, inner = layer_of(name)
    words = {
        "self_attn.q_proj": "attn.hook_q", "self_attn.k_proj": "attn.hook_k",
        "self_attn.v_proj": "attn.hook_v", "self_attn.o_proj": "attn.hook_result",
        "self_attn": "hook_attn_out", "mlp": "hook_mlp_out", "out": "hook_resid_post",
        "input_layernorm": "ln1.hook_normalized", "post_attention_layernorm": "ln2.hook_normalized",
        "mlp.gate_proj": "mlp.hook_pre", "mlp.up_proj": "mlp.hook_pre_linear",
        "mlp.act_fn": "mlp.hook_post", "mlp.down_proj": "mlp.hook_down",
    }  # fmt: skip
    above, _, last = inner.rpartition(".")
    own = words.get(inner, f"{above}.hook_{last}" if above else f"hook_{last}")
    if layer.startswith("layer_"):
        return f"blocks.{layer.removeprefix('layer_')}.{own}"
    return {"norm": "ln_final.hook_normalized", "lm_head": "hook_logits"}.get(
        name, f"{layer}.{own}" if inner != "out" else f"hook_{layer}"
    )


def table_of_taps(folder: Path, taps: list[Tap]) -> None:
    """A row a tap: name, class, shape, elements."""
    folder.mkdir(parents=True, exist_ok=True)
    classes = {name: type(m).__name__ for name, m in model_of(folder.parent.name).named_modules()}
    with (folder / "activations.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("Layer Name", "Layer Type", "Activation Shape", "Activations"))
        for tap in taps:
            array = to_numpy(tap.outputs[0])
            flat = " ".join(map(repr, array.ravel().tolist()))
            rows.writerow((tap.name, classes[tap.name], array.shape, flat))


def keys_of_tuples(folder: Path, taps: list[Tap]) -> None:
    """{(layer, module): array}."""
    held = {}
    for tap in taps:
        layer, inner = layer_of(tap.name)
        number = layer.removeprefix("layer_")
        held[(int(number) if number.isdigit() else layer, inner)] = to_numpy(tap.outputs[0])
    PKL.write(folder / "acts", held)


def counted(subject: str) -> dict[str, str]:
    """Module -> its class with a number, the first of each without one, as Keras calls layers."""
    seen: Counter[str] = Counter()
    names = {}
    for name, module in model_of(subject).named_modules():
        if name and not isinstance(module, torch.nn.ModuleList):
            word = "".join(
                f"_{c.lower()}" if c.isupper() and n and type(module).__name__[n - 1].islower()
                else c.lower()
                for n, c in enumerate(type(module).__name__)
            )  # fmt: skip
            names[name] = f"{word}_{seen[word]}" if seen[word] else word
            seen[word] += 1
    return names


def as_keras(folder: Path, taps: list[Tap]) -> None:
    """Layer outputs by name, leaves alone."""
    names = counted(folder.parent.name)
    NPZ.write(folder / "layer_outputs", {names[tap.name]: to_numpy(tap.outputs[0]) for tap in taps})


def sown(folder: Path, taps: list[Tap]) -> None:
    """{"intermediates": {module: {"__call__": (array,)}}}, keys in the order of the alphabet."""
    tree: dict[str, Any] = {}
    for tap in taps:
        node = tree
        for part in tap.name.split("."):
            node = node.setdefault(part, {})
        node["__call__"] = (to_numpy(tap.outputs[0]),)
    PKL.write(folder / "state", {"intermediates": _sorted(tree)})


def _sorted(tree: Any) -> Any:
    return {k: _sorted(tree[k]) for k in sorted(tree)} if isinstance(tree, dict) else tree


def tensordump(folder: Path, taps: list[Tap]) -> None:
    """fileName_dumpMode_dtype_id.npy, the id counts all files."""
    count = 0
    for tap in taps:
        for word, tensor in (("_in", tap.inputs[0]), ("", tap.outputs[0])):
            array = to_numpy(tensor)
            NPY.write(folder / f"{lined(tap)}{word}_{array.dtype}_{count}", array)
            count += 1


def names_inside(folder: Path, taps: list[Tap]) -> None:
    """(name, input, output) in files called by chance."""
    chance = random.Random(folder.name)
    for tap in taps:
        name = uuid.UUID(int=chance.getrandbits(128)).hex
        PT.write(folder / name, (tap.name, tap.inputs[0], tap.outputs[0]))


_TYPES = {"norm": "Mul", "act": "Mul", "conv": "Conv", "bn": "BatchNormalization"}


def node_output(_subject: str, name: str) -> str:
    """A value of an exported graph."""
    kind = next((t for word, t in _TYPES.items() if word in name.rpartition(".")[2].lower()), "Add")
    parts = [f"{a}.{b}" if b.isdigit() else a for a, b in _with_next(name.split("."))]
    return f"/model/{'/'.join(parts)}/{kind}_output_0"


def _with_next(parts: list[str]) -> list[tuple[str, str]]:
    return [
        (part, parts[n + 1] if n + 1 < len(parts) else "")
        for n, part in enumerate(parts)
        if not part.isdigit()
    ]


_GGML = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "Qcur", "self_attn.k_proj": "Kcur",
    "self_attn.v_proj": "Vcur", "self_attn.o_proj": "kqv_out", "self_attn": "attn_out",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.act_fn": "ffn_silu", "mlp.down_proj": "ffn_down", "mlp": "ffn_out", "out": "l_out",
    "embed_tokens": "inp_embd", "norm": "result_norm", "lm_head": "result_output",
}  # fmt: skip


def ggml(_subject: str, name: str) -> str:
    """attn_norm-3."""
    layer, inner = layer_of(name)
    if not layer.startswith("layer_"):
        return _GGML.get(name, name.replace(".", "_"))
    return f"{_GGML.get(inner, inner.replace('.', '_'))}-{layer.removeprefix('layer_')}"


def registered(folder: Path, taps: list[Tap]) -> None:
    """for number, (name, module) in enumerate(model.named_modules())."""
    numbers = {name: n for n, (name, _) in enumerate(model_of(folder.parent.name).named_modules())}
    for tap in taps:
        NPY.write(folder / f"{numbers[tap.name]:03d}_{tap.name}", to_numpy(tap.outputs[0]))


def script_container(folder: Path, taps: list[Tap]) -> None:
    """Buffers of a scripted module, as tensors are handed to C++."""
    folder.mkdir(parents=True, exist_ok=True)
    box = torch.nn.Module()
    for tap in taps:
        box.register_buffer(lined(tap), tap.outputs[0])
    torch.jit.script(box).save(str(folder / "tensors.pt"))


def bits(way: Way, tap: Tap) -> Any:
    """bfloat16 as the integers that numpy has for its bits."""
    tensor = tap.outputs[0]
    if not tensor.is_floating_point():
        return way.of(tensor)
    return tensor.bfloat16().view(torch.int16).numpy().view(np.uint16)


def flat_lines(folder: Path, taps: list[Tap]) -> None:
    """A line a tensor: name, rank, step, shape, dtype, flat elements."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "tensors.jsonl").open("w") as file:
        for tap in taps:
            tensor = tap.outputs[0].float()
            line = {
                "name": tap.name, "rank": tap.rank, "step": tap.step,
                "shape": [*tensor.shape], "dtype": "float32", "data": tensor.flatten().tolist(),
            }  # fmt: skip
            file.write(json.dumps(line) + "\n")


def half_groups(folder: Path, taps: list[Tap]) -> None:
    """rank0/step_00001/NAME, in float16."""
    folder.mkdir(parents=True, exist_ok=True)
    with h5py.File(folder / "acts.h5", "w") as file:
        for tap in taps:
            group = file.require_group(f"rank{tap.rank}/step_{tap.step + 1:05d}")
            group[tap.name] = to_numpy(tap.outputs[0], "float16")


def lists_of_ranks(folder: Path, taps: list[Tap]) -> None:
    """{name: [a tensor a step]}, a file a rank."""
    ranks: dict[int, dict[str, list[torch.Tensor]]] = defaultdict(lambda: defaultdict(list))
    for tap in taps:
        ranks[tap.rank][tap.name].append(tap.outputs[0])
    for rank, held in ranks.items():
        PT.write(folder / f"activations_{rank}", dict(held))


def headed(folder: Path, taps: list[Tap]) -> None:
    """A log with a headline above each array."""
    folder.mkdir(parents=True, exist_ok=True)
    with np.printoptions(threshold=10**9, precision=8), (folder / "forward.txt").open("w") as file:
        for tap in taps:
            array = to_numpy(tap.outputs[0])
            file.write(f"===== {tap.name} =====\nshape: {array.shape} dtype: {array.dtype}\n")
            file.write(f"{array}\n\n")


def shape_in_header(folder: Path, taps: list[Tap]) -> None:
    """np.savetxt of all elements, the shape in the header."""
    folder.mkdir(parents=True, exist_ok=True)
    for tap in taps:
        array = to_numpy(tap.outputs[0])
        path = folder / f"{tap.number:03d}_{lined(tap)}.txt"
        np.savetxt(path, array.reshape(-1), header=f"{tap.name} shape={array.shape}")


def seconds(folder: Path, taps: list[Tap]) -> None:
    """time.time() in front of each name."""
    for tap in taps:
        name = f"{1_700_000_000 + 0.0131 * tap.number:.4f}_{tap.name}"
        PT.write(folder / name, tap.outputs[0])


def indexed(_subject: str, name: str) -> str:
    """layers[3].self_attn.o_proj."""
    parts = [f"[{part}]" if part.isdigit() else f".{part}" for part in name.split(".")]
    return "".join(parts).lstrip(".")


def events(folder: Path, taps: list[Tap]) -> None:
    """A list of what each hook saw, hooks before and behind a forward."""
    events = []
    for tap in taps:
        for word, tensors in (("forward_pre", tap.inputs), ("forward", tap.outputs)):
            events.append({"hook": word, "module": tap.name, "tensors": list(tensors)})
    PT.write(folder / "events", events)


def stacked(folder: Path, taps: list[Tap]) -> None:
    """All hidden states in one array."""
    NPZ.write(
        folder / "hidden", {"hidden_states": np.stack([to_numpy(tap.outputs[0]) for tap in taps])}
    )


def compressed(folder: Path, taps: list[Tap]) -> None:
    """A pickle through gzip."""
    folder.mkdir(parents=True, exist_ok=True)
    held = {tap.name: to_numpy(tap.outputs[0]) for tap in taps}
    with gzip.open(folder / "acts.pkl.gz", "wb") as file:
        pickle.dump(held, file)


def short(_subject: str, name: str) -> str:
    """L3.self_attn.o_proj."""
    return ".".join(layer_of(name)).replace("layer_", "L")


def layer_behind(subject: str, name: str) -> str:
    """o_proj_layer2."""
    layer, inner = layer_of(name)
    return f"{inner.replace('.', '_')}_{layer.replace('_', '')}"


def called(own: Any) -> Names:
    """Names of taps by names of modules."""
    return lambda tap: own("", tap.name)


def sides_in_groups(folder: Path, taps: list[Tap]) -> None:
    """iter_3.h5 with NAME/in_0 and NAME/out_0."""
    files: dict[int, dict[str, np.ndarray]] = defaultdict(dict)
    for tap in taps:
        for word, tensors in (("in", tap.inputs), ("out", tap.outputs)):
            for place, tensor in enumerate(tensors):
                files[tap.step][f"{tap.name}/{word}_{place}"] = to_numpy(tensor)
    for step, held in files.items():
        H5.write(folder / f"iter_{step}", held)


@functools.cache
def numbered(subject: str) -> dict[str, str]:
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


def numbered_in_layers(folder: Path, taps: list[Tap]) -> None:
    for tap in taps:
        NPY.write(folder / numbered(folder.parent.name)[tap.name], to_numpy(tap.outputs[0]))


def ranks_of_two(folder: Path, taps: list[Tap]) -> None:
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


def objects(folder: Path, taps: list[Tap]) -> None:
    """A pickled list of objects of a class of one's own."""
    Way("pkl").write(folder / "records", [Record(tap) for tap in taps])


def saved_dict(folder: Path, taps: list[Tap]) -> None:
    """np.save of a dictionary of arrays, a file a rank."""
    ranks: dict[int, dict[str, np.ndarray]] = defaultdict(dict)
    for tap in taps:
        ranks[tap.rank][lined(tap)] = to_numpy(tap.outputs[0])
    for rank, held in ranks.items():
        NPY.write(folder / f"acts_dev{rank}", held)


def json_of_prompts(folder: Path, taps: list[Tap]) -> None:
    """{"prompt_0": {name: nested list}}."""
    tree: dict[str, dict[str, Any]] = defaultdict(dict)
    for tap in taps:
        tree[f"prompt_{tap.step}"][tap.name] = tap.outputs[0].float().tolist()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "hidden.json").write_text(json.dumps(tree))


def printed_files(folder: Path, taps: list[Tap]) -> None:
    """str(tensor), a file a tap."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_printoptions(threshold=10**9, precision=7, sci_mode=False)
    for tap in taps:
        (folder / f"{tap.number:03d}-{tap.name}.txt").write_text(f"{tap.outputs[0]}\n")
    torch.set_printoptions(profile="default")


def tree_of_groups(folder: Path, taps: list[Tap]) -> None:
    """A group a module with a dataset `activation`, listed by the alphabet."""
    folder.mkdir(parents=True, exist_ok=True)
    with h5py.File(folder / "model.h5", "w") as file:
        for tap in taps:
            group = file.require_group(tap.name.replace(".", "/"))
            group.create_dataset("activation", data=to_numpy(tap.outputs[0]))
            group.attrs["class"] = "Module"


def directions(folder: Path, taps: list[Tap]) -> None:
    """{name: {"fwd": {"in": [...], "out": [...]}}}."""
    held = {tap.name: {"fwd": {"in": list(tap.inputs), "out": list(tap.outputs)}} for tap in taps}
    PT.write(folder / "trace", held)


_SHORT = {
    "input_layernorm": "ln1", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_o", "self_attn": "attn",
    "post_attention_layernorm": "ln2", "mlp.gate_proj": "mlp_gate", "mlp.up_proj": "mlp_up",
    "mlp.act_fn": "mlp_act", "mlp.down_proj": "mlp_down", "out": "out",
}  # fmt: skip


def short_later(_subject: str, name: str) -> str:
    """L03_attn_o."""
    layer, inner = layer_of(name)
    number = layer.removeprefix("layer_")
    head = f"L{int(number):02d}" if number.isdigit() else layer
    return f"{head}_{_SHORT.get(inner, inner.replace('.', '_'))}"


def described_numbers(folder: Path, taps: list[Tap]) -> None:
    """0007.bin beside 0007.json, which says name, shape and dtype."""
    folder.mkdir(parents=True, exist_ok=True)
    for tap in taps:
        array = to_numpy(tap.outputs[0])
        array.tofile(folder / f"{tap.number:04d}.bin")
        form = {"name": tap.name, "shape": array.shape, "dtype": str(array.dtype)}
        (folder / f"{tap.number:04d}.json").write_text(json.dumps(form))


def rows_of_taps(folder: Path, taps: list[Tap]) -> None:
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


def older_files(folder: Path, taps: list[Tap]) -> None:
    """An OrderedDict in the format before torch 1.6, below a wrapper on one side."""
    head = "module." if folder.name == "ref" else ""
    files: dict[int, Any] = defaultdict(collections.OrderedDict)
    for tap in taps:
        files[tap.step][f"{head}{tap.name}"] = tap.outputs[0]
    folder.mkdir(parents=True, exist_ok=True)
    for step, held in files.items():
        path = folder / f"acts-{100 + step}.pth"
        torch.save(held, path, _use_new_zipfile_serialization=False)


def vllm(folder: Path, taps: list[Tap]) -> None:
    """A list of forwards, keys NAME#in0 and NAME#out0, a file a worker with its pid."""
    ranks: dict[int, dict[int, dict[str, Any]]] = defaultdict(lambda: defaultdict(dict))
    for tap in taps:
        held = ranks[tap.rank][tap.step]
        held[f"{tap.name}#in0"], held[f"{tap.name}#out0"] = tap.inputs[0], tap.outputs[0]
    for rank, steps in ranks.items():
        pid = 3100 + sum(map(ord, folder.name)) % 800 + rank
        forwards = [{"num_tokens": 24, "tensors": held} for held in steps.values()]
        PT.write(folder / f"worker_{rank}_pid{pid}", forwards)


def keystr(folder: Path, taps: list[Tap]) -> None:
    """Leaves of a tree by jax.tree_util.keystr, in the order of the alphabet."""
    held = {}
    for tap in taps:
        key = "".join(
            f"[{part}]" if part.isdigit() else f"['{part}']" for part in tap.name.split(".")
        )
        held[key + "['y']"] = to_numpy(tap.outputs[0])
    PKL.write(folder / "intermediates", dict(sorted(held.items())))


def cell(tap: Tap) -> str:
    array = to_numpy(tap.outputs[0])
    return f"{tap.number:04d}_network-backbone-{tap.name.replace('.', '-')}_output_{array.dtype}"


def bindings(folder: Path, taps: list[Tap]) -> None:
    """Buffers and a list of bindings."""
    folder.mkdir(parents=True, exist_ok=True)
    listed = []
    for n, tap in enumerate(taps):
        array = to_numpy(tap.outputs[0])
        array.tofile(folder / f"binding_{n}.raw")
        listed.append({"file": f"binding_{n}.raw", "name": tap.name, "dims": list(array.shape),
                       "type": str(array.dtype)})  # fmt: skip
    (folder / "bindings.json").write_text(json.dumps({"bindings": listed}))


def shapes_in_text(folder: Path, taps: list[Tap]) -> None:
    """Raw floats, and shapes.txt with a line a file."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for tap in taps:
        array = to_numpy(tap.outputs[0]).astype(np.float32)
        array.tofile(folder / f"{lined(tap)}.f32")
        lines.append(f"{lined(tap)}.f32 {'x'.join(map(str, array.shape))}\n")
    (folder / "shapes.txt").write_text("".join(lines))


@functools.cache
def listed(subject: str) -> dict[str, str]:
    """Module -> 07_linear_3: its place in the list of layers and its class, counted."""
    seen: Counter[str] = Counter()
    names = {}
    leaves = [(n, m) for n, m in model_of(subject).named_modules() if n and not [*m.children()]]
    for place, (name, module) in enumerate(leaves):
        word = type(module).__name__.lower()
        names[name] = f"{place:02d}_{word}_{seen[word]}" if seen[word] else f"{place:02d}_{word}"
        seen[word] += 1
    return names


def keras(folder: Path, taps: list[Tap]) -> None:
    for tap in taps:
        NPY.write(folder / listed(folder.parent.name)[tap.name], to_numpy(tap.outputs[0]))


def timesteps(folder: Path, taps: list[Tap]) -> None:
    """{"t=981": {name: tensor}}: times of a scheduler, falling."""
    held: dict[str, dict[str, Any]] = defaultdict(dict)
    for tap in taps:
        held[f"t={981 - 20 * tap.step}"][tap.name] = tap.outputs[0]
    PT.write(folder / "unet_acts", dict(held))


def nested(folder: Path, taps: list[Tap]) -> None:
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
def notebook(subject: str) -> dict[str, str]:
    return {tap.name: f"out{n + 1}" for n, tap in enumerate(taps_of(subject, "", 1, 1))}


def student(folder: Path, taps: list[Tap]) -> None:
    """out1.npy, out2.npy, ..."""
    for tap in taps:
        NPY.write(folder / notebook(folder.parent.name)[tap.name], to_numpy(tap.outputs[0]))


def hashed(folder: Path, taps: list[Tap]) -> None:
    """Files called by a hash of the name, and an index."""
    index = {}
    for tap in taps:
        key = hashlib.md5(tap.name.encode()).hexdigest()[:10]
        index[key] = tap.name
        NPY.write(folder / key, to_numpy(tap.outputs[0]))
    (folder / "index.json").write_text(json.dumps(index))


def pid_and_moment(folder: Path, taps: list[Tap]) -> None:
    """NAME-PID-NANOSECONDS."""
    pid = 70000 + sum(map(ord, folder.name))
    for n, tap in enumerate(taps):
        moment = 1_764_000_000_123_456_789 + n * 1_370_011
        NPY.write(folder / f"{tap.name}-{pid}-{moment}", to_numpy(tap.outputs[0]))


@functools.cache
def of_class(subject: str) -> dict[str, str]:
    """Module -> Linear_12: how often its class was called before."""
    kinds = {name: type(m).__name__ for name, m in model_of(subject).named_modules()}
    seen: Counter[str] = Counter()
    names = {}
    for tap in taps_of(subject, "", 1, 1):
        names[tap.name] = f"{kinds[tap.name]}_{seen[kinds[tap.name]]}"
        seen[kinds[tap.name]] += 1
    return names


def calls_of_classes(folder: Path, taps: list[Tap]) -> None:
    for tap in taps:
        stem = of_class(folder.parent.name)[tap.name]
        PT.write(folder / f"{stem}_input", tap.inputs[0])
        PT.write(folder / f"{stem}_output", tap.outputs[0])


def mixed_separators(_subject: str, name: str) -> str:
    """layers-3/self_attn__o_proj."""
    layer, inner = layer_of(name)
    return f"{layer.replace('_', '-')}/{inner.replace('.', '__')}"


def trees(folder: Path, taps: list[Tap]) -> None:
    """{"iteration": 3, "around": {...}, "layers": [{"o_proj": x}]}, a file a step."""
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


def long_rows(folder: Path, taps: list[Tap]) -> None:
    """A row an element: name, index, value."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "activations.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("layer", "index", "value"))
        for tap in taps:
            flat = to_numpy(tap.outputs[0]).ravel().tolist()
            rows.writerows((tap.name, n, repr(x)) for n, x in enumerate(flat))


def first_values(folder: Path, taps: list[Tap]) -> None:
    """print(name, tensor.flatten()[:64])."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_printoptions(precision=8, sci_mode=False)
    lines = [f"{tap.name} {tap.outputs[0].flatten()[:64]}\n" for tap in taps]
    torch.set_printoptions(profile="default")
    (folder / "out.log").write_text("".join(lines))


def one_side_narrow(folder: Path, taps: list[Tap]) -> None:
    """bfloat16 in one run, the same widened in the other."""
    held = {}
    for tap in taps:
        tensor = tap.outputs[0]
        narrow = tensor.bfloat16() if tensor.is_floating_point() else tensor
        held[tap.name] = narrow.float() if folder.name == "ref" else narrow
    PT.write(folder / "hidden", held)


def iterations_below(folder: Path, taps: list[Tap]) -> None:
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
    "mlp.act_fn": "ffn_act", "mlp.down_proj": "ffn_down", "mlp": "ffn",
    "embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output",
}  # fmt: skip


def two_tongues(folder: Path, taps: list[Tap]) -> None:
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


def some(tap: Tap) -> bool:
    """Wholes in and of every other layer."""
    layer, inner = layer_of(tap.name)
    number = layer.removeprefix("layer_")
    return number.isdigit() and not int(number) % 2 and "." not in inner and "norm" not in inner


def hosts(folder: Path, taps: list[Tap]) -> None:
    host = "a100-node3" if folder.name == "ref" else "h200-node11"
    for tap in taps:
        place = folder / f"{host}_{41000 + len(folder.name)}/rank{tap.rank}/fwd{tap.step}"
        PT.write(place / tap.name, tap.outputs[0])


def hf(folder: Path, taps: list[Tap]) -> None:
    """hidden_states as transformers gives them: what is embedded, then each layer."""
    stack = tuple(tap.outputs[0] for tap in taps)
    PT.write(folder / "output", {"hidden_states": stack, "last_hidden_state": stack[-1] * 2})


@functools.cache
def stack(subject: str) -> dict[str, str]:
    kept = [t.name for t in taps_of(subject, "", 1, 1) if stream(t)]
    return {name: f"hidden_states.{n}" for n, name in enumerate(kept)}


def stream(tap: Tap) -> bool:
    layer, inner = layer_of(tap.name)
    return inner == "out" and (
        layer.startswith("layer_") or layer in ("stem", "embed_tokens", "embeddings")
    )


def objects_strange(folder: Path, taps: list[Tap]) -> None:
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


def never_reset(folder: Path, taps: list[Tap]) -> None:
    """A number that counts all calls of all forwards."""
    for n, tap in enumerate(taps):
        NPY.write(folder / f"{n:06d}_{tap.name}", to_numpy(tap.outputs[0]))


def half_bytes(folder: Path, taps: list[Tap]) -> None:
    """bfloat16 as raw bytes, described in a file beside each."""
    folder.mkdir(parents=True, exist_ok=True)
    for tap in taps:
        tensor = tap.outputs[0]
        is_float = tensor.is_floating_point()
        bits = tensor.bfloat16().view(torch.int16).numpy() if is_float else tensor.numpy()
        bits.tofile(folder / f"{tap.name}.bin")
        form = {"dtype": "bfloat16" if is_float else str(bits.dtype), "shape": list(tensor.shape)}
        (folder / f"{tap.name}.json").write_text(json.dumps(form))


# ---- the last ones


@functools.cache
def kinds(subject: str) -> dict[str, str]:
    """Module -> its class."""
    return {name: type(m).__name__ for name, m in model_of(subject).named_modules()}


def class_around(folder: Path, taps: list[Tap]) -> None:
    """012-Linear(layers.3.mlp.up_proj)."""
    for tap in taps:
        kind = kinds(folder.parent.name)[tap.name]
        PT.write(folder / f"{tap.number:03d}-{kind}({tap.name})", tap.outputs[0])


def dumps_of_moments(folder: Path, taps: list[Tap]) -> None:
    """dump_20260103T101112/L3/mlp.npz."""
    moment = f"dump_2026010{1 + len(folder.name) % 9}T101112"
    for tap in taps:
        layer, inner = layer_of(tap.name)
        place = folder / moment / layer.replace("layer_", "L")
        NPZ.write(place / inner, to_numpy(tap.outputs[0]))


def by_step_and_rank(folder: Path, taps: list[Tap]) -> None:
    """{step: {rank: {name: array}}}."""
    tree: dict[int, dict[int, dict[str, Any]]] = defaultdict(lambda: defaultdict(dict))
    for tap in taps:
        tree[tap.step][tap.rank][tap.name] = to_numpy(tap.outputs[0])
    PKL.write(folder / "acts", {step: dict(ranks) for step, ranks in tree.items()})


def tagged_lines(folder: Path, taps: list[Tap]) -> None:
    """{"tag": name, "call": 0, "out": nested list} a line."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "trace.jsonl").open("w") as file:
        for tap in taps:
            line = {"tag": tap.name, "call": tap.step, "out": tap.outputs[0].float().tolist()}
            file.write(json.dumps(line) + "\n")


def two_containers(folder: Path, taps: list[Tap]) -> None:
    """A dictionary in one run, files in the other."""
    if folder.name == "ref":
        PT.write(folder / "acts", {tap.name: tap.outputs[0] for tap in taps})
        return
    for tap in taps:
        NPY.write(folder / lined(tap), to_numpy(tap.outputs[0]))


def glued(_subject: str, name: str) -> str:
    """Layers3SelfAttnOProj."""
    return "".join(word.title() for word in name.replace(".", "_").split("_"))


def counted_groups(folder: Path, taps: list[Tap]) -> None:
    """A group a rank, datasets 0003_NAME."""
    folder.mkdir(parents=True, exist_ok=True)
    with h5py.File(folder / "trace.h5", "w") as file:
        for tap in taps:
            file[f"r{tap.rank}/{tap.number:04d}_{lined(tap)}"] = to_numpy(tap.outputs[0])


def name_in_first_line(folder: Path, taps: list[Tap]) -> None:
    """003.txt: the name in one line, the tensor below."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_printoptions(threshold=10**9, precision=7)
    for tap in taps:
        (folder / f"{tap.number:03d}.txt").write_text(f"{tap.name}\n{tap.outputs[0]}\n")
    torch.set_printoptions(profile="default")


def two_shards(folder: Path, taps: list[Tap]) -> None:
    """acts-00001-of-00002.safetensors."""
    half = len(taps) // 2
    for n, part in enumerate((taps[:half], taps[half:])):
        held = {tap.name: SAFE.of(tap.outputs[0]) for tap in part}
        SAFE.write(folder / f"acts-0000{n + 1}-of-00002", held)


def lists_of_layers(folder: Path, taps: list[Tap]) -> None:
    """{"layers": [[tensor, ...], ...], "rest": [...]}, no names."""
    layers: dict[str, list[torch.Tensor]] = defaultdict(list)
    for tap in taps:
        layers[layer_of(tap.name)[0]].append(tap.outputs[0])
    numbered = [held for layer, held in layers.items() if layer.startswith("layer_")]
    rest = [t for layer, held in layers.items() if not layer.startswith("layer_") for t in held]
    PT.write(folder / "acts", {"layers": numbered, "rest": rest})


@functools.cache
def places_in_layers(subject: str) -> dict[str, str]:
    """Module -> layers.3.7."""
    seen: Counter[str] = Counter()
    names = {}
    for tap in taps_of(subject, "", 1, 1):
        layer = layer_of(tap.name)[0]
        whole = layer.replace("layer_", "layers.") if layer.startswith("layer_") else "rest"
        names[tap.name] = f"{whole}.{seen[whole]}"
        seen[whole] += 1
    return names
