"""Describes the effect of the differences on the outputs of the models, in words."""

from __future__ import annotations

from whence.report.tables import clean, count
from whence.results import Effect


def words(effect: Effect) -> str:
    """One line: the largest error of an output, rows of scores whose largest element moved, and
    tokens that changed.
    """
    parts = [_size(effect)] if effect.outputs or effect.unmeasured else []
    if effect.rows and not effect.tokens:
        rows = count(effect.rows, "row")
        parts.append(
            f"argmax changed in {count(effect.moved)} of {rows}"
            if effect.moved
            else f"argmax unchanged in {'all ' if effect.rows > 1 else ''}{rows}"
        )
    if effect.tokens:
        parts.append(f"{count(effect.tokens_changed)} of {count(effect.tokens, 'token')} changed")
    return "; ".join(parts)


def _size(effect: Effect) -> str:
    unmeasured = (
        f" ({count(effect.unmeasured, 'more output')} could not be measured)"
        if effect.unmeasured
        else ""
    )
    if not effect.slot:
        if not effect.outputs:
            return "not known: no output of the model could be measured"
        if effect.unmeasured:
            return (
                f"not known: {count(effect.unmeasured, 'output')} could not be measured; "
                f"{count(effect.outputs, 'other')} bitwise equal"
            )
        return "none: the outputs of the model are bitwise equal"
    name = f"{clean(effect.name)} {clean(effect.slot)}"
    of_several = f", step {effect.step}, rank {effect.rank}" if effect.outputs > 1 else ""
    if effect.error is None:
        return f"{name}{of_several} is not finite on one side{unmeasured}"
    measure = "statistics differ by" if effect.from_statistics else "rel_l2"
    return f"{name}{of_several}: {measure} {effect.error:.2g}{unmeasured}"
