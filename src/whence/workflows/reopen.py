"""Opens the two runs of an earlier comparison and pairs them as they were paired then."""

from __future__ import annotations

from pathlib import Path

from whence import align, store
from whence.comparison.context import prepare
from whence.comparison.options import CompareOptions
from whence.comparison.prepare import partial_prints
from whence.comparison.prepare.labels import plain
from whence.comparison.programs import program_flow, programs
from whence.comparison.replays.user_model import Models
from whence.errors import UnreadableRun
from whence.readers.encodings.raw_form import Forms
from whence.readers.opening import open_run
from whence.records import Run
from whence.results import Comparison
from whence.workflows import raw_shapes
from whence.workflows.saved import load_policy


def runs_of(compared: Comparison, folder: str = "") -> tuple[Run, Run]:
    """Open both runs of a comparison.

    folder: where the comparison lies; paths that do not exist relative to the working folder are
    tried relative to its parents. Raises UnreadableRun when a run is not where it was.
    """
    forms = raw_shapes.forms_of(compared.asked.get("shape", ()))
    return _found(compared.reference, folder, forms), _found(compared.target, folder, forms)


def _found(path: str, folder: str, forms: Forms) -> Run:
    if store.is_url(path) or Path(path).exists():
        return open_run(path, forms)
    above = () if Path(path).is_absolute() or not folder else Path(folder).resolve().parents
    near = next((place / path for place in above if (place / path).exists()), None)
    if near is None:
        raise UnreadableRun(
            f"{path} is not there; run this where whence compare was run, or compare the runs "
            "again where they are now"
        )
    return open_run(str(near), forms)


def reopened(
    compared: Comparison, model: Models | None = None, runs: tuple[Run, Run] | None = None
) -> tuple[align.Aligned, CompareOptions]:
    """Both runs with their plan, and the comparison's options as far as they were stored.

    model: as `compare` takes it. runs: both, where they are open already. Raises UnreadableRun when
    a run is not where it was.
    """
    arguments = compared.asked
    reference, target = runs if runs is not None else runs_of(compared)
    options = CompareOptions(
        allow=tuple(arguments.get("allow", ())),
        match=arguments.get("match", "auto"),
        chart=align.load_map(arguments["mapping"]) if "mapping" in arguments else None,
        policy=load_policy(arguments["policy"]) if "policy" in arguments else None,
        model=model,
    )
    reference, target, _ = programs.apply_programs(
        reference, target, programs.open_programs(compared.program_files or None, open_run)
    )
    reference, target, _ = plain(
        *partial_prints.alike(*program_flow.with_agreeing_inputs(reference, target))
    )
    aligned = prepare(reference, target, options).aligned
    return aligned, options
