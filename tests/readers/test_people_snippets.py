"""Hooks as people write them into public issues, rewritten: from the dumps of two runs to the
module with the fault, and nothing of two runs that differ by rounding.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import whence
from whence.readers import open_run

WIDTH, TOKENS, LAYERS = 16, 5, 12
FAULT = 2  # the layer whose mlp.down is wrong


class Seen(NamedTuple):
    """What a hook is given. step: how often the model ran before."""

    name: str
    step: int
    given: torch.Tensor
    result: torch.Tensor


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = nn.Linear(WIDTH, WIDTH), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(x)
        return x + self.mlp(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.final_norm, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.final_norm(x))


def in_halves(linear: nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
    """The same product, summed in another order."""
    half = linear.in_features // 2
    return lambda x: (
        x[..., half:] @ linear.weight[:, half:].T
        + x[..., :half] @ linear.weight[:, :half].T
        + linear.bias
    )


def run(change: str, steps: int) -> tuple[nn.Module, list[Seen]]:
    """A model, and what hooks on all of its modules see, in the order in which they fire."""
    torch.manual_seed(0)
    model, seen, step = Net().eval(), list[Seen](), 0
    if change == "fault":
        wrong = model.layers[FAULT].mlp.down
        wrong.register_forward_hook(lambda _module, _given, result: 2 * result + 1)
    if change == "rounding":
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.forward = in_halves(module)  # type: ignore[method-assign]
    for name, module in model.named_modules():
        if name and not isinstance(module, nn.ModuleList):
            module.register_forward_hook(
                lambda _module, given, result, name=name: seen.append(
                    Seen(name, step, given[0].clone(), result.clone())
                )
            )
    with torch.no_grad():
        for step in range(steps):
            model(torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(step)))
    return model, seen


# ---- the snippets


def dict_that_counts_calls(folder: Path, _model: nn.Module, seen: Iterable[Seen]) -> None:
    """espnet/espnet#1644: a second call gets `_1` behind its name."""
    outputs: dict[str, torch.Tensor] = {}
    for one in seen:
        name, again = one.name, 0
        while name in outputs:
            again += 1
            name = f"{one.name}_{again}"
        outputs[name] = one.result
    torch.save(outputs, folder / "outputs.pt")


def words_for_places(folder: Path, _model: nn.Module, seen: Iterable[Seen]) -> None:
    """alibaba/Pai-Megatron-Patch#605."""
    kept: dict[str, torch.Tensor] = {}
    for one in seen:
        _, *place = one.name.split(".")
        match place:
            case [number]:
                kept[f"layer:{number}, layer_in"] = one.given
                kept[f"layer:{number}, layer_out"] = one.result
            case [number, *inner]:
                kept[f"layer:{number}, {'_'.join(inner)}_in"] = one.given
                kept[f"layer:{number}, {'_'.join(inner)}_out"] = one.result
    torch.save(kept, folder / "dump.pt")


def logits_first(folder: Path, _model: nn.Module, seen: Iterable[Seen]) -> None:
    """NVIDIA-NeMo/Megatron-Bridge#2381: the result stands in front of what it was made of."""
    results = {one.name: one.result for one in seen}
    acts = {"embedding": results["embed"]}
    acts |= {f"layer.{n}": results[f"layers.{n}"] for n in range(LAYERS)}
    acts["final_norm"] = results["final_norm"]
    torch.save({"logits": results["lm_head"], "acts": acts}, folder / "acts.pt")


def lists_by_layer(folder: Path, _model: nn.Module, seen: Iterable[Seen]) -> None:
    """vllm-project/vllm#3594."""
    layers = {f"layers.{n}": n for n in range(LAYERS)}
    kept = {layers[o.name]: [o.result.numpy().tolist()] for o in seen if o.name in layers}
    (folder / "embeddings.json").write_text(json.dumps(kept))


def printed(folder: Path, _model: nn.Module, seen: Iterable[Seen]) -> None:
    """vllm-project/vllm#2324: a line with the name, then the tensor."""
    (folder / "out.log").write_text("".join(f"{one.name}\n{one.result}\n" for one in seen))


def printed_figures(folder: Path, _model: nn.Module, seen: Iterable[Seen]) -> None:
    """huggingface/transformers#22468: dictionaries of figures, each a tensor."""
    lines = []
    for name, _, _, x in seen:
        figures = {"dtype": x.dtype, "max": x.max(), "mean": x.mean(), "min": x.min()}
        lines.append(f"{ {f'{name} output': figures} }\n")
    (folder / "out.log").write_text("".join(lines))


def raw_bytes(folder: Path, _model: nn.Module, seen: Iterable[Seen]) -> None:
    """Raw bytes called by their dtype, their shape beside them, the call behind the name."""
    for one in seen:
        one.result.numpy().tofile(folder / f"{one.name}-{one.step}.f32")
        form = json.dumps({"shape": one.result.shape, "dtype": "float32"})
        (folder / f"{one.name}-{one.step}.json").write_text(form)


def inputs_alone(folder: Path, _model: nn.Module, seen: Iterable[Seen]) -> None:
    """facebookresearch/kill-the-bits#35: what modules were given."""
    torch.save({one.name: one.given for one in seen}, folder / "inputs.pt")


def weights_in_one_file(folder: Path, model: nn.Module, seen: Iterable[Seen]) -> None:
    activations = {one.name: one.result for one in seen}
    torch.save({"state_dict": model.state_dict(), "activations": activations}, folder / "all.pt")


def weights_beside(folder: Path, model: nn.Module, seen: Iterable[Seen]) -> None:
    for one in seen:
        torch.save(one.result, folder / f"{one.name}.output.pt")
    for name, weight in model.named_parameters():
        torch.save(weight.detach(), folder / f"{name}.pt")


def capitals(folder: Path, _model: nn.Module, seen: Iterable[Seen]) -> None:
    for one in seen:
        np.save(folder / f"{one.name.upper()}_IN.npy", one.given.numpy())
        np.save(folder / f"{one.name.upper()}_OUT.npy", one.result.numpy())


def sides_between(folder: Path, _model: nn.Module, seen: Iterable[Seen]) -> None:
    """Folders `in` and `out` below those of layers, in French."""
    for one in seen:
        layer, _, inner = one.name.removeprefix("layers.").partition(".")
        for side, tensor in (("entree", one.given), ("sortie", one.result)):
            place = folder / f"etape_{one.step}" / f"couche_{layer}" / side
            place.mkdir(parents=True, exist_ok=True)
            np.save(place / f"{inner or 'all'}.npy", tensor.numpy())


SNIPPETS: dict[Callable[[Path, nn.Module, Iterable[Seen]], None], tuple[str, int]] = {
    dict_that_counts_calls: (f"layers.{FAULT}.mlp.down", 2),
    words_for_places: (f"layer:{FAULT}, mlp_down", 1),
    logits_first: (f"acts.layer.{FAULT}", 1),
    lists_by_layer: (str(FAULT), 1),
    printed: (f"layers.{FAULT}.mlp.down", 1),
    printed_figures: (f"layers.{FAULT}.mlp.down", 1),
    raw_bytes: (f"layers.{FAULT}.mlp.down", 2),
    inputs_alone: (f"layers.{FAULT + 1}.attn.input", 1),
    weights_in_one_file: (f"activations.layers.{FAULT}.mlp.down", 1),
    weights_beside: (f"layers.{FAULT}.mlp.down", 1),
    capitals: (f"LAYERS.{FAULT}.MLP.DOWN", 1),
    sides_between: (f"couche_{FAULT}.mlp.down", 2),
}


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda snippet: snippet.__name__)
def test_a_snippet_leads_to_the_fault_and_is_silent_otherwise(
    snippet: Callable[[Path, nn.Module, Iterable[Seen]], None], tmp_path: Path
) -> None:
    name, steps = SNIPPETS[snippet]
    for change in ("reference", "fault", "rounding"):
        (tmp_path / change).mkdir()
        snippet(tmp_path / change, *run(change, steps))
    faulty = whence.compare(tmp_path / "reference", tmp_path / "fault")
    assert (faulty.status, faulty.findings[0].name) == ("different", name)
    clean = whence.compare(tmp_path / "reference", tmp_path / "rounding")
    assert clean.status == ("undecided" if "printed_figures" in snippet.__name__ else "same")


def test_modules_called_as_activations_are_do_not_part_a_checkpoint(tmp_path: Path) -> None:
    weights = {
        f"features.{n}.{part}": torch.ones(8) for n in range(3) for part in ("weight", "bias")
    }
    torch.save(
        weights | {"activation.weight": torch.ones(1), "scale": torch.ones(1)}, tmp_path / "a.pt"
    )
    run = open_run(tmp_path / "a.pt")
    slots = [ref.slot for call in run.calls for ref in call.refs]
    assert len(slots) == 8 and all(slot.startswith("param.") for slot in slots)
