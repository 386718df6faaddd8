"""Inputs for a model of transformers, from argument names and the sizes in its configuration."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from . import values

BATCH, TOKENS, TEXT_IDS = 2, 9, (3, 90)


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
        """Sets of inputs, the most likely first."""
        first = self.main()
        for kind in range(3):
            main = self.array(first, kind)
            if main is None:
                return
            chosen = {first: main}
            for name in self._beside(first):
                extra = self.array(name, kind)
                if extra is not None:
                    chosen[name] = extra
            yield chosen
            if len(chosen) > 1:
                yield {first: main}
            if not isinstance(main, np.ndarray) or main.ndim < 2 or first == "input_ids":
                return

    def _beside(self, first: str) -> list[str]:
        """Names of the inputs that accompany the first one."""
        names = [
            name
            for name, parameter in self.accepted.items()
            if parameter.default is inspect.Parameter.empty and name != first
        ]
        encoder_decoder = getattr(self._config, "is_encoder_decoder", False)
        if first == "input_ids" and "attention_mask" in self.accepted:
            names.append("attention_mask")
        if encoder_decoder and "decoder_input_ids" in self.accepted:
            names.append("decoder_input_ids")
        if (
            first == "pixel_values"
            and "input_ids" in self.accepted
            and (hasattr(self._config, "text_config"))
        ):
            names.append("input_ids")
        if first == "input_ids" and re.search(
            r"clip|siglip|align|blip|flava", self._config.model_type
        ):
            names += [n for n in ("pixel_values",) if n in self.accepted]
        return list(dict.fromkeys(names))

    def asked_for(self, message: str, given: dict[str, Any]) -> list[str]:
        """Inputs that an error message names and that were not given."""
        names = [n for n in self.accepted if n not in given and re.search(rf"\b{n}\b", message)]
        return [n for n in names if self.array(n, 0) is not None]

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
