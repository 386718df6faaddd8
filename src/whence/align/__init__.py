"""Decides from metadata who faces whom and how both reach the same axes (plan)."""

from whence.align.calls.graphs import cut_alike, is_compiled, is_piece, kernel
from whence.align.calls.handed import hands_on
from whence.align.calls.modules import is_move
from whence.align.calls.moves import is_handed_on
from whence.align.calls.nearest import nearest
from whence.align.calls.plan import MATCHES, plan
from whence.align.calls.sites import NOT_SELECTED, selected, step_of
from whence.align.conditions import changed, differences, settings_of, told
from whence.align.derived import Derived, Making
from whence.align.facing import Aligned, align
from whence.align.labels.elements import Inner
from whence.align.layout.axes import fit
from whence.align.layout.origins import named
from whence.align.mapping import Map
from whence.align.mapping import load as load_map
from whence.align.marks import is_gathered, is_of_pieces, is_on_ranks, is_unplaced, shown_rank
from whence.align.names import normal_scope, starred
from whence.align.sharding.shards import Shard
from whence.align.tokens import prompts
from whence.align.tokens.beside import followers
from whence.align.tokens.sequences import is_cache, is_position_or_mask, is_told_apart

__all__ = [
    "MATCHES", "NOT_SELECTED", "Aligned", "Derived", "Inner", "Making", "Map", "Shard", "align", "changed", "cut_alike",
    "differences", "fit", "followers", "hands_on", "is_cache", "is_compiled", "is_gathered", "is_handed_on", "is_move",
    "is_of_pieces", "is_on_ranks", "is_piece", "is_position_or_mask", "is_told_apart", "is_unplaced", "kernel", "load_map",
    "named", "nearest", "normal_scope", "plan", "prompts", "selected", "settings_of", "shown_rank", "starred", "step_of", "told",
]  # fmt: skip
