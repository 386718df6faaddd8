"""Capture options that no engine supports."""

from __future__ import annotations

from collections.abc import Collection

from whence.errors import UsageError
from whence.instrument.options import CaptureOptions

_OF_TORCH = {
    "force_tokens": "forces tokens on",
    "inject": "plants faults in",
    "patch": "replaces tensors of",
    "logits_module": "names a module of",
}


def check_listening(options: CaptureOptions, model: str, *, allowed: Collection[str] = ()) -> None:
    """Raise UsageError for options that change a program or apply to torch only. model: what the
    engine runs, in words. allowed: names of options that it takes all the same.
    """
    for name, acts in _OF_TORCH.items():
        if getattr(options, name) and name not in allowed:
            raise UsageError(
                f"{name} {acts} a torch model; {model} is only listened to: leave {name} out"
            )
