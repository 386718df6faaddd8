"""A compiled graph with a scale that its code does not have, against the graph run node by node."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from story_tools import folder, names, run, write

MODEL = """import sys
import torch
import whence.compat.torchair as torchair
from whence.compat.msit_llm.dump import torchair_dump

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(12, 12), torch.nn.Sigmoid(), torch.nn.Linear(12, 4))
if sys.argv[1] == "ge":
    config = torchair_dump.get_ge_dump_config(dump_path="ge")
    from torch._inductor.lowering import lowerings
    aten = torch.ops.aten
    sigmoid, scaled = lowerings[aten.sigmoid.default], lowerings[aten.mul.Tensor]
    lowerings[aten.sigmoid.default] = lambda x: scaled(sigmoid(x), 1.01)
else:
    config = torchair_dump.get_fx_dump_config()
backend = torchair.get_npu_backend(compiler_config=config)
with torch.no_grad():
    torch.compile(model.eval(), backend=backend, dynamic=True)(torch.randn(3, 12))
"""
place = folder()
write("graph.py", MODEL)
run("python graph.py fx")
run("python graph.py ge")
(dump,) = place.glob("ge/dump_*")
said = run(f"whence msit llm compare --my-path {dump} --golden-path data_dump")
names(said, "FAULT", "kernel: the kernel computes something else", "multiplied by 1.01", "sigmoid")
