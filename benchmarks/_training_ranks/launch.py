"""Runs a training on ranks of this machine, each in a process forked from this one."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import whence
from _training_ranks.layouts import Training, train


def captured(
    make: Callable[[], Training], folder: Path, ranks: int, seconds: float | None = None
) -> Path:
    """The run of a training on so many ranks. seconds: what is not done by then hangs, and is
    killed; the run is what was written until then.
    """
    on_ranks(lambda: _captured(make, folder), ranks, seconds)
    return folder


def parameters(make: Callable[[], Training], ranks: int, folder: Path | None) -> list[bytes]:
    """All parameters of each rank after the training, captured into `folder` or not."""
    with tempfile.TemporaryDirectory() as scratch:

        def run() -> None:
            training = _captured(make, folder) if folder else _trained(make())
            parts = [getattr(p, "_local_tensor", p).detach() for p in training.net.parameters()]
            whole = torch.cat([p.flatten() for p in parts])
            (Path(scratch) / str(dist.get_rank())).write_bytes(whole.numpy().tobytes())

        on_ranks(run, ranks)
        return [(Path(scratch) / str(rank)).read_bytes() for rank in range(ranks)]


def _captured(make: Callable[[], Training], folder: Path) -> Training:
    training = make()
    with contextlib.redirect_stderr(io.StringIO()), whence.capture(training.net, folder):
        return _trained(training)


def _trained(training: Training) -> Training:
    train(training)
    return training


def on_ranks(run: Callable[[], object], ranks: int, seconds: float | None = None) -> None:
    """Call a function in so many processes of one group. Raises RuntimeError where one fails, but
    not where that is waited for, for some seconds.
    """
    with tempfile.TemporaryDirectory() as scratch:
        store = str(Path(scratch) / "store")
        children = [_forked(run, rank, ranks, store) for rank in range(ranks)]
        if seconds is not None:
            _killed_after(children, seconds)
            return
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(codes):
        raise RuntimeError(f"ranks ended with {codes}")


def _killed_after(children: list[int], seconds: float) -> None:
    ended = time.monotonic() + seconds
    left = set(children)
    while left and time.monotonic() < ended:
        left = {child for child in left if os.waitpid(child, os.WNOHANG)[0] == 0}
        time.sleep(0.05)
    for child in left:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _forked(run: Callable[[], object], rank: int, ranks: int, store: str) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
        run()
        dist.destroy_process_group()
        code = 0
    except BaseException:  # noqa: BLE001 - told by the exit code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
