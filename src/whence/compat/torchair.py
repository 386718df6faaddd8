"""torchair: `get_npu_backend`, a backend of `torch.compile` that dumps the graph.

    import whence.compat.torchair as torchair
    from whence.compat.msit_llm.dump import torchair_dump

    config = torchair_dump.get_ge_dump_config(dump_path="dump")
    model = torch.compile(model, backend=torchair.get_npu_backend(compiler_config=config), dynamic=True)

A GE configuration compiles with inductor and dumps what its kernels leave; an FX configuration runs
the same graph node by node. Where torchair itself is installed and the configuration is its own,
its own backend is returned.
"""  # noqa: E501

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from whence.compat._said import once, same_as
from whence.compat._torchair import CompilerConfig

__all__ = ["CompilerConfig", "get_npu_backend"]


def get_npu_backend(*, compiler_config: Any = None, custom_decompositions: Any = None) -> Any:
    """A backend for `torch.compile`. compiler_config: of `get_ge_dump_config` or
    `get_fx_dump_config`; one that dumps nothing is inductor.

    Raises UsageError for another kind of configuration without torchair, OutputExists, StoreFailed.
    """
    from whence.errors import UsageError

    if compiler_config is not None and not isinstance(compiler_config, CompilerConfig):
        if importlib.util.find_spec("torchair") is None:
            raise UsageError(
                f"compiler_config is a {type(compiler_config).__name__}: torchair is not "
                "installed to take it"
            )
        options = {"custom_decompositions": custom_decompositions} if custom_decompositions else {}
        return importlib.import_module("torchair").get_npu_backend(
            compiler_config=compiler_config, **options
        )
    if custom_decompositions:
        once("get_npu_backend(custom_decompositions=...) changes nothing: inductor has its own")
    if compiler_config is None or not compiler_config.mode:
        return "inductor"
    from whence.api import compile_backend

    how = f"--level graph{'' if compiler_config.mode == 'exact' else ' --graph-mode fx'}"
    same_as("torchair.get_npu_backend", f"whence run {how} -o RUN -- CMD")
    return compile_backend(
        compiler_config.folder,
        compiler_config.mode,
        steps=compiler_config.steps,
        slots=compiler_config.slots,
        with_layout=True,
    )
