"""Inputs for a model of transformers, from argument names and the sizes in its configuration."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from . import values

_PRODUCT = re.compile(r"\(\d+x(\d+) and (\d+)x\d+\)")
"""What torch says of two matrices that cannot be multiplied."""
_PATCHES = re.compile(r"shape '\[-1, ([\d, ]+)\]' is invalid for input")
"""What torch says of an image that is no list of patches."""
BATCH, TOKENS, TEXT_IDS = 2, 9, (3, 90)
_SOUND = ("input_features", "input_values", "spectrogram", "audio_values")
_GRID = (4, 4)
"""Rows and columns of patches in an image that is passed as a list of patches."""
_ROWS_OF: dict[str, tuple[str, ...]] = {
    "states": ("state_dim",),
    "actions": ("act_dim",),
    "rewards": (),
    "returns_to_go": (),
    "visual_feats": ("visual_feat_dim",),
    "encoder_hidden_states": (
        "encoder_hidden_size",
        "cross_attention_dim",
        "hidden_size",
        "d_model",
    ),
}
"""Inputs with a row for each token, and the settings that have its width, 1 where there is none."""
_BESIDE = {"input_ids": ("attention_mask", "decoder_input_ids")}
"""Optional inputs that are given wherever a model takes them, by its main input."""


def _patch_width(error: str) -> int:
    """Numbers in a patch of an image, as an error says it; else 0."""
    if sizes := _PATCHES.search(error):
        return math.prod(int(size) for size in sizes[1].split(","))
    if product := _PRODUCT.search(error):
        return int(product[2])
    return 0


def _frames(sound: Any, kind: int) -> tuple[int, int]:
    """Rows and moments of sound of that shape."""
    return len(sound), sound.shape[1 + (kind == 2)] if sound.ndim == 3 else sound.shape[-1]


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
        own = getattr(self._model, "main_input_name", "") or ""
        if isinstance(own, list | tuple):
            own = own[0]
        if own in self.accepted:
            return str(own)
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
        if "grid_thw" in " ".join(self.accepted) and (width := _patch_width(str(error))):
            patches = (_GRID[0] * _GRID[1], width)
            main = self.main()
            if given[main].shape != patches:
                more[main] = values.drawn(main, patches)
        elif sizes := _PRODUCT.search(str(error)):
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
        makers = (
            (r"(^|_)(input_ids|labels)$", self._tokens),
            (r"^past_(values|observed_mask)$", self._series),
            (r"^(?!cross).*_mask$", self._mask),
            (r"^(pixel_values.*|image|images|inputs)$", self._pixels),
            (f"^({'|'.join(_SOUND)})$", self._sound),
            ("^flattened_patches$", self._patches),
        )
        make = next((make for pattern, make in makers if re.search(pattern, name)), self._simple)
        return make(name, kind)

    def _simple(self, name: str, _kind: int) -> Any:
        """An input whose shape hangs on no other, None of an unknown name."""
        if name in _ROWS_OF:
            width = self._setting(*_ROWS_OF[name], default=1)
            return values.drawn(name, (BATCH, TOKENS, width))
        if name in ("token_type_ids", "position_ids", "timesteps"):
            counted = np.arange(TOKENS) if name != "token_type_ids" else 0
            return np.zeros((BATCH, TOKENS), np.int64) + counted
        if name == "bbox":
            corners = values.integers(name, (BATCH, TOKENS, 2), 1, 40)
            return np.concatenate([corners, corners + 20], -1)
        fixed = {
            "image_grid_thw": np.array([[1, *_GRID]], np.int64),
            "grid_thw": np.array([[1, *_GRID]], np.int64),
            "spatial_shapes": np.array([_GRID] * BATCH, np.int64),
            "target_sizes": np.array([_GRID] * BATCH, np.int64),
            "visual_pos": np.abs(values.drawn(name, (BATCH, TOKENS, 4))),
            "is_longer": np.array([[True], [False]]),
        }
        return fixed.get(name)

    def _tokens(self, name: str, _kind: int) -> Any:
        low, high = TEXT_IDS
        known = self._setting("vocab_size", default=high)
        return values.integers(name, (BATCH, TOKENS), low, max(low + 1, min(high, known)))

    def _patches(self, name: str, _kind: int) -> Any:
        """Patches of an image in rows of their own, behind their place in it."""
        count, side = math.prod(_GRID), self._setting("patch_size", default=16)
        places = np.stack(np.divmod(np.arange(1, count + 1), _GRID[1]), -1).astype(np.float32)
        numbers = values.drawn(name, (BATCH, count, 3 * side * side))
        return np.concatenate([np.broadcast_to(places, (BATCH, count, 2)), numbers], -1)

    def _mask(self, name: str, kind: int) -> Any:
        """Ones, but for two padded places of the last row: of tokens, or of the sound or images
        that it is named after.
        """
        data = re.sub("_(attention_)?mask$", "", name)
        subject = next(
            (n for n in self.accepted if n != name and data in n and "mask" not in n), ""
        )
        sound = subject or next((n for n in self.accepted if n in _SOUND), "")
        array = (
            self._sound(sound, kind)
            if sound in _SOUND and name != "decoder_attention_mask"
            else None
        )
        sizes = (BATCH, TOKENS) if array is None else _frames(array, kind)
        if name == "pixel_mask":
            pixels = self._pixels("pixel_values", kind)
            sizes = (len(pixels), *pixels.shape[-2:])
        mask = np.ones(sizes, np.int64)
        mask[-1, -2:] = 0
        return mask

    def _series(self, name: str, kind: int) -> Any:
        """Values of the past: as many as the context and the longest lag behind it."""
        lags = getattr(self._config, "lags_sequence", None) or [0]
        length = self._setting("context_length", default=64) + max(lags)
        one = self._setting("input_size", "num_input_channels", default=1) == 1 and kind
        sizes = (BATCH, length) if one or lags != [0] else (BATCH, length, 1)
        return np.ones(sizes, np.float32) if "mask" in name else values.drawn(name, sizes)

    def _pixels(self, name: str, kind: int) -> Any:
        channels = self._setting("num_channels", "in_channels", "in_chans", default=3)
        side = self._setting("image_size", "img_size", "input_size", default=64)
        side = min(side, 384) if side > 3 else 64
        size = getattr(self._config, "image_size", None)
        if isinstance(size, list | tuple) and len(size) == 2:
            return values.drawn(name, (BATCH, channels, *size))
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
            "input_size",
            default=80,
        )
        if name == "input_values" and kind == 0 and not self._setting("num_mel_bins"):
            return 0.3 * values.drawn(name, (BATCH, 4000))
        if name == "input_values" and kind == 1:
            return 0.3 * values.drawn(name, (BATCH, 1, 4000))
        length = self._setting("max_length", default=64) if name == "input_values" else 64
        if "is_longer" in self.accepted:
            return values.drawn(name, (BATCH, 1, length, bins))
        positions = self._setting("max_source_positions")
        if positions and kind == 0:
            return values.drawn(name, (BATCH, bins, 2 * positions))
        shape = (BATCH, bins, length) if kind == 2 else (BATCH, length, bins)
        return values.drawn(name, shape)
