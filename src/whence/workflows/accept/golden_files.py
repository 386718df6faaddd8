"""Files of expected values: JSON and YAML files that contain numbers, and arrays in every format
that whence reads. Renewing a file changes the numbers in place and nothing else in it.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from whence import config_files, disk
from whence.dtypes import Array
from whence.errors import UnreadableRun, UsageError
from whence.workflows.rounding.named_values import below, named_arrays, named_texts
from whence.workflows.saved import storing

_TEXTS = (".json", ".yaml", ".yml")
_REWRITTEN = (*_TEXTS, ".npy", ".npz", ".safetensors")
_NUMBER = re.compile(
    r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?|[-+]?(nan|inf|infinity)", re.IGNORECASE
)
_FEWEST_DECIMALS = 3
"""A file whose numbers have at least this many digits after the point counts as printed to a fixed
number of digits.
"""
_FULL = 15
"""A float with at least this many significant digits counts as printed in full."""


@dataclass(frozen=True)
class Golden:
    """One expected value.

    content: an array; of a text one without an axis. resolution: half of the last printed digit, 0
    for exact numbers. steps: labels of the elements of a curve, () for an array. places: (start,
    end) of each number, or of the text, in the text of the file.
    """

    content: Array
    resolution: float = 0.0
    steps: tuple[str, ...] = ()
    places: tuple[tuple[int, int], ...] = ()
    decimals: int = 0


def read(source: Any) -> dict[str, Golden]:
    """Values by name, from a file or from an object of the program.

    The object may contain numbers, arrays, tensors, texts, and mappings and lists of them. Raises
    UnreadableRun.
    """
    if isinstance(source, (str, Path)):
        return _of_file(Path(source))
    if (
        isinstance(source, Mapping)
        and source
        and all(isinstance(v, Golden) for v in source.values())
    ):
        return dict(source)
    values = named_arrays(source) | dict(named_texts(source))
    return {name: Golden(array) for name, array in values.items()}


def _of_file(path: Path) -> dict[str, Golden]:
    if not path.exists():
        raise UnreadableRun(f"{path} does not exist")
    values = _of_text(path) if path.suffix.lower() in _TEXTS else _of_arrays(path)
    if not values:
        raise UnreadableRun(f"{path} holds no number: nothing is expected by it")
    return values


def _of_text(path: Path) -> dict[str, Golden]:
    try:
        tree = config_files.yaml_tree(config_files.text_of(path))
    except (OSError, UnicodeDecodeError, config_files.NotConfig) as error:
        raise UnreadableRun(f"{path} cannot be read: {error}") from error
    return dict(_of_node(tree, "")) if tree is not None else {}


def _of_node(node: yaml.Node, name: str) -> Iterator[tuple[str, Golden]]:
    if isinstance(node, yaml.MappingNode):
        keys = [str(key.value) for key, _ in node.value]
        items = [item for _, item in node.value]
        if len(keys) > 1 and all(k.isdigit() for k in keys) and all(map(_is_number, items)):
            yield name, _array(items, (len(items),), tuple(keys))
            return
        for key, item in zip(keys, items):
            yield from _of_node(item, below(name, key))
    elif isinstance(node, yaml.SequenceNode):
        leaves, shape = _rectangle(node)
        if leaves and all(map(_is_number, leaves)):
            steps = tuple(map(str, range(len(leaves)))) if len(shape) == 1 else ()
            yield name, _array(leaves, shape, steps)
            return
        for place, item in enumerate(node.value):
            yield from _of_node(item, below(name, str(place)))
    elif _is_number(node):
        yield name, _array([node], (), ())
    else:
        inside = (node.start_mark.index, node.end_mark.index)
        yield name, Golden(np.asarray(str(node.value)), places=(inside,))


def _rectangle(node: yaml.Node) -> tuple[list[yaml.Node], tuple[int, ...]]:
    """Flatten nested lists of a regular shape to (scalars in order, shape); ([], ()) for others."""
    if not isinstance(node, yaml.SequenceNode):
        return [node], ()
    inner = [_rectangle(item) for item in node.value]
    if len({shape for _, shape in inner}) != 1 or any(not leaves for leaves, _ in inner):
        return [], ()
    return [leaf for leaves, _ in inner for leaf in leaves], (len(inner), *inner[0][1])


def _is_number(node: yaml.Node) -> bool:
    if not isinstance(node, yaml.ScalarNode):
        return False
    text = str(node.value).strip().lstrip(".") if node.style is None else str(node.value)
    is_number = _NUMBER.fullmatch(text) is not None
    # quoted digits are a text; NaN has no other form in strict JSON
    return is_number and (node.style is None or "n" in text.lower())


def _array(nodes: list[yaml.Node], shape: tuple[int, ...], steps: tuple[str, ...]) -> Golden:
    texts = [str(node.value).strip().replace("_", "").lower() for node in nodes]
    is_whole = all(re.fullmatch(r"[-+]?\d+", text) for text in texts)
    if is_whole and all(abs(int(t)) < 1 << 63 for t in texts):
        array: Array = np.array([int(t) for t in texts], np.int64).reshape(shape)
    else:
        array = np.array([float(t.replace(".nan", "nan").replace(".inf", "inf")) for t in texts])
        array = array.reshape(shape)
    places = tuple((n.start_mark.index, n.end_mark.index) for n in nodes)
    resolution, decimals = (0.0, 0) if is_whole else _resolution(texts)
    return Golden(array, resolution, steps, places, decimals)


def _resolution(texts: list[str]) -> tuple[float, int]:
    """(half of the last digit, digits after the point) of numbers printed to the same number of
    digits.

    (0.0, 0) for numbers that are printed in full.
    """
    plain = [t for t in texts if re.fullmatch(r"[-+]?\d*\.\d+", t)]
    decimals = max((len(t.rpartition(".")[2]) for t in plain), default=0)
    digits = max((len(t.lstrip("+-0.").replace(".", "")) for t in plain), default=0)
    if len(plain) < len(texts) or decimals < _FEWEST_DECIMALS or digits >= _FULL:
        return 0.0, 0
    return 0.5 * 10.0**-decimals, decimals


def _of_arrays(path: Path) -> dict[str, Golden]:
    from whence.readers.opening import open_run

    run = open_run(str(path))
    goldens: dict[str, Golden] = {}
    for call in run.calls:
        for ref in call.refs:
            if call.scope:
                name = call.scope if len(call.refs) == 1 else below(call.scope, ref.slot)
                goldens[name] = Golden(run.array(ref.record))
    if not goldens:
        goldens = {str(r.id): Golden(run.array(r.id)) for r in run.records}
    return {"": next(iter(goldens.values()))} if path.suffix.lower() == ".npy" else goldens


def check_writable(path: Any) -> None:
    """Raise UsageError for an expectation that is not a file that can be renewed in place."""
    if not isinstance(path, (str, Path)) or Path(path).suffix.lower() not in _REWRITTEN:
        kinds = ", ".join(_REWRITTEN)
        raise UsageError(f"only a file of expected values is renewed ({kinds}), not {path}")


def renew(path: Path, old: Mapping[str, Golden], new: Mapping[str, Array]) -> None:
    """Put new values in the place of the old ones. Raises StoreFailed, and UsageError for a format
    that is read but not written.
    """
    check_writable(path)
    with storing(f"write {path}"):
        if path.suffix.lower() in _TEXTS:
            disk.write_file(path, _renewed_text(path, old, new), through_link=True)
        else:
            _renew_arrays(path, old, new)


def _renewed_text(path: Path, old: Mapping[str, Golden], new: Mapping[str, Array]) -> str:
    text = config_files.text_of(path)
    changes = [
        (place, _printed(value, golden))
        for name, golden in old.items()
        if name in new
        for place, value, held in zip(
            golden.places, np.asarray(new[name]).reshape(-1).tolist(), golden.content.reshape(-1)
        )
        if value != held
    ]
    for (start, end), printed in sorted(changes, reverse=True):
        text = text[:start] + printed + text[end:]
    return text


def _printed(value: Any, golden: Golden) -> str:
    """A number in the format in which the file prints its numbers; a text in quotes."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, float) and not math.isfinite(value):
        return '"nan"' if math.isnan(value) else '"inf"' if value > 0 else '"-inf"'
    return f"{value:.{golden.decimals}f}" if golden.decimals else repr(value)


def _renew_arrays(path: Path, old: Mapping[str, Golden], new: Mapping[str, Array]) -> None:
    arrays = {name: np.asarray(new.get(name, g.content)) for name, g in old.items()}
    for name, golden in old.items():
        arrays[name] = arrays[name].astype(np.asarray(golden.content).dtype)
    kind = path.suffix.lower()
    content = io.BytesIO()
    if kind == ".npy":
        np.save(content, next(iter(arrays.values())))
    elif kind == ".npz":
        np.savez(content, allow_pickle=False, **arrays)
    else:
        from safetensors.numpy import save

        content.write(save(arrays))
    disk.write_file(path, content.getvalue(), through_link=True)
