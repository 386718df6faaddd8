"""Paddle's names of tensors and operators without what changes from process to process."""

from __future__ import annotations

import re

_INNER = re.compile(r"(?:0x[0-9a-fA-F]+)?(?:\d+)?_?inner_var_(\d+)")
_ARGUMENT = re.compile(r"0x[0-9a-fA-F]+(body_block_arg_\d+)")
_FOLDED = re.compile(r"(constant_folding@)_\d+")


def plain_name(name: str) -> str:
    """Returns a variable's name: `0x55f5…_inner_var_21` of the PIR executor becomes `inner_var.21`,
    a position in a list; others are unchanged.
    """
    if "block_arg_" in name:
        match = _ARGUMENT.fullmatch(name)
        return match[1] if match is not None else name
    if "inner_var_" in name:
        match = _INNER.fullmatch(name)
        return f"inner_var.{match[1]}" if match is not None else name
    return _FOLDED.sub(r"\1", name) if "constant_folding@" in name else name


def plain_type(op: str) -> str:
    """An operator's type: `pd_op.matmul:7` and `onednn_op.matmul:7` are matmul, `pd_op.reshape_:8`
    (in place) is reshape.

    `while_instruction:9` is while.
    """
    name, colon, place = op.rpartition(":")
    op = name if colon and place.isdigit() else op
    op = op.removeprefix("pd_op.").removeprefix("onednn_op.")
    op = op.removesuffix("_instruction")
    return op.removesuffix("_") if len(op) > 1 else op
