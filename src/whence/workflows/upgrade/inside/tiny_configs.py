"""Makes configurations of transformers small by rules on the names of their attributes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

from . import values

WIDTH, HEADS, HEAD, INNER, VOCABULARY = 64, 4, 16, 128, 128
SIZES = ("small", "in proportion", "few layers", "as it is")
"""What is made small: everything; everything, widths and heads by one factor, so that their
relations hold; layers, tokens, experts and images; only tokens.
"""
_FACTORS = (16, 8, 4, 2)
"""By which widths and heads become smaller in proportion, the first that all can have."""
_TRIALS = 60
"""Settings that a search tries before it ends with what fits."""
_SMALLEST_WIDTH = 64
"""Settings below it are not searched for widths that no rule names."""

# The first rule that matches the name gives the number; a rule never increases a number.
_COUNTS = (
    (r"(vocab_size|vocabulary_size|_vocab|n_tokens|num_embeddings)$", VOCABULARY),
    (r"(num|n)_(local_|routed_)?experts$|^n_routed_experts$|moe_num_experts$", 4),
    (r"experts_per_tok|num_selected_experts|moe_k$|moe_topk$|^top_?k$", 2),
    (r"^(n_groups?|topk_group|num_expert_group)$", 1),
    (r"^num_(object_)?queries$", 10),
    (r"_layers?$|_depth$|^depth$|^layers$|num_blocks$|n_blocks$|_hidden_layers\w*$", 2),
    (r"^max_(position_embeddings|seq_len|sequence_length)$|n_positions|n_ctx", 512),
)
_IMAGE = re.compile(r"^(image|img|input)_size$|^(crop|vision_image)_size$")
_WIDTHS = (
    (r"head_dim$|_head_dim\w*$|^d_kv$|head_size$|d_head$", HEAD),
    (r"(num|n)_?(key_value|kv)_heads$|^num_kv_heads$|^n_kv_heads$|key_value_heads$", 2),
    (r"_heads?$|^n_head$|attention_heads\w*$|^num_heads$", HEADS),
    (r"intermediate_\w*size$|ffn_\w*dim$|^d_ff$|^n_inner$|_inner_dim$|mlp_dim$|ffn_hidden", INNER),
    (r"lora_rank$|rank$", HEAD),
    (
        r"hidden_size\w*$|hidden_dim\w*$|^d_model$|^n_embd$|embed_dim\w*$|embedding_(size|dim)$"
        r"|_dim$|^dim$|_embed$|emb_dim$|_width$|^width$|d_embed$|projection_size$|output_size$",
        WIDTH,
    ),
)
_KEPT = re.compile(
    r"num_channels|in_chans|_factor|axis|num_labels|num_mel|feat_per|feature_size|temporal|patch"
    r"|conv_(kernel|stride|dim)|feat_extract|^rope|token|stride|kernel|groups?$|position_dim|coordinate|_axes"
)
_PARTS = re.compile(r"split_sizes to sum exactly to (\d+) .*got split_sizes=\[([\d, ]+)\]")
"""What torch says of parts that do not make up a dimension."""
_UNSET = {
    "vocab_size": VOCABULARY,
    "pad_token_id": 1,
    "mask_token_id": 2,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
}
"""Values that a configuration leaves open and its model needs."""


Arguments = dict[str, Any]
"""Values of settings by name; those of a configuration inside another are such a dict."""


def smaller(config: Any, arguments: Arguments) -> Any:
    """A configuration like this one with these settings. A configuration inside it is of its own
    type where they name one ("model_type").
    """
    held = vars(config)
    return type(config)(
        **{
            name: smaller(held[name], value)
            if hasattr(held.get(name), "model_type") and "model_type" not in value
            else value
            for name, value in arguments.items()
        }
    )


def small(config: Any, size: str, factor: int = 0) -> Arguments:
    """Settings that make the model of a configuration small.

    factor: of widths and heads in proportion; 0 for the largest that all heads can have.
    """
    if size == "as it is":
        rules = [_COUNTS[0]]
    else:
        rules = [*_COUNTS, *(_WIDTHS if size == "small" else ())]
    factor = (factor or _common_factor(config)) if size == "in proportion" else 1
    chosen: Arguments = {}
    taken = inspect.signature(type(config).__init__).parameters
    held = {k: v for k, v in vars(config).items() if k in taken}
    for name, value in held.items():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            chosen[name] = small(value, size, factor if size == "in proportion" else 0)
        elif value is None and name in _UNSET:
            chosen[name] = _UNSET[name]
        elif isinstance(value, bool) or value is None:
            continue
        elif isinstance(value, int):
            count = _count(name, value, rules)
            chosen[name] = value // _divisor(name, value, factor) if count is None else count
        elif isinstance(value, list | tuple) and size != "as it is":
            shorter = _listed(name, list(value), size)
            if shorter is not None:
                chosen[name] = shorter
        elif isinstance(value, float) and "drop" in name:
            chosen[name] = 0.0
    _layers(held, chosen)
    _heads(held, chosen)
    _images(held, chosen, size)
    _tokens(held, chosen)
    return chosen


def _divisor(name: str, value: int, factor: int) -> int:
    """`factor` for a number that grows with the width of a model, which the size of a head does
    not; else 1.
    """
    (head, _), *others = _WIDTHS
    grows = any(re.search(rule, name) for rule, _ in others)
    kept = re.search(head, name) or _KEPT.search(name) or value % factor
    return factor if grows and not kept else 1


def _common_factor(config: Any) -> int:
    """The largest of `_FACTORS` that divides every number of heads; 1 where none does."""
    heads = [
        value
        for name, value in vars(config).items()
        if re.search(r"heads?$", name) and type(value) is int and value > 1
    ]
    return next((f for f in _FACTORS if not any(value % f for value in heads)), 1)


def searched(config: Any, failure: Callable[[Arguments], str]) -> Arguments:
    """The smallest settings, of those tried, with which a model still does what it does with none.

    failure: what becomes of the model with these settings, "" where it runs. A model that cannot
    run as it is, for want of an input, still has to fail in the same way.
    """
    usual = {"", failure({})}
    chosen: Arguments = {}
    left = _TRIALS

    def fits(more: Arguments) -> bool:
        nonlocal chosen, left
        left -= 1
        trial = joined(chosen, more)
        if left < 0 or failure(trial) not in usual:
            return False
        chosen = trial
        return True

    few = small(config, "few layers")
    if not fits(few):
        for path, value in _flat(few):
            fits(_nested(path, value))
    if not any(fits(small(config, "in proportion", factor)) for factor in _FACTORS):
        for paths, value in _of_one_value(config):
            for factor in _FACTORS:
                together: Arguments = {}
                for path in paths:
                    together = joined(together, _nested(path, value // factor))
                if value % factor == 0 and fits(together):
                    break
    return chosen


def _of_one_value(config: Any) -> list[tuple[list[tuple[str, ...]], int]]:
    """Settings that have one value, a width of the model in several places, largest first."""
    places: dict[int, list[tuple[str, ...]]] = {}
    for path, value in _settings(config):
        if value >= _SMALLEST_WIDTH:
            places.setdefault(value, []).append(path)
    return [(places[value], value) for value in sorted(places, reverse=True)]


def _settings(config: Any, inside: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], int]]:
    """The path and value of each whole number that is set by name, but for ids of tokens."""
    accepted = inspect.signature(type(config).__init__).parameters
    for name, value in vars(config).items():
        if hasattr(value, "model_type"):
            yield from _settings(value, (*inside, name))
        elif type(value) is int and name in accepted and not name.endswith("_id"):
            yield (*inside, name), value


def _flat(
    arguments: Arguments, inside: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in arguments.items():
        if isinstance(value, dict):
            yield from _flat(value, (*inside, name))
        else:
            yield (*inside, name), value


def _nested(path: tuple[str, ...], value: Any) -> Arguments:
    for name in reversed(path):
        value = {name: value}
    return dict(value)


def joined(first: Arguments, second: Arguments) -> Arguments:
    """The settings of both; where both set one, that of `second`."""
    return first | {
        name: joined(first[name], value)
        if isinstance(value, dict) and isinstance(first.get(name), dict)
        else value
        for name, value in second.items()
    }


def asked_for(error: Exception, config: Any) -> list[tuple[Any, str]]:
    """Settings that a configuration, or one inside it, leaves open, and that an error names."""
    inner = [config, *(v for v in vars(config).values() if hasattr(v, "model_type"))]
    words = values.words(error)
    return [
        (each, name)
        for each in inner
        for name, value in vars(each).items()
        if value is None and name in words and _may_be_a_number(each, name)
    ]


def scaled_parts(error: Exception, config: Any) -> bool:
    """Set the list whose sum an error says to be wrong (the dimensions of a rotation by time,
    height and width) so that it sums to what it splits; whether there is one.
    """
    wrong = _PARTS.search(str(error))
    if not wrong:
        return False
    total, parts = int(wrong[1]), [int(part) for part in wrong[2].split(",")]
    changed = [total * part // sum(parts) for part in parts]
    changed[-1] += total - sum(changed)
    if _replaced(config, parts, changed):
        return True
    rotations = [each for each in _rotations(config) if "mrope_section" not in each]
    for each in rotations:
        each["mrope_section"] = changed
    return bool(rotations)


def _rotations(config: Any) -> list[dict[str, Any]]:
    """Settings of rotary embeddings in a configuration and those inside it; the parts of some have
    a default in the code of the model.
    """
    inner = [config, *(v for v in vars(config).values() if hasattr(v, "model_type"))]
    held = [getattr(each, "rope_parameters", None) for each in inner]
    return [each for each in held if isinstance(each, dict)]


def _replaced(held: Any, parts: list[int], changed: list[int]) -> bool:
    entries = held if isinstance(held, dict) else vars(held)
    replaced = False
    for name, value in list(entries.items()):
        if isinstance(value, list | tuple) and list(value) == parts:
            entries[name] = changed
            replaced = True
        elif isinstance(value, dict) or hasattr(value, "model_type"):
            replaced = _replaced(value, parts, changed) or replaced
    return replaced


def _may_be_a_number(config: Any, name: str) -> bool:
    """Whether a setting's declared type allows an integer; so it does where none is declared."""
    declared = (vars(kind).get("__annotations__", {}).get(name) for kind in type(config).__mro__)
    stated = next((each for each in declared if each is not None), None)
    return stated is None or "int" in re.findall(r"\w+", str(stated))


def _count(name: str, value: int, rules: list[tuple[str, int]]) -> int | None:
    for rule, number in rules:
        if re.search(rule, name):
            if number in (WIDTH, HEAD, INNER, HEADS, 2) and _KEPT.search(name):
                return None
            return number if value > number else None
    return None


def _listed(name: str, value: list[Any], size: str) -> list[Any] | None:
    """Shrink a list with an entry for each stage: one or two layers a stage, and
    increasing widths.
    """
    if not value or not all(isinstance(v, int) and not isinstance(v, bool) for v in value):
        return None
    if name in ("depths", "layers", "num_layers", "depth", "stage_num_blocks", "num_blocks"):
        return [min(v, 1 if v < 6 else 2) for v in value]
    if size == "small" and re.search(r"^(hidden_sizes|embed_dims?|encoder_hidden_sizes)$", name):
        smallest = min(value)
        return [max(16, 16 * v // smallest) for v in value] if smallest > 16 else None
    return None


def _layers(held: dict[str, Any], chosen: dict[str, Any]) -> None:
    """Reduce lists with an entry for each layer to one entry of each kind, and adjust the number of
    layers.
    """
    count_name = next(
        (n for n in ("num_hidden_layers", "n_layer", "num_layers", "n_layers") if n in chosen), ""
    )
    if not count_name:
        return
    before = held[count_name]
    lists = {
        name: list(value)
        for name, value in held.items()
        if isinstance(value, list | tuple) and len(value) == before
    }
    if not lists:
        return
    kinds: list[int] = []
    seen: set[str] = set()
    for place in range(before):
        kind = repr([value[place] for value in lists.values()])
        if kind not in seen and len(kinds) < 4:
            seen.add(kind)
            kinds.append(place)
    places = kinds if len(kinds) > 1 else [0, min(1, before - 1)]
    chosen[count_name] = len(places)
    for name, value in lists.items():
        chosen[name] = [value[place] for place in places]


def _heads(held: dict[str, Any], chosen: dict[str, Any]) -> None:
    """Keep as many key-value heads as query heads when both numbers were equal."""
    keys, heads = "num_key_value_heads", "num_attention_heads"
    if keys in chosen and heads in chosen and held[keys] == held[heads]:
        chosen[keys] = chosen[heads]


def _images(held: dict[str, Any], chosen: dict[str, Any], size: str) -> None:
    """Set images to 4 x 4 patches, or to 64 x 64 pixels."""
    if size == "as it is":
        return
    patch = held.get("patch_size", held.get("encoder_patch_size", 16))
    patch = patch if isinstance(patch, int) and patch else 16
    side = max(4 * patch, 64) if patch > 1 else 64
    side = side // patch * patch
    for name, value in held.items():
        if not _IMAGE.search(name):
            continue
        if isinstance(value, int) and not isinstance(value, bool) and value > side:
            chosen[name] = side
        elif (
            isinstance(value, list | tuple)
            and len(value) == 2
            and all(isinstance(v, int) and v > side for v in value)
        ):
            chosen[name] = [side, side]


def _tokens(held: dict[str, Any], chosen: dict[str, Any]) -> None:
    """Move special tokens to the end of the small vocabulary, each to an id of its own."""
    last = VOCABULARY - 1
    moved: dict[int, int] = {}
    for name, value in held.items():
        if not re.search(r"token_(id|index)$|_token$|token_ids$", name):
            continue
        if isinstance(value, int) and not isinstance(value, bool) and value >= VOCABULARY:
            if value not in moved:
                moved[value] = last
                last -= 1
            chosen[name] = moved[value]
        elif isinstance(value, list) and any(isinstance(v, int) and v > last for v in value):
            chosen[name] = [min(v, 1) for v in value]


def plain(config: Any) -> dict[str, Any]:
    """The configuration as nested dicts of plain values, without entries that name the release."""
    import json

    held = config.to_dict()
    for name in ("transformers_version", "_name_or_path", "architectures", "dtype"):
        held.pop(name, None)
    return dict(json.loads(json.dumps(held, default=str, sort_keys=True)))
