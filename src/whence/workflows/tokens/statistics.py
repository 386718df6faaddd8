"""Statistics of generated outputs: how far two agree, which share of the prompts must agree, the
confidence interval of that share, and whether a commit changed it.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from whence import config_files
from whence.errors import UsageError
from whence.results import OutputMatch

FULL = 0.75
HALF = 0.4
SIGNIFICANT = 0.05
_EXACT = 1000  # up to here the sign test is summed in whole numbers
Output = str | Sequence[int] | Sequence[str]


def match(reference: Output, target: Output) -> OutputMatch:
    """The agreement of `target` with `reference`: two strings, compared by code point, or two lists
    of tokens.

    Nothing is normalised: "é" and "e" with a combining accent differ. Raises UsageError for a
    string against a list.
    """
    text = isinstance(reference, str)
    if text != isinstance(target, str):
        raise UsageError(
            "one side is a string, the other a list of tokens: give both as text or as token ids"
        )
    prefix, shorter = _common(reference, target), min(len(reference), len(target))
    parts = prefix < shorter
    full = None if shorter == 0 else not parts
    half = None if shorter == 0 else prefix >= max(shorter // 2, 1)
    token = None if not parts else _word(str(reference), str(target), prefix) if text else prefix
    sides = "reference" if len(reference) > shorter else "target" if len(target) > shorter else ""
    return OutputMatch(
        unit="character" if text else "token",
        reference_length=len(reference),
        target_length=len(target),
        prefix_length=prefix,
        first_character=prefix if parts and text else None,
        first_token=token,
        full=full,
        half=half,
        longer=sides if full else "",
    )


def _common(a: Output, b: Output) -> int:
    """Length of the common prefix, found by comparing slices, which is fast."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _word(a: str, b: str, prefix: int) -> int:
    """Index of the word in which two strings first differ at character `prefix`.

    A difference in blanks alone counts for the next word.
    """
    words = len(a[:prefix].split())
    inside = (
        prefix > 0
        and not a[prefix - 1].isspace()
        and not (a[prefix].isspace() and b[prefix].isspace())
    )
    return words - 1 if inside else words


def wilson(count: int, of: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson score interval of the share `count` / `of`: (lower, upper) within 0 and 1; (0, 1) for
    `of` = 0.

    Source: Wilson, Probable inference, the law of succession, and statistical inference, JASA 22
    (1927) 209-212.
    """
    if of == 0:
        return 0.0, 1.0
    z = statistics.NormalDist().inv_cdf(0.5 + confidence / 2)
    share = count / of
    centre = share + z * z / (2 * of)
    spread = z * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of))
    low, high = (centre - spread) / (1 + z * z / of), (centre + spread) / (1 + z * z / of)
    # For a count of 0 or `of`, one bound is exactly 0 or 1; rounding must not change it.
    return (0.0 if count == 0 else low), (1.0 if count == of else high)


def sign_test(changes: int, reverse: int) -> float:
    """p-value of the two-sided exact binomial test that changes in both directions are equally
    likely; 1 without changes.
    """
    n, k = changes + reverse, min(changes, reverse)
    if 2 * k >= n:
        return 1.0
    if n <= _EXACT:
        return float(2 * sum(math.comb(n, i) for i in range(k + 1)) / (1 << n))
    # The largest term comes from its logarithm, the smaller ones from the largest by ratios.
    term = total = 1.0
    for i in range(k, 0, -1):
        term *= i / (n - i + 1)
        total += term
        if term < 1e-17 * total:
            break
    log = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) - n * math.log(2)
    return min(1.0, 2 * math.exp(log) * total)


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Least shares of the prompts, 0 to 1, that must match in full and over the first half.

    origin: where the values come from, in words.
    """

    full: float = FULL
    half: float = HALF
    origin: str = "default"

    def reached(self, full: float | None, half: float | None) -> bool:
        """Whether both shares reach their thresholds; an undefined share reaches none."""
        return full is not None and half is not None and full >= self.full and half >= self.half


def thresholds(
    full: float | None, half: float | None, path: str | os.PathLike[str] | None, model: str
) -> Thresholds:
    """The thresholds for a model: the defaults, overridden by the file's general values, its entry
    for the model, and the explicit arguments, in this order.

    path: TOML or YAML, {"full": 0.75, "half": 0.4, "models": {NAME or PATTERN: {"full": ...,
    "half": ...}}}. A name in full goes before patterns (`*`, `?`), the first pattern before the
    next. Raises UsageError.
    """
    configured = Thresholds() if path is None else _of_file(Path(path), model)
    chosen = {k: _share(v, f"--{k}") for k, v in (("full", full), ("half", half)) if v is not None}
    if not chosen:
        return configured
    origin = (
        f"; {'half' if 'full' in chosen else 'full'}: {configured.origin}"
        if len(chosen) == 1 and configured.origin != "default"
        else ""
    )
    return Thresholds(
        chosen.get("full", configured.full),
        chosen.get("half", configured.half),
        "as given" + origin,
    )


def _of_file(path: Path, model: str) -> Thresholds:
    data = _read(path)
    _known(data, ("full", "half", "models"), str(path))
    models = data.get("models", {})
    if not isinstance(models, Mapping):
        raise UsageError(f"{path}: `models` is a table of names, not {type(models).__name__}")
    entries = {str(name): _entry(entry, f"{path}: model {name}") for name, entry in models.items()}
    common = _entry({k: v for k, v in data.items() if k != "models"}, str(path))
    name = (
        model
        if model in entries
        else next((n for n in entries if model and fnmatchcase(model, n)), None)
    )
    if name is not None:
        origin = f"{path}, model {name}"
    else:
        lacks = f"no entry for model {model}" if model else "no model is named (--model)"
        origin = f"{path}" + (f"; {lacks}" if entries else "")
    over = {**common, **(entries[name] if name is not None else {})}
    return Thresholds(over.get("full", FULL), over.get("half", HALF), origin)


def _read(path: Path) -> dict[str, Any]:
    suffix = path.suffix.lower()
    if suffix not in (".toml", ".yaml", ".yml"):
        raise UsageError(
            f"thresholds {path}: written as TOML or YAML, so it ends in .toml, .yaml or .yml"
        )
    try:
        text = config_files.text_of(path, "utf-8-sig")
        data = config_files.toml_value(text) if suffix == ".toml" else config_files.yaml_value(text)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"thresholds {path} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error
    except config_files.NotConfig as error:
        raise UsageError(f"thresholds {path}: {error}") from error
    if not isinstance(data, dict):
        raise UsageError(
            f"thresholds {path}: a table with `full`, `half`, `models`, not {type(data).__name__}"
        )
    return data


def _entry(entry: Any, where: str) -> dict[str, float]:
    if not isinstance(entry, Mapping):
        raise UsageError(f"{where}: a table with `full` and `half`, not {type(entry).__name__}")
    _known(entry, ("full", "half"), where)
    return {k: _share(v, f"{where}: {k}") for k, v in entry.items()}


def _share(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise UsageError(f"{where}: {value!r} is not a share between 0 and 1")
    return float(value)


def _known(table: Mapping[Any, Any], keys: tuple[str, ...], where: str) -> None:
    wrong = [k for k in table if k not in keys]
    if wrong:
        raise UsageError(f"{where}: no key {wrong[0]!r}; known: {', '.join(keys)}")
