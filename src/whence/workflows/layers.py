"""From the first token whose logits are wrong to the layer that makes it so."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from whence.errors import UsageError
from whence.records import missing_of
from whence.results import Status
from whence.workflows.notebook_progress import Tell
from whence.workflows.saved import AnyPath

if TYPE_CHECKING:
    from whence.results import Comparison, Generation


def compare_layers(
    result: Comparison, *, output: AnyPath, tell: Tell = lambda _: None
) -> Comparison:
    """Run the two programs of a comparison of logits again, up to the token that decides, and
    compare what every layer of them computes there.

    result: of `compare`; it is returned where it is `same`. The token is the first that is off;
    without one the first at which the texts part, or the one whose logits differ most. Right layers
    acquit no token behind it that is off or was not compared. output: a folder for the two runs; a
    run of the reference that an interrupted call left there is kept.
    Raises UsageError where the runs hold more than logits, UnreadableRun for a run whose command
    is not known, CaptureError where a program fails, OutputExists.
    """
    from whence.comparison.answer.generation import BAD
    from whence.readers.opening import open_run
    from whence.workflows.compare import compare
    from whence.workflows.rerun import recorded, workplace

    generation = result.generation
    if generation is None or not generation.logits_only:
        raise UsageError(
            "--layers is for runs of logits (--level logits); these hold the layers: compare names "
            "the one at fault without it"
        )
    if result.status == Status.SAME:
        return result
    last = _last_step(generation)
    steps = f":{last + 1}"
    paths = result.reference, result.target
    programs = [recorded(open_run(path).info, path) for path in paths]
    first = Path(output) / "reference"
    kept = _is_left(first, paths[0], steps)
    with workplace(output, "compare --layers", kept=("reference",) if kept else ()) as place:
        runs = [place / side for side in ("reference", "target")]
        for program, run in zip(programs, runs, strict=True):
            if kept and run.name == first.name:
                tell(f"{run} is there from an interrupted call")
                continue
            tell(f"running {program.words}, steps {steps}")
            program.capture(run, keep="full", steps=steps)
        layers = compare(*runs)
    is_off = any(token.step > last and token.verdict in BAD for token in generation.tokens)
    if layers.status != Status.SAME or not (is_off or generation.compared < generation.of):
        return layers
    return msgspec.structs.replace(
        layers,
        status=Status.UNDECIDED,
        headline=f"no layer is at fault up to step {last}; behind it: {result.headline}",
        next=tuple(step for step in result.next if "--layers" not in step.command),
    )


def _last_step(generation: Generation) -> int:
    """The step of the token that decides, in the run that reaches it later; 0 without tokens."""
    tokens = generation.tokens
    parted = (prompt.first for prompt in generation.prompts if prompt.first >= 0)
    number = generation.suspect if generation.suspect >= 0 else min(parted, default=-1)
    far = sorted(tokens, key=lambda token: -(token.numbers.get("rel_logit_err") or 0.0))
    chosen = tokens[number : number + 1] if number >= 0 else far[:1]
    return max((max(token.step, token.target_step) for token in chosen), default=0)


def _is_left(run: Path, of: str, steps: str) -> bool:
    """Whether a whole run of these steps is alone in the folder, made after the run of logits."""
    from whence.readers.opening import open_run

    files = run / "run.json", Path(of) / "run.json"
    if not all(file.is_file() for file in files) or len(list(run.parent.iterdir())) > 1:
        return False
    left = open_run(str(run))
    return (
        files[0].stat().st_mtime > files[1].stat().st_mtime
        and left.info.options.get("steps") == [[0, int(steps[1:]), 1]]
        and not missing_of(left)
    )
