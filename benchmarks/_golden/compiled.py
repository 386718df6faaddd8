"""Compiled graphs: of torch.compile against eager modules and each other, and exported ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import whence
from _golden.nets import Record, captured, seeded
from _golden.place import Answers, Case, Place


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act = nn.LayerNorm(8), nn.Linear(8, 16), nn.ReLU()
        self.down, self.last = nn.Linear(16, 8), nn.LayerNorm(8)
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(self.act(self.up(self.norm(x))))
        return self.last(torch.log1p(x.sigmoid()))


def _x() -> torch.Tensor:
    return seeded(2, 4, 8)


def _wrong(graph: Any) -> None:
    """Another epsilon in the second norm, before inductor sees it."""
    found = [n for n in graph.nodes if n.target is nn.functional.layer_norm]
    found[1].update_arg(4, 0.25) if len(found[1].args) > 4 else found[1].update_kwarg("eps", 0.25)


def _compiled(mode: str, *, train: bool = False, bug: str = "", **options: Any) -> Record:
    def record(path: Path) -> None:
        from torch._inductor import config

        torch._dynamo.reset()
        torch.manual_seed(0)
        model = _Net()
        changed = {f"cpp.inject_{bug}_bug_TESTING_ONLY": "accuracy"} if bug else {}
        with (
            config.patch({"fx_graph_cache": False, **changed}),
            whence.compile(model, path, mode=mode, **options) as compiled,
        ):
            if train:
                compiled(_x()).square().mean().backward()
            else:
                with torch.no_grad():
                    compiled(_x())

    return record


def _eager(path: Path) -> None:
    captured(_Net, lambda: (_x(),))(path)


def _graphs(place: Place) -> Answers:
    """A graph node by node against modules, the kernels of inductor, and a pass with a fault."""
    place.once("eager", _eager)
    place.once("fx", _compiled("fx"))
    place.once("exact", _compiled("exact"))
    place.once("fault", _compiled("exact", bug="relu", options={"pre_grad_custom_pass": _wrong}))
    yield from place.compare("eager", "fx", to="eager_fx")
    yield from place.compare("fx", "exact", to="fx_exact.here")
    yield from place.compare("eager", "exact", to="eager_exact.here")
    yield from place.compare("exact", "eager", to="exact_eager.here")
    yield from place.compare("fx", "fault", to="fx_fault.here")
    yield from place.compare("eager", "fault", to="eager_fault.here")
    yield "show.here.txt", place.whence("show", "exact")


def _of_training(place: Place) -> Answers:
    def eager(path: Path) -> None:
        torch.manual_seed(0)
        model = _Net()
        with whence.capture(model, path):
            model(_x()).square().mean().backward()

    place.once("fx", _compiled("fx", train=True))
    place.once("eager", eager)
    yield from place.compare("eager", "fx")
    yield "show.txt", place.whence("show", "fx", "--tree")


def _exported(place: Place) -> Answers:
    """A module that torch.export made of the model."""

    def record(path: Path) -> None:
        torch.manual_seed(0)
        program = torch.export.export(_Net(), (_x(),))
        model = program.module()
        with torch.no_grad(), whence.capture(model, path):
            model(_x())

    def scripted(path: Path) -> None:
        torch.manual_seed(0)
        model = torch.jit.trace(_Net(), (_x(),))
        with torch.no_grad(), whence.capture(model, path):
            model(_x())

    place.once("eager", _eager)
    place.once("exported", record)
    place.once("scripted", scripted)
    yield from place.compare("eager", "exported")
    yield from place.compare("scripted", "eager", to="scripted")


CASES: dict[str, Case] = {
    "graphs": _graphs,
    "graphs_of_training": _of_training,
    "exported": _exported,
}
