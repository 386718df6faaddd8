"""Models and trainings over two ranks, against one process and by themselves."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

import whence
from _golden.place import Answers, Case, Place

FAULTS = ("", "no_sum", "twice", "mean", "bias", "lost", "shard", "one_rank", "later", "tokens",
          "vocabulary")  # fmt: skip
LAYOUTS = ("ddp", "fsdp", "tp", "sp", "dp", "megatron", "ep", "pp")
TRAINING_FAULTS = ("no_sync", "ignored", "other_weights", "other_learning_rate", "same_rows")


def _on_two_ranks(run: Callable[[], object]) -> None:
    """Call it in two processes of one group, forked from this one."""
    store = f"{tempfile.mkdtemp()}/store"
    children = []
    for rank in range(2):
        child = os.fork()
        if child:
            children.append(child)
            continue
        code = 1
        try:
            torch.set_num_threads(1)
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
            run()
            dist.destroy_process_group()
            code = 0
        finally:
            sys.stdout.flush()
            os._exit(code)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(codes):
        raise RuntimeError(f"ranks ended with {codes}")


def _inferences(path: Path) -> None:
    """One process, and two with each fault."""
    import ranked_net as net

    one = net.Net().eval()
    with torch.no_grad(), whence.capture(one, path / "one"):
        one(net.ids())

    def run() -> None:
        for fault in FAULTS:
            model = net.cut(net.Net(), fault).eval()
            with torch.no_grad(), whence.capture(model, path / (fault or "two")):
                model(net.ids())

    _on_two_ranks(run)


def _made(name: str) -> Any:
    from _training_ranks import faults, layouts

    if name in TRAINING_FAULTS:
        return getattr(faults, name)()
    return layouts.LAYOUTS[name]()


def _trainings(path: Path) -> None:
    """One process, one with experts, and two in every layout and with each fault."""
    from _training_ranks import layouts

    layouts.STEPS = 1
    for name, make in (("one", layouts.one), ("experts", layouts.one_with_experts)):
        training = make()
        with whence.capture(training.net, path / name):
            layouts.train(training)

    def run() -> None:
        for name in (*LAYOUTS, *TRAINING_FAULTS):
            training = _made(name)
            with whence.capture(training.net, path / name):
                layouts.train(training)

    _on_two_ranks(run)


def _against_one(make: Callable[[Path], Any], of: str, name: str, reference: str = "one") -> Case:
    def case(place: Place) -> Answers:
        folder = place.shared(of, make)
        yield from place.compare(f"{folder}/{reference}", f"{folder}/{name}")
        if name in ("two", "no_sum"):
            yield from place.compare(f"{folder}/{name}", f"{folder}/{reference}", to="turned")
        if name in (*LAYOUTS, *TRAINING_FAULTS):
            yield "ranks.txt", place.whence("ranks", f"{folder}/{name}")

    return case


def _show(place: Place) -> Answers:
    folder = place.shared("trainings", _trainings)
    yield "show.txt", place.whence("show", f"{folder}/ddp", "--tree")
    yield "nans.txt", place.whence("nans", f"{folder}/fsdp")
    yield "json.txt", place.whence("ranks", f"{folder}/no_sync", "--format", "json")


CASES: dict[str, Case] = {
    **{
        f"inference_{name or 'two'}": _against_one(_inferences, "inferences", name or "two")
        for name in FAULTS
    },
    **{
        f"training_{name}": _against_one(
            _trainings, "trainings", name, "experts" if name == "ep" else "one"
        )
        for name in (*LAYOUTS, *TRAINING_FAULTS)
    },
    "show": _show,
}
