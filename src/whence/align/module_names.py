"""Brings names of modules, as different programs give them, to one form."""

from __future__ import annotations

import difflib
import functools
import re

WRAPPERS = frozenset(
    {
        "module",  # DataParallel, DistributedDataParallel
        "_orig_mod",  # torch.compile
        "_fsdp_wrapped_module",
        "_checkpoint_wrapped_module",
        "_fpw_module",
        "_forward_module",  # Lightning
        "inner_module",
    }
)
WRAPPER_CLASSES = frozenset(
    {
        "DistributedDataParallel",
        "DataParallel",
        "OptimizedModule",
        "FullyShardedDataParallel",
        "CheckpointWrapper",
        "DeepSpeedEngine",
    }
)


@functools.lru_cache(maxsize=1 << 17)
def normal_scope(scope: str) -> str:
    """A dotted scope without wrapper components, with `layers[3]` written `layers.3`."""
    scope = scope.replace("[", ".").replace("]", "")
    return ".".join(part for part in scope.split(".") if part and part not in WRAPPERS)


@functools.lru_cache(maxsize=1 << 17)
def any_separators(scope: str) -> str:
    """A scope with a dot for whatever stands between its words, in lower case."""
    return re.sub(r"[\W_]+", ".", normal_scope(scope)).strip(".").lower()


def starred(scope: str) -> str:
    """The scope with every numeric component starred: siblings share it (`layers.*.mlp`)."""
    return ".".join("*" if part.isdigit() else part for part in scope.split("."))


# Classes that serving and training frameworks use in the place of a plain class; they also occur
# inside names.
PARALLEL = {
    "columnparallellinear": "linear",
    "rowparallellinear": "linear",
    "qkvparallellinear": "linear",
    "mergedcolumnparallellinear": "linear",
    "replicatedlinear": "linear",
    "columnlinear": "linear",
    "rowlinear": "linear",
    "nonparallellinear": "linear",
    "parallellmhead": "linear",
    "lmhead": "linear",
    "vocabparallelembedding": "embedding",
    "parallelembedding": "embedding",
}
# The family of a class or operator, by a word in its name. The first word that fits counts;
# "convolution" comes before "linear", and so on.
_FAMILIES = (
    ("norm", r"norm$|norm\d?d?$|^rms|layernorm|batchnorm|groupnorm"),
    ("rotary", r"rotary|rope"),
    ("embedding", r"embedding$|embed$|^get_rows"),
    ("attention", r"attention$|attn$|sdpa$"),
    ("mlp", r"mlp$|feedforward$|ffn$"),
    ("recurrent", r"^(lstm|gru|rnn)(cell)?$"),
    ("convolution", r"^conv(transpose)?\d?d?$"),
    ("dropout", r"dropout"),
    ("pool", r"pool"),
    ("activation", r"relu|gelu|silu|swiglu|sigmoid|tanh$|activation|swish|mish|softplus|^act"),
    ("softmax", r"softmax"),
    ("linear", r"linear$|^dense$|lmhead$|proj(ection)?$"),
)
_CLASS = re.compile(r"[A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*$")
_MOST_LETTERS = 64


@functools.lru_cache(maxsize=4096)
def family(op_type: str) -> str:
    """The family of an operator, independent of a framework's class names ("LlamaRMSNorm",
    "RmsNormOperation" -> "norm"); "" where its name does not tell.
    """
    if op_type == "Conv1D":  # a product in transformers, a convolution in Keras
        return ""
    plain = op_type.rpartition(".")[2].replace("_", "").lower().removesuffix("operation")
    name = PARALLEL.get(plain)
    if name is not None:
        return name
    return next((name for name, pattern in _FAMILIES if re.search(pattern, plain)), "")


@functools.lru_cache(maxsize=1 << 17)
def plain_scope(scope: str, op_type: str = "") -> tuple[str, ...]:
    """Components of a scope without wrappers and without the class and its occurrence
    (`fc1.ColumnParallelLinear.0` -> `fc1`).
    """
    out: list[str] = []
    for part in normal_scope(scope).split("."):
        if part.isdigit() and out and _names_class(out[-1], op_type):
            out.pop()  # the number belongs to the class and is dropped with it
        elif part:
            out.append(part)
    if len(out) > 1 and _names_class(out[-1], op_type):
        out.pop()
    return tuple(out)


@functools.lru_cache(maxsize=1 << 16)
def _names_class(part: str, op_type: str) -> bool:
    if not _CLASS.match(part):
        return False
    return part == op_type or any(_typo(part.lower(), name) for name in _CLASSES)


_CLASSES = (*PARALLEL, "linear", "embedding", "layernorm", "rmsnorm", "dropout")


@functools.lru_cache(maxsize=1 << 17)
def _typo(a: str, b: str) -> bool:
    """Whether two words differ by one letter in five at most, and by no more than two."""
    if a == b:
        return True
    allowed = min(2, min(len(a), len(b)) // 5)
    return abs(len(a) - len(b)) <= allowed and _distance(a, b, allowed) <= allowed


def _distance(first: str, second: str, limit: int) -> int:
    """Edit distance of two words, in letters inserted, removed or changed; `limit` + 1 where it is
    larger.
    """
    row = list(range(len(second) + 1))
    for i, a in enumerate(first, 1):
        last, row[0] = row[0], i
        for j, b in enumerate(second, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (a != b))
        if min(row) > limit:
            return limit + 1
    return row[-1]


@functools.lru_cache(maxsize=1 << 17)
def likeness(first: str, second: str) -> float:
    """How alike two components of a name are, 0..1. 1: equal; 0.9: a typo apart; 0.8: one holds all
    words of the other (`q_proj`, `q`; `self_attn`, `attn`); numbers are alike only when equal.
    """
    if first == second:
        return 1.0
    a, b = first.lower()[:_MOST_LETTERS], second.lower()[:_MOST_LETTERS]
    if re.sub(r"\D", "", a) != re.sub(r"\D", "", b) or a.isdigit() or b.isdigit():
        return 0.0
    if a.replace("_", "") == b.replace("_", "") or _typo(a, b):
        return 0.9
    words, others = set(_words(first)), set(_words(second))
    if words <= others or others <= words:
        return 0.8
    ratio = difflib.SequenceMatcher(None, a, b, autojunk=False).ratio()
    return 0.6 * ratio if ratio > 0.5 else 0.0


def _words(part: str) -> list[str]:
    return [w.lower() for w in re.split(r"_+|(?<=[a-z])(?=[A-Z])", part) if w]
