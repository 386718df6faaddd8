"""Which step of a comparison changes which golden answers: each is taken out once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

from _stages import FORMS, RULES, SHORTCUTS, steps_watched, without

from _golden.place import Case
from whence.comparison import pipeline

Recorded = Callable[[Path], dict[str, str]]
Answer = Callable[[str, Case, Path], dict[str, str]]
_KINDS = ("checks", "helps")
"""Kinds whose cases start programs or compare nothing."""
_NAMED = 6
"""Cases of a row that are named."""
_ENOUGH = 8
"""Answers after whose change no further one is asked for."""
GROUPS: dict[str, Iterable[str]] = {
    "Stages of the verdict": pipeline.STAGES,
    "Forms that both runs are brought to": FORMS,
    "Rules that pair calls": RULES,
    "Shortcuts (must change none)": SHORTCUTS,
}


def table(cases: dict[str, Case], folder: Path, answer: Answer, recorded: Recorded) -> str:
    """The table in Markdown. folder: of `record`, whose runs and answers are taken."""
    golden: dict[str, dict[str, str]] = {}
    acting: dict[str, list[str]] = defaultdict(list)
    chosen = {name: case for name, case in cases.items() if name.split("/")[0] not in _KINDS}
    for name, case in chosen.items():
        golden[name] = recorded(folder / "golden" / name)
        with steps_watched() as acts:
            again = answer(name, case, folder)
        if again != golden[name]:  # does not repeat itself, so it proves nothing
            print(f"{name} does not repeat itself", flush=True)
            continue
        for step in acts:
            acting[step].append(name)
    lines = []
    for group, steps in GROUPS.items():
        lines += [f"## {group}", "", "| step | acts in | changes | answers that change |",
                  "|---|---|---|---|"]  # fmt: skip
        for step in steps:
            changed: list[str] = []
            for name in acting[step]:
                with without(step):
                    if answer(name, chosen[name], folder) != golden[name]:
                        changed.append(name)
                if len(changed) == _ENOUGH:
                    break
            count = f"{len(changed)}{' or more' if len(changed) == _ENOUGH else ''}"
            print(f"{step}: {count} of {len(acting[step])}", flush=True)
            named = ", ".join(changed[:_NAMED]) + (" ..." if len(changed) > _NAMED else "")
            lines.append(f"| {step} | {len(acting[step])} | {count} | {named} |")
        lines.append("")
    return "\n".join(lines)
