"""Networks of torch alone that read images: convolutions, pooling, resizing, boxes, attention.

Weights are drawn; `subjects.py` gives norms weights and statistics that are not their defaults.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ConvNet(nn.Module):
    """Grouped and dilated convolutions, uneven padding, pools that round up, bilinear resize."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 3, padding=1)
        self.grouped = nn.Conv2d(12, 24, 3, padding=1, groups=4)
        self.dilated = nn.Conv2d(24, 24, 3, padding=2, dilation=2)
        self.pool = nn.MaxPool2d(3, 2, ceil_mode=True)
        self.mean = nn.AvgPool2d(3, 2, padding=1, ceil_mode=True, count_include_pad=False)
        self.elu = nn.ELU()
        self.last = nn.Conv2d(24, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.stem(x)))
        x = self.mean(self.elu(self.grouped(x)))
        x = F.leaky_relu(self.dilated(x), 0.1)
        x = F.interpolate(x, size=(11, 13), mode="bilinear", align_corners=False)
        return self.last(F.pad(x, (1, 0, 0, 1)))


class Residual(nn.Module):
    """Two convolutions with batch norms around which the input is added."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU()
        self.down = nn.Identity()
        if stride > 1 or inputs != outputs:
            conv = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.down = nn.Sequential(conv, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(y)) + self.down(x))


class ResNet(nn.Module):
    """A small ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, 16, 7, 2, 3), nn.BatchNorm2d(16)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.layers = nn.Sequential(Residual(16, 16), Residual(16, 32, 2), Residual(32, 32))
        self.avg, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.bn(self.stem(x))))
        return self.fc(torch.flatten(self.avg(self.layers(x)), 1))


class Squeeze(nn.Module):
    """Squeeze and excitation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(width, width // 4, 1), nn.Conv2d(width // 4, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.adaptive_avg_pool2d(x, 1)
        return x * F.hardsigmoid(self.fc2(F.relu(self.fc1(y))))


class Inverted(nn.Module):
    """The inverted residual block of MobileNetV3."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = 3 * width
        self.expand, self.bn1 = nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.depthwise = nn.Conv2d(inner, inner, 5, 1, 2, groups=inner, bias=False)
        self.bn2, self.se = nn.BatchNorm2d(inner), Squeeze(inner)
        self.project, self.bn3 = nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        y = F.hardswish(self.bn1(self.expand(x)))
        y = F.hardswish(self.bn2(self.depthwise(y)))
        return x + self.bn3(self.project(self.se(y)))


class MobileNet(nn.Module):
    """A small MobileNetV3."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 2, 1)
        self.blocks = nn.Sequential(Inverted(16), Inverted(16))
        self.head = nn.Linear(16, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(F.hardswish(self.stem(x))).mean((2, 3)))


class UNet(nn.Module):
    """Down, up by a transposed convolution, a skip connection, reflected padding."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 12, 3, padding=1), nn.Conv2d(12, 24, 3, padding=1)
        self.middle = nn.Conv2d(24, 24, 3, padding=2, dilation=2)
        self.norm = nn.GroupNorm(4, 24)
        self.up = nn.ConvTranspose2d(24, 12, 2, 2)
        self.merge = nn.Conv2d(24, 12, 3, padding=1, padding_mode="reflect")
        self.out = nn.Conv2d(12, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = F.leaky_relu(self.down1(x), 0.1)
        b = F.leaky_relu(self.down2(F.max_pool2d(a, 2)), 0.1)
        middle = F.silu(self.norm(self.middle(b)))
        y = self.merge(torch.cat([self.up(middle), a], 1))
        return torch.sigmoid(F.interpolate(self.out(y), scale_factor=2, mode="bilinear"))


class Detector(nn.Module):
    """A feature pyramid, boxes and classes, of which the best eight are gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16)
        self.act = nn.PReLU(16)
        self.conv2 = nn.Conv2d(16, 32, 3, 2, 1)
        self.lateral, self.top = nn.Conv2d(16, 16, 1), nn.Conv2d(32, 16, 1)
        self.box, self.cls = nn.Conv2d(16, 4, 3, padding=1), nn.Conv2d(16, 6, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a = self.act(self.norm(self.conv1(x)))
        b = F.mish(self.conv2(a))
        merged = self.lateral(a) + F.interpolate(self.top(b), scale_factor=2, mode="nearest")
        box = self.box(merged).flatten(2).transpose(1, 2)
        scores, label = self.cls(merged).flatten(2).transpose(1, 2).softmax(-1).max(-1)
        best, at = scores.topk(8, -1)
        centre, size = box.split(2, -1)
        corners = torch.cat([centre - size.exp() / 2, centre + size.exp() / 2], -1)
        picked = corners.gather(1, at[..., None].expand(-1, -1, 4))
        return picked, best, label.gather(1, at)


class Upscaler(nn.Module):
    """Instance norms, pixel shuffle, cubic resize, sampling at a grid of points."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 16, 3, padding=1), nn.InstanceNorm2d(16, affine=True)
        self.conv2, self.norm2 = nn.Conv2d(16, 16, 3, padding=1), nn.InstanceNorm2d(16, affine=True)
        self.widen, self.shuffle = nn.Conv2d(16, 48, 3, padding=1), nn.PixelShuffle(2)
        self.flow = nn.Conv2d(12, 2, 3, padding=1)
        self.out = nn.Conv2d(12, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.softplus(self.norm1(self.conv1(x)))
        y = self.shuffle(self.widen(y + F.relu(self.norm2(self.conv2(y)))))
        grid = torch.tanh(self.flow(y)).permute(0, 2, 3, 1)
        y = self.out(F.grid_sample(y, grid, align_corners=False))
        return y + F.interpolate(x, scale_factor=2, mode="bicubic", align_corners=False)


class ViT(nn.Module):
    """A vision transformer of torch's own encoder layers."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 24, 4, 4)
        self.cls = nn.Parameter(torch.randn(1, 1, 24))
        self.position = nn.Parameter(torch.randn(1, 17, 24))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                24, 4, 48, 0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(24), nn.Linear(24, 9)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class NextBlock(nn.Module):
    """The block of ConvNeXt."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(0.3 * torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(x).permute(0, 2, 3, 1)
        y = self.down(F.gelu(self.up(self.norm(y)), approximate="tanh")) * self.gamma
        return x + y.permute(0, 3, 1, 2)


class ConvNext(nn.Module):
    """A small ConvNeXt."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 4, 4)
        self.blocks = nn.Sequential(NextBlock(16), NextBlock(16))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.stem(x)).mean((-2, -1))))


class MixerBlock(nn.Module):
    """A perceptron along the tokens, then one along the channels."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(tokens, 32), nn.GELU(), nn.Linear(32, tokens))
        self.channels = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    """An MLP-Mixer."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 24, 4, 4)
        self.blocks = nn.Sequential(MixerBlock(16, 24), MixerBlock(16, 24))
        self.norm, self.head = nn.LayerNorm(24), nn.Linear(24, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.patch(x).flatten(2).transpose(1, 2))
        return F.log_softmax(self.head(self.norm(x).mean(1)), -1)
