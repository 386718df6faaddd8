"""Errors of one process: what a training does rightly, and what it does with the error."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import whence

STEPS, ROWS, CLASSES = 4, 8, 10


class Digits(nn.Module):
    """A stem and two stages of convolutions with norms, and a layer of classes."""

    def __init__(self, linear: Callable[..., nn.Module] = nn.Linear) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.bn0 = nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.stage, self.bn1 = nn.Conv2d(6, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8)
        self.fc1, self.fc2 = linear(8 * 16, 24), nn.Linear(24, CLASSES)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.bn0(self.stem(pixels)))
        x = F.relu(self.bn1(self.stage(x)))
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


@dataclass
class Loop:
    """A training. batches: of each step; zero, step: called where gradients are zeroed and where
    parameters are updated, with the number of the step.
    """

    net: nn.Module
    batches: Callable[[], Any] | None = None
    held: nn.Module | None = None
    autocast: bool = False
    zero: Callable[[Loop, int], None] = lambda loop, step: loop.optimizer.zero_grad()
    step: Callable[[Loop, int], None] = lambda loop, step: loop.optimizer.step()
    optimizer: Any = field(init=False)

    def run(self, folder: Path) -> Path:
        """Capture the training into a folder."""
        parameters = (self.held or self.net).parameters()
        self.optimizer = torch.optim.AdamW([p for p in parameters if p.requires_grad], 1e-2)
        with captured(self.net, folder):
            for step, (pixels, labels) in enumerate((self.batches or images)()):
                with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                    loss = F.cross_entropy(self.net(pixels).float(), labels)
                self.zero(self, step)
                loss.backward()
                self.step(self, step)
        return folder


@contextlib.contextmanager
def captured(net: nn.Module, folder: Path) -> Iterator[None]:
    """Capture what the model does in this block."""
    with contextlib.redirect_stderr(io.StringIO()), whence.capture(net, folder):
        yield


def images() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pictures and their classes, step by step."""
    draw = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        pixels = torch.randn(ROWS, 1, 8, 8, generator=draw)
        yield pixels, torch.randint(0, CLASSES, (ROWS,), generator=draw)


def clean(folder: Path) -> Path:
    """The training without an error."""
    return Loop(Digits()).run(folder)


# ---- user code


def layers_frozen(folder: Path) -> Path:
    """All but the norms are frozen."""
    net = Digits()
    for name, parameter in net.named_parameters():
        parameter.requires_grad = "bn" in name
    return Loop(net).run(folder)


def gradients_not_zeroed(folder: Path) -> Path:
    """Gradients of earlier steps stay."""
    return Loop(Digits(), zero=lambda loop, step: None).run(folder)


class _Augmented(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Pictures shifted by what numpy draws."""

    def __init__(self) -> None:
        self._pictures = [pair for pixels, labels in images() for pair in zip(pixels, labels)]

    def __len__(self) -> int:
        return len(self._pictures)

    def __getitem__(self, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        pixels, label = self._pictures[place]
        noise = np.random.normal(size=pixels.shape).astype(np.float32)
        return pixels + torch.from_numpy(noise), label


def augmented(folder: Path, apart: bool = True) -> Path:
    """Two workers, each with random numbers of its own, or both with the same."""

    def begin(worker: int) -> None:
        np.random.seed(7 + worker * apart)

    def batches() -> Any:
        return torch.utils.data.DataLoader(
            _Augmented(), batch_size=ROWS, num_workers=2, worker_init_fn=begin
        )

    return Loop(Digits(), batches=batches).run(folder)


# ---- frameworks


def rates_of_others(folder: Path) -> Path:
    """The optimiser holds parameters of another copy of the model, as one that was made before the
    model was wrapped.
    """
    return Loop(Digits(), held=Digits()).run(folder)


def stage_frozen(folder: Path, frozen: bool = True) -> Path:
    """The first stage is frozen when the model is put into training mode, or stays as it was."""
    net = Digits()
    if frozen:
        for parameter in (*net.stem.parameters(), *net.bn0.parameters()):
            parameter.requires_grad = False
    return Loop(net).run(folder)


def under_autocast(folder: Path, applied: bool = True) -> Path:
    """A layer that autocast reaches, or one that it does not."""
    net = Digits()
    if not applied:
        forward = net.fc1.forward

        def in_full(x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", enabled=False):
                return forward(x.float())

        net.fc1.forward = in_full  # type: ignore[method-assign]
    return Loop(net, autocast=True).run(folder)


def paused(folder: Path, stuck: bool = False) -> Path:
    """One step in which there are no gradients; a compiled step may stay with its graph."""
    alive = [True]

    def step(loop: Loop, number: int) -> None:
        if number == 1:
            loop.optimizer.zero_grad()
            alive[0] = not stuck
        if alive[0]:
            loop.optimizer.step()

    return Loop(Digits(), step=step).run(folder)


def spectral(folder: Path, trained_first: bool = True) -> Path:
    """An evaluation behind or before the first call in training mode."""

    def normed(*extents: int) -> nn.Module:
        return nn.utils.spectral_norm(nn.Linear(*extents))

    net, pixels = Digits(normed), next(images())[0]
    if trained_first:
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        net(pixels)
    net.eval()
    with torch.no_grad(), captured(net, folder):
        net(pixels)
    return folder


def resumed(folder: Path, whole: bool = True) -> Path:
    """Continues from a checkpoint, which may lack the frozen parameters."""
    first = Digits()
    with torch.no_grad():
        first.stem.weight += 0.1  # of a pretraining
    first.stem.requires_grad_(False)
    kept = {
        name: value
        for name, value in first.state_dict().items()
        if whole or not name.startswith("stem")
    }
    net = Digits()
    net.load_state_dict(kept, strict=False)
    net.stem.requires_grad_(False)
    return Loop(net).run(folder)


# ---- models of transformers


class Decoder(nn.Module):
    """A small decoder of two blocks."""

    def __init__(self, dropout: float = 0.0, always: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(40, 16)
        self.blocks = nn.ModuleList(_Mixer(dropout, always) for _ in range(2))
        self.head = nn.Linear(16, 40, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class _Mixer(nn.Module):
    def __init__(self, dropout: float, always: bool) -> None:
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self._dropout, self._always = dropout, always

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        share = self._dropout if self.training or self._always else 0.0
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=share)
        return x + self.proj(seen)


IDS = torch.arange(24).reshape(2, 12) % 40


def initialized(folder: Path, repeated: bool = False) -> Path:
    """Weights drawn once, or those of projections again for each module that holds them."""
    net = Decoder()
    torch.manual_seed(3)
    for module in net.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.2)
        if repeated or isinstance(module, _Mixer):
            for name, weight in module.named_parameters():
                if name.endswith("proj.weight"):
                    nn.init.normal_(weight, std=0.1)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    with captured(net, folder):
        for _ in range(2):
            loss = F.cross_entropy(net(IDS[:, :-1]).flatten(0, 1), IDS[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return folder


def generated(folder: Path, limited: bool = True) -> Path:
    """Three new tokens behind a prompt that is cut to the window, or as many as the prompt had
    before it was cut.
    """
    window, new = 6, 3
    net, prompt = Decoder().eval(), IDS[:1]
    length = prompt[:, -window:].shape[1] if limited else prompt.shape[1]
    ids = prompt[:, -window:]
    with torch.no_grad(), captured(net, folder):
        while ids.shape[1] < length + new:
            ids = torch.cat((ids, net(ids)[:, -1:].argmax(-1)), 1)
    return folder


def processed(folder: Path, as_batch: bool = True) -> Path:
    """Sequences of a batch, or all of them in one row."""
    net = Decoder()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    ids = IDS if as_batch else IDS.reshape(1, -1)
    with captured(net, folder):
        for _ in range(2):
            loss = F.cross_entropy(net(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return folder


def evaluated(always: bool) -> nn.Module:
    """A model in evaluation mode, with dropout in its attention where it is `always` on."""
    return Decoder(0.3, always).eval()
