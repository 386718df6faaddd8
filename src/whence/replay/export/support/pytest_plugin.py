"""Options and fixture that generated tests add to pytest."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch

from whence.replay.export.support.check import Check
from whence.replay.export.support.table import start_table
from whence.replay.export.support.tensors import Settings


def add_options(parser: Any, settings: Settings) -> None:
    """The options of `pytest`, with the defaults these tests were written with."""
    group = parser.getgroup("operators")
    group.addoption(
        "--device", default=settings.device, help="where the operators run: cpu, cuda:0, npu, ..."
    )
    group.addoption("--seed", type=int, default=settings.seed, help="of random elements")
    group.addoption(
        "--factory",
        choices=("load", "random", "special"),
        default=settings.factory,
        help="elements of the tensors",
    )
    group.addoption(
        "--cpu-init",
        action="store_true",
        default=settings.cpu_init,
        help="draw random elements on the CPU, the same for every device",
    )
    group.addoption(
        "--detail_compare_path", default="", metavar="CSV", help="write a row per test to this file"
    )
    group.addoption(
        "--import",
        dest="import_modules",
        action="append",
        default=[],
        metavar="MODULE",
        help="import it first: custom operators, a device",
    )


def configure(config: Any) -> None:
    """Before the first test: custom operators are imported, the device is there, the csv is
    begun.
    """
    import pytest

    option = config.option
    try:
        for module in option.import_modules:
            importlib.import_module(module)
        torch.empty(1, device=option.device)
    except Exception as error:
        raise pytest.UsageError(
            f"--device {option.device}, --import {option.import_modules}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if option.detail_compare_path and not hasattr(config, "workerinput"):
        # Workers of pytest-xdist are given the whole path and add their rows to the file that is
        # begun here.
        option.detail_compare_path = str(
            Path(config.invocation_params.dir, option.detail_compare_path)
        )
        start_table(option.detail_compare_path)


def check_for(request: Any) -> Check:
    """The fixture `check` of one test."""
    option = request.config.option
    settings = Settings(
        Path(request.path).parent,
        option.device,
        option.seed,
        option.factory,
        option.cpu_init,
        option.detail_compare_path,
    )
    return Check(settings, request.node.name.removeprefix("test_"))
