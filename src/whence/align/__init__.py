"""Decides from metadata who faces whom and how both reach the same axes (plan)."""

from whence.align.conditions import changed, differences, settings_of
from whence.align.derived import Derived, Making
from whence.align.facing import Aligned, align
from whence.align.names import normal_scope, starred
from whence.align.plan import NOT_SELECTED, plan, selected
from whence.align.tensors import RULE, Inner

__all__ = [
    "NOT_SELECTED", "RULE", "Aligned", "Derived", "Inner", "Making", "align", "changed", "differences", "normal_scope", "plan",
    "selected", "settings_of", "starred",
]  # fmt: skip
