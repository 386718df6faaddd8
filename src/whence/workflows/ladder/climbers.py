"""What climbs the ladder: a command in processes of its own, or a model in this one, compiled as
far as one rung goes.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from whence import extras
from whence.errors import UsageError

if TYPE_CHECKING:
    from whence.instrument.torch.compiled.stages import Compiled
    from whence.records import Run


class Climber(Protocol):
    """A program that can be run on any rung."""

    @property
    def words(self) -> str: ...

    def ready(self, place: Path) -> contextlib.AbstractContextManager[None]:
        """What all rungs need: a cache of compiled code that is theirs alone, so that a rung
        compiles anew and spoils nobody's.
        """
        ...

    def capture(self, path: Path, rung: str, environment: Mapping[str, str] | None = None) -> float:
        """Run it into `path` and return the seconds it took. environment: of torch's bisector.
        Raises CaptureError when it fails.
        """
        ...

    def compiled(self, path: Path, run: Run) -> list[Compiled]:
        """What it compiled when it ran into `path`."""
        ...

    def bisecting(self, eager: Run) -> Path | None:
        """Where torch's bisector keeps its state, so that the program finds it; None for this
        process. Raises UsageError.
        """
        ...


class OfCommand:
    """A command; torch.compile gets its backend in every process that it starts."""

    def __init__(self, command: Sequence[str], options: Mapping[str, Any]) -> None:
        from whence.workflows.rerun import Command

        self._subject, self._options = Command(command), dict(options)
        self.words = self._subject.words

    @contextlib.contextmanager
    def ready(self, place: Path) -> Iterator[None]:
        with tempfile.TemporaryDirectory(prefix="whence-compiled-") as folder:
            self._cache, self._state = Path(folder) / "cache", Path(folder) / "state"
            self._cache.mkdir()
            yield

    def capture(self, path: Path, rung: str, environment: Mapping[str, str] | None = None) -> float:
        cache = {
            "TORCHINDUCTOR_CACHE_DIR": str(self._cache),
            "TRITON_CACHE_DIR": str(self._cache / "triton"),
        }
        return self._subject.capture(
            path, environment={**cache, **(environment or {})}, rung=rung, **self._options
        )

    def compiled(self, path: Path, run: Run) -> list[Compiled]:
        from whence.instrument.torch.compiled.stages import of_run

        return of_run(run)

    def bisecting(self, eager: Run) -> Path:
        import torch

        version = eager.info.versions.get("torch", "")
        if version != torch.__version__:
            raise UsageError(
                "--bisect-pass works through files that torch's bisector writes here and reads "
                f"there: the program has torch {version}, "
                f"this whence torch {torch.__version__}; run whence with the program's Python"
            )
        # The bisector removes its whole folder when it begins; the compiled headers in the cache
        # are kept for its next run.
        (self._cache / "bisect").unlink(missing_ok=True)
        (self._cache / "bisect").symlink_to(self._state / "bisect")
        return self._state


class InProcess:
    """A model of this process, made or copied for each rung."""

    def __init__(
        self, model: Any, inputs: Any, compile_options: Mapping[str, Any], seed: int
    ) -> None:
        torch = extras.needed("torch", "a ladder")
        options = set(inspect.signature(torch.compile).parameters) - {"model", "backend", "disable"}
        if unknown := set(compile_options) - options:
            raise UsageError(
                f"unknown option {min(unknown)!r}; torch.compile takes "
                f"{', '.join(sorted(options))} here"
            )
        if not callable(model):
            raise UsageError(
                f"whence.ladder takes a torch.nn.Module or a function, not a {type(model).__name__}"
            )
        self._model, self._inputs, self._compile_options, self._seed = (
            model,
            inputs,
            dict(compile_options),
            seed,
        )
        self._compiled: dict[Path, Compiled] = {}
        self._makes = not isinstance(model, torch.nn.Module) and _takes_nothing(model)
        self.words = getattr(model, "__name__", type(model).__name__)

    @contextlib.contextmanager
    def ready(self, place: Path) -> Iterator[None]:
        import torch
        from torch._inductor import utils

        fresh = getattr(utils, "fresh_cache", None) or utils.fresh_inductor_cache
        with fresh(), torch.random.fork_rng():
            try:
                yield
            finally:
                torch._dynamo.reset()

    def capture(self, path: Path, rung: str, environment: Mapping[str, str] | None = None) -> float:
        import torch

        from whence.instrument.torch.compiled.stages import Rung
        from whence.workflows.doctor import caller
        from whence.workflows.rerun import Program

        torch._dynamo.reset()
        torch.manual_seed(self._seed)
        around = Rung(rung)
        around.install()
        try:
            model = self._made()
            return Program(model, caller(self._inputs)).capture(path)
        finally:
            self._compiled[path] = around.remove()

    def compiled(self, path: Path, run: Run) -> list[Compiled]:
        return [self._compiled[path]]

    def bisecting(self, eager: Run) -> None:
        return None

    def _made(self) -> Any:
        """The model as this rung runs it: made or copied, and compiled unless it is."""
        import torch

        from whence.instrument.torch.compiled.stages import SHELL, Function

        if self._makes:
            model = self._model()
        else:
            plain = getattr(
                self._model,
                "_orig_mod",
                getattr(self._model, "_torchdynamo_orig_callable", self._model),
            )
            model = copy.deepcopy(plain)
        if hasattr(model, SHELL):
            return getattr(model, SHELL)
        if not isinstance(model, torch.nn.Module):
            model = Function(model)
        if type(model).__name__ == "OptimizedModule" or model._compiled_call_impl is not None:
            return model
        return torch.compile(model, **self._compile_options)


def _takes_nothing(function: Callable[..., Any]) -> bool:
    try:
        return not inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
