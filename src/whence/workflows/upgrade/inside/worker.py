"""Builds and runs models one after the other, as a parent requests in lines of JSON.

A task has `name` and optionally `chosen`, `settings`, `save` and `load` (folders of a checkpoint),
`called` (names of weights in the other release), `train`, `wide` (in float64) and `keep` (a file
for the outputs). The answer has `ok`, and `error` or the model's results.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from . import catalogues, values

FOUND = "outputs"


def answer(catalogue: catalogues.Catalogue, task: dict[str, Any]) -> dict[str, Any]:
    """The results of one model, or the reason why there are none."""
    began = time.process_time()
    try:
        with catalogue.quiet():
            built = catalogue.build(task["name"], task)
            ran = _watch(built.model)
            outputs = catalogues.run(built, bool(task.get("train")), bool(task.get("wide")))
            if task.get("keep"):
                _keep(outputs, task["keep"])
            if task.get("save"):
                built.model.save_pretrained(task["save"])
    except Exception as error:  # noqa: BLE001 - whatever the code that is looked at raises
        words = " ".join(f"{type(error).__name__}: {error}".split())
        return {"ok": False, "error": words[:1500], "seconds": time.process_time() - began}
    return {
        "ok": True,
        "chosen": built.chosen,
        "settings": built.settings,
        "missing": list(built.missing),
        "parameters": _parameters(built.model),
        "modules": len(ran),
        "idle": sum(not count for count in ran.values()),
        FOUND: {name: values.digest(tensor) for name, tensor in outputs.items()},
        "seconds": time.process_time() - began,
    }


def _keep(outputs: dict[str, Any], file: str) -> None:
    """Write floating-point outputs as float64."""
    import numpy as np

    arrays = {
        name: tensor.detach().double().numpy()
        for name, tensor in outputs.items()
        if tensor.is_floating_point()
    }
    np.savez(file, **arrays)


def _parameters(model: Any) -> list[list[Any]]:
    named = dict(model.named_parameters(remove_duplicate=False))
    return [[names[0], list(named[names[0]].shape)] for names in values.aliases(model)]


def _watch(model: Any) -> dict[str, int]:
    """Count by name how often each module without children runs."""
    ran: dict[str, int] = {}
    for name, module in model.named_modules():
        if not list(module.children()):
            ran[name] = 0

            def count(*_: Any, name: str = name) -> None:
                ran[name] += 1

            module.register_forward_pre_hook(count)
    return ran


def show(catalogue: str, task: dict[str, Any]) -> None:
    """Run one model and print its outputs."""
    import numpy as np

    opened = catalogues.opened(catalogue)
    with opened.quiet():
        built = opened.build(task["name"], task)
        outputs = catalogues.run(built, bool(task.get("train")))
    for name, tensor in outputs.items():
        held = tensor.detach().float().numpy()
        first = np.array2string(held.reshape(-1)[:4], precision=9)
        print(f"{name:<30} {list(held.shape)!s:<18} {values.digest(tensor)[2]} {first}")


def serve(catalogue: str) -> None:
    """Answer each line of stdin with a line on the original stdout of this process."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to stderr
    try:
        opened = catalogues.opened(catalogue)
        first = {"ok": True, "names": opened.names(), "versions": versions()}
    except Exception as error:  # noqa: BLE001 - the environment itself does not work
        first = {"ok": False, "error": f"{type(error).__name__}: {error}"}
    print(json.dumps(first), file=answers, flush=True)
    for line in sys.stdin if first["ok"] else ():
        print(json.dumps(answer(opened, json.loads(line))), file=answers, flush=True)


def versions() -> dict[str, str]:
    """Versions of the packages that determine the numbers."""
    from importlib import metadata

    found = {"python": sys.version.split()[0]}
    for name in ("torch", "transformers", "tokenizers", "numpy", "onnxruntime"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    serve(sys.argv[1] if len(sys.argv) > 1 else "")
