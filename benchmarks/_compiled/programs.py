"""Small compiled programs, each with other settings of the compiler: `python programs.py NAME`
prints a digest of everything that it computes. Names are functions of this file.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up, self.norm, self.down = (
            nn.Linear(width, 2 * width),
            nn.LayerNorm(2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.norm(self.up(x))))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Net(), Net()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _inferred(net: Any, *sizes: int) -> list[Any]:
    with torch.no_grad():
        return [net(torch.randn(size, 16)) for size in sizes or (4,)]


def plain() -> Any:
    return _inferred(torch.compile(Net().eval()), 4, 4)


def fullgraph() -> Any:
    return _inferred(torch.compile(Net().eval(), fullgraph=True))


def dynamic_on() -> Any:
    return _inferred(torch.compile(Net().eval(), dynamic=True), 3, 5)


def dynamic_by_itself() -> Any:
    return _inferred(torch.compile(Net().eval()), 3, 5, 7)


def reduce_overhead() -> Any:
    return _inferred(torch.compile(Net().eval(), mode="reduce-overhead"), 4, 4, 4)


def max_autotune() -> Any:
    return _inferred(torch.compile(Net().eval(), mode="max-autotune"))


def cpp_wrapper() -> Any:
    return _inferred(torch.compile(Net().eval(), options={"cpp_wrapper": True}))


def freezing() -> Any:
    return _inferred(torch.compile(Net().eval(), options={"freezing": True}))


def caches_off() -> Any:
    torch.compiler.config.force_disable_caches = True
    return _inferred(torch.compile(Net().eval()))


def backend_eager() -> Any:
    return _inferred(torch.compile(Net().eval(), backend="eager"))


def backend_aot_eager() -> Any:
    return _inferred(torch.compile(Net().eval(), backend="aot_eager"))


def backend_own() -> Any:
    from torch._inductor.compile_fx import compile_fx

    return _inferred(torch.compile(Net().eval(), backend=lambda gm, inputs: compile_fx(gm, inputs)))


def submodule() -> Any:
    stack = Stack().eval()
    stack.blocks[1] = torch.compile(stack.blocks[1])
    return _inferred(stack)


def in_place() -> Any:
    net = Net().eval()
    net.compile()
    return _inferred(net)


def regional() -> Any:
    stack = Stack().eval()
    for block in stack.blocks:
        block.forward = torch.compiler.nested_compile_region(block.forward)
    return _inferred(torch.compile(stack))


def function() -> Any:
    @torch.compile
    def norm(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)

    return [norm(torch.randn(4, 16))]


def graph_break() -> Any:
    @torch.compile
    def halves(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        return y * (2.0 if y.sum().item() > 0 else 3.0)

    return [halves(torch.randn(4, 16)), halves(torch.randn(4, 16))]


def training() -> Any:
    net = Net()
    compiled = torch.compile(net)
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    for _ in range(3):
        compiled(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(net.parameters())


def compiled_step() -> Any:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)

    @torch.compile
    def step() -> None:
        optimizer.step()

    for _ in range(2):
        net(torch.randn(4, 16)).square().mean().backward()
        step()
        optimizer.zero_grad()
    return list(net.parameters())


def dropout() -> Any:
    net = torch.compile(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5)))
    return _inferred(net, 4, 4)


def autocast() -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return _inferred(torch.compile(Net().eval()))


def exported() -> Any:
    program = torch.export.export(Net().eval(), (torch.randn(4, 16),))
    return _inferred(torch.compile(program.module()))


def aot_inductor() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model.pt2")
        program = torch.export.export(Net().eval(), (torch.randn(4, 16),))
        torch._inductor.aoti_compile_and_package(program, package_path=path)
        return _inferred(torch._inductor.aoti_load_package(path))


def precompiled() -> Any:
    with torch.no_grad():
        x = torch.randn(4, 16)
        net = Net().eval()
        compiled = torch.compile(net, fullgraph=True).forward.aot_compile(((x,), {}))
        return [compiled(net, x)]


def caching_precompile() -> Any:
    torch._dynamo.config.caching_precompile = True
    return _inferred(torch.compile(Net().eval()))


def cache_artifacts() -> Any:
    out = _inferred(torch.compile(Net().eval()))
    artifacts = torch.compiler.save_cache_artifacts()
    torch._dynamo.reset()
    if artifacts is not None:
        torch.compiler.load_cache_artifacts(artifacts[0])
    return out + _inferred(torch.compile(Net().eval()))


def wrong_through_caches() -> Any:
    """Torch 2.13: right with the caches of whole graphs off, or without dynamic shapes."""

    def adam(weight: Any, slope: Any, first: Any, second: Any, count: Any) -> None:
        count.add_(1)
        first.mul_(0.9).add_(slope, alpha=0.1)
        second.mul_(0.999).addcmul_(slope, slope, value=0.001)
        t = count.item()
        below = (second.sqrt() / ((1 - 0.999**t) ** 0.5)).add_(1e-8)
        weight.addcdiv_(first, below, value=-0.001 / (1 - 0.9**t))

    @torch.compile
    def train(weight: Any, slope: Any) -> Any:
        weight, first, second = weight.clone(), torch.zeros_like(weight), torch.zeros_like(weight)
        count = torch.zeros(())
        for _ in range(6):
            adam(weight, slope, first, second, count)
        return weight

    return [train(torch.randn(32), torch.randn(32))]


def unseeded() -> Any:
    torch.seed()
    return _inferred(torch.compile(Net().eval()))


def reads_its_input() -> Any:
    scale = float(sys.stdin.readline())
    return [out * scale for out in _inferred(torch.compile(Net().eval()))]


def main(name: str) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    digest = hashlib.md5()
    for value in globals()[name]():
        digest.update(value.detach().float().contiguous().numpy().tobytes())
    print("digest", digest.hexdigest())


if __name__ == "__main__":
    main(sys.argv[1])
