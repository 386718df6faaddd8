"""Pairs the calls and tensors of two runs, and brings both to the same axes."""

from typing import TYPE_CHECKING

from whence.lazy_names import lazily

if TYPE_CHECKING:
    from whence.align.batches import prompts
    from whence.align.batches.batch import is_position_or_mask, is_told_apart
    from whence.align.batches.padding import real_positions
    from whence.align.batches.sequences import followers
    from whence.align.call_sites import MATCHES, selected, step_of
    from whence.align.calls.compiled_graphs import cut_alike
    from whence.align.calls.granularity import has_operators
    from whence.align.calls.graph_nodes import is_compiled, is_piece, kernel
    from whence.align.calls.layout_operators import is_handed_on
    from whence.align.calls.match import plan
    from whence.align.calls.nearest import nearest
    from whence.align.calls.tensor_slots import is_count_of_cache
    from whence.align.derived_run import Derived, DerivedTensors
    from whence.align.environment import changed, differences, settings_of, told
    from whence.align.layout.axes import fit
    from whence.align.layout.provenance import named
    from whence.align.module_names import normal_scope, starred
    from whence.align.pipeline import Aligned, align
    from whence.align.ranks.shards import Shard
    from whence.align.tensors.elements import Inner
    from whence.align.tensors.module_outputs import is_move
    from whence.align.user_map import Map
    from whence.align.user_map import load as load_map
    from whence.records.marks import NOT_SELECTED
    from whence.records.slots import is_cache
else:
    __getattr__ = lazily(__name__)

__all__ = [
    "MATCHES",
    "NOT_SELECTED",
    "Aligned",
    "Derived",
    "DerivedTensors",
    "Inner",
    "Map",
    "Shard",
    "align",
    "changed",
    "cut_alike",
    "differences",
    "fit",
    "followers",
    "has_operators",
    "is_cache",
    "is_compiled",
    "is_count_of_cache",
    "is_handed_on",
    "is_move",
    "is_piece",
    "is_position_or_mask",
    "is_told_apart",
    "kernel",
    "load_map",
    "named",
    "nearest",
    "normal_scope",
    "plan",
    "prompts",
    "real_positions",
    "selected",
    "settings_of",
    "starred",
    "step_of",
    "told",
]
