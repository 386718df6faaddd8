"""Decides from metadata who faces whom and how both reach the same axes (plan)."""

from whence.align.conditions import changed, differences, settings_of
from whence.align.derived import Derived, Making
from whence.align.facing import Aligned, align
from whence.align.names import normal_scope, starred
from whence.align.nearest import nearest
from whence.align.plan import MATCHES, plan, selected
from whence.align.sites import NOT_SELECTED

__all__ = [
    "MATCHES", "NOT_SELECTED", "Aligned", "Derived", "Making", "align", "changed", "differences", "nearest", "normal_scope", "plan",
    "selected", "settings_of", "starred",
]  # fmt: skip
