"""`msprobe.pytorch`: the debugger that a `config.json` describes.

    from whence.compat.msprobe.pytorch import PrecisionDebugger, seed_all

    seed_all()
    debugger = PrecisionDebugger(config_path="./config.json")
    debugger.start(model)
    ...
    debugger.stop()
    debugger.step()

writes `step<N>/rank<R>/dump.json` and so on into its dump_path, which is a run of whence too.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from whence.compat._said import once, same_as, without
from whence.compat._steps import Stepped
from whence.compat.msprobe.pytorch._config import Settings, read

__all__ = ["PrecisionDebugger", "save", "seed_all"]

_started: list[PrecisionDebugger] = []


class PrecisionDebugger(Stepped):
    """Dumps modules (level L0), operators (L1) or both (mix) between `start` and `stop`; `step`
    ends a step.

    What is given here goes before what config.json says; without either: statistics of operators,
    every step. As there is one debugger in a process, a second one continues the first. Nothing of
    the program changes. Raises UsageError for what is not understood.
    """

    def __init__(
        self,
        config_path: str | os.PathLike[str] | None = None,
        task: str | None = None,
        dump_path: str | None = None,
        level: str | None = None,
        model: Any = None,
        step: Sequence[int | str] | None = None,
        rank: Sequence[int | str] | None = None,
        **others: Any,
    ) -> None:
        without(
            "PrecisionDebugger",
            others,
            {},
            ("config_path", "task", "dump_path", "level", "model", "step", "rank"),
        )
        if _started:
            once("PrecisionDebugger: there is one in this process already; its configuration holds")
            self.__dict__ = _started[0].__dict__
            return
        arguments = {
            "task": task,
            "dump_path": dump_path,
            "level": level,
            "step": step,
            "rank": rank,
        }
        self._settings: Settings = read(
            config_path, {k: v for k, v in arguments.items() if v is not None}
        )
        self._model = model
        _started.append(self)

    def start(
        self, model: Any = None, token_range: Sequence[int] | None = None, **others: Any
    ) -> None:
        """Take what is called from here on. model: a torch.nn.Module or a list of them; None for
        all that are called.

        token_range: first and last call of the model, from 0.
        """
        from whence.api import Dump
        from whence.errors import UsageError

        why = {
            "rank_id": "the rank is that of the process group, else RANK",
            "scheduled_tokens": "all rows of a batch are dumped",
        }
        without("PrecisionDebugger.start", others, why, ("model", "token_range"))
        settings = self._settings
        if not settings.enabled:
            once("dump_enable is false: nothing is dumped")
            return
        if self._dump is None:
            models = (
                list(model)
                if isinstance(model, (list, tuple))
                else [self._model if model is None else model]
            )
            level = settings.options["level"]
            same_as(
                "msprobe.PrecisionDebugger",
                f"whence run{'' if level == 'modules' else f' --level {level}'}{settings.keep} "
                "-o RUN -- CMD",
            )
            options = dict(settings.options)
            if token_range is not None:
                if settings.steps is not None:
                    raise UsageError(
                        "start(token_range=...) chooses calls of the model and the configuration "
                        "steps: leave one of them out"
                    )
                first, last = token_range
                options["steps"] = (first, last + 1)
            if len(models) > 1:
                once(f"{len(models)} models: every model that is called is dumped")
            self._dump = Dump(
                settings.folder,
                models[0] if len(models) == 1 else None,
                steps=settings.steps,
                layout="msprobe",
                is_wanted=settings.is_wanted,
                **options,
            )
            self._dump.mark()
        self._dump.resume()

    def save(self, variable: Any, name: str, save_backward: bool = True) -> None:
        """See `save`."""
        if self._dump is None:
            self.start(self._model)
        save(variable, name, save_backward)

    def close(self) -> None:
        """End the dump; it ends with the process else."""
        if self._dump is not None:
            self._dump.close()
        _started.clear()


def save(variable: Any, name: str, save_backward: bool = True) -> None:
    """Keep a tensor, or those in lists and dicts, under a name, while a debugger is there; its
    gradient as `<name>_grad` when it comes.
    """
    import whence

    same_as("msprobe save", "whence.label(name, tensor)")
    if isinstance(variable, dict):
        for key, value in variable.items():
            save(value, f"{name}.{key}", save_backward)
    elif isinstance(variable, (list, tuple)):
        for place, value in enumerate(variable):
            save(value, f"{name}.{place}", save_backward)
    else:
        whence.label(name, variable)
        if save_backward and getattr(variable, "requires_grad", False):
            variable.register_hook(lambda grad: whence.label(f"{name}_grad", grad))


def seed_all(
    seed: int = 1234, mode: bool = False, rm_dropout: bool = False, is_enhanced: bool = False
) -> None:
    """Seed Python, numpy and torch. mode: deterministic kernels too."""
    from whence.compat._llm import seed_all as seeded

    why = {
        "rm_dropout": "model.eval() switches dropout off",
        "is_enhanced": "python, numpy and torch are seeded",
    }
    without("seed_all", {"rm_dropout": rm_dropout, "is_enhanced": is_enhanced}, why)
    seeded(seed, mode)
