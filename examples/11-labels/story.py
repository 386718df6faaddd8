"""A library against torch, in a chat loop: labels of both sides, compared task by task."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from story_tools import folder, names, run, write

CHAT = """import torch
from whence.compat.msquickcmp.pta_acl_cmp.compare import gen_id, set_label, set_task_id

torch.manual_seed(0)
weight = torch.randn(16, 8)
for turn in range(3):
    set_task_id()
    hidden = torch.randn(4, 16)
    data_id = gen_id()
    set_label("pta", data_id, hidden @ weight)
    set_label("acl", data_id, hidden @ weight * (1.05 if turn == 1 else 1))
"""
folder()
write("chat.py", CHAT)
names(run('whence ait debug compare aclcmp --exec "python chat.py"'), "FAULT", "task1", "by 1.05")
