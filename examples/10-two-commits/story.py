"""A model changes between two commits: which operator, and in which commit?"""

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from story_tools import folder, names, run, write

MODEL = """import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(32, 16)
        self.up, self.gate = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
        self.head = torch.nn.Linear(16, 32)

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(x + self.up(x) * torch.sigmoid(self.gate(x)))
"""
TEST = """import json
import torch
from model import Model

torch.manual_seed(0)
torch.set_num_threads(1)
model, rows = Model().eval(), []
prompts = torch.randint(0, 32, (6, 4))
with torch.no_grad():
    ids = prompts
    for _ in range(4):
        ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], 1)
with open("predict.json", "w") as file:
    for number, row in enumerate(ids.tolist()):
        file.write(json.dumps({"src": f"prompt {number}", "output": row[4:]}) + "\\n")
"""


def commit(subject: str) -> None:
    who = ("-c", "user.name=Author", "-c", "user.email=author@example.org")
    for words in (("add", "-A"), (*who, "commit", "-qm", subject)):
        subprocess.run(["git", *words], check=True)


folder()
subprocess.run(["git", "init", "-q"], check=True)
write("src/model.py", MODEL)
write("ask.py", TEST)
commit("A model")
subprocess.run(["git", "tag", "good"], check=True)
write("README", "A model.\n")
commit("Say what it is")
write("src/model.py", MODEL.replace("torch.sigmoid", "torch.tanh"))
commit("Use tanh for the gate")
write("README", "A model with another gate.\n")
commit("Say what the gate is")
said = run("whence commits -o out good HEAD --bisect --texts predict.json -- python ask.py")
names(
    said,
    "BROKEN BY",
    "Use tanh for the gate",
    "changes",
    "the answers to prompts",
    "in place of sigmoid",
)
assert "tanh (operator 1 of 3) runs only in the target in place of sigmoid" in said
