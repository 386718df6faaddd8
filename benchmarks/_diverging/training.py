"""One training of a small model, with what may be changed in it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import whence
from _diverging.models import batch_of, model_of


@dataclass
class Training:
    """A training and its settings, which a change may replace before it begins or at a step."""

    model_name: str
    optimizer_name: str
    seed: int
    steps: int
    model: Any = None
    optimizer: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    clip: float = 1.0
    micro: int = 1
    autocast: bool = False
    smoothing: float = 0.0
    compiled: str = ""
    threads: int = 1
    averaged: Any = None
    has_average: bool = False
    decay: float = 0.9
    warm_up: int = 20
    batch: Callable[[int], tuple[Any, Any]] | None = None
    rate: Callable[[int], float] | None = None
    at_step: Callable[[Training, int], None] = lambda training, step: None
    before_step: Callable[[Training, int], None] = lambda training, step: None
    scale: float = 1.0

    def begin(self) -> None:
        """Make model and optimiser."""
        torch.manual_seed(self.seed)
        self.model = model_of(self.model_name).train()
        kinds: dict[str, Any] = {
            "adamw": (torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.01}),
            "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
            "adam": (torch.optim.Adam, {"lr": 2e-3}),
        }
        kind, options = kinds[self.optimizer_name]
        self.optimizer = kind(self.model.parameters(), **{**options, **self.options})
        self.base = self.optimizer.param_groups[0]["lr"]
        self.averaged = copy.deepcopy(self.model).eval()

    def learning_rate(self, step: int) -> float:
        """Of a step: warm-up, then a slow decay."""
        if step < self.warm_up:
            return float(self.base * (step + 1) / self.warm_up)
        return float(self.base * (1 - 0.5 * step / (4 * self.steps)))

    def loss(self, out: Any, labels: Any) -> Any:
        """Of one micro-batch."""
        if out.dim() == 3:
            out, labels = out.flatten(0, 1), labels.flatten()
        return F.cross_entropy(out.float(), labels, label_smoothing=self.smoothing) * self.scale

    def run(self, path: str | Path) -> str:
        """Train under a capture of statistics; returns the path. A run that is there is kept."""
        if (Path(path) / "run.json").exists():
            return str(path)
        self.begin()
        torch.set_num_threads(self.threads)
        self.at_step(self, -1)
        if self.compiled:
            self.model.compile(backend=self.compiled)
        seen: Any = self.model
        if self.has_average:
            seen = nn.ModuleDict({"model": self.model, "averaged": self.averaged})
        with whence.capture(seen, path, keep="stats", force=True):
            for step in range(self.steps):
                self._step(step)
        torch.set_num_threads(1)
        return str(path)

    def _step(self, step: int) -> None:
        self.at_step(self, step)
        for group in self.optimizer.param_groups:
            group["lr"] = (self.rate or self.learning_rate)(step)
        x, labels = self.batch(step) if self.batch else batch_of(self.model_name, self.seed, step)
        torch.manual_seed(7919 * self.seed + step)
        for part, wanted in zip(x.chunk(self.micro), labels.chunk(self.micro), strict=True):
            with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                out = self.model(part)
            (self.loss(out, wanted) / self.micro).backward()
        self.before_step(self, step)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.has_average:
            self._average(step, x)

    def _average(self, step: int, x: Any) -> None:
        with torch.no_grad():
            for mean, now in zip(self.averaged.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(now, 1 - self.decay)
            if step % 10 == 9:
                self.averaged(x)
