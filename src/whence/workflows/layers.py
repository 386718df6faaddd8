"""From the first token whose logits are wrong to the layer that makes it so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from whence.errors import UsageError
from whence.workflows.notebook_progress import Tell
from whence.workflows.saved import AnyPath

if TYPE_CHECKING:
    from whence.results import Comparison


def compare_layers(
    result: Comparison, *, output: AnyPath, tell: Tell = lambda _: None
) -> Comparison:
    """Run the two programs of a comparison of logits again, up to the first token that is off, and
    compare what every layer of them computes there.

    result: of `compare`; it is returned where no token is off. output: a new folder for the two
    runs. Raises UsageError where the runs hold more than logits, UnreadableRun for a run whose
    command is not known, CaptureError where a program fails, OutputExists.
    """
    from whence.readers.opening import open_run
    from whence.workflows.compare import compare
    from whence.workflows.rerun import recorded, workplace

    generation = result.generation
    if generation is None or not generation.logits_only:
        raise UsageError(
            "--layers is for runs of logits (--level logits); these hold the layers: compare names "
            "the one at fault without it"
        )
    if generation.suspect < 0:
        return result
    token = generation.tokens[generation.suspect]
    steps = f":{max(token.step, token.target_step) + 1}"
    paths = result.reference, result.target
    programs = [recorded(open_run(path).info, path) for path in paths]
    with workplace(output, "compare --layers") as place:
        runs = [place / side for side in ("reference", "target")]
        for program, run in zip(programs, runs, strict=True):
            tell(f"running {program.words}, steps {steps}")
            program.capture(run, keep="full", steps=steps)
        return compare(*runs)
