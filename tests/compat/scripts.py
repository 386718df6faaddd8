"""Scripts as the guides of other tools show them, run as users run them."""

import inside

HEAD = (
    "import sys, torch\ntorch.manual_seed(0)\ntorch.set_num_threads(1)\nBUG = 'bug' in sys.argv\n"
)
VISION = """
class Vision(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = torch.nn.Conv2d(3, 8, 4, 4)
        make = lambda: torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
        self.blocks = torch.nn.ModuleList(make() for _ in range(2))

    def forward(self, x):
        h = self.patch(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            h = h + block(h)
        return h


model = Vision().eval()
if BUG:
    model.blocks[1][2].approximate = "tanh"
"""
CHAT = """
class Chat(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(32, 16)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(2))
        self.head = torch.nn.Linear(16, 32)

    def forward(self, input_ids):
        h = self.embed(input_ids)
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        return self.head(h)


model = Chat().eval()
if BUG:
    with torch.no_grad():
        model.layers[1].weight[3] *= 1.5


def generate(tokens):
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        for _ in range(tokens):
            ids = torch.cat([ids, model(ids)[:, -1].argmax(-1, keepdim=True)], 1)
    return ids
"""


def python(folder, text, *arguments, **variables):
    """Run a script in a folder; its result. Fails the test when it fails."""
    (folder / "script.py").write_text(HEAD + text)
    done = inside.program(folder, HEAD + text, *arguments, **variables)
    assert done.returncode == 0, done.stderr
    return done


def whence(folder, *words, code=0):
    """Run a whence command in a folder; its result. The exit code is checked."""
    done = inside.or_outside(folder, *words)
    assert done.returncode == code, done.stdout + done.stderr
    return done
