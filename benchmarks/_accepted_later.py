"""Further programs for `accept_cases.py`, written before one of them was asked about.

None was used to set a limit: what `whence accept` said of them at first sight is in the commit that
adds them.
"""

from __future__ import annotations

import math

import torch
from _accepted import BATCH, HF, IDS, NVIDIA, Block, Case, plain_product, seeded
from torch import nn
from torch.nn import functional as F

HEADS, WIDTH = 72, 12
"""Models whose expectations lie in one file, and their width."""


def many_models(product=None):
    """Losses and norms of 72 models in three steps of training, as one golden file holds them."""

    def linear(x, weight, bias):
        return (x @ weight.T if product is None else product(x, weight.T)) + bias

    def program():
        golden = {}
        for model in range(HEADS):
            torch.manual_seed(model)
            net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5))
            optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
            x, wanted = seeded((16, WIDTH), model), torch.arange(16) % 5
            curve = {}
            for step in range(3):
                hidden = torch.tanh(linear(x, net[0].weight, net[0].bias))
                loss = F.cross_entropy(linear(hidden, net[1].weight, net[1].bias), wanted)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                curve[step + 1] = loss.item()
            golden[f"model {model}"] = {"loss": curve, "norm": float(hidden.detach().norm())}
        return golden

    return program


def one_of_many_wrong():
    """As `many_models`, with another learning rate in one of them."""
    golden, wrong = many_models()(), many_models(lambda a, b: a @ b * 1.0001)()
    return {**golden, "model 41": wrong["model 41"]}


def sine(form):
    def program():
        x = seeded((200,)) * 20
        if form == "exponential":
            return torch.exp(torch.complex(torch.zeros(200), x)).imag
        return torch.sin(x)

    return program


def transform(form):
    def program():
        x = seeded((96,))
        if form == "matrix":
            turns = torch.outer(torch.arange(96), torch.arange(96)) % 96
            angles = -2 * math.pi * turns / 96
            full = torch.stack((plain_product(x, angles.cos()), plain_product(x, angles.sin())))
            return full[:, :49]
        return torch.view_as_real(torch.fft.rfft(x)).T

    return program


def total(size):
    """The sum of a vector, without what lies behind whole tiles where `size` is that of one."""

    def program():
        x = torch.arange(128.0) + seeded((128,))
        return float(x[: len(x) // size * size].sum())

    return program


def spectrogram(form, window="hann"):
    """Powers in bands; their sizes are fifteen orders of magnitude apart."""

    def program():
        wave = torch.arange(2048.0)
        frames = wave.unfold(0, 256, 128)
        shape = torch.hann_window(256) if window == "hann" else torch.ones(256)
        power = torch.fft.rfft(frames * shape).abs().square()
        bands = seeded((129, 12)).abs() * (torch.rand((129, 12), generator=_draw()) < 0.1)
        return (power @ bands if form == "one" else plain_product(power, bands)).T

    return program


def _draw():
    return torch.Generator().manual_seed(3)


def capped(cap):
    def program(ids):
        with torch.no_grad():
            scores = 8 * Block().eval()(ids)[:, -1, :6]
        return cap * torch.tanh(scores / cap) if cap else scores

    return program


def rotated(rows):
    """Queries turned by their positions; rows: whether each row of a batch has its own."""

    def program(x):
        positions = torch.tensor([3.0, 7.0]) if rows else torch.tensor([3.0, 3.0])
        angles = positions[:, None] * 10000 ** (-torch.arange(8) / 8)
        even, odd = x[..., ::2], x[..., 1::2]
        turned = (
            even * angles.cos() - odd * angles.sin(),
            even * angles.sin() + odd * angles.cos(),
        )
        return torch.stack(turned, -1).flatten(-2)

    return program


def gated(form):
    def program():
        torch.manual_seed(0)
        cell, x = nn.GRU(8, 16), seeded((25, 2, 8))
        with torch.no_grad():
            if form == "module":
                return cell(x)[0][-1, :, :5]
            h = torch.zeros(2, 16)
            for step in x:
                given = (plain_product(step, cell.weight_ih_l0.T) + cell.bias_ih_l0).chunk(3, -1)
                kept = (plain_product(h, cell.weight_hh_l0.T) + cell.bias_hh_l0).chunk(3, -1)
                reset, update = (given[0] + kept[0]).sigmoid(), (given[1] + kept[1]).sigmoid()
                h = (1 - update) * (given[2] + reset * kept[2]).tanh() + update * h
            return h[:, :5]

    return program


def pixels(first, last=torch.round, antialias=False):
    """Bytes of a picture that is resized along one axis after the other."""

    def program():
        picture = (seeded((1, 1, 16, 16)).sigmoid() * 255).round()
        for axis in (0, 1) if first == "rows" else (1, 0):
            size = (24, picture.shape[3]) if axis == 0 else (picture.shape[2], 24)
            picture = F.interpolate(picture, size, mode="bilinear")
        if antialias is not None:
            picture = F.interpolate(picture, (9, 9), mode="bilinear", antialias=antialias)
        return last(picture[0, 0]).to(torch.uint8)

    return program


def optimized(fused=False, warmup=0, held=True, counts=None):
    """Losses of a training. counts: tokens of two micro-batches, whose means are averaged where
    each has its own mean. held: whether the optimiser holds the model's own parameters.
    """

    def program():
        net = Block()
        held_by = net if held else Block()
        optimizer = torch.optim.AdamW(held_by.parameters(), 1e-3, fused=fused)
        curve = {}
        for step in range(12):
            optimizer.param_groups[0]["lr"] = 1e-3 * (min(1, step / warmup) if warmup else 1)
            ids = (torch.arange(32).reshape(4, 8) * 7 + step) % 60
            each = F.cross_entropy(
                net(ids).flatten(0, 1), ids.roll(-1, 1).flatten(), reduction="none"
            )
            loss = each.mean() if counts is None else (each[:8].mean() + each[8:].mean()) / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            curve[step + 1] = loss.item()
        return {"lm loss": curve}

    return program


def pooled(masked):
    def program(ids, mask):
        with torch.no_grad():
            hidden = Block().eval()(ids, mask)
        counted = mask[..., None].float() if masked else torch.ones_like(mask)[..., None].float()
        return F.normalize((hidden * counted).sum(1) / counted.sum(1), dim=-1)[:, :6]

    return program


def product(rounded=False):
    """A product of matrices. rounded: to the eleven bits that TF32 has."""

    def program(x, y):
        if rounded:
            x, y = (_in_tf32(t) for t in (x, y))
        return x @ y

    return program


def _in_tf32(tensor):
    return ((tensor.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def attention(form):
    def program(q, k, v):
        if form == "fused":
            return F.scaled_dot_product_attention(q, k, v)[..., :4]
        return ((q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5).softmax(-1)[..., :] @ v[..., :4]

    return program


def running(form, dtype=torch.float32):
    def program():
        x = seeded((512,)).to(dtype)
        if form == "tree":
            step = 1
            while step < len(x):
                x = torch.cat((x[:step], x[step:] + x[:-step]))
                step *= 2
            return x
        sums, total = [], torch.zeros((), dtype=dtype)
        for value in x:
            total = total + value
            sums.append(total)
        return torch.stack(sums)

    return program


def normed(form, constant=False):
    def program():
        x = seeded((4, 40)) + 0.5
        if constant:
            x = torch.tensor([[0.1], [14.3], [2.7]]).expand(3, 40) * torch.ones(40)
        if form == "module":
            return F.layer_norm(x, (40,), eps=1e-6)
        mean, spread = x.mean(-1, keepdim=True), x.var(-1, unbiased=False, keepdim=True)
        return (x - mean) / (spread.sqrt() + 1e-3 if form == "outside" else (spread + 1e-6).sqrt())

    return program


def perplexity(form):
    def program(ids):
        with torch.no_grad():
            scores = Block().eval()(ids)
        lengths = torch.tensor([4, 11])
        nll = F.cross_entropy(scores[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
        counted = (torch.arange(11) < lengths[:, None]).float()
        if form == "of batches":
            return ((nll * counted).sum(1) / counted.sum(1)).mean().exp()
        if form == "with padding":
            return nll.mean().exp()
        return ((nll * counted).sum() / counted.sum()).exp()

    return program


Q, K, V = (seeded((2, 3, 10, 16), n) for n in range(3))
TURNED = {"x": seeded((2, 16))}
PAIR = {"x": seeded((12, 80)), "y": seeded((80, 5), 1)}
MLX = "https://github.com/ml-explore/mlx-lm/"
TORCH = "https://github.com/pytorch/pytorch/"
LATER = {
    "72 models of one container": Case(
        f"{NVIDIA}7217", many_models(plain_product), many_models(), True
    ),
    "72 models, four digits": Case(
        f"{NVIDIA}7217", many_models(plain_product), many_models(), True, digits=4
    ),
    "one of 72 models wrong": Case(f"{NVIDIA}7217", one_of_many_wrong, many_models(), False),
    "sine of another release": Case(
        "https://github.com/nv-legate/cupynumeric/pull/1120",
        sine("exponential"),
        sine("sine"),
        True,
    ),
    "transform of another release": Case(
        f"{TORCH}issues/56820", transform("matrix"), transform("fast"), True
    ),
    "sum without the last tile": Case(
        "https://github.com/NVIDIA/numba-cuda/issues/409", total(1), total(48), False
    ),
    "bands of powers": Case(
        "https://github.com/ynop/audiomate/issues/93",
        spectrogram("parts"),
        spectrogram("one"),
        True,
    ),
    "another window": Case(
        "https://github.com/PsychoinformaticsLab/pliers/issues/419",
        spectrogram("one", "hann"),
        spectrogram("one", "ones"),
        False,
    ),
    "logits without their cap": Case(
        "https://github.com/sgl-project/sglang/pull/1046",
        capped(30),
        capped(0),
        False,
        {"ids": IDS},
    ),
    "positions of the first row": Case(
        f"{MLX}issues/1457", rotated(True), rotated(False), False, TURNED
    ),
    "gated recurrence": Case(f"{TORCH}pull/172201", gated("written"), gated("module"), True),
    "axes in another order, in bytes": Case(
        "https://github.com/bigcat88/pillow_heif/pull/489",
        pixels("rows", antialias=None),
        pixels("columns", antialias=None),
        True,
    ),
    "bytes cut off instead of rounded": Case(
        "https://github.com/pytroll/pycoast/issues/82",
        pixels("rows", torch.floor, None),
        pixels("rows", torch.round, None),
        False,
    ),
    "anti-aliasing turned on": Case(
        "https://github.com/DynamoDS/Dynamo/pull/11069",
        pixels("rows"),
        pixels("rows", antialias=True),
        False,
    ),
    "optimiser fused": Case(f"{TORCH}pull/123074", optimized(), optimized(fused=True), True),
    "micro-batches of unequal counts": Case(
        f"{MLX}pull/1413", optimized(), optimized(counts=(8, 24)), False
    ),
    "optimiser of other parameters": Case(
        f"{HF}accelerate/issues/3209", optimized(), optimized(held=False), False
    ),
    "first step without a rate": Case(
        "https://github.com/pytorch/torchtitan/pull/1261", optimized(), optimized(warmup=1), False
    ),
    "pooling counts padding": Case(
        f"{HF}transformers/issues/17463", pooled(True), pooled(False), False, BATCH
    ),
    "was TF32": Case(
        f"{HF}transformers/pull/20680", product(True), product(), True, PAIR, {"was": "tf32"}
    ),
    "was TF32, not declared": Case(
        f"{HF}transformers/pull/20680", product(True), product(), False, PAIR
    ),
    "attention fused": Case(
        f"{HF}transformers/pull/29187", attention("written"), attention("fused"), True, (Q, K, V)
    ),
    "running sum by a tree": Case(
        "https://github.com/tenstorrent/tt-metal/issues/55542",
        running("in order"),
        running("tree"),
        True,
    ),
    "running sum by a tree, float16": Case(
        "https://github.com/flagos-ai/FlagTree/pull/844",
        running("in order", torch.float16),
        running("tree", torch.float16),
        True,
    ),
    "epsilon outside the root": Case(
        "https://github.com/hkproj/pytorch-transformer/pull/31",
        normed("outside"),
        normed("module"),
        False,
    ),
    "norm of constant rows": Case(
        f"{TORCH}issues/108072", normed("written", True), normed("module", True), True
    ),
    "perplexity of batches": Case(
        "https://github.com/magenta/magenta/pull/239",
        perplexity("of batches"),
        perplexity("of tokens"),
        False,
        {"ids": IDS},
    ),
    "perplexity with padding": Case(
        f"{MLX}pull/1855",
        perplexity("with padding"),
        perplexity("of tokens"),
        False,
        {"ids": IDS},
    ),
}
