"""Decides from metadata who faces whom and how both reach the same axes (plan)."""

from whence.align.beside import followers
from whence.align.conditions import changed, differences, settings_of
from whence.align.derived import Derived, Making
from whence.align.facing import Aligned, align
from whence.align.gathering import is_gathered
from whence.align.mapping import Map
from whence.align.mapping import load as load_map
from whence.align.names import normal_scope, starred
from whence.align.nearest import nearest
from whence.align.origins import named
from whence.align.plan import MATCHES, plan
from whence.align.ranks import ON_RANKS, PIECES, SHOWN, Shard
from whence.align.sequences import is_cache, is_told_apart
from whence.align.sites import NOT_SELECTED, same_step, selected
from whence.align.tensors import Inner

__all__ = [
    "MATCHES", "NOT_SELECTED", "ON_RANKS", "PIECES", "SHOWN", "Aligned", "Derived", "Inner", "Making", "Map", "Shard", "align",
    "changed", "differences", "followers", "is_cache", "is_gathered", "is_told_apart", "load_map", "named", "nearest", "normal_scope",
    "plan", "same_step", "selected", "settings_of", "starred",
]  # fmt: skip
