"""Describes a path that a user took for a run, by the names of the files there."""

from __future__ import annotations

from pathlib import Path

from whence.display import listed
from whence.store.folder import JOURNAL, PROCESS, RUN, is_run

COMPARISON = ("summary.json", "report.json")
_MOST = 4


def what_instead(path: str | Path) -> str:
    """Returns "is a comparison, not a run: ..." and what to give instead; "" for an
    unknown path.
    """
    place = Path(path)
    if is_run(place):
        return ""
    comparison = place.parent if place.name in COMPARISON else place
    if all((comparison / name).is_file() for name in COMPARISON):
        return is_a_comparison(comparison)
    if (place / PROCESS).is_file() and (place / JOURNAL).exists() and is_run(place.parent):
        return f"is what one process wrote of the run {place.parent}; give that run"
    names = runs_in(place)
    if names:
        runs = listed([str(place / name) for name in names], _MOST)
        return f"is a folder of runs, not a run; give one of them: {runs}"
    return ""


def is_a_comparison(place: str | Path) -> str:
    """Whether a path or URL holds a comparison."""
    return (
        f"is a comparison, not a run: `whence report {place}` shows it; where a run is wanted, "
        "give one of the two that were compared"
    )


def runs_in(folder: Path) -> list[str]:
    """Returns the names of the runs directly in a folder."""
    try:
        return sorted(file.parent.name for file in folder.glob(f"*/{RUN}") if is_run(file.parent))
    except OSError:
        return []
