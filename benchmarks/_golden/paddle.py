"""Paddle: layers and predictors captured live, against each other, logs and programs."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import whence
from _golden.nets import Record
from _golden.place import ROOT, Answers, Case, Place, interpreter, pair

PLAIN: dict[str, list[Any]] = {"disable_mkldnn": [], "switch_ir_optim": [False]}
"""What is done to the configuration of a predictor: each operator by itself."""


def _models() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import paddle
        import paddle_models

        paddle.seed(0)
    return paddle_models


def layer(name: str = "model", change: Callable[[Any], object] | None = None, **how: Any) -> Record:
    """The run of a layer in code."""

    def record(path: Path) -> None:
        pm = _models()
        import paddle

        model = pm.layers()[name]()
        model.eval()
        if change is not None:
            change(model)
        with whence.capture(model, path, **how):
            model(*(paddle.to_tensor(array) for array in pm.fed(name)))

    return record


def _head(model: Any) -> None:
    model.head.weight.set_value(model.head.weight * 1.125)


def _saved(path: Path) -> None:
    path.mkdir()
    with contextlib.suppress(Exception):
        _models().write_pir(str(path))


def _faulty(path: Path) -> None:
    """The program with another factor of the scores in its second block."""
    shutil.copytree("programs", path)
    file = path / "model.json"
    text = file.read_text()
    second = list(re.finditer(r"0\.3535533\d*", text))[1]
    file.write_text(f"{text[: second.start()]}0.375{text[second.end() :]}")


PROGRAM = """
import json, sys

sys.path.insert(0, {builders!r})
import paddle_models as pm

folder, names, settings = sys.argv[1:]
made = {{name: pm.predictor(folder, name, json.loads(settings)) for name in names.split("+")}}
for step in range(2):
    for name, predictor in made.items():
        pm.once(predictor, pm.fed(name, step))
"""


def _predicted(folder: str, name: str, settings: dict[str, list[Any]]) -> Record:
    """A run of predictors that are made while it lasts."""

    def record(path: Path) -> None:
        Path("program.py").write_text(PROGRAM.format(builders=str(ROOT / "tests/instrument")))
        python = interpreter("PADDLE")
        words = [python, "program.py", folder, name, json.dumps(settings)]
        done = subprocess.run(
            [python, "-m", "whence", "run", "-o", path.name, "--", *words],
            check=False,
            capture_output=True,
            text=True,
            timeout=300,
        )
        if done.returncode:
            raise RuntimeError(done.stderr)

    return record


def _in_code(path: Path) -> None:
    """A predictor that was made before it is captured."""
    pm = _models()
    made = pm.predictor("programs", "model", PLAIN)
    with whence.capture(made, path):
        pm.once(made, pm.fed("model"))


def _predictors(place: Place) -> Answers:
    """Every program, against the same behind the passes of the engine, and with a fault."""
    names = "model+image+loop+lstm"
    place.once("programs", _saved)
    place.once("faulty", _faulty)
    place.once("ref", _predicted("programs", names, PLAIN))
    place.once("passes", _predicted("programs", names, {}))
    place.once("fault", _predicted("faulty", names, PLAIN))
    yield from place.compare("ref", "passes", to="passes.here")
    yield from place.compare("ref", "fault", to="fault")
    yield "trace.txt", place.whence("trace", "out/fault")
    place.once("code", _in_code)
    yield from place.compare("code", "code", to="code")


def _programs(place: Place) -> Answers:
    """The files alone, before anything ran."""
    place.once("programs", _saved)
    place.once("faulty", _faulty)
    yield from place.compare("programs/model.json", "faulty/model.json")
    yield "show.txt", place.whence("show", "programs/image.json")


def _against_torch(path: Path) -> None:
    """The torch model that has the weights of the Paddle one."""
    import torch
    from torch import nn

    pm = _models()
    model = pm.layers()["lstm"]()
    net = nn.Sequential(nn.Embedding(10, 6))
    net[0].weight.data = torch.from_numpy(model.emb.weight.numpy())
    with torch.no_grad(), whence.capture(net, path):
        net(torch.from_numpy(pm.fed("lstm")[0]))


CASES: dict[str, Case] = {
    "layer": pair(layer(), layer()),
    "layer_weight": pair(layer(), layer(change=_head)),
    "layer_image": pair(layer("image"), layer("image")),
    "layer_operators": pair(layer(level="op"), layer(change=_head, level="op")),
    "predictors": _predictors,
    "programs": _programs,
    "against_torch": pair(_against_torch, layer("lstm")),
}
