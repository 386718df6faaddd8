"""Which stages of the verdict change an answer: the evidence that each of them is needed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from whence.comparison import pipeline
from whence.comparison.context import Context
from whence.comparison.pipeline import Stage, Verdicts


@contextlib.contextmanager
def watched() -> Iterator[set[str]]:
    """The names of the stages that change a verdict while this lasts; filled as they do."""
    changing: set[str] = set()
    stages = dict(pipeline.STAGES)

    def watching(name: str, stage: Stage) -> Stage:
        def run(verdicts: Verdicts, context: Context) -> Verdicts:
            after = stage(verdicts, context)
            if after is not verdicts and after != verdicts:
                changing.add(name)
            return after

        return run

    pipeline.STAGES.update({name: watching(name, stage) for name, stage in stages.items()})
    try:
        yield changing
    finally:
        pipeline.STAGES.update(stages)


@contextlib.contextmanager
def without(name: str) -> Iterator[None]:
    """whence without one stage of the verdict."""
    stage = pipeline.STAGES[name]
    pipeline.STAGES[name] = lambda verdicts, context: verdicts
    try:
        yield
    finally:
        pipeline.STAGES[name] = stage
