"""Operators of one model on two devices, one of which has another GELU."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from story_tools import folder, names, run, write

MODEL = """import sys
import torch
from whence.compat.torch_xray import begin_dump, end_dump

torch.manual_seed(0)
torch.set_num_threads(1)
gelu = torch.nn.GELU(approximate="tanh" if sys.argv[1] == "xpu" else "none")
model = torch.nn.Sequential(torch.nn.Linear(12, 24), gelu, torch.nn.Linear(24, 6))
begin_dump(X_DEBUG=0x102, X_DEDUP=True, X_DUMP_NUM=5)
model(torch.randn(4, 12))
end_dump(clear_context=True)
"""
place = folder()
write("vision.py", MODEL)
dumps = []
for device in ("gpu", "xpu"):
    run(f"python vision.py {device}")
    (made,) = set(place.glob("xray_debug/proc_*")) - set(dumps)
    dumps.append(made)
names(run(f"whence xray check {dumps[0]} {dumps[1]}"), "FAULT", "approximate is none", "tanh")
