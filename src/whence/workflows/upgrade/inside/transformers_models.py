"""Builds every architecture of the installed transformers release from a small configuration."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from . import model_inputs, named_settings, tiny_configs, values

LARGEST = 130_000_000
_REPAIRS = 5
"""How often a model is tried again with what its error asks for."""
_ASKED_FOR = 8
"""A number that a configuration leaves open and its model needs."""
_HEADS = (
    "SPEECH_SEQ_2_SEQ",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "IMAGE_TEXT_TO_TEXT",
    "MASKED_LM",
    "CAUSAL_LM",
    "CTC",
    "IMAGE_CLASSIFICATION",
    "VIDEO_CLASSIFICATION",
    "OBJECT_DETECTION",
    "UNIVERSAL_SEGMENTATION",
    "SEMANTIC_SEGMENTATION",
    "DEPTH_ESTIMATION",
    "AUDIO_CLASSIFICATION",
    "TIME_SERIES_PREDICTION",
)


class CannotBuild(Exception):
    """No small configuration of an architecture gives a model that runs."""


def names() -> list[str]:
    """Types of models that have a class."""
    from transformers.models.auto import modeling_auto

    found: set[str] = set()
    for mapping in dir(modeling_auto):
        if mapping.startswith("MODEL_") and mapping.endswith("MAPPING_NAMES"):
            found |= set(getattr(modeling_auto, mapping))
    return sorted(found)


def classes(name: str) -> list[str]:
    """Names of the classes of one model type; those with a head come first."""
    from transformers.models.auto import modeling_auto

    mappings = [f"MODEL_FOR_{head}_MAPPING_NAMES" for head in _HEADS]
    others = [m for m in dir(modeling_auto) if m.startswith("MODEL_FOR") and m.endswith("_NAMES")]
    order = [*mappings, "MODEL_MAPPING_NAMES", *others]
    found: list[str] = []
    for mapping in order:
        entry = getattr(modeling_auto, mapping, {}).get(name, ())
        found += [entry] if isinstance(entry, str) else list(entry)
    return list(dict.fromkeys(found))


class Run(NamedTuple):
    """A model that runs.

    chosen: its class, its size, and the shapes of its inputs. settings: its configuration. missing:
    weights that a checkpoint lacked.
    """

    model: Any
    inputs: dict[str, Any]
    chosen: dict[str, Any]
    settings: dict[str, Any]
    missing: tuple[str, ...]


def build(
    name: str,
    chosen: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    checkpoint: str = "",
) -> Run:
    """Build an architecture that runs.

    chosen: as another process found it; None to search. settings: values of the configuration to
    set. checkpoint: folder whose weights are loaded as the release loads them. Raises CannotBuild
    with the message of each attempt.
    """
    said: list[str] = []
    attempts = (
        [(chosen["class"], chosen["size"])]
        if chosen
        else [(c, s) for c in classes(name)[:3] for s in (*tiny_configs.SIZES, None)]
    )
    for class_name, size in attempts:
        try:
            kind, config = _default(name, class_name)
            if size is None:
                size = _searched(kind, config)
            arguments = tiny_configs.small(config, size) if isinstance(size, str) else size
            arguments = tiny_configs.joined(arguments, named_settings.BY_TYPE.get(name, {}))
            config = tiny_configs.smaller(config, arguments)
            _set(config, settings or {})
            model, missing, inputs = _that_runs(
                kind, config, checkpoint, (chosen or {}).get("inputs")
            )
        except Exception as error:  # noqa: BLE001 - whatever a library raises for sizes that it cannot have
            tried = size if isinstance(size, str) else "searched"
            words = f"{class_name}, {tried}: {type(error).__name__}: {error}"
            said.append(" ".join(words.split())[:300])
            continue
        shapes = {key: list(value.shape) for key, value in inputs.items()}
        again = {"class": class_name, "size": size, "inputs": shapes}
        return Run(model, inputs, again, tiny_configs.plain(model.config), missing)
    raise CannotBuild("; ".join(said) or "it has no class")


def _default(name: str, class_name: str) -> tuple[Any, Any]:
    """A class and its configuration as it is."""
    import transformers
    from transformers import CONFIG_MAPPING

    kind = getattr(transformers, class_name)
    config_class = getattr(kind, "config_class", None) or CONFIG_MAPPING[name]
    if getattr(config_class, "model_type", name) != name and name in CONFIG_MAPPING:
        config_class = CONFIG_MAPPING[name]
    return kind, config_class()


def _searched(kind: Any, config: Any) -> tiny_configs.Arguments:
    """Settings for a small model, each tried without numbers (on the device "meta")."""
    import torch

    def failure(arguments: tiny_configs.Arguments) -> str:
        try:
            changed = tiny_configs.smaller(config, arguments)
            _weights(kind, changed)
            with torch.device("meta"):
                model = kind(changed)
                arrays = next(model_inputs.Inputs(model).candidates(), {})
                run(model, arrays, "meta")
        except NotImplementedError:  # a model that branches on numbers, which "meta" does not have
            return ""
        except Exception as error:  # noqa: BLE001 - models raise anything for sizes that do not fit
            words = re.sub(r"[\d\s,\[\]()]+", " ", f"{type(error).__name__} {error}")
            return "" if "meta" in words else words[:200]
        return ""

    return tiny_configs.searched(config, failure)


def _that_runs(
    kind: Any, config: Any, checkpoint: str, shapes: dict[str, list[int]] | None
) -> tuple[Any, tuple[str, ...], dict[str, Any]]:
    """A model, the weights that a checkpoint lacked, and inputs. Lists of sizes in the
    configuration are changed once where the model says that they do not fit.
    """
    model, missing = _model(kind, config, checkpoint)
    try:
        return model, missing, _inputs(model, shapes)
    except CannotBuild as error:
        if not tiny_configs.scaled_parts(error, config):
            raise
    model, missing = _model(kind, config, checkpoint)
    return model, missing, _inputs(model, shapes)


def _model(kind: Any, config: Any, checkpoint: str) -> tuple[Any, tuple[str, ...]]:
    import torch

    weights = _weights(kind, config)
    if weights > LARGEST:
        raise CannotBuild(f"{weights:,} weights")
    if checkpoint:
        model, info = kind.from_pretrained(
            checkpoint, config=config, dtype=torch.float32, output_loading_info=True
        )
        missing = tuple(sorted(info["missing_keys"]))
        values.fill(model, only=missing)
    else:
        model, random = values.buffers_drawn(lambda: kind(copy.deepcopy(config)).float())
        values.fill(model, random=random)
        missing = ()
    model.eval()
    return model, missing


def _weights(kind: Any, config: Any) -> int:
    """The number of weights of a model. Settings that the model asks for are filled in."""
    import torch

    for left in reversed(range(_REPAIRS)):
        try:
            with torch.device("meta"):
                return sum(p.numel() for p in kind(copy.deepcopy(config)).parameters())
        except (
            Exception
        ) as error:  # whatever a model raises; raised again where it asks for nothing
            unset = tiny_configs.asked_for(error, config)
            if not unset or not left:
                raise
            for inner, name in unset:
                setattr(inner, name, _ASKED_FOR)
    return 0


def _set(config: Any, settings: dict[str, Any]) -> None:
    for key, value in settings.items():
        inner = getattr(config, key, None)
        if isinstance(value, dict) and hasattr(inner, "model_type"):
            _set(inner, value)
        else:
            setattr(config, key, value)


def _inputs(model: Any, shapes: dict[str, list[int]] | None) -> dict[str, Any]:
    """The first set of inputs on which the model runs."""
    wanted = model_inputs.Inputs(model)
    if shapes is not None:
        return {name: _of_shape(wanted, name, shape) for name, shape in shapes.items()}
    why = ""
    tried: list[dict[str, list[int]]] = []
    for candidate in wanted.candidates():
        given = dict(candidate)
        forms = {name: list(array.shape) for name, array in given.items()}
        if forms in tried:
            continue
        tried.append(forms)
        for _ in range(_REPAIRS):
            try:
                run(model, given)
                return given
            except Exception as error:  # noqa: BLE001 - what it says may name the input that it misses
                more = wanted.asked_for(error, given)
                if not more:
                    why = why or f"{type(error).__name__}: {error}"
                    break
                given |= more
    raise CannotBuild(why or f"nothing is known of the input {wanted.main()}")


def _of_shape(wanted: model_inputs.Inputs, name: str, shape: list[int]) -> Any:
    for array in (*(wanted.array(name, kind) for kind in range(3)), values.drawn(name, shape)):
        if array is not None and list(array.shape) == shape:
            return array
    raise CannotBuild(f"{name} of shape {shape} is not an input here")


def run(model: Any, inputs: dict[str, Any], device: str = "cpu") -> Any:
    """Try a model."""
    import torch

    torch.manual_seed(0)
    with torch.no_grad():
        return model(**{name: torch.from_numpy(array).to(device) for name, array in inputs.items()})


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the library while it builds."""
    import warnings

    from transformers.utils import logging

    logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
