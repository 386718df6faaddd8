"""Logits of every token of two programs; then the layer of the first bad token."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from story_tools import folder, names, run, write

CHAT = """import sys
import torch

torch.manual_seed(0)
torch.set_num_threads(1)
layers = [torch.nn.Linear(16, 16) for _ in range(3)]
model = torch.nn.Sequential(torch.nn.Embedding(32, 16), *layers, torch.nn.Linear(16, 32)).eval()
ids = torch.tensor([[1, 2, 3]])
with torch.no_grad():
    for token in range(5):
        if token == 2 and "wrong" in sys.argv:
            layers[1].register_forward_hook(lambda module, given, made: made * 1.1)
        ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], 1)
"""
folder()
write("chat.py", CHAT)
run("whence run --level logits -o golden -- python chat.py")
run("whence run --level logits -o mine -- python chat.py wrong")
said = run("whence compare golden mine")
names(said, "FAULT", "token 2 (step 2", "--layers layers")
said = run("whence compare golden mine --layers layers")
names(said, "FAULT", "step 2", "mul")
