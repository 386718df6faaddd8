"""Layouts of the hooks, callbacks and scripts that people post with their questions: names, numbers
and containers of their own. Written before any was compared, measured once, then mended.
"""

from __future__ import annotations

import csv
import json
import pickle
import random
import uuid
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
    Names,
    Tap,
    Way,
    each,
    first,
    grouped,
    layer_of,
    lined,
    model_of,
    named,
    to_numpy,
)  # fmt: skip


def _arrays(folder: Path, taps: list[Tap]) -> None:
    """Arrays of numpy on one side; elements alone, as a program in C writes them, on the other."""
    for tap in taps:
        array = to_numpy(tap.outputs[0])
        if folder.name == "ref":
            NPY.write(folder / tap.name, array)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            array.astype(np.float32).tofile(folder / f"{tap.name}.bin")


def _processes(folder: Path, taps: list[Tap]) -> None:
    """A folder of the process, of the number of the forward, of the module."""
    pid = 4000 + sum(map(ord, folder.name)) % 997
    for tap in taps:
        NPY.write(folder / f"{pid}/{tap.step}/{tap.name}/output_0", to_numpy(tap.outputs[0]))


def _hook_point(tap: Tap) -> str:
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


def _csv(folder: Path, taps: list[Tap]) -> None:
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


def _keys_of_tuples(folder: Path, taps: list[Tap]) -> None:
    """{(layer, module): array}."""
    held = {}
    for tap in taps:
        layer, inner = layer_of(tap.name)
        number = layer.removeprefix("layer_")
        held[(int(number) if number.isdigit() else layer, inner)] = to_numpy(tap.outputs[0])
    PKL.write(folder / "acts", held)


def _counted(subject: str) -> dict[str, str]:
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


def _as_keras(folder: Path, taps: list[Tap]) -> None:
    """Layer outputs by name, leaves alone."""
    names = _counted(folder.parent.name)
    NPZ.write(folder / "layer_outputs", {names[tap.name]: to_numpy(tap.outputs[0]) for tap in taps})


def _sown(folder: Path, taps: list[Tap]) -> None:
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


def _tensordump(folder: Path, taps: list[Tap]) -> None:
    """fileName_dumpMode_dtype_id.npy, the id counts all files."""
    count = 0
    for tap in taps:
        for word, tensor in (("_in", tap.inputs[0]), ("", tap.outputs[0])):
            array = to_numpy(tensor)
            NPY.write(folder / f"{lined(tap)}{word}_{array.dtype}_{count}", array)
            count += 1


def _names_inside(folder: Path, taps: list[Tap]) -> None:
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


def _registered(folder: Path, taps: list[Tap]) -> None:
    """for number, (name, module) in enumerate(model.named_modules())."""
    numbers = {name: n for n, (name, _) in enumerate(model_of(folder.parent.name).named_modules())}
    for tap in taps:
        NPY.write(folder / f"{numbers[tap.name]:03d}_{tap.name}", to_numpy(tap.outputs[0]))


def _script_container(folder: Path, taps: list[Tap]) -> None:
    """Buffers of a scripted module, as tensors are handed to C++."""
    folder.mkdir(parents=True, exist_ok=True)
    box = torch.nn.Module()
    for tap in taps:
        box.register_buffer(lined(tap), tap.outputs[0])
    torch.jit.script(box).save(str(folder / "tensors.pt"))


def _bits(way: Way, tap: Tap) -> Any:
    """bfloat16 as the integers that numpy has for its bits."""
    tensor = tap.outputs[0]
    if not tensor.is_floating_point():
        return way.of(tensor)
    return tensor.bfloat16().view(torch.int16).numpy().view(np.uint16)


def _flat_lines(folder: Path, taps: list[Tap]) -> None:
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


def _half_groups(folder: Path, taps: list[Tap]) -> None:
    """rank0/step_00001/NAME, in float16."""
    folder.mkdir(parents=True, exist_ok=True)
    with h5py.File(folder / "acts.h5", "w") as file:
        for tap in taps:
            group = file.require_group(f"rank{tap.rank}/step_{tap.step + 1:05d}")
            group[tap.name] = to_numpy(tap.outputs[0], "float16")


def _lists_of_ranks(folder: Path, taps: list[Tap]) -> None:
    """{name: [a tensor a step]}, a file a rank."""
    ranks: dict[int, dict[str, list[torch.Tensor]]] = defaultdict(lambda: defaultdict(list))
    for tap in taps:
        ranks[tap.rank][tap.name].append(tap.outputs[0])
    for rank, held in ranks.items():
        PT.write(folder / f"activations_{rank}", dict(held))


def _headed(folder: Path, taps: list[Tap]) -> None:
    """A log with a headline above each array."""
    folder.mkdir(parents=True, exist_ok=True)
    with np.printoptions(threshold=10**9, precision=8), (folder / "forward.txt").open("w") as file:
        for tap in taps:
            array = to_numpy(tap.outputs[0])
            file.write(f"===== {tap.name} =====\nshape: {array.shape} dtype: {array.dtype}\n")
            file.write(f"{array}\n\n")


def _shape_in_header(folder: Path, taps: list[Tap]) -> None:
    """np.savetxt of all elements, the shape in the header."""
    folder.mkdir(parents=True, exist_ok=True)
    for tap in taps:
        array = to_numpy(tap.outputs[0])
        path = folder / f"{tap.number:03d}_{lined(tap)}.txt"
        np.savetxt(path, array.reshape(-1), header=f"{tap.name} shape={array.shape}")


def _seconds(folder: Path, taps: list[Tap]) -> None:
    """time.time() in front of each name."""
    for tap in taps:
        name = f"{1_700_000_000 + 0.0131 * tap.number:.4f}_{tap.name}"
        PT.write(folder / name, tap.outputs[0])


def indexed(_subject: str, name: str) -> str:
    """layers[3].self_attn.o_proj."""
    parts = [f"[{part}]" if part.isdigit() else f".{part}" for part in name.split(".")]
    return "".join(parts).lstrip(".")


def _events(folder: Path, taps: list[Tap]) -> None:
    """A list of what each hook saw, hooks before and behind a forward."""
    events = []
    for tap in taps:
        for word, tensors in (("forward_pre", tap.inputs), ("forward", tap.outputs)):
            events.append({"hook": word, "module": tap.name, "tensors": list(tensors)})
    PT.write(folder / "events", events)


def _stacked(folder: Path, taps: list[Tap]) -> None:
    """All hidden states in one array."""
    NPZ.write(
        folder / "hidden", {"hidden_states": np.stack([to_numpy(tap.outputs[0]) for tap in taps])}
    )


def _compressed(folder: Path, taps: list[Tap]) -> None:
    """A pickle through gzip."""
    import gzip

    folder.mkdir(parents=True, exist_ok=True)
    held = {tap.name: to_numpy(tap.outputs[0]) for tap in taps}
    with gzip.open(folder / "acts.pkl.gz", "wb") as file:
        pickle.dump(held, file)


def short(_subject: str, name: str) -> str:
    """L3.self_attn.o_proj."""
    return ".".join(layer_of(name)).replace("layer_", "L")


def _reversed(subject: str, name: str) -> str:
    """o_proj_layer2."""
    layer, inner = layer_of(name)
    return f"{inner.replace('.', '_')}_{layer.replace('_', '')}"


def _called(own: Any) -> Names:
    """Names of taps by names of modules."""
    return lambda tap: own("", tap.name)


def hooks() -> Iterable[Layout]:
    """The layouts."""
    yield Layout("npy against raw bytes", _arrays, touched="equal")
    yield Layout("npy process and forward", _processes, steps=2, touched="equal")
    yield Layout(
        "pt hook points", grouped(PT, named("cache"), lambda w, t: {_hook_point(t): first(w, t)}),
        own=hook_point,
    )  # fmt: skip
    yield Layout("csv a row a tap", _csv)
    yield Layout("pkl keys of tuples", _keys_of_tuples)
    yield Layout(
        "npz classes counted", _as_keras, keep="leaves", own=lambda s, name: _counted(s)[name]
    )
    yield Layout("pkl sown", _sown)
    yield Layout("npy name mode dtype id", _tensordump, touched="equal")
    yield Layout("pt names inside", _names_inside)
    yield Layout(
        "npz node outputs",
        grouped(NPZ, named("values"), lambda w, t: {node_output("", t.name): first(w, t)}),
        own=node_output,
    )
    yield Layout("npy ggml", each(NPY, _called(ggml), first), touched="equal", own=ggml)
    yield Layout(
        "npz cast to fp16",
        grouped(
            Way("npz", "float16"),
            named("coreml"),
            lambda w, t: {f"{lined(t)}_cast_fp16": first(w, t)},
        ),
    )
    yield Layout("npy number of registration", _registered, touched="sorted")
    yield Layout("pt scripted buffers", _script_container)
    yield Layout("npy bits of bfloat16", each(NPY, named("{name}_bf16"), _bits), touched="written")
    yield Layout("jsonl flat with shape", _flat_lines, steps=2, ranks=2)
    yield Layout("h5 float16, rank and step", _half_groups, steps=2, ranks=2)
    yield Layout(
        "npy node and gpu",
        each(NPY, named("node0_gpu{rank}/{name}_it{step}"), first),
        steps=2,
        ranks=2,
        touched="equal",
    )
    yield Layout(
        "npz world and rank",
        grouped(
            NPZ,
            named("acts_ws2_rank{rank}_step{next}"),
            lambda w, t: {t.name: first(w, t)},
            lambda held: dict(sorted(held.items())),
        ),
        steps=2,
        ranks=2,
    )
    yield Layout("pt lists, a file a rank", _lists_of_ranks, steps=2, ranks=2)
    yield Layout(
        "safetensors L03",
        grouped(
            SAFE,
            named("s{step}"),
            lambda w, t: {short("", t.name): first(w, t)},
        ),
        steps=2,
        own=short,
    )
    yield Layout(
        "npy layer behind", each(NPY, _called(_reversed), first), touched="equal", own=_reversed
    )
    yield Layout("printed below headlines", _headed)
    yield Layout("txt shape in the header", _shape_in_header, touched="equal")
    yield Layout("pt seconds in front", _seconds, touched="equal")
    yield Layout(
        "npy indexed",
        each(NPY, lambda t: f"{indexed('', t.name)}[0]", first),
        touched="sorted",
        own=indexed,
    )
    yield Layout("pt events", _events)
    yield Layout("npz hidden states stacked", _stacked, keep="layers")
    yield Layout("pkl compressed", _compressed)
    yield Layout(
        "h5 a file a step, sides last",
        sides_in_groups,
        steps=2,
        touched="equal",
    )


def sides_in_groups(folder: Path, taps: list[Tap]) -> None:
    """iter_3.h5 with NAME/in_0 and NAME/out_0."""
    files: dict[int, dict[str, np.ndarray]] = defaultdict(dict)
    for tap in taps:
        for word, tensors in (("in", tap.inputs), ("out", tap.outputs)):
            for place, tensor in enumerate(tensors):
                files[tap.step][f"{tap.name}/{word}_{place}"] = to_numpy(tensor)
    for step, held in files.items():
        H5.write(folder / f"iter_{step}", held)
