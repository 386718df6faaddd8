"""What models compute under two releases of a package."""

from __future__ import annotations

from collections import Counter

import msgspec

from whence.display import Described
from whence.results.verdict import Status, Word


class UpgradeKind(Word):
    """What became of one model, in the order in which reports list it."""

    DIFFERS = "differs"
    FAILS_IN_SECOND = "runs in the first only"
    CANNOT_TELL = "cannot tell"
    RUNS_IN_SECOND = "runs in the second only"
    CANNOT_BUILD = "cannot be built"
    REMOVED = "only in the first release"
    ADDED = "only in the second release"
    ROUNDING = "same within rounding"
    BITWISE = "same bit for bit"


class ModulePlace(msgspec.Struct, frozen=True, omit_defaults=True):
    """What differs in a model.

    module: its name, "" for the whole model; op_type: its class. cause: of the comparison
    ("semantic", "kernel", ...), or "settings" where a default of the configuration does. words: in
    a sentence. first, second: lines of the library that define or call it, "" where unknown.
    """

    module: str
    op_type: str = ""
    cause: str = ""
    words: str = ""
    first: str = ""
    second: str = ""
    operator: str = ""


class Upgraded(msgspec.Struct, frozen=True, omit_defaults=True):
    """One model under two releases.

    model: its class. place: what differs first, None where nothing does. others: how many more
    findings. benign: changes that are none of the numbers (renamed weights and modules). settings:
    defaults of the configuration that differ ("rope_theta: 1e4, was 5e5"). notes: what the answer
    does not rest on. errors: of the first and the second environment. script: a file that shows it,
    of the folder of results. largest: relative 2-norm of the difference at the outputs, and
    `output`, where it is; largest_wide: where both compute in float64, None where they cannot.
    idle: of `modules` without children, those that did not run. seconds: of the processor in the
    environments, and of the clock for captures.
    """

    name: str
    kind: UpgradeKind
    model: str = ""
    place: ModulePlace | None = None
    others: int = 0
    benign: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    errors: tuple[str, str] = ("", "")
    script: str = ""
    largest: float | None = None
    largest_wide: float | None = None
    output: str = ""
    modules: int = 0
    idle: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if type(self.kind) is not UpgradeKind:
            msgspec.structs.force_setattr(self, "kind", UpgradeKind(self.kind))


class Release(msgspec.Struct, frozen=True):
    """One of the two environments. given: as the user named it. folder: that comes first on the
    path of its Python, "" for none. versions: of what decides the numbers.
    """

    given: str
    python: str
    folder: str = ""
    versions: dict[str, str] = {}


class Upgrade(Described, msgspec.Struct, frozen=True):
    """Which models an upgrade changes.

    models: those that were tried, by name. untried: names of those that the budget did not reach.
    seconds: of the clock, and processor_seconds of this call; both without earlier calls. folder:
    with the scripts and results.jsonl.
    """

    first: Release
    second: Release
    models: tuple[Upgraded, ...]
    folder: str = ""
    untried: tuple[str, ...] = ()
    train: bool = False
    seconds: float = 0.0
    processor_seconds: float = 0.0

    @property
    def counts(self) -> dict[UpgradeKind, int]:
        """How many models of each kind, in the order of `UpgradeKind`."""
        counted = Counter(model.kind for model in self.models)
        return {kind: counted[kind] for kind in UpgradeKind if counted[kind]}

    @property
    def status(self) -> Status:
        """Different where a model differs; undecided where none does and one is not decided."""
        counts = self.counts
        if counts.get(UpgradeKind.DIFFERS):
            return Status.DIFFERENT
        open_ = UpgradeKind.FAILS_IN_SECOND, UpgradeKind.CANNOT_TELL
        compared = UpgradeKind.BITWISE, UpgradeKind.ROUNDING
        if self.untried or any(map(counts.get, open_)) or not any(map(counts.get, compared)):
            return Status.UNDECIDED
        return Status.SAME
