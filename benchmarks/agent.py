"""A scripted agent looks for planted faults: it types commands of whence, and reads only the JSON
that they print.

    python benchmarks/agent.py [--json FILE] [--only FAULT]

Ten faults are planted, one at a time, in a small decoder that is no example of the documentation,
half of them in a target that computes in bfloat16. The agent has three calls for each: capture the
reference, capture the target, compare. Where the comparison is undecided it would follow the first
of `next` that has nothing to fill in, and that counts as a call. It answers with the name of the
first finding. Right is the module in which the fault was planted.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

PROGRAM = """
import sys
import torch
from torch import nn
from torch.nn import functional as F

FAULT = sys.argv[1]
W, H, KV, D, LAYERS, V = 64, 4, 2, 16, 3, 96

class Norm(nn.Module):
    def __init__(self, eps=1e-5):
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(W))
    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return y.to(x.dtype) * self.weight

class Rotary(nn.Module):
    def __init__(self, base=10000.0):
        super().__init__()
        self.base = base
    def forward(self, positions, dtype):
        f = self.base ** (-torch.arange(0, D, 2) / D)
        a = positions[:, None] * f
        return a.cos().to(dtype), a.sin().to(dtype)

def turn(x, cos, sin):
    a, b = x[..., : D // 2], x[..., D // 2 :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(W, H * D), nn.Linear(W, KV * D), nn.Linear(W, KV * D)
        self.o = nn.Linear(H * D, W)
        self.scale, self.ahead, self.order = D ** -0.5, 0, "interleave"
    def forward(self, x, cos, sin):
        b, t, _ = x.shape
        q = turn(self.q(x).view(b, t, H, D).transpose(1, 2), cos, sin)
        k = turn(self.k(x).view(b, t, KV, D).transpose(1, 2), cos, sin)
        v = self.v(x).view(b, t, KV, D).transpose(1, 2)
        if self.order == "interleave":
            k, v = (z.repeat_interleave(H // KV, 1) for z in (k, v))
        else:
            k, v = (z.repeat(1, H // KV, 1, 1) for z in (k, v))
        mask = torch.ones(t, t, dtype=torch.bool).tril(self.ahead)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)
        return self.o(y.transpose(1, 2).reshape(b, t, H * D))

class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(W, 4 * W), nn.GELU(), nn.Linear(4 * W, W)
    def forward(self, x):
        return self.down(self.act(self.up(x)))

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.attention, self.between, self.mlp = Norm(), Attention(), Norm(), Mlp()
        self.share = 1.0
    def forward(self, x, cos, sin):
        x = x + self.attention(self.before(x), cos, sin)
        return x * self.share + self.mlp(self.between(x))

class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rotary = nn.Embedding(V, W), Rotary()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.last, self.head, self.cap = Norm(), nn.Linear(W, V), 30.0
    def forward(self, ids):
        x = self.embed(ids)
        cos, sin = self.rotary(torch.arange(ids.shape[1]), x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.cap * torch.tanh(self.head(self.last(x)) / self.cap)

torch.manual_seed(3)
torch.set_num_threads(1)
model = Decoder().eval()
ids = torch.randint(0, V, (2, 24), generator=torch.Generator().manual_seed(5))
if "bfloat16" in sys.argv:
    model.bfloat16()
b = model.blocks
with torch.no_grad():
    match FAULT:
        case "epsilon": b[1].between.eps = 1e-2
        case "weight": b[2].attention.q.weight[7, 9] += 0.5
        case "scale": b[0].attention.scale *= 1.1
        case "mask": b[1].attention.ahead = 1
        case "residual": b[2].share = 0.9
        case "rotary": model.rotary.base = 500.0
        case "activation": b[0].mlp.act.approximate = "tanh"; b[0].mlp.act = nn.ReLU()
        case "bias": b[1].mlp.down.bias[3] += 0.3
        case "heads": b[0].attention.order = "repeat"
        case "cap": model.cap = 15.0
    print(model(ids).argmax(-1)[0].tolist())
"""


class Planted(NamedTuple):
    """A fault, the names that are right, and whether the target computes in bfloat16."""

    fault: str
    right: tuple[str, ...]
    is_narrow: bool


FAULTS = (
    Planted("epsilon", ("blocks.1.between",), True),
    Planted("weight", ("blocks.2.attention.q",), True),
    Planted("scale", ("blocks.0.attention",), False),
    Planted("mask", ("blocks.1.attention",), True),
    Planted("residual", ("blocks.2",), False),
    Planted("rotary", ("rotary",), True),
    Planted("activation", ("blocks.0.mlp.act",), False),
    Planted("bias", ("blocks.1.mlp.down",), True),
    Planted("heads", ("blocks.0.attention",), False),
    Planted("cap", ("Decoder",), False),
)
CALLS = 3


class Agent:
    """Types commands in a folder and counts them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls, self.read = folder, 0, 0

    def types(self, line: str) -> str:
        """Run one line; what it printed."""
        self.calls += 1
        words = shlex.split(line)
        done = subprocess.run(
            [sys.executable, "-m", *words], cwd=self.folder, capture_output=True, text=True
        )
        return done.stdout

    def looks_for(self, planted: Planted) -> dict[str, Any]:
        """Capture both sides, compare, answer."""
        program = f"{shlex.quote(sys.executable)} decoder.py"
        options = " bfloat16" if planted.is_narrow else ""
        self.types(f"whence run --force -o ref -- {program} none")
        self.types(f"whence run --force -o tgt -- {program} {planted.fault}{options}")
        answer = self.reads("whence compare ref tgt --format json")
        while answer["status"] == "undecided" and self.calls < CALLS:
            steps = [step for step in answer["next"] if not step["fill_in"]]
            if not steps:
                break
            answer = self.reads(f"{steps[0]['command']} --format json")
        return answer

    def reads(self, line: str) -> dict[str, Any]:
        """Run one line and read the JSON that it printed."""
        text = self.types(line)
        self.read += len(text)
        answer: dict[str, Any] = json.loads(text)
        return answer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    parser.add_argument("--only")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "decoder.py").write_text(PROGRAM)
        for planted in FAULTS:
            if arguments.only not in (None, planted.fault):
                continue
            agent = Agent(folder)
            answer = agent.looks_for(planted)
            first = next(iter(answer["findings"]), {})
            named = first.get("name", "")
            rows.append(
                {
                    "fault": planted.fault,
                    "target": "bfloat16" if planted.is_narrow else "float32",
                    "named": named,
                    "right": named in planted.right,
                    "calls": agent.calls,
                    "characters": agent.read,
                    "sentence": first.get("sentence", answer["headline"]),
                }
            )
            row = rows[-1]
            print(
                f"{row['fault']:<11}{row['target']:<10}{'right' if row['right'] else 'WRONG':<7}"
                f"{row['calls']} calls {row['characters']:>7} characters  {named}: "
                f"{str(row['sentence'])[:110]}",
                flush=True,
            )
    right = sum(bool(row["right"]) for row in rows)
    print(f"{right} of {len(rows)} named, in at most {CALLS} calls each")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
