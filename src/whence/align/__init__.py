"""Decides from metadata who faces whom and how both reach the same axes (plan)."""

from whence.align.conditions import changed, differences, settings_of
from whence.align.derived import Derived, Making
from whence.align.facing import Aligned, align
from whence.align.names import normal_scope, starred
from whence.align.origins import named
from whence.align.plan import NOT_SELECTED, plan, selected

__all__ = [
    "NOT_SELECTED", "Aligned", "Derived", "Making", "align", "changed", "differences", "named", "normal_scope", "plan", "selected",
    "settings_of", "starred",
]  # fmt: skip
