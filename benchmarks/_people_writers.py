"""Layouts after hooks in public issues and repositories, each as its writer leaves it."""

from __future__ import annotations

import csv
import functools
import json
import pickle
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from _hand_made import PT, Tap, model_of, to_numpy
from _people_models import PEOPLE

STREAM = r"((transformer\.h|encoder\.block|decoder\.block|down_blocks|up_blocks)\.\d+|mid_block)"


@functools.cache
def classes(subject: str) -> dict[str, str]:
    return {name: type(module).__name__ for name, module in model_of(subject).named_modules()}


@functools.cache
def is_leaf(name: str) -> bool:
    """Has a module nothing inside, in whichever of the models?"""
    return any(
        name in (named := classes(subject)) and not any(n.startswith(f"{name}.") for n in named)
        for subject in PEOPLE
    )


def is_leaf_tap(tap: Tap) -> bool:
    return is_leaf(tap.name)


def is_stream(tap: Tap) -> bool:
    return re.fullmatch(STREAM, tap.name) is not None


_PICKED = {
    r"transformer\.h\.(\d+)\.attn": "attn_out_{}", r"transformer\.h\.(\d+)\.mlp": "mlp_out_{}",
    r"transformer\.h\.(\d+)": "resid_{}", r"transformer\.wte": "embed", r"transformer\.ln_f":
    "final_norm", "lm_head": "logits", "conv_in": "stem", r"down_blocks\.(\d+)": "down_{}",
    "mid_block": "mid", r"up_blocks\.(\d+)": "up_{}", "conv_out": "eps_pred", "shared": "embed",
    r"mid_block\.attentions\.0": "mid_attn", r"encoder\.block\.(\d+)": "enc_{}",
    r"encoder\.block\.(\d+)\.layer\.0\.SelfAttention": "enc_attn_{}",
    r"decoder\.block\.(\d+)\.layer\.1\.EncDecAttention": "dec_cross_{}",
    r"decoder\.block\.(\d+)": "dec_{}", r"encoder\.final_layer_norm": "memory",
}  # fmt: skip


def picked(_subject: str, name: str) -> str:
    """What people call the few tensors that they look at."""
    for pattern, label in _PICKED.items():
        if match := re.fullmatch(pattern, name):
            return label.format(*match.groups())
    return "?"


def is_picked(tap: Tap) -> bool:
    return picked("", tap.name) != "?"


@functools.cache
def places(subject: str) -> dict[str, str]:
    """Leaf -> its class and which of that class it is."""
    seen: Counter[str] = Counter()
    labels = {}
    for name, kind in classes(subject).items():
        if is_leaf(name):
            labels[name] = f"{kind}_{seen[kind]}"
            seen[kind] += 1
    return labels


def make(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


# ---- the layouts


def classes_in_a_list(folder: Path, taps: list[Tap]) -> None:
    """(class, array) of each leaf, appended as hooks fire."""
    kinds = classes(folder.parent.name)
    held = [(kinds[tap.name], to_numpy(tap.outputs[0])) for tap in taps]
    (make(folder) / "acts.pkl").write_bytes(pickle.dumps(held))


def few(folder: Path, taps: list[Tap]) -> None:
    """A dictionary of picked tensors under names of people."""
    PT.write(folder / "debug", {picked("", tap.name): tap.outputs[0] for tap in taps})


def counted_inputs(folder: Path, taps: list[Tap]) -> None:
    """f"{i}_{name}_in{k}.npy" and _out, one counter of calls, not padded."""
    make(folder)
    for tap in taps:
        stem = f"{tap.number}_{tap.name.replace('.', '-')}"
        for place, tensor in enumerate(tap.inputs):
            np.save(folder / f"{stem}_in{place}.npy", to_numpy(tensor))
        np.save(folder / f"{stem}_out.npy", to_numpy(tap.outputs[0]))


def batches(folder: Path, taps: list[Tap]) -> None:
    """activations_batch_0.pt, a dictionary each."""
    held: dict[int, dict[str, Any]] = defaultdict(dict)
    for tap in taps:
        held[tap.step][tap.name] = tap.outputs[0]
    for step, tensors in held.items():
        PT.write(folder / f"activations_batch_{step}", tensors)


def archive(folder: Path, taps: list[Tap]) -> None:
    """/activations/layer_7 of the residual stream, prompts as strings, attributes about the run."""
    with h5py.File(make(folder) / "hidden.h5", "w") as file:
        file.attrs["model_id"], file.attrs["n_layers"] = folder.parent.name, len(taps)
        file["prompts"] = ["a", "b", "c", "d"]
        for number, tap in enumerate(taps):
            file[f"activations/layer_{number}"] = to_numpy(tap.outputs[0])


def stream_place(label: str) -> Any:
    """The place of a layer in the residual stream, in a label."""

    def own(subject: str, name: str) -> str:
        layers = [n for n in classes(subject) if re.fullmatch(STREAM, n)]
        if subject == "unet":
            layers = [n for n in layers if "up_" not in n and n != "mid_block"]
            layers += ["mid_block", "up_blocks.0", "up_blocks.1"]
        return label.format(layers.index(name)) if name in layers else "?"

    return own


def figures(tensor: torch.Tensor) -> dict[str, float]:
    x = tensor.double()
    return {
        "mean": x.mean().item(), "std": x.std().item(), "min": x.min().item(),
        "max": x.max().item(), "abs_mean": x.abs().mean().item(),
    }  # fmt: skip


def table_of_figures(folder: Path, taps: list[Tap]) -> None:
    """step, name, shape and statistics, a row a tensor."""
    with (make(folder) / "stats.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "layer", "shape", "mean", "std", "min", "max", "abs_mean"])
        for tap in taps:
            shape = "x".join(map(str, tap.outputs[0].shape))
            values = [f"{x:.8g}" for x in figures(tap.outputs[0]).values()]
            writer.writerow([tap.step, tap.name, shape, *values])


def forward_log(folder: Path, taps: list[Tap]) -> None:
    """What a debugger of networks prints: class and name, shape, statistics."""
    kinds = classes(folder.parent.name)
    with (make(folder) / "log.txt").open("w") as file:
        for tap in taps:
            x = figures(tap.outputs[0])
            file.write(
                f"[FORWARD] {tap.name} ({kinds[tap.name]}) -> shape={tuple(tap.outputs[0].shape)},"
                f" mean={x['mean']:.6f}, std={x['std']:.6f}, max={x['max']:.6f}\n"
            )


def figures_of_samples(folder: Path, taps: list[Tap]) -> None:
    """stats_sample_0.json: {name: {input: {...}, output: {..., first_5: [...]}}}."""
    held: dict[int, dict[str, Any]] = defaultdict(dict)
    for tap in taps:
        sides = (("input", tap.inputs[0]), ("output", tap.outputs[0]))
        held[tap.step][tap.name] = {
            side: {"shape": list(x.shape), "dtype": str(x.dtype), **figures(x)}
            | {"first_5": x.flatten()[:5].tolist()}
            for side, x in sides
        }
    for step, figures_of in held.items():
        (make(folder) / f"stats_sample_{step}.json").write_text(json.dumps(figures_of, indent=1))


def flat_columns(folder: Path, taps: list[Tap]) -> None:
    """layer_{i}_{name}_output.csv with all elements in one column."""
    make(folder)
    for tap in taps:
        array = to_numpy(tap.outputs[0]).ravel()
        name = tap.name.replace(".", "_")
        np.savetxt(folder / f"layer_{tap.number}_{name}_output.csv", array, delimiter=",")


def returned(folder: Path, taps: list[Tap]) -> None:
    """{"hidden_states": (...), "logits": ...} as a model returns them."""
    *stream, last = (tap.outputs[0] for tap in taps)
    PT.write(folder / "out", {"logits": last, "hidden_states": tuple(stream)})


def is_returned(tap: Tap) -> bool:
    return is_stream(tap) or tap.name in ("lm_head", "conv_out")


def returned_name(subject: str, name: str) -> str:
    return {"lm_head": "logits", "conv_out": "logits"}.get(
        name, stream_place("hidden_states.{}")(subject, name)
    )


def golden(folder: Path, taps: list[Tap]) -> None:
    """A line a prompt: tokens, logits and hidden states of all layers."""
    *stream, last = taps
    with (make(folder) / "golden.jsonl").open("w") as file:
        for row in range(4):
            line = {
                "prompt": f"prompt {row}", "tokens": list(range(row, row + 6)),
                "logits": last.outputs[0][row].float().tolist(),
                "hidden_states": [tap.outputs[0][row].float().tolist() for tap in stream],
            }  # fmt: skip
            file.write(json.dumps(line) + "\n")


def folders_of_classes(folder: Path, taps: list[Tap]) -> None:
    """Linear_3/output_0.pt: the class, which of them, the number of the batch."""
    labels = places(folder.parent.name)
    for tap in taps:
        PT.write(folder / labels[tap.name] / f"input_{tap.step}", tap.inputs[0])
        PT.write(folder / labels[tap.name] / f"output_{tap.step}", tap.outputs[0])


_WORDS = {
    "transformer.": "", "h.": "blocks.", "attn.c_attn": "attention.wqkv", "attn.c_proj":
    "attention.wo", "attn": "attention", "ln_1": "attention_norm", "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn.w1", "mlp.c_proj": "ffn.w2", "mlp": "ffn", "ln_f": "final_norm",
    "lm_head": "output", "wte": "tok_embeddings", "wpe": "pos_embeddings", "down_blocks.": "down.",
    "up_blocks.": "up.", "mid_block.": "middle.", "mid_block": "middle", "resnets.": "res.",
    "attentions.": "attn.", "group_norm": "norm", "to_out.0": "out", "conv_norm_out": "norm_out",
    "SelfAttention": "attention", "EncDecAttention": "cross", "DenseReluDense": "mlp",
    "layer_norm": "ln", "block.": "layers.", "final_layer_norm": "final_ln", "shared": "embedding",
}  # fmt: skip


def ported(_subject: str, name: str) -> str:
    """A name in the words of a port."""
    for word in sorted(_WORDS, key=len, reverse=True):
        pattern = rf"(?<![a-z_]){re.escape(word)}(?![a-z_])|^{re.escape(word)}"
        name = re.sub(pattern, f"<{_WORDS[word]}>", name)
    return re.sub(r"[<>]", "", name).strip(".")


def of_a_port(folder: Path, taps: list[Tap]) -> None:
    """The names of a model on one side, of its port on the other."""
    own = (lambda name: name) if folder.name == "ref" else (lambda name: ported("", name))
    np.savez(make(folder) / "acts.npz", **{own(tap.name): to_numpy(tap.outputs[0]) for tap in taps})


def dumps(folder: Path, taps: list[Tap]) -> None:
    """dump_17.pt with (name, inputs, output): names stand inside alone."""
    for number, tap in enumerate(taps):
        PT.write(folder / f"dump_{number}", (tap.name, tap.inputs, tap.outputs[0]))


def appended(folder: Path, taps: list[Tap]) -> None:
    """pickle.dump((name, array), file) in the hook: many pickles in one file."""
    with (make(folder) / "trace.pkl").open("wb") as file:
        for tap in taps:
            pickle.dump((tap.name, to_numpy(tap.outputs[0])), file)


def of_the_alphabet(folder: Path, taps: list[Tap]) -> None:
    """np.savez of a dictionary sorted by name."""
    held = {tap.name: to_numpy(tap.outputs[0]) for tap in taps}
    np.savez_compressed(make(folder) / "activations.npz", **dict(sorted(held.items())))
