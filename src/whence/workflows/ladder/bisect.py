"""Torch's own compiler bisector, with our verdict as its test: which pass, lowering or
decomposition makes the difference.

Its state lies in files that the program reads while it compiles
(`torch._inductor.compiler_bisector`, torch 2.6 and later).
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from whence.errors import UsageError
from whence.results import Pass


def bisect(
    good: Callable[[Mapping[str, str]], bool | None],
    answers: Mapping[str, bool],
    state: Path | None,
    tell: Callable[[str], None],
) -> Pass:
    """Run `good` until the bisector names something.

    good(environment): does the program, run with these variables, agree with eager? None, which
    cannot be told, counts as no. answers: of backends that need no run. state: the folder of its
    files, as the program finds it; None for this process. Raises UsageError where torch has no
    bisector.
    """
    try:
        from torch._inductor.compiler_bisector import CompilerBisector
    except ImportError as error:
        raise UsageError(
            f"--bisect-pass uses torch's compiler bisector, which this torch has not ({error}); "
            "torch 2.6 has it"
        ) from error
    runs = broken = 0

    def test() -> bool:
        nonlocal runs, broken
        backend = CompilerBisector.get_backend() or ""
        subsystem = CompilerBisector.get_subsystem() or ""
        if not subsystem and backend in answers:
            return answers[backend]
        runs += 1
        tell(f"torch's bisector: {backend} {subsystem} (run {runs})")
        answer = good(_variables(CompilerBisector, backend, subsystem) if state is not None else {})
        broken += answer is None
        return answer is True

    if state is not None:
        state.mkdir(parents=True, exist_ok=True)
        CompilerBisector.in_process_cache = str(state)
    why = ""
    result = None
    with contextlib.redirect_stdout(io.StringIO()):  # it tells each of its steps
        try:
            result = CompilerBisector.do_bisect(test)
        except RuntimeError as error:
            why = f"torch's bisector gave up: {error}"
    if result is None:
        return Pass(
            "",
            runs=runs,
            broken=broken,
            why=why or "every stage is within the noise when torch's bisector compiles it",
        )
    return Pass(
        result.backend,
        result.subsystem or "",
        result.bisect_number,
        result.debug_info or "",
        runs=runs,
        broken=broken,
    )


def _variables(bisector: Any, backend: str, subsystem: str) -> dict[str, str]:
    """What tells a process that it is bisected; everything else it reads from the files."""
    out = {"TORCH_BISECT_BACKEND": backend}
    if subsystem:
        out["TORCH_BISECT_SUBSYSTEM"] = subsystem
        if bisector.get_run_state(backend, subsystem) == "test_disable":
            out["TORCH_BISECT_MAX"] = "-1"
    return out
