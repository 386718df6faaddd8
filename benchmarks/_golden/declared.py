"""Differences that a policy declares, quantised modules, and reduced precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from _golden.nets import Record, captured, seeded
from _golden.place import Answers, Case, Place


class _Int8(nn.Module):
    """A linear layer whose weight lies in int8, one scale a row."""

    def __init__(self, linear: Any, *, dynamic: bool = False, off: float = 1.0) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        codes = torch.round(linear.weight.detach() / scale).to(torch.int8)
        self.register_buffer("weight", codes)
        self.register_buffer("weight_scale", scale * off)
        self.bias, self.dynamic = linear.bias, dynamic

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.dynamic:
            weight = self.weight.to(x.dtype) * self.weight_scale
            return nn.functional.linear(x, weight, self.bias)
        scale = x.abs().amax(-1, keepdim=True) / 127
        codes = torch.round(x / scale).clamp(-128, 127)
        made = nn.functional.linear(codes, self.weight.to(x.dtype)) * scale
        return made * self.weight_scale[:, 0] + self.bias


def _net(change: Callable[[Any], object] = lambda model: None) -> Record:
    def build() -> nn.Module:
        layers = [nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8)]
        model = nn.Sequential(*layers).eval()
        change(model)
        return model

    return captured(build, lambda: (seeded(3, 8, 16),))


def _quantised(**how: Any) -> Callable[[Any], object]:
    def change(model: Any) -> None:
        for place in (0, 3):
            model[place] = _Int8(model[place], **how)

    return change


def _tanh(model: Any) -> None:
    model[1].approximate = "tanh"


def _bf16(model: Any) -> None:
    """One layer computes in half the width."""
    inner = model[3]
    forward = inner.forward
    inner.forward = lambda x: forward(x.bfloat16().float()).bfloat16().float()


def _declared(change: Callable[[Any], object], *entries: str) -> Case:
    def case(place: Place) -> Answers:
        place.once("ref", _net())
        place.once("tgt", _net(change))
        yield from place.compare("ref", "tgt")
        for number, entry in enumerate(entries):
            (place.folder / "policy.yaml").write_text(f"allow:\n- {{{entry}}}\n")
            yield from place.compare(
                "ref", "tgt", "--policy", "policy.yaml", to=f"declared{number}"
            )

    return case


_WEIGHTS = "op: Linear, declare: quantisation, weights: {bits: 8, per: channel}"
_BOTH = f"{_WEIGHTS}, activations: {{bits: 8, per: token, mode: dynamic}}, why: shipped"

CASES: dict[str, Case] = {
    "int8_weights": _declared(_quantised(), _WEIGHTS),
    "int8_weights_fault": _declared(_quantised(off=1.0625), _WEIGHTS),
    "int8_activations": _declared(_quantised(dynamic=True), _BOTH, _WEIGHTS),
    "fast_gelu": _declared(_tanh, 'op: "*GELU*", declare: fast-gelu'),
    "low_precision": _declared(
        _bf16,
        'module: "3", declare: tolerance, rtol: 0.0625, atol: 0.0625',
        'module: "3", declare: tolerance, ignore: true, why: not shipped',
        "op: [Linear], declare: tf32",
    ),
}
