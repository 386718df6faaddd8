"""Pairs of torch modules: equal, in other dtypes, written otherwise, and with a planted fault."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import whence
from _golden.nets import (
    IDS,
    Attention,
    Gain,
    Images,
    Record,
    blocks,
    captured,
    language,
    seeded,
)
from _golden.place import Answers, Case, Place, pair

Change = Callable[[Any], object]


def _set(name: str, attribute: str, value: object) -> Change:
    return lambda model: setattr(model.get_submodule(name), attribute, value)


def _scaled(name: str, factor: float) -> Change:
    return lambda model: model.get_submodule(name).weight.data.mul_(factor)


def _hooked(name: str, change: Callable[[Any], Any]) -> Change:
    """A module that returns something else than it computes."""
    return lambda model: model.get_submodule(name).register_forward_hook(
        lambda module, given, out: change(out)
    )


_EPS = _set("layers.1.input_norm", "eps", 1e-2)
_REFERENCE = captured(language())


def _in_both(*changes: Change) -> Change:
    def change(model: Any) -> None:
        for one in changes:
            one(model)

    return change


def _images(weight: float = 1.0, **options: Any) -> Record:
    def build() -> nn.Module:
        model = Images().eval()
        model.conv.weight.data.mul_(weight)
        return model

    def drive(model: Any) -> None:
        for step in range(2):
            model(seeded(2, 3, 6, 6, seed=step))

    return captured(build, drive=drive, **options)


def _steps(model: Any) -> None:
    for step in range(4):
        model((IDS + step) % 40)


# ---- written otherwise


def _folded() -> nn.Module:
    """A factor per channel moved from the first block's norm to the linear behind it."""
    model, factor = blocks(1.0, 1.0), torch.linspace(0.5, 3.5, 16)
    model[1].norm.weight.data.div_(factor)
    model[1].norm.bias.data.div_(factor)
    model[1].up.weight.data.mul_(factor)
    return model


class _Shared(nn.Module):
    """Parts of `Blocks` under other names, their order of registration turned round."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.unembed, self.fin = model[4], model[3]
        self.second, self.first, self.stem = model[2], model[1], model[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.unembed(self.fin(self.second(self.first(self.stem(x)))))


class _Head(nn.Module):
    def __init__(self, returned: Callable[[Any], Any] = lambda y: y) -> None:
        super().__init__()
        self.layer, self.returned = nn.Linear(8, 10), returned

    def forward(self, x: torch.Tensor) -> Any:
        return self.returned(torch.relu(self.layer(x)))


class _Norm(nn.Module):
    def __init__(self, eps: float, *, fused: bool) -> None:
        super().__init__()
        self.eps, self.fused, self.weight = eps, fused, nn.Parameter(torch.rand(8) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fused:
            return F.rms_norm(x, (8,), self.weight, self.eps)
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class _Mixed(nn.Module):
    """Attention in one operator or written out, and a norm of either kind."""

    def __init__(self, scale: float = 0.5, eps: float = 1e-6, *, fused: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.norm, self.fused, self.scale = _Norm(eps, fused=fused), fused, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (f(y).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, scale=self.scale)
        else:
            y = (q @ k.transpose(-1, -2) * self.scale).softmax(-1) @ v
        return x + self.o(y.transpose(1, 2).flatten(-2))


class _Opaque(nn.Module):
    """Computes through numpy, which no program sees, in an order of its own."""

    def __init__(self, *, backwards: bool = False) -> None:
        super().__init__()
        self.backwards, self.up = backwards, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x).numpy()
        if self.backwards:
            return torch.from_numpy(y[..., ::-1].cumsum(-1)[..., -1:].copy()) + x
        return torch.from_numpy(y.cumsum(-1)[..., -1:].copy()) + x


def _level(module: Callable[[], nn.Module], *shape: int, level: str = "op") -> Record:
    return captured(module, lambda: (seeded(*shape),), level=level)


def _mixed(**how: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(8, 8), _Mixed(**how), nn.Linear(8, 8)).eval()


# ---- many ways to write one decoder


def _decoder(way: str, change: Change | None = None) -> Record:
    def record(path: Path) -> None:
        import layout_models as lm

        torch.manual_seed(0)
        ways = {
            "split": lm.Decoder,
            "fused": lambda: lm.fused(lm.Decoder()),
            "heads": lambda: lm.fused(lm.Decoder(), "heads", turned=True),
            "conv1d fused": lambda: lm.fused(lm.Decoder(), "heads", lm.Conv1D),
            "paired": lambda: lm.paired(lm.Decoder()),
            "conv1d": lambda: lm.conv1d(lm.Decoder()),
            "served": lambda: lm.Served(lm.Decoder()),
        }
        model = ways[way]().eval()
        if change is not None:
            change(model)
        ids = lm.IDS[:1] if way != "served" else lm.IDS[0]
        with torch.no_grad(), whence.capture(model, path):
            model(ids)

    return record


def _pictures(*, folded: bool, gain: float = 1.0) -> Record:
    def record(path: Path) -> None:
        import layout_models as lm

        model = lm.Pictures().eval()
        if folded:
            model = lm.folded(model)
        model.head.weight.data.mul_(gain)
        with torch.no_grad(), whence.capture(model, path):
            model(seeded(2, 3, 7, 7))

    return record


def _engine(*, serving: bool, fault: bool = False) -> Record:
    def record(path: Path) -> None:
        import served_net as net

        model = net.Engine(net.Library()).eval() if serving else net.Library().eval()
        if fault:
            model.model.norm.weight.data.mul_(1.125)
        with torch.no_grad(), whence.capture(model, path):
            (net.serve if serving else net.ask)(model)

    return record


def _encoder(*, fast: bool, eps: float = 1e-5) -> Record:
    mask = torch.arange(10)[None] >= torch.tensor((10, 7, 4, 2))[:, None]

    def record(path: Path) -> None:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=fast).eval()
        model.layers[1].norm1.eps = model.layers[1].norm2.eps = eps
        torch.backends.mha.set_fastpath_enabled(fast)
        try:
            with torch.no_grad(), whence.capture(model, path):
                model(seeded(4, 10, 32), src_key_padding_mask=mask)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)

    return record


# ---- more runs than two


class _AnyOrder(nn.Module):
    """Adds what a generator draws that no capture sees."""

    draws = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = (torch.arange(x.numel()).reshape(x.shape) * 7 + type(self).draws) % 5 != 0
        return torch.from_numpy(x.numpy() * kept.numpy()) / 0.8


def _unrepeated(draw: int, gain: float = 1.0) -> Record:
    def build() -> nn.Module:
        _AnyOrder.draws = draw
        return nn.Sequential(
            nn.Linear(8, 32), _AnyOrder(), Gain(gain), nn.Linear(32, 8), nn.Tanh()
        ).eval()

    return captured(build, lambda: (seeded(16, 8),))


def _again(gain: float) -> Case:
    def case(place: Place) -> Answers:
        for number, name in enumerate(("ref", "again1", "again2")):
            place.once(name, _unrepeated(number))
        place.once("tgt", _unrepeated(3, gain))
        yield from place.compare("ref", "tgt", "--again", "again1", "--again", "again2")

    return case


class _Rounds(nn.Module):
    """Rounds to `bits` fractional bits by numpy, so that nothing can be replayed."""

    def __init__(self, bits: int, gain: float = 1.0) -> None:
        super().__init__()
        self.bits, self.gain = bits, gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = (x.float().numpy() * 2**self.bits).round() / 2**self.bits * self.gain
        return torch.from_numpy(found).to(x.dtype)


def _coarse(bits: int, gain: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Record:
    return captured(
        lambda: (
            nn.Sequential(nn.Linear(8, 16), _Rounds(bits, gain), nn.Linear(16, 4)).eval().to(dtype)
        ),
        lambda: (seeded(16, 8).to(dtype),),
    )


def _third(bits: int, gain: float = 1.0) -> Case:
    def case(place: Place) -> Answers:
        place.once("ref", _coarse(3))
        place.once("tgt", _coarse(bits, gain))
        place.once("third", _coarse(20, dtype=torch.float32))
        yield from place.compare("ref", "tgt", "--third", "third")

    return case


# ---- inputs


def _given(mask: list[int], **how: Any) -> Record:
    given = {"ids": IDS, "attention_mask": torch.tensor([mask, [1] * 8])}
    return captured(lambda: Attention(**how), lambda: given)


_PADDED = [0, 0, 1, 1, 1, 1, 1, 1]


class _Positions(nn.Module):
    """Learnt positions that the caller gives; where they are read is for the caller to say."""

    def __init__(self, *, reads: bool = True) -> None:
        super().__init__()
        self.embed, self.place, self.head = (
            nn.Embedding(40, 16),
            nn.Embedding(16, 16),
            nn.Linear(16, 8),
        )
        self.reads = reads

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        return self.head(x + self.place(position_ids) if self.reads else x)


def _positions(first: int, *, reads: bool = True) -> Record:
    given = {"input_ids": IDS, "position_ids": torch.arange(8)[None] + first}
    return captured(lambda: _Positions(reads=reads).eval(), lambda: given)


def _checkpoint(*names: str, gain: float = 1.0) -> Record:
    """Parameters alone, as a file of weights holds them."""

    def record(path: Path) -> None:
        from safetensors.torch import save_file

        torch.manual_seed(0)
        state = {k: v.clone() for k, v in blocks(1.0, 1.0).state_dict().items()}
        state["4.weight"] *= gain
        path.mkdir()
        save_file({k: v for k, v in state.items() if k not in names}, path / "model.safetensors")

    return record


class _Draws(nn.Module):
    def __init__(self, rate: float, width: float = 1.0) -> None:
        super().__init__()
        self.lift, self.drop, self.lower = nn.Linear(16, 16), nn.Dropout(rate), nn.Linear(16, 16)
        self.width = width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(torch.tanh(self.lift(x)))
        return self.lower(x + torch.empty_like(x).normal_(0.0, self.width))


def _drawing(rate: float, width: float = 1.0) -> Record:
    return captured(lambda: _Draws(rate, width), lambda: (seeded(32, 64, 16),))


class _Router(nn.Module):
    """Two of four experts for each row; scores of some rows are equal."""

    def __init__(self, *, turned: bool) -> None:
        super().__init__()
        self.experts, self.turned = nn.ModuleList(nn.Linear(4, 4) for _ in range(4)), turned
        self.gate = nn.Linear(4, 4, bias=False)
        self.gate.weight.data = torch.eye(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x)
        if self.turned:
            scores = scores + torch.tensor([0.0, 1, 2, 3]) * 2**-23
        chosen = torch.topk(scores, 1).indices
        rows = [self.experts[int(n)](row) for n, row in zip(chosen[:, 0], x, strict=True)]
        return torch.stack(rows)


def _routed(*, turned: bool) -> Record:
    x = torch.tensor([[1.0, 1, 0, 0], [0, 2, 1, 1], [0, 0, 3, 3], [4, 1, 0, 2]])
    return captured(lambda: _Router(turned=turned), lambda: (x,))


def _arrays(offset: float = 0.0) -> Record:
    def record(path: Path) -> None:
        torch.manual_seed(0)
        model, image = Images().eval(), seeded(2, 3, 6, 6)
        with torch.no_grad():
            stem = model.stem(image) + offset
            whence.record(path, {"image": image, "stem": stem, "out": model(image)})

    return record


def _patched(place: Place) -> Answers:
    """A run in which the outputs of another stand in the place of a module's."""
    place.once("ref", captured(language()))
    place.once("tgt", captured(language(_EPS), patch=("layers.1.input_norm",), patch_from="ref"))
    yield from place.compare("ref", "tgt")


def user_model() -> nn.Module:
    """The reference's model, for `--model`."""
    return language()()


def _by_user_model(place: Place) -> Answers:
    """Calls of which no program was recorded, replayed by the module of a user."""
    place.once("ref", captured(language(), programs=False))
    place.once("tgt", captured(language(_EPS), programs=False))
    yield from place.compare("ref", "tgt", "--model", "_golden.modules:user_model")
    yield from place.compare("ref", "tgt", to="alone")


def _nothing_kept(keep: str, change: Change | None = None) -> Record:
    return captured(language(change), keep=keep)


def _bits(run: torch.dtype) -> Record:
    return captured(language(dtype=run))


def _deep(model: Any) -> None:
    model.layers[1] = copy.deepcopy(model.layers[0])


_WRITTEN = {
    name.replace(" ", "_"): pair(_decoder("split"), _decoder(name))
    for name in ("fused", "heads", "conv1d fused", "paired", "conv1d", "served")
}

CASES: dict[str, Case] = {
    "same": pair(_REFERENCE, _REFERENCE),
    "bf16": pair(_REFERENCE, captured(language(dtype=torch.bfloat16))),
    "bf16_two_dumps": pair(_REFERENCE, captured(language(dtype=torch.bfloat16)), "--no-replay"),
    "fp16_both": pair(_bits(torch.float16), captured(language(_EPS, torch.float16))),
    "eps": pair(_REFERENCE, captured(language(_EPS))),
    "eps_strict": pair(_REFERENCE, captured(language(_EPS, torch.bfloat16)), "--strict"),
    "eps_two_dumps": pair(_REFERENCE, captured(language(_EPS)), "--no-replay"),
    "eps_exact": pair(_REFERENCE, captured(language(_EPS)), "--match", "exact"),
    "eps_order": pair(_REFERENCE, captured(language(_EPS)), "--match", "order"),
    "weight": pair(_REFERENCE, captured(language(_scaled("layers.1.mlp.down_proj", 1.02)))),
    "layer_of_another": pair(_REFERENCE, captured(language(_deep))),
    "output_off": pair(
        _REFERENCE, captured(language(_hooked("layers.0.mlp.act", lambda out: out * 1.125)))
    ),
    "one_channel": pair(
        _REFERENCE,
        captured(
            language(
                _hooked(
                    "layers.0.attention.v_proj",
                    lambda out: torch.cat([out[..., :-1], out[..., -1:] * 2], -1),
                )
            )
        ),
    ),
    "nan": pair(
        _REFERENCE,
        captured(language(_hooked("layers.1.mlp.act", lambda out: out / (out * 0)))),
    ),
    "statistics": pair(_nothing_kept("stats"), _nothing_kept("stats", _EPS)),
    "one_has_statistics": pair(_REFERENCE, _nothing_kept("stats", _EPS)),
    "several_steps": pair(
        captured(language(), drive=_steps), captured(language(_EPS), drive=_steps)
    ),
    "chosen_steps": pair(
        captured(language(), drive=_steps, steps="1:3"),
        captured(language(_EPS), drive=_steps, steps="1:3"),
    ),
    "operators": pair(captured(language(), level="op"), captured(language(_EPS), level="op")),
    "operators_against_modules": pair(_REFERENCE, captured(language(_EPS), level="op")),
    "images": pair(_images(), _images()),
    "images_weight": pair(_images(), _images(1.03)),
    "images_operators": pair(_images(level="op"), _images(1.03, level="op")),
    "arrays": pair(_arrays(), _arrays()),
    "arrays_offset": pair(_arrays(), _arrays(0.125)),
    "folded_factor": pair(
        captured(lambda: blocks(1.0, 1.0), lambda: (seeded(8, 8),)),
        captured(_folded, lambda: (seeded(8, 8),)),
    ),
    "renamed": pair(
        captured(lambda: blocks(1.0, 1.0), lambda: (seeded(8, 8),)),
        captured(lambda: _Shared(blocks(1.0, 1.25)), lambda: (seeded(8, 8),)),
    ),
    "removed_by_the_model": pair(
        *(
            captured(
                lambda gain=gain: nn.Sequential(
                    nn.Linear(8, 16), Gain(gain), nn.LayerNorm(16, eps=0.0), nn.Linear(16, 4)
                ).eval(),
                lambda: (seeded(8, 8),),
            )
            for gain in (1.0, 1.5)
        )
    ),
    "returned_shape": pair(
        captured(_Head, lambda: (seeded(1, 8),)),
        captured(lambda: _Head(lambda y: y[0]), lambda: (seeded(1, 8),)),
    ),
    "asked_in_another_shape": pair(
        captured(_Head, lambda: (seeded(1, 8),)), captured(_Head, lambda: (seeded(1, 8)[0],))
    ),
    "written_out": pair(_level(_mixed(fused=True), 2, 5, 8), _level(_mixed(fused=False), 2, 5, 8)),
    "written_out_fault": pair(
        _level(_mixed(fused=True), 2, 5, 8), _level(_mixed(fused=False, scale=0.6), 2, 5, 8)
    ),
    "written_out_two_dumps": pair(
        _level(_mixed(fused=True), 2, 5, 8),
        _level(_mixed(fused=False, eps=1e-5), 2, 5, 8),
        "--no-replay",
    ),
    "operator_form": pair(
        *(
            captured(_mixed(fused=True, scale=scale), lambda: (seeded(2, 5, 8),))
            for scale in (0.5, 0.5625)
        )
    ),
    "through_numpy": pair(
        captured(lambda: _Opaque().eval(), lambda: (seeded(4, 8),)),
        captured(lambda: _Opaque(backwards=True).eval(), lambda: (seeded(4, 8),)),
    ),
    **_WRITTEN,
    "fused_fault": pair(
        _decoder("split"),
        _decoder(
            "fused",
            lambda m: m.layers[1].self_attn.qkv_proj.weight.data[32:64].mul_(1.125),
        ),
    ),
    "fused_against_split": pair(_decoder("fused"), _decoder("split")),
    "norm_in_convolution": pair(_pictures(folded=False), _pictures(folded=True)),
    "norm_in_convolution_fault": pair(_pictures(folded=False), _pictures(folded=True, gain=1.125)),
    "serving_engine": pair(_engine(serving=False), _engine(serving=True)),
    "serving_engine_fault": pair(_engine(serving=False), _engine(serving=True, fault=True)),
    "nested_padding": pair(_encoder(fast=False), _encoder(fast=True)),
    "nested_padding_fault": pair(_encoder(fast=False), _encoder(fast=True, eps=0.25)),
    "again": _again(1.0),
    "again_fault": _again(4.0),
    "not_repeated": pair(_unrepeated(0), _unrepeated(3)),
    "third_noise": _third(4),
    "third_fault": _third(3, 1.125),
    "mask_looks_ahead": pair(_given(_PADDED), _given(_PADDED, ahead=1)),
    "mask_without_padding": pair(_given(_PADDED), _given(_PADDED, pads=False)),
    "attention_scale": pair(_given(_PADDED), _given(_PADDED, scale=0.5)),
    "mask_given_otherwise": pair(_given(_PADDED), _given([1] * 8)),
    "mask_given_and_unread": pair(_given(_PADDED, pads=False), _given([1] * 8, pads=False)),
    "positions": pair(_positions(0), _positions(1)),
    "positions_unread": pair(_positions(0, reads=False), _positions(1, reads=False)),
    "other_input": pair(captured(language()), captured(language(_EPS), lambda: ((IDS + 1) % 40,))),
    "checkpoints": pair(_checkpoint(), _checkpoint()),
    "checkpoint_lacks": pair(_checkpoint(), _checkpoint("3.bias", "3.weight")),
    "checkpoint_differs": pair(_checkpoint(), _checkpoint(gain=1.5)),
    "dropout": pair(_drawing(0.1), _drawing(0.1)),
    "dropout_rate": pair(_drawing(0.1), _drawing(0.3)),
    "noise_width": pair(_drawing(0.1), _drawing(0.1, 2.0)),
    "ties": pair(_routed(turned=False), _routed(turned=True)),
    "patched": _patched,
    "user_model": _by_user_model,
}
