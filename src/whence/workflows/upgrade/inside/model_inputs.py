"""Inputs for a model of transformers, from argument names and the sizes in its configuration."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from . import values

_PRODUCT = re.compile(r"\(\d+x(\d+) and (\d+)x\d+\)")
"""What torch says of two matrices that cannot be multiplied."""
BATCH, TOKENS, TEXT_IDS = 2, 9, (3, 90)
_BESIDE = {"input_ids": ("attention_mask", "decoder_input_ids")}
"""Optional inputs that are given wherever a model takes them, by its main input."""


class Inputs:
    """Builds possible inputs for one model."""

    def __init__(self, model: Any) -> None:
        self._model, self._config = model, model.config
        self.accepted = {
            name: parameter
            for name, parameter in inspect.signature(model.forward).parameters.items()
            if parameter.kind is not parameter.VAR_KEYWORD and name != "return_dict"
        }

    def main(self) -> str:
        """The name of the first input: the model's main input if its forward accepts it."""
        own: str = getattr(self._model, "main_input_name", "") or ""
        if own in self.accepted:
            return own
        return next(iter(self.accepted), own)

    def candidates(self) -> Iterator[dict[str, Any]]:
        """Sets of inputs: first what forward requires, then everything that it takes and that is
        known, since what a model needs besides depends on its configuration.
        """
        first = self.main()
        required = [n for n, p in self.accepted.items() if p.default is inspect.Parameter.empty]
        needed = dict.fromkeys([first, *required, *_BESIDE.get(first, ())])
        for names in (needed, (first, *self.accepted)):
            for kind in range(3):
                arrays = {n: self.array(n, kind) for n in names if n in self.accepted}
                known = {n: array for n, array in arrays.items() if array is not None}
                yield known | {n: self.vectors(n) for n in needed if n in arrays.keys() - known}

    def vectors(self, name: str) -> Any:
        """An input of an unknown name: a vector of the model's width for each token."""
        width = self._setting("hidden_size", "d_model", "embed_dim", "n_embd", default=64)
        return values.drawn(name, (BATCH, TOKENS, width))

    def asked_for(self, error: Exception, given: dict[str, Any]) -> dict[str, Any]:
        """Inputs that an error names, or the code that it went through, and that were not given;
        and vectors of the width that the weight they are multiplied by has.
        """
        words = values.words(error)
        missing = [n for n in self.accepted if n not in given and n in words]
        more = {n: array for n in missing if (array := self.array(n, 0)) is not None}
        if sizes := _PRODUCT.search(str(error)):
            had, wants = int(sizes[1]), int(sizes[2])
            more |= {
                name: values.drawn(name, (*array.shape[:-1], wants))
                for name, array in given.items()
                if array.dtype == np.float32 and array.shape[-1] == had
            }
        return more

    def _setting(self, *names: str, default: int = 0) -> int:
        """The first of these numbers in the configuration or its nested configurations."""
        inner = [self._config]
        inner += [v for v in vars(self._config).values() if hasattr(v, "model_type")]
        for name in names:
            for config in inner:
                value = getattr(config, name, None)
                if isinstance(value, list | tuple) and value:
                    value = value[0]
                if isinstance(value, int) and not isinstance(value, bool):
                    return value
        return default

    def array(self, name: str, kind: int) -> Any:
        """An input array, None when nothing is known about its name.

        kind: 0 for the most likely shape, 1 and 2 for other shapes that models expect.
        """
        if re.search(r"(^|_)(input_ids|labels)$", name):
            return values.integers(name, (BATCH, TOKENS), *TEXT_IDS)
        if name.endswith("attention_mask") and "cross" not in name:
            mask = np.ones((BATCH, TOKENS), np.int64)
            mask[-1, -2:] = 0
            return mask
        if name in ("token_type_ids", "position_ids"):
            return np.zeros((BATCH, TOKENS), np.int64) + (name[0] == "p") * np.arange(TOKENS)
        if name == "bbox":
            corners = values.integers(name, (BATCH, TOKENS, 2), 1, 40)
            return np.concatenate([corners, corners + 20], -1)
        if name.startswith("pixel_values") or name in ("image", "images", "inputs"):
            return self._pixels(name, kind)
        if name in ("input_features", "input_values", "spectrogram", "audio_values"):
            return self._sound(name, kind)
        if name == "past_values":
            return values.drawn(name, (BATCH, self._setting("context_length", default=64), 1))[
                ...,
                0
                if self._setting("input_size", "num_input_channels", default=1) == 1 and kind
                else slice(None),
            ]
        return None

    def _pixels(self, name: str, kind: int) -> Any:
        channels = self._setting("num_channels", "in_channels", "in_chans", default=3)
        side = self._setting("image_size", "img_size", "input_size", default=64)
        side = min(side, 384) if side > 3 else 64
        frames = self._setting("num_frames", "tubelet_size", "frames_per_clip", default=0)
        if (kind == 0) == bool(frames):
            return values.drawn(name, (1, frames or 2, channels, side, side))
        if kind == 2:
            return values.drawn(name, (BATCH, channels, 224, 224))
        return values.drawn(name, (BATCH, channels, side, side))

    def _sound(self, name: str, kind: int) -> Any:
        bins = self._setting(
            "num_mel_bins",
            "feature_size",
            "input_feat_per_channel",
            "num_mel_channels",
            "n_mels",
            "feature_projection_input_dim",
            default=80,
        )
        if name == "input_values" and kind == 0 and not self._setting("num_mel_bins"):
            return 0.3 * values.drawn(name, (BATCH, 4000))
        if name == "input_values" and kind == 1:
            return 0.3 * values.drawn(name, (BATCH, 1, 4000))
        length = self._setting("max_length", default=64) if name == "input_values" else 64
        positions = self._setting("max_source_positions")
        if positions and kind == 0:
            return values.drawn(name, (BATCH, bins, 2 * positions))
        shape = (BATCH, bins, length) if kind == 2 else (BATCH, length, bins)
        return values.drawn(name, shape)
