"""`msquickcmp.pta_acl_cmp.compare`: tensors of PyTorch ("pta") and of the acceleration library
("acl"), labelled where they arise.

    from whence.compat.msquickcmp.pta_acl_cmp.compare import gen_id, set_label, set_task_id

Compared when the command that `whence ait debug compare aclcmp --exec` runs has ended; without a
run around them they do nothing.
"""

from __future__ import annotations

import os
from typing import Any

import whence
from whence.api import labels_are_taken, new_id, take_label
from whence.compat._said import same_as

__all__ = ["gen_id", "set_label", "set_task_id"]

SIDES = {"pta": "reference", "acl": "target"}

gen_id = new_id


def set_label(
    data_src: str,
    data_id: str,
    data_val: Any = None,
    tensor_path: str | os.PathLike[str] | None = None,
) -> None:
    """Show the tensor `data_val`, or the file `tensor_path` that the library will write, as the one
    with `data_id` of a side.

    data_src: "pta" (the reference) or "acl" (the target). data_id: equal on both sides (`gen_id`).
    The tensor may have any shape and dtype, bfloat16 too. Never raises for what it is shown; raises
    UsageError for another data_src.
    """
    if data_src not in SIDES:
        from whence.errors import UsageError

        raise UsageError(f"set_label(data_src={data_src!r}): pta (PyTorch) or acl (the library)")
    if labels_are_taken():
        same_as(
            "set_label",
            'whence.label(name, tensor, side="reference" or "target", id=whence.new_id())',
        )
        take_label(
            str(data_id),
            data_val if tensor_path is None else None,
            SIDES[data_src],
            tensor_path,
            str(data_id),
        )


def set_task_id() -> None:
    """A new task (a turn of a dialogue) begins: labels of different tasks are never paired."""
    if labels_are_taken():
        same_as("set_task_id", "whence.task()")
    whence.task()
