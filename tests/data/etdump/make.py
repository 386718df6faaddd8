"""Makes the dumps beside it: `pip install executorch==1.5.1`, then `python make.py`."""

from pathlib import Path

import torch
from executorch.exir import to_edge
from executorch.extension.pybindings.portable_lib import _load_for_executorch_from_buffer
from torch import nn


class Net(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.a, self.n, self.b = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.n(self.a(x)) * self.factor)).softmax(-1)


def main(folder: Path, factor: float) -> None:
    """Two executions, and everything that they computed."""
    torch.manual_seed(0)
    model = Net(factor).eval()
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(1))
    program = to_edge(torch.export.export(model, (x,))).to_executorch().buffer
    module = _load_for_executorch_from_buffer(program, enable_etdump=True, debug_buffer_size=3400)
    for given in (x, x + 1):
        module.forward((given,))
    folder.mkdir(exist_ok=True)
    module.write_etdump_result_to_file(str(folder / "etdump.etdp"), str(folder / "debug.bin"))


for name, factor in (("reference", 1.0), ("scaled", 1.5)):
    main(Path(__file__).parent / name, factor)
